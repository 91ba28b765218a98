"""Deterministic mode: a row's bits do not depend on the other rows.

A BLAS picks another kernel for another number of rows and may add in another order. Here every product of activations
with a weight is cut into tiles of ROW_TILE rows, the last one padded, and each tile is one product of the same shape.
Activations are composed of exp, tanh, erf and arithmetic: torch's fused ones round the end of a vector differently from
its middle, so a row's bits would depend on its place in the tensor and on how threads share it. On a GPU sums over a
row are composed too (`lean.engine.reductions`; on a CPU torch adds each row alone), and single rows have a separate
attention kernel, so attention gets every row as a sequence of one row.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lean.kernels.ops  # noqa: F401 - defines torch.ops.lean
from lean.engine.reductions import COMPOSED, LEFT_OUT, MADE_OF_OTHERS
from lean.errors import ModelError
from lean.kernels.call import AttentionCall

ROW_TILE = 16
WHAT_TO_DO = "load the model with --deterministic, or leave that out"
_aten = torch.ops.aten
_attention = torch.ops.lean.paged_attention.default


def _gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))


_ACTIVATIONS: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.silu.default: lambda x: x / (1 + torch.exp(-x)),
    _aten.sigmoid.default: lambda x: 1 / (1 + torch.exp(-x)),
    _aten.gelu.default: _gelu,
}
# Products that are not one [rows, k] x [k, n], and activations without a composition above.
_REFUSED = {
    _aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.addbmm, _aten.mv, _aten.addmv, _aten.dot, _aten.convolution,
    _aten.conv1d, _aten.conv2d, _aten.conv3d,
    _aten._grouped_mm, _aten._scaled_mm, _aten._int_mm, _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_efficient_attention, _aten._scaled_dot_product_flash_attention,
    _aten.softplus, _aten.mish,
}  # fmt: skip
# Products that give every row the bits that it has alone, with any number of threads: they need no tiles.
_ROW_BY_ROW = {_aten._weight_int4pack_mm_for_cpu.default, _aten._weight_int8pack_mm.default}


def row_tiled_mm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """a [rows, k] times b [k, n], plus bias [n], in tiles of ROW_TILE rows."""
    rows = a.shape[0]
    tiles = torch.nn.functional.pad(a, (0, 0, 0, -rows % ROW_TILE)).split(ROW_TILE)
    return torch.cat([torch.mm(tile, b) if bias is None else torch.addmm(bias, tile, b) for tile in tiles]).narrow(
        0, 0, rows
    )


def rows_apart(call: AttentionCall) -> AttentionCall:
    """The same call with every row as a sequence of one row. The output is the same, and the kernel that serves decode
    steps computes it for any chunk. No value is read from the device."""
    query, starts, lengths = call.query, call.query_start_loc, call.seq_lens
    row = torch.arange(query.shape[0], dtype=starts.dtype, device=query.device)
    ends = starts.narrow(0, 1, lengths.shape[0])
    owner = torch.searchsorted(ends, row, right=True)
    belongs = owner < lengths.shape[0]  # rows of no sequence see no key
    owner = owner.clamp(max=lengths.shape[0] - 1)
    tables, exact = call.block_tables, call.exact_block_tables
    return call._replace(
        query_start_loc=torch.arange(query.shape[0] + 1, dtype=starts.dtype, device=query.device),
        seq_lens=torch.where(belongs, (lengths - ends).index_select(0, owner) + row + 1, 0).to(lengths.dtype),
        block_tables=tables.index_select(0, owner),
        exact_block_tables=None if exact is None else exact.index_select(0, owner),
    )


def adds_by_company(x: Any) -> bool:
    """Whether torch adds the numbers of a row of ``x`` in an order that depends on the other rows."""
    return isinstance(x, torch.Tensor) and x.device.type != "cpu" and x.is_floating_point()


class RowTiledProducts(TorchDispatchMode):
    """While active, products run row tile by row tile, and sums are composed where torch's depend on the other rows.

    A product that cannot be tiled, and a reduction without a composition, raise ModelError.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ROW_BY_ROW:
            return func(*args, **kwargs)
        if func is _aten.mm.default:
            return row_tiled_mm(*args)
        if func is _aten.addmm.default and not kwargs and args[0].dim() == 1:
            return row_tiled_mm(args[1], args[2], args[0])
        if func is _aten.linear.default:
            x, weight, *bias = args
            return row_tiled_mm(x.flatten(0, -2), weight.t(), *bias).unflatten(0, x.shape[:-1])
        if func is _aten.bmm.default and args[0].shape[0] == 1:
            return row_tiled_mm(args[0].squeeze(0), args[1].squeeze(0)).unsqueeze(0)
        if func in _ACTIVATIONS:
            wide = args[0].to(torch.promote_types(args[0].dtype, torch.float32))
            return _ACTIVATIONS[func](wide, *args[1:], **kwargs).to(args[0].dtype)
        if func in (_aten.matmul.default, _aten.einsum.default):
            with self:
                return func.decompose(*args, **kwargs)
        if func is _attention and args[0].is_cuda:
            return func(*rows_apart(AttentionCall(*args)))
        packet, refused = func.overloadpacket, func.overloadpacket in _REFUSED
        if adds_by_company(args[0] if args else None):
            if packet in MADE_OF_OTHERS:
                with self:
                    found = func.decompose(*args, **kwargs)
            else:
                found = COMPOSED[func](*args, **kwargs) if func in COMPOSED else NotImplemented
            if found is not NotImplemented:
                return found
            refused |= packet in LEFT_OUT | MADE_OF_OTHERS
        if refused:
            shapes = " x ".join(str(list(arg.shape)) for arg in args if isinstance(arg, torch.Tensor))
            raise ModelError(f"deterministic mode does not support {func.name()} ({shapes}): {WHAT_TO_DO}")
        return func(*args, **kwargs)
