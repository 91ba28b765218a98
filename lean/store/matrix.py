"""What the packing of weights asks of a file: the rows of one matrix, as codes or as numbers, part by part.

A tensor of a module is one matrix, or holds the matrices of all experts of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# int4    groups of 4-bit codes, w = (code - 8) x scale + zero
# int8    rows of 8-bit codes, w = code x scale
# coarse  another quantized format
# exact   unquantized numbers
StoredKind = Literal["int4", "int8", "coarse", "exact"]


class StoredMatrix(Protocol):
    """One matrix [outputs, inputs] of the module as files hold it."""

    @property
    def kind(self) -> StoredKind: ...

    @property
    def format(self) -> str:
        """What the file calls it, for people."""

    @property
    def group(self) -> int:
        """Inputs that share a scale and a zero in `codes`; only of the kind int4."""

    def codes(self, rows_at_once: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Codes, scales and zeros of rows, part by part; only of the kinds int4 and int8.

        int4: [rows, inputs] uint8 from 0 to 15, and float32 [rows, inputs / group] each. int8: [rows, inputs] int8, and
        float32 [rows, 1] each; the zeros are 0.

        Raises:
            ModelError: the file cannot be read.
        """

    def values(self, rows_at_once: int) -> Iterator[torch.Tensor]:
        """The numbers of rows, float32 [rows, inputs], part by part. Raises ModelError."""


class StoredTensor(Protocol):
    """A tensor of the module as files hold it."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def matrix(self) -> StoredMatrix | None:
        """A tensor [outputs, inputs]; None: the files have no rows of it, as it is transposed or made of several."""

    def expert(self, index: int) -> StoredMatrix | None:
        """Of a tensor [experts, ...], the matrix [outputs, inputs] of one expert; None: as above."""

    def filled(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole tensor. Raises ModelError."""


@dataclass(frozen=True)
class Joined:
    """The rows of several matrices with the same inputs, one matrix after the other, or their rows in turn."""

    parts: tuple[StoredMatrix, ...]
    in_turn: bool

    @property
    def kind(self) -> StoredKind:
        kinds = {(part.kind, part.group if part.kind == "int4" else 0) for part in self.parts}
        return self.parts[0].kind if len(kinds) == 1 else "coarse"

    @property
    def format(self) -> str:
        return " and ".join(dict.fromkeys(part.format for part in self.parts))

    @property
    def group(self) -> int:
        return self.parts[0].group

    def codes(self, rows_at_once: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        import torch

        streams = [part.codes(self._each(rows_at_once)) for part in self.parts]
        for found in self._arranged(streams):
            columns = list(zip(*found))
            codes, scales, zeros = (self._woven(column) if self.in_turn else torch.cat(column) for column in columns)
            yield codes, scales, zeros

    def values(self, rows_at_once: int) -> Iterator[torch.Tensor]:
        import torch

        for found in self._arranged([part.values(self._each(rows_at_once)) for part in self.parts]):
            yield self._woven(found) if self.in_turn else torch.cat(tuple(found))

    def _each(self, rows_at_once: int) -> int:
        return max(1, rows_at_once // len(self.parts)) if self.in_turn else rows_at_once

    def _arranged(self, streams: list[Iterator[T]]) -> Iterator[Sequence[T]]:
        """What to put together. Matrices one after the other are put together whole: parts of rows are aligned."""
        if self.in_turn:
            yield from zip(*streams)
        else:
            yield [part for stream in streams for part in stream]

    @staticmethod
    def _woven(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        return torch.stack(tuple(parts), dim=1).flatten(0, 1)


def joined(parts: tuple[StoredMatrix, ...], *, in_turn: bool = False) -> StoredMatrix:
    """See `Joined`; one matrix alone stays as it is."""
    return parts[0] if len(parts) == 1 else Joined(parts, in_turn)
