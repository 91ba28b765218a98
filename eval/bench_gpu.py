"""``python -m lean.eval.bench_gpu``: every kernel's numbers and speed on one GPU, in six minutes.

Parts, in the order of what would be missed most: correctness of every variant against float64; decode as a share of the
measured copy bandwidth, beside torch's attention; prefill; a whole model with random weights. A part that runs out of
its time says what it left out. ``--toy`` runs all of it in small on a CPU, the kernels interpreted.
"""

import argparse
import itertools
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from lean.config import EngineConfig
from lean.errors import one_line
from lean.eval.bench.gpu.layers import decode_times, prefill_times, worst_error
from lean.eval.bench.gpu.plan import FORMATS, FULL, TOLERANCE, TOY, Figure, Plan, line, missed
from lean.eval.bench.timing import seconds_of


class Run:
    """One run of the benchmark: ``figures`` as they come, ``left_out``, what there was no time or memory for, and
    ``failed``, what raised anything else: one bad variant does not cost the GPU's other minutes."""

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
        """Cases while the part has time."""
        end = time.perf_counter() + self.plan.seconds[part]
        for case in cases:
            if time.perf_counter() > end:
                self.left_out.append(f"{part} {' '.join(map(str, case))}: out of time")
            else:
                yield case

    def _try(self, what: str, call: Callable[[], Any]) -> Any:
        """What ``call`` returns, or None where it raised."""
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
        """Every variant in processes of their own, which also leaves Triton's cache filled for what follows."""
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
            calls = [partial(lambda own: own.result(max(0.0, end - time.perf_counter())), own) for own in results]
        for (fmt, shape, rule), call in zip(cases, calls):
            error = self._try(f"correctness {fmt} {shape} {rule}", call)
            if error is not None:
                self._add("correctness", f"{fmt} {rule}", str(shape), 3, self.plan.context, None, error, "error")
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def decode(self) -> None:
        cases = [(*step, shape, fmt) for step in self.plan.decodes for shape in self.plan.shapes for fmt in FORMATS]
        for context, batch, shape, fmt in self._in_time("decode", cases):
            measure = partial(decode_times, fmt, shape, batch, context, self.device, self.plan.rounds)
            timings = self._try(f"decode {context} {batch} {shape} {fmt}", measure) or {}
            for name, (timing, nbytes) in timings.items():
                if name == "bf16" and fmt != "bf16":
                    continue  # it only took turns
                share = nbytes / timing.median / self.copy_bytes_per_s
                speedup = timings["bf16"][0].median / timing.median
                self._add(
                    "decode", name, str(shape), batch, context, 1e3 * timing.median, share, "of copy", speedup
                )  # fmt: skip

    def prefill(self) -> None:
        cases = [(*step, shape, fmt) for step in self.plan.prefills for shape in self.plan.shapes for fmt in FORMATS]
        exact: dict[tuple, float] = {}
        for rows, context, shape, fmt in self._in_time("prefill", cases):
            measure = partial(prefill_times, fmt, shape, rows, context, self.device, self.plan.rounds)
            timings, flop = self._try(f"prefill {rows} {context} {shape} {fmt}", measure) or ({}, 0.0)
            for name, timing in timings.items():
                if name == "bf16":
                    exact[rows, context, shape] = timing.median
                own = exact.get((rows, context, shape))
                self._add(
                    "prefill", f"{name}, {rows} rows", str(shape), 1, context, 1e3 * timing.median,
                    flop / timing.median / 1e12, "TFLOP/s", own and own / timing.median,
                )  # fmt: skip

    def model(self) -> None:
        """Decode of a Llama with random weights, eager and, where the engine records them, from CUDA graphs."""
        from lean.eval.bench.gpu.model import random_llama, step_seconds
        from lean.eval.bench.peers import decode_room
        from lean.llm import LLM  # after `interpret`, since it imports Triton

        layers, hidden, heads, kv_heads, vocabulary, context = self.plan.model
        modes = [True] if self.device.type == "cpu" else [True, False]  # of enforce_eager: only GPUs record steps
        steps = 4 * self.plan.rounds + 2
        with tempfile.TemporaryDirectory() as folder:
            random_llama(Path(folder), layers, hidden, heads, kv_heads, vocabulary, 4 * context, self.device)
            config = EngineConfig(
                "bf16", dtype="bfloat16", device=self.device.type, max_num_seqs=1,
                max_model_len=context + steps + 8, max_num_batched_tokens=2048,
            )  # fmt: skip
            loaded = LLM(folder, config)
            shape = f"{layers}x{hidden}"
            for batch, fmt in self._in_time(
                "model", list(itertools.product(self.plan.model_batches, ("bf16", "int8")))
            ):
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
    """Bytes per second that a copy between two buffers beyond the caches reads and writes together, at best."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(seconds_of(partial(target.copy_, source)) for _ in range(10))


def interpret() -> torch.library.Library:
    """Make the interpreted Triton kernels serve the CPU, in a process that has not imported Triton yet."""
    os.environ["TRITON_INTERPRET"] = "1"
    from lean.kernels.call import from_arguments
    from lean.kernels.triton import backend

    library = torch.library.Library("lean", "IMPL", "CPU")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Overriding a previously registered kernel")
        for name in ("kv_write", "paged_attention"):
            library.impl(name, from_arguments(name, getattr(backend, name)), allow_override=True)
    return library


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lean.eval.bench_gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--toy", action="store_true", help="all of it in small, on a CPU")
    parser.add_argument("--part", nargs="+", default=list(FULL.seconds), choices=list(FULL.seconds))
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--json", metavar="FILE", help="write everything there too")
    options = parser.parse_args()
    if not (options.toy or torch.cuda.is_available()):
        parser.error("no GPU here; --toy runs everything in small on a CPU")
    overriding = interpret() if options.toy else None
    device = torch.device("cpu" if options.toy else "cuda:0")
    started = time.perf_counter()
    run = Run(
        TOY if options.toy else FULL, device, 1 if options.toy else options.jobs, lambda f: print(line(f), flush=True)
    )
    for part in options.part:
        getattr(run, part)()
    facts = {
        "device": "cpu, interpreted" if overriding else torch.cuda.get_device_name(device),
        "versions": {name: version(name) for name in ("torch", "triton", "transformers")},
        "copy_gb_s": run.copy_bytes_per_s / 1e9,
        "seconds": time.perf_counter() - started,
        "missed": [] if overriding else missed(run.figures),
        "left_out": run.left_out,
        "failed": run.failed,
    }
    print(json.dumps(facts, indent=1))
    if options.json:
        Path(options.json).write_text(
            json.dumps(facts | {"figures": [asdict(f) for f in run.figures]}, indent=1) + "\n"
        )
    wrong = [f for f in run.figures if f.part == "correctness" and not f.value <= TOLERANCE]
    raise SystemExit(1 if wrong or run.failed else 0)


if __name__ == "__main__":
    main()
