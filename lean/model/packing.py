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
from lean.machine.memory import give_back_freed
from lean.model.experts import PROJECTIONS, follows_interface, use_packed
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
from lean.quant.packed_experts import PackedExperts
from lean.quant.rounding import nearest_groups
from lean.quant.weight_use import WeightUse
from lean.quant.weights import let_go
from lean.store.gguf.weights import GgufModel
from lean.store.matrix import StoredMatrix, StoredTensor, joined
from lean.store.prequantized.plan import CheckpointModel

Kind = Literal["int4", "int8"]
Stored = GgufModel | CheckpointModel
GROUP = 32  # inputs that share a scale and a zero in weights that are quantized at load
PACKED = ("stored", "int4", "int8")
# Routers choose experts and are small: an error there is the wrong expert. Some models read their weight by themselves.
ROUTERS = {"router", "gate", "wg", "classifier"}
MOST_ERROR = 0.015  # relative Frobenius error of a weight as int8
_LOSES = f"more than {MOST_ERROR:.1%} of error as int8"
_SLOW = "slower than bf16 on this CPU"


@dataclass(frozen=True)
class Weight:
    """One weight to be packed: [outputs, inputs], or that of each of some experts.

    Attributes:
        path: of its module. head: path of a head that is tied to it.
        stored: what it is made from; None where the module has it already.
        group: inputs that share a scale and a zero, of int4.
        name: of the module's parameter. experts: their number, where it holds all of a layer; else 0.
    """

    path: str
    outputs: int
    inputs: int
    kind: Kind
    head: str | None = None
    stored: StoredTensor | None = None
    group: int = GROUP
    name: str = "weight"
    experts: int = 0

    @property
    def nbytes(self) -> int:
        each = int8_bytes(self.outputs, self.inputs)
        if self.kind == "int4":
            each = int4_bytes(self.outputs, self.inputs, self.group)
        return each * (self.experts or 1)

    @property
    def numel(self) -> int:
        return self.outputs * self.inputs * (self.experts or 1)


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
    if asked == "auto" or (asked is None and isinstance(stored, CheckpointModel)):
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
    if isinstance(stored, CheckpointModel) and asked in (None, "auto"):
        return f"the weights that {stored.method} quantized are dequantized {where}: {need}"
    if asked != "auto":
        return None
    if stored is not None:
        return f"quantization auto has no effect {where}: {need}"
    return f"quantization auto has no effect: {name} is not quantized; int4 and int8 quantize any weights"


def plan_packing(
    model: Any,
    method: str,
    stored: Stored | None,
    dtype: torch.dtype,
    name: str,
    may_time: bool = True,
    may_loop: bool = True,
) -> Packing:
    """What to pack in a model whose weights need no values.

    Args:
        may_time: leave out, of the method ``stored``, what is slower than exact weights on this CPU.
        may_loop: experts may be multiplied one by one, which compiled steps cannot.

    Raises:
        ConfigError: int4 or int8 was asked for, and no weight of the model ``name`` can be packed.
    """
    targets: dict[str, StoredTensor] = {} if stored is None else {target.name: target for target in stored.targets}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    paths = {id(module): path for path, module in model.named_modules()}
    inside = {id(module) for module in decoder_of(model).modules()}
    weights, kept, seen = [], Counter[str](), set[int]()
    for module in model.modules():
        for key, weight in module.named_parameters(recurse=False):
            if weight.dim() < 2 or key.endswith("bias") or id(weight) in seen:  # experts have a bias each
                continue
            seen.add(id(weight))
            owner = embedding if weight is embedding.weight else module
            target = targets.get(f"{paths[id(owner)]}.{key}")
            served = id(owner) in inside or owner is head
            made: Weight | str
            if not served:
                made = "outside of the decoder"
            elif ROUTERS & {*paths[id(owner)].split(".")}:
                made = "router of experts"
            elif weight.dim() > 2:
                why = None if may_loop else "experts, which compiled steps multiply unpacked"
                made = why or _choose_experts(owner, paths[id(owner)], key, weight, method, target)
            else:
                also = paths[id(head)] if tied and owner is embedding else None
                made = _choose(owner, embedding, paths[id(owner)], also, weight, method, target)
            if isinstance(made, Weight):
                weights.append(made)
            else:
                kept[made] += 1
    if method == "stored" and may_time:
        slow = {kind for kind in ("int4", "int8") if (found := _largest(weights, kind)) and is_slow(kind, *found)}
        kept.update(_SLOW for weight in weights if weight.kind in slow)
        weights = [weight for weight in weights if weight.kind not in slow]
    rest = sum(p.numel() for p in model.parameters()) - sum(weight.numel for weight in weights)
    nbytes = rest * dtype.itemsize + sum(weight.nbytes for weight in weights)
    if not weights and method != "stored":
        reasons = ", ".join(f"{count} are kept: {reason}" for reason, count in sorted(kept.items()))
        raise ConfigError(f"quantization {method}: no weight of {name} can be packed ({reasons}): leave it out")
    return Packing(method, tuple(weights), dict(sorted(kept.items())), nbytes)


def _choose(
    module: Any,
    embedding: Any,
    path: str,
    head: str | None,
    weight: torch.Tensor,
    method: str,
    stored: StoredTensor | None,
) -> Weight | str:
    """How a matrix is packed, or why it stays exact."""
    is_embedding = module is embedding
    scaled = isinstance(module, nn.Embedding) and hasattr(module, "embed_scale")
    if not (type(module) is nn.Linear or (is_embedding and (type(module) is nn.Embedding or scaled))):
        return "no linear layer"
    matrix = None if stored is None else stored.matrix()
    if stored is not None and matrix is None:
        return "stored in another shape"
    outputs, inputs = weight.shape
    may_be_four = not is_embedding and (_has_groups(matrix) or not _is_head(module, weight, embedding))
    kind, group = _kind(outputs, inputs, method, matrix, may_be_four)
    return Weight(path, outputs, inputs, kind, head, stored, group) if kind in ("int4", "int8") else kind


