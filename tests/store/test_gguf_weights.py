"""A GGUF file gives the log-probabilities of the safetensors that it was made from, or is refused by name."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_files import write_gguf
from helpers import refusal
from tiny import tokens
from transformers import AutoModelForCausalLM

from lean.store.gguf.config import transformers_config
from lean.store.gguf.file import read_gguf
from lean.store.gguf.header import GgufTensor
from lean.store.gguf.tensors import dequantize
from lean.store.gguf.weights import load_weights, read_model, unused_notes

IDS = torch.tensor([tokens(80)])
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SHORT = {"num_hidden_layers": 2}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
LONGROPE |= {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.5 + i for i in range(8)]}
LONGROPE |= {"attention_factor": 1.2, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
GEMMA_ROPES = {"full_attention": {**LINEAR, "rope_theta": 1e6}, "sliding_attention": {"rope_type": "default"}}
GEMMA_ROPES["sliding_attention"]["rope_theta"] = 5000.0
CHECKPOINTS = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 32}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen2": ("qwen2", {}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 96}),
    "qwen3": ("qwen3", {}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "phi3": ("phi3", {}),
    "phi3, longrope": ("phi3", {"rope_parameters": LONGROPE}),
    "phi3, window": ("phi3", {"sliding_window": 32}),
    "phi3, part of a head": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | {"partial_rotary_factor": 0.75}},
    ),
    "gemma2": ("gemma2", {}),
    "gemma2, soft caps": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("gemma3", {}),
    "gemma3, ropes": ("gemma3", {"rope_parameters": GEMMA_ROPES}),
    "gemma3, final cap": ("gemma3", {"final_logit_softcapping": 5.0}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2, window": ("starcoder2", {"sliding_window": 32}),
    "nemotron": ("nemotron", {"head_dim": 16}),
    "gpt_oss": ("gpt_oss", {}),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    "gpt2": ("gpt2", {"n_positions": 512}),
}


def checkpoint(tiny, name):
    kind, config = CHECKPOINTS[name]
    return tiny(kind, **({} if kind == "gemma3" else SHORT), **config)


def logprobs(module):
    with torch.no_grad():
        return module.eval()(IDS).logits.log_softmax(-1)


def served(file):
    gguf = read_gguf(file)
    config = transformers_config(gguf)
    return logprobs(load_weights(read_model(gguf, config), config, torch.float32, attn_implementation="eager"))


def reference(folder, **config):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **config)
    return logprobs(model)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_log_probabilities_are_those_of_the_safetensors(tiny, tmp_path, name):
    folder = checkpoint(tiny, name)
    assert torch.equal(served(write_gguf(folder, tmp_path / "tiny.gguf")), reference(folder))


def refused(file):
    gguf = read_gguf(file)
    read_model(gguf, transformers_config(gguf))


FREQS = np.array([1, 1, 1.5, 2, 4, 8, 8, 8], np.float32)


def test_the_rotary_factors_of_a_llama_file_divide_its_frequencies(tiny, tmp_path):
    folder = checkpoint(tiny, "llama")
    plain = served(write_gguf(folder, tmp_path / "plain.gguf"))
    file = write_gguf(folder, tmp_path / "tiny.gguf", tensors={"rope_freqs.weight": FREQS})
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    module.model.rotary_emb.inv_freq.div_(torch.from_numpy(FREQS))
    got, want = served(file), logprobs(module)
    assert (got - want).abs().max() <= 1e-5  # (factor x base**i) and base**i / factor round differently
    assert (got - plain).abs().max() > 0.01
    ones = write_gguf(folder, tmp_path / "ones.gguf", tensors={"rope_freqs.weight": np.ones(8, np.float32)})
    assert torch.equal(served(ones), plain)


def test_the_factors_of_llama_3_give_the_rotation_of_llama_3(tiny, tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    folder = tiny("llama", **SHORT, rope_parameters=rope)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    plain = 10000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    factors = (plain / module.model.rotary_emb.inv_freq.double()).float().numpy()
    assert factors.max() > 7
    file = write_gguf(folder, tmp_path / "tiny.gguf", tensors={"rope_freqs.weight": factors})
    assert (served(file) - logprobs(module)).abs().max() <= 1e-4  # the factors are rounded to float32


@pytest.mark.parametrize("arch", ["qwen2", "gemma3", "phi3"])
def test_rotary_factors_are_refused_where_the_architecture_has_none(tiny, tmp_path, arch):
    file = write_gguf(checkpoint(tiny, arch), tmp_path / "tiny.gguf", tensors={"rope_freqs.weight": FREQS})
    assert "rope_freqs.weight" in refusal(refused, file)


BAD_FACTORS = [np.ones(7, np.float32), np.array([1, 1, 1, 1, 1, 1, 1, np.nan], np.float32), np.zeros(8, np.float32)]


@pytest.mark.parametrize("factors", [*BAD_FACTORS, np.ones((2, 8), np.float32)], ids=str)
def test_impossible_rotary_factors_are_refused(tiny, tmp_path, factors):
    file = write_gguf(checkpoint(tiny, "llama"), tmp_path / "tiny.gguf", tensors={"rope_freqs.weight": factors})
    assert "rope_freqs.weight" in refusal(refused, file)


def test_the_query_scale_of_a_gemma_file_is_used(tiny, tmp_path):
    folder = tiny("gemma2", **SHORT, query_pre_attn_scalar=64)
    file = write_gguf(folder, tmp_path / "tiny.gguf", keys={".attention.scale": 0.125})
    assert torch.equal(served(file), reference(folder))


@pytest.mark.parametrize(
    "kind",
    [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.BF16],
    ids=lambda kind: kind.name,
)
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_quantized_tensors_are_those_of_the_gguf_package(tiny, tmp_path, monkeypatch, name, kind):
    monkeypatch.setattr("lean.store.gguf.tensors.CHUNK", 640)  # ten rows at a time
    file = read_gguf(write_gguf(checkpoint(tiny, name), tmp_path / "tiny.gguf", quantization=kind))
    from gguf import GGUFReader
    from gguf import dequantize as whole

    for tensor in GGUFReader(file.path).tensors:
        got = dequantize(file.tensors[tensor.name], torch.float32)
        assert torch.equal(got, torch.from_numpy(whole(tensor.data, tensor.tensor_type).copy()).reshape(got.shape))
    assert torch.isfinite(served(file.path)).all()


def test_numbers_of_64_bits_keep_their_bits(tmp_path):
    file = tmp_path / "x"
    values = np.array([[0.1, 1 / 3]])
    file.write_bytes(values.tobytes())
    assert torch.equal(dequantize(GgufTensor("t", (1, 2), 28, file, 0, 16), torch.float64), torch.from_numpy(values))


UNUSED = ["blk.0.attn_q.scale", "blk.0.attn_q_norm.weight", "blk.9.attn_q.weight", "blk.0.attn_sub_norm.weight", "x"]


@pytest.mark.parametrize("name", UNUSED)
def test_a_tensor_without_use_is_refused_by_name(tiny, tmp_path, name):
    file = write_gguf(checkpoint(tiny, "llama"), tmp_path / "tiny.gguf", tensors={name: np.ones(16, np.float32)})
    assert name in refusal(refused, file)


def test_biases_of_the_queries_alone_are_served(tiny, tmp_path):
    folder = checkpoint(tiny, "llama")
    bias = np.linspace(-1, 1, 64, dtype=np.float32)
    biases = {f"blk.{layer}.attn_q.bias": bias for layer in range(2)}
    got = served(write_gguf(folder, tmp_path / "tiny.gguf", tensors=biases))
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    halves = torch.from_numpy(bias).reshape(4, 8, 2).transpose(1, 2).flatten()
    for layer in module.model.layers:
        layer.self_attn.q_proj.bias = torch.nn.Parameter(halves)
    assert torch.equal(got, logprobs(module))
    part = write_gguf(folder, tmp_path / "part.gguf", tensors={"blk.0.attn_q.bias": bias})
    assert "blk.1.attn_q.bias" in refusal(refused, part)


def test_frequencies_of_old_files_are_named_and_not_used(tiny, tmp_path):
    old = {"blk.0.attn_rot_embd.weight": np.ones(8, np.float32)}
    file = write_gguf(checkpoint(tiny, "llama"), tmp_path / "tiny.gguf", tensors=old)
    refused(file)
    assert "blk.0.attn_rot_embd.weight" in unused_notes(read_gguf(file).tensors)[0]


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.ffn_down.weight"])
def test_a_missing_tensor_is_named(tiny, tmp_path, name):
    file = write_gguf(checkpoint(tiny, "llama"), tmp_path / "tiny.gguf", tensors={name: None})
    assert name in refusal(refused, file)


@pytest.mark.parametrize("shape", [(64, 32), (128, 128), (128,), (1, 128, 64)])
def test_a_tensor_of_another_shape_than_the_metadata_says_is_refused(tiny, tmp_path, shape):
    tensors = {"blk.1.ffn_up.weight": np.ones(shape, np.float32)}
    file = write_gguf(checkpoint(tiny, "llama"), tmp_path / "tiny.gguf", tensors=tensors)
    assert "blk.1.ffn_up.weight" in refusal(refused, file)


def test_a_tensor_of_whole_numbers_is_refused_by_name(tiny, tmp_path):
    tensors = {"output_norm.weight": np.ones(64, np.int32)}
    message = refusal(refused, write_gguf(checkpoint(tiny, "llama"), tmp_path / "tiny.gguf", tensors=tensors))
    assert all(word in message for word in ("output_norm.weight", "I32", "gguf"))


def test_a_file_that_became_shorter_is_an_error(tiny, tmp_path):
    file = write_gguf(checkpoint(tiny, "llama"), tmp_path / "tiny.gguf")
    gguf = read_gguf(file)
    config = transformers_config(gguf)
    model = read_model(gguf, config)
    file.write_bytes(file.read_bytes()[:-4096])
    message = refusal(load_weights, model, config, torch.float32)
    assert "shorter" in message
    gone = replace(next(iter(gguf.tensors.values())), file=tmp_path / "gone")
    assert "cannot read" in refusal(dequantize, gone, torch.float32)
