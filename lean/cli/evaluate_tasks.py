"""``lean eval needle`` and ``lean eval tasks``: questions that the model answers through its cache."""

from pathlib import Path
from typing import Annotated

import typer

from lean.cli.evaluate import (
    CorpusName,
    TextFile,
    app,
    config_report,
    printed_config,
    progress_bar,
    read_corpus,
    read_numbers,
    read_options,
    start_engine,
)
from lean.cli.flags import Json, ModelArgument, engine_flags, given_options, option
from lean.cli.terminal import print_json
from lean.errors import UserError


@app.command()
@engine_flags
def needle(
    context: typer.Context,
    model: ModelArgument = None,
    text: TextFile = None,
    corpus: CorpusName = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the whole prompt, separated by commas.")] = "512,2048",
    depths: Annotated[str, typer.Option(help="Where the line is hidden, in percent of the text.")] = "0,25,50,75,100",
    trials: Annotated[int, typer.Option(help="Lines asked for per length and depth.")] = 4,
    seed: Annotated[int, typer.Option(help="Other lines, at other places of the text.")] = 0,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Ask through its template.", show_default="where one is"),
    ] = None,
    plot: Annotated[Path | None, option("Draw the map there.", metavar="PNG")] = None,
    json: Json = False,
) -> None:
    """Does the model find a line again that was hidden in a long text? Shows what windows forget and formats blur."""
    options = read_options(context, max(1, trials))
    if printed_config(context, options):
        return
    from lean.eval.score.needle import draw_map, needle_report, print_map, run_needle

    wanted = read_numbers("lengths", lengths), read_numbers("depths", depths)
    source = read_corpus(text, corpus)
    llm = start_engine(options)
    total = len(wanted[0]) * len(wanted[1]) * trials
    with progress_bar("asking", total, "needles") as told:
        cells = list(run_needle(llm, source.text, *wanted, trials=trials, seed=seed, chat=chat, progress=told))
    title = f"{llm.model.info.source.name}, KV {options.engine.kv_dtype}"
    if plot is not None:
        draw_map(cells, str(plot), title)
    if json:
        print_json(needle_report(cells) | {"corpus": source.report(), "config": config_report(llm)})
    else:
        print_map(cells, title)


@app.command()
@engine_flags
def tasks(
    context: typer.Context,
    model: ModelArgument = None,
    names: Annotated[
        str, option("lm-eval tasks, or lean_cloze, which needs no download.", "lean_cloze", "--tasks", metavar="T[,T]")
    ] = "lean_cloze",
    num_fewshot: Annotated[int | None, option("Examples before every item.", "as the task says")] = None,
    limit: Annotated[float | None, option("Only so many items of each task; below 1: that share.", "all")] = None,
    include_path: Annotated[Path | None, option("A folder with more tasks.", metavar="DIR")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the model's chat template.")] = False,
    json: Json = False,
) -> None:
    """Tasks of lm-evaluation-harness, every item read through the cache."""
    options = given_options(context)
    if printed_config(context, options):
        return
    if limit is not None and limit <= 0:
        raise UserError(f"--limit {limit:g} must be positive")
    from lean.eval.tasks import check_tasks, run_tasks

    wanted = [name.strip() for name in names.split(",")]
    check_tasks(wanted, include_path)
    llm = start_engine(options)
    number = int(limit) if limit is not None and limit >= 1 else limit
    report = run_tasks(llm, wanted, num_fewshot, number, include_path, apply_chat_template=chat, progress=not json) | {
        "bytes_per_token": llm.plan.bytes_per_token,
        "config": config_report(llm),
    }
    if json:
        print_json(report)
        return
    for name, task in {**report["tasks"], **report["groups"]}.items():
        items = f" ({task['num_items']} items)" if "num_items" in task else ""
        for metric, found in task["metrics"].items():
            error = "" if found["stderr"] is None else f" ± {found['stderr']:.4f}"
            print(f"{name}{items} {metric}: {found['value']:.4f}{error}")
        cut = task.get("truncated") or {"items": 0}
        if cut["items"]:
            most = cut["max_tokens_dropped"]
            print(f"{name}: {cut['items']} of {cut['of']} items truncated (max {most} tokens dropped)")
