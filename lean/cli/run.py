"""``lean run``: one prompt, a file of prompts, or a chat."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from lean.cli.engine_flags import engine_flags, sampling_flags
from lean.cli.flags import Json, ModelArgument, choose_model, given_options, option, printed_config, start
from lean.cli.terminal import print_json, stderr
from lean.config import DEFAULT_CHAT_MAX_TOKENS
from lean.errors import EMPTY_PROMPT, LeanError, UserError

if TYPE_CHECKING:
    from lean.llm import LLM
    from lean.options import Options
    from lean.store.source import ModelSource


@engine_flags
@sampling_flags
def run(
    context: typer.Context,
    model: ModelArgument = None,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="Text to answer; - reads it from standard input. Without PROMPT: a chat on a terminal, else standard "
            "input.",
            show_default=False,
        ),
    ] = None,
    prompt_option: Annotated[
        str | None, option("The prompt as an option, in place of PROMPT.", "", "--prompt", "-p", metavar="PROMPT")
    ] = None,
    prompts: Annotated[
        Path | None,
        option(
            'Answer a file of prompts, one JSON object per line: {"prompt": ...} or {"messages": [...]}. Needs --out.',
            metavar="JSONL",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        option("Write the answers to --prompts into this file. Rows that it already has are skipped.", metavar="JSONL"),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Put the prompt into the model's chat template.",
            show_default="on if the model has one",
        ),
    ] = None,
    no_probe: Annotated[
        bool, typer.Option("--no-probe", help="Skip the one-time check that the KV format suits the model.")
    ] = False,
    json: Json = False,
) -> None:
    """Answer a prompt, answer a file of prompts, or chat."""
    text = _given_prompt(prompt, prompt_option)
    if (prompts is None) != (out is None):
        raise UserError("--prompts and --out go together: one names the file of prompts, the other that of answers")
    if prompts is not None and (text is not None or json):
        raise UserError(f"--prompts {prompts} holds the prompts: leave out PROMPT and --json")
    talking = prompts is None and text is None and not json and sys.stdin.isatty() and sys.stdout.isatty()
    options = _options(context, talking, prompts is not None)
    if printed_config(context, options):
        return
    name = choose_model(options.model)
    if prompts is not None and out is not None:
        _answer_file(name, prompts, out, options, chat, no_probe)
        return
    source = _resolve(name, options)
    if talking:
        from lean.cli.chat import talk

        if chat is False:
            raise UserError("--no-chat completes a text: give a PROMPT")
        talk(load(name, source, options, no_probe, chat), options.sampling, stderr)
        return
    text = _read_prompt(text)
    if not text:
        raise UserError(EMPTY_PROMPT)
    _answer(load(name, source, options, no_probe, chat), text, chat, options, json)


def _given_prompt(prompt: str | None, prompt_option: str | None) -> str | None:
    """PROMPT or -p, not both. None: neither is given."""
    if prompt is not None and prompt_option is not None:
        raise UserError("two prompts: give PROMPT or -p, not both")
    text = prompt if prompt is not None else prompt_option
    if text == "":
        raise UserError(EMPTY_PROMPT)
    return text


def _options(context: typer.Context, talking: bool, batch: bool) -> "Options":
    """The options of a run, with the defaults of one prompt, a file of prompts (``batch``) or a chat (``talking``)."""

    def usual(given: dict[str, Any]) -> dict[str, Any]:
        length: dict[str, Any] = {"max_tokens": DEFAULT_CHAT_MAX_TOKENS} if talking else {}
        once = {} if talking else {"prefix_tail_memory": 0}  # no later prompt would use it
        return length if batch else {**length, **once, "max_num_seqs": max(1, given.get("n", 1))}

    options = given_options(context, usual)
    if options.sampling.n > options.engine.max_num_seqs:
        raise UserError(
            f"--n {options.sampling.n} exceeds --max-num-seqs {options.engine.max_num_seqs}: raise --max-num-seqs"
        )
    return options


def _resolve(name: str, options: "Options") -> "ModelSource":
    from lean.store.source import resolve

    return resolve(name, progress=True, trust_remote_code=options.engine.trust_remote_code)


def load(name: str, source: "ModelSource", options: "Options", no_probe: bool, chat: bool | None = None) -> "LLM":
    """The engine. Warns if the check of the KV format finds that it does not suit the model."""
    from lean.text.template import prepare

    if chat is not False:
        prepare()
    from lean.probe import NotProbed, probe

    llm = start(name, source, options)
    if not no_probe:
        try:
            with stderr.status(Text(f"checking whether {options.engine.kv_dtype} suits this model")):
                verdict = probe(llm)
        except NotProbed as short:
            stderr.print(f"note: {short}")
            return llm
        if verdict is not None and verdict.warning:
            stderr.print(f"warning: {verdict.warning}")
    return llm


def _read_prompt(given: str | None) -> str:
    """The prompt from the command line, or from standard input."""
    if given is not None and given != "-":
        if any("\ud800" <= c <= "\udfff" for c in given):  # what argv could not decode
            raise UserError("the prompt is not UTF-8 text")
        return given
    if given is None and sys.stdin.isatty():
        try:
            return stderr.input("prompt: ")
        except EOFError:
            return ""
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").removesuffix("\n")  # a byte-order mark is not text
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:  # opened for writing alone, or its other end failed
        raise UserError(f"cannot read standard input: {error.strerror or error}") from None


def _answer(llm: "LLM", text: str, chat: bool | None, options: "Options", json: bool) -> None:
    """Print one answer while it is generated, several answers one after the other, or all as JSON."""
    from lean.report import answer_report, closing_line, keep_notes, out_of_sight

    keep_notes(llm)
    several = options.sampling.n > 1
    ids = llm.encode(text, chat=chat)
    if hidden := out_of_sight(llm, len(ids)):
        stderr.print(f"note: the prompt is longer than the window: {hidden}")
    started = time.perf_counter()
    outputs, times = [], []
    try:
        for output in llm.stream(ids, options.sampling):
            outputs.append(output)
            times.append(time.perf_counter() - started)
            if not json and not several:
                print(output.text, end="", flush=True)
    finally:
        if outputs and not json and not several:
            print(flush=True)
    report = answer_report(llm, outputs, times)
    if error := next((output.error for output in outputs if output.error), None):
        raise LeanError(error)
    if json:
        print_json(report)
        return
    for choice in report.get("choices", ()):
        print(f"--- {choice['index'] + 1} of {options.sampling.n} ---\n{choice['text']}", flush=True)
    stderr.print(closing_line(report))
    if llm.engine.pace is not None and llm.engine.pace.note:
        stderr.print(f"note: {llm.engine.pace.note}")


def _answer_file(name: str, prompts: Path, out: Path, options: "Options", chat: bool | None, no_probe: bool) -> None:
    """Answer the rows of ``prompts`` that are not in ``out`` yet. The files are checked before the model is loaded."""
    from lean.cli.batch import run_batch
    from lean.cli.batch_results import read_done
    from lean.cli.batch_rows import read_rows

    rows = read_rows(prompts, options.sampling)
    if {row.id for row in rows} <= read_done(out, prompts):
        stderr.print(f"nothing to do: every row of {prompts} is already in {out}")
        return
    llm = load(name, _resolve(name, options), options, no_probe, chat)
    summary = run_batch(llm, rows, out, options.sampling, chat, stderr)
    speed = f", {summary.tokens / summary.seconds:.1f} tokens/s" if summary.tokens else ""
    counts = llm.stats().prefix
    found = f"; {counts.tokens_found:,} prompt tokens from the prefix cache" if counts and counts.tokens_found else ""
    stderr.print(
        f"{summary.done} rows answered into {out}, {summary.skipped} were already there, {summary.failed} failed; "
        f"{summary.tokens:,} tokens in {summary.seconds:.1f} s{speed}; {llm.num_preemptions} preemptions{found}"
    )
    if summary.failed:
        raise UserError(f'{summary.failed} rows could not be answered: see "error" in their lines in {out}')