def _choose_experts(
    module: Any, path: str, key: str, weight: torch.Tensor, method: str, stored: StoredTensor | None
) -> Weight | str:
    """How the tensor of all experts of a layer is packed, or why it stays exact."""
    if not follows_interface(module) or key not in PROJECTIONS or weight.dim() != 3:
        return "experts that the model multiplies in its own way"
    experts, *shape = weight.shape
    matrix = None
    if stored is not None:
        matrices = [one for index in range(experts) if (one := stored.expert(index)) is not None]
        if len(matrices) < experts:
            return "stored in another shape"
        matrix = joined(tuple(matrices))  # its kind is one that all experts have
    outputs, inputs = reversed(shape) if module.is_transposed else shape
    kind, group = _kind(outputs, inputs, method, matrix, True)
    if kind not in ("int4", "int8"):
        return kind
    return Weight(path, outputs, inputs, kind, None, stored, group, key, experts)


def _has_groups(matrix: StoredMatrix | None) -> bool:
    return matrix is not None and matrix.kind == "int4"


def _kind(outputs: int, inputs: int, method: str, matrix: StoredMatrix | None, may_be_four: bool) -> tuple[Any, int]:
    """(the kind of a weight [outputs, inputs], or why it stays exact; inputs that share a scale)."""
    if method == "stored" and (matrix is None or matrix.kind == "exact"):
        return "stored unquantized" if matrix is None else f"stored as {matrix.format}", GROUP
    grouped = _has_groups(matrix)
    group = matrix.group if matrix is not None and grouped else GROUP
    four = method != "int8" and may_be_four and (grouped or method == "int4")
    if four and not why_not_int4(outputs, inputs, group):
        return "int4", group
    return why_not_int8(outputs, inputs) or "int8", GROUP


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
        made = _made_experts(weight, old, fixed) if weight.experts else _made(weight, old, fixed)
        if made is None:
            kept[_LOSES] += 1
            if weight.stored is not None:
                _set_weight(module, weight, nn.Parameter(weight.stored.filled(getattr(old, weight.name).dtype), False))
            continue
        layer, held = made
        if weight.experts:
            delattr(old, weight.name)  # a parameter does not give way to a module
            setattr(old, weight.name, layer)
            use_packed(old)
        else:
            module.set_submodule(weight.path, layer)
        if weight.head is not None and (head := module.get_submodule(weight.head)).weight is old.weight:
            module.set_submodule(weight.head, Int8Linear(*held, head.bias, fixed))
        tensors += held
        formats[weight.kind] += 1
        num_weights += weight.numel
        del old, made
        give_back_freed()  # else what parts of a weight leave behind adds up
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
    bias = getattr(old, "bias", None)
    matrix = None if weight.stored is None else weight.stored.matrix()
    *held, lost, whole = _packed(weight, matrix, old.weight)
    codes, scales = held
    if _loses(lost, whole):
        return None
    if weight.kind == "int4":
        return Int4Linear(codes, scales, weight.outputs, bias, fixed), (codes, scales)
    if not isinstance(old, nn.Embedding):
        return Int8Linear(codes, scales, bias, fixed), (codes, scales)
    factor = getattr(old, "embed_scale", None)
    factor = factor.to(scales.dtype) if isinstance(factor, torch.Tensor) else factor
    return Int8Embedding(codes, scales, factor), (codes, scales)


def _made_experts(weight: Weight, old: Any, fixed: bool) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]] | None:
    """`_made` for the tensor of all experts of a layer, one expert after the other."""
    values, lost, whole = getattr(old, weight.name), 0.0, 0.0

    def parts() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        nonlocal lost, whole
        for index in range(weight.experts):
            own = values[index].t() if old.is_transposed else values[index]
            matrix = None if weight.stored is None else weight.stored.expert(index)
            codes, scales, more_lost, more = _packed(weight, matrix, own)
            lost, whole = lost + more_lost, whole + more
            yield codes, scales

    layer = PackedExperts(weight.kind, parts(), (weight.experts, weight.outputs, weight.inputs), fixed)
    return None if _loses(lost, whole) else (layer, (layer.codes, layer.scales))


def _loses(lost: float, whole: float) -> bool:
    """Whether too much of a weight is lost; squares of the error, and of the weight."""
    return lost > whole * MOST_ERROR**2


def _packed(
    weight: Weight, matrix: StoredMatrix | None, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Codes and scales of one matrix, and the squares of its error and of its numbers; 0 where the files decide.

    ``values``: [outputs, inputs], where ``matrix`` is None.
    """
    shape, rows = (weight.outputs, weight.inputs), rows_at_once(weight.inputs)
    if weight.kind == "int8" and matrix is not None and matrix.kind == "int8":
        return *join_int8(matrix.codes(rows), *shape), 0.0, 0.0
    if weight.kind == "int4" and matrix is not None and matrix.kind == "int4":
        return *pack_int4(matrix.codes(rows), *shape, weight.group), 0.0, 0.0
    parts = row_parts(values) if matrix is None else matrix.values(rows)
    if weight.kind == "int8":
        return pack_int8(parts, *shape)
    groups = (nearest_groups(part, weight.group) for part in parts)
    return *pack_int4(groups, *shape, weight.group), 0.0, 0.0


def _set_weight(module: Any, weight: Weight, value: nn.Parameter) -> None:
    for path in (weight.path, weight.head):
        if path is not None:
            setattr(module.get_submodule(path), weight.name, value)
