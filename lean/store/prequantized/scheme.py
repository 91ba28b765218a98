"""The quantization_config of checkpoints that lean unpacks itself. What it does not read is refused by name.

Sources: https://github.com/ModelCloud/GPTQModel (gptq, and AWQ's version gemm) and
https://github.com/vllm-project/compressed-tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from lean.errors import ModelError, shown

Method = Literal["gptq", "awq", "compressed-tensors"]
METHODS: tuple[Method, ...] = ("gptq", "awq", "compressed-tensors")
WHOLE_ROW = -1
STEP = 32  # the number of inputs in a group is a multiple of this
WHAT_TO_DO = "pass the unquantized checkpoint; --quantization int4 quantizes it"
_GROUPS = "groups of a multiple of 32 inputs, and whole rows"


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint's quantized tensors are stored.

    Attributes:
        less_one: zeros are stored less 1.
        layouts: (bits, inputs that share a scale or WHOLE_ROW) of a layer -> whether it needs zeros.
        any_group: layers may have other groups than those.
        ordered: settings say that inputs may be in the order of their activations.
    """

    model: str
    method: Method
    layouts: Mapping[tuple[int, int], bool]
    less_one: bool = False
    any_group: bool = False
    ordered: bool = False

    def refuse(self, what: str, reads: str) -> NoReturn:
        raise refusal(self.model, self.method, what, reads)


def refusal(model: str, method: str, what: str, reads: str) -> ModelError:
    return ModelError(f"{model}: its weights are quantized by {method} with {what}; lean reads {reads}: {WHAT_TO_DO}")


def read_scheme(settings: Mapping[str, Any], method: Method, model: str) -> Scheme:
    """The scheme of a ``quantization_config``.

    Raises:
        ModelError: settings that lean does not read, or of another type than they must have.
    """
    return {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed}[method](settings, model)


def _gptq(settings: Mapping[str, Any], model: str) -> Scheme:
    bits = _number(settings, "bits", 4, model)
    if bits != 4:
        raise refusal(model, "gptq", f"{bits} bits", "4 bits")
    found = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    kind = "marlin" if settings.get("is_marlin_format") else str(found).lower()
    if kind not in ("gptq", "gptq_v2"):
        raise refusal(model, "gptq", f"format {shown(found, 40)}", "the formats gptq and gptq_v2")
    words = str(settings.get("pack_dtype") or "int32").removeprefix("torch.")
    if words != "int32":
        raise refusal(model, "gptq", f"pack_dtype {shown(words, 40)}", "int32")
    group = _group(_number(settings, "group_size", 128, model), "gptq", model)
    several = bool(settings.get("dynamic"))
    return Scheme(model, "gptq", {(4, group): True}, kind == "gptq", several, bool(settings.get("desc_act")))


def _awq(settings: Mapping[str, Any], model: str) -> Scheme:
    bits = _number(settings, "bits" if "bits" in settings else "w_bit", 4, model)
    if bits != 4:
        raise refusal(model, "awq", f"{bits} bits", "4 bits")
    found = settings.get("version") or settings.get("format") or "gemm"
    if str(settings.get("backend")).lower() == "llm-awq":
        found = "llm-awq"
    if str(found).lower() != "gemm":
        raise refusal(model, "awq", f"version {shown(found, 40)}", "the version gemm")
    if settings.get("zero_point") is False:
        raise refusal(model, "awq", "zero_point false", "weights with zeros")
    key = "group_size" if "group_size" in settings else "q_group_size"
    return Scheme(model, "awq", {(4, _group(_number(settings, key, 128, model), "awq", model)): True})


