"""Decode steps on fixed tensors, so that one compiled or recorded step serves them all.

A decode step adds one token to each of its sequences. Its inputs are written into the same tensors every time, padded
to one of a few numbers of rows (buckets). torch.compile then sees each bucket's shapes once, and a CUDA graph sees the
same addresses at every step.
"""

from __future__ import annotations

import os
import time
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lean.engine.decode_batch import DecodeBatch
from lean.errors import ModelError, one_line
from lean.model.attention import AttentionBatch
from lean.store.home import cache_dir

if TYPE_CHECKING:
    from lean.engine.scheduler import Chunk

Decoder = Callable[[torch.Tensor, torch.Tensor, AttentionBatch], torch.Tensor]
Step = Callable[[], torch.Tensor]


def buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of rows that steps are padded to: the powers of two below ``max_num_seqs``, and ``max_num_seqs``."""
    powers = [1 << n for n in range(max_num_seqs.bit_length())]
    return (*(rows for rows in powers if rows < max_num_seqs), max_num_seqs)


class CudaGraphs:
    """Records steps as CUDA graphs. They share one memory pool, since only one of them runs at a time.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """Returns a function that runs the step's kernels again on the same tensors, its output included."""
        with torch.cuda.device(self._device):
            return self._record(step)

    def _record(self, step: Step) -> Step:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # the first calls of libraries and compilers must not be recorded
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


class DecodeSteps:
    """Runs decode steps. Each bucket's step is compiled or recorded once."""

    def __init__(
        self,
        name: str,
        decoder: Decoder,
        batch: DecodeBatch,
        *,
        backend: str | Callable | None = None,
        record: Callable[[Step], Step] | None = None,
    ) -> None:
        """
        Args:
            name: the model's, for messages.
            decoder: input_ids, position_ids [1, rows] and their batch -> hidden states [rows, hidden_size].
            backend: torch.compile's, e.g. ``inductor``; None compiles nothing.
            record: returns a step that runs again without Python, e.g. `CudaGraphs`; None calls the decoder each time.
        """
        self._name, self._decoder, self._batch = name, decoder, batch
        self._backend, self._record = backend, record
        self._buckets = buckets(batch.max_num_seqs)
        self._decoders: dict[int, Decoder] = {}
        self._steps: dict[int, Step] = {}

    def takes(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a step is a decode step that fits: one token of each sequence."""
        return len(chunks) <= self._buckets[-1] and all(chunk.end - chunk.start == 1 for chunk in chunks)

    def warm_up(self) -> float:
        """Compile or record every bucket with padding rows only. Returns the seconds it took. Raises ModelError."""
        started = time.perf_counter()
        for rows in reversed(self._buckets):  # the largest first: the others fit into its memory
            self._batch.fill([], rows, [])
            self._step(rows)()
        return time.perf_counter() - started

    def run(self, chunks: Sequence[Chunk], shifts: Sequence[int]) -> torch.Tensor:
        """Hidden states [len(chunks), hidden_size]; see `DecodeBatch.fill`."""
        if self._batch.reserve(max(chunk.end for chunk in chunks)):
            self._steps.clear()
        rows = next(rows for rows in self._buckets if rows >= len(chunks))
        self._batch.fill(chunks, rows, shifts)
        return self._step(rows)()[: len(chunks)].clone()  # the next step overwrites a recorded one's output

    def _step(self, rows: int) -> Step:
        if rows not in self._steps:
            inputs, decoder = self._batch.inputs(rows), self._decoder_for(rows)

            def step() -> torch.Tensor:
                return decoder(inputs.input_ids, inputs.position_ids, inputs.batch)

            try:
                if self._backend is not None:
                    step()
                self._steps[rows] = step if self._record is None else self._record(step)
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:
                raise ModelError(f"{self._name}: {self._why(error)}") from error
        return self._steps[rows]

    def _why(self, error: Exception) -> str:
        reason = one_line((str(getattr(error, "msg", error)).strip() or type(error).__name__).splitlines()[0])
        if self._backend is not None:
            return f"its decode step cannot be compiled as one graph ({reason}): leave --compile out"
        return f"its decode step cannot be recorded as a CUDA graph ({reason}): use --enforce-eager"

    def _decoder_for(self, rows: int) -> Decoder:
        if self._backend is None:
            return self._decoder
        if rows not in self._decoders:
            keep_compiled_code()
            self._decoders[rows] = torch.compile(
                _own_copy(self._decoder),
                fullgraph=True,
                dynamic=False,
                backend=self._backend,
                options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
            )
        return self._decoders[rows]


def _own_copy(function: Any) -> Any:
    """A copy of the function with its own code object.

    torch.compile keeps a few results per code object and selects among them by guards, which take 3% of a step. A copy
    per bucket has a single result, and nothing that the result depends on changes: modules, shapes and tensors stay the
    same. (Products call torch, which reads oneDNN's switch when they run.)
    """
    code, names = function.__code__.replace(), function.__globals__
    return types.FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)


def keep_compiled_code() -> str:
    """The folder that keeps compiled code for the next run: TORCHINDUCTOR_CACHE_DIR, else one beside the models.

    Importing torch's compiler writes its default, a temporary folder, into that variable; the default counts as unset.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    name, default = "TORCHINDUCTOR_CACHE_DIR", default_cache_dir()
    if os.environ.get(name, default) == default:
        os.environ[name] = str(cache_dir() / "compiled")
    return os.environ[name]
