"""``lean bench serve``: the speed of the server."""

from dataclasses import asdict, replace
from typing import Annotated

import typer

from lean.cli.bench import app
from lean.cli.engine_flags import engine_flags
from lean.cli.evaluate import start_engine
from lean.cli.flags import Json, ModelArgument, given_options, printed_config
from lean.cli.lists import read_numbers
from lean.cli.terminal import print_json, stderr
from lean.errors import UserError

_COLUMNS = {
    "streams": "streams",
    "prompt_tokens": "prompt",
    "tokens": "tokens",
    "computed": "computed",
    "tokens_per_s": "tokens/s",
    "share": "of generate",
    "first_p50": "first p50",
    "first_p99": "p99 ms",
    "gap_p50": "gap p50",
    "gap_p99": "p99 ms",
    "health_p99": "health p99 ms",
    "client_share": "client CPUs",
}


@app.command()
@engine_flags
def serve(
    context: typer.Context,
    model: ModelArgument = None,
    streams: Annotated[
        str, typer.Option(help="Numbers of simultaneous streams, separated by commas.", metavar="N[,N]")
    ] = "1,8,64",
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 64,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    long_prompt: Annotated[
        int, typer.Option(help="Also measure /health while a prompt of this many tokens is computed; 0: not.")
    ] = 7500,
    rounds: Annotated[int, typer.Option(help="How often the server and LLM.generate take turns.")] = 6,
    json: Json = False,
) -> None:
    """Speed and latency of the server under load, and its share of the speed of LLM.generate on the same requests."""
    counts = read_numbers("--streams", streams, 1)
    for name, value in (("--prompt", prompt), ("--tokens", tokens), ("--rounds", rounds)):
        if value < 1:
            raise UserError(f"{name} {value} must be at least 1")
    options = given_options(context, lambda _: {"max_num_seqs": max(counts)})
    if printed_config(context, options):
        return
    from lean.cli.serve import require_packages

    require_packages()
    from lean.eval.bench.serve import bench_serve

    if options.engine.max_model_len is None:
        length = max(prompt + tokens, long_prompt + 1)
        options = replace(options, engine=replace(options.engine, max_model_len=length))
    if not json:
        print("  ".join(_COLUMNS.values()))
    for row in bench_serve(lambda: start_engine(options), counts, prompt, tokens, rounds, long_prompt):
        values = asdict(row)
        if json:
            print_json(values)
        else:
            print("  ".join(_cell(values[key], len(title)) for key, title in _COLUMNS.items()), flush=True)
    if not json:
        stderr.print(
            "computed: tokens that each side computed in a round, prompts included; tokens/s: generated ones of all "
            "streams together; gap: between two chunks of a stream; medians of the rounds"
        )


def _cell(value: float | None, width: int) -> str:
    if value is None:
        return "-".rjust(width)
    text = f"{value:,}" if isinstance(value, int) else f"{value:.2f}" if value < 10 else f"{value:.0f}"
    return text.rjust(width)