def _compressed(settings: Mapping[str, Any], model: str) -> Scheme:
    def refuse(what: str, reads: str) -> NoReturn:
        raise refusal(model, "compressed-tensors", what, reads)

    if settings.get("kv_cache_scheme") is not None:
        refuse("kv_cache_scheme", "checkpoints without it (lean quantizes its own cache: --kv-dtype)")
    sparsity = settings.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        refuse("sparse weights (sparsity_config)", "dense ones")
    if settings.get("transform_config"):
        refuse("rotated weights (transform_config)", "weights without transforms")
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError(
            f"{model}: config.json has config_groups {shown(groups, 60)}: it must be an object with groups"
        )
    layouts: dict[tuple[int, int], bool] = {}
    for key, group in groups.items():
        if not isinstance(group, Mapping):
            refuse(f"the preset {shown(key, 40)} in config_groups", "groups that are written out")
        for field in ("input_activations", "output_activations"):
            if group.get(field) is not None:
                refuse(f"quantized activations ({_in_short(group, field)})", "quantized weights alone")
        weights = group.get("weights")
        if weights is None:
            continue
        if not isinstance(weights, Mapping):
            raise ModelError(f"{model}: config.json has weights {shown(weights, 60)}: it must be an object")
        layout, zeros = _weights(weights, str(group.get("format") or settings.get("format")), model)
        layouts[layout] = layouts.get(layout, True) and zeros  # of groups that differ in it, either may be meant
    if not layouts:
        refuse("no quantized weights in config_groups", "pack-quantized and int-quantized weights")
    return Scheme(model, "compressed-tensors", layouts)


def _in_short(group: Mapping[str, Any], field: str) -> str:
    """What people call weights and activations of these bits, such as W8A8, and the field that says so."""
    parts = (group.get("weights"), group[field])
    weights, activations = (part.get("num_bits") if isinstance(part, Mapping) else None for part in parts)
    named = type(weights) is int and type(activations) is int
    return f"W{weights}A{activations}, {field}" if named else field


def _weights(weights: Mapping[str, Any], kind: str, model: str) -> tuple[tuple[int, int], bool]:
    """The layout of a group of compressed-tensors, and whether it needs zeros."""

    def refuse(what: str, reads: str) -> NoReturn:
        raise refusal(model, "compressed-tensors", what, reads)

    bits, numbers = _number(weights, "num_bits", 8, model), str(weights.get("type", "int"))
    if numbers != "int":
        refuse(f"{shown(numbers, 40)} codes of {bits} bits ({shown(kind, 40)})", "int codes")
    if kind not in ("pack-quantized", "int-quantized"):
        refuse(f"format {shown(kind, 40)}", "the formats pack-quantized and int-quantized")
    if weights.get("dynamic"):
        refuse("dynamic weights", "static ones")
    order = weights.get("actorder")
    if order not in (None, False, "weight", "static"):
        refuse(f"act-order (actorder {shown(order, 40)})", "groups in the order of the inputs")
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == WHOLE_ROW else "group")
    if strategy not in ("group", "channel"):
        refuse(f"strategy {shown(strategy, 40)}", "the strategies group and channel")
    needs_zeros = weights.get("symmetric") is False
    group = WHOLE_ROW
    if strategy == "group":
        group = _group(_number(weights, "group_size", WHOLE_ROW, model), "compressed-tensors", model)
    if bits not in (4, 8) or (bits == 4 and kind == "int-quantized"):
        refuse(f"{bits} bits ({kind})", "4 bits (pack-quantized) and 8 bits")
    if bits == 8 and (needs_zeros or group != WHOLE_ROW):
        what = "zeros" if needs_zeros else f"groups of {group}"
        refuse(f"8 bits and {what}", "8 bits with one scale for each row and no zeros")
    return (bits, group), needs_zeros


def _number(settings: Mapping[str, Any], key: str, default: int, model: str) -> int:
    value = settings.get(key)
    value = default if value is None else value
    if type(value) is not int:
        raise ModelError(f"{model}: config.json has {key} {shown(value, 60)}: it must be a whole number")
    return value


def _group(size: int, method: str, model: str) -> int:
    if size != WHOLE_ROW and (size < STEP or size % STEP):
        raise refusal(model, method, f"groups of {size}", _GROUPS)
    return size
