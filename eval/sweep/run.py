"""Run a grid of cache configurations on one loaded model: memory, accuracy and decoding speed of each."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lean.cache.plan import CachePlan, plan_cache
from lean.config import EngineConfig
from lean.device import choose_device
from lean.engine.assemble import with_chunk
from lean.errors import ConfigError, EngineError, UserError
from lean.eval.corpus import Corpus
from lean.eval.score.fidelity import Reference, compare, full_config, read_reference
from lean.eval.score.perplexity import ScoredText, prepare
from lean.eval.sweep.cells import EXACT, CacheBytes, Cell, Impossible, Measured, Result, SweepFolder, open_folder
from lean.eval.sweep.grid import NEEDLE_DEPTHS, NEEDLE_TRIALS, Grid, describe_sweep
from lean.eval.sweep.speed import STEPS, SpeedMeter
from lean.llm import LLM
from lean.model.info import ModelInfo, inspect_model
from lean.quant import BF16, raw_format
from lean.store.source import ModelSource

if TYPE_CHECKING:
    from lean.eval.score.needle import NeedleCell

_LONGEST_SPEED_CONTEXT = 2048  # reading a longer prompt would dominate the time of a cell
_TASK_CONTEXT = 2048  # the least room for the items of tasks


class Progress(Protocol):
    """Receives the progress of a sweep. Work is counted in tokens."""

    def begin(self, cells: int, done: int, tokens_per_cell: int) -> None: ...
    def say(self, what: str) -> None: ...
    def advance(self, tokens: int) -> None: ...
    def ended(self, result: Result) -> None: ...


@dataclass(frozen=True)
class Sweep:
    """A finished sweep: its options, as in ``config.yaml``, and its results in the order of the grid."""

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
    """Run the cells that the folder ``out`` does not hold yet. The weights are loaded once, and only if a cell is left.

    Args:
        base: engine options for all cells, except format, residual and window.

    Raises:
        UserError: no cell can run with these options, or the folder belongs to something else.
        EngineError: the exact cache fails.
    """
    info = inspect_model(source, base)
    base = with_chunk(base, info, choose_device(base.device))  # one chunk for all cells
    base = replace(base, max_model_len=base.max_model_len or _longest_sequence(info, grid))
    config = describe_sweep(info, base, grid, corpus)
    cells = grid.cells()
    with open_folder(out, config) as folder:
        done = {result.cell for result in folder.results}
        pending = [cell for cell in cells if cell not in done]
        if pending:
            _run(_Setup(base, grid, corpus, info, progress), source, folder, pending)
        found = {result.cell: result for result in folder.results}
    return Sweep(config, [found[cell] for cell in cells])


def _longest_sequence(info: ModelInfo, grid: Grid) -> int:
    """max_model_len of the engines: the longest sequence that the grid needs, limited by the model."""
    from_needle = 0
    if grid.needle_lengths:
        from lean.eval.score.needle import ANSWER_TOKENS

        from_needle = max(grid.needle_lengths) + ANSWER_TOKENS
    wanted = max(
        grid.max_tokens,
        min(grid.context, _LONGEST_SPEED_CONTEXT) + STEPS + 2,
        from_needle,
        _TASK_CONTEXT if grid.tasks else 0,
    )
    return min(wanted, info.max_position_embeddings)


@dataclass(frozen=True)
class _Setup:
    """Shared by all cells of a sweep."""

    base: EngineConfig
    grid: Grid
    corpus: Corpus
    info: ModelInfo
    progress: Progress


def _run(setup: _Setup, source: ModelSource, folder: SweepFolder, pending: Sequence[Cell]) -> None:
    grid, corpus, progress = setup.grid, setup.corpus, setup.progress
    progress.say("loading the model")
    exact = LLM(source, replace(full_config(setup.base), max_num_seqs=1, prefix_cache=True))  # for `SpeedMeter`
    scored = prepare(exact, corpus, max_tokens=grid.max_tokens, bos=grid.bos)
    prompt = _speed_prompt(exact, corpus, grid)
    if grid.needle_lengths:
        _needle_cells(exact, setup)  # raises for impossible lengths; nothing runs before the iterator is used
    rows = sum(len(part.token_ids) - 1 for part in scored.parts)
    needles = NEEDLE_TRIALS * len(NEEDLE_DEPTHS) * sum(grid.needle_lengths)
    progress.begin(len(pending), len(folder.results), rows + len(prompt) + needles)
    progress.say("reading the exact cache")
    reference = read_reference(exact, scored, progress.advance)
    meter = SpeedMeter(exact, prompt)
    for cell in pending:
        result = _measure(cell, setup, reference, meter)
        folder.append(result)
        progress.ended(result)
        gc.collect()  # engines are part of reference cycles, and the next engine needs the memory


def _measure(cell: Cell, setup: _Setup, reference: Reference, meter: SpeedMeter) -> Result:
    """Run one cell. An error of the exact cache without a window ends the sweep."""
    base, grid, progress = setup.base, setup.grid, setup.progress
    started = time.perf_counter()
    if reason := why_impossible(cell, base, setup.info):
        return Impossible(cell, reason)
    try:
        llm = LLM(reference.llm.model, cell.config(base))
        progress.say(cell.name)
        fidelity = compare(reference, llm, progress.advance)
        progress.say(f"{cell.name}: speed")
        speed = meter.measure(llm)
        progress.advance(speed.context)
        needle = _needles(cell, llm, setup) if grid.needle_lengths else None
        tasks = _tasks(cell, llm, setup) if grid.tasks else None
    except ConfigError:  # a valid plan that this machine cannot hold at the moment: not a property of the cell
        raise
    except (UserError, EngineError) as error:
        if cell == Cell(EXACT):
            raise
        return Impossible(cell, str(error))
    return Measured(
        cell,
        fidelity,
        cache_bytes(cell, base, setup.info, grid.context),
        speed,
        window_reached=_window_reached(llm.plan, reference.scored),
        needle=needle,
        tasks=tasks,
        notes=llm.plan.notes,
        seconds=round(time.perf_counter() - started, 2),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def why_impossible(cell: Cell, base: EngineConfig, info: ModelInfo) -> str | None:
    """The reason why a cell cannot run on this model, or equals another cell; None where it can run."""
    try:
        plan = plan_cache(info.layers, cell.config(base), raw_format(info.dtype), info.states)
    except ConfigError as error:
        return str(error)
    if cell.window and not plan.window:
        return "; ".join(plan.notes)
    asked = cell.config(base).kv_dtype
    if asked != "auto" and plan.residual_length != cell.residual and cell.residual:
        return f"no quantized block would be read, so this is the exact cache: {'; '.join(plan.notes)}"
    return None


def cache_bytes(cell: Cell, base: EngineConfig, info: ModelInfo, context: int) -> CacheBytes:
    """Sizes for the model in bf16, also where it runs in another dtype: exact copies take the dtype of the model."""
    plan, full = (
        plan_cache(info.layers, config, BF16, info.states) for config in (cell.config(base), full_config(base))
    )
    return CacheBytes(
        plan.bytes_per_token, plan.bytes_per_token_bf16, plan.bytes_at(context), full.bytes_at_bf16(context), context
    )


def _window_reached(plan: CachePlan, scored: ScoredText) -> bool:
    longest = max(len(part.token_ids) - 1 for part in scored.parts)
    return not plan.window or longest > plan.window + plan.num_sink_tokens


def _speed_prompt(llm: LLM, corpus: Corpus, grid: Grid) -> list[int]:
    """The beginning of the text; a short text is repeated."""
    count = min(grid.context, _LONGEST_SPEED_CONTEXT, llm.size.max_model_len - STEPS - 2)
    if count < 1:
        raise ConfigError(
            f"max-model-len {llm.size.max_model_len} leaves no room to decode {STEPS} tokens: use at least {STEPS + 3}"
        )
    ids = llm.model.tokenizer(corpus.text[: 32 * count], add_special_tokens=False, verbose=False)["input_ids"]
    return (ids * -(-count // len(ids)))[:count]


def _needle_cells(llm: LLM, setup: _Setup) -> Iterator[NeedleCell]:
    from lean.eval.score.needle import run_needle

    lengths = setup.grid.needle_lengths
    return run_needle(llm, setup.corpus.text, lengths, NEEDLE_DEPTHS, trials=NEEDLE_TRIALS)


def _needles(cell: Cell, llm: LLM, setup: _Setup) -> dict[str, Any]:
    from lean.eval.score.needle import needle_report

    setup.progress.say(f"{cell.name}: needles")
    found = []
    for tried in _needle_cells(llm, setup):
        found.append(tried)
        setup.progress.advance(tried.length * tried.trials)
    return needle_report(found)


def _tasks(cell: Cell, llm: LLM, setup: _Setup) -> dict[str, Any]:
    from lean.eval.tasks import run_tasks

    setup.progress.say(f"{cell.name}: tasks")
    return run_tasks(llm, setup.grid.tasks, limit=setup.grid.task_limit)
