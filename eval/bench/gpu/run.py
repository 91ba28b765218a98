"""One run of the GPU benchmark: correctness, decode, prefill, and a model with random weights."""

import itertools
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from lean.config import EngineConfig
from lean.errors import one_line
from lean.eval.bench.gpu.layers import decode_times, prefill_times, worst_error
from lean.eval.bench.gpu.plan import FORMATS, Figure, Plan
from lean.eval.bench.timing import seconds_of


class Run:
    """One run of the benchmark.

    A variant that fails is recorded, and the run goes on: one bad variant does not cost the GPU's other minutes.

    Attributes:
        figures: in the order of measurement; ``show`` also gets each one at once.
        left_out: cases for which time or memory was short. failed: cases that raised any other error.
    """

    def __init__(self, plan: Plan, device: torch.device, jobs: int, show: Callable[[Figure], None]) -> None:
        self.plan, self.device, self.jobs, self._show = plan, device, jobs, show
        self.figures: list[Figure] = []
        self.left_out: list[str] = []
        self.failed: list[str] = []
        self.copy_bytes_per_s = copy_bandwidth(device)

    def _add(self, *values: Any) -> None:
        self.figures.append(Figure(*values))
        self._show(self.figures[-1])

    def _in_time(self, part: str, cases: list[tuple]) -> Iterator[tuple]:
        """The cases until the part's time is over; the others go to ``left_out``."""
        end = time.perf_counter() + self.plan.seconds[part]
        for case in cases:
            if time.perf_counter() > end:
                self.left_out.append(f"{part} {' '.join(map(str, case))}: out of time")
            else:
                yield case

    def _try(self, what: str, call: Callable[[], Any]) -> Any:
        """The result of ``call``, or None where it raised an error."""
        try:
            return call()
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            self.left_out.append(f"{what}: out of memory")
        except TimeoutError:
            self.left_out.append(f"{what}: out of time")
        except Exception as error:
            self.failed.append(f"{what}: {type(error).__name__}: {one_line(error)}")
        return None

    def correctness(self) -> None:
        """Every variant against float64, in separate processes; they also fill Triton's cache for the other parts."""
        plain = [
            (fmt, shape, rule)
            for shape, fmt in itertools.product(self.plan.shapes, FORMATS)
            for rule in ("plain", "residual")[: 1 if fmt == "bf16" else 2]
        ]
        cases = plain + [(fmt, shape, "everything") for shape, fmt in itertools.product(self.plan.odd_shapes, FORMATS)]
        end = time.perf_counter() + self.plan.seconds["correctness"]
        pool = ProcessPoolExecutor(self.jobs, mp_context=get_context("spawn")) if self.jobs > 1 else None
        calls = [partial(worst_error, *case, self.plan.context, self.device) for case in cases]
        if pool is not None:
            results = [pool.submit(call) for call in calls]
            calls = [partial(lambda one: one.result(max(0.0, end - time.perf_counter())), one) for one in results]
        for (fmt, shape, rule), call in zip(cases, calls):
            error = self._try(f"correctness {fmt} {shape} {rule}", call)
            if error is not None:
                self._add("correctness", f"{fmt} {rule}", str(shape), 3, self.plan.context, None, error, "error")
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def decode(self) -> None:
        """A decode step of each format as a share of the copy bandwidth, with its speed-up over bf16."""
        cases = [(*step, shape, fmt) for step in self.plan.decodes for shape in self.plan.shapes for fmt in FORMATS]
        for context, batch, shape, fmt in self._in_time("decode", cases):
            measure = partial(decode_times, fmt, shape, batch, context, self.device, self.plan.rounds)
            timings = self._try(f"decode {context} {batch} {shape} {fmt}", measure) or {}
            for name, (timing, nbytes) in timings.items():
                if name == "bf16" and fmt != "bf16":
                    continue  # the baseline of this format; reported as its own case
                share = nbytes / timing.median / self.copy_bytes_per_s
                speedup = timings["bf16"][0].median / timing.median
                self._add(
                    "decode", name, str(shape), batch, context, 1e3 * timing.median, share, "of copy", speedup
                )  # fmt: skip

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
        from lean.eval.random_llama import save_random_llama
        from lean.llm import LLM  # imports Triton, so `interpret` must have run before

        layers, hidden, heads, kv_heads, vocabulary, context = self.plan.model
        modes = [True] if self.device.type == "cpu" else [True, False]  # values of enforce_eager
        steps = 4 * self.plan.rounds + 2
        with tempfile.TemporaryDirectory() as folder:
            save_random_llama(
                Path(folder), torch.bfloat16, self.device, vocab_size=vocabulary, hidden_size=hidden,
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


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written together, of a copy between two buffers larger than the caches; best of 10."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(seconds_of(partial(target.copy_, source)) for _ in range(10))


def interpret() -> torch.library.Library:
    """Run the Triton kernels on the CPU, interpreted. Call it before anything imports Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    from lean.kernels.call import from_arguments
    from lean.kernels.triton import backend

    library = torch.library.Library("lean", "IMPL", "CPU")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Overriding a previously registered kernel")
        for name in ("kv_write", "paged_attention"):
            library.impl(name, from_arguments(name, getattr(backend, name)), allow_override=True)
    return library
