"""A model on lean computes transformers' own numbers, or is refused in one line before its weights are read.

Reference: transformers in float32 with eager attention and an explicit attention mask. The tiny models' logits have a
standard deviation of 0.2 and reach 0.8, so the absolute bound `TOLERANCE` is about 1e-5 of the largest.
"""

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from engine_state import forbid_reading_weights
from helpers import refusal
from safetensors.torch import load_file, save_file
from tiny import EOS, KINDS, VOCAB_SIZE, WINDOW, byte_tokenizer, tokens
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from lean import LLM, EngineConfig, SamplingParams
from lean.model.info import inspect_model
from lean.model.load import LoadedModel, load_model
from lean.store.source import resolve

TOLERANCE = 1e-5
TWO_LAYERS = {"num_hidden_layers": 2}


@functools.cache
def loaded(folder: Path) -> LoadedModel:
    return load_model(inspect_model(resolve(str(folder)), EngineConfig(dtype="float32")), torch.device("cpu"))


def start(model: Path | LoadedModel, **config: object) -> LLM:
    model = loaded(model) if isinstance(model, Path) else model
    return LLM(model, EngineConfig(**{"kv_dtype": "fp32", "dtype": "float32", **config}))


def logits(llm: LLM, ids: list[int]) -> torch.Tensor:
    return llm.logits(torch.cat([rows for _, rows in llm.hidden_states(ids)]))


