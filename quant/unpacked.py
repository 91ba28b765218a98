"""Products of many rows with int4 and int8 weights: a part of the weights is unpacked at a time, and multiplied.

torch's packed products read weights at the speed of memory for a few rows, but multiply many rows more slowly than a
matrix product does. Parts stay in the CPU's cache. They are bfloat16 where the CPU multiplies that, else float32.
"""

from functools import cache
from typing import Any

import torch

# Up to here the packed products are about as fast. On two cores with AVX2, 512 rows take 0.5 to 0.8 of their time.
FEW_ROWS_INT4, FEW_ROWS_INT8 = 128, 64
_ELEMENTS = 1 << 19  # weights that are unpacked at a time

_aten: Any = torch.ops.aten


def takes_many() -> bool:
    """Whether products of many rows unpack the weights: where the layout of this CPU is one that is known here."""
    return _block() is not None


@cache
def _block() -> int | None:
    """Outputs that this CPU's int4 layout keeps together, found by packing known codes; None for another layout.

    The low halves of a block's bytes are its first outputs, the high ones the others: [inputs, block / 2].
    """
    codes = torch.randint(0, 16, (128, 32), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    packed = _aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    blocks = (32, 64)
    return next((size for size in blocks if torch.equal(_codes(packed, size).t() + 8, codes)), None)


@cache
def _dtype() -> torch.dtype:
    """bfloat16 where oneDNN multiplies it with the CPU's own instructions, else float32."""
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def _codes(packed: torch.Tensor, block: int) -> torch.Tensor:
    """Whole blocks [out, in / 2] -> codes less 8, [in, out] int8."""
    outputs, inputs = packed.shape[0], packed.shape[1] * 2
    blocks, words = outputs // block, block // 32
    out = torch.empty(inputs, blocks, 2, words, dtype=torch.complex128)  # moved 16 bytes at a time
    for half, codes in enumerate((packed & 15, packed >> 4)):
        out[:, :, half] = codes.sub_(8).view(torch.complex128).view(blocks, inputs, words).transpose(0, 1)
    return out.view(torch.int8).view(inputs, outputs)


def many_rows_int4(x: torch.Tensor, packed: torch.Tensor, group: int, scales: torch.Tensor) -> torch.Tensor | None:
    """x [rows, in] bfloat16 -> [rows, out] bfloat16, as torch's packed product; None for few rows."""
    block = _block()
    outputs, inputs = packed.shape[0], x.shape[1]
    if x.shape[0] <= FEW_ROWS_INT4 or block is None:
        return None
    out = x.new_empty(x.shape[0], outputs)
    whole = outputs - outputs % block
    step = max(1, _ELEMENTS // (inputs * block)) * block
    wide = x.to(_dtype())
    for start in range(0, whole, step):
        end = min(start + step, whole)
        scale, zero = scales[:, None, start:end].movedim(-1, 0).to(_dtype()).contiguous()
        codes = _codes(packed[start:end], block).to(_dtype()).view(-1, group, end - start)
        weight = torch.addcmul(zero, codes, scale, out=codes).view(inputs, end - start)  # rounded once
        out[:, start:end] = wide @ weight
    if whole < outputs:
        out[:, whole:] = _aten._weight_int4pack_mm_for_cpu(x, packed[whole:], group, scales[:, whole:].contiguous())
    return out


def many_rows_int8(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor | None:
    """x [rows, in] bfloat16 -> [rows, out] bfloat16, as torch's packed product; None for few rows."""
    if x.shape[0] <= FEW_ROWS_INT8:
        return None
    out = x.new_empty(x.shape[0], codes.shape[0])
    wide, step = x.to(_dtype()), max(16, _ELEMENTS // codes.shape[1])
    for start in range(0, codes.shape[0], step):
        rows = slice(start, start + step)
        out[:, rows] = (wide @ codes[rows].to(_dtype()).t()) * scales[rows].to(_dtype())
    return out
