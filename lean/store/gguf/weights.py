"""The tensors of a GGUF file as those of transformers' module: each is used, or the file is refused by name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lean.errors import ModelError, one_line
from lean.store.gguf.architectures import Architecture, Change
from lean.store.gguf.config import OUTPUT, architecture
from lean.store.gguf.file import GgufFile
from lean.store.gguf.groups import GROUP, GROUPED, UNQUANTIZED, grouped_rows
from lean.store.gguf.header import GgufTensor
from lean.store.gguf.tensors import decoded_rows, dequantize, require_decoder
from lean.store.matrix import StoredKind, StoredMatrix, joined

if TYPE_CHECKING:
    import numpy as np
    import torch

# Frequencies that the first converters stored, and that every program computes itself.
KNOWN_UNUSED = re.compile(r"blk\.\d+\.attn_rot_embd(\.weight)?|rope\.freqs")


@dataclass(frozen=True)
class TensorRows:
    """Rows of a tensor of a file; see `lean.store.matrix.StoredMatrix`.

    Attributes:
        span, order: see `lean.store.gguf.tensors.ordered_rows`.
    """

    tensor: GgufTensor
    span: tuple[int, int] | None = None
    order: np.ndarray | None = None

    @property
    def kind(self) -> StoredKind:
        kind = self.tensor.type
        return "int4" if kind in GROUPED else "exact" if kind in UNQUANTIZED else "coarse"

    @property
    def format(self) -> str:
        return self.tensor.type_name

    @property
    def group(self) -> int:
        return GROUP

    def codes(self, rows_at_once: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        return grouped_rows(self.tensor, rows_at_once, self.order, self.span)

    def values(self, rows_at_once: int) -> Iterator[torch.Tensor]:
        return (part.float() for part in decoded_rows(self.tensor, rows_at_once, self.order, self.span))


@dataclass(frozen=True)
class Target:
    """One tensor of the module and what it is made from; without origins it is 0.

    See `lean.store.matrix.StoredTensor`.
    """

    name: str
    shape: tuple[int, ...]
    origins: tuple[GgufTensor, ...]
    change: Change
    heads: int = 1

    def matrix(self) -> StoredMatrix | None:
        if len(self.origins) != 1 or self.change not in ("as_is", "interleave"):
            return None
        return TensorRows(self.origins[0], order=row_order(self))

    def expert(self, index: int) -> StoredMatrix | None:
        if self.change not in ("as_is", "transpose", "stack", "weave"):
            return None
        spans = ((origin, index * origin.shape[1]) for origin in self.origins)
        parts = tuple(TensorRows(origin, (first, first + origin.shape[1])) for origin, first in spans)
        return joined(parts, in_turn=self.change == "weave")

    def filled(self, dtype: torch.dtype) -> torch.Tensor:
        import torch

        if not self.origins:
            return torch.zeros(self.shape, dtype=dtype)
        # Vectors change in float32, before they are rounded; for larger tensors the change only moves numbers.
        exact = len(self.shape) == 1 and dtype is not torch.float64
        parts = [dequantize(tensor, torch.float32 if exact else dtype) for tensor in self.origins]
        return _changed(parts, self.change, self.heads).to(dtype).contiguous()


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file whose tensors all have their place in transformers' module: ``targets`` are the module's tensors."""

    file: GgufFile
    targets: tuple[Target, ...]


def plan_weights(file: GgufFile, module: torch.nn.Module) -> GgufModel:
    """How to fill a module that was built from the file's configuration, on any device. Reads no weights.

    Raises:
        ModelError: a tensor is missing, not used, of another shape than the metadata says, or cannot be decoded.
    """
    arch, name = architecture(file), file.path.name
    config: Any = module.config
    stems = {re.sub(r"^blk\.\d+\.", "", tensor) for tensor in file.tensors}
    optional = {bias for biases in arch.biases.values() for bias in biases if bias not in stems}
    targets, missing = [], []
    for target, weight in module.state_dict().items():
        origin, prefix = _origin(arch, target)
        if origin is None:
            raise ModelError(f"{name}: no tensor of a GGUF file is known for {target} of this transformers version")
        if origin.tensors == (OUTPUT,) and OUTPUT not in file.tensors and config.tie_word_embeddings:
            continue
        if set(origin.tensors) <= optional:
            targets.append(Target(target, tuple(weight.shape), (), "as_is"))
            continue
        wanted = [prefix + tensor for tensor in origin.tensors]
        missing += [tensor for tensor in wanted if tensor not in file.tensors]
        origins = tuple(file.tensors[tensor] for tensor in wanted if tensor in file.tensors)
        heads = config.num_attention_heads if "q_proj" in target else getattr(config, "num_key_value_heads", 1)
        targets.append(Target(target, tuple(weight.shape), origins, origin.change, heads))
    if missing:
        raise ModelError(f"{name}: tensors missing from the file: {_listed(missing)}")
    used = {tensor.name for planned in targets for tensor in planned.origins} | set(arch.factors)
    unused = [tensor for tensor in file.tensors if tensor not in used and not KNOWN_UNUSED.fullmatch(tensor)]
    if unused:
        model_type = file.metadata["general.architecture"]
        raise ModelError(
            f"{name}: lean has no use for {_listed(unused)} in a {model_type} file: answers would be wrong"
        )
    for planned in targets:
        _check_shapes(name, planned)
        for found in planned.origins:
            require_decoder(found)
    return GgufModel(file, tuple(targets))