@functools.cache
def reference(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def wanted(folder: Path, ids: list[int]) -> torch.Tensor:
    rows = torch.tensor([ids])
    return reference(folder)(rows, attention_mask=torch.ones_like(rows), use_cache=False).logits[0]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def edited(folder: Path, target: Path, drop: tuple[str, ...] = (), **fields: object) -> Path:
    """A copy of a checkpoint with another config.json."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in drop}
    (target / "config.json").write_text(json.dumps(kept | fields))
    return target


def with_tensors(folder: Path, target: Path, change) -> Path:
    """A copy of a checkpoint whose tensors went through ``change``."""
    shutil.copytree(folder, target)
    save_file(change(load_file(target / "model.safetensors")), target / "model.safetensors", {"format": "pt"})
    return target


@pytest.fixture
def no_weights(monkeypatch):
    """Reading weights is a failure."""
    forbid_reading_weights(monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_scores_equal_transformers_in_chunks_and_step_by_step(tiny, kind):
    ids = tokens(150)  # more than four windows
    want = wanted(tiny(kind), ids)
    assert want.std() > 0.15, "logits too flat to tell right from wrong"
    assert distance(logits(start(tiny(kind), prefill_chunk=37), ids), want) < TOLERANCE
    short = 2 * WINDOW + 6
    assert distance(logits(start(tiny(kind), prefill_chunk=1), ids[:short]), want[:short]) < TOLERANCE
    scores = want[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert distance(start(tiny(kind)).score(ids), scores) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_equals_transformers(tiny, kind):
    ids = tokens(WINDOW + 8, seed=1)
    rows = torch.tensor([ids])
    # lean never draws the rows of the vocabulary that belong to no token.
    options = {"do_sample": False, "max_new_tokens": 20, "suppress_tokens": list(range(259, VOCAB_SIZE))}
    want = reference(tiny(kind)).generate(rows, attention_mask=torch.ones_like(rows), **options)[0, len(ids) :].tolist()
    [got] = start(tiny(kind)).generate([ids], SamplingParams(max_tokens=20))
    assert got.token_ids == want
    assert got.text == byte_tokenizer().decode(want[:-1] if want[-1] == EOS else want, skip_special_tokens=True)


UPPER_HALF = {"use_sliding_window": True, "max_window_layers": 2}
BY_TYPE = {**UPPER_HALF, "layer_types": ["sliding_attention", "full_attention"] * 2}


@pytest.mark.parametrize(
    ("config", "windows"),
    [({"use_sliding_window": False}, [0] * 4), (UPPER_HALF, [0, 0, 16, 16]), (BY_TYPE, [16, 0, 16, 0])],
    ids=["off", "upper half", "layer types win"],
)
def test_qwen2_slides_where_its_configuration_says(tiny, config, windows):
    folder, ids = tiny("qwen2", num_hidden_layers=4, sliding_window=16, **config), tokens(100)
    llm = start(folder, prefill_chunk=37)
    assert [layer.window for layer in llm.model.info.layers] == windows
    assert distance(logits(llm, ids), wanted(folder, ids)) < TOLERANCE


CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 0.3}


@pytest.mark.parametrize("dropped", CAPS)
def test_gemma2_applies_both_soft_caps(tiny, tmp_path, dropped):
    folder, ids = tiny("gemma2", **CAPS, **TWO_LAYERS), tokens(80)
    want = wanted(folder, ids)
    assert distance(logits(start(folder, prefill_chunk=37), ids), want) < TOLERANCE
    without = start(edited(folder, tmp_path / "without", **{dropped: None}))
    assert distance(logits(without, ids), want) > 0.1


@pytest.mark.parametrize("value", [0, 0.0, -2.0, float("inf"), float("nan"), True, "30"])
@pytest.mark.parametrize("cap", CAPS)
def test_a_soft_cap_that_caps_nothing_is_refused(tiny, tmp_path, no_weights, cap, value):
    folder = edited(tiny("gemma2", **CAPS, **TWO_LAYERS), tmp_path / "wrong", **{cap: value})
    assert cap in refusal(LLM, str(folder))


# Mean KL divergence from the exact cache; a cache that holds zeros gives 3.5e-3 (head_dim 16) to 2e-2.
BANDS = {"fp64": 1e-12, "fp16": 5e-9, "bf16": 4e-7, "int8": 5e-6, "fp8": 1e-4, "k8v4": 4e-4, "int4": 1e-3}


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256])
def test_every_format_serves_every_head_dim(tiny, head_dim):
    folder = tiny("llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=head_dim)
    ids = tokens(40)
    assert distance(logits(start(folder), ids), wanted(folder, ids)) < TOLERANCE
    p = wanted(folder, ids).double().log_softmax(-1)
    klds = []
    for kv_dtype, band in BANDS.items():
        residual = None if kv_dtype in ("fp64", "fp16", "bf16") else 0
        llm = start(folder, kv_dtype=kv_dtype, kv_residual_length=residual, prefill_chunk=16)
        klds.append((p.exp() * (p - logits(llm, ids).double().log_softmax(-1))).sum(-1).mean().item())
        assert klds[-1] < band, f"{kv_dtype}: {klds[-1]:.2e}"
    assert klds == sorted(klds), "a coarser format must lose more"


def test_a_head_dim_that_a_format_cannot_hold_is_refused_before_the_weights(tiny, request):
    folder, ids = tiny("llama", head_dim=20, **TWO_LAYERS), tokens(40)
    assert distance(logits(start(folder), ids), wanted(folder, ids)) < TOLERANCE
    request.getfixturevalue("no_weights")
    for kv_dtype in ("int8", "fp8", "int4", "k8v4"):
        assert "head_dim 20" in refusal(LLM, str(folder), EngineConfig(kv_dtype=kv_dtype))


SMALL_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16, **TWO_LAYERS}


def test_values_may_be_narrower_than_keys(tiny):
    config = {"n_routed_experts": 4, "layer_types": ["sliding_attention", "full_attention"], **SMALL_EXPERTS}
    folder = tiny("mimo_v2_flash", **{**config, "head_dim": 24, "v_head_dim": 16, "sliding_window": WINDOW})
    assert distance(logits(start(folder), tokens(80)), wanted(folder, tokens(80))) < TOLERANCE


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
def test_router_weights_are_normalised_only_where_the_configuration_says(tiny, kind):
    ids, results = tokens(60), []
    for norm in (True, False):
        folder = tiny(kind, norm_topk_prob=norm, shared_expert_intermediate_size=32, **SMALL_EXPERTS)
        results.append(logits(start(folder, prefill_chunk=37), ids))
        assert distance(results[-1], wanted(folder, ids)) < TOLERANCE
    assert distance(*results) > 100 * TOLERANCE


def test_configurations_of_transformers_4_and_5_give_the_same_bits(tiny, tmp_path):
    new, ids = tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e5}, **TWO_LAYERS), tokens(100)
    old = edited(new, tmp_path / "old", ("rope_parameters", "dtype"), rope_theta=1e5, torch_dtype="float32")
    engines = [LLM(str(folder), EngineConfig(kv_dtype="fp32")) for folder in (new, old)]
    assert [llm.model.info.dtype for llm in engines] == [torch.float32] * 2
    assert torch.equal(*(logits(llm, ids) for llm in engines))
    assert distance(wanted(tiny("llama", **TWO_LAYERS), ids), logits(engines[0], ids)) > 0.01


def test_query_key_and_value_biases_count(tiny, tmp_path):
    folder, ids = tiny("qwen2"), tokens(80)
    for name in ("q_proj.bias", "k_proj.bias", "v_proj.bias"):
        zeros = {k: torch.zeros_like(t) for k, t in load_file(folder / "model.safetensors").items() if name in k}
        without = with_tensors(folder, tmp_path / name, lambda ts, zeros=zeros: ts | zeros)
        assert distance(logits(start(without), ids), wanted(folder, ids)) > 0.01


def test_a_missing_norm_is_refused_by_name(tiny, tmp_path):
    name = "model.layers.1.self_attn.q_norm.weight"
    folder = with_tensors(tiny("qwen3"), tmp_path / "cut", lambda ts: {k: t for k, t in ts.items() if k != name})
    assert name in refusal(LLM, str(folder))


def test_tensors_that_nobody_reads_are_named_in_one_warning(tiny, tmp_path, caplog):
    scales = {f"model.layers.0.self_attn.{part}_scale": torch.tensor(20.0) for part in "kv"}
    folder, ids = with_tensors(tiny("llama"), tmp_path / "scaled", lambda ts: ts | scales), tokens(40)
    llm = start(folder)
    [warning] = [record.getMessage() for record in caplog.records if record.name == "lean"]
    assert all(name in warning for name in scales)
    assert torch.equal(logits(llm, ids), logits(start(tiny("llama")), ids))


SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
M_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}


REFUSED = [
    ("t5", {"d_model": 64, "num_layers": 2, "num_heads": 4}, "encoder-decoder"),
    ("mamba", {"hidden_size": 64, "num_hidden_layers": 2}, "no position ids"),
    ("recurrent_gemma", {**SMALL, "lru_width": 64}, "none of its layers calls"),
    (
        "jamba",
        {**SMALL, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_key_value_heads": 2},
        "forgets its recurrent state",
    ),
    ("qwen2_vl", {"text_config": {**SMALL, "rope_parameters": M_ROPE}}, "whose text model is qwen2_vl_text"),
    ("deepseek_v32", {}, "indexed_attention"),
    ("llama4_text", {}, "chunked"),
    ("gemma3_text", {**SMALL, "use_bidirectional_attention": True}, "bidirectional"),
    ("bert", SMALL, "bidirectional"),
    ("bloom", {"hidden_size": 64, "n_layer": 2}, "no position ids"),
    ("falcon", {**SMALL, "new_decoder_architecture": False}, "custom attention functions"),
    ("bart", {"d_model": 64, "decoder_layers": 2, "is_encoder_decoder": False, "is_decoder": True}, "no position ids"),
    ("roberta", {**SMALL, "is_decoder": True}, "positions that begin behind padding"),
]


@pytest.mark.parametrize(("model_type", "config", "reason"), REFUSED)
def test_other_kinds_are_refused_before_their_weights_are_read(tmp_path, no_weights, model_type, config, reason):
    CONFIG_MAPPING[model_type](**config).save_pretrained(tmp_path)
    save_file({"some.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    byte_tokenizer().save_pretrained(tmp_path)
    assert reason in refusal(LLM, str(tmp_path))


def test_a_model_that_does_not_attend_once_per_layer_through_lean_is_refused(tiny, no_weights):
    """diffllama attends twice, and the second K/V would replace the first."""
    assert "layer 0 calls attention 2" in refusal(LLM, str(tiny("diffllama", **TWO_LAYERS)))
