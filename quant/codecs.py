"""Encode and decode K/V vectors. This code defines the storage format: kernels must produce the same bytes.

Recipe, for a vector x of finite numbers: y = rotate(x) in fp32 where the format rotates; absmax per group;
s = fp16(absmax / top), kept inside [2^-14, 65504] *before* it is used; code = y / s by IEEE division, rounded half to
even and clamped. A group with a non-finite value gets the scale NaN and codes 0. It decodes to NaN,
which the engine detects without a device sync. Zero groups decode to exact zeros.
"""

import torch

from lean.quant.formats import BF16, FP16, FP32, FP64, Kind, KVFormat
from lean.quant.rotation import rotate

# Below 127 * 2^-14 = 0.0078 int8 loses bits of a vector's largest element; without the floor a subnormal scale could
# round down far enough to clip it.
MIN_SCALE = 2.0**-14
MAX_SCALE = 65504.0  # largest fp16

RAW_DTYPES = {
    FP64.name: torch.float64,
    FP32.name: torch.float32,
    FP16.name: torch.float16,
    BF16.name: torch.bfloat16,
}


def raw_format(dtype: torch.dtype) -> KVFormat:
    """The format that stores ``dtype`` unchanged. Raises KeyError for a dtype that has no such format."""
    return {RAW_DTYPES[fmt.name]: fmt for fmt in (FP64, FP32, FP16, BF16)}[dtype]


def _pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """[..., g] int8 in -8..7 -> [..., g/2] uint8: byte k holds dim k in its low and dim k + g/2 in its high nibble."""
    low, high = codes.view(torch.uint8).chunk(2, dim=-1)
    return (low & 15) | (high << 4)


def _unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of `_pack_int4`; int8."""
    signed = packed.view(torch.int8)
    return torch.cat(((signed << 4) >> 4, signed >> 4), dim=-1)


def _in_groups(x: torch.Tensor, width: int) -> list[torch.Tensor]:
    """[..., n] -> [..., n // width, width], and [..., 1, rest] where the last group is shorter."""
    whole = x.shape[-1] // width * width
    parts = [x[..., :whole].unflatten(-1, (-1, width))] if whole else []
    return parts + ([x[..., whole:].unsqueeze(-2)] if whole < x.shape[-1] else [])


def _encode_groups(y: torch.Tensor, fmt: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [..., groups, g] -> (codes uint8 [..., groups * bytes], scales fp16 [..., groups])."""
    absmax = y.abs().amax(-1, keepdim=True)
    bad = ~(absmax < torch.inf)  # NaN too
    # Divided by a tensor: by a Python number CUDA would multiply with the reciprocal instead.
    scale = (absmax / torch.full_like(absmax, fmt.max_code)).half().clamp_(MIN_SCALE, MAX_SCALE)
    z = (y / scale.float()).masked_fill_(bad, 0.0)
    scale = scale.masked_fill_(bad, torch.nan).squeeze(-1)
    if fmt.kind is Kind.E4M3:
        # Clamped first: beyond 448 the cast differs between versions and devices.
        codes = z.clamp_(fmt.min_code, fmt.max_code).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = z.round_().clamp_(fmt.min_code, fmt.max_code).to(torch.int8)
        codes = _pack_int4(codes) if fmt.bits == 4 else codes.view(torch.uint8)
    return codes.flatten(-2), scale


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
    y = rotate(x.float()) if fmt.rotate else x.float()
    parts = [_encode_groups(part, fmt) for part in _in_groups(y, fmt.group_width(x.shape[-1]))]
    if len(parts) == 1:
        return parts[0]
    codes, scales = zip(*parts)
    return torch.cat(codes, dim=-1), torch.cat(scales, dim=-1)


def decode(
    codes: torch.Tensor, scales: torch.Tensor, fmt: KVFormat, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Decode vectors. Rotated formats stay in the rotated basis; `rotate` returns to the original one.

    Args:
        codes: uint8 [..., code_bytes]; scales: float16 [..., groups]; dtype: float32 or float64.

    Returns:
        [..., dim] in ``dtype``. Code times scale is exact in both: 8 + 11 significant bits.
    """
    if not fmt.quantized:
        return codes.view(RAW_DTYPES[fmt.name]).to(dtype)
    dim = codes.shape[-1] * 8 // fmt.bits
    width = fmt.group_width(dim)
    parts, first = [], 0
    for part in _in_groups(codes, width * fmt.bits // 8):
        if fmt.kind is Kind.E4M3:
            values = part.view(torch.float8_e4m3fn)
        else:
            values = _unpack_int4(part) if fmt.bits == 4 else part.view(torch.int8)
        count = part.shape[-2]
        parts.append(values.to(dtype).mul_(scales[..., first : first + count, None].to(dtype)).flatten(-2))
        first += count
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def quantize_dequantize(x: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """``x`` [..., dim], encoded and decoded, in the original basis; float32, or float64 for float64 input."""
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    y = decode(*encode(x, fmt), fmt, dtype)
    return rotate(y) if fmt.rotate else y
