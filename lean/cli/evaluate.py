"""``lean eval``: what its commands share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lean.cli.flags import choose_model, given_options, option, start
from lean.cli.terminal import stderr
from lean.errors import UserError

if TYPE_CHECKING:
    from lean.eval.corpus import Corpus
    from lean.llm import LLM
    from lean.options import Options

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure what a cache costs in accuracy, computed through that cache.",
)

TextFile = Annotated[Path | None, option("A UTF-8 text file of yours.", metavar="FILE")]
CorpusName = Annotated[
    str | None, option("python-docs (Python's help topics, always there) or wikitext2.", "python-docs", metavar="NAME")
]
Bos = Annotated[str, typer.Option(help="Where a BOS goes: first (before the text), every (sequence), none.")]


def read_corpus(text: Path | None, corpus: str | None) -> "Corpus":
    """The text that --text or --corpus names."""
    from lean.eval.corpus import load_corpus, load_text

    if text is not None and corpus is not None:
        raise UserError("two texts: give --text or --corpus, not both")
    return load_text(text) if text is not None else load_corpus(corpus or "python-docs")


def read_options(context: typer.Context, sequences: int = 1) -> "Options":
    """Options of an evaluation that runs so many sequences at a time where nothing else is said."""
    return given_options(context, lambda _: {"max_num_seqs": sequences})


def start_engine(options: "Options") -> "LLM":
    from lean.store.source import resolve

    name = choose_model(options.model)
    return start(name, resolve(name, trust_remote_code=options.engine.trust_remote_code), options)


def printed_config(context: typer.Context, options: "Options") -> bool:
    """Whether only the options were asked for."""
    if context.params["print_config"]:
        print(options.to_yaml(), end="")
    return bool(context.params["print_config"])


def config_report(llm: "LLM") -> dict[str, Any]:
    """What a result holds for: the options as they were, and what they became."""
    import torch
    import transformers

    return {
        **asdict(llm.config),
        "model": llm.model.info.source.name,
        "model_dtype": str(llm.model.info.dtype).removeprefix("torch."),
        "device": str(llm.model.device),
        "kernels": llm.kernel_name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@contextmanager
def progress_bar(what: str, total: int, of: str = "tokens") -> Iterator[Any]:
    """A bar on stderr with the remaining time; yields the function that is told how many more are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn(f"{{task.completed:,}}/{{task.total:,}} {of}"))
    with Progress(*columns, TimeRemainingColumn(), console=stderr, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def read_numbers(name: str, text: str, at_least: int = 0) -> list[int]:
    """``512,2048`` to numbers. Raises UserError."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"cannot read --{name} {text!r}: write whole numbers, e.g. 512,2048") from None
    if min(numbers) < at_least:
        raise UserError(f"--{name} {min(numbers)} must be at least {at_least}")
    return numbers
