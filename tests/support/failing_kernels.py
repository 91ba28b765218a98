"""An engine on this CPU whose ops go through the GPU's back end, with kernels that only raise an error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from lean.kernels.call import from_arguments
from lean.kernels.triton import backend
from lean.kernels.triton.launch import Launch

OPS = ("kv_write", "paged_attention")  # that have GPU kernels


class Kernel:
    """Stands in for one of Triton's kernels; ``run`` is called in place of a launch."""

    __name__ = "decode"

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda **arguments: self._run()


def raising(error: BaseException) -> Kernel:
    """A kernel whose launch raises ``error``."""

    def run() -> None:
        raise error

    return Kernel(run)


@contextmanager
def gpu_back_end(kernel: Kernel) -> Iterator[None]:
    """Inside, the ops run the GPU's back end, whose every plan is one launch of ``kernel``. Outputs are zeros."""
    launches = [Launch(kernel, (1,), {}, {})]

    def attention(call: Any, target: object) -> tuple[torch.Tensor, list[Launch]]:
        return call.query.new_zeros(*call.query.shape[:2], call.v_dim), launches

    with (
        patch.object(backend, "plan_kv_write", lambda call, target: launches),
        patch.object(backend, "plan_paged_attention", attention),
        patch.multiple(torch.ops.lean, **{name: from_arguments(name, getattr(backend, name)) for name in OPS}),
    ):
        yield
