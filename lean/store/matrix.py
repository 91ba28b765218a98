"""What the packing of weights asks of a file: the rows of one matrix, as codes or as numbers, part by part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

# int4    groups of 4-bit codes, w = (code - 8) x scale + zero
# int8    rows of 8-bit codes, w = code x scale
# coarse  another quantized format
# exact   unquantized numbers
# other   the file has no rows of this matrix: it is transposed, or made of several tensors
StoredKind = Literal["int4", "int8", "coarse", "exact", "other"]


class StoredMatrix(Protocol):
    """One matrix [outputs, inputs] of the module as a file holds it."""

    @property
    def name(self) -> str:
        """Of the module's tensor."""

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
        """The numbers of rows, float32 [rows, inputs], part by part; not of the kind other. Raises ModelError."""

    def filled(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole matrix. Raises ModelError."""
