"""The metadata of a GGUF file as transformers' configuration; what cannot be served is refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from lean.errors import ModelError, one_line
from lean.store.gguf.architectures import ARCHITECTURES, MISTRAL, MIXTRAL, Architecture
from lean.store.gguf.file import GgufFile
from lean.store.gguf.header import GgufTensor
from lean.store.gguf.keys import OTHER_KINDS, TOKEN_IDS, Metadata, check_keys
from lean.store.gguf.rope import THETA, rope_parameters
from lean.store.gguf.tensors import dequantize

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
# Layers of Gemma's 27B models, whose queries are scaled by hidden size / heads in place of the width of a head. The
# file does not say so: llama.cpp, too, goes by the number of layers (`llm_type` in `src/llama-model.cpp`), after
# https://github.com/google/gemma_pytorch/blob/main/gemma/config.py
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
MAX_LAYERS = 1024
GEMMA2_WINDOW, GEMMA3_LOCAL_THETA = 4096, 10_000.0  # where the file names none


def transformers_config(file: GgufFile) -> Any:
    """transformers' configuration of the file's model. Raises ModelError: see `config_fields`."""
    from transformers import AutoConfig

    from lean.store.library import attempt

    fields = config_fields(file)
    what = f"{file.path.name}: its metadata makes no configuration"
    return attempt(what, AutoConfig.for_model, fields.pop("model_type"), **fields)


def architecture(file: GgufFile) -> Architecture:
    """How the file's architecture is served. Raises ModelError for one that is not, or for a file of another kind."""
    name, metadata = file.path.name, file.metadata
    arch = metadata.get("general.architecture")
    kind = metadata.get("general.type", "model")
    for sign in (arch, kind):
        if isinstance(sign, str) and sign in (*OTHER_KINDS, "mmproj"):
            what = OTHER_KINDS["clip" if sign == "mmproj" else sign]
            raise ModelError(f"{name} is {what}, not a language model: pass the model that it belongs to")
    if kind != "model":
        raise ModelError(f"{name}: general.type is {one_line(repr(kind), 40)}, not 'model': it is not a language model")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        served = ", ".join(ARCHITECTURES)
        raise ModelError(
            f"{name}: architecture {one_line(repr(arch), 40)} is not served from GGUF; lean serves {served}"
        )
    if not file.tensors:
        raise ModelError(f"{name} holds a vocabulary and no weights: pass a file with the model")
    values = Metadata(name, arch, metadata)
    if arch == "llama" and values.get("expert_count") not in (None, 0):
        return MIXTRAL
    if arch == "llama" and _window(values):
        return MISTRAL
    return ARCHITECTURES[arch]


