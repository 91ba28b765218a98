"""The turn that spreads outlier channers before low-bit rounding: fixed signs, then a block Hadamard matrix.

QuaRot (arXiv:2404.00456) turns vectors so. The signs keep what all channels share, an offset say, from ending in one
coefficient.
"""

import math
from functools import cache

import torch

from lean.quant.formats import rotation_size


@cache
def _signs(dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """1 or -1 for each of ``dim`` elements."""
    with torch.inference_mode(False):
        signs = torch.tensor([1.0 - 2 * sign_bit(d) for d in range(dim)], dtype=dtype, device="cpu")
        return signs.to(device, non_blocking=True)


def sign_bit(d: int) -> int:
    """1 where element ``d`` is negated, else 0: the parity of the products of bits 0 and 3, 1 and 4, 2 and 5, 6 and 7.

    The signs repeat after 256 elements. They are those of a bent function: in blocks of 64 and 256 the butterfly turns
    equal elements into elements of one size, so an offset that all channels share takes the least of the scale. In
    blocks of 128 half of them get it. Of 16 sign vectors tried on SmolLM2-135M they were among the best.
    """
    pairs = (d & d >> 3 & 7) | (d >> 3 & d >> 4 & 8)
    return pairs.bit_count() & 1


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Turn the last dim of ``x`` into the stored basis: signs, then `butterfly`. `rotate_back` is the inverse.

    Args:
        x: [..., dim], float32 or float64.
    """
    return butterfly(x * _signs(x.shape[-1], x.dtype, x.device), rotation_size(x.shape[-1]))


def rotate_back(y: torch.Tensor, size: int | None = None) -> torch.Tensor:
    """The inverse of `rotate`.

    Args:
        y: [..., dim], float32 or float64.
        size: width of the blocks, where ``y`` is the beginning of a longer vector; default: ``rotation_size(dim)``.
    """
    x = butterfly(y, rotation_size(y.shape[-1]) if size is None else size)
    return x.mul_(_signs(x.shape[-1], x.dtype, x.device))


def butterfly(x: torch.Tensor, n: int) -> torch.Tensor:
    """Multiply the last dim of ``x`` by the block-diagonal, orthonormal Hadamard matrix. It is its own inverse.

    Strides 1, 2, 4, ..., additions only, then one multiply by 1/sqrt(n). This order of rounding is part of the storage
    format, so every back end repeats it.

    Args:
        x: [..., dim], float32 or float64.
        n: width of the blocks, a power of two that divides dim.

    Raises:
        TypeError: another dtype; a narrower one would round at every stride.
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"a rotation works in float32 or float64, not {x.dtype}")
    half = n // 2
    # A perfect shuffle: every stride adds and subtracts neighbours and writes all sums before all differences. So
    # the next stride's partners become neighbours, and the last stride leaves every element in its place.
    buffers = [x.new_empty(x.numel() // n, n) for _ in range(2)]
    views = [(y[:, 0::2], y[:, 1::2], y[:, :half], y[:, half:]) for y in (x.reshape(-1, n), *buffers)]
    source = 0
    for stride in range(n.bit_length() - 1):
        target = 1 + stride % 2
        torch.add(views[source][0], views[source][1], out=views[target][2])
        torch.sub(views[source][0], views[source][1], out=views[target][3])
        source = target
    if source == 0:  # n = 1
        return x.clone()
    return buffers[source - 1].mul_(1.0 / math.sqrt(n)).view(x.shape)
