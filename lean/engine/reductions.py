"""Reductions composed of elementwise operations, so that a row's bits do not depend on the other rows.

On a GPU torch adds the numbers of a row in an order that depends on the number of rows (aten/src/ATen/native/cuda/
Reduce.cuh: threads that one row does not need serve others). Here a sum is a tree: the second half of the numbers is
added to the first half, until one is left. Additions of two tensors round each number alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

_aten = torch.ops.aten


def tree_sum(x: torch.Tensor, dims: Sequence[int] | int | None = -1, keepdim: bool = False) -> torch.Tensor:
    """The sum of ``x`` over ``dims`` (None or none: all), in float32 or better."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = [dims] if isinstance(dims, int) else list(dims or range(x.dim()))
    dims = sorted(dim % max(x.dim(), 1) for dim in dims)
    kept = [dim for dim in range(x.dim()) if dim not in dims]
    shape = [wide.shape[dim] for dim in kept]
    wide = wide.permute(*kept, *dims).flatten(len(kept)) if dims else wide.reshape(1)
    width = 1 << max(0, wide.shape[-1] - 1).bit_length()
    wide = torch.nn.functional.pad(wide, (0, width - wide.shape[-1]))
    while width > 1:
        width //= 2
        first, second = wide.split(width, dim=-1)
        wide = first + second
    return wide.reshape([1 if dim in dims else size for dim, size in enumerate(x.shape)] if keepdim else shape)


def _mean(x: torch.Tensor, dims: Any = None, keepdim: bool = False) -> torch.Tensor:
    total = tree_sum(x, dims, keepdim)
    return total / max(1, x.numel() // max(1, total.numel()))


def _sum(x: torch.Tensor, dims: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> torch.Tensor:
    return tree_sum(x, dims, keepdim).to(dtype or x.dtype)


def _mean_in(x: torch.Tensor, dims: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Any:
    return _mean(x, dims, keepdim).to(dtype or x.dtype)


def _norm(x: torch.Tensor, ord: float = 2, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    if ord != 2:
        return NotImplemented
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return tree_sum(wide * wide, dims, keepdim).sqrt().to(dtype or x.dtype)


def _cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Each number gets what is one place before it added, then two places, four, and so on."""
    sums = x.to(torch.promote_types(x.dtype, torch.float32)).movedim(dim, -1)
    step, count = 1, sums.shape[-1]
    while step < count:
        sums = sums + torch.nn.functional.pad(sums.narrow(-1, 0, count - step), (step, 0))
        step *= 2
    return sums.movedim(-1, dim).to(dtype or x.dtype)


def _shifted(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Less the largest number: it is the same in any order."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide - wide.amax(dim, keepdim=True)


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    weights = _shifted(x, dim).exp()
    found = weights / tree_sum(weights, dim, keepdim=True)
    return found if half_to_float else found.to(x.dtype)


def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    shifted = _shifted(x, dim)
    found = shifted - tree_sum(shifted.exp(), dim, keepdim=True).log()
    return found if half_to_float else found.to(x.dtype)


def _last(shape: Sequence[int]) -> list[int]:
    return list(range(-len(shape), 0))


def _layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = _mean(wide, _last(shape), keepdim=True)
    centred = wide - mean
    scale = (_mean(centred * centred, _last(shape), keepdim=True) + eps).rsqrt()
    found = centred * scale
    found = found if weight is None else found * weight
    found = found if bias is None else found + bias
    return found.to(x.dtype), mean, scale


def _rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    scale = (_mean(wide * wide, _last(shape), keepdim=True) + eps).rsqrt()
    found = wide * scale
    return (found if weight is None else found * weight).to(x.dtype), scale


def _overloads(**functions: Callable[..., Any]) -> dict[Any, Callable[..., Any]]:
    """The functions by operator, written ``name__overload``; torch's older versions do not have all operators."""
    found = {}
    for name, function in functions.items():
        packet, _, overload = name.rpartition("__")
        if hasattr(_aten, packet):
            found[getattr(getattr(_aten, packet), overload)] = function
    return found


def _packets(names: str) -> set[Any]:
    return {getattr(_aten, name) for name in names.split() if hasattr(_aten, name)}


COMPOSED = _overloads(
    sum__default=lambda x, dtype=None: _sum(x, dtype=dtype),
    sum__dim_IntList=_sum,
    mean__default=lambda x, dtype=None: _mean_in(x, dtype=dtype),
    mean__dim=_mean_in,
    cumsum__default=_cumsum,
    linalg_vector_norm__default=_norm,
    _softmax__default=_softmax,
    _log_softmax__default=_log_softmax,
    native_layer_norm__default=_layer_norm,
    _fused_rms_norm__default=_rms_norm,
)
# Functions of torch that are made of others.
MADE_OF_OTHERS = _packets(
    "softmax log_softmax special_softmax special_log_softmax layer_norm rms_norm linalg_norm group_norm batch_norm"
)
# Reductions without a composition. Those whose result is the same in any order (amax, argmax, topk, any) are none.
LEFT_OUT = _packets(
    "norm var var_mean std std_mean prod logsumexp nansum nanmean cumprod logcumsumexp native_group_norm "
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training linalg_vector_norm linalg__powsum "
    "trace cdist renorm"
)
