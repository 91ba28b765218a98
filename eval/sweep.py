"""A grid of cache configurations through one loaded model: what each holds, loses, and how fast it decodes."""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch

from lean.cache_groups import CachePlan, plan_cache
from lean.config import EngineConfig
from lean.device import choose_device
from lean.engine import LLM
from lean.errors import ConfigError, EngineError, UserError
from lean.eval.cells import EXACT, CacheBytes, Cell, Impossible, Measured, Result, SweepFolder, open_folder
from lean.eval.corpus import Corpus
from lean.eval.decode_speed import STEPS, SpeedMeter
from lean.eval.fidelity import Reference, compare, full_config, read_reference
from lean.eval.perplexity import BosRule, ScoredText, prepare
from lean.hub import ModelSource
from lean.kernels.ops import backend
from lean.model import ModelInfo, inspect_model
from lean.quant import BF16, raw_format

NEEDLE_DEPTHS = (0.0, 50.0, 100.0)
NEEDLE_TRIALS = 3
_LONGEST_SPEED_CONTEXT = 2048  # a longer prompt would take longer to read than all the rest of a cell
_TASK_CONTEXT = 2048  # what tasks are cut to at least


@dataclass(frozen=True)
class Grid:
    """What a sweep runs: every format with every residual and window, and the exact cache with every window.

    Attributes:
        max_tokens: of the text. context: for which the memory is told; it need not be run.
        needle_lengths, tasks: left out where empty. task_limit: items of each task; None: all.
    """

    formats: tuple[str, ...]
    windows: tuple[int | None, ...]
    residuals: tuple[int, ...]
    max_tokens: int = 2048
    context: int = 4096
    bos: BosRule = "first"
    needle_lengths: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ()
    task_limit: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("max-tokens", self.max_tokens), ("context-of-report", self.context)):
            if value < 2:
                raise ConfigError(f"{name} {value} must be at least 2")
        for kv_dtype in self.formats:
            EngineConfig(kv_dtype)
        for window in self.windows:
            EngineConfig(window=window)
        for residual in self.residuals:
            EngineConfig(kv_residual_length=residual)

    def cells(self) -> list[Cell]:
        """The floor first, then the exact cache with each window, then the others."""
        windows = dict.fromkeys((None, *self.windows))
        exact = [Cell(EXACT, window=window) for window in windows]
        grid = [
            Cell(kv_dtype, residual, window)
            for window in dict.fromkeys(self.windows)
            for residual in self.residuals
            for kv_dtype in self.formats
        ]
        return list(dict.fromkeys((*exact, *grid)))


class Progress(Protocol):
    """Is told how a sweep goes on. Work is counted in tokens."""

    def begin(self, cells: int, done: int, tokens_per_cell: int) -> None: ...
    def say(self, what: str) -> None: ...
    def advance(self, tokens: int) -> None: ...
    def ended(self, result: Result) -> None: ...


@dataclass(frozen=True)
class Sweep:
    """A finished sweep: what decided it (``config.yaml``), and its cells in the order of the grid."""

    config: dict[str, Any]
    results: list[Result]

    @property
    def measured(self) -> list[Measured]:
        return [result for result in self.results if isinstance(result, Measured)]

    @property
    def impossible(self) -> list[Impossible]:
        return [result for result in self.results if isinstance(result, Impossible)]


def run_sweep(
    source: ModelSource, base: EngineConfig, grid: Grid, corpus: Corpus, out: Path, progress: Progress
) -> Sweep:
    """Run what the folder ``out`` does not hold yet. Weights are read once, and only if there is something to run.

    Args:
        base: the engine's options for all cells; format, residual and window are the grid's.

    Raises:
        UserError: nothing of the grid can run like this, or the folder belongs to something else.
        EngineError: the exact cache fails.
    """
    info = inspect_model(source, base.dtype, base.trust_remote_code)
    base = replace(base, max_model_len=base.max_model_len or _longest_sequence(info, grid))
    config = describe_sweep(info, base, grid, corpus)
    cells = grid.cells()
    with open_folder(out, config) as folder:
        done = {result.cell for result in folder.results}
        pending = [cell for cell in cells if cell not in done]
        if pending:
            _run(source, base, grid, corpus, info, folder, pending, progress)
        found = {result.cell: result for result in folder.results}
    return Sweep(config, [found[cell] for cell in cells])


