"""``lean sweep``: many cache configurations of one model, and a report that says which one to take."""

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lean.cli.evaluate import read_corpus
from lean.cli.flags import Json, ModelArgument, choose_model, engine_flags, given_options, option
from lean.cli.terminal import print_json, stderr
from lean.config import EngineConfig
from lean.errors import ConfigError, UserError

if TYPE_CHECKING:
    from lean.eval.sweep.cells import Result

_VARIED = {
    "kv_dtype": "--formats",
    "kv_residual_length": "--residuals",
    "window": "--windows",
    "kv_layers": "--formats",
}


@engine_flags
def sweep(
    context: typer.Context,
    model: ModelArgument = None,
    out: Annotated[
        Path | None, option("Folder of the results; a sweep that was interrupted goes on there.", metavar="DIR")
    ] = None,
    formats: Annotated[str, typer.Option(help="KV formats, as --kv-dtype takes them.")] = "int8,fp8,k8v4,int4",
    windows: Annotated[str, typer.Option(help="Windows; none sees all.")] = "none,1024",
    residuals: Annotated[str, typer.Option(help="How many of the last tokens are read exact.")] = "0,64",
    text: Annotated[Path | None, option("Score this UTF-8 text.", metavar="FILE")] = None,
    corpus: Annotated[str | None, option("Score a known text: python-docs, wikitext2.", "python-docs")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of the text.")] = 2048,
    context_of_report: Annotated[int, typer.Option(help="Sequence length for which memory is told.")] = 4096,
    bos: Annotated[
        str, typer.Option(help="BOS in front of the first sequence of the text, of every, or none.")
    ] = "first",
    needle: Annotated[str | None, option("Hide needles in prompts of so many tokens.", metavar="LENGTHS")] = None,
    tasks: Annotated[str | None, option("Tasks of lm-evaluation-harness, or lean_cloze.", metavar="NAMES")] = None,
    limit: Annotated[int | None, option("Only the first so many items of each task.", "all")] = None,
    json: Json = False,
) -> None:
    """Measure what cache formats, residuals and windows save and cost on a model, and recommend one."""
    options = given_options(context, lambda given: {} if needle or tasks else {"max_num_seqs": 1})
    if context.params["print_config"]:
        print(options.to_yaml(), end="")
        return
    for field, flag in _VARIED.items():
        if getattr(options.engine, field) != getattr(EngineConfig(), field):
            raise UserError(f"{field.replace('_', '-')} is what a sweep varies: use {flag}")
    if out is None:
        raise UserError("--out DIR is missing: where the results go")
    chosen = read_corpus(text, corpus)
    if limit is not None and (tasks is None or limit < 1):
        raise UserError(f"limit {limit}: how many items of each of the --tasks, at least 1")
    from lean.eval.pictures import require_matplotlib

    require_matplotlib("the report of a sweep")
    from lean.eval.score.perplexity import BOS_RULES
    from lean.eval.sweep.grid import Grid
    from lean.eval.sweep.page import write_report
    from lean.eval.sweep.run import run_sweep
    from lean.eval.sweep.table import judge, markdown, sweep_report
    from lean.store.source import resolve

    if bos not in BOS_RULES:
        raise ConfigError(f"bos {bos!r} must be one of {', '.join(BOS_RULES)}")
    grid = Grid(
        formats=_formats(formats),
        windows=tuple(None if item == "none" else _number("windows", item) for item in _items("windows", windows)),
        residuals=tuple(_number("residuals", item) for item in _items("residuals", residuals)),
        max_tokens=max_tokens,
        context=context_of_report,
        bos=bos,  # type: ignore[arg-type]  # checked above
        needle_lengths=tuple(_number("needle", item) for item in _items("needle", needle)) if needle else (),
        tasks=tuple(_items("tasks", tasks)) if tasks else (),
        task_limit=limit,
    )
    if grid.tasks:
        from lean.eval.tasks import check_tasks

        check_tasks(grid.tasks)
    source = resolve(choose_model(options.model), progress=True, trust_remote_code=options.engine.trust_remote_code)
    try:
        with _Shown() as shown:
            found = run_sweep(source, options.engine, grid, chosen, out, shown)
    except KeyboardInterrupt:
        stderr.print(f"stopped; the same command goes on with what {out} holds")
        raise
    judged = judge(found)
    files = write_report(judged, out)
    if json:
        print_json(sweep_report(judged) | {"files": [str(file) for file in files]})
        return
    print(markdown(judged))
    stderr.print(f"report: {out / 'report.html'}")


def _items(name: str, text: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise UserError(f"{name} {text!r}: write values with commas between them")
    return items


def _number(name: str, item: str) -> int:
    if not re.fullmatch(r"\d{1,9}", item):
        raise UserError(f"{name}: {item!r} is no whole number")
    return int(item)


def _formats(text: str) -> tuple[str, ...]:
    """Split at commas, but not inside ``k=NAME,v=NAME``."""
    joined = re.sub(r"\b([kv])\s*=\s*([^,]+),\s*([kv])\s*=", r"\1=\2;\3=", text)
    return tuple(item.replace(";", ",") for item in _items("formats", joined))


class _Shown:
    """Progress on stderr: a bar on a terminal, and a line for every cell that ended."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=stderr, transient=True)
        self._task = self._bar.add_task("", total=None)
        self._started = time.monotonic()
        self._cells = self._ended = 0

    def __enter__(self) -> "_Shown":
        if stderr.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.stop()

    def begin(self, cells: int, done: int, tokens_per_cell: int) -> None:
        if done:
            stderr.print(f"{done} cells are there already")
        self._cells, self._started = cells, time.monotonic()
        self._bar.update(self._task, total=(cells + 1) * tokens_per_cell)

    def say(self, what: str) -> None:
        self._bar.update(self._task, description=what)

    def advance(self, tokens: int) -> None:
        self._bar.update(self._task, advance=tokens)

    def ended(self, result: "Result") -> None:
        from lean.eval.score.perplexity import in_words
        from lean.eval.sweep.cells import Impossible

        self._ended += 1
        if isinstance(result, Impossible):
            found = f"not run: {result.reason}"
        else:
            own = result.fidelity
            ppl = in_words(own.ppl, 3)
            found = f"mean KLD {own.kld_mean:z.6f} ±{own.kld_stderr:.6f}, ppl {ppl}, {result.seconds:.0f} s"
        left = (time.monotonic() - self._started) / self._ended * (self._cells - self._ended)
        more = f"; about {max(1, round(left / 60))} min to go" if self._ended < self._cells else ""
        self._bar.console.print(f"{self._ended}/{self._cells} {result.cell.name}: {found}{more}")
