"""Plans of ``lean.eval.bench_gpu`` and ``lean doctor --gpu-report``: their cases, figures and targets."""

from dataclasses import dataclass

from lean.eval.bench.shape import Shape

FORMATS = ("bf16", "int8", "fp8", "int4", "k8v4")
# Llama-3-8B, Qwen2.5-7B, Gemma-2-9B, SmolLM2-135M.
SHAPES = (Shape(32, 8, 128), Shape(28, 4, 128), Shape(16, 8, 256), Shape(9, 3, 64))
# The last one: latent vectors, as of GLM-4.7-Flash.
ODD_SHAPES = (Shape(5, 1, 96), Shape(6, 2, 192), Shape(16, 2, 64), Shape(20, 1, 576, 512))
TOLERANCE = 6e-3  # error of bf16 outputs, relative to the largest: outputs and query are both rounded to 2^-9
# Targets from batch 8 and 32k tokens on: decode speed of a format over bf16; for bf16 its share of the copy bandwidth.
TARGETS = {"bf16": 0.8, "int8": 1.75, "fp8": 1.75, "k8v4": 2.1, "int4": 2.6}


@dataclass(frozen=True)
class Figure:
    """One line of the output.

    ``value`` in ``unit``: ``error`` relative to the largest output; ``of copy``, bytes read per second as a share of
    the copy bandwidth; ``GB/s``; ``TFLOP/s``; ``tokens/s``. speedup: over lean's bf16; of a model: over eager
    execution.
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
    """The cases of a run, the most important first.

    Every kernel that a later part runs is compiled in the correctness part, by several processes.

    rules: of quantized formats, ``plain`` or ``residual``. context: tokens in the correctness part. decodes: (context,
    batch). prefills: (rows, context). model: layers, hidden size, heads, KV heads, vocabulary, context; None: no model.
    rounds: of timing. seconds: most time for each part, in their order. total_seconds: most time for all.
    """

    shapes: tuple[Shape, ...]
    odd_shapes: tuple[Shape, ...]
    rules: tuple[str, ...]
    context: int
    decodes: tuple[tuple[int, int], ...]
    prefills: tuple[tuple[int, int], ...]
    model: tuple[int, int, int, int, int, int] | None
    model_batches: tuple[int, ...]
    rounds: int
    seconds: dict[str, float]
    total_seconds: float

    def checks(self) -> list[tuple[str, Shape, str]]:
        """(format, shape, rule) of each variant whose results are checked."""
        cases = [
            (fmt, shape, rule)
            for shape in self.shapes
            for fmt in FORMATS
            for rule in (("plain",) if fmt == "bf16" else self.rules)
        ]
        if self.model is not None:
            _, hidden, heads, kv_heads, _, _ = self.model
            shape = Shape(heads, kv_heads, hidden // heads)
            cases += [("bf16", shape, "plain"), ("int8", shape, "residual")]
        cases += [(fmt, shape, "everything") for shape in self.odd_shapes for fmt in FORMATS]
        return list(dict.fromkeys(cases))


FULL = Plan(
    shapes=SHAPES,
    odd_shapes=ODD_SHAPES,
    rules=("plain", "residual"),
    context=700,
    decodes=((32768, 8), (4096, 1), (131072, 1), (32768, 32), (4096, 32), (131072, 8), (32768, 1), (4096, 8),
             (131072, 32)),
    prefills=((4096, 4096), (2048, 32768)),
    model=(16, 2048, 32, 8, 32000, 2048),
    model_batches=(1, 8, 32),
    rounds=7,
    seconds={"correctness": 100, "bandwidth": 10, "decode": 130, "prefill": 40, "model": 80},
    total_seconds=360,
)  # fmt: skip
# What a user can wait for. With what Python and torch take to load, and a last case that is not cut off, it ends within
# three minutes.
REPORT = Plan(
    shapes=(Shape(32, 8, 128), Shape(9, 3, 64)),
    odd_shapes=(),
    rules=("residual",),
    context=700,
    decodes=((8192, 8), (8192, 1)),
    prefills=((2048, 2048),),
    model=None,
    model_batches=(),
    rounds=5,
    seconds={"correctness": 90, "bandwidth": 10, "decode": 40, "prefill": 20},
    total_seconds=140,
)
TOY = Plan(
    shapes=(Shape(2, 1, 32),),
    odd_shapes=(Shape(1, 1, 96),),
    rules=("plain", "residual"),
    context=270,
    decodes=((64, 2),),
    prefills=((4, 40),),
    model=(1, 64, 2, 1, 300, 20),
    model_batches=(1,),
    rounds=1,
    seconds=dict.fromkeys(FULL.seconds, 3600),  # interpreted kernels on a busy machine
    total_seconds=3600,
)


def missed(figures: list[Figure]) -> list[str]:
    """The figures that miss the tolerance or a target, one line each."""
    lines = []
    times = {(f.shape, f.batch, f.context, f.variant): f.ms for f in figures if f.part == "decode"}
    for f in figures:
        where = f"{f.part} {f.variant} {f.shape} batch {f.batch} context {f.context}"
        if f.part == "correctness" and not f.value <= TOLERANCE:
            lines.append(f"{where}: error {f.value:.2g}, tolerance {TOLERANCE:g}")
        if f.part != "decode" or f.context < 32768 or f.batch < 8 or f.variant == "torch SDPA":
            continue
        fmt, _, residual = f.variant.partition("+")
        if fmt == "bf16" and f.unit != "of copy":
            continue
        figure = f.value if fmt == "bf16" else f.speedup or 0.0
        if not residual and figure < TARGETS[fmt]:
            unit = "of the copy bandwidth" if fmt == "bf16" else "times bf16"
            lines.append(f"{where}: {figure:.2f} {unit}, target {TARGETS[fmt]}")
        plain = times.get((f.shape, f.batch, f.context, fmt))
        if residual and plain and f.ms and f.ms > 1.1 * plain:
            lines.append(f"{where}: the residual adds {f.ms / plain - 1:.0%} time, target at most 10%")
    return lines


def line(f: Figure) -> str:
    """A figure as it is printed."""
    ms = "" if f.ms is None else f"{f.ms:.3f} ms"
    speedup = "" if f.speedup is None else f"{f.speedup:.2f}x"
    case = f"{f.part:11} {f.variant:18} {f.shape:9} {f.batch:3} {f.context:7,}"
    return f"{case} {ms:>12} {f.value:9.3g} {f.unit:9} {speedup:>7}"
