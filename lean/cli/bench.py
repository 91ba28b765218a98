"""``lean bench``: speed beside the memory's limit and beside other engines, in one run."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lean.cli.evaluate import printed_config, read_numbers, start_engine
from lean.cli.flags import ModelArgument, engine_flags, given_options, option
from lean.cli.terminal import stderr
from lean.config import EngineConfig
from lean.errors import UserError
from lean.layer_formats import parse_formats
from lean.quant.formats import BF16

if TYPE_CHECKING:
    from lean.eval.bench.timing import BenchRow
    from lean.llm import LLM
    from lean.options import Options

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure speed: contenders take turns in one run, medians and ratios are told.",
)

_DEFAULT = EngineConfig()

Formats = Annotated[str, typer.Option("--kv-dtype", help="KV formats, separated by commas.", metavar="F[,F]")]
Contexts = Annotated[str, typer.Option("--context", help="Tokens in the cache, separated by commas.", metavar="N[,N]")]
Against = Annotated[
    str | None, option("Peers: transformers, transformers-quantized, llama.cpp; separated by commas.", metavar="P[,P]")
]
Gguf = Annotated[str | None, option("The model's GGUF file, for llama.cpp.", metavar="FILE")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object a line on stdout.")]
Plot = Annotated[Path | None, option("Draw time against context there.", metavar="PNG")]


def _options(context: typer.Context) -> "tuple[Options, list[str]]":
    """The options of the engine, and the formats to measure: the engine itself starts with the first of them."""
    formats = split_formats(context.params["kv_dtype"])
    context.params["kv_dtype"] = formats[0]
    for name in ("max_model_len", "max_num_seqs"):
        if context.params[name] != getattr(_DEFAULT, name):
            raise UserError(f"--{name.replace('_', '-')} follows from --context and the benchmark: leave it out")
    options = given_options(context, lambda _: {"max_num_seqs": 1})
    return options, formats if len(formats) > 1 else [options.engine.kv_dtype]


def _engine(options: "Options", what: str, contexts: list[int], kv_dtype: str, rows: int = 1) -> "LLM":
    """An engine as long as the benchmark needs, its weights shared by those that are measured."""
    from lean.eval.bench.model import bench_length, with_format

    config = with_format(replace(options.engine, max_num_seqs=1), kv_dtype)
    length = bench_length(what, config, contexts, rows)
    return start_engine(replace(options, engine=replace(config, max_model_len=length)))


def split_formats(text: str) -> list[str]:
    """``int8,k=int8,v=fp8,int4`` to formats; a comma before ``v=`` is part of one. Raises UserError."""
    names = re.split(r",(?!\s*v=)", text)
    for name in names:
        parse_formats(name, BF16)
    return [name.strip() for name in names]


def _show(rows: "Iterable[BenchRow]", json: bool, plot: Path | None, title: str) -> None:
    from lean.eval.bench.timing import draw_rows, print_rows

    done = []
    for row in rows:
        done.append(row)
        if json:
            print_rows([row], json_too=True)
        else:
            beside = f", {row.peer} {row.peer_ms:.3g} ms: {row.ratio:.2f}x" if row.peer else ""
            stderr.print(f"{row.name} {row.format} at {row.context:,}: {row.median_ms:.3g} ms{beside}")
    if not json:
        print_rows(done)
    if plot is not None:
        draw_rows(done, str(plot), title)


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in text.split(",")] if text else []


@app.command()
def attention(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Take heads and dims of this model.", show_default=False)
    ] = None,
    shape: Annotated[
        str | None, option("Instead: query heads, KV heads and head_dim.", "9/3x64", metavar="Q/KxD")
    ] = None,
    kv_dtype: Formats = "bf16,int8,fp8,k8v4,int4",
    contexts: Contexts = "8192,32768",
    residual: Annotated[str, typer.Option(help="Residual lengths.", metavar="R[,R]")] = "0,64",
    against: Annotated[
        str, typer.Option(help="sdpa (torch, bf16, enable_gqa), sdpa-folded (the heads of a group as rows), or none.")
    ] = "sdpa,sdpa-folded",
    rounds: Annotated[int, typer.Option(help="Turns of every contender.")] = 9,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    threads: Annotated[int | None, option("CPU threads.", "torch's choice")] = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Decode attention of one layer and one sequence, on memory that no cache holds, beside PyTorch's own."""
    import torch

    from lean.device import choose_device
    from lean.eval.bench.attention import PEERS, Shape, bench_attention
    from lean.kernels.ops import backend

    for name, number in (("threads", threads), ("rounds", rounds)):
        if number is not None and number < 1:
            raise UserError(f"--{name} {number} must be at least 1")
    if threads is not None:
        torch.set_num_threads(threads)
    peers = [] if against == "none" else _names(against)
    for peer in peers:
        if peer not in PEERS:
            raise UserError(f"unknown peer {peer!r}: choose from {', '.join(PEERS)}, or none")
    if model is not None and shape is not None:
        raise UserError("two shapes: give MODEL or --shape, not both")
    if model is not None:
        from lean.model.info import inspect_model
        from lean.store.source import resolve

        layer = inspect_model(resolve(model), EngineConfig()).layers[0]
        chosen = Shape(layer.num_q_heads, layer.num_kv_heads, layer.k_dim)
    else:
        match = re.fullmatch(r"(\d+)/(\d+)x(\d+)", shape or "9/3x64")
        if match is None:
            raise UserError(f"cannot read --shape {shape!r}: write e.g. 32/8x128")
        chosen = Shape(*map(int, match.groups()))
        if not chosen.num_kv_heads or chosen.num_q_heads % chosen.num_kv_heads or chosen.head_dim % 8:
            raise UserError(f"--shape {shape}: query heads must be a multiple of KV heads, head_dim one of 8")
    place = choose_device(device)
    stderr.print(f"{backend(place)}; {torch.get_num_threads()} threads")
    rows = bench_attention(
        chosen,
        read_numbers("context", contexts, 1),
        ["bf16" if name == "auto" else name for name in split_formats(kv_dtype)],
        read_numbers("residual", residual),
        peers,
        place,
        rounds=rounds,
    )
    _show(rows, json, plot, f"decode attention {chosen.num_q_heads}/{chosen.num_kv_heads}x{chosen.head_dim}, ms")


