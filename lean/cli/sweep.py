"""``lean sweep``: measure many cache configurations of one model, and recommend one."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lean.cli.engine_flags import engine_flags
from lean.cli.evaluate import Bos, CorpusName, TextFile, read_corpus
from lean.cli.flags import Json, ModelArgument, choose_model, given_options, option, printed_config
from lean.cli.lists import read_items, read_numbers
from lean.cli.terminal import print_json, stderr
from lean.config import EngineConfig
from lean.errors import ConfigError, UserError
from lean.layer_formats import split_formats

if TYPE_CHECKING:
    from lean.eval.sweep.cells import Result
    from lean.eval.sweep.grid import Grid

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
        Path | None,
        option("Folder for the results. The same command continues an interrupted sweep there.", metavar="DIR"),
    ] = None,
    formats: Annotated[
        str, typer.Option(help="KV formats to measure, separated by commas; names as for --kv-dtype.")
    ] = "int8,fp8,k8v4,k6v4,int4",
    windows: Annotated[
        str, typer.Option(help="Windows to measure, in tokens, separated by commas; none is full attention.")
    ] = "none,1024",
    residuals: Annotated[
        str,
        typer.Option(help="Residual lengths to measure, in tokens, separated by commas; see --kv-residual-length."),
    ] = "0,64",
    text: TextFile = None,
    corpus: CorpusName = None,
    max_tokens: Annotated[int, typer.Option(help="Score only the first N tokens of the text.", metavar="N")] = 2048,
    context_of_report: Annotated[
        int, typer.Option(help="Report the memory of the cache for a sequence of N tokens.", metavar="N")
    ] = 4096,
    bos: Bos = "first",
    needle: Annotated[
        str | None,
        option(
            "Also run the test of `lean eval needle`, with prompts of these lengths in tokens, separated by commas.",
            metavar="N[,N]",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        option("Also run these tasks, separated by commas; names as for `lean eval tasks`.", metavar="T[,T]"),
    ] = None,
    limit: Annotated[int | None, option("Use only the first N items of each task.", "all", metavar="N")] = None,
    json: Json = False,
) -> None:
    """Measure memory, accuracy and speed of many cache configurations of one model, and recommend one."""
    options = given_options(
        context, lambda _: {"prefix_cache": False} | ({} if needle or tasks else {"max_num_seqs": 1})
    )
    if printed_config(context, options):
        return
    _refuse_varied(options.engine)
    if out is None:
        raise UserError("--out DIR is missing: name a folder for the results")
    chosen = read_corpus(text, corpus)
    if limit is not None and (tasks is None or limit < 1):
        raise UserError(f"--limit {limit} is the number of items of each of the --tasks, at least 1")
    from lean.eval.pictures import require_matplotlib

    require_matplotlib("the report of a sweep")
    from lean.eval.sweep.page import write_report
    from lean.eval.sweep.run import run_sweep
    from lean.eval.sweep.table import judge, markdown, sweep_report
    from lean.store.source import resolve

    numbers = {"max_tokens": max_tokens, "context": context_of_report, "task_limit": limit}
    grid = _read_grid(formats, windows, residuals, needle, tasks, bos, **numbers)
    if grid.tasks:
        from lean.eval.tasks import check_tasks

        check_tasks(grid.tasks)
    source = resolve(choose_model(options.model), progress=True, trust_remote_code=options.engine.trust_remote_code)
    try:
        with _SweepProgress() as progress:
            found = run_sweep(source, options.engine, grid, chosen, out, progress)
    except KeyboardInterrupt:
        stderr.print(f"stopped: {out} keeps the finished cells, and the same command continues the sweep")
        raise
    judged = judge(found)
    files = write_report(judged, out)
    if json:
        print_json(sweep_report(judged) | {"files": [str(file) for file in files]})
        return
    print(markdown(judged))
    stderr.print(f"report: {out / 'report.html'}")


def _refuse_varied(engine: EngineConfig) -> None:
    for field, flag in _VARIED.items():
        if getattr(engine, field) != getattr(EngineConfig(), field):
            raise UserError(f"--{field.replace('_', '-')} has no effect: a sweep varies it, use {flag}")


def _read_grid(
    formats: str, windows: str, residuals: str, needle: str | None, tasks: str | None, bos: str, **numbers: Any
) -> "Grid":
    """The grid that the flags describe; ``numbers`` are fields of the grid. Raises UserError, naming the flag."""
    from lean.eval.score.perplexity import BOS_RULES
    from lean.eval.sweep.grid import Grid

    if bos not in BOS_RULES:
        raise ConfigError(f"bos {bos!r} must be one of {', '.join(BOS_RULES)}")
    return Grid(
        formats=tuple(split_formats(formats)),
        windows=tuple(
            None if item == "none" else read_numbers("--windows", item)[0] for item in read_items("--windows", windows)
        ),
        residuals=tuple(read_numbers("--residuals", residuals)),
        bos=bos,  # type: ignore[arg-type]  # checked above
        needle_lengths=tuple(read_numbers("--needle", needle)) if needle else (),
        tasks=tuple(read_items("--tasks", tasks)) if tasks else (),
        **numbers,
    )


class _SweepProgress:
    """Progress on stderr: a bar on a terminal, and a line for every finished cell."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=stderr, transient=True)
        self._task = self._bar.add_task("", total=None)
        self._started = time.monotonic()
        self._cells = self._ended = 0

    def __enter__(self) -> "_SweepProgress":
        if stderr.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.stop()

    def begin(self, cells: int, done: int, tokens_per_cell: int) -> None:
        if done:
            stderr.print(f"{done} cells are already measured")
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
        more = f"; about {max(1, round(left / 60))} min left" if self._ended < self._cells else ""
        self._bar.console.print(f"{self._ended}/{self._cells} {result.cell.name}: {found}{more}")