def _longest_sequence(info: ModelInfo, grid: Grid) -> int:
    """Tokens that the engines must take, at most what the model can."""
    from_needle = 0
    if grid.needle_lengths:
        from lean.eval.needle import ANSWER_TOKENS

        from_needle = max(grid.needle_lengths) + ANSWER_TOKENS
    wanted = max(
        grid.max_tokens,
        min(grid.context, _LONGEST_SPEED_CONTEXT) + STEPS + 2,
        from_needle,
        _TASK_CONTEXT if grid.tasks else 0,
    )
    return min(wanted, info.max_position_embeddings)


def _run(
    source: ModelSource,
    base: EngineConfig,
    grid: Grid,
    corpus: Corpus,
    info: ModelInfo,
    folder: SweepFolder,
    pending: Sequence[Cell],
    progress: Progress,
) -> None:
    progress.say("loading the model")
    exact = LLM(source, full_config(base))
    scored = prepare(exact, corpus, max_tokens=grid.max_tokens, bos=grid.bos)
    prompt = _speed_prompt(exact, corpus, grid)
    if grid.needle_lengths:
        _needles(exact, corpus, grid)  # says what cannot be, and runs nothing
    rows = sum(len(part.token_ids) - 1 for part in scored.parts)
    needles = NEEDLE_TRIALS * len(NEEDLE_DEPTHS) * sum(grid.needle_lengths)
    progress.begin(len(pending), len(folder.results), rows + len(prompt) + needles)
    progress.say("reading the exact cache")
    reference = read_reference(exact, scored, progress.advance)
    meter = SpeedMeter(exact, prompt)
    for cell in pending:
        result = _measure(cell, base, grid, corpus, info, reference, meter, progress)
        folder.append(result)
        progress.ended(result)
        gc.collect()  # engines hold cycles; the next one needs the memory of this one


