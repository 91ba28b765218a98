"""The shape of one attention layer, and how the cache of such a layer is laid out."""

from dataclasses import replace
from typing import NamedTuple

import torch

from lean.errors import ConfigError
from lean.kernels.layout import KVLayout
from lean.quant import parse_kv_dtype, raw_format

BLOCK_SIZE = 32


class Shape(NamedTuple):
    """Heads of one attention layer; K and V have the same head_dim, or V is the first ``v_in_k`` numbers of K."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_in_k: int = 0

    @property
    def v_dim(self) -> int:
        return self.v_in_k or self.head_dim

    def __str__(self) -> str:
        return f"{self.num_q_heads}/{self.num_kv_heads}x{self.head_dim}" + (f":{self.v_in_k}" if self.v_in_k else "")


def layouts(kv_dtype: str, shape: Shape, dtype: torch.dtype) -> tuple[KVLayout, KVLayout]:
    """Layout of a KV format's blocks, and of the exact blocks beside it: ``dtype``, rotated where the format is.

    Raises:
        ConfigError: the format cannot hold the shape.
    """
    k_format, v_format = parse_kv_dtype(kv_dtype)
    if shape.v_in_k:
        v_format = k_format
        if not k_format.supports_prefix(shape.head_dim, shape.v_in_k):
            raise ConfigError(f"latent vectors cannot be in {kv_dtype}: use --kv-dtype bf16,int8,fp8,int4")
    dims = shape.head_dim, shape.v_dim
    layout = KVLayout(k_format, v_format, shape.num_kv_heads, *dims, BLOCK_SIZE, v_in_k=shape.v_in_k > 0)
    raw = raw_format(dtype)
    k_exact, v_exact = (replace(raw, rotate=fmt.rotate) for fmt in (k_format, v_format))
    return layout, replace(layout, k_format=k_exact, v_format=v_exact)
