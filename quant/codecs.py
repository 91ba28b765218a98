"""Encode and decode K/V vectors. This code defines the storage format: kernels must produce the same bytes.

y = rotate(x) in fp32 where the format rotates; absmax per group. Then

int8 and fp8: s = fp16(absmax / top), kept inside [2^-14, 65504] *before* it is used; code = y / s by IEEE division,
rounded half to even and clamped. A group with a non-finite value gets the scale NaN.

int3 to int6 (`Kind.GRID`): with n = 2^(bits - 1) a code c in -n..n - 1 is the number (c + 1/2) s. The largest scale
tried is the one-byte number nearest to absmax / (n - 1/2), ties to the even byte. With the five before it there are
six, none below 2^-14. For each of them z = y fp32(1 / s) and code = floor(z), clamped. The squared error is the sum of
(y - (code + 1/2) s)^2 in fp32: element i is added to element i + half, of halves of the group's width, then of half
that width, until one is left, with zeros in the place of missing elements. The least error wins; of equal ones, the
smallest scale. A group of zeros has the scale 0 and codes 0. A group with a non-finite value has the scale 0xFF.

pc3 to pc5 (`Kind.CHANNEL`) encode 32 tokens together: see `lean.quant.channels`.

There are no fused multiply-adds. Codes beside a NaN are 0. Such a group decodes to NaN, which the engine detects
without a device sync. Zero vectors decode to exact zeros.
"""

import torch

from lean.quant.formats import BF16, CHANNEL_TOKENS, FP16, FP32, FP64, UNIT, Kind, KVFormat
from lean.quant.rotation import rotate, rotate_back

# Below 127 * 2^-14 = 0.0078 int8 loses bits of a vector's largest element; without the floor a subnormal scale could
# round down far enough to clip it.
MIN_SCALE = 2.0**-14
MAX_SCALE = 65504.0  # largest fp16
# Of one-byte scales.
ZERO_BYTE, MIN_BYTE, MAX_BYTE, NAN_BYTE = 0, 0x08, 0xF7, 0xFF  # 0, 2^-14, 61440, NaN
NUM_SCALES = 6  # that are tried

RAW_DTYPES = {
    FP64.name: torch.float64,
    FP32.name: torch.float32,
    FP16.name: torch.float16,
    BF16.name: torch.bfloat16,
}


def raw_format(dtype: torch.dtype) -> KVFormat:
    """The format that stores ``dtype`` unchanged. Raises KeyError for a dtype that has no such format."""
    return {RAW_DTYPES[fmt.name]: fmt for fmt in (FP64, FP32, FP16, BF16)}[dtype]


def _units(x: torch.Tensor, width: int) -> list[torch.Tensor]:
    """[..., n] -> [..., n // width, width], and [..., 1, rest] where the last unit is shorter."""
    whole = x.shape[-1] // width * width
    parts = [x[..., :whole].unflatten(-1, (-1, width))] if whole else []
    return parts + ([x[..., whole:].unsqueeze(-2)] if whole < x.shape[-1] else [])


