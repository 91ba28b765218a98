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
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from lean.config import EngineConfig
from lean.eval.bench import seconds_of
from lean.eval.bench_gpu_layers import Shape, decode_times, prefill_times, worst_error

FORMATS = ("bf16", "int8", "fp8", "int4", "k8v4")
# Llama-3-8B, Qwen2.5-7B, Gemma-2-9B, SmolLM2-135M.
SHAPES = (Shape(32, 8, 128), Shape(28, 4, 128), Shape(16, 8, 256), Shape(9, 3, 64))
ODD_SHAPES = (Shape(5, 1, 96), Shape(6, 2, 192), Shape(16, 2, 64))
TOLERANCE = 6e-3  # of bf16 outputs, relative to the largest: they are rounded to 2^-9, the query to as much
# Decode speed of a format over bf16 that is aimed at from batch 8 and 32k tokens on, and bf16's share of the copy.
TARGETS = {"bf16": 0.8, "int8": 1.75, "fp8": 1.75, "k8v4": 2.1, "int4": 2.6}


@dataclass(frozen=True)
class Figure:
    """One line. speedup: of decode over lean's bf16, of prefill over lean's bf16, of a model over the eager one.

    ``value`` in ``unit``: ``error`` relative to the largest output, ``of copy`` bytes read per second as a share of
    those a copy moves, ``TFLOP/s``, ``tokens/s``.
    """

    part: str
    variant: str
    shape: str
    batch: int
    context: int
    ms: float | None
    value: float
    unit: str
    speedup: float | None = None


@dataclass(frozen=True)
class Plan:
    """How much is run. context: of the correctness; decodes: (context, batch), the most important ones first; prefills:
    (rows, context); model: its layers, hidden size, heads, KV heads, vocabulary, context; seconds: of each part."""

    shapes: tuple[Shape, ...]
    odd_shapes: tuple[Shape, ...]
    context: int
    decodes: tuple[tuple[int, int], ...]
    prefills: tuple[tuple[int, int], ...]
    model: tuple[int, int, int, int, int, int]
    model_batches: tuple[int, ...]
    rounds: int
    seconds: dict[str, float]


FULL = Plan(
    shapes=SHAPES,
    odd_shapes=ODD_SHAPES,
    context=700,
    decodes=((32768, 8), (4096, 1), (131072, 1), (32768, 32), (4096, 32), (131072, 8), (32768, 1), (4096, 8),
             (131072, 32)),
    prefills=((4096, 4096), (2048, 32768)),
    model=(16, 2048, 32, 8, 32000, 2048),
    model_batches=(1, 8, 32),
    rounds=7,
    seconds={"correctness": 100, "decode": 130, "prefill": 40, "model": 80},
)  # fmt: skip
TOY = Plan(
    shapes=(Shape(2, 1, 32),),
    odd_shapes=(Shape(1, 1, 96),),
    context=270,
    decodes=((70, 2),),
    prefills=((4, 40),),
    model=(1, 64, 2, 1, 300, 20),
    model_batches=(1,),
    rounds=1,
    seconds=dict.fromkeys(("correctness", "decode", "prefill", "model"), 300),
)