def read_model(file: GgufFile, config: Any) -> GgufModel:
    """`plan_weights` for the module that transformers builds from ``config``."""
    import torch
    from transformers import AutoModelForCausalLM

    from lean.store.library import quiet

    with torch.device("meta"), quiet():
        return plan_weights(file, AutoModelForCausalLM.from_config(config))


def load_weights(
    model: GgufModel, config: Any, dtype: torch.dtype, later: Collection[str] = (), **arguments: Any
) -> Any:
    """transformers' module with the file's weights in ``dtype``, on the CPU.

    Args:
        config: made from `config_fields`.
        later: names of tensors of the module that are not read. They are zeros that take no memory.
        arguments: of `from_pretrained`.

    Raises:
        ModelError: the file cannot be read.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from lean.store.library import quiet

    state = {target.name: target.filled(dtype) for target in model.targets if target.name not in later}
    state |= {
        target.name: torch.zeros(1, dtype=dtype).expand(target.shape)
        for target in model.targets
        if target.name in later
    }
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with quiet():
        module, report = cls.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True, **arguments
        )
    if wrong := sorted(key for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in report[kind]):
        raise ModelError(f"{model.file.path.name}: transformers did not take {_listed(list(map(str, wrong)))}")
    return module


def row_order(target: Target) -> np.ndarray | None:
    """Which row of its tensor each row of the module's matrix is; None where they are in the same order."""
    import numpy as np

    if target.change != "interleave":
        return None
    return np.arange(target.shape[0]).reshape(target.heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _changed(parts: list[torch.Tensor], change: Change, heads: int) -> torch.Tensor:
    import torch

    first = parts[0]
    if change == "interleave":
        return first.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(first.shape)
    if change == "minus_one":
        return first - 1
    if change == "transpose":
        return first.transpose(-1, -2)
    if change == "row":
        return first.reshape(1, -1)
    if change == "stack":
        return torch.cat(parts, dim=1)
    if change == "weave":  # [experts, rows, columns] or [experts, rows], rows gate and up in turn -> the last dim
        woven = torch.stack(parts, dim=2).flatten(1, 2)
        return woven.transpose(1, 2) if woven.ndim == 3 else woven
    return first


def _check_shapes(name: str, target: Target) -> None:
    """The changed shapes, from the shapes in the file alone, must be those of the module."""
    if not target.origins:
        return
    shapes = [list(tensor.shape) for tensor in target.origins]
    first = shapes[0]
    want = list(target.shape)
    got = {
        "as_is": first,
        "minus_one": first,
        "interleave": first,
        "transpose": [*first[:-2], *first[:-3:-1]],
        "row": [1, first[-1]],
        "stack": [*first[:1], sum(shape[1] for shape in shapes) if len(first) > 1 else 0, *first[2:]],
        "weave": [*first[:1], *first[2:], 2 * first[1] if len(first) > 1 else 0],
    }[target.change]
    alike = all(shape == first for shape in shapes)
    row = target.change == "row" and first in ([want[-1]], want)
    if not alike or not (row or got == want) or (target.change == "interleave" and want[0] % (2 * target.heads)):
        tensors = " and ".join(tensor.name for tensor in target.origins)
        raise ModelError(
            f"{name}: {one_line(tensors, 120)} has shape {first}; the metadata asks for {want} as {target.name}: "
            "the two do not belong together"
        )


def _origin(arch: Architecture, target: str) -> tuple[Any, str]:
    """(origin, prefix of its tensors' names) of one tensor of the module."""
    match = re.fullmatch(re.escape(arch.layers) + r"(\d+)\.(.+)", target)
    return (arch.layer.get(match[2]), f"blk.{match[1]}.") if match else (arch.top.get(target), "")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return one_line(", ".join(sorted(names)[:4]), 200) + more


def unused_notes(tensors: Mapping[str, GgufTensor]) -> list[str]:
    """A line about tensors that are in the file and that no program reads."""
    known = [name for name in tensors if KNOWN_UNUSED.fullmatch(name)]
    return [f"tensors not used, because lean computes them itself: {_listed(known)}"] if known else []