def pack(codes: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """[..., dim] uint8, of which the lower bits count, to the planes described in `lean.quant.formats`."""
    planes, shift = [], fmt.bits
    for bits in fmt.planes:
        shift -= bits
        per_byte = 8 // bits
        for unit in _units((codes >> shift) & (2**bits - 1), UNIT):
            parts = unit.chunk(per_byte, dim=-1)
            byte = parts[0].clone()
            for i in range(1, per_byte):
                byte |= parts[i] << (i * bits)
            planes.append(byte.flatten(-2))
    return torch.cat(planes, dim=-1)


def unpack(packed: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """Inverse of `pack`; int8 in -2^(bits - 1) .. 2^(bits - 1) - 1."""
    dim = packed.shape[-1] * 8 // fmt.bits
    codes = packed.new_zeros((*packed.shape[:-1], dim))
    first, shift = 0, fmt.bits
    for bits in fmt.planes:
        shift -= bits
        plane = packed[..., first : first + dim * bits // 8]
        first += dim * bits // 8
        shifts = range(0, 8, bits)
        units = [torch.cat([(u >> i) & (2**bits - 1) for i in shifts], dim=-1) for u in _units(plane, UNIT * bits // 8)]
        codes |= torch.cat([unit.flatten(-2) for unit in units], dim=-1) << shift
    unused = 8 - fmt.bits
    return (codes << unused).view(torch.int8) >> unused


def scales_of_bytes(scales: torch.Tensor) -> torch.Tensor:
    """One-byte scales as float16."""
    return (scales.to(torch.int16) << 7).view(torch.float16)


def _encode_groups(y: torch.Tensor, fmt: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [..., groups, g] -> (codes uint8 [..., groups * g], scales fp16 [..., groups]), of int8 or fp8."""
    absmax = y.abs().amax(-1, keepdim=True)
    bad = ~(absmax < torch.inf)  # NaN too
    # Divided by a tensor: by a Python number CUDA would multiply with the reciprocal instead.
    scale = (absmax / torch.full_like(absmax, fmt.max_code)).half().clamp_(MIN_SCALE, MAX_SCALE)
    z = (y / scale.float()).masked_fill_(bad, 0.0)
    scale = scale.masked_fill_(bad, torch.nan).squeeze(-1)
    if fmt.kind is Kind.E4M3:
        # Clamped first: beyond 448 the cast differs between versions and devices.
        codes = z.clamp_(-fmt.max_code, fmt.max_code).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = z.round_().clamp_(-fmt.max_code, fmt.max_code).to(torch.int8).view(torch.uint8)
    return codes.flatten(-2), scale


def _sum_of_halves(x: torch.Tensor, width: int) -> torch.Tensor:
    """[..., n] -> [..., 1], in the recipe's order; ``width`` is a power of two, n at most that."""
    x = torch.nn.functional.pad(x, (0, width - x.shape[-1]))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x


def _search_grid(y: torch.Tensor, fmt: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [..., groups, g] -> (codes uint8 [..., groups * g], scale bytes uint8 [..., groups]), of a GRID format."""
    absmax = y.abs().amax(-1, keepdim=True)
    bad = ~(absmax < torch.inf)  # NaN too
    y = y.masked_fill(bad, 0.0)
    ratio = (absmax / torch.full_like(absmax, fmt.max_code)).masked_fill_(bad, 1.0)
    bits = ratio.view(torch.int32)
    largest = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (112 << 3)  # e5m3, nearest, ties to even
    largest = largest.clamp_(MIN_BYTE, MAX_BYTE)
    limit = 2.0 ** (fmt.bits - 1)
    best: tuple[torch.Tensor, ...] | None = None
    for step in range(NUM_SCALES - 1, -1, -1):
        byte = (largest - step).clamp_(min=MIN_BYTE)
        scale = scales_of_bytes(byte).float()
        code = (y * (torch.ones_like(scale) / scale)).floor_().clamp_(-limit, limit - 1)
        error = _sum_of_halves((y - (code + 0.5) * scale).square_(), fmt.group_size)
        if best is None:
            best = error, code, byte
        else:
            better = error < best[0]
            best = tuple(torch.where(better, new, old) for new, old in zip((error, code, byte), best))
    assert best is not None
    _, code, byte = best
    byte = torch.where(absmax == 0, ZERO_BYTE, byte).masked_fill_(bad, NAN_BYTE)
    codes = code.masked_fill_((absmax == 0) | bad, 0.0).to(torch.int8).view(torch.uint8)
    return codes.flatten(-2), byte.squeeze(-1).to(torch.uint8)


def encode(x: torch.Tensor, fmt: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode vectors.

    Args:
        x: [..., dim], any float dtype.

    Returns:
        codes: uint8 [..., fmt.code_bytes(dim)].
        scales: [..., fmt.groups(dim)], uint8 of GRID formats, else float16 (empty for raw formats).

    Raises:
        ValueError: the format encodes 32 tokens together.
    """
    if fmt.by_channel:
        raise ValueError(f"{fmt.name} encodes {CHANNEL_TOKENS} tokens together: use encode_channels")
    if not fmt.quantized:
        dtype = RAW_DTYPES[fmt.name]
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        y = rotate(x.to(wide)) if fmt.rotate else x
        return y.to(dtype).contiguous().view(torch.uint8), x.new_empty((*x.shape[:-1], 0), dtype=torch.float16)
    y = rotate(x.float()) if fmt.rotate else x.float()
    grid = fmt.kind is Kind.GRID
    parts = [(_search_grid if grid else _encode_groups)(p, fmt) for p in _units(y, fmt.group_width(x.shape[-1]))]
    codes, scales = parts[0]
    if len(parts) > 1:
        codes, scales = (torch.cat(both, dim=-1) for both in zip(*parts))
    return pack(codes, fmt) if grid else codes, scales


def decode(
    codes: torch.Tensor, scales: torch.Tensor, fmt: KVFormat, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Decode vectors. Rotated formats stay in the rotated basis; `rotate_back` returns to the original one.

    Args:
        codes: uint8 [..., code_bytes]; scales: uint8 or float16 [..., groups], as of `encode`; dtype: float32 or
            float64.

    Returns:
        [..., dim] in ``dtype``. Code times scale is exact in both: at most 8 + 11 significant bits.
    """
    if not fmt.quantized:
        return codes.view(RAW_DTYPES[fmt.name]).to(dtype)
    values: torch.Tensor
    if fmt.kind is Kind.GRID:
        values, scales = unpack(codes, fmt).to(dtype).add_(0.5), scales_of_bytes(scales)
    else:
        values = codes.view(torch.float8_e4m3fn if fmt.kind is Kind.E4M3 else torch.int8).to(dtype)
    parts, first = [], 0
    for part in _units(values, fmt.group_width(values.shape[-1])):
        count = part.shape[-2]
        parts.append((part * scales[..., first : first + count, None].to(dtype)).flatten(-2))
        first += count
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def quantize_dequantize(x: torch.Tensor, fmt: KVFormat) -> torch.Tensor:
    """``x`` [..., dim], encoded and decoded, in the original basis; float32, or float64 for float64 input."""
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    y = decode(*encode(x, fmt), fmt, dtype)
    return rotate_back(y) if fmt.rotate else y
