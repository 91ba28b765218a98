"""``lean eval``: the parts that its commands share."""

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
    help="Measure how much accuracy a KV cache configuration costs. Every token is computed through that cache.",
)

TextFile = Annotated[Path | None, option("Measure on this UTF-8 text file.", metavar="FILE")]
CorpusName = Annotated[
    str | None,
    option(
        "Measure on a known text: python-docs (Python's help topics, no download) or wikitext2.",
        "python-docs",
        metavar="NAME",
    ),
]
Bos = Annotated[
    str,
    typer.Option(
        help="Where a beginning-of-sequence token goes: first (start of the text), every (start of every "
        "sequence) or none."
    ),
]


def read_corpus(text: Path | None, corpus: str | None) -> "Corpus":
    """The text that --text or --corpus names."""
    from lean.eval.corpus import load_corpus, load_text

    if text is not None and corpus is not None:
        raise UserError("two texts: give --text or --corpus, not both")
    return load_text(text) if text is not None else load_corpus(corpus or "python-docs")


def read_options(context: typer.Context, sequences: int = 1, prefix_cache: bool = True) -> "Options":
    """The options of an evaluation. ``sequences``, ``prefix_cache``: the defaults of max_num_seqs and prefix_cache."""
    return given_options(context, lambda _: {"max_num_seqs": sequences, "prefix_cache": prefix_cache})


def start_engine(options: "Options") -> "LLM":
    """Load the model that the options name."""
    from lean.store.source import resolve

    name = choose_model(options.model)
    return start(name, resolve(name, trust_remote_code=options.engine.trust_remote_code), options)


def config_report(llm: "LLM") -> dict[str, Any]:
    """The options, device and versions that a result was measured with."""
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
    """A bar on stderr with the remaining time. Yields a function; call it with the number of newly finished items."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn(f"{{task.completed:,}}/{{task.total:,}} {of}"))
    with Progress(*columns, TimeRemainingColumn(), console=stderr, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
