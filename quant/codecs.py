"""Encode and decode K/V vectors. This code is the definition: kernels must produce the same bytes.

Recipe, for a vector x of finite numbers: y = rotate(x) in fp32 where the format rotates; absmax per group;
s = fp16(absmax / top), kept inside [2^-14, 65504] *before* it is used; code = y / s by IEEE division, rounded half to
even and clamped. A group with a non-finite value gets the scale NaN and codes 0, so that it decodes to NaN and the
engine can see it without a device sync. Zero groups decode to exact zeros.
"""

import torch

from .formats import BF16, FP16, FP32, FP64, KVFormat, Kind
from .rotation import rotate

MIN_SCALE = 2.0**-14  # smallest normal fp16: a subnormal scale would have lost the bits that make it a good divisor
MAX_SCALE = 65504.0  # largest fp16
E4M3_MAX = 448.0

RAW_DTYPES = {
    FP64.name: torch.float64,
    FP32.name: torch.float32,
    FP16.name: torch.float16,
    BF16.name: torch.bfloat16,
}


def raw_format(dtype: torch.dtype) -> KVFormat:
    """The format that stores ``dtype`` as is. Raises KeyError for a dtype that is no float format."""
    names = {value: key for key, value in RAW_DTYPES.items()}
    return {fmt.name: fmt for fmt in (FP64, FP32, FP16, BF16)}[names[dtype]]


def top_of(fmt: KVFormat) -> float:
    """The code magnitude that absmax is mapped to."""
    return E4M3_MAX if fmt.kind is Kind.E4M3 else float(2 ** (fmt.bits - 1) - 1)


def _group_width(fmt: KVFormat, dim: int) -> int:
    return fmt.group_size or dim


def _split(x: torch.Tensor, fmt: KVFormat) -> tuple[torch.Tensor, ...]:
    """Split the last dim into scale groups; only the last may be shorter."""
    return x.split(_group_width(fmt, x.shape[-1]), dim=-1)


def _pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """[..., g] int8 in -8..7 -> [..., g/2] uint8: byte k holds dim k in its low and dim k + g/2 in its high nibble."""
    low, high = codes.view(torch.uint8).chunk(2, dim=-1)
    return (low & 15) | (high << 4)


def _unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `_pack_int4`; int8."""
    signed = packed.view(torch.int8)
    return torch.cat(((signed << 4) >> 4, signed >> 4), dim=-1)


def _encode_group(y: torch.Tensor, fmt: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """One group of fp32 values [..., g] -> (codes uint8 [..., bytes], scale fp16 [..., 1])."""
    absmax = y.abs().amax(-1, keepdim=True)
    finite = absmax.isfinite()
    scale = (absmax / top_of(fmt)).half().clamp(MIN_SCALE, MAX_SCALE)
    scale = torch.where(finite, scale, torch.tensor(torch.nan, dtype=torch.float16, device=y.device))
    z = torch.where(finite, y / scale.float(), torch.zeros((), device=y.device))
    if fmt.kind is Kind.E4M3:
        # Clamp first: what a cast does beyond 448 differs between versions and devices.
        return z.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8), scale
    top = top_of(fmt)
    codes = z.round().clamp(-top - 1 if fmt.bits == 4 else -top, top).to(torch.int8)
    return (_pack_int4(codes) if fmt.bits == 4 else codes.view(torch.uint8)), scale


def encode(x: torch.Tensor, fmt: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode vectors.

    Args:
        x: [..., dim], any float dtype.

    Returns:
        codes: uint8 [..., fmt.code_bytes(dim)].
        scales: float16 [..., fmt.groups(dim)] (empty for raw formats).
    """
    if not fmt.quantized:
        dtype = RAW_DTYPES[fmt.name]
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        y = rotate(x.to(wide)) if fmt.rotate else x
        return y.to(dtype).contiguous().view(torch.uint8), x.new_empty((*x.shape[:-1], 0), dtype=torch.float16)
    y = x.float()
    if fmt.rotate:
        y = rotate(y)
    codes, scales = zip(*(_encode_group(group, fmt) for group in _split(y, fmt)))
    return torch.cat(codes, dim=-1), torch.cat(scales, dim=-1)


def decode(
    codes: torch.Tensor, scales: torch.Tensor, fmt: KVFormat, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Decode vectors; rotated formats stay in the rotated basis (`rotate` turns them back).

    Args:
        codes: uint8 [..., code_bytes]; scales: float16 [..., groups]; dtype: float32 or float64.

    Returns:
        [..., dim] in ``dtype``. Code times scale is exact in both: 8 + 11 significant bits.
    """
    if not fmt.quantized:
        return codes.view(RAW_DTYPES[fmt.name]).to(dtype)
    if fmt.kind is Kind.E4M3:
        values = codes.view(torch.float8_e4m3fn).to(dtype)
    elif fmt.bits == 8:
        values = codes.view(torch.int8).to(dtype)
    else:
        values = torch.cat([_unpack_int4(g) for g in codes.split(fmt.group_size // 2, dim=-1)], dim=-1).to(dtype)
    width = _group_width(fmt, values.shape[-1])
    parts = [group * scales[..., i : i + 1].to(dtype) for i, group in enumerate(values.split(width, dim=-1))]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def quantize_dequantize(x: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """What the cache makes of ``x`` [..., dim], back in the original basis; float32, or float64 for float64 input."""
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    y = decode(*encode(x, fmt), fmt, dtype)
    return rotate(y) if fmt.rotate else y
