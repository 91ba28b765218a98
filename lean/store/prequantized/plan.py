"""The tensors of a quantized checkpoint as those of transformers' module: each is used, or refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lean.errors import ModelError, one_line
from lean.store.prequantized.files import TensorFiles
from lean.store.prequantized.matrix import ORDER, SCALES, WHOLE_BYTES, WORDS, ZEROS, QuantizedMatrix
from lean.store.prequantized.scheme import STEP, WHOLE_ROW, Method, Scheme, read_scheme
from lean.store.prequantized.stack import ExactMatrix, ExpertStack, exact_matrices, exact_stacks, stacked_layers

_SHAPE = "weight_shape"  # of compressed-tensors; the module has it, too
_KINDS = {"words": WORDS, "scales": SCALES, "zeros": ZEROS, "order": ORDER}
_FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class CheckpointModel:
    """A checkpoint whose tensors all have their place in transformers' module.

    Attributes:
        method: who quantized it; None: nobody.
        targets: the tensors of the module that are quantized or may become so.
        exact: names of the other tensors in the files.
        model_class: transformers' class.
    """

    method: Method | None
    files: TensorFiles
    targets: tuple[QuantizedMatrix | ExactMatrix | ExpertStack, ...]
    exact: tuple[str, ...]
    model_class: Any

    def described(self) -> Mapping[str, Mapping[str, Any]]:
        """dtype and shape of the tensors, as if no matrix were quantized."""
        exact = {name: self.files.entries[name] for name in self.exact}
        return exact | {target.name: {"dtype": "F16", "shape": list(target.shape)} for target in self.targets}

    def load(self, later: Collection[str], *, dtype: torch.dtype, **arguments: Any) -> Any:
        """What `from_pretrained` of transformers' class returns for these tensors, on the CPU.

        Args:
            later: names of ``targets`` that are not read. They are zeros that take no memory.
            arguments: of `from_pretrained`.

        Raises:
            ModelError: a file cannot be read.
        """
        state: dict[str, Any] = {name: self.files.later(name) for name in self.exact}
        for target in self.targets:
            if target.name in later:
                state[target.name] = torch.zeros(1, dtype=dtype).expand(target.shape)
            elif isinstance(target, ExactMatrix):  # transformers decides on the dtype
                state[target.key] = self.files.later(target.key)
            else:
                state[target.name] = target.filled(dtype)
        return self.model_class.from_pretrained(None, state_dict=state, dtype=dtype, **arguments)


def plan_quantized(
    files: TensorFiles, settings: Mapping[str, Any], method: Method, module: Any, name: str
) -> CheckpointModel:
    """Where the tensors of a folder go in a module, on any device. Reads the orders of inputs, and no weights.

    Args:
        settings: ``quantization_config``.
        name: of the model, for errors.

    Raises:
        ModelError: lean does not read such a checkpoint, or its tensors do not fit the module or each other.
    """
    scheme, entries = read_scheme(settings, method, name), files.entries
    parts = {kinds[method] for kinds in _KINDS.values()} | ({_SHAPE} if method == "compressed-tensors" else set())
    stems: dict[str, set[str]] = {}
    for key in entries:
        stem, _, part = key.rpartition(".")
        if part in parts or _is_whole(key, method, files):
            stems.setdefault(stem, set()).add(part)
    if not stems:
        raise ModelError(
            f"{name}: config.json says that {method} quantized the weights, but no tensor ends in {WORDS[method]}: "
            "the files do not belong together"
        )
    shapes = {key: tuple(weight.shape) for key, weight in module.state_dict().items()}
    tied = _tied_head(module)
    targets, used = [], set[str]()
    stacks = stacked_layers(stems, module)
    experts = {stem for layers in stacks.values() for each in layers for stem in each}
    for stem, found in stems.items():
        used |= {f"{stem}.{part}" for part in found}
        used |= _zero_bias(stem, shapes, scheme, files)
        if stem in experts:
            continue
        place = _place(stem, module, shapes, scheme)
        if place != tied:
            targets.append(_matrix(stem, place, shapes[place], scheme, files))
    made = [_stack(place, shapes[place], layers, scheme, files) for place, layers in stacks.items()]
    exact = tuple(key for key in entries if key not in used)
    return CheckpointModel(method, files, (*targets, *made), exact, type(module))


def plan_unquantized(files: TensorFiles, module: Any) -> CheckpointModel:
    """An unquantized checkpoint whose matrices are read when they are packed, also those of experts."""
    matrices, stacks = exact_matrices(files, module), exact_stacks(files, module)
    used = {part.key for stack in stacks for parts in stack.parts for part in parts if isinstance(part, ExactMatrix)}
    used |= {matrix.key for matrix in matrices}
    exact = tuple(key for key in files.entries if key not in used)
    return CheckpointModel(None, files, (*matrices, *stacks), exact, type(module))


def _stack(
    place: str, shape: tuple[int, ...], layers: list[tuple[str, ...]], scheme: Scheme, files: TensorFiles
) -> ExpertStack:
    """The quantized experts of a layer."""
    own = (shape[1] // len(layers[0]), shape[2])
    parts = tuple(tuple(_matrix(stem, place, own, scheme, files) for stem in each) for each in layers)
    return ExpertStack(place, shape, parts)


def _is_whole(key: str, method: Method, files: TensorFiles) -> bool:
    """Whether a tensor holds the codes of a layer in bytes."""
    is_weight = method == "compressed-tensors" and key.endswith(f".{WHOLE_BYTES}")
    return is_weight and files.entries.get(key, {}).get("dtype") == "I8"


def _tied_head(module: Any) -> str | None:
    """Name of the head's weight where the module ties it to its embedding, which counts then."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if head is None or head is embedding or head.weight is not embedding.weight:
        return None
    return next((f"{path}.weight" for path, part in module.named_modules() if part is head), None)


