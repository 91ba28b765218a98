"""``lean run``: its options, and which of its three ways to run is meant: one answer, a file of prompts, or a chat."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from lean.config import DEFAULT_CHAT_MAX_TOKENS, DEFAULT_MAX_TOKENS, DEFAULT_MODEL, KV_DTYPE_HELP, EngineConfig
from lean.errors import EMPTY_PROMPT, LeanError, UserError
from lean.terminal import print_json, stderr

if TYPE_CHECKING:
    from lean.engine import LLM
    from lean.hub import ModelSource
    from lean.options import Options

_DEFAULT = EngineConfig()

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help=f"Folder, .gguf file, pulled name or hub id; LEAN_MODEL, else {DEFAULT_MODEL}.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")]


def _option(help: str, default: str = "", **more: Any) -> Any:
    """An option whose default is said in words."""
    return typer.Option(help=help, show_default=default or False, **more)


_SAMPLING = "the model's generation_config"


def choose_model(model: str | None) -> str:
    """MODEL, else LEAN_MODEL, else the demo model; says which one it took."""
    if model:
        return model
    chosen = os.environ.get("LEAN_MODEL")
    stderr.print(f"model: {chosen or DEFAULT_MODEL} ({'LEAN_MODEL' if chosen else 'the default'})")
    return chosen or DEFAULT_MODEL


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
        Path | None, _option("Answer every line of a file: {'prompt': ...} or {'messages': [...]}.", metavar="JSONL")
    ] = None,
    out: Annotated[
        Path | None, _option("Where the answers to --prompts go; rows already there are skipped.", metavar="JSONL")
    ] = None,
    config: Annotated[Path | None, _option("Options from a file; flags win.", metavar="YAML")] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the options in force as YAML, and run nothing.")
    ] = False,
    kv_dtype: Annotated[str, typer.Option(help=KV_DTYPE_HELP)] = _DEFAULT.kv_dtype,
    kv_layers: Annotated[
        str | None, _option("Formats of single layers, e.g. '0-1:bf16,2-15:k8v4,16-:int4'; the others: --kv-dtype.")
    ] = None,
    kv_skip_layers: Annotated[
        str | None, _option("Layers that stay unquantized, e.g. 0,1,-1.", metavar="LAYERS")
    ] = None,
    window: Annotated[
        int | None, _option("See only the last so many tokens and the sinks: constant memory, any length.", "none")
    ] = None,
    kv_residual_length: Annotated[
        int | None, _option("Read the last so many tokens exact.", "64 for quantized formats, else 0")
    ] = None,
    sinks: Annotated[
        int | None,
        _option("The first so many tokens stay visible for ever under a window, and exact with a residual.", "4"),
    ] = None,
    max_tokens: Annotated[
        int, _option("Most tokens to generate.", f"{DEFAULT_MAX_TOKENS}, in a chat {DEFAULT_CHAT_MAX_TOKENS}")
    ] = DEFAULT_MAX_TOKENS,
    temperature: Annotated[float | None, _option("0 is greedy.", f"{_SAMPLING}, else 0")] = None,
    top_p: Annotated[
        float | None, _option("Sample among the fewest tokens that have this probability.", _SAMPLING)
    ] = None,
    top_k: Annotated[int | None, _option("Sample among the likeliest so many.", _SAMPLING)] = None,
    min_p: Annotated[
        float | None, _option("Drop tokens less than so many times as likely as the likeliest.", _SAMPLING)
    ] = None,
    repetition_penalty: Annotated[
        float | None, _option("Above 1: make tokens of prompt and answer less likely.", f"{_SAMPLING}, else 1")
    ] = None,
    presence_penalty: Annotated[float, typer.Option(help="Taken off the logits of tokens in the answer.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, once for each time they are there.")] = 0.0,
    seed: Annotated[int | None, _option("Make sampling repeatable.", "drawn")] = None,
    n: Annotated[int, typer.Option("--n", help="Answers to the prompt.")] = 1,
    stop: Annotated[list[str] | None, _option("Text that ends the answer; may be given again.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after end-of-sequence tokens.")] = False,
    logprobs: Annotated[int | None, _option("With --json: log-probabilities, and those of so many others.")] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template.", show_default="where there is one")
    ] = None,
    max_model_len: Annotated[
        int | None, _option("Longest prompt and answer together, in tokens.", "the model's, or what fits")
    ] = None,
    kv_memory: Annotated[
        str | None,
        _option(
            "Memory of the KV cache, e.g. 512MiB.",
            "90% of free GPU memory; on a CPU what the sequences can need, at most 1/4 of what is free",
            metavar="SIZE",
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per cache block.")] = _DEFAULT.block_size,
    num_blocks: Annotated[int | None, _option("Cache blocks, instead of --kv-memory.", "from the memory")] = None,
    prefill_chunk: Annotated[
        int, typer.Option(help="Most prompt tokens of a sequence in a step.")
    ] = _DEFAULT.prefill_chunk,
    max_num_seqs: Annotated[
        int, _option("Sequences that run at once.", f"n, with --prompts {_DEFAULT.max_num_seqs}")
    ] = _DEFAULT.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int | None, _option("Most tokens of all sequences in a step.", "512, or --prefill-chunk")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto, bfloat16, float16, float32 or float64: weights and activations.")
    ] = _DEFAULT.dtype,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = _DEFAULT.device,
    threads: Annotated[int | None, _option("CPU threads.", "torch's choice")] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits whatever the chunk or batch; slower.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
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
    options = _options(context, config, talking, prompts is not None)
    if print_config:
        print(options.to_yaml(), end="")
        return
    name = choose_model(options.model)

    from lean.hub import resolve

    if prompts is not None and out is not None:
        from lean.batch import read_done, read_rows

        rows = read_rows(prompts, options.sampling)
        if {row.id for row in rows} <= read_done(out, prompts):
            stderr.print(f"nothing to do: every row of {prompts} is in {out}")
            return
        llm = _load(name, resolve(name, progress=True, trust_remote_code=options.engine.trust_remote_code), options)
        _answer_file(llm, rows, out, options, chat)
        return
    source = resolve(name, progress=True, trust_remote_code=options.engine.trust_remote_code)
    if talking:
        from lean.chat import talk

        if chat is False:
            raise UserError("--no-chat completes a text: give a PROMPT")
        talk(_load(name, source, options), options.sampling, stderr)
        return
    text = _read_prompt(text)
    if not text:
        raise UserError(EMPTY_PROMPT)
    _answer(_load(name, source, options), text, chat, options, json)


def _options(context: typer.Context, config: Path | None, talking: bool, batch: bool) -> "Options":
    """Flags over the file over what this way to run takes by default."""
    from lean.options import ENGINE_KEYS, SAMPLING_KEYS, Options, read_yaml

    given: dict[str, Any] = {
        name: value
        for name, value in context.params.items()
        if name in ("model", *ENGINE_KEYS, *SAMPLING_KEYS)
        and value is not None
        and (source := context.get_parameter_source(name)) is not None
        and source.name != "DEFAULT"
    }
    file: dict[str, Any] = {} if config is None else read_yaml(config)
    for one, other in (("kv_memory", "num_blocks"), ("num_blocks", "kv_memory")):
        if one in given:
            file.pop(other, None)
    usual: dict[str, Any] = {"max_tokens": DEFAULT_CHAT_MAX_TOKENS} if talking else {}
    if not batch:
        usual["max_num_seqs"] = max(1, given.get("n", file.get("n", 1)))
    options = Options.merge(usual, file, given)
    if options.sampling.n > options.engine.max_num_seqs:
        raise UserError(f"n {options.sampling.n} exceeds max-num-seqs {options.engine.max_num_seqs}: raise that")
    return options


def _load(name: str, source: "ModelSource", options: "Options") -> "LLM":
    from lean.engine import LLM
    from lean.report import start_up_line

    with stderr.status(Text(f"loading {name}")):
        llm = LLM(source, options.engine)
    for note in llm.notes:
        stderr.print(f"note: {note}")
    stderr.print(start_up_line(llm))
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
    from lean.batch import run_batch

    summary = run_batch(llm, rows, out, options.sampling, chat, stderr)
    speed = f", {summary.tokens / summary.seconds:.1f} tokens/s" if summary.tokens else ""
    stderr.print(
        f"{summary.done} rows answered into {out}, {summary.skipped} were there already, {summary.failed} failed; "
        f"{summary.tokens:,} tokens in {summary.seconds:.1f} s{speed}; {llm.num_preemptions} preemptions"
    )
    if summary.failed:
        raise UserError(f"{summary.failed} rows could not be answered; their lines in {out} say why")
