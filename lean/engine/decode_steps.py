"""Decode steps on fixed tensors, so that one compiled or recorded step serves them all.

A decode step adds one token to each of its sequences. Its inputs are written into the same tensors every time, padded
to one of a few numbers of rows (buckets). torch.compile then sees each bucket's shapes once, and a CUDA graph sees the
same addresses at every step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from lean.engine.compiling import Compiling, why
from lean.engine.cuda_graphs import Recorder, Step, WaitsForDevice
from lean.engine.decode_batch import DecodeBatch
from lean.engine.layer_programs import LayerPrograms, StepPrograms
from lean.errors import KernelError, ModelError, is_out_of_memory, one_line
from lean.machine.cpus import find_cpus
from lean.model.attention import AttentionBatch
from lean.store.home import NoHome, cache_dir

if TYPE_CHECKING:
    from lean.engine.scheduler import Chunk

Decoder = Callable[[torch.Tensor, torch.Tensor, AttentionBatch], torch.Tensor]
# Block tables of recorded steps are as wide as this number of tokens needs, or as four, sixteen ... times as many.
SHORTEST_REACH = 1024


def buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of rows that steps are padded to: the powers of two below ``max_num_seqs``, and ``max_num_seqs``."""
    powers = [1 << n for n in range(max_num_seqs.bit_length())]
    return (*(rows for rows in powers if rows < max_num_seqs), max_num_seqs)


