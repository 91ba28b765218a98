"""CUDA graphs: a step's kernels, recorded once and launched together."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from lean.errors import ModelError

Step = Callable[[], torch.Tensor]


class WaitsForDevice(ModelError):
    """A step reads on the host what the device computes, so it cannot be recorded. The message says where."""


class Recorder(Protocol):
    """Makes steps that run again without Python."""

    def __call__(self, step: Step) -> Step:
        """A function that runs the step's kernels again on the same tensors, its output included.

        Raises WaitsForDevice, before anything is recorded.
        """

    def forget(self) -> None:
        """Called when all recorded steps are gone, before others are recorded."""


class CudaGraphs:
    """Records steps as CUDA graphs. They share one memory pool, since only one of them runs at a time.

    All steps are recorded on one stream. Libraries keep a workspace for every stream that they are called on, and on
    ROCm they cannot make one while a graph is recorded. torch's own stream for recording belongs to one device.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
        self.forget()

    def forget(self) -> None:
        """Begin a new memory pool. torch refuses the handle of a pool whose graphs are all gone."""
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        with torch.cuda.device(self._device):
            return self._record(step)

    def _record(self, step: Step) -> Step:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # the first calls of libraries and compilers must not be recorded
            step()
            with _no_waiting():
                step()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Raise WaitsForDevice at the end if torch waited for the device inside.

    torch warns about each wait. Other threads may wait: their warnings are theirs.
    """
    before, own, waits = torch.cuda.get_sync_debug_mode(), threading.get_ident(), []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        show = warnings.showwarning

        def note(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
            if "called a synchronizing" in str(message):
                if threading.get_ident() == own:
                    waits.append(f"{Path(filename).name}, line {lineno}")
            elif "ynchronization debug mode" not in str(message):  # torch says that this mode is a prototype
                show(message, category, filename, lineno, *rest)

        warnings.showwarning = note  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    if waits:
        raise WaitsForDevice(f"{waits[0]}, waits for the device")
