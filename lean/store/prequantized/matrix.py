"""One quantized matrix of a checkpoint: where its codes, scales and zeros lie, and its rows.

w = (code - zero) x scale. In lean's layout that is (code - 8) x scale + (8 - zero) x scale.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lean.store.matrix import StoredKind, StoredMatrix
from lean.store.prequantized.files import TensorFiles
from lean.store.prequantized.scheme import STEP, Scheme
from lean.store.prequantized.words import AWQ_ORDER, columns, one_more, rows

# Names of a layer's tensors, after the name of the layer.
WORDS = {"gptq": "qweight", "awq": "qweight", "compressed-tensors": "weight_packed"}
SCALES = {"gptq": "scales", "awq": "scales", "compressed-tensors": "weight_scale"}
ZEROS = {"gptq": "qzeros", "awq": "qzeros", "compressed-tensors": "weight_zero_point"}
ORDER = {"gptq": "g_idx", "awq": "g_idx", "compressed-tensors": "weight_g_idx"}
WHOLE_BYTES = "weight"  # int8 codes of compressed-tensors
_MOST_GROUP = 256  # of the int4 product
_ELEMENTS = 1 << 20  # numbers that are made at a time


def fill(out: torch.Tensor, matrix: StoredMatrix) -> None:
    """Write the numbers of a matrix to ``out`` [outputs, inputs], part by part."""
    start = 0
    for values in matrix.values(max(8, _ELEMENTS // out.shape[1] // 8 * 8)):
        out[start : start + len(values)] = values
        start += len(values)


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix [outputs, inputs] of the module; see `lean.store.matrix`.

    Attributes:
        stem: name of the layer in the files.
        stored_group: inputs that share a scale in the file.
    """

    name: str
    shape: tuple[int, int]
    stem: str
    bits: int
    stored_group: int
    scheme: Scheme
    files: TensorFiles

    @property
    def kind(self) -> StoredKind:
        return "int4" if self.bits == 4 else "int8"

    @property
    def format(self) -> str:
        return f"{self.scheme.method} {self.kind}"

    @property
    def group(self) -> int:
        """The largest group that the int4 product takes and that divides the stored one; 0: there is none."""
        sizes = (size for size in (_MOST_GROUP, 128, 64, STEP) if self.stored_group % size == 0)
        return next(sizes, 0)

    def codes(self, rows_at_once: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        scales, zeros = self._scales_and_zeros()
        for part, codes in self._codes(rows_at_once):
            if self.bits == 8:
                yield codes, scales[part], torch.zeros_like(scales[part])
                continue
            repeats = self.stored_group // self.group
            scale = scales[part].repeat_interleave(repeats, 1)
            yield codes, scale, (8 - zeros[part].repeat_interleave(repeats, 1)) * scale

    def values(self, rows_at_once: int) -> Iterator[torch.Tensor]:
        scales, zeros = self._scales_and_zeros()
        for part, codes in self._codes(rows_at_once):
            wide = codes.float().unflatten(1, (-1, self.stored_group))
            yield ((wide - zeros[part, :, None]) * scales[part, :, None]).flatten(1)

    def matrix(self) -> StoredMatrix:
        return self

    def expert(self, index: int) -> None:
        return None

    def filled(self, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(self.shape, dtype=dtype)
        fill(out, self)
        return out

    def _read(self, names: dict[str, str]) -> torch.Tensor:
        return self.files.read(f"{self.stem}.{names[self.scheme.method]}")

    def _codes(self, rows_at_once: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows, and their codes [rows, inputs]: uint8 of 4 bits, int8 of 8. ``rows_at_once``: a multiple of 8."""
        whole = f"{self.stem}.{WORDS[self.scheme.method]}" not in self.files.entries
        stored = self.files.read(f"{self.stem}.{WHOLE_BYTES}") if whole else self._read(WORDS)
        for start in range(0, self.shape[0], rows_at_once):
            part = slice(start, min(start + rows_at_once, self.shape[0]))
            yield part, stored[part] if whole else self._codes_of(stored, part)

    def _codes_of(self, words: torch.Tensor, part: slice) -> torch.Tensor:
        if self.scheme.method == "gptq":
            return rows(words[:, part])[:, : self.shape[1]]
        if self.scheme.method == "awq":
            codes = columns(words[:, part.start // 8 : -(-part.stop // 8)], order=AWQ_ORDER)
            return codes[:, : part.stop - part.start].t().contiguous()
        codes = columns(words[part], self.bits)[:, : self.shape[1]]
        return codes if self.bits == 4 else (codes.to(torch.int16) - 128).to(torch.int8)

    def _scales_and_zeros(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [outputs, groups] each."""
        outputs, scales = self.shape[0], self._read(SCALES).float()
        if self.scheme.method != "compressed-tensors":
            scales, words = scales.t(), self._read(ZEROS)
            order = AWQ_ORDER if self.scheme.method == "awq" else ()
            zeros = columns(one_more(words) if self.scheme.less_one else words, order=order).t()
            return scales.contiguous(), zeros.float()
        scales = scales.reshape(outputs, -1)
        middle = 8 if self.bits == 4 else 0  # what a code of 0 is without zeros
        if f"{self.stem}.{ZEROS[self.scheme.method]}" not in self.files.entries:
            return scales, torch.full_like(scales, middle)
        zeros = self._read(ZEROS)
        if zeros.dtype is torch.int32:  # packed along the outputs, as codes from 0
            return scales, rows(zeros).t()[:outputs].float()
        return scales, zeros.reshape(outputs, -1).float() + middle