def _measure(
    cell: Cell,
    base: EngineConfig,
    grid: Grid,
    corpus: Corpus,
    info: ModelInfo,
    reference: Reference,
    meter: SpeedMeter,
    progress: Progress,
) -> Result:
    """Run one cell. What the exact cache cannot do either is an error of the sweep."""
    started = time.perf_counter()
    if reason := why_impossible(cell, base, info):
        return Impossible(cell, reason)
    try:
        llm = LLM(reference.llm.model, cell.config(base))
        progress.say(cell.name)
        fidelity = compare(reference, llm, progress.advance)
        progress.say(f"{cell.name}: speed")
        speed = meter.measure(llm)
        progress.advance(speed.context)
        needle = tasks = None
        if grid.needle_lengths:
            progress.say(f"{cell.name}: needles")
            needle = _needles(llm, corpus, grid, progress)
        if grid.tasks:
            from lean.eval.tasks import run_tasks

            progress.say(f"{cell.name}: tasks")
            tasks = run_tasks(llm, grid.tasks, limit=grid.task_limit)
    except (UserError, EngineError) as error:
        if cell == Cell(EXACT):
            raise
        return Impossible(cell, str(error))
    return Measured(
        cell,
        fidelity,
        cache_bytes(cell, base, info, grid.context),
        speed,
        window_reached=_window_reached(llm.plan, reference.scored),
        needle=needle,
        tasks=tasks,
        notes=llm.plan.notes,
        seconds=round(time.perf_counter() - started, 2),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def why_impossible(cell: Cell, base: EngineConfig, info: ModelInfo) -> str | None:
    """Why a cell is nothing of its own on this model; None where it can be tried."""
    try:
        plan = plan_cache(info.layers, cell.config(base), raw_format(info.dtype))
    except ConfigError as error:
        return str(error)
    if cell.window and not plan.window:
        return "; ".join(plan.notes)
    asked = cell.config(base).kv_dtype
    if asked != "auto" and plan.residual_length != cell.residual and cell.residual:
        return f"nothing quantized would be read, this is the exact cache: {'; '.join(plan.notes)}"
    return None


def cache_bytes(cell: Cell, base: EngineConfig, info: ModelInfo, context: int) -> CacheBytes:
    """Sizes for the model in bf16, whatever dtype it is run in: exact copies are stored in the model's dtype."""
    plan, full = (plan_cache(info.layers, config, BF16) for config in (cell.config(base), full_config(base)))
    return CacheBytes(
        plan.bytes_per_token, plan.bytes_per_token_bf16, plan.bytes_at(context), full.bytes_at_bf16(context), context
    )


def _window_reached(plan: CachePlan, scored: ScoredText) -> bool:
    longest = max(len(part.token_ids) - 1 for part in scored.parts)
    return not plan.window or longest > plan.window + plan.num_sink_tokens


def _speed_prompt(llm: LLM, corpus: Corpus, grid: Grid) -> list[int]:
    """The beginning of the text, again and again where it is too short."""
    count = min(grid.context, _LONGEST_SPEED_CONTEXT, llm.size.max_model_len - STEPS - 2)
    if count < 1:
        raise ConfigError(f"max-model-len {llm.size.max_model_len} leaves no room to decode {STEPS} tokens")
    ids = llm.model.tokenizer(corpus.text[: 32 * count], add_special_tokens=False, verbose=False)["input_ids"]
    return (ids * -(-count // len(ids)))[:count]


def _needles(llm: LLM, corpus: Corpus, grid: Grid, progress: Progress | None = None) -> dict[str, Any]:
    """The report of a needle test; empty without ``progress``, when it is only seen whether it can be run."""
    from lean.eval.needle import needle_report, run_needle

    cells = run_needle(llm, corpus.text, grid.needle_lengths, NEEDLE_DEPTHS, trials=NEEDLE_TRIALS)
    if progress is None:
        return {}
    found = []
    for cell in cells:
        found.append(cell)
        progress.advance(cell.length * cell.trials)
    return needle_report(found)


# --- what decides the figures ---


def describe_sweep(info: ModelInfo, base: EngineConfig, grid: Grid, corpus: Corpus) -> dict[str, Any]:
    """Plain values that a second run must share to go on with the first."""
    choices = asdict(grid) | {"windows": ["none" if window is None else window for window in grid.windows]}
    varied = ("kv_dtype", "kv_residual_length", "window", "threads")
    engine = {key: value for key, value in asdict(base).items() if key not in varied}
    return {
        "model": {
            "name": info.source.name,
            "architecture": info.architecture,
            "parameters": info.parameters,
            "dtype": str(info.dtype).removeprefix("torch."),
            "weights": _weights_stamp(info.source),
        },
        "corpus": corpus.report(),
        "grid": {key: list(value) if isinstance(value, tuple) else value for key, value in choices.items()},
        "needle": {"depths": list(NEEDLE_DEPTHS), "trials": NEEDLE_TRIALS} if grid.needle_lengths else None,
        "engine": engine,
        "environment": environment(base),
    }


def _weights_stamp(source: ModelSource) -> str:
    """Changes when the files of the weights do; their contents are not read."""
    files = [source.folder / source.gguf_file] if source.gguf_file else sorted(source.folder.glob("*.safetensors"))
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]


def environment(base: EngineConfig) -> dict[str, Any]:
    """Versions, machine and kernels."""
    device = choose_device(base.device)
    try:
        kernels = backend(device)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        version = importlib.metadata.version("lean-inference")
    except importlib.metadata.PackageNotFoundError:  # run from a bare source tree
        version = "source tree"
    return {
        "lean": version,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": importlib.metadata.version("transformers"),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "threads": base.threads or torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "kernels": kernels,
    }


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
