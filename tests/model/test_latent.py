"""Latent attention with K and V left latent equals transformers' own modules, which expand them."""

import copy
from typing import Any

import pytest
import torch
from census_models import randomise, small_config
from tiny import tokens
from transformers import AttentionInterface, AutoModelForCausalLM

from lean.model import latent
from lean.model.latent import LatentProjection

FAMILIES = (
    "axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v2+no-query-rank", "deepseek_v3", "glm4_moe_lite",
    "kimi_linear", "longcat_flash", "minicpm3", "sarvam_mla", "youtu",
)  # fmt: skip


def dense_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention by its formula, over latent vectors where the module keeps them."""
    product = module.kv_b_proj
    is_latent = isinstance(product, LatentProjection)
    if is_latent:
        query = product.absorb(query[0].transpose(0, 1)).transpose(0, 1)[None]
    group, count = query.shape[1] // key.shape[1], query.shape[2]
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
    future = torch.ones(count, count).triu(1).bool()
    p = scores.masked_fill(future, -torch.inf).softmax(-1)
    out = (p @ value.repeat_interleave(group, 1))[0].transpose(0, 1)
    return (product.expand(out) if is_latent else out)[None], None


def random_model(name: str) -> torch.nn.Module:
    AttentionInterface.register("dense", dense_attention)
    torch.manual_seed(0)
    config = small_config(name)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="dense", dtype=torch.float32)
    randomise(model, torch.Generator().manual_seed(0))
    return model.eval()


def modules_of(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "expand_kv")]


@torch.no_grad()
def own_calls(model: torch.nn.Module) -> list[tuple[Any, tuple, dict[str, Any], torch.Tensor]]:
    """(module, its arguments, its outcome) of every latent attention module in one forward pass."""
    calls = []

    def note(module: Any, args: tuple, kwargs: dict[str, Any], out: tuple[torch.Tensor, Any]) -> None:
        calls.append((module, args, kwargs, out[0]))

    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in modules_of(model)]
    model(input_ids=torch.tensor([tokens(40)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls


@pytest.mark.parametrize("head_by_head", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_every_family_equals_its_own_module(name: str, head_by_head: bool) -> None:
    model = random_model(name)
    calls = own_calls(model)
    assert calls
    assert latent.install(model, head_by_head)
    for module, args, kwargs, wanted in calls:
        found = module(*args, **kwargs)[0]
        assert (found - wanted).abs().max() < 1e-5 * max(1.0, wanted.abs().max())
        assert module.kv_b_proj.head_by_head is head_by_head


@torch.no_grad()
def test_the_attention_function_sees_one_vector_a_token_and_the_weights_are_those_of_the_checkpoint() -> None:
    model = random_model("deepseek_v3")
    skeleton = random_model("deepseek_v3").to("meta")
    names = {name: parameter.shape for name, parameter in skeleton.named_parameters()}
    assert latent.install(skeleton)
    assert {name: parameter.shape for name, parameter in skeleton.named_parameters()} == names
    sizes = [sum(parameter.numel() for parameter in module.parameters()) for module in modules_of(model)]
    assert latent.install(model)
    assert [sum(parameter.numel() for parameter in module.parameters()) for module in modules_of(model)] == sizes
    seen = []

    def note(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any) -> Any:
        seen.append((query.shape, key.shape, value.shape, torch.equal(key[..., : value.shape[-1]], value)))
        return dense_attention(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("dense", note)
    model(input_ids=torch.tensor([tokens(7)]), use_cache=False)
    assert seen == [((1, 4, 7, 24), (1, 1, 7, 40), (1, 1, 7, 32), True)] * 4


@pytest.mark.parametrize("change", ["values", "an error", "a bias", "another class", "a size"])
def test_a_module_that_is_not_understood_leaves_the_whole_model_as_it_is(change: str) -> None:
    model = random_model("deepseek_v3")
    module = modules_of(model)[0]
    if change in ("values", "an error"):

        class Other(type(module)):  # type: ignore[misc]
            def expand_kv(self, latent_: torch.Tensor, rotated: torch.Tensor) -> Any:
                if change == "an error":
                    raise RuntimeError("in its own way")
                key, value = super().expand_kv(latent_, rotated)
                return key, 1.5 * value

        module.__class__ = Other
    elif change == "a bias":
        module.kv_b_proj.bias = torch.nn.Parameter(torch.zeros(module.kv_b_proj.out_features))
    elif change == "another class":
        module.kv_b_proj.__class__ = type("QuantizedLinear", (torch.nn.Linear,), {})
    else:
        module.v_head_dim += 1
    assert not latent.install(model)
    assert not any(isinstance(part, LatentProjection) for part in model.modules())
    assert all("expand_kv" not in vars(part) for part in model.modules())


def test_a_model_without_latent_attention_is_none() -> None:
    assert not latent.install(torch.nn.Linear(2, 2))