def config_fields(file: GgufFile) -> dict[str, Any]:
    """The fields of transformers' configuration, ``model_type`` included.

    Raises:
        ModelError: a key that lean does not know, that is impossible, or that would change answers unread.
    """
    arch, name = architecture(file), file.metadata["general.architecture"]
    check_keys(file.path.name, name, file.metadata, arch.rules)
    values = Metadata(file.path.name, name, file.metadata)
    layers, hidden = values.count("block_count"), values.count("embedding_length")
    if layers > min(len(file.tensors), MAX_LAYERS):
        raise values.refuse("block_count", f"is {layers}, and the file holds {len(file.tensors)} tensors")
    context = values.count("context_length")
    fields: dict[str, Any] = {"model_type": arch.model_type, **arch.constants}
    fields |= {"hidden_size": hidden, "num_hidden_layers": layers, "max_position_embeddings": context}
    fields |= {"vocab_size": _vocabulary(file, values), "tie_word_embeddings": OUTPUT not in file.tensors}
    fields |= _heads(arch, values, hidden) | _epsilon(arch, values) | _token_ids(file, fields["vocab_size"])
    head_dim = fields.get("head_dim", hidden // fields["num_attention_heads"])
    fields |= _experts(file, arch, values) if arch.experts else {arch.intermediate: values.count("feed_forward_length")}
    stems = {re.sub(r"^blk\.\d+\.", "", tensor) for tensor in file.tensors}
    fields |= {key: True for key, biases in arch.biases.items() if stems & set(biases)}
    if arch.rope:
        factors = {key: _factors(file.tensors[key]) for key in arch.factors if key in file.tensors}
        fields["rope_parameters"] = rope_parameters(values, head_dim, context, factors, arch)
        values.require_equal("rope.dimension_count_swa", values.count("rope.dimension_count", head_dim), "one rotation")
    fields |= _windows(arch, values, layers, context)
    if name.startswith("gemma"):
        return fields | _gemma(values, fields, head_dim)
    values.require_equal("rope.freq_base_swa", values.number("rope.freq_base", THETA), "one frequency base")
    _check_scale(values, head_dim)
    if name == "gpt-oss" and fields["rope_parameters"]["rope_type"] == "yarn":
        fields["rope_parameters"]["truncate"] = False  # as OpenAI's implementation; no key says it
    return fields


def _heads(arch: Architecture, values: Metadata, hidden: int) -> dict[str, Any]:
    heads = values.count("attention.head_count")
    kv_heads = values.count("attention.head_count_kv", heads)
    if heads > hidden or heads % kv_heads:
        raise values.refuse("attention.head_count", f"is {heads}: impossible with {kv_heads} KV heads, width {hidden}")
    if values.get("attention.key_length") is None and hidden % heads:
        raise values.refuse("attention.key_length", f"is missing, and {heads} heads do not divide the width {hidden}")
    head_dim = values.count("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        values.require_equal(key, head_dim, f"{head_dim}, the width of a key")
    if not arch.head_dim:
        values.require_equal("attention.key_length", hidden / heads, f"{hidden // heads}, the width by its heads")
    fields = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    if arch.model_type == "gpt2":
        if kv_heads != heads:
            raise values.refuse("attention.head_count_kv", f"is {kv_heads}: lean serves gpt2 files with {heads}")
        return fields
    return fields | ({"head_dim": head_dim} if arch.head_dim else {})


def _epsilon(arch: Architecture, values: Metadata) -> dict[str, float]:
    used, other = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
    if not arch.rms:
        used, other = other, used
    epsilon = values.number(used)
    values.require_equal(other, epsilon, f"the value of {used}")
    return {arch.eps: epsilon}


def _experts(file: GgufFile, arch: Architecture, values: Metadata) -> dict[str, Any]:
    """Number and width of the experts. The width is that of the tensors where no key names it."""
    assert arch.experts
    count, used = values.count("expert_count"), values.count("expert_used_count")
    if used > count:
        raise values.refuse("expert_used_count", f"is {used}, and there are {count} experts")
    number, width = arch.experts

    def rows(tensor: str) -> int:
        if tensor not in file.tensors:
            raise ModelError(f"{values.name}: the tensor {tensor} is missing")
        return file.tensors[tensor].shape[-2] if len(file.tensors[tensor].shape) > 1 else 0

    fields: dict[str, Any] = {number: count, "num_experts_per_tok": used}
    fields[width] = values.count("expert_feed_forward_length", rows("blk.0.ffn_gate_exps.weight"))
    if width != arch.intermediate:
        fields[arch.intermediate] = values.count("feed_forward_length", fields[width])
    elif values.get("feed_forward_length") is not None:
        values.require_equal("feed_forward_length", fields[width], "the width of its experts")
    if arch.model_type == "qwen2_moe":
        shared = values.count("expert_shared_feed_forward_length", rows("blk.0.ffn_gate_shexp.weight"))
        fields["shared_expert_intermediate_size"] = shared
    if (norm := values.get("expert_weights_norm")) is not None and "norm_topk_prob" in arch.constants:
        fields["norm_topk_prob"] = bool(norm)
    return fields


def _vocabulary(file: GgufFile, values: Metadata) -> int:
    """Rows of the embedding, after checking that every token and every special id has one."""
    if EMBEDDING not in file.tensors:
        raise ModelError(f"{values.name}: the tensor {EMBEDDING} is missing")
    rows = file.tensors[EMBEDDING].shape[0]
    values.require_equal("vocab_size", rows, f"{rows}, the rows of {EMBEDDING}")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > rows:
        raise ModelError(f"{values.name}: its vocabulary has {len(tokens)} tokens, {EMBEDDING} only {rows} rows")
    return rows


def _token_ids(file: GgufFile, rows: int) -> dict[str, int | None]:
    """The special ids, all below the number of tokens."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    limit = len(tokens) if isinstance(tokens, list) else rows
    ids: dict[str, int | None] = {}
    for kind in TOKEN_IDS:
        key = f"tokenizer.ggml.{kind}_token_id"
        token = file.metadata.get(key)
        if token is not None and (type(token) is not int or not 0 <= token < limit):
            raise ModelError(
                f"{file.path.name}: {key} is {one_line(repr(token), 40)}, and the vocabulary has {limit} tokens"
            )
        ids[kind] = token
    return {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"], "pad_token_id": ids["padding"]}


def _factors(tensor: GgufTensor) -> list[float]:
    import torch

    if len(tensor.shape) != 1 or tensor.shape[0] > 1 << 16:
        raise ModelError(f"{tensor.file.name}: tensor {tensor.name} has shape {list(tensor.shape)}, not one dimension")
    return [float(value) for value in dequantize(tensor, torch.float32)]


def _window(values: Metadata) -> int:
    """The sliding window; 0 where there is none, or where no position of the context lies beyond it."""
    window = values.count("attention.sliding_window", 0, zero=True)
    return 0 if window >= values.count("context_length") else window


def _windows(arch: Architecture, values: Metadata, layers: int, context: int) -> dict[str, Any]:
    window = _window(values)
    pattern = values.get("attention.sliding_window_pattern")
    if arch.window == "none" or arch.window == "all":
        if window and arch.window == "none":
            raise values.refuse(
                "attention.sliding_window", f"is {window}: lean does not serve it in {values.arch} files"
            )
        if pattern is not None and window:
            raise values.refuse("attention.sliding_window_pattern", f"is not served in {values.arch} files")
        return {"sliding_window": window or None} if arch.window == "all" and arch.model_type != "llama" else {}
    # Not 0 beyond the context: the layers that slide may have other rotary settings.
    window = values.count("attention.sliding_window", GEMMA2_WINDOW if values.arch == "gemma2" else 0, zero=True)
    sliding = _sliding_layers(values, layers, arch.window, pattern) if window else [False] * layers
    kinds = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    return {"sliding_window": window or context, "layer_types": kinds}


def _sliding_layers(values: Metadata, layers: int, default: int, pattern: Any) -> list[bool]:
    """Which layers slide: each but every n-th, or a list of yes and no."""
    if isinstance(pattern, list):
        if len(pattern) != layers or not all(type(item) in (bool, int) and item in (0, 1) for item in pattern):
            raise values.refuse("attention.sliding_window_pattern", f"must hold yes or no for each of {layers} layers")
        return [bool(item) for item in pattern]
    every = values.count("attention.sliding_window_pattern", default)
    return [(index + 1) % every != 0 for index in range(layers)]


def _gemma(values: Metadata, fields: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """What only Gemma has: the scale of queries, soft caps, and separate rotary settings of the local layers."""
    layers, heads, hidden = (fields[key] for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    scalar = hidden // heads if layers == GEMMA_27B_LAYERS[values.arch] else head_dim
    if scale := values.number("attention.scale", 0.0, zero=True):
        scalar = round(scale**-2) if 1e-4 < scale < 1e4 else 0  # transformers takes whole numbers
        if not scalar or not math.isclose(scalar, scale**-2, rel_tol=1e-4):
            raise values.refuse("attention.scale", f"is {scale:g}: lean serves 1/sqrt(n) for a whole number n")
    own: dict[str, Any] = {"query_pre_attn_scalar": scalar}
    final = values.number("final_logit_softcapping", 30.0 if values.arch == "gemma2" else 0.0, zero=True)
    own["final_logit_softcapping"] = final or None
    theta = values.number("rope.freq_base", THETA)
    if values.arch == "gemma2":
        own["attn_logit_softcapping"] = values.number("attn_logit_softcapping", 50.0, zero=True) or None
        values.require_equal("rope.freq_base_swa", theta, "one frequency base")
        return own
    local = {"rope_type": "default", "rope_theta": values.number("rope.freq_base_swa", GEMMA3_LOCAL_THETA)}
    own["rope_parameters"] = {"full_attention": fields["rope_parameters"], "sliding_attention": local}
    return own


def _check_scale(values: Metadata, head_dim: int) -> None:
    if values.number("attention.scale", 0.0, zero=True):
        values.require_equal("attention.scale", 1 / math.sqrt(head_dim), f"1/sqrt({head_dim})")