class Run:
    """One run of the benchmark: ``figures`` as they come, and ``left_out``, what there was no time or memory for."""

    def __init__(self, plan: Plan, device: torch.device, jobs: int, show: Callable[[Figure], None]) -> None:
        self.plan, self.device, self.jobs, self._show = plan, device, jobs, show
        self.figures: list[Figure] = []
        self.left_out: list[str] = []
        self.copy_bytes_per_s = copy_bandwidth(device)

    def _add(self, *values: Any) -> None:
        self.figures.append(Figure(*values))
        self._show(self.figures[-1])

    def _in_time(self, part: str, cases: list[tuple]) -> Iterator[tuple]:
        """Cases while the part has time; the caller's body runs out of memory at most once for each."""
        end = time.perf_counter() + self.plan.seconds[part]
        for case in cases:
            if time.perf_counter() > end:
                self.left_out.append(f"{part} {' '.join(map(str, case))}: out of time")
            else:
                yield case

    def _or_leave_out(self, what: str, call: Callable[[], Any]) -> Any:
        """What ``call`` returns, or None where the GPU's memory does not hold it."""
        try:
            return call()
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            self.left_out.append(f"{what}: out of memory")
            return None

    def correctness(self) -> None:
        """Every variant in processes of their own, which also leaves Triton's cache filled for what follows."""
        plain = [
            (fmt, shape, rule)
            for shape, fmt in itertools.product(self.plan.shapes, FORMATS)
            for rule in ("plain", "residual")[: 1 if fmt == "bf16" else 2]
        ]
        cases = plain + [(fmt, shape, "everything") for shape, fmt in itertools.product(self.plan.odd_shapes, FORMATS)]
        if self.jobs == 1:
            for fmt, shape, rule in self._in_time("correctness", cases):
                self._judge(fmt, shape, rule, worst_error(fmt, shape, rule, self.plan.context, self.device))
            return
        end = time.perf_counter() + self.plan.seconds["correctness"]
        with ProcessPoolExecutor(self.jobs, mp_context=get_context("spawn")) as pool:
            results = {case: pool.submit(worst_error, *case, self.plan.context, self.device) for case in cases}
            for case, result in results.items():
                try:
                    self._judge(*case, result.result(timeout=max(0.0, end - time.perf_counter())))
                except TimeoutError:
                    result.cancel()
                    self.left_out.append(f"correctness {' '.join(map(str, case))}: out of time")

    def _judge(self, fmt: str, shape: Shape, rule: str, error: float) -> None:
        self._add("correctness", f"{fmt} {rule}", str(shape), 3, self.plan.context, None, error, "error")

    def decode(self) -> None:
        cases = [(*step, shape, fmt) for step in self.plan.decodes for shape in self.plan.shapes for fmt in FORMATS]
        for context, batch, shape, fmt in self._in_time("decode", cases):
            measure = partial(decode_times, fmt, shape, batch, context, self.device, self.plan.rounds)
            timings = self._or_leave_out(f"decode {context} {batch} {shape} {fmt}", measure) or {}
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
            timings, flop = self._or_leave_out(f"prefill {rows} {context} {shape} {fmt}", measure) or ({}, 0.0)
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
        from lean.engine import LLM
        from lean.eval.peers import Lean

        layers, hidden, heads, kv_heads, vocabulary, context = self.plan.model
        recordable = "enforce_eager" in {field.name for field in fields(EngineConfig)} and self.device.type != "cpu"
        modes: list[dict[str, Any]] = [{"enforce_eager": True}, {"enforce_eager": False}] if recordable else [{}]
        steps = 4 * self.plan.rounds + 2
        with tempfile.TemporaryDirectory() as folder:
            random_llama(Path(folder), layers, hidden, heads, kv_heads, vocabulary, 2 * context, self.device)
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
                for mode in modes:
                    config = replace(loaded.config, kv_dtype=fmt, max_num_seqs=batch, **mode)
                    engine = Lean(loaded.model, config, batch)
                    engine.read([i % 250 for i in range(context)])
                    engine.step()
                    median = sorted(seconds_of(engine.step) for _ in range(steps))[steps // 2]
                    eager = eager or median
                    name = "graphs" if mode.get("enforce_eager") is False else "eager"
                    self._add(
                        "model", f"{fmt} {name}", shape, batch, context, 1e3 * median, batch / median, "tokens/s",
                        eager / median,
                    )  # fmt: skip
                    del engine


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy between two buffers beyond the caches reads and writes together, at best."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(seconds_of(partial(target.copy_, source)) for _ in range(10))


def random_llama(
    folder: Path,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    length: int,
    device: torch.device,
) -> None:
    """A bf16 checkpoint with random weights and a tokenizer of one token per byte."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=length,
        bos_token_id=0, eos_token_id=0, tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    with torch.device(device):
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)


def missed(figures: list[Figure]) -> list[str]:
    """What falls short of the tolerance and of the targets, one line each."""
    lines = []
    times = {(f.shape, f.batch, f.context, f.variant): f.ms for f in figures if f.part == "decode"}
    for f in figures:
        where = f"{f.part} {f.variant} {f.shape} batch {f.batch} context {f.context}"
        if f.part == "correctness" and not f.value <= TOLERANCE:
            lines.append(f"{where}: error {f.value:.2g}, at most {TOLERANCE:g} is right")
        if f.part != "decode" or f.context < 32768 or f.batch < 8 or f.variant == "torch SDPA":
            continue
        fmt, _, residual = f.variant.partition("+")
        figure = f.value if fmt == "bf16" else f.speedup or 0.0
        if not residual and figure < TARGETS[fmt]:
            lines.append(f"{where}: {figure:.2f} of {'the copy' if fmt == 'bf16' else 'bf16'}, aimed at {TARGETS[fmt]}")
        plain = times.get((f.shape, f.batch, f.context, fmt))
        if residual and plain and f.ms and f.ms > 1.1 * plain:
            lines.append(f"{where}: the residual costs {f.ms / plain - 1:.0%}, aimed at 10%")
    return lines


def line(f: Figure) -> str:
    ms = "" if f.ms is None else f"{f.ms:.3f} ms"
    speedup = "" if f.speedup is None else f"{f.speedup:.2f}x"
    case = f"{f.part:11} {f.variant:18} {f.shape:9} {f.batch:3} {f.context:7,}"
    return f"{case} {ms:>12} {f.value:9.3g} {f.unit:9} {speedup:>7}"


def interpret() -> torch.library.Library:
    """Make the interpreted Triton kernels serve the CPU, in a process that has not imported Triton yet."""
    os.environ["TRITON_INTERPRET"] = "1"
    from lean.kernels.triton import backend

    library = torch.library.Library("lean", "IMPL", "CPU")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Overriding a previously registered kernel")
        for name in ("kv_write", "paged_attention"):
            library.impl(name, getattr(backend, name), allow_override=True)
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
    }
    print(json.dumps(facts, indent=1))
    if options.json:
        Path(options.json).write_text(
            json.dumps(facts | {"figures": [asdict(f) for f in run.figures]}, indent=1) + "\n"
        )
    wrong = [f for f in run.figures if f.part == "correctness" and not f.value <= TOLERANCE]
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
