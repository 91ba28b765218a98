"""Linear layers and embeddings whose weights stay in 4 or 8 bits, multiplied by torch's own CPU products.

int4: w = (code - 8) x scale + zero, codes 0 to 15, one bfloat16 scale and zero for each group of inputs of an output.
int8: w = code x scale, codes -127 to 127, one bfloat16 scale for each output. Activations are bfloat16, sums float32.
Both products give a row the same bits alone and among others, with any number of threads.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lean.quant.unpacked import many_rows_int4, many_rows_int8, takes_many

GROUPS = (32, 64, 128, 256)  # inputs that share a scale and a zero, of the int4 product
OUTPUTS = 16  # outputs of the int4 product come in multiples of it; lean pads them
INT8_INPUTS = 32  # the int8 product reads behind the end of rows whose length is no multiple of it
ROWS = 64  # parts of a weight have a multiple of so many outputs: no CPU's int4 layout mixes two such parts
BITS8 = 127

_aten: Any = torch.ops.aten
_int4_product = _aten._weight_int4pack_mm_for_cpu.default
_int8_product = _aten._weight_int8pack_mm.default
_int4_layout = _aten._convert_weight_to_int4pack_for_cpu.default


def why_not_int4(outputs: int, inputs: int, group: int) -> str | None:
    """Why the int4 product does not take a weight [outputs, inputs]; None where it does."""
    if group not in GROUPS:
        return f"groups of {group}"
    if inputs % group:
        return f"{inputs} inputs, no multiple of {group}"
    return f"{outputs} outputs, fewer than {OUTPUTS}" if outputs < OUTPUTS else None


def why_not_int8(outputs: int, inputs: int) -> str | None:
    """Why the int8 product does not take a weight [outputs, inputs]; None where it does."""
    if inputs % INT8_INPUTS:
        return f"{inputs} inputs, no multiple of {INT8_INPUTS}"
    return f"{outputs} outputs, fewer than {OUTPUTS}" if outputs < OUTPUTS else None


def int4_bytes(outputs: int, inputs: int, group: int) -> int:
    """Bytes of a packed weight, padding included."""
    padded = outputs + -outputs % OUTPUTS
    return padded * (inputs // 2 + 4 * (inputs // group))


def int8_bytes(outputs: int, inputs: int) -> int:
    """Bytes of the codes and scales of a weight."""
    return outputs * (inputs + 2)


def int4_product(
    rows: torch.Tensor, codes: torch.Tensor, group: int, scales: torch.Tensor, may_unpack: bool
) -> torch.Tensor:
    """rows [n, in] bfloat16 times a weight as `pack_int4` returns it -> [n, out + padding]."""
    out = many_rows_int4(rows, codes, group, scales) if may_unpack else None
    return _int4_product(rows, codes, group, scales) if out is None else out


def int8_product(rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, may_unpack: bool) -> torch.Tensor:
    """rows [n, in] bfloat16 times codes [out, in] int8 and scales [out] bfloat16 -> [n, out]."""
    out = many_rows_int8(rows, codes, scales) if may_unpack else None
    return _int8_product(rows, codes, scales) if out is None else out


class _Packed(nn.Module):
    """x [..., in] -> [..., out] of the same dtype, computed in bfloat16.

    Args:
        fixed: compute any number of rows in the same way, so that a row's bits do not depend on their number.
    """

    def __init__(self, out_features: int, in_features: int, bias: torch.Tensor | None, fixed: bool) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self.bias = bias if bias is None or isinstance(bias, nn.Parameter) else nn.Parameter(bias, False)
        self._takes_many = not fixed and takes_many()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16)  # some modules compute in float32
        out = self._product(rows.contiguous())
        if self.bias is not None:
            out = out + self.bias
        return out.reshape(*x.shape[:-1], self.out_features).to(x.dtype)

    @property
    def _unpacks(self) -> bool:
        """Whether many rows may be multiplied by unpacked weights; not in compiled steps, which have few rows."""
        return self._takes_many and not torch.compiler.is_dynamo_compiling()

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Int4Linear(_Packed):
    """A linear layer with int4 weights, as `pack_int4` returns them.

    Args:
        codes: [out + padding, in / 2] uint8 in the layout of this CPU.
        scales: [in / group, out + padding, 2] bfloat16, scale and zero.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, outputs: int, bias: torch.Tensor | None, fixed: bool
    ) -> None:
        super().__init__(outputs, codes.shape[1] * 2, bias, fixed)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.group = self.in_features // scales.shape[0]

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        return int4_product(rows, self.codes, self.group, self.scales, self._unpacks)[:, : self.out_features]


