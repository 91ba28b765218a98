"""Tensors of the module that hold all experts of a layer, whose files have one matrix for each expert."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from lean.store.matrix import StoredKind, StoredMatrix, joined
from lean.store.prequantized.files import TensorFiles
from lean.store.prequantized.matrix import fill

# What transformers does with the experts' matrices, and along which dim.
_JOINS = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class ExactMatrix:
    """An unquantized matrix of the files; see `lean.store.matrix.StoredMatrix`."""

    key: str
    files: TensorFiles
    kind: StoredKind = "exact"
    group: int = 0

    @property
    def format(self) -> str:
        return self.files.entries[self.key]["dtype"]

    def codes(self, rows_at_once: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        raise NotImplementedError("unquantized numbers have no codes")

    def values(self, rows_at_once: int) -> Iterator[torch.Tensor]:
        return (part.float() for part in self.files.read(self.key).split(rows_at_once))


@dataclass(frozen=True)
class ExpertStack:
    """A tensor [experts, outputs, inputs] of the module; see `lean.store.matrix.StoredTensor`.

    ``parts``: by expert, the matrices whose rows are its own, one after the other.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[StoredMatrix, ...], ...]

    def matrix(self) -> None:
        return None

    def expert(self, index: int) -> StoredMatrix:
        return joined(self.parts[index])

    def filled(self, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(self.shape, dtype=dtype)
        for expert, parts in zip(out, self.parts):
            for rows, part in zip(expert.chunk(len(parts)), parts):
                fill(rows, part)
        return out


def stacked_layers(stems: Mapping[str, object] | list[str], module: Any) -> dict[str, list[tuple[str, ...]]]:
    """By name of the module's tensor, the layers of the files that are each expert's matrices, in the order of rows.

    Layers that are no experts, and experts that transformers puts together in another way, are left out, and so is a
    tensor for which not every expert has its layers.
    """
    mapping = get_model_conversion_mapping(module)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    sources = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    tensors = module.state_dict()
    found: dict[str, dict[int, dict[int, str]]] = {}
    for stem in stems:
        name, pattern = rename_source_key(f"{stem}.weight", renamings, converters, module.base_model_prefix, tensors)
        entry = sources.get(pattern or "")
        if pattern is None or entry is None or name not in tensors:
            continue
        if [(type(step).__name__, getattr(step, "dim", None)) for step in entry.operations] not in _JOINS:
            continue
        numbers = [int(part) for part in stem.split(".") if part.isdigit()]
        found.setdefault(name, {}).setdefault(numbers[-1], {})[entry.source_patterns.index(pattern)] = stem
    stacks = {}
    for name, experts in found.items():
        count = len(next(iter(experts.values())))
        whole = all(sorted(parts) == list(range(count)) for parts in experts.values())
        if whole and sorted(experts) == list(range(tensors[name].shape[0])) and tensors[name].shape[1] % count == 0:
            stacks[name] = [tuple(parts[place] for place in sorted(parts)) for _, parts in sorted(experts.items())]
    return stacks


def exact_stacks(files: TensorFiles, module: Any) -> tuple[ExpertStack, ...]:
    """The tensors of a module that unquantized matrices of the files make, where these have the right shapes."""
    stems = [key.removesuffix(".weight") for key in files.entries if key.endswith(".weight") and ".experts." in key]
    shapes, stacks = {key: tuple(weight.shape) for key, weight in module.state_dict().items()}, []
    for name, experts in stacked_layers(stems, module).items():
        keys = [f"{stem}.weight" for layers in experts for stem in layers]
        own = [shapes[name][1] // len(experts[0]), shapes[name][2]]
        if all(files.shape(key) == own and files.entries[key]["dtype"] in _DTYPES for key in keys):
            parts = tuple(tuple(ExactMatrix(f"{stem}.weight", files) for stem in layers) for layers in experts)
            stacks.append(ExpertStack(name, shapes[name], parts))
    return tuple(stacks)
