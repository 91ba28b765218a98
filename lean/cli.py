"""The ``lean`` command. Answers go to stdout, everything else to stderr."""

import logging
import os
import sys
import time
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from lean.config import DEFAULT_MAX_TOKENS, DEFAULT_MODEL, KV_DTYPE_HELP, EngineConfig, parse_size
from lean.errors import EMPTY_PROMPT, LeanError, UserError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
stderr = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)

_DEFAULT = EngineConfig()
_MODEL_HELP = f"Folder, .gguf file, pulled name or hub id; LEAN_MODEL, else {DEFAULT_MODEL}."

Json = Annotated[bool, typer.Option("--json", help="Print exactly one JSON object on stdout.")]


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    """Run large language models with a quantized, paged KV cache."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def _choose_model(model: str | None) -> str:
    """MODEL, else LEAN_MODEL, else the demo model; says which one it took."""
    if model:
        return model
    chosen = os.environ.get("LEAN_MODEL")
    stderr.print(f"model: {chosen or DEFAULT_MODEL} ({'LEAN_MODEL' if chosen else 'the default'})")
    return chosen or DEFAULT_MODEL


def _read_prompt(argument: str | None, option: str | None) -> str:
    """The prompt from its place on the command line, from -p, or from standard input."""
    prompt = argument if argument is not None else option
    if prompt is not None and prompt != "-":
        if any("\ud800" <= c <= "\udfff" for c in prompt):  # what argv could not decode
            raise UserError("the prompt is not UTF-8 text")
        return prompt
    if prompt is None and sys.stdin.isatty():
        try:
            return stderr.input("prompt: ")
        except EOFError:
            return ""
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}") from None


@app.command()
def run(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP, show_default=False)] = None,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="Text; - or nothing reads standard input.", show_default=False),
    ] = None,
    prompt_option: Annotated[str | None, typer.Option("--prompt", "-p", help="PROMPT as an option.")] = None,
    kv_dtype: Annotated[str, typer.Option(help=KV_DTYPE_HELP)] = _DEFAULT.kv_dtype,
    kv_residual_length: Annotated[
        int | None,
        typer.Option(help="Read the last so many tokens exact.", show_default="64 for quantized formats, else 0"),
    ] = None,
    sinks: Annotated[
        int | None, typer.Option(help="Read the first so many tokens exact, with a residual.", show_default="4")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = DEFAULT_MAX_TOKENS,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy.", show_default="the model's generation_config, else 0")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Make sampling repeatable.", show_default="drawn")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after end-of-sequence tokens.")] = False,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Use the chat template.", show_default="where the model has one"),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Longest prompt and answer together, in tokens.", show_default="the model's, or what fits"),
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of the KV cache, e.g. 512MiB.",
            show_default="90% of free GPU memory; on a CPU what the sequences can need, at most 1/4 of what is free",
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens per cache block.")] = _DEFAULT.block_size,
    num_blocks: Annotated[
        int | None, typer.Option(help="Cache blocks, instead of --kv-memory.", show_default="from the memory")
    ] = None,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens per step.")] = _DEFAULT.prefill_chunk,
    dtype: Annotated[
        str, typer.Option(help="auto, bfloat16, float16, float32 or float64: weights and activations.")
    ] = _DEFAULT.dtype,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = _DEFAULT.device,
    threads: Annotated[int | None, typer.Option(help="CPU threads.", show_default="torch's choice")] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="The same bits whatever the chunk or batch; slower.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    json: Json = False,
) -> None:
    """Answer a prompt, streaming it as it is generated."""
    config = EngineConfig(
        kv_dtype=kv_dtype,
        kv_residual_length=kv_residual_length,
        sinks=sinks,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_memory=None if kv_memory is None else parse_size(kv_memory),
        max_model_len=max_model_len,
        prefill_chunk=prefill_chunk,
        max_num_seqs=1,
        max_num_batched_tokens=prefill_chunk,
        dtype=dtype,
        device=device,
        threads=threads,
        deterministic=deterministic,
        trust_remote_code=trust_remote_code,
    )
    if prompt is not None and prompt_option is not None:
        raise UserError("two prompts: give PROMPT or -p, not both")
    if "" in (prompt, prompt_option):
        raise UserError(EMPTY_PROMPT)
    name = _choose_model(model)

    from lean.hub import resolve

    source = resolve(name, progress=True, trust_remote_code=trust_remote_code)
    text = _read_prompt(prompt, prompt_option)
    if not text:
        raise UserError(EMPTY_PROMPT)

    from lean.engine import LLM
    from lean.report import kv_report, start_up_line
    from lean.request import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=ignore_eos)
    with stderr.status(Text(f"loading {name}")):
        llm = LLM(source, config)
    for note in llm.notes:
        stderr.print(f"note: {note}")
    stderr.print(start_up_line(llm))
    ids = llm.encode(text, chat=chat)
    started = time.perf_counter()
    outputs, times = [], []
    try:
        for output in llm.stream(ids, params):
            outputs.append(output)
            times.append(time.perf_counter())
            if not json:
                print(output.text, end="", flush=True)
    finally:
        if outputs and not json:
            print(flush=True)
    last = outputs[-1]
    if last.error:
        raise LeanError(last.error)
    tokens = [token for output in outputs for token in output.token_ids]
    ttft, decode = times[0] - started, times[-1] - times[0]
    timing = {
        "load_s": round(llm.load_s, 3),
        "ttft_s": round(ttft, 4),
        "prefill_tok_s": round(len(ids) / ttft, 2),
        "decode_tok_s": round((len(tokens) - 1) / decode, 2) if len(tokens) > 1 else None,
    }
    kv = kv_report(llm)
    if json:
        result = {
            "text": "".join(output.text for output in outputs),
            "token_ids": tokens,
            "finish_reason": last.finish_reason,
            "prompt_tokens": last.prompt_tokens,
            "completion_tokens": len(tokens),
            "kv": kv,
            "timing": timing,
            "kernels": llm.kernels,
        }
        _print_json(result)
        return
    held, bf16 = kv["bytes_held"] / 2**20, kv["bytes_if_bf16"] / 2**20
    speed = f", {timing['decode_tok_s']} tokens/s" if timing["decode_tok_s"] else ""
    stderr.print(
        f"{last.prompt_tokens} prompt + {len(tokens)} new tokens ({last.finish_reason}); "
        f"first after {ttft:.2f} s{speed}; KV {held:.2f} MiB held for {kv['tokens_held']} tokens "
        f"(bf16 without blocks: {bf16:.2f} MiB)"
    )


@app.command()
def pull(name: Annotated[str, typer.Argument(metavar="NAME", help=f"A known name: {DEFAULT_MODEL}.")]) -> None:
    """Fetch a known model and check it; prints its folder. Models of the hub are fetched on first use."""
    from lean.pull import pull as fetch

    print(fetch(name, progress=True))


@app.command()
def info(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP, show_default=False)] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
    json: Json = False,
) -> None:
    """Show what a model is and what its KV cache costs in each format. Fetches it where needed, reads no weights."""
    name = _choose_model(model)
    from lean.report import model_report, print_model_report

    report = model_report(name, trust_remote_code)
    if json:
        _print_json(report)
    else:
        print_model_report(report)


def _print_json(value: dict[str, Any]) -> None:
    import json

    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, ensure_ascii=not unicode, allow_nan=False))


def _quiet_libraries() -> None:
    """Libraries' progress bars and hints are not ours to show; their warnings about a model are, on stderr."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    logging.basicConfig(level=logging.WARNING, format="lean: %(message)s", stream=sys.stderr)


def main() -> None:
    """Entry point: run the command; every error meant for the user becomes one line and its exit code."""
    _quiet_libraries()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that cannot show a character
    try:
        code = app(prog_name="lean", standalone_mode=False)
    except LeanError as error:
        _exit(str(error), error.exit_code)
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "t allocate memory" in str(error):
            _exit("out of memory: lower --kv-memory, --max-model-len or --prefill-chunk, or take a smaller model", 1)
        if not hasattr(error, "format_message"):  # not one of the command line parser's
            raise
        context = getattr(error, "ctx", None)
        _exit(f"{error.format_message()} (see {context.command_path if context else 'lean'} --help)", 2)
    if code == 130:
        _exit("interrupted", 130)
    sys.exit(code if isinstance(code, int) else 0)


def _exit(message: str, code: int) -> NoReturn:
    print(f"lean: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
