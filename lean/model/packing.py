"""Which weights of a model stay in 4 or 8 bits, and the packed layers that take the places of its own.

Three methods. stored: the quantized tensors of the files as they are, int4 where these have groups of 4-bit codes, else
int8. int4 and int8: made from any weights at load. Embedding and head are int8 in all of them where they are quantized,
and one tensor where they are tied. A weight whose error as int8 is above MOST_ERROR stays exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from lean.config import EngineConfig
from lean.errors import ConfigError
from lean.model.shapes import decoder_of
from lean.model.verdicts import is_slow
from lean.quant.packed import (
    Int4Linear,
    Int8Embedding,
    Int8Linear,
    int4_bytes,
    int8_bytes,
    join_int8,
    pack_int4,
    pack_int8,
    row_parts,
    rows_at_once,
    why_not_int4,
    why_not_int8,
)
from lean.quant.rounding import nearest_groups
from lean.quant.weight_use import WeightUse
from lean.quant.weights import let_go
from lean.store.gguf.weights import GgufModel
from lean.store.matrix import StoredMatrix
from lean.store.prequantized.plan import QuantizedModel

Kind = Literal["int4", "int8"]
Stored = GgufModel | QuantizedModel
GROUP = 32  # inputs that share a scale and a zero in weights that are quantized at load
PACKED = ("stored", "int4", "int8")
# Routers choose experts and are small: an error there is the wrong expert. Some models read their weight by themselves.
ROUTERS = {"router", "gate", "wg", "classifier"}
MOST_ERROR = 0.015  # relative Frobenius error of a weight as int8
_LOSES = f"more than {MOST_ERROR:.1%} of error as int8"
_SLOW = "slower than bf16 on this CPU"


@dataclass(frozen=True)
class Weight:
    """One weight [outputs, inputs] to be packed.

    Attributes:
        path: of its module. head: path of a head that is tied to it.
        stored: what it is made from; None where the module has it already.
        group: inputs that share a scale and a zero, of int4.
    """

    path: str
    outputs: int
    inputs: int
    kind: Kind
    head: str | None = None
    stored: StoredMatrix | None = None
    group: int = GROUP

    @property
    def nbytes(self) -> int:
        if self.kind == "int8":
            return int8_bytes(self.outputs, self.inputs)
        return int4_bytes(self.outputs, self.inputs, self.group)


@dataclass(frozen=True)
class Packing:
    """The weights of a model that will be packed.

    Attributes:
        method: of PACKED.
        kept: number of matrices that stay exact, by reason.
        nbytes: of all the model's weights afterwards, if none exceeds MOST_ERROR.
    """

    method: str
    weights: tuple[Weight, ...]
    kept: Mapping[str, int] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def formats(self) -> dict[str, int]:
        return dict(sorted(Counter(weight.kind for weight in self.weights).items()))

    @property
    def left_out(self) -> set[str]:
        """Names of the module's tensors that come from the files when they are packed."""
        return {weight.stored.name for weight in self.weights if weight.stored is not None}


def choose_method(config: EngineConfig, dtype: torch.dtype, device: torch.device, stored: Stored | None) -> str | None:
    """What `--quantization` means for a model: one of PACKED, a method of bitsandbytes, or None.

    ``stored``: what its files hold, where they may be quantized.

    Raises:
        ConfigError: int4 or int8 does not work in this dtype or on this device.
    """
    asked = config.quantization
    works = dtype is torch.bfloat16 and device.type == "cpu"
    if asked == "auto" or (asked is None and isinstance(stored, QuantizedModel)):
        return "stored" if stored is not None and works else None
    if asked in ("int4", "int8") and not works:
        instead = "--dtype bfloat16" if device.type == "cpu" else "bnb-4bit"
        raise ConfigError(
            f"quantization {asked} computes in bfloat16 on a CPU, not in {str(dtype).removeprefix('torch.')} on "
            f"{device.type}: use {instead}"
        )
    return None if asked == "none" else asked


def may_pack(config: EngineConfig, device: torch.device) -> bool:
    """Whether weights will be packed, if they are in bfloat16 or the model says nothing else."""
    packs = config.quantization in ("auto", "int4", "int8") and config.dtype in ("auto", "bfloat16")
    return packs and device.type == "cpu"


