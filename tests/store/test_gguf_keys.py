"""Each metadata key of a GGUF file is used, has no effect, or is the reason why the file is refused."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import refusal

from lean.store.gguf.architectures import ARCHITECTURES, MIXTRAL
from lean.store.gguf.config import config_fields
from lean.store.gguf.file import GgufFile
from lean.store.gguf.header import GgufTensor

HEADS = {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16}
BASE = {"context_length": 512, "embedding_length": 64, "block_count": 3, "feed_forward_length": 128, **HEADS}
BASE |= {"attention.value_length": 16}
EPSILON = {"attention.layer_norm_rms_epsilon": 1e-5}
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48}
OWN = {
    "qwen2moe": EXPERTS | {"expert_shared_feed_forward_length": 96},
    "qwen3moe": EXPERTS,
    "gemma2": {"attention.sliding_window": 32},
    "gemma3": {"attention.sliding_window": 32, "rope.freq_base": 1e6},
    "gpt-oss": {**EXPERTS, "expert_feed_forward_length": 128, "attention.sliding_window": 32},
    "minimax-m2": {**EXPERTS, "expert_feed_forward_length": 128, "expert_gating_func": 2},
    "gpt2": {"attention.head_count_kv": 4},
}


def gguf(arch, *, tensors=(), general=None, **keys):
    """A header with `{arch}.*` keys (`__` for a point, None to leave one out) and no data."""
    file = Path("tiny.gguf")
    epsilon = EPSILON if ARCHITECTURES[arch].rms else {"attention.layer_norm_epsilon": 1e-5}
    pairs = {**BASE, **epsilon, **OWN.get(arch, {}), **{key.replace("__", "."): keys[key] for key in keys}}
    metadata = {f"{arch}.{key}": value for key, value in pairs.items() if value is not None}
    metadata |= {"general.architecture": arch, "general.type": "model", "general.name": "Tiny", **(general or {})}
    names = ["token_embd.weight", "output_norm.weight", *(f"blk.{i}.attn_norm.weight" for i in range(6)), *tensors]
    held = {name: GgufTensor(name, (264, 64), 0, file, 0, 264 * 64 * 4) for name in names}
    return GgufFile(file, (file,), metadata, held, 0)


def change(file, key, value):
    return replace(file, metadata={**file.metadata, f"{file.metadata['general.architecture']}.{key}": value})


CHANGES = {
    "context_length": 640,
    "embedding_length": 128,
    "block_count": 2,
    "feed_forward_length": 96,
    "vocab_size": 999,
    "attention.head_count": 8,
    "attention.head_count_kv": 1,
    "attention.key_length": 8,
    "attention.value_length": 8,
    "attention.key_length_swa": 8,
    "attention.value_length_swa": 8,
    "attention.scale": 0.5,
    "attention.layer_norm_rms_epsilon": 1e-3,
    "attention.layer_norm_epsilon": 1e-3,
    "attention.sliding_window": 16,
    "attention.sliding_window_pattern": 3,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 5.0,
    "expert_count": 8,
    "expert_used_count": 1,
    "expert_feed_forward_length": 96,
    "expert_shared_feed_forward_length": 32,
    "expert_weights_norm": None,  # the opposite of the architecture's own
    "rope.dimension_count": 8,
    "rope.dimension_count_swa": 8,
    "rope.freq_base": 5000.0,
    "rope.freq_base_swa": 5000.0,
    "rope.scale_linear": 4.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 256,
    "rope.scaling.attn_factor": 2.0,
    "rope.scaling.yarn_attn_factor": 2.0,
    "rope.scaling.yarn_beta_fast": 16.0,
    "rope.scaling.yarn_beta_slow": 2.0,
}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
BESIDE = {
    "rope.scaling.type": {"rope.scaling.factor": 4.0},
    "rope.scaling.original_context_length": YARN,
    "rope.scaling.yarn_beta_fast": YARN,
    "rope.scaling.yarn_beta_slow": YARN,
    "attention.sliding_window_pattern": {"attention.sliding_window": 32},
}


def outcome(file):
    try:
        return config_fields(file)
    except Exception as error:
        return str(error)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_key_that_is_used_changes_the_configuration_or_is_refused(arch):
    base = gguf(arch, tensors=("blk.0.ffn_gate_exps.weight", "blk.0.ffn_gate_shexp.weight"))
    assert isinstance(outcome(base), dict), outcome(base)
    used = [key for key, rule in ARCHITECTURES[arch].rules.items() if rule.used]
    assert {"context_length", "attention.head_count"} <= set(used)
    for key in used:
        file = base
        for other, value in BESIDE.get(key, {}).items():
            file = change(file, other, value)
        value = CHANGES[key]
        if value is None:
            value = not ARCHITECTURES[arch].constants["norm_topk_prob"]
        assert outcome(change(file, key, value)) != outcome(file) or isinstance(outcome(file), str), key


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_other_key_is_refused_by_name_where_its_value_would_change_answers(arch):
    base = gguf(arch, tensors=("blk.0.ffn_gate_exps.weight", "blk.0.ffn_gate_shexp.weight"))
    want = config_fields(base)
    for key, rule in ARCHITECTURES[arch].rules.items():
        if rule.used or (arch, key) == ("llama", "expert_count"):  # a llama file with experts is another model
            continue
        if rule.neutral is None:
            assert config_fields(change(base, key, 7)) == want
            continue
        assert all(config_fields(change(base, key, value)) == want for value in rule.neutral)
        for value in (7, -3.5, "no", [7, 7, 7], float("nan"), []):
            assert f"{arch}.{key}" in refusal(config_fields, change(base, key, value))


def test_a_key_that_lean_does_not_know_refuses_the_file():
    assert "llama.attention.no_such_thing" in refusal(config_fields, gguf("llama", attention__no_such_thing=1))
    assert "rope.freq_base" in refusal(config_fields, gguf("gpt2", rope__freq_base=1e4))


def test_keys_about_the_file_and_keys_of_other_programs_have_no_effect():
    other = {"general.sampling.temp": 0.7, "general.made_up": [1], "quantize.imatrix.file": "x", "vendor.tag": "y"}
    assert config_fields(gguf("llama", general=other)) == config_fields(gguf("llama"))


HOSTILE = ["text", True, -1, 0, 2**40, 1.5, float("nan"), float("inf"), [], [1, 2], ["a"]]


@pytest.mark.parametrize("key", ["context_length", "block_count", "embedding_length", "attention.head_count"])
@pytest.mark.parametrize("value", HOSTILE, ids=str)
def test_an_impossible_count_is_refused_by_name(key, value):
    assert f"llama.{key}" in refusal(config_fields, change(gguf("llama"), key, value))


@pytest.mark.parametrize("key", ["attention.layer_norm_rms_epsilon", "rope.freq_base"])
@pytest.mark.parametrize("value", ["text", True, -1.0, 0.0, float("nan"), float("inf"), [1.0]], ids=str)
def test_an_impossible_number_is_refused_by_name(key, value):
    assert f"llama.{key}" in refusal(config_fields, change(gguf("llama"), key, value))


@pytest.mark.parametrize("key", ["context_length", "block_count", "attention.head_count", "feed_forward_length"])
def test_a_missing_key_is_named(key):
    assert f"llama.{key} is missing" in refusal(config_fields, change(gguf("llama"), key, None))


IMPOSSIBLE = [
    {"attention__head_count": 65},
    {"attention__head_count": 5},
    {"attention__head_count_kv": 3},
    {"attention__key_length": None, "attention__value_length": None, "attention__head_count": 6},
    {"attention__value_length": 8},
    {"block_count": 2000},
    {"rope__dimension_count": 18},
    {"rope__scaling__type": "dynamic"},
    {"rope__scaling__type": "longrope"},
    {"rope__scaling__type": 5},
    {"rope__scaling__type": "yarn", "rope__scaling__factor": 0.5},
    {"rope__scaling__attn_factor": 1.5},
]
IMPOSSIBLE_SCALES = [0.3, 1e-20, 1e-200, 5.0, float("nan")]


@pytest.mark.parametrize("keys", IMPOSSIBLE, ids=str)
def test_an_impossible_combination_is_refused(keys):
    assert "llama." in refusal(config_fields, gguf("llama", **keys))


@pytest.mark.parametrize("scale", IMPOSSIBLE_SCALES, ids=str)
def test_a_query_scale_that_transformers_cannot_have_is_refused(scale):
    assert "gemma2.attention.scale" in refusal(config_fields, gguf("gemma2", attention__scale=scale))


def test_a_count_per_layer_is_served_where_all_are_equal():
    assert config_fields(gguf("llama", attention__head_count_kv=[2, 2, 2])) == config_fields(gguf("llama"))
    assert "head_count_kv" in refusal(config_fields, gguf("llama", attention__head_count_kv=[2, 2, 1]))


@pytest.mark.parametrize(("arch", "layers", "scalar"), [("gemma2", 46, 16), ("gemma3", 62, 16), ("gemma2", 26, 8)])
def test_gemma_27b_is_told_by_its_layers_and_scales_queries_by_the_width_per_head(arch, layers, scalar):
    tensors = [f"t{index}" for index in range(60)]
    keys = {"attention__key_length": 8, "attention__value_length": 8, "block_count": layers}
    assert config_fields(gguf(arch, tensors=tensors, **keys))["query_pre_attn_scalar"] == scalar


def test_the_local_layers_of_gemma3_have_their_own_base_and_no_scaling():
    rope = config_fields(gguf("gemma3", rope__scaling__type="linear", rope__scaling__factor=8.0))["rope_parameters"]
    assert rope["full_attention"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 10_000.0}
    assert (
        config_fields(gguf("gemma3", rope__freq_base_swa=5e3))["rope_parameters"]["sliding_attention"]["rope_theta"]
        == 5e3
    )


def test_the_layers_of_gemma3_keep_their_kinds_where_the_window_is_longer_than_the_context():
    fields = config_fields(gguf("gemma3", attention__sliding_window=1024, block_count=6))
    assert fields["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]
    fields = config_fields(gguf("gemma3", attention__sliding_window=None, block_count=6))
    assert fields["layer_types"] == ["full_attention"] * 6


def test_a_window_as_long_as_the_context_has_no_effect():
    assert config_fields(gguf("qwen2", attention__sliding_window=512)) == config_fields(gguf("qwen2"))
    assert "sliding_window" in refusal(config_fields, gguf("qwen2", attention__sliding_window=511))


def test_a_llama_file_with_a_window_or_with_experts_is_mistral_or_mixtral():
    assert config_fields(gguf("llama"))["model_type"] == "llama"
    assert config_fields(gguf("llama", attention__sliding_window=32))["model_type"] == "mistral"
    experts = {"expert_count": 4, "expert_used_count": 2, "feed_forward_length": 264}
    fields = config_fields(gguf("llama", tensors=("blk.0.ffn_gate_exps.weight",), **experts))
    assert (fields["model_type"], fields["num_local_experts"]) == ("mixtral", 4)
    assert "expert_used_count" in refusal(config_fields, gguf("llama", expert_used_count=2))
    assert MIXTRAL.rules["expert_used_count"].used


@pytest.mark.parametrize("kind", ["bos", "eos", "padding", "eot"])
@pytest.mark.parametrize("value", [264, 2**32 - 1, -1, "2", 1.0, True], ids=str)
def test_a_special_token_beyond_the_vocabulary_is_refused_by_name(kind, value):
    key = f"tokenizer.ggml.{kind}_token_id"
    assert key in refusal(config_fields, gguf("llama", general={key: value}))


def test_more_tokens_than_rows_are_refused():
    message = refusal(config_fields, gguf("llama", general={"tokenizer.ggml.tokens": ["x"] * 265}))
    assert "265 tokens" in message
    assert "vocab_size" in refusal(config_fields, gguf("llama", vocab_size=263))


OTHER_FILES = {
    "mmproj": ({"general.architecture": "clip"}, "projector"),
    "mmproj by type": ({"general.type": "mmproj"}, "projector"),
    "adapter": ({"general.type": "adapter", "adapter.type": "lora"}, "LoRA"),
    "adapter by key": ({"adapter.type": "lora"}, "LoRA"),
    "imatrix": ({"general.type": "imatrix"}, "importance"),
    "control vector": ({"general.architecture": "controlvector"}, "control vector"),
    "other type": ({"general.type": "dataset"}, "dataset"),
    "other architecture": ({"general.architecture": "mamba"}, "gemma3"),
    "no text": ({"general.architecture": 5}, "5"),
}


@pytest.mark.parametrize(("general", "word"), OTHER_FILES.values(), ids=OTHER_FILES)
def test_a_file_that_is_no_language_model_says_what_it_is(general, word):
    assert word in refusal(config_fields, gguf("llama", general=general))


def test_the_readme_lists_the_architectures_that_are_served():
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    line = re.search(r"\*\*GGUF\.\*\* Served are the architectures (.*?);", text, re.DOTALL)
    assert line
    assert re.findall(r"`(.*?)`", line[1]) == list(ARCHITECTURES)


def test_a_file_with_a_vocabulary_alone_says_so():
    assert "vocabulary and no weights" in refusal(config_fields, replace(gguf("llama"), tensors={}))
