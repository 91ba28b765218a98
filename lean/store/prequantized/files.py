"""The tensors of a checkpoint folder, each read when it is asked for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lean.errors import ModelError, one_line
from lean.store.checkpoint import INDEX, SINGLE, read_object


class TensorFiles:
    """A checkpoint folder that `lean.store.checkpoint.check_checkpoint` has accepted.

    Attributes:
        entries: dtype and shape of every tensor, as the headers have them, by name.
    """

    def __init__(self, folder: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
        self.entries = entries
        self._folder = folder
        whole = (folder / SINGLE).is_file()
        self._opened: dict[str, Any] = {}
        self._files: Mapping[str, str] = {} if whole else read_object(folder / INDEX)["weight_map"]

    def shape(self, name: str) -> list[int]:
        return self.entries[name]["shape"]

    def read(self, name: str) -> torch.Tensor:
        """A tensor as a view of its file. Raises ModelError."""
        file = self._files.get(name, SINGLE)
        try:
            if file not in self._opened:
                self._opened[file] = safe_open(self._folder / file, framework="pt")  # type: ignore[no-untyped-call]
            return self._opened[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {name} of {file}: {one_line(error)}") from None

    def close(self) -> None:
        """Forget the open files. Tensors that were read stay valid; reading opens the files again."""
        self._opened.clear()