def why_nothing_is_kept(
    asked: str | None, name: str, dtype: torch.dtype, device: torch.device, stored: Stored | None
) -> str | None:
    """A line about weights that become unquantized though nobody asked for that; ``asked``: `--quantization`."""
    where = f"in {str(dtype).removeprefix('torch.')} on {device.type}"
    need = "packed weights need bfloat16 on a CPU"
    if isinstance(stored, QuantizedModel) and asked in (None, "auto"):
        return f"the weights that {stored.method} quantized are dequantized {where}: {need}"
    if asked != "auto":
        return None
    if stored is not None:
        return f"quantization auto has no effect {where}: {need}"
    return f"quantization auto has no effect: {name} is not quantized; int4 and int8 quantize any weights"


def plan_packing(
    model: Any, method: str, stored: Stored | None, dtype: torch.dtype, name: str, may_time: bool = True
) -> Packing:
    """What to pack in a model whose weights need no values.

    Args:
        may_time: leave out, of the method ``stored``, what is slower than exact weights on this CPU.

    Raises:
        ConfigError: int4 or int8 was asked for, and no weight of the model ``name`` can be packed.
    """
    targets: dict[str, StoredMatrix] = {} if stored is None else {target.name: target for target in stored.targets}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    paths = {id(module): path for path, module in model.named_modules()}
    inside = {id(module) for module in decoder_of(model).modules()}
    weights, kept, seen = [], Counter[str](), set[int]()
    for module in model.modules():
        for key, weight in module.named_parameters(recurse=False):
            if weight.dim() < 2 or id(weight) in seen:
                continue
            seen.add(id(weight))
            owner = embedding if weight is embedding.weight else module
            target = targets.get(f"{paths[id(owner)]}.{key}")
            served = id(owner) in inside or owner is head
            if not served:
                chosen = "outside of the decoder"
            elif ROUTERS & {*paths[id(owner)].split(".")}:
                chosen = "router of experts"
            else:
                chosen = _choose(owner, embedding, weight, method, target)
            kind: Kind | None = "int4" if chosen == "int4" else "int8" if chosen == "int8" else None
            if kind is not None:
                also = paths[id(head)] if tied and owner is embedding else None
                group = target.group if target is not None and target.kind == "int4" else GROUP
                weights.append(Weight(paths[id(owner)], weight.shape[0], weight.shape[1], kind, also, target, group))
            else:
                kept[chosen] += 1
    if method == "stored" and may_time:
        slow = {kind for kind in ("int4", "int8") if (found := _largest(weights, kind)) and is_slow(kind, *found)}
        kept.update(_SLOW for weight in weights if weight.kind in slow)
        weights = [weight for weight in weights if weight.kind not in slow]
    rest = sum(p.numel() for p in model.parameters()) - sum(weight.outputs * weight.inputs for weight in weights)
    nbytes = rest * dtype.itemsize + sum(weight.nbytes for weight in weights)
    if not weights and method != "stored":
        reasons = ", ".join(f"{count} are kept: {reason}" for reason, count in sorted(kept.items()))
        raise ConfigError(f"quantization {method}: no weight of {name} can be packed ({reasons}): leave it out")
    return Packing(method, tuple(weights), dict(sorted(kept.items())), nbytes)


def _choose(module: Any, embedding: Any, weight: torch.Tensor, method: str, stored: StoredMatrix | None) -> str:
    """The kind of a weight, or why it stays exact."""
    if weight.dim() > 2:
        return "experts in one tensor"
    is_embedding = module is embedding
    scaled = isinstance(module, nn.Embedding) and hasattr(module, "embed_scale")
    if not (type(module) is nn.Linear or (is_embedding and (type(module) is nn.Embedding or scaled))):
        return "no linear layer"
    if stored is not None and stored.kind == "other":
        return "stored in another shape"
    if method == "stored" and (stored is None or stored.kind == "exact"):
        return "stored unquantized" if stored is None else f"stored as {stored.format}"
    outputs, inputs = weight.shape
    grouped = stored is not None and stored.kind == "int4"
    group = stored.group if stored is not None and grouped else GROUP
    four = method != "int8" and not is_embedding and (grouped or method == "int4")
    if four and (grouped or not _is_head(module, weight, embedding)) and not why_not_int4(outputs, inputs, group):
        return "int4"
    return why_not_int8(outputs, inputs) or "int8"


