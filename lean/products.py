"""Deterministic mode: matrix products in fixed row tiles, so that a row's bits do not depend on its company.

A BLAS picks another kernel for another number of rows and may add in another order. Here every product of activations
with a weight is cut into tiles of ROW_TILE rows, the last one padded, and each tile is one product of the same shape.
SiLU and sigmoid are composed of exp, add and divide: torch's fused ones round the end of a vector differently from its
middle, so a row's bits would depend on how threads share the tensor.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lean.errors import ModelError

ROW_TILE = 16
_aten = torch.ops.aten
# Products that are no single [rows, k] x [k, n], and so cannot be tiled by rows.
_REFUSED = {
    _aten.baddbmm.default, _aten.addmv.default, _aten.mv.default, _aten.dot.default, _aten.addbmm.default,
    _aten.convolution.default, _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default, _aten._scaled_dot_product_efficient_attention.default,
}  # fmt: skip


def row_tiled_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [rows, k] times b [k, n] in tiles of ROW_TILE rows."""
    rows = a.shape[0]
    a = torch.nn.functional.pad(a, (0, 0, 0, -rows % ROW_TILE))
    return torch.cat([torch.mm(tile, b) for tile in a.split(ROW_TILE)])[:rows]


class RowTiledProducts(TorchDispatchMode):
    """While active, products run row by row tile; products that cannot be tiled raise ModelError."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.mm.default:
            return row_tiled_mm(*args)
        if func is _aten.addmm.default:
            bias, a, b = args
            return row_tiled_mm(a, b) + bias
        if func is _aten.linear.default:
            x, weight, *bias = args
            out = row_tiled_mm(x.flatten(0, -2), weight.t()).unflatten(0, x.shape[:-1])
            return out + bias[0] if bias and bias[0] is not None else out
        if func is _aten.bmm.default:
            a, b = args
            if a.shape[0] != 1:
                raise ModelError(
                    f"deterministic mode cannot tile a product of shapes {list(a.shape)} x {list(b.shape)}"
                )
            return row_tiled_mm(a[0], b[0])[None]
        if func in (_aten.silu.default, _aten.sigmoid.default):
            x = args[0]
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            top = wide if func is _aten.silu.default else torch.ones((), dtype=wide.dtype, device=x.device)
            return (top / (1 + torch.exp(-wide))).to(x.dtype)
        if func in (_aten.matmul.default, _aten.einsum.default):
            with self:
                return func.decompose(*args, **kwargs)
        if func in _REFUSED:
            raise ModelError(f"deterministic mode: the model uses {func.name()}, whose rows lean cannot keep apart")
        return func(*args, **kwargs)
