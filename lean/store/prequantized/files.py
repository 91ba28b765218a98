"""The tensors of a checkpoint folder, each read when it is asked for."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lean.errors import ModelError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorFiles:
    """The tensors that `lean.store.checkpoint.check_checkpoint` has found in a folder.

    Attributes:
        entries: dtype, shape and place of every tensor, by name.
    """

    def __init__(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        self.entries = entries

    def shape(self, name: str) -> list[int]:
        return self.entries[name]["shape"]

    def read(self, name: str) -> torch.Tensor:
        """A tensor as a view of its part of the file, which takes memory only while the tensor lives.

        Raises ModelError.
        """
        entry = self.entries[name]
        if (dtype := _DTYPES.get(entry["dtype"])) is None:
            raise ModelError(f"cannot read {name} of {entry['file']}: dtype {entry['dtype']}")
        if not math.prod(entry["shape"]):
            return torch.empty(entry["shape"], dtype=dtype)
        size = math.prod(entry["shape"]) * dtype.itemsize
        try:  # a private mapping: what is written to it never reaches the file
            mapped = np.memmap(entry["file"], np.uint8, "c", entry["start"], size)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {name} of {entry['file']}: {error}") from None
        # torch wants numbers at multiples of their size, which not every writer ensures.
        aligned = mapped if entry["start"] % dtype.itemsize == 0 else mapped.copy()
        return torch.from_numpy(aligned).view(dtype).reshape(entry["shape"])

    def later(self, name: str) -> "LaterTensor":
        return LaterTensor(name, self)


class LaterTensor:
    """A tensor that transformers reads when its turn comes, by taking all of it: ``tensor[...]``."""

    def __init__(self, name: str, files: TensorFiles) -> None:
        self._name, self._files = name, files

    def __getitem__(self, part: Any) -> torch.Tensor:
        return self._files.read(self._name)[part]
