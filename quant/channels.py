"""Encode and decode K by channel (`Kind.CHANNEL`): a scale and a zero for each channel of a group of 32 tokens.

The source is 32 vectors in the stored basis, as the exact pool holds them, in fp32. For each channel lo and hi are the
least and the greatest of its 32 elements, and n = 2^(bits - 1). Then

s: the larger of (hi - lo) / (2 n - 1) and max(|lo|, |hi|) / (126 + n), rounded up to a one-byte scale, at least 2^-14.
With the second of the two every element has a code although the zero has 8 bits.
z = rint(lo fp32(1 / s)) + n, clamped to -128..127.
code = rint(y fp32(1 / s)) - z, clamped to -n..n - 1. Its number is (code + z) s.

rint rounds half to even. A channel of zeros has the scale 0, the zero 0 and codes 0. A channel with a non-finite
element has the scale 0xFF, the zero 0 and codes 0, and decodes to NaN.
"""

import torch

from lean.quant.codecs import MAX_BYTE, MIN_BYTE, NAN_BYTE, pack, scales_of_bytes, unpack
from lean.quant.formats import KVFormat


def encode_channels(y: torch.Tensor, fmt: KVFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode groups of tokens.

    Args:
        y: [..., CHANNEL_TOKENS, dim], any float dtype, in the stored basis.

    Returns:
        codes: uint8 [..., CHANNEL_TOKENS, fmt.code_bytes(dim)].
        channels: uint8 [..., 2 dim], the scales and then the zeros.
    """
    y, n = y.float(), 2 ** (fmt.bits - 1)
    low, high = y.aminmax(dim=-2, keepdim=True)  # NaN where an element is NaN
    absmax = torch.maximum(low.abs(), high.abs())
    bad = ~(absmax < torch.inf)
    y, low, high = (x.masked_fill(bad, 0.0) for x in (y, low, high))
    # Divided by tensors: by a Python number CUDA would multiply with the reciprocal instead.
    span = (high - low) / torch.full_like(low, 2 * n - 1)
    least = absmax.masked_fill(bad, 0.0) / torch.full_like(low, 126 + n)
    bits = torch.maximum(span, least).view(torch.int32)
    byte = (((bits + 0xFFFFF) >> 20) - (112 << 3)).clamp_(MIN_BYTE, MAX_BYTE)  # e5m3, rounded up
    scale = scales_of_bytes(byte).float()
    inverse = torch.ones_like(scale) / scale
    zero = ((low * inverse).round_() + n).clamp_(-128, 127)
    codes = ((y * inverse).round_() - zero).clamp_(-n, n - 1)
    nothing = (absmax == 0) | bad
    codes, zero = codes.masked_fill_(nothing, 0.0), zero.masked_fill_(nothing, 0.0)
    byte = torch.where(absmax == 0, 0, byte).masked_fill_(bad, NAN_BYTE)
    channels = torch.cat((byte.to(torch.uint8), zero.to(torch.int8).view(torch.uint8)), dim=-1).squeeze(-2)
    return pack(codes.to(torch.int8).view(torch.uint8), fmt), channels


def decode_channels(
    codes: torch.Tensor, channels: torch.Tensor, fmt: KVFormat, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Decode tokens, in the stored basis.

    Args:
        codes: uint8 [..., tokens, code_bytes]; channels: uint8 [..., groups, 2 dim], as of `encode_channels`. A group
            has the same number of tokens as every other: CHANNEL_TOKENS, or 1 where the caller repeats the channels.

    Returns:
        [..., tokens, dim] in ``dtype``, float32 or float64. The products are exact in both.
    """
    scales, zeros = channels.chunk(2, dim=-1)
    scale = scales_of_bytes(scales).to(dtype).unsqueeze(-2)
    zero = zeros.view(torch.int8).to(dtype).unsqueeze(-2)
    groups = unpack(codes, fmt).to(dtype).unflatten(-2, (channels.shape[-2], -1))
    return groups.add_(zero).mul_(scale).flatten(-3, -2)
