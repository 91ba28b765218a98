"""The shape of one attention layer, and how the cache of such a layer is laid out."""

from dataclasses import replace
from typing import NamedTuple

import torch

from lean.kernels.layout import KVLayout
from lean.quant import parse_kv_dtype, raw_format

BLOCK_SIZE = 32


class Shape(NamedTuple):
    """Heads of one attention layer; K and V have the same head_dim."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_q_heads}/{self.num_kv_heads}x{self.head_dim}"


def layouts(kv_dtype: str, shape: Shape, dtype: torch.dtype) -> tuple[KVLayout, KVLayout]:
    """Layout of a KV format's blocks, and of the exact blocks beside it: ``dtype``, rotated where the format is."""
    k_format, v_format = parse_kv_dtype(kv_dtype)
    layout = KVLayout(k_format, v_format, shape.num_kv_heads, shape.head_dim, shape.head_dim, BLOCK_SIZE)
    raw = raw_format(dtype)
    k_exact, v_exact = (replace(raw, rotate=fmt.rotate) for fmt in (k_format, v_format))
    return layout, replace(layout, k_format=k_exact, v_format=v_exact)
