"""Decode steps on fixed tensors, so that one compiled or recorded step serves them all.

A decode step adds one token to each of its sequences. Its inputs are written into the same tensors every time, for one
of a few numbers of rows (buckets); what a step has fewer is padding. torch.compile then sees each bucket's shapes once,
and a CUDA graph its addresses.
"""

from __future__ import annotations

import os
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch

from lean.errors import ModelError, one_line
from lean.kernels.layout import blocks_for
from lean.model.attention import AttentionBatch
from lean.model.rotary import SinkRotary, SinkTurn
from lean.store.home import cache_dir

if TYPE_CHECKING:
    from lean.cache.block_manager import BlockManager
    from lean.engine.scheduler import Chunk

# Tokens that block tables reach over at first. Longer sequences double it, which records again but compiles nothing.
FIRST_REACH = 2**17

Decoder = Callable[[torch.Tensor, torch.Tensor, AttentionBatch], torch.Tensor]
Step = Callable[[], torch.Tensor]


def buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of rows that steps of up to ``max_num_seqs`` sequences are padded to: 1, 2, 4, ... and the most."""
    powers = [1 << n for n in range(max_num_seqs.bit_length())]
    return (*(rows for rows in powers if rows < max_num_seqs), max_num_seqs)


class _Buffer:
    """Numbers that the host writes and the device reads: one tensor on a CPU, else pinned memory and its copy."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        on_host = device.type == "cpu"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=not on_host)
        self.tensor = self._host if on_host else torch.zeros(shape, dtype=dtype, device=device)
        self.values = self._host.numpy()

    def send(self, rows: int) -> None:
        """Let the device see the first ``rows``, in order with its work and without waiting for it.

        The next step may write here all the same: it begins when this one's logits have been read.
        """
        if self.tensor is not self._host:
            self.tensor[:rows].copy_(self._host[:rows], non_blocking=True)


