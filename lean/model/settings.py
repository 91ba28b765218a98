"""The settings of config.json: their ranges, checked before transformers computes with them."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lean.errors import ModelError, one_line, shown

_MOST = 2**31 - 1
_MOST_LAYERS = _MOST_EXPERTS = 4096  # building more would take long

# Whole numbers: least and most. The second and later names of a row are those of older architectures.
_COUNTS = {
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"): (1, _MOST_LAYERS),
    ("num_attention_heads", "n_head", "n_heads"): (1, _MOST),
    ("num_key_value_heads",): (1, _MOST),
    ("hidden_size", "n_embd", "d_model"): (1, _MOST),
    ("head_dim", "v_head_dim"): (1, _MOST),
    ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "n_inner", "ffn_dim"): (1, _MOST),
    ("vocab_size",): (1, _MOST),
    ("max_position_embeddings", "n_positions", "max_sequence_length"): (1, _MOST),
    ("original_max_position_embeddings",): (1, _MOST),
    ("num_local_experts", "num_experts", "n_routed_experts"): (0, _MOST_EXPERTS),
    ("num_experts_per_tok",): (0, _MOST_EXPERTS),
}
# Finite numbers above 0, and at least 0.
_ABOVE_ZERO = {
    "rope_theta", "rope_local_base_freq", "rotary_emb_base", "rotary_base", "factor", "low_freq_factor",
    "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "partial_rotary_factor", "rotary_pct",
    "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier",
    "logits_scaling",
}  # fmt: skip
_NOT_NEGATIVE = {
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "epsilon",
}  # fmt: skip
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
_ROPES = ("rope_scaling", "rope_parameters")


def check_settings(config: Mapping[str, Any], name: str) -> None:
    """Check the settings that lean or transformers compute with, as they are in config.json.

    A setting that is missing or null has the default of its class, and is not checked. Settings of unknown names are
    not checked: the model's class ignores them or checks them itself.

    Raises:
        ModelError: a setting has another type or is out of range.
    """
    for key in ("text_config", "quantization_config"):
        if not isinstance(config.get(key), Mapping | None):
            _refuse(name, key, config[key], "an object")
    inner: Mapping[str, Any] = config.get("text_config") or {}
    for part in (config, inner):
        _check_numbers(part, name, "")
        _check_layer_types(part, name)
        for key in _ACTIVATIONS:
            if isinstance(part.get(key), str) and part[key] not in ACT2FN:
                _refuse(name, key, part[key], "the name of an activation function of transformers")
        for key in ("dtype", "torch_dtype"):
            value = part.get(key)
            if not (value is None or (isinstance(value, str) and isinstance(getattr(torch, value, 0), torch.dtype))):
                _refuse(name, key, value, "the name of a dtype of torch")


def _refuse(name: str, key: str, value: object, need: str) -> NoReturn:
    raise ModelError(f"{name}: config.json has {key} {shown(value, 60)}: it must be {need}")


def _check_numbers(part: Mapping[str, Any], name: str, inside: str) -> None:
    for keys, (least, most) in _COUNTS.items():
        for key in keys:
            value = part.get(key)
            each = value if isinstance(value, list) and value else [value]  # some classes take one for each layer
            if value is not None and not all(_is_count(one, least, most) for one in each):
                _refuse(name, inside + key, value, f"a whole number from {least} to {most}")
    for key, value in part.items():
        if value is None and not (inside and key in ("rope_theta", "factor")):
            continue
        if key in _ABOVE_ZERO and not (_is_number(value) and value > 0):
            _refuse(name, inside + key, value, "a finite number above 0")
        if key in _NOT_NEGATIVE and not (_is_number(value) and value >= 0):
            _refuse(name, inside + key, value, "a finite number of at least 0")
        if isinstance(value, float) and not math.isfinite(value):
            _refuse(name, inside + key, value, "a finite number")
        if key in _ROPES or (inside and isinstance(value, Mapping)):  # one table, or one for each kind of layers
            if isinstance(value, Mapping):
                _check_numbers(value, name, f"{inside}{key}.")
            else:
                _refuse(name, key, value, "an object, or null")


def _is_count(value: Any, least: int, most: int) -> bool:
    whole = type(value) is int or (type(value) is float and value.is_integer())
    return whole and least <= value <= most


def _is_number(value: Any) -> bool:
    if type(value) not in (int, float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the floats
        return False


def check_heads(config: Any, name: str) -> None:
    """Raise ModelError where no whole number of query heads shares a key head. ``config``: transformers' object."""
    try:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    except Exception:  # it has none, or others for each layer: some configurations raise errors of their own then
        return
    if isinstance(heads, int) and isinstance(kv_heads, int) and (kv_heads > heads or heads % kv_heads):
        raise ModelError(
            f"{name}: config.json has num_key_value_heads {kv_heads}: it must divide num_attention_heads {heads}"
        )


def _check_layer_types(part: Mapping[str, Any], name: str) -> None:
    kinds, layers = part.get("layer_types"), part.get("num_hidden_layers")
    if kinds is None or layers is None:
        return
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds) or len(kinds) < layers:
        _refuse(name, "layer_types", kinds, f"a list of at least num_hidden_layers {layers} names")


def check_rope_types(config: Any, name: str) -> None:
    """Raise ModelError for a kind of rotary positions that transformers does not compute. ``config``: its object."""
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in [ropes, *ropes.values()]:
        kind = rope.get("rope_type", "default") if isinstance(rope, Mapping) else "default"
        if kind != "default" and (not isinstance(kind, str) or kind not in ROPE_INIT_FUNCTIONS):
            _refuse(name, "rope_type", kind, f"default, {', '.join(ROPE_INIT_FUNCTIONS)}")


@contextmanager
def explained(config: Mapping[str, Any], name: str) -> Iterator[None]:
    """A ModelError that holds transformers' words about one setting becomes one that names it and its value."""
    try:
        yield
    except ModelError as error:
        words = str(error)
        if "Padding_idx" in words:
            need = f"a token id below vocab_size {config.get('vocab_size')}, or null"
            _refuse(name, "pad_token_id", config.get("pad_token_id"), need)
        field = re.search(r"alidation error for field '(\w+)'", words)
        if not field or field[1] not in config:
            raise
        kinds = re.search(r"any type in \((.*?)\)\.", words) or re.search(r"expected (\w+)", words)
        kind = re.sub(r"<class '(\w+)'>", r"\1", kinds[1]).replace("NoneType", "null") if kinds else "another type"
        _refuse(name, field[1], config[field[1]], f"of type {one_line(kind.replace(', ', ' or '), 80)}")