def _is_head(module: Any, weight: torch.Tensor, embedding: Any) -> bool:
    return weight.shape[0] == embedding.weight.shape[0]


def _largest(weights: list[Weight], kind: Kind) -> tuple[int, int] | None:
    """The shape of the largest weight of the layers of this kind."""
    shapes = [(weight.outputs, weight.inputs) for weight in weights if weight.kind == kind]
    return max(shapes, key=lambda shape: shape[0] * shape[1], default=None)


def pack(module: Any, packing: Packing, fixed: bool) -> WeightUse:
    """Replace the layers of a loaded model by packed ones, one by one.

    ``fixed``: see `lean.quant.packed`.
    """
    kept, formats, num_weights = Counter(packing.kept), Counter[str](), 0
    tensors: list[torch.Tensor] = []
    for weight in packing.weights:
        old = module.get_submodule(weight.path)
        made = _made(weight, old, fixed)
        if made is None:
            kept[_LOSES] += 1
            if weight.stored is not None:
                _set_weight(module, weight, nn.Parameter(weight.stored.filled(old.weight.dtype), False))
            continue
        layer, held = made
        module.set_submodule(weight.path, layer)
        if weight.head is not None and (head := module.get_submodule(weight.head)).weight is old.weight:
            module.set_submodule(weight.head, Int8Linear(*held, head.bias, fixed))
        tensors += held
        formats[weight.kind] += 1
        num_weights += weight.outputs * weight.inputs
        del old, made
    exact = list(module.parameters())
    let_go(exact)
    names = sorted(formats)
    return WeightUse(
        name=" and ".join(names),
        num_quantized=formats.total(),
        num_linear=formats.total() + kept.total(),
        num_weights=num_weights,
        quantized_bytes=sum(tensor.nbytes for tensor in tensors),
        exact_bytes=sum(weight.nbytes for weight in exact),
        fused=True,
        row_invariant=fixed or not formats,
        formats=tuple(sorted(formats.items())),
        kept=tuple(sorted(kept.items())),
    )


def _made(weight: Weight, old: Any, fixed: bool) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]] | None:
    """(the layer with the packed weight, its codes and scales); None where int8 loses too much."""
    bias, shape = getattr(old, "bias", None), (weight.outputs, weight.inputs)
    if weight.kind == "int4":
        held = pack_int4(_groups(weight, old), *shape, weight.group)
        return Int4Linear(*held, weight.outputs, bias, fixed), held
    if weight.stored is not None and weight.stored.kind == "int8":
        codes, scales = join_int8(weight.stored.codes(rows_at_once(weight.inputs)), *shape)
    else:
        codes, scales, error = pack_int8(_values(weight, old), *shape)
        if error > MOST_ERROR:
            return None
    if not isinstance(old, nn.Embedding):
        return Int8Linear(codes, scales, bias, fixed), (codes, scales)
    factor = getattr(old, "embed_scale", None)
    factor = factor.to(scales.dtype) if isinstance(factor, torch.Tensor) else factor
    return Int8Embedding(codes, scales, factor), (codes, scales)


def _values(weight: Weight, old: Any) -> Iterator[torch.Tensor]:
    """Rows in float32, part by part."""
    if weight.stored is None:
        return row_parts(old.weight)
    return weight.stored.values(rows_at_once(weight.inputs))


def _groups(weight: Weight, old: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Codes, scales and zeros of rows, part by part: as the file has them, or the nearest."""
    if weight.stored is not None and weight.stored.kind == "int4":
        return weight.stored.codes(rows_at_once(weight.inputs))
    return (nearest_groups(values, weight.group) for values in _values(weight, old))


def _set_weight(module: Any, weight: Weight, value: nn.Parameter) -> None:
    for path in (weight.path, weight.head):
        if path is not None:
            module.get_submodule(path).weight = value
