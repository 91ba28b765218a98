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

from lean.engine.cuda_graphs import Recorder, Step, WaitsForDevice
from lean.engine.decode_batch import DecodeBatch
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
        batch: DecodeBatch,
        *,
        backend: str | Callable | None = None,
        record: Recorder | None = None,
    ) -> None:
        """
        Args:
            name: the model's, for messages.
            decoder: input_ids, position_ids [1, rows] and their batch -> hidden states [rows, hidden_size].
            backend: torch.compile's, e.g. ``inductor``; None compiles nothing.
            record: returns a step that runs again without Python; None calls the decoder each time.
        """
        self._name, self._decoder, self._batch = name, decoder, batch
        self._backend, self._record = backend, record
        self._buckets = buckets(batch.max_num_seqs)
        self._decoders: dict[int, Decoder] = {}
        self._steps: dict[tuple[int, int], Step] = {}  # by rows and width of the block tables

    def takes(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a step is a decode step that fits: one token of each sequence.

        Layers with states compute the first token of a sequence in another way.
        """
        first = 1 if self._batch.has_states else 0
        return len(chunks) <= self._buckets[-1] and all(first <= chunk.start == chunk.end - 1 for chunk in chunks)

    def warm_up(self) -> float:
        """Compile or record every bucket with padding rows only. Returns the seconds it took. Raises ModelError.

        The largest step is recorded first: the others fit into its memory. Wider tables of fewer rows are recorded when
        a sequence first needs them.
        """
        started = time.perf_counter()
        widths = [self._batch.width, *(self._width_for(1) for _ in self._buckets)]
        for rows, width in zip((self._buckets[-1], *reversed(self._buckets)), widths):
            self._step(rows, width)()
        return time.perf_counter() - started

    def run(self, chunks: Sequence[Chunk], shifts: Sequence[int]) -> torch.Tensor:
        """Hidden states [len(chunks), hidden_size]; see `DecodeBatch.fill`."""
        reach = max(chunk.end for chunk in chunks)
        if self._batch.reserve(reach):
            self._steps.clear()
            if self._record is not None:
                self._record.forget()
        rows = next(rows for rows in self._buckets if rows >= len(chunks))
        step = self._step(rows, self._width_for(reach))
        self._batch.fill(chunks, rows, shifts)
        # The next step overwrites a recorded one's output.
        return step()[: len(chunks)].clone()

    def _width_for(self, reach: int) -> int:
        """Blocks in the tables of a step whose longest sequence has ``reach`` tokens."""
        if self._record is None:
            return self._batch.width
        return self._batch.width_for(reach, SHORTEST_REACH)

    def _step(self, rows: int, width: int) -> Step:
        """The step of a bucket. A new one runs on padding while it is made, several times: states must not advance."""
        if (rows, width) not in self._steps:
            self._batch.fill([], rows, [])
            varies = self._batch.grows or self._width_for(1) < self._batch.width
            inputs, decoder = self._batch.inputs(rows, width, varies), self._decoder_for(rows)

            def step() -> torch.Tensor:
                return decoder(inputs.input_ids, inputs.position_ids, inputs.batch)

            try:
                if self._backend is not None:
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
        reason = one_line((str(getattr(error, "msg", error)).strip() or type(error).__name__).splitlines()[0])
        if self._backend is not None:
            return f"its decode step cannot be compiled as one graph ({reason}): leave --compile out"
        return f"its decode step cannot be recorded as a CUDA graph ({reason}): use --enforce-eager"

    def _decoder_for(self, rows: int) -> Decoder:
        if self._backend is None:
            return self._decoder
        if rows not in self._decoders:
            keep_compiled_code()
            fit_compilers()
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