def _place(stem: str, module: Any, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> str:
    """The module's tensor that a layer of the files is."""
    for path in (stem, f"{module.base_model_prefix}.{stem}"):
        if f"{path}.weight" in shapes and isinstance(module.get_submodule(path), torch.nn.Linear):
            return f"{path}.weight"
    raise ModelError(
        f"{scheme.model}: {scheme.method} quantized layer {_short(stem)}, for which lean has no place in "
        f"{type(module).__name__}: pass the unquantized checkpoint"
    )


def _zero_bias(stem: str, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme, files: TensorFiles) -> set[str]:
    """The bias that some writers add to every layer, where the module has none. Raises ModelError where it counts."""
    key = f"{stem}.bias"
    if key not in files.entries or any(place.endswith(key) for place in shapes):
        return set()
    if files.read(key).any():
        raise ModelError(
            f"{scheme.model}: {_short(key)} is not 0, and the model has no such bias: answers would be wrong"
        )
    return {key}


def _matrix(stem: str, place: str, shape: tuple[int, ...], scheme: Scheme, files: TensorFiles) -> QuantizedMatrix:
    """Check the shapes and dtypes of a layer's tensors, and the order of its inputs."""
    outputs, inputs = shape
    names = {kind: f"{stem}.{kinds[scheme.method]}" for kind, kinds in _KINDS.items()}
    whole = _is_whole(f"{stem}.{WHOLE_BYTES}", scheme.method, files)
    words = f"{stem}.{WHOLE_BYTES}" if whole else names["words"]
    for key in (words, names["scales"]):
        if key not in files.entries:
            raise ModelError(f"{scheme.model}: {_short(key)} is missing from the checkpoint: incomplete download?")
    if whole and files.shape(words) != list(shape):
        raise _misfit(words, shape, scheme, files)
    bits = 8 if whole else _bits(words, shape, scheme, files)
    groups = _groups(names["scales"], shape, scheme, files)
    stored = inputs // groups
    layout = next((key for key in ((bits, stored), (bits, WHOLE_ROW)) if _agrees(key, groups, scheme)), None)
    if layout is None:
        if scheme.method != "compressed-tensors" and bits != 4:
            scheme.refuse(f"{bits} bits ({_short(stem)})", "4 bits")
        if not (scheme.any_group and stored % STEP == 0):
            each = "whole rows" if groups == 1 else f"groups of {stored}"
            raise ModelError(
                f"{scheme.model}: {_short(stem)} has {bits} bits in {each}, which quantization_config does not "
                "describe: the files do not belong together"
            )
    needed = True if layout is None else scheme.layouts[layout]
    _check_zeros(names["zeros"], (outputs, groups), bits, needed, scheme, files)
    _check_order(names["order"], inputs, stored, scheme, files)
    return QuantizedMatrix(place, (outputs, inputs), stem, bits, stored, scheme, files)


def _agrees(layout: tuple[int, int], groups: int, scheme: Scheme) -> bool:
    return layout in scheme.layouts and (layout[1] != WHOLE_ROW or groups == 1)


def _bits(key: str, shape: tuple[int, ...], scheme: Scheme, files: TensorFiles) -> int:
    """Bits of a layer's codes, by the shape of its words."""
    outputs, inputs = shape
    found = files.shape(key)
    rows, columns = found if len(found) == 2 else (0, 0)
    packed, other, along, across = {
        "gptq": (rows, columns, inputs, outputs),
        "awq": (columns, rows, outputs, inputs),
        "compressed-tensors": (columns, rows, inputs, outputs),
    }[scheme.method]
    bits = 32 * packed // along if along else 0
    fits = other == across and bits and packed == -(-along * bits // 32)
    if not fits or files.entries[key]["dtype"] != "I32":
        raise _misfit(key, shape, scheme, files)
    return bits


def _groups(key: str, shape: tuple[int, ...], scheme: Scheme, files: TensorFiles) -> int:
    """Groups of a row, by the shape of the scales."""
    outputs, inputs = shape
    found = files.shape(key)
    if scheme.method == "compressed-tensors" and found == [outputs]:
        found = [outputs, 1]
    own, groups = found[::-1] if scheme.method != "compressed-tensors" and len(found) == 2 else (*found, 0, 0)[:2]
    if len(found) != 2 or own != outputs or not groups or inputs % groups:
        raise _misfit(key, shape, scheme, files)
    if files.entries[key]["dtype"] not in _FLOATS:
        raise _misfit(key, shape, scheme, files)
    return groups


def _check_zeros(key: str, shape: tuple[int, int], bits: int, needed: bool, scheme: Scheme, files: TensorFiles) -> None:
    outputs, groups = shape
    if key not in files.entries:
        if needed:
            raise ModelError(f"{scheme.model}: {_short(key)} is missing from the checkpoint: incomplete download?")
        return
    dtype, found = files.entries[key]["dtype"], files.shape(key)
    if scheme.method != "compressed-tensors":
        fits = dtype == "I32" and outputs % 8 == 0 and found == [groups, outputs // 8]
    elif dtype == "I32":
        fits = bits == 4 and found == [-(-outputs // 8), groups]
    else:
        fits = dtype == "I8" and found in ([outputs, groups], [outputs] if groups == 1 else None)
    if not fits:
        raise _misfit(key, shape, scheme, files)
    if bits == 8 and files.read(key).any():
        scheme.refuse(f"8 bits and zeros ({_short(key)})", "8 bits without zeros")


def _check_order(key: str, inputs: int, group: int, scheme: Scheme, files: TensorFiles) -> None:
    """Raise ModelError where the inputs of a layer are not in groups of neighbours."""
    reads = "groups in the order of the inputs"
    if key not in files.entries:
        if scheme.ordered:
            scheme.refuse(f"act-order (desc_act), and without {_short(key)}", reads)
        return
    order = files.read(key)
    if order.shape != (inputs,) or order.is_floating_point():
        raise _misfit(key, (inputs,), scheme, files)
    if not torch.equal(order.long(), torch.arange(inputs) // group):
        scheme.refuse(f"act-order ({_short(key)})", reads)


def _misfit(key: str, shape: tuple[int, ...], scheme: Scheme, files: TensorFiles) -> ModelError:
    dtype, found = files.entries[key]["dtype"], files.shape(key)
    return ModelError(
        f"{scheme.model}: {_short(key)} has shape {found} and dtype {dtype}, which does not fit a layer of shape "
        f"{list(shape)} that {scheme.method} quantized: the files do not belong together"
    )


def _short(name: str) -> str:
    return one_line(name, 100)
