"""The block Hadamard rotation that spreads outlier channels before low-bit rounding (QuaRot, arXiv:2404.00456)."""

import math

import torch


def rotation_size(dim: int) -> int:
    """Largest power of two that divides ``dim``: the width of the Hadamard blocks."""
    return dim & -dim


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Multiply the last dim of ``x`` by the block-diagonal, orthonormal Hadamard matrix. It is its own inverse.

    Butterfly with strides 1, 2, 4, ..., additions only, then one multiply by 1/sqrt(n): this order of rounding is part
    of the storage format, so every backend repeats it.

    Args:
        x: [..., dim], float32 or float64. dim may be any number; blocks are ``rotation_size(dim)`` wide.

    Raises:
        TypeError: a narrower dtype, which would round at every stride.
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"rotate works in float32 or float64, not {x.dtype}")
    n = rotation_size(x.shape[-1])
    stride = 1
    y = x
    while stride < n:
        pairs = y.unflatten(-1, (-1, 2, stride))
        a, b = pairs.unbind(-2)
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        stride *= 2
    return y * (1.0 / math.sqrt(n))
