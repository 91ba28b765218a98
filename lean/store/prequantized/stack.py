"""Unquantized matrices of the files, and tensors of the module that are made of one matrix for each expert."""

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
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True)
class ExactMatrix:
    """An unquantized matrix of the files; see `lean.store.matrix`.

    Attributes:
        name: of the module's tensor that it is; empty for a part of one.
    """

    key: str
    files: TensorFiles
    name: str = ""
    kind: StoredKind = "exact"
    group: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.files.shape(self.key))

    @property
    def format(self) -> str:
        return self.files.entries[self.key]["dtype"]

    def codes(self, rows_at_once: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        raise NotImplementedError("unquantized numbers have no codes")

    def values(self, rows_at_once: int) -> Iterator[torch.Tensor]:
        return (part.float() for part in self.files.read(self.key).split(rows_at_once))

    def matrix(self) -> StoredMatrix:
        return self

    def expert(self, index: int) -> None:
        return None

    def filled(self, dtype: torch.dtype) -> torch.Tensor:
        return self.files.read(self.key).to(dtype, copy=True)


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
    renamings, converters = _mapping(module)
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


def exact_matrices(files: TensorFiles, module: Any) -> tuple[ExactMatrix, ...]:
    """The unquantized matrices of the files that transformers takes as tensors of a module as they are.

    Not an embedding whose tied head is in the files, too: transformers decides what becomes of the two.
    """
    renamings, converters = _mapping(module)
    tensors, found = module.state_dict(), dict[str, str]()
    for key in files.entries:
        name, pattern = rename_source_key(key, renamings, converters, module.base_model_prefix, tensors)
        fits = name in tensors and list(tensors[name].shape) == files.shape(key) and len(files.shape(key)) == 2
        if fits and pattern is None and files.entries[key]["dtype"] in _FLOATS:
            found[name] = key
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if head is not None and head.weight is embedding.weight:
        both = {f"{path}.weight" for path, part in module.named_modules() if part is embedding or part is head}
        if both <= found.keys():
            found = {name: key for name, key in found.items() if name not in both}
    return tuple(ExactMatrix(key, files, name) for name, key in found.items())


def _mapping(module: Any) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    """What transformers does with the tensors of a class's files: other names, and other tensors made of them."""
    mapping = get_model_conversion_mapping(module)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    return renamings, [entry for entry in mapping if isinstance(entry, WeightConverter)]


def exact_stacks(files: TensorFiles, module: Any) -> tuple[ExpertStack, ...]:
    """The tensors of a module that unquantized matrices of the files make, where these have the right shapes."""
    stems = [key.removesuffix(".weight") for key in files.entries if key.endswith(".weight") and ".experts." in key]
    shapes, stacks = {key: tuple(weight.shape) for key, weight in module.state_dict().items()}, []
    for name, experts in stacked_layers(stems, module).items():
        keys = [f"{stem}.weight" for layers in experts for stem in layers]
        own = [shapes[name][1] // len(experts[0]), shapes[name][2]]
        if all(files.shape(key) == own and files.entries[key]["dtype"] in _FLOATS for key in keys):
            parts = tuple(tuple(ExactMatrix(f"{stem}.weight", files) for stem in layers) for layers in experts)
            stacks.append(ExpertStack(name, shapes[name], parts))
    return tuple(stacks)