@app.command()
@engine_flags
def decode(
    context: typer.Context,
    model: ModelArgument = None,
    kv_dtype: Formats = _DEFAULT.kv_dtype,
    contexts: Contexts = "128,2048,7500",
    against: Against = None,
    gguf: Gguf = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Time per token of one sequence, behind contexts that are really filled."""
    _bench_model("decode", context, contexts, against, gguf, plot, json)


@app.command()
@engine_flags
def prefill(
    context: typer.Context,
    model: ModelArgument = None,
    kv_dtype: Formats = _DEFAULT.kv_dtype,
    contexts: Contexts = "512,2048,7500",
    against: Against = None,
    gguf: Gguf = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Time from a prompt to its first token."""
    _bench_model("prefill", context, contexts, against, gguf, plot, json)


def _bench_model(
    what: str,
    context: typer.Context,
    contexts: str,
    against: str | None,
    gguf: str | None,
    plot: Path | None,
    json: bool,
) -> None:
    options, names = _options(context)
    if printed_config(context, options):
        return
    from lean.eval.bench.model import bench_decode, bench_prefill

    numbers = read_numbers("context", contexts, 1)
    llm = _engine(options, what, numbers, names[0])
    bench = bench_decode if what == "decode" else bench_prefill
    rows = bench(llm, names, numbers, _names(against), gguf)
    _show(rows, json, plot, f"{llm.model.info.source.name}, {what}, ms {'per token' if what == 'decode' else ''}")


@app.command()
@engine_flags
def batch(
    context: typer.Context,
    model: ModelArgument = None,
    kv_dtype: Formats = _DEFAULT.kv_dtype,
    contexts: Contexts = "2048",
    sequences: Annotated[int, typer.Option(help="Sequences that decode together.")] = 8,
    json: Json = False,
) -> None:
    """What decoding many sequences together gives over one: the ratio is that of tokens per second."""
    options, names = _options(context)
    if printed_config(context, options):
        return
    from lean.eval.bench.model import bench_batch

    if sequences < 2:
        raise UserError(f"--sequences {sequences}: at least 2 make a batch")
    numbers = read_numbers("context", contexts, 1)
    llm = _engine(options, "batch", numbers, names[0], sequences)
    _show(bench_batch(llm, names, numbers, sequences), json, None, "")


@app.command()
@engine_flags
def profile(
    context: typer.Context,
    model: ModelArgument = None,
    contexts: Contexts = "128,7500",
    json: Json = False,
) -> None:
    """Where the time of a decode step goes."""
    options = given_options(context, lambda _: {"max_num_seqs": 1})
    if printed_config(context, options):
        return
    from lean.cli.terminal import print_json
    from lean.eval.bench.profile import PARTS, STEPS_IN_ALL, profile

    if options.engine.compile:
        raise UserError("the parts of a compiled step cannot be told apart: leave --compile out")
    numbers = read_numbers("context", contexts, 1)
    config = replace(options.engine, enforce_eager=True, max_model_len=max(numbers) + STEPS_IN_ALL)
    llm = start_engine(replace(options, engine=config))
    found: dict[int, dict[str, Any]] = {}
    for length in numbers:
        stderr.print(f"profiling at {length:,} tokens")
        found[length] = profile(llm, length)
    if json:
        print_json({"unit": "ms per step", "contexts": {str(length): parts for length, parts in found.items()}})
        return
    print("ms per step         " + "".join(f"{length:>10,}" for length in found))
    for part in (*PARTS, "whole"):
        label = "a step, no clocks" if part == "whole" else part
        print(f"{label:20}" + "".join(f"{parts[part]:10.2f}" for parts in found.values()))