class DecodeSteps:
    """Runs decode steps. Each bucket's step is compiled once, and recorded once for each width of the block tables.

    A recorded step launches kernels for all positions that its block tables reach. Tables as wide as the longest
    sequence that is possible would make every step of a short one launch thousands of programs without work.
    """

    def __init__(
        self,
        name: str,
        decoder: Decoder,
        batches: Sequence[DecodeBatch],
        *,
        compiled: Callable[[bool], LayerPrograms] | None = None,
        record: Recorder | None = None,
    ) -> None:
        """
        Args:
            name: the model's, for messages.
            decoder: input_ids, position_ids [1, rows] and their batch -> hidden states [rows, hidden_size].
            batches: the inputs of each bucket, in ascending order of their rows.
            compiled: makes the programs of the layers for one more number of rows, which may run or not; None compiles
                nothing.
            record: returns a step that runs again without Python; None calls the decoder each time.
        """
        self._name, self._decoder = name, decoder
        self._batches = {batch.rows: batch for batch in batches}
        self._compiled, self._record = compiled, record
        self._forked = False
        self._programs: dict[int, LayerPrograms] = {}
        self._compiling: Compiling | None = None  # where steps are compiled beside the engine
        self._steps: dict[tuple[int, int], Step] = {}  # by rows and width of the block tables

    def takes(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a step is a decode step that fits: one token of each sequence, in a bucket that is ready.

        Layers with states compute the first token of a sequence in another way.
        """
        batch = self._batch_for(chunks)
        if batch is None:
            return False
        first = 1 if batch.has_states else 0
        is_decode = all(first <= chunk.start == chunk.end - 1 for chunk in chunks)
        return is_decode and self._is_ready(batch, chunks)

    def _batch_for(self, chunks: Sequence[Chunk]) -> DecodeBatch | None:
        """The smallest one that has room."""
        return next((batch for rows, batch in self._batches.items() if rows >= len(chunks)), None)

    def _is_ready(self, batch: DecodeBatch, chunks: Sequence[Chunk]) -> bool:
        """Whether the step of a bucket can run now. Loading what another process has compiled takes about a second.

        While other buckets are compiled no tables grow.
        """
        compiling = self._compiling
        if compiling is None:
            return True
        compiling.look()
        if batch.rows not in compiling.done:
            return False
        if (batch.rows, batch.width) not in self._steps:
            return self._load(compiling, batch)
        return batch.has_room(max(chunk.end for chunk in chunks)) or not compiling.runs

    @torch.inference_mode()
    def _load(self, compiling: Compiling, batch: DecodeBatch) -> bool:
        """Make the step of a bucket that has been compiled. If that fails, it stays uncompiled."""
        try:
            self._step(batch, batch.width)()
        except Exception as error:  # steps go on uncompiled
            compiling.done.discard(batch.rows)
            self._steps.pop((batch.rows, batch.width), None)
            compiling.fail(why(error))
            return False
        return True

    def warm_up(self) -> float:
        """Compile or record every bucket with padding rows only. Returns the seconds it took. Raises ModelError.

        The largest step is recorded first: the others fit into its memory. Wider tables of fewer rows are recorded when
        a sequence first needs them.
        """
        started = time.perf_counter()
        largest, *others = reversed(self._batches.values())
        self._step(largest, largest.width)()
        for batch in (largest, *others):
            self._step(batch, self._width_for(batch, 1))()
        return time.perf_counter() - started

    def compile_beside(self) -> None:
        """Compile the buckets in another process, the smallest first. Steps use each one once it is ready."""

        def job(batch: DecodeBatch) -> None:
            self._forked = True
            with torch.inference_mode():
                self._step(batch, batch.width)

        keep_compiled_code()
        fit_compilers()
        self._compiling = Compiling({rows: partial(job, batch) for rows, batch in self._batches.items()})

    def finish_compiling(self) -> None:
        """Wait for the other process, and load what it has compiled. Raises ModelError where it has failed."""
        if self._compiling is None:
            return
        self._compiling.look(wait=True)
        for rows, batch in self._batches.items():
            if rows in self._compiling.done and (rows, batch.width) not in self._steps:
                self._load(self._compiling, batch)
        if self._compiling.failure is not None:
            raise ModelError(self._compiling.failure)

    def stop_compiling(self) -> None:
        """Buckets that are not compiled stay so."""
        if self._compiling is not None:
            self._compiling.stop()

    def run(self, chunks: Sequence[Chunk], shifts: Sequence[int]) -> torch.Tensor:
        """Hidden states [len(chunks), hidden_size]; see `DecodeBatch.fill`."""
        reach = max(chunk.end for chunk in chunks)
        batch = self._batch_for(chunks)
        assert batch is not None
        if batch.reserve(reach):
            for other in self._batches.values():
                other.reserve(reach)
            self._steps.clear()
            if self._record is not None:
                self._record.forget()
        step = self._step(batch, self._width_for(batch, reach))
        batch.fill(chunks, shifts)
        # The next step overwrites a recorded one's output.
        return step()[: len(chunks)].clone()

    def _width_for(self, batch: DecodeBatch, reach: int) -> int:
        """Blocks in the tables of a step whose longest sequence has ``reach`` tokens."""
        return batch.width if self._record is None else batch.width_for(reach, SHORTEST_REACH)

    def _step(self, batch: DecodeBatch, width: int) -> Step:
        """The step of a bucket. A new one runs on padding while it is made, several times: states must not advance."""
        rows = batch.rows
        if (rows, width) not in self._steps:
            batch.fill([], [])
            varies = batch.grows or self._width_for(batch, 1) < batch.width
            inputs = batch.inputs(width, varies)
            own = replace(inputs.batch, layer_runner=self._runner_for(rows))

            def step() -> torch.Tensor:
                return self._decoder(inputs.input_ids, inputs.position_ids, own)

            try:
                if self._compiled is not None:
                    step()
                self._steps[rows, width] = step if self._record is None else self._record(step)
            except (KernelError, WaitsForDevice):
                raise
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                raise ModelError(f"{self._name}: {self._why(error)}") from error
        return self._steps[rows, width]

    def _why(self, error: Exception) -> str:
        error = getattr(error, "inner_exception", error)  # of a back end of torch.compile
        reason = one_line((str(getattr(error, "msg", error)).strip() or type(error).__name__).splitlines()[0])
        if self._compiled is not None:
            return f"its decode step cannot be compiled layer by layer ({reason}): leave --compile out"
        return f"its decode step cannot be recorded as a CUDA graph ({reason}): use --enforce-eager"

    def _runner_for(self, rows: int) -> StepPrograms | None:
        if self._compiled is None:
            return None
        if rows not in self._programs:
            keep_compiled_code()
            fit_compilers()
            self._programs[rows] = self._compiled(not self._forked)
        return StepPrograms(self._programs[rows])


def keep_compiled_code() -> str:
    """The folder that keeps compiled code for the next run: TORCHINDUCTOR_CACHE_DIR, else one beside the models.

    Importing torch's compiler writes its default, a temporary folder, into that variable; the default counts as unset,
    and serves where the folder beside the models cannot be written.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    name, default = "TORCHINDUCTOR_CACHE_DIR", default_cache_dir()
    if os.environ.get(name, default) == default:
        os.environ[name] = _own_folder() or default
    return os.environ[name]


def _own_folder() -> str | None:
    """The folder beside the models, made if it does not exist. None where nothing can be written into it."""
    try:
        folder = cache_dir() / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, NoHome):
        return None
    return str(folder) if os.access(folder, os.W_OK | os.X_OK) else None


def fit_compilers() -> None:
    """Start no more compiling processes than the CPUs that this process may use.

    torch starts one for each CPU of the affinity, whatever the quota. TORCHINDUCTOR_COMPILE_THREADS stays as it is set.
    """
    from torch._inductor import config

    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        config.compile_threads = min(config.compile_threads or 1, find_cpus().usable)
