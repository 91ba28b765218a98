"""``lean eval needle`` and ``lean eval tasks``: questions that the model answers through its cache."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lean.cli.engine_flags import engine_flags
from lean.cli.evaluate import (
    CorpusName,
    TextFile,
    app,
    config_report,
    progress_bar,
    read_corpus,
    read_options,
    start_engine,
)
from lean.cli.flags import Json, ModelArgument, given_options, option, printed_config
from lean.cli.lists import read_items, read_numbers
from lean.cli.signals import own_interrupt
from lean.cli.terminal import print_json
from lean.errors import UserError


@app.command()
@engine_flags
def needle(
    context: typer.Context,
    model: ModelArgument = None,
    text: TextFile = None,
    corpus: CorpusName = None,
    lengths: Annotated[str, typer.Option(help="Prompt lengths to test, in tokens, separated by commas.")] = "512,2048",
    depths: Annotated[
        str, typer.Option(help="Positions of the hidden line to test, in percent of the text, separated by commas.")
    ] = "0,25,50,75,100",
    trials: Annotated[int, typer.Option(help="Number of hidden lines to ask for, for each length and depth.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed that selects the hidden lines and the part of the text.")] = 0,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat", help="Ask through the model's chat template.", show_default="on if the model has one"
        ),
    ] = None,
    plot: Annotated[Path | None, option("Draw the results into this file.", metavar="PNG")] = None,
    json: Json = False,
) -> None:
    """Needle-in-a-haystack test: hide a line in a long text and ask the model for it."""
    options = read_options(context, max(1, trials))
    if printed_config(context, options):
        return
    from lean.eval.score.needle import draw_map, needle_report, print_map, run_needle

    wanted = read_numbers("--lengths", lengths), read_numbers("--depths", depths)
    source = read_corpus(text, corpus)
    llm = start_engine(options)
    total = len(wanted[0]) * len(wanted[1]) * trials
    cells, interrupt = [], None
    try:
        with progress_bar("asking", total, "needles") as progress:
            for cell in run_needle(llm, source.text, *wanted, trials=trials, seed=seed, chat=chat, progress=progress):
                cells.append(cell)
    except KeyboardInterrupt as stopped:
        if not cells:
            raise
        interrupt = stopped
    title = f"{llm.model.info.source.name}, KV {options.engine.kv_dtype}"
    if plot is not None and not interrupt:
        draw_map(cells, str(plot), title)
    if json:
        partial = {"partial": interrupt is not None}
        print_json(partial | needle_report(cells) | {"corpus": source.report(), "config": config_report(llm)})
    else:
        print_map(cells, title if interrupt is None else f"{title} (PARTIAL, interrupted)")
    if interrupt:
        raise interrupt


@app.command()
@engine_flags
def tasks(
    context: typer.Context,
    model: ModelArgument = None,
    names: Annotated[
        str,
        option(
            "Tasks to run, separated by commas: names of lm-evaluation-harness, or lean_cloze (no download).",
            "lean_cloze",
            "--tasks",
            metavar="T[,T]",
        ),
    ] = "lean_cloze",
    num_fewshot: Annotated[
        int | None, option("Number of solved examples before every item.", "set by the task")
    ] = None,
    limit: Annotated[
        float | None,
        option("Use only the first N items of each task. Below 1: this fraction of the items.", "all", metavar="N"),
    ] = None,
    include_path: Annotated[Path | None, option("Folder with additional task files.", metavar="DIR")] = None,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Ask through the model's chat template.")] = False,
    json: Json = False,
) -> None:
    """Run tasks of lm-evaluation-harness. Ctrl-C ends the run with the figures of the items answered so far."""
    options = given_options(context)
    if printed_config(context, options):
        return
    if limit is not None and limit <= 0:
        raise UserError(f"--limit {limit:g} must be positive")
    from lean.eval.tasks import Interrupted, check_tasks, run_tasks

    wanted = read_items("--tasks", names)
    check_tasks(wanted, include_path)
    llm = start_engine(options)
    number = int(limit) if limit is not None and limit >= 1 else limit
    interrupt: KeyboardInterrupt | None = None
    try:
        report = run_tasks(llm, wanted, num_fewshot, number, include_path, apply_chat_template=chat, progress=not json)
    except Interrupted as stopped:
        with own_interrupt():  # scoring thousands of answers may take longer than the watcher waits
            interrupt, report = stopped, stopped.report()
    report |= {"bytes_per_token": llm.plan.bytes_per_token, "config": config_report(llm)}
    if json:
        print_json(report)
    else:
        _print_tasks(report)
    if interrupt:
        raise interrupt


def _print_tasks(report: dict[str, Any]) -> None:
    if report["partial"]:
        print(f"PARTIAL, interrupted after {sum(task['num_items'] for task in report['tasks'].values()):,} items")
    for name, task in {**report["tasks"], **report["groups"]}.items():
        left = f" of {task['num_items'] + task['items_left']}" if task.get("items_left") else ""
        items = f" ({task['num_items']}{left} items)" if "num_items" in task else ""
        for metric, found in task["metrics"].items():
            error = "" if found["stderr"] is None else f" ± {found['stderr']:.4f}"
            value = "not finite" if found["value"] is None else f"{found['value']:.4f}"
            print(f"{name}{items} {metric}: {value}{error}")
        cut = task.get("truncated") or {"items": 0}
        if cut["items"]:
            most = cut["max_tokens_dropped"]
            print(f"{name}: {cut['items']} of {cut['of']} items truncated (max {most} tokens dropped)")
        for kind, words in (("failed", "failed"), ("encoded_apart", "merge at the boundary, encoded apart")):
            other = task.get(kind) or {"items": 0}
            if other["items"]:
                print(f"{name}: {other['items']} of {task['num_items']} items {words}, first {other['first']}")
    if report.get("not_run"):
        print(f"not run: {', '.join(report['not_run'])}")
