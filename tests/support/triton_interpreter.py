"""The Triton kernels under Triton's interpreter, on CPU tensors, behind the ops' own wrappers.

Triton decides when a kernel is defined whether it is interpreted, also for its own library of kernels (sums, maxima).
So lean's kernels are imported here a second time, apart from those that other tests may compile, and Triton's library
is exchanged only while `triton_kernels` is entered. Compiled kernels are tested in other processes.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from lean.engine.deterministic import rows_apart
from lean.kernels.call import AttentionCall, WriteCall


def _kernel_modules() -> dict:
    return {name: module for name, module in sys.modules.items() if name.startswith("lean.kernels.triton")}


_compiled = _kernel_modules()
for _name in _compiled:
    del sys.modules[_name]
with patch.dict(os.environ, TRITON_INTERPRET="1"):
    from lean.kernels.triton import parameters, plan_attention, plan_kv_write
for _name in _kernel_modules():
    del sys.modules[_name]
sys.modules.update(_compiled)

_core, _standard = (
    {name: InterpretedFunction(f.fn) for name, f in vars(module).items() if isinstance(f, JITFunction)}
    for module in (tl, tl.standard)
)
TARGET = parameters.Target("interpreter", 0)


def _kv_write(*args: Any) -> None:
    for planned in plan_kv_write.plan_kv_write(WriteCall(*args), TARGET):
        planned.run()


def _attention(apart: bool):
    def call(*args: Any) -> torch.Tensor:
        arguments = AttentionCall(*args)
        out, launches = plan_attention.plan_paged_attention(rows_apart(arguments) if apart else arguments, TARGET)
        for planned in launches:  # what kernels leave unwritten is poison
            for name in {"parts", "sums"} & planned.arguments.keys():
                planned.arguments[name].fill_(torch.nan)
        for planned in launches:
            planned.run()
        return out

    return call


def _matmul(a: numpy.ndarray, b: numpy.ndarray, dtype: numpy.dtype | None = None) -> numpy.ndarray:
    """a [..., rows, k] times b [..., k, cols], one k after the other in the elements' own arithmetic.

    A BLAS may add in another order for another number of rows, so that a row's bits would depend on its company.
    """
    dtype = numpy.result_type(a, b) if dtype is None else numpy.dtype(dtype)
    a, b = a.astype(dtype), b.astype(dtype)
    out = numpy.zeros((*a.shape[:-1], b.shape[-1]), dtype)
    for k in range(a.shape[-1]):
        out += a[..., k, None] * b[..., k, None, :]
    return out


@contextmanager
def triton_kernels(*, apart: bool = False) -> Iterator[None]:
    """Inside, `lean.kernels.ops` runs the Triton kernels, interpreted; ``apart``: as in deterministic mode."""
    with (
        patch.dict(os.environ, TRITON_INTERPRET="1"),
        patch.object(numpy, "matmul", _matmul),
        patch.multiple(tl, **_core),
        patch.multiple(tl.standard, **_standard),
        patch.object(torch.ops.lean, "kv_write", _kv_write),
        patch.object(torch.ops.lean, "paged_attention", _attention(apart)),
    ):
        yield
