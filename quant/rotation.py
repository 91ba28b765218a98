"""The block Hadamard rotation that spreads outlier channels before low-bit rounding (QuaRot, arXiv:2404.00456)."""

import math

import torch

from lean.quant.formats import rotation_size


def rotate(x: torch.Tensor, size: int | None = None) -> torch.Tensor:
    """Multiply the last dim of ``x`` by the block-diagonal, orthonormal Hadamard matrix. It is its own inverse.

    Butterfly with strides 1, 2, 4, ..., additions only, then one multiply by 1/sqrt(n). This order of rounding is part
    of the storage format, so every back end repeats it.

    Args:
        x: [..., dim], float32 or float64.
        size: width of the blocks, a power of two that divides dim; default: ``rotation_size(dim)``.

    Raises:
        TypeError: another dtype; a narrower one would round at every stride.
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"rotate works in float32 or float64, not {x.dtype}")
    n = rotation_size(x.shape[-1]) if size is None else size
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