class Int8Linear(_Packed):
    """A linear layer with codes [out, in] int8 and scales [out] bfloat16."""

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, fixed: bool) -> None:
        super().__init__(codes.shape[0], codes.shape[1], bias, fixed)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        return int8_product(rows, self.codes, self.scales, self._unpacks)


class Int8Embedding(nn.Module):
    """ids [...] -> rows [..., dim] bfloat16 of int8 codes. A head tied to it shares the tensors.

    Args:
        factor: what the rows are multiplied with, a number or a tensor; None for nothing.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor | None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = codes.shape
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.factor = factor

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = (self.codes[ids].float() * self.scales[ids].float()[..., None]).to(self.scales.dtype)
        return rows if self.factor is None else rows * self.factor


def pack_int4(
    parts: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], outputs: int, inputs: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of an `Int4Linear`, from parts of its rows.

    Args:
        parts: codes [rows, in] uint8, scales and zeros [rows, in / group]; every part but the last has a multiple of
            ROWS rows.
    """
    padded = outputs + -outputs % OUTPUTS
    packed = torch.empty(padded, inputs // 2, dtype=torch.uint8)
    scales = torch.zeros(inputs // group, padded, 2, dtype=torch.bfloat16)
    start = 0
    for codes, scale, zero in parts:
        rows = len(codes)
        wide = codes.to(torch.int32)
        if rows % OUTPUTS:
            wide = nn.functional.pad(wide, (0, 0, 0, -rows % OUTPUTS), value=8)
        packed[start : start + len(wide)] = _int4_layout(wide, 1)
        scales[:, start : start + rows, 0] = scale.t()
        scales[:, start : start + rows, 1] = zero.t()
        start += rows
    return packed, scales


def pack_int8(
    parts: Iterable[torch.Tensor], outputs: int, inputs: int
) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Codes and scales of a weight that comes as float parts of its rows, and the squares of its error and numbers."""
    codes = torch.empty(outputs, inputs, dtype=torch.int8)
    scales = torch.empty(outputs, dtype=torch.bfloat16)
    start, lost, whole = 0, 0.0, 0.0
    for values in parts:
        values = values.float()
        scale = (values.abs().amax(1) / BITS8).bfloat16()
        wide = scale.float().clamp(min=torch.finfo(torch.float32).tiny)[:, None]
        rounded = (values / wide).round_().clamp_(-BITS8, BITS8)
        rows = slice(start, start + len(values))
        codes[rows], scales[rows] = rounded.to(torch.int8), scale
        lost += float((rounded.mul_(wide) - values).square().sum(dtype=torch.float64))
        whole += float(values.square().sum(dtype=torch.float64))
        start += len(values)
    return codes, scales, lost, whole


def join_int8(
    parts: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], outputs: int, inputs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of a weight that comes in codes of 8 bits: parts of codes [rows, in] int8, scales [rows, 1]."""
    codes = torch.empty(outputs, inputs, dtype=torch.int8)
    scales = torch.empty(outputs, dtype=torch.bfloat16)
    start = 0
    for part, scale, _ in parts:
        rows = slice(start, start + len(part))
        codes[rows], scales[rows] = part, scale[:, 0]
        start += len(part)
    return codes, scales


def rows_at_once(inputs: int, elements: int = 1 << 18) -> int:
    """How many rows a part of a weight has: a multiple of ROWS, with about ``elements`` numbers in all."""
    return max(1, elements // (inputs * ROWS)) * ROWS


def row_parts(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """The rows of a weight in float32, part by part."""
    return (part.float() for part in weight.split(rows_at_once(weight.shape[1])))
