"""Rotary angles are position times the model's own frequency in float64, laid out as the model expects them."""

import functools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from engine_state import positions_from
from helpers import refusal
from tiny import tokens
from transformers import AutoModelForCausalLM

from lean import LLM, EngineConfig
from lean.model import rotary
from lean.model.info import inspect_model
from lean.model.load import LoadedModel, load_model
from lean.store.source import resolve

FAR = 5_000_000
TWO_LAYERS = {"num_hidden_layers": 2}
LOCAL_AND_GLOBAL = {**TWO_LAYERS, "layer_types": ["sliding_attention", "full_attention"]}
KINDS = {
    "llama": TWO_LAYERS,
    "phi3": {**TWO_LAYERS, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "gemma3": LOCAL_AND_GLOBAL,
    "gpt_oss": TWO_LAYERS,
    "cohere": TWO_LAYERS,
    "olmo2": TWO_LAYERS,
}
AT_64 = {"original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **AT_64}
LINEAR, YARN = {"rope_type": "linear", "factor": 8.0}, {"rope_type": "yarn", "factor": 8.0, **AT_64}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, **AT_64}


def read(folder: Path, dtype: str) -> LoadedModel:
    info = inspect_model(resolve(str(folder)), EngineConfig(dtype=dtype))
    return load_model(info, torch.device("cpu"), True)  # experts one by one


def start(model: Path | LoadedModel, dtype: str = "float32", **config: object) -> LLM:
    model = read(model, dtype) if isinstance(model, Path) else model
    return LLM(model, EngineConfig(**{"kv_dtype": "auto", "dtype": dtype, "prefill_chunk": 37, **config}))


def logits(llm: LLM, ids: list[int]) -> torch.Tensor:
    return llm.logits(torch.cat([rows for _, rows in llm.hidden_states(ids)]))


@torch.inference_mode()
def wanted(folder: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return model(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), use_cache=False).logits[0]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.fixture(scope="session")
def models(tiny):
    """float64 models by kind, served by one engine each."""
    return functools.cache(lambda kind: start(tiny(kind, **KINDS[kind]), "float64"))


def tables(llm: LLM) -> list[tuple[torch.nn.Module, str | None]]:
    modules = rotary.rotary_modules(llm.model.module)
    return [(module, kind) for module in modules for kind in rotary.layer_types(module)]


def angles(module: torch.nn.Module, kind: str | None, position: int, dtype: torch.dtype) -> tuple:
    """(cos, sin), each [values], at one position."""
    extra = () if kind is None else (kind,)
    return tuple(x[0, 0] for x in module(torch.zeros(1, dtype=dtype), torch.tensor([[position]]), *extra))


@pytest.mark.parametrize("kind", KINDS)
def test_attention_at_position_five_million_equals_attention_near_the_start(models, kind):
    llm, ids, results = models(kind), tokens(50), []
    for offset in (5_000, FAR):
        with positions_from(llm, offset):
            results.append(logits(llm, ids))
    assert distance(*results) < 1e-6


def test_the_float32_angles_of_transformers_fail_at_position_five_million(tiny, models):
    llm = start(tiny("llama", **TWO_LAYERS), "float64")
    [(module, _)] = tables(llm)
    ours = angles(module, None, FAR, torch.float64)
    del module.forward  # lean's
    assert distance(torch.cat(angles(module, None, FAR, torch.float64)), torch.cat(ours)) > 0.01
    results = []
    for offset in (5_000, FAR):
        with positions_from(llm, offset):
            results.append(logits(llm, tokens(50)))
    assert distance(*results) > 1e-3


@pytest.mark.parametrize("position", [0, 1, 4096, FAR])
@pytest.mark.parametrize("kind", KINDS)
def test_angles_equal_the_formula_in_float64(models, kind, position):
    llm = models(kind)
    layout = {"cohere": "pairs", "gpt_oss": "bare"}.get(kind, "halves")
    for module, layer_type in tables(llm):
        prefix = "" if layer_type is None else f"{layer_type}_"
        frequencies = getattr(module, f"{prefix}inv_freq").tolist()
        scaling = getattr(module, f"{prefix}attention_scaling")
        spread = {
            "halves": [*frequencies, *frequencies],
            "pairs": [f for f in frequencies for _ in range(2)],
            "bare": frequencies,
        }[layout]
        cos, sin = angles(module, layer_type, position, torch.float64)
        assert cos.tolist() == pytest.approx([math.cos(position * f) * scaling for f in spread], rel=0, abs=1e-14)
        assert sin.tolist() == pytest.approx([math.sin(position * f) * scaling for f in spread], rel=0, abs=1e-14)


def test_frequencies_are_powers_of_theta_and_layer_types_have_their_own(models):
    for kind, thetas in {"llama": {None: 1e4}, "gemma3": {"full_attention": 1e6, "sliding_attention": 1e4}}.items():
        for module, layer_type in tables(models(kind)):
            inv_freq, scaling = rotary.frequencies(module, layer_type, 512)
            dim = 2 * inv_freq.numel()
            want = [thetas[layer_type] ** (-2 * i / dim) for i in range(dim // 2)]
            assert inv_freq.tolist() == pytest.approx(want, rel=1e-6)
            assert (inv_freq.dtype, scaling) == (torch.float64, 1.0)


def test_yarn_scales_cosine_and_sine(models):
    [(module, kind)] = tables(models("gpt_oss"))
    cos, _ = angles(module, kind, 0, torch.float64)
    assert module.attention_scaling > 1.3
    assert cos.tolist() == pytest.approx([module.attention_scaling] * cos.numel())


@pytest.mark.parametrize(("kind", "narrow"), [("llama", torch.bfloat16), ("olmo2", torch.float32)])
def test_cosine_and_sine_come_in_the_dtype_that_the_model_computes_with(models, kind, narrow):
    """olmo2 rotates in float32 for every dtype of the activations, and lean must keep that."""
    [(module, _)] = tables(models(kind))
    for dtype, want in ((torch.bfloat16, narrow), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        assert {x.dtype for x in angles(module, None, 3, dtype)} == {want}


GLOBAL_LINEAR = {"full_attention": {"rope_theta": 1e6, **LINEAR}, "sliding_attention": {"rope_theta": 1e4}}
ROPES = {name: {"rope_theta": 1e4, **rope} for name, rope in {"linear": LINEAR, "llama3": LLAMA3, "yarn": YARN}.items()}
PARTS = {f"part {part}": {"rope_theta": 1e4, "partial_rotary_factor": part} for part in (0.5, 0.75)}
CASES = [("llama", name, TWO_LAYERS, rope) for name, rope in ROPES.items()]
CASES += [("phi3", name, TWO_LAYERS, rope) for name, rope in PARTS.items()]
CASES += [("gemma3", "linear in global layers only", LOCAL_AND_GLOBAL, GLOBAL_LINEAR)]


@pytest.mark.parametrize(("kind", "rope", "config"), [pytest.param(k, r, c, id=f"{k} {n}") for k, n, c, r in CASES])
def test_every_kind_of_rotary_equals_transformers(tiny, kind, rope, config):
    folder, ids = tiny(kind, rope_parameters=rope, **config), tokens(150)
    want = wanted(folder, ids)
    assert distance(logits(start(folder), ids), want) < 1e-5
    assert distance(wanted(tiny(kind, **config), ids), want) > 0.01


@pytest.mark.parametrize("kind", ["cohere", "olmo2"])
def test_other_layouts_equal_transformers(tiny, kind):
    folder, ids = tiny(kind, **TWO_LAYERS), tokens(80)
    assert distance(logits(start(folder), ids), wanted(folder, ids)) < 1e-5


def longrope(tiny) -> Path:
    return tiny("phi3", rope_parameters={"rope_theta": 1e4, **LONGROPE}, **AT_64, **TWO_LAYERS)


@pytest.mark.parametrize("length", [64, 65])
def test_longrope_takes_the_factors_for_max_model_len_and_says_so(tiny, length):
    folder, ids = longrope(tiny), tokens(length)
    llm = start(folder, max_model_len=length)
    assert distance(logits(llm, ids), wanted(folder, ids)) < 1e-5
    assert any("longrope" in note and str(length) in note for note in llm.notes)


def test_an_engine_that_shares_the_model_says_what_was_fixed_too(tiny):
    llm = start(longrope(tiny), max_model_len=64)
    assert any("longrope" in note for note in start(llm.model, max_model_len=64).notes)


def test_a_shared_model_keeps_the_frequencies_it_was_given(tiny):
    llm = start(longrope(tiny), max_model_len=64)
    before = logits(llm, tokens(60))
    assert "load the model again" in refusal(start, llm.model, max_model_len=65)
    assert torch.equal(logits(llm, tokens(60)), before)
    assert torch.equal(logits(start(llm.model, max_model_len=50), tokens(50)), before[:50])


def test_dynamic_frequencies_are_fixed_at_load_and_that_is_said(tiny):
    folder = tiny("llama", rope_parameters={"rope_theta": 1e4, **DYNAMIC}, max_position_embeddings=128, **TWO_LAYERS)
    llm, ids = start(folder, max_model_len=100), tokens(100)
    assert distance(logits(llm, ids), wanted(folder, ids)) < 1e-5
    assert any("dynamic" in note for note in llm.notes)


def test_dynamic_frequencies_reach_beyond_the_length_of_the_original(tiny):
    folder = tiny("llama", rope_parameters={"rope_theta": 1e4, **DYNAMIC}, max_position_embeddings=128, **TWO_LAYERS)
    ids = tokens(200)
    assert distance(logits(start(folder, max_model_len=200), ids), wanted(folder, ids)) < 1e-5


def test_a_configuration_without_frequencies_is_not_taken_in_silence(tiny, tmp_path, caplog):
    folder = shutil.copytree(tiny("llama", **TWO_LAYERS), tmp_path / "bare")
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters")
    (folder / "config.json").write_text(json.dumps(config))
    llm = start(folder)
    said = [*llm.notes, *(record.getMessage() for record in caplog.records if record.name == "lean")]
    assert any("rope" in line and "10000" in line for line in said)


def test_installing_twice_changes_nothing(models):
    llm = models("gemma3")
    forwards = [module.forward for module in rotary.rotary_modules(llm.model.module)]
    assert rotary.install(llm.model.module, 512) == []
    assert [module.forward for module in rotary.rotary_modules(llm.model.module)] == forwards


@pytest.mark.parametrize("wrong", [lambda f, x: f.cos(), lambda f, x: 1 / 0, lambda f, x: f.repeat(1, 1, 3).cos()])
def test_a_layout_that_lean_does_not_know_is_refused(tiny, wrong, monkeypatch):
    model = read(tiny("llama", **TWO_LAYERS), "float32")
    [module] = rotary.rotary_modules(model.module)

    def forward(own, x, positions):
        cos = wrong(positions[..., None] * own.inv_freq.flip(0), x).to(x.dtype)
        return cos, (positions[..., None] * own.inv_freq).sin().to(x.dtype)

    monkeypatch.setattr(type(module), "forward", forward)
    assert "RotaryEmbedding" in refusal(start, model)


def test_a_gpu_that_multiplies_in_tf32_does_not_change_what_the_layout_is(tiny):
    """TF32 keeps 10 bits. TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 turns it on for every product on the GPU."""
    model = read(tiny("llama", **TWO_LAYERS), "float32")
    [module] = rotary.rotary_modules(model.module)
    coarse = type(module)

    class OnGpu(coarse):
        """Its products are as coarse as TF32 until it is moved to the CPU."""

        on_gpu = True

        def _apply(self, fn, recurse=True):
            self.on_gpu = False
            return super()._apply(fn, recurse)

        def forward(self, x, position_ids):
            exact = self.inv_freq
            if self.on_gpu:
                self.inv_freq = (exact.view(torch.int32) & ~0x1FFF).view(torch.float32)
            found = super().forward(x, position_ids)
            self.inv_freq = exact
            return found

    module.__class__ = OnGpu
    module.__class__.__name__ = coarse.__name__
    rotary.install(model.module, 64)
    assert module.lean_layouts[None].name == "halves"
    assert module.on_gpu, "the model's own module must stay where it is"