@dataclass(frozen=True)
class DecodeInputs:
    """What the decoder is called with: input_ids, position_ids int64 [1, rows] and where the rows lie in the cache."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    batch: AttentionBatch


class DecodeBatch:
    """The inputs of decode steps: fixed tensors, filled in place.

    Rows behind the step's own are padding, for which kernels write nothing and give zeros: slot -1, no query row
    (query_start_loc stays at its last value), seq_len 0.
    """

    def __init__(
        self,
        manager: BlockManager,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype,
        sink_rotary: SinkRotary | None,
    ) -> None:
        """``dtype``: of the queries. ``sink_rotary``: where sinks stay visible beyond a window."""
        self._manager, self._device, self._rotary = manager, device, sink_rotary
        self.max_num_seqs = max_num_seqs
        # The table of a pool with a window is as wide as any: its columns are positions, evicted ones the null block.
        most = blocks_for(max_model_len, manager.block_size)
        self._width = min(most, blocks_for(FIRST_REACH, manager.block_size))
        self.grows = self._width < most

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> _Buffer:
            return _Buffer(shape, dtype, device)

        self._ids, self._positions = buffer(max_num_seqs), buffer(max_num_seqs)
        self._starts = buffer(max_num_seqs + 1, dtype=torch.int32)
        self._lens = buffer(max_num_seqs, dtype=torch.int32)
        self._slots = [buffer(max_num_seqs) for _ in manager.pools]
        self._turn: list[_Buffer] = []
        if sink_rotary is not None:
            wide = torch.promote_types(dtype, torch.float32)
            self._turn = [buffer(max_num_seqs, 1, sink_rotary.inv_freq.shape[0], dtype=wide) for _ in "cs"]
        self._make_tables()

    def _make_tables(self) -> None:
        shape = self.max_num_seqs, self._width
        self._tables = [_Buffer(shape, torch.int32, self._device) for _ in self._manager.pools]

    def reserve(self, num_tokens: int) -> bool:
        """Let block tables reach over so many tokens. True where that made new ones: earlier inputs are void."""
        blocks = blocks_for(num_tokens, self._manager.block_size)
        if blocks <= self._width:
            return False
        while self._width < blocks:
            self._width *= 2
        self._make_tables()
        return True

    def inputs(self, rows: int) -> DecodeInputs:
        """The first ``rows`` rows of the fixed tensors."""
        tables = tuple(table.tensor[:rows] for table in self._tables)
        if self.grows:
            for table in tables:
                torch._dynamo.mark_dynamic(table, 1)
        turn = None
        if self._rotary is not None:
            cos, sin = (part.tensor[:rows] for part in self._turn)
            turn = SinkTurn(cos, sin, self._rotary.pairs)
        ids, positions = self._ids.tensor[:rows], self._positions.tensor[:rows]
        batch = AttentionBatch(
            query_start_loc=self._starts.tensor[: rows + 1],
            seq_lens=self._lens.tensor[:rows],
            positions=positions,
            slot_mapping=tuple(slots.tensor[:rows] for slots in self._slots),
            block_tables=tables,
            sink_turn=turn,
        )
        return DecodeInputs(ids[None], positions[None], batch)

    def fill(self, chunks: Sequence[Chunk], rows: int, shifts: Sequence[int]) -> None:
        """Write a step's chunks of one token each, and padding behind them up to ``rows``.

        ``shifts``: by how much each chunk's query is turned back for the sinks; unused without ``sink_rotary``.
        """
        count, size = len(chunks), self._manager.block_size
        own, rest = slice(count), slice(count, rows)
        self._ids.values[own] = [chunk.request.tokens(chunk.start, chunk.end)[0] for chunk in chunks]
        self._positions.values[own] = [chunk.start for chunk in chunks]
        self._lens.values[own] = [chunk.end for chunk in chunks]
        self._starts.values[: count + 1] = range(count + 1)
        self._starts.values[count + 1 : rows + 1] = count
        for part in (self._ids, self._positions, self._lens, *self._tables):
            part.values[rest] = 0
        for pool, (slots, tables) in enumerate(zip(self._slots, self._tables)):
            slots.values[rest] = -1
            for row, chunk in enumerate(chunks):
                table = self._manager.table(chunk.request.seq_id, pool)
                tables.values[row, : len(table)] = numpy.frombuffer(table, numpy.int32)
                tables.values[row, len(table) :] = 0
                slots.values[row] = table[chunk.start // size] * size + chunk.start % size
        if self._rotary is not None:
            turn = self._rotary.back(torch.tensor(shifts, dtype=torch.long), torch.device("cpu"))
            for part, values, still in zip(self._turn, (turn.cos, turn.sin), (1, 0)):
                part.values[own] = values.numpy()
                part.values[rest] = still
        self._starts.send(rows + 1)
        for part in (self._ids, self._positions, self._lens, *self._slots, *self._tables, *self._turn):
            part.send(rows)


class CudaGraphs:
    """Records steps as CUDA graphs that share one memory pool, since only one of them ever runs.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        """What is returned runs the step's kernels again, on the same tensors, the one it returned included."""
        with torch.cuda.device(self._device):
            return self._record(step)

    def _record(self, step: Step) -> Step:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what libraries and compilers do at first must not be recorded
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
    """Runs decode steps bucket by bucket, each bucket's step made ready once."""

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
            record: makes a step that runs again without Python, e.g. `CudaGraphs`; None calls it every time.
        """
        self._name, self._decoder, self._batch = name, decoder, batch
        self._backend, self._record = backend, record
        self._buckets = buckets(batch.max_num_seqs)
        self._decoders: dict[int, Decoder] = {}
        self._steps: dict[int, Step] = {}

    def takes(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a step is a decode step: one token of every sequence."""
        return len(chunks) <= self._buckets[-1] and all(chunk.end - chunk.start == 1 for chunk in chunks)

    def warm_up(self) -> float:
        """Make every bucket ready, on padding alone; returns the seconds it took. Raises ModelError."""
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
    """The function with a code object of its own.

    torch.compile keeps its results by code object, a few at most, and tells them apart by guards, which take 3% of a
    step. A copy for every bucket has a single result, and nothing that it depends on ever changes: the modules, the
    shapes and the tensors themselves. (Products are calls of torch's, which look at oneDNN's switch when they run.)
    """
    code, names = function.__code__.replace(), function.__globals__
    return types.FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)


def keep_compiled_code() -> str:
    """Where compiled code stays for the next run: TORCHINDUCTOR_CACHE_DIR, else a folder beside the models.

    Importing torch's compiler writes its default, a temporary folder, into that variable: this counts as not given.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    name, default = "TORCHINDUCTOR_CACHE_DIR", default_cache_dir()
    if os.environ.get(name, default) == default:
        os.environ[name] = str(cache_dir() / "compiled")
    return os.environ[name]
