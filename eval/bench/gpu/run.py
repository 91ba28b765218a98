"""One run of the GPU benchmark: correctness, bandwidth, decode, prefill, and a model with random weights."""

import itertools
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from multiprocessing import get_context
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any

import torch

from lean.config import EngineConfig
from lean.device import free_bytes
from lean.errors import CompilerError, is_out_of_memory, one_line
from lean.eval.bench.gpu.layers import decode_times, prefill_times, step_errors
from lean.eval.bench.gpu.plan import FORMATS, TOLERANCE, Figure, Plan
from lean.eval.bench.memory import copy_bandwidth
from lean.eval.bench.shape import Shape
from lean.machine.cpus import find_cpus

_MOST_JOBS = 8
_JOB_BYTES = 768 * 2**20  # GPU memory of a compiling process: CUDA's context, the kernels' code, small tensors
_SHARE_OF_JOBS = 0.8  # of the free GPU memory, for all of them


class Run:
    """One run of the benchmark.

    A variant that fails is recorded, and the run goes on: one bad variant does not cost the GPU's other minutes.

    Attributes:
        figures: in the order of measurement; ``show`` also gets each one at once.
        left_out: cases for which time or memory was short. failed: cases that raised any other error.
        done: parts that have run.
    """

    def __init__(self, plan: Plan, device: torch.device, jobs: int, show: Callable[[Figure], None]) -> None:
        self.plan, self.device, self.jobs, self._show = plan, device, jobs, show
        self.figures: list[Figure] = []
        self.left_out: list[str] = []
        self.failed: list[str] = []
        self.done: list[str] = []
        self._end = time.perf_counter() + plan.total_seconds

    def _add(self, *values: Any) -> None:
        self.figures.append(Figure(*values))
        self._show(self.figures[-1])

    def run(self, part: str) -> None:
        """Run a part. Raises CompilerError where no kernel can be compiled."""
        getattr(self, part)()
        self.done.append(part)

    @property
    def is_right(self) -> bool:
        """Whether no variant failed and no result is off by more than the tolerance."""
        right = all(f.value <= TOLERANCE for f in self.figures if f.part == "correctness")
        return right and not self.failed

    def _end_of(self, part: str) -> float:
        """When a part that begins now must end."""
        return min(self._end, time.perf_counter() + self.plan.seconds[part])

    def _in_time(self, part: str, cases: list[tuple]) -> Iterator[tuple]:
        """The cases until the part's time is over; the others go to ``left_out``."""
        end = self._end_of(part)
        for case in cases:
            if time.perf_counter() > end:
                self.left_out.append(f"{part} {' '.join(map(str, case))}: out of time")
            else:
                yield case

    def _try(self, what: str, call: Callable[[], Any]) -> Any:
        """The result of ``call``, or None where it raised an error."""
        try:
            return call()
        except multiprocessing.TimeoutError:
            self.left_out.append(f"{what}: out of time")
        except Exception as error:
            if is_out_of_memory(error):
                torch.cuda.empty_cache()
                self.left_out.append(f"{what}: out of memory")
                return None
            self.failed.append(f"{what}: {type(error).__name__}: {one_line(error)}")
            if isinstance(error, CompilerError):
                raise
        return None

    def correctness(self) -> None:
        """Every variant against float64, in separate processes; they also fill Triton's cache for the other parts."""
        cases = self.plan.checks()
        if self.jobs == 1:
            for fmt, shape, rule in self._in_time("correctness", cases):
                check = partial(step_errors, fmt, shape, rule, self.plan.context, self.device)
                self._judge((fmt, shape, rule), check)
            return
        end = self._end_of("correctness")
        with get_context("spawn").Pool(self.jobs, _leave_interrupts_to_the_parent) as pool:  # leaving it ends them
            results = [pool.apply_async(step_errors, (*case, self.plan.context, self.device)) for case in cases]
            for case, result in zip(cases, results):
                self._judge(case, partial(_wait, result, end))

    def _judge(self, case: tuple[str, Shape, str], errors: Callable[[], dict[str, float]]) -> None:
        fmt, shape, rule = case
        for step, error in (self._try(f"correctness {fmt} {shape} {rule}", errors) or {}).items():
            self._add("correctness", f"{fmt} {rule} {step}", str(shape), 3, self.plan.context, None, error, "error")

    def bandwidth(self) -> None:
        """The bandwidth of a copy, which other parts are compared with."""
        speed = self.copy_bytes_per_s
        if speed is not None:
            self._add("bandwidth", "copy", "", 0, 0, None, speed / 1e9, "GB/s")

    @cached_property
    def copy_bytes_per_s(self) -> float | None:
        """Bytes per second of a copy, read and written together; measured once. None where that did not work."""
        return self._try("bandwidth copy", partial(copy_bandwidth, self.device))

    def decode(self) -> None:
        """A decode step of each format as a share of the copy bandwidth, with its speed-up over bf16.

        Where the copy bandwidth is unknown, the step's own bytes per second stand in place of the share.
        """
        cases = [(*step, shape, fmt) for step in self.plan.decodes for shape in self.plan.shapes for fmt in FORMATS]
        top = self.copy_bytes_per_s  # before anything is timed, since it brings the GPU's clocks up
        for context, batch, shape, fmt in self._in_time("decode", cases):
            measure = partial(decode_times, fmt, shape, batch, context, self.device, self.plan.rounds, self.plan.rules)
            timings = self._try(f"decode {context} {batch} {shape} {fmt}", measure) or {}
            for name, (timing, nbytes) in timings.items():
                if name == "bf16" and fmt != "bf16":
                    continue  # the baseline of this format; reported as its own case
                speed = nbytes / timing.median
                value = (speed / 1e9, "GB/s") if top is None else (speed / top, "of copy")
                speedup = timings["bf16"][0].median / timing.median
                self._add("decode", name, str(shape), batch, context, 1e3 * timing.median, *value, speedup)

    def prefill(self) -> None:
        """Attention of a prompt chunk in TFLOP/s, with its speed-up over bf16."""
        cases = [(*step, shape, fmt) for step in self.plan.prefills for shape in self.plan.shapes for fmt in FORMATS]
        exact: dict[tuple, float] = {}
        for rows, context, shape, fmt in self._in_time("prefill", cases):
            measure = partial(prefill_times, fmt, shape, rows, context, self.device, self.plan.rounds)
            timings, flop = self._try(f"prefill {rows} {context} {shape} {fmt}", measure) or ({}, 0.0)
            for name, timing in timings.items():
                if name == "bf16":
                    exact[rows, context, shape] = timing.median
                baseline = exact.get((rows, context, shape))
                self._add(
                    "prefill", f"{name}, {rows} rows", str(shape), 1, context, 1e3 * timing.median,
                    flop / timing.median / 1e12, "TFLOP/s", baseline and baseline / timing.median,
                )  # fmt: skip

    def model(self) -> None:
        """Decode steps of a Llama with random weights: eager and, on a GPU, from CUDA graphs."""
        from lean.eval.bench.gpu.model import step_seconds
        from lean.eval.bench.peers import decode_room
        from lean.eval.random_model import save_random_model
        from lean.llm import LLM  # imports Triton, so `interpret` must have run before

        if self.plan.model is None:
            return
        layers, hidden, heads, kv_heads, vocabulary, context = self.plan.model
        modes = [True] if self.device.type == "cpu" else [True, False]  # values of enforce_eager
        steps = 4 * self.plan.rounds + 2
        with tempfile.TemporaryDirectory() as folder:
            save_random_model(
                Path(folder), "llama", torch.bfloat16, self.device, vocab_size=vocabulary, hidden_size=hidden,
                intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=kv_heads, max_position_embeddings=4 * context, tie_word_embeddings=True,
            )  # fmt: skip
            config = EngineConfig(
                "bf16", dtype="bfloat16", device=self.device.type, max_num_seqs=1,
                max_model_len=context + steps + 8, max_num_batched_tokens=2048,
            )  # fmt: skip
            loaded = LLM(folder, config)
            shape = f"{layers}x{hidden}"
            cases = list(itertools.product(self.plan.model_batches, ("bf16", "int8")))
            for batch, fmt in self._in_time("model", cases):
                eager = None
                for enforce_eager in modes:
                    name = "eager" if enforce_eager else "graphs"
                    config = replace(loaded.config, kv_dtype=fmt, max_num_seqs=batch, enforce_eager=enforce_eager)
                    config = replace(config, max_model_len=context + decode_room(config, batch, context, steps))
                    step = partial(step_seconds, loaded.model, config, batch, context, steps)
                    median = self._try(f"model {fmt} {name} {batch}", step)
                    if median is None:
                        continue
                    eager = eager or median
                    self._add(
                        "model", f"{fmt} {name}", shape, batch, context, 1e3 * median, batch / median, "tokens/s",
                        eager / median,
                    )  # fmt: skip


def fitting_jobs(device: torch.device) -> int:
    """Compiling processes that the CPUs and a GPU's free memory allow; at least one, at most eight."""
    by_memory = _MOST_JOBS if device.type == "cpu" else int(free_bytes(device) * _SHARE_OF_JOBS) // _JOB_BYTES
    return max(1, min(_MOST_JOBS, find_cpus().usable, by_memory))


def _wait(result: AsyncResult[dict[str, float]], end: float) -> dict[str, float]:
    return result.get(max(0.0, end - time.perf_counter()))


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def interpret() -> torch.library.Library:
    """Run the Triton kernels on the CPU, interpreted. Call it before anything imports Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    from lean.kernels.call import from_arguments
    from lean.kernels.ops import on_gpu

    library = torch.library.Library("lean", "IMPL", "CPU")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Overriding a previously registered kernel")
        for name in ("kv_write", "paged_attention"):
            library.impl(name, from_arguments(name, on_gpu(name)), allow_override=True)
    return library
