"""The Triton kernels under Triton's interpreter, on CPU tensors, behind the ops' own wrappers.

Triton decides when a kernel is defined whether it is interpreted. Other tests may have imported Triton before, so its
library of kernels (sums, maxima) is made interpretable here, and lean's is imported with the variable set. Compiled
kernels are tested in other processes.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from lean.products import rows_apart

with patch.dict(os.environ, TRITON_INTERPRET="1"):
    from lean.kernels.triton import launch, parameters

for _module in (tl, tl.standard):
    for _name, _value in list(vars(_module).items()):
        if isinstance(_value, JITFunction):
            setattr(_module, _name, InterpretedFunction(_value.fn))

TARGET = parameters.Target("interpreter", 0)


def _kv_write(*args: object) -> None:
    for planned in launch.plan_kv_write(*args, target=TARGET):
        planned.run()


def _attention(apart: bool):
    def call(*args: object) -> torch.Tensor:
        args = rows_apart(args) if apart else args
        out, launches = launch.plan_paged_attention(*args, target=TARGET)
        for planned in launches:  # what kernels leave unwritten is poison
            for name in {"parts", "sums"} & planned.arguments.keys():
                planned.arguments[name].fill_(torch.nan)
        for planned in launches:
            planned.run()
        return out

    return call


@contextmanager
def triton_kernels(*, apart: bool = False) -> Iterator[None]:
    """Inside, `lean.kernels.ops` runs the Triton kernels, interpreted; ``apart``: as in deterministic mode."""
    with (
        patch.dict(os.environ, TRITON_INTERPRET="1"),
        patch.object(torch.ops.lean, "kv_write", _kv_write),
        patch.object(torch.ops.lean, "paged_attention", _attention(apart)),
    ):
        yield
