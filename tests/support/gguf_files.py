"""GGUF files of tiny checkpoints, written as llama.cpp's `convert_hf_to_gguf.py` does, with gguf's own tensor names."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

# transformers' model_type -> gguf's name of the architecture
ARCHS = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "starcoder2": "starcoder2",
    "nemotron": "nemotron",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
    "gpt2": "gpt2",
}
LAYER_NORM = {"starcoder2": "norm_epsilon", "nemotron": "norm_eps", "gpt2": "layer_norm_epsilon"}
PLUS_ONE = ("gemma2", "gemma3_text", "nemotron")


def write_gguf(
    folder: Path,
    file: Path,
    *,
    keys: dict | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
    quantization: GGMLQuantizationType | None = None,
) -> Path:
    """Write a checkpoint folder as one GGUF file.

    Args:
        keys: pairs to add or, with None, to leave out; a name that begins with a point belongs to the architecture.
        tensors: tensors to add or, with None, to leave out.
        quantization: of the matrices of the layers.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    arch = ARCHS[config.model_type]
    if arch not in MODEL_ARCH_NAMES.values():
        pytest.skip(f"the installed gguf does not know {arch}")
    pairs = {f"{arch}.{key}": value for key, value in architecture_keys(config).items()}
    pairs |= tokenizer_keys(PreTrainedTokenizerFast.from_pretrained(folder), config)
    pairs |= {f"{arch}{key}" if key.startswith(".") else key: value for key, value in (keys or {}).items()}
    written = gguf_tensors(model) | (tensors or {})
    write_pairs(file, arch, pairs, written, quantization)
    return file


def write_pairs(file, arch, pairs, tensors, quantization=None):
    writer = GGUFWriter(file, arch)
    for key, value in pairs.items():
        if value is None:
            continue
        if isinstance(value, tuple):  # with its type
            writer.add_key_value(key, *value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            add = {bool: writer.add_bool, str: writer.add_string, float: writer.add_float32}
            add.get(type(value), writer.add_uint32 if type(value) is int and value >= 0 else writer.add_int32)(
                key, value
            )
    for name, array in tensors.items():
        if array is None:
            continue
        array = np.ascontiguousarray(array)
        if quantization and name.startswith("blk.") and array.ndim > 1 and "norm" not in name:
            writer.add_tensor(name, quants.quantize(array, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def architecture_keys(config) -> dict:
    """What the converter writes about the computation, without the prefix of the architecture."""
    model_type = config.model_type
    heads = config.num_attention_heads
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": heads,
    }
    if model_type != "gpt2":
        keys["attention.head_count_kv"] = config.num_key_value_heads
    if model_type in LAYER_NORM:
        keys["attention.layer_norm_epsilon"] = float(getattr(config, LAYER_NORM[model_type]))
    else:
        keys["attention.layer_norm_rms_epsilon"] = float(config.rms_norm_eps)
    keys["feed_forward_length"] = (
        (config.n_inner or 4 * config.n_embd) if model_type == "gpt2" else config.intermediate_size
    )
    if model_type == "gpt2":
        return keys
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if head_dim * heads != config.hidden_size or model_type not in ("phi3", "starcoder2"):
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    rope = config.rope_parameters
    if model_type == "gemma3_text":
        keys["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    keys["rope.freq_base"] = float(rope["rope_theta"])
    keys["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1))
    if rope["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] == "yarn":
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"])}
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if rope["rope_type"] == "longrope":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        keys["rope.scaling.attn_factor"] = float(rope["attention_factor"])
    if getattr(config, "sliding_window", None):
        keys["attention.sliding_window"] = config.sliding_window
    if model_type in ("gemma2", "gemma3_text") and config.final_logit_softcapping:
        keys["final_logit_softcapping"] = float(config.final_logit_softcapping)
    if model_type == "gemma2":
        keys["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
    return keys | expert_keys(config)


def expert_keys(config) -> dict:
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not count:
        return {}
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    keys = {"expert_count": count, "expert_used_count": config.num_experts_per_tok}
    if config.model_type != "mixtral":
        keys["expert_feed_forward_length"] = width
    if config.model_type == "qwen2_moe":
        keys["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    if config.model_type == "minimax_m2":
        keys["expert_gating_func"] = 2
    return keys


def tokenizer_keys(tokenizer, config) -> dict:
    """The byte tokenizer as llama.cpp's BPE; rows without a token get one, as the converter does."""
    vocab = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    words = vocab + [f"[PAD{index}]" for index in range(len(vocab), config.vocab_size)]
    kinds = [3 if word in tokenizer.all_special_tokens else 1 for word in vocab] + [5] * (len(words) - len(vocab))
    return {
        "general.type": "model",
        "general.name": "Tiny",
        "general.quantization_version": 2,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
    }


def gguf_tensors(model) -> dict[str, np.ndarray]:
    """The tensors under gguf's names, changed as the converter changes them."""
    config, found = model.config, {}
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == ARCHS[config.model_type])
    names = get_tensor_name_map(number, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        found |= {key: value.contiguous().numpy() for key, value in _converted(name, tensor, config, names).items()}
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            found[f"rope_factors_{kind}.weight"] = np.array(rope[f"{kind}_factor"], np.float32)
    return found


def _converted(name, tensor, config, names):
    kind, block = config.model_type, f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    if name.endswith("experts.gate_up_proj"):
        tensor = tensor.transpose(1, 2) if kind == "gpt_oss" else tensor
        gate, up = (tensor[:, ::2], tensor[:, 1::2]) if kind == "gpt_oss" else tensor.chunk(2, dim=1)
        return {f"{block}.ffn_gate_exps.weight": gate, f"{block}.ffn_up_exps.weight": up}
    if name.endswith("experts.gate_up_proj_bias"):
        return {f"{block}.ffn_gate_exps.bias": tensor[:, ::2], f"{block}.ffn_up_exps.bias": tensor[:, 1::2]}
    if "experts.down_proj" in name:
        part = "bias" if name.endswith("bias") else "weight"
        swap = kind == "gpt_oss" and part == "weight"
        return {f"{block}.ffn_down_exps.{part}": tensor.transpose(1, 2) if swap else tensor}
    if name.endswith("e_score_correction_bias"):
        return {f"{block}.exp_probs_b.bias": tensor}
    if name.endswith("self_attn.sinks"):
        return {f"{block}.attn_sinks.weight": tensor}
    target = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert target, name
    if ARCHS[kind] == "llama" and any(part in name for part in ("q_proj", "k_proj")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        tensor = (
            tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
            .swapaxes(1, 2)
            .reshape(tensor.shape)
        )
    if kind in PLUS_ONE and name.endswith("norm.weight"):
        tensor = tensor + 1
    if kind == "gpt2" and any(part in name for part in ("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        tensor = tensor.T
    if name.endswith("shared_expert_gate.weight"):
        tensor = tensor.reshape(-1)
    return {target: tensor}
