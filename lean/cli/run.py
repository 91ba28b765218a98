"""``lean run``: its options, and which of its three ways to run is meant: one answer, a file of prompts, or a chat."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from lean.cli.flags import Json, ModelArgument, choose_model, engine_flags, given_options, option, start
from lean.cli.terminal import print_json, stderr
from lean.config import DEFAULT_CHAT_MAX_TOKENS, DEFAULT_MAX_TOKENS
from lean.errors import EMPTY_PROMPT, LeanError, UserError

if TYPE_CHECKING:
    from lean.llm import LLM
    from lean.options import Options
    from lean.store.source import ModelSource

_SAMPLING = "the model's generation_config"


@engine_flags
def run(
    context: typer.Context,
    model: ModelArgument = None,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="Text; - reads standard input, and so does nothing where that is no terminal. On a terminal: a chat.",
            show_default=False,
        ),
    ] = None,
    prompt_option: Annotated[str | None, typer.Option("--prompt", "-p", help="PROMPT as an option.")] = None,
    prompts: Annotated[
        Path | None, option("Answer every line of a file: {'prompt': ...} or {'messages': [...]}.", metavar="JSONL")
    ] = None,
    out: Annotated[
        Path | None, option("Where the answers to --prompts go; rows already there are skipped.", metavar="JSONL")
    ] = None,
    max_tokens: Annotated[
        int, option("Most tokens to generate.", f"{DEFAULT_MAX_TOKENS}, in a chat {DEFAULT_CHAT_MAX_TOKENS}")
    ] = DEFAULT_MAX_TOKENS,
    temperature: Annotated[float | None, option("0 is greedy.", f"{_SAMPLING}, else 0")] = None,
    top_p: Annotated[
        float | None, option("Sample among the fewest tokens that have this probability.", _SAMPLING)
    ] = None,
    top_k: Annotated[int | None, option("Sample among the likeliest so many.", _SAMPLING)] = None,
    min_p: Annotated[
        float | None, option("Drop tokens less than so many times as likely as the likeliest.", _SAMPLING)
    ] = None,
    repetition_penalty: Annotated[
        float | None, option("Above 1: make tokens of prompt and answer less likely.", f"{_SAMPLING}, else 1")
    ] = None,
    presence_penalty: Annotated[float, typer.Option(help="Taken off the logits of tokens in the answer.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, once for each time they are there.")] = 0.0,
    seed: Annotated[int | None, option("Make sampling repeatable.", "drawn")] = None,
    n: Annotated[int, typer.Option("--n", help="Answers to the prompt.")] = 1,
    stop: Annotated[list[str] | None, option("Text that ends the answer; may be given again.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after end-of-sequence tokens.")] = False,
    logprobs: Annotated[int | None, option("With --json: log-probabilities, and those of so many others.")] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template.", show_default="where there is one")
    ] = None,
    no_probe: Annotated[
        bool, typer.Option("--no-probe", help="Do not try, once per model and format, whether the format suits it.")
    ] = False,
    json: Json = False,
) -> None:
    """Answer a prompt as it is generated, a file of prompts together, or chat."""
    if prompt is not None and prompt_option is not None:
        raise UserError("two prompts: give PROMPT or -p, not both")
    text = prompt if prompt is not None else prompt_option
    if text == "":
        raise UserError(EMPTY_PROMPT)
    if (prompts is None) != (out is None):
        raise UserError("--prompts and --out go together: where the prompts are, and where the answers go")
    if prompts is not None and (text is not None or json):
        raise UserError(f"--prompts {prompts} holds the prompts: leave out PROMPT and --json")
    talking = prompts is None and text is None and not json and sys.stdin.isatty() and sys.stdout.isatty()
    options = _options(context, talking, prompts is not None)
    if context.params["print_config"]:
        print(options.to_yaml(), end="")
        return
    name = choose_model(options.model)

    from lean.store.source import resolve

    if prompts is not None and out is not None:
        from lean.cli.batch_results import read_done
        from lean.cli.batch_rows import read_rows

        rows = read_rows(prompts, options.sampling)
        if {row.id for row in rows} <= read_done(out, prompts):
            stderr.print(f"nothing to do: every row of {prompts} is in {out}")
            return
        source = resolve(name, progress=True, trust_remote_code=options.engine.trust_remote_code)
        _answer_file(_load(name, source, options, no_probe), rows, out, options, chat)
        return
    source = resolve(name, progress=True, trust_remote_code=options.engine.trust_remote_code)
    if talking:
        from lean.cli.chat import talk

        if chat is False:
            raise UserError("--no-chat completes a text: give a PROMPT")
        talk(_load(name, source, options, no_probe), options.sampling, stderr)
        return
    text = _read_prompt(text)
    if not text:
        raise UserError(EMPTY_PROMPT)
    _answer(_load(name, source, options, no_probe), text, chat, options, json)


def _options(context: typer.Context, talking: bool, batch: bool) -> "Options":
    """The options given, over what this way to run takes by default."""

    def usual(given: dict[str, Any]) -> dict[str, Any]:
        length: dict[str, Any] = {"max_tokens": DEFAULT_CHAT_MAX_TOKENS} if talking else {}
        return length if batch else {**length, "max_num_seqs": max(1, given.get("n", 1))}

    options = given_options(context, usual)
    if options.sampling.n > options.engine.max_num_seqs:
        raise UserError(f"n {options.sampling.n} exceeds max-num-seqs {options.engine.max_num_seqs}: raise that")
    return options


def _load(name: str, source: "ModelSource", options: "Options", no_probe: bool) -> "LLM":
    from lean.probe import probe

    llm = start(name, source, options)
    if not no_probe:
        with stderr.status(Text(f"trying {options.engine.kv_dtype} on this model")):
            verdict = probe(llm)
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
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _answer(llm: "LLM", text: str, chat: bool | None, options: "Options", json: bool) -> None:
    """Print one answer as it comes, or several one after the other, or all of it as JSON."""
    from lean.report import answer_report, closing_line, out_of_sight

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


def _answer_file(llm: "LLM", rows: list[Any], out: Path, options: "Options", chat: bool | None) -> None:
    from lean.cli.batch import run_batch

    summary = run_batch(llm, rows, out, options.sampling, chat, stderr)
    speed = f", {summary.tokens / summary.seconds:.1f} tokens/s" if summary.tokens else ""
    stderr.print(
        f"{summary.done} rows answered into {out}, {summary.skipped} were there already, {summary.failed} failed; "
        f"{summary.tokens:,} tokens in {summary.seconds:.1f} s{speed}; {llm.num_preemptions} preemptions"
    )
    if summary.failed:
        raise UserError(f"{summary.failed} rows could not be answered; their lines in {out} say why")
