"""``lean bench``: speed, compared with the memory bandwidth and with other engines in the same run."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lean.cli.engine_flags import engine_flags
from lean.cli.evaluate import start_engine
from lean.cli.flags import ModelArgument, given_options, option, printed_config
from lean.cli.lists import read_items, read_numbers
from lean.cli.terminal import print_json, stderr
from lean.config import EngineConfig
from lean.errors import UserError
from lean.layer_formats import split_formats

if TYPE_CHECKING:
    from lean.eval.bench.attention import Shape
    from lean.eval.bench.timing import BenchRow
    from lean.llm import LLM
    from lean.options import Options

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure speed. Candidates are measured in turn within one run; results are medians and ratios.",
)

_DEFAULT = EngineConfig()

Formats = Annotated[
    str, typer.Option("--kv-dtype", help="KV formats to measure, separated by commas.", metavar="F[,F]")
]
Contexts = Annotated[
    str,
    typer.Option("--context", help="Context lengths to measure, in tokens, separated by commas.", metavar="N[,N]"),
]
Against = Annotated[
    str | None,
    option(
        "Also measure these engines, separated by commas: transformers, transformers-quantized, llama.cpp; or "
        "expanded: lean itself with the expanded K/V of a model with latent attention.",
        metavar="P[,P]",
    ),
]
Gguf = Annotated[str | None, option("The model as a GGUF file, for --against llama.cpp.", metavar="FILE")]
Json = Annotated[bool, typer.Option("--json", help="Print the results on stdout, one JSON object per line.")]
Plot = Annotated[Path | None, option("Draw time against context length into this file.", metavar="PNG")]


def _options(context: typer.Context) -> "tuple[Options, list[str]]":
    """The options of the engine, and the formats to measure. The engine starts with the first format."""
    formats = split_formats(context.params["kv_dtype"])
    context.params["kv_dtype"] = formats[0]
    for name in ("max_model_len", "max_num_seqs"):
        if context.params[name] != getattr(_DEFAULT, name):
            raise UserError(f"--{name.replace('_', '-')} has no effect: the benchmark sets it itself. Remove it.")
    options = given_options(context, lambda _: {"max_num_seqs": 1, "prefix_cache": False})
    return options, formats if len(formats) > 1 else [options.engine.kv_dtype]


def _engine(options: "Options", what: str, contexts: list[int], kv_dtype: str, rows: int = 1) -> "LLM":
    """An engine whose sequence length is what the benchmark needs. The measured engines share its weights."""
    from lean.eval.bench.model import bench_length, with_format

    config = with_format(replace(options.engine, max_num_seqs=1), kv_dtype)
    length = bench_length(what, config, contexts, rows)
    return start_engine(replace(options, engine=replace(config, max_model_len=length)))


def _show(rows: "Iterable[BenchRow]", json: bool, plot: Path | None, title: str) -> None:
    """Print rows as they are measured: with ``json`` on stdout, else a line each on stderr and a table at the end."""
    from lean.eval.bench.timing import draw_rows, print_rows

    done = []
    try:
        for row in rows:
            done.append(row)
            if json:
                print_rows([row], json_too=True)
            else:
                peer = f"; {row.peer}: {row.peer_ms:.3g} ms ({row.ratio:.2f}x)" if row.peer else ""
                stderr.print(f"{row.name} {row.format}, context {row.context:,}: {row.median_ms:.3g} ms{peer}")
    except KeyboardInterrupt:
        if done and not json:
            print("PARTIAL, interrupted")
            print_rows(done)
        raise
    if not json:
        print_rows(done)
    if plot is not None:
        draw_rows(done, str(plot), title)


def _peers(text: str | None) -> list[str]:
    return read_items("--against", text) if text else []


def _read_shape(text: str) -> "Shape":
    """``32/8x128``, or ``20/1x576:512`` for latent vectors, to a shape. Raises UserError."""
    from lean.eval.bench.attention import Shape

    match = re.fullmatch(r"(\d+)/(\d+)x(\d+)(?::(\d+))?", text)
    if match is None:
        raise UserError(f"cannot read --shape {text!r}: write e.g. 32/8x128, or 20/1x576:512 for latent vectors")
    shape = Shape(*(int(number or 0) for number in match.groups()))
    if not shape.num_kv_heads or shape.num_q_heads % shape.num_kv_heads or shape.head_dim % 8:
        raise UserError(
            f"--shape {text}: the number of query heads must be a multiple of KV heads, and head_dim a multiple of 8"
        )
    if shape.v_in_k % 32 or shape.v_in_k > shape.head_dim or shape.v_in_k % (shape.head_dim & -shape.head_dim):
        raise UserError(f"--shape {text}: V cannot be the first {shape.v_in_k} of the {shape.head_dim} numbers of K")
    return shape


def _shape_of(model: str) -> "Shape":
    """The shape of a model's first attention layer."""
    from lean.eval.bench.attention import Shape
    from lean.model.info import inspect_model
    from lean.store.source import resolve

    layer = inspect_model(resolve(model), EngineConfig()).layers[0]
    return Shape(layer.num_q_heads, layer.num_kv_heads, layer.k_dim, layer.v_dim if layer.v_in_k else 0)


@app.command()
def attention(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Use the attention shape of this model.", show_default=False),
    ] = None,
    shape: Annotated[
        str | None,
        option(
            "Attention shape, in place of MODEL: query heads, KV heads and head_dim; D:V for latent vectors whose "
            "first V numbers are the values.",
            "9/3x64",
            metavar="Q/KxD[:V]",
        ),
    ] = None,
    kv_dtype: Formats = "bf16,int8,fp8,k8v4,int4",
    contexts: Contexts = "8192,32768",
    residual: Annotated[
        str, typer.Option(help="Residual lengths to measure, in tokens, separated by commas.", metavar="R[,R]")
    ] = "0,64",
    against: Annotated[
        str,
        typer.Option(
            help="Also measure PyTorch's attention in bf16; names separated by commas: sdpa (with enable_gqa), "
            "sdpa-folded (the query heads that share a KV head become rows of one product), or none."
        ),
    ] = "sdpa,sdpa-folded",
    rounds: Annotated[int, typer.Option(help="Number of times that each candidate is measured.")] = 9,
    device: Annotated[
        str, typer.Option(help="Device to run on: auto (a GPU that torch supports, else the CPU), cpu, cuda, ...")
    ] = "auto",
    threads: Annotated[int | None, option("Number of CPU threads.", "torch's, at most the CPU quota")] = None,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Time the attention of one decode step: one layer, one sequence, K and V read from memory, not from CPU caches."""
    import torch

    from lean.device import choose_device
    from lean.eval.bench.attention import PEERS, bench_attention
    from lean.kernels.serving import backend
    from lean.threads import fit_threads

    for name, number in (("threads", threads), ("rounds", rounds)):
        if number is not None and number < 1:
            raise UserError(f"--{name} {number} must be at least 1")
    if threads is not None:
        torch.set_num_threads(threads)
    else:
        fit_threads()
    peers = [] if against == "none" else _peers(against)
    for peer in peers:
        if peer not in PEERS:
            raise UserError(f"unknown peer {peer!r} in --against: choose from {', '.join(PEERS)}, or none")
    if model is not None and shape is not None:
        raise UserError("two shapes: give MODEL or --shape, not both")
    chosen = _shape_of(model) if model is not None else _read_shape(shape or "9/3x64")
    place = choose_device(device)
    stderr.print(f"{backend(place)}; {torch.get_num_threads()} threads")
    rows = bench_attention(
        chosen,
        read_numbers("--context", contexts, 1),
        ["bf16" if name == "auto" else name for name in split_formats(kv_dtype)],
        read_numbers("--residual", residual),
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
    """Time per generated token of one sequence, with a context of the given length in the cache."""
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
    """Time from a prompt of the given length to the first token of the answer."""
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

    numbers = read_numbers("--context", contexts, 1)
    llm = _engine(options, what, numbers, names[0])
    bench = bench_decode if what == "decode" else bench_prefill
    rows = bench(llm, names, numbers, _peers(against), gguf)
    _show(rows, json, plot, f"{llm.model.info.source.name}, {what}, ms {'per token' if what == 'decode' else ''}")


@app.command()
@engine_flags
def batch(
    context: typer.Context,
    model: ModelArgument = None,
    kv_dtype: Formats = _DEFAULT.kv_dtype,
    contexts: Contexts = "2048",
    sequences: Annotated[int, typer.Option(help="Number of sequences that decode together.")] = 8,
    json: Json = False,
) -> None:
    """Tokens per second of many sequences that decode together, compared with one sequence."""
    options, names = _options(context)
    if printed_config(context, options):
        return
    from lean.eval.bench.model import bench_batch

    if sequences < 2:
        raise UserError(f"--sequences {sequences} must be at least 2")
    numbers = read_numbers("--context", contexts, 1)
    llm = _engine(options, "batch", numbers, names[0], sequences)
    _show(bench_batch(llm, names, numbers, sequences), json, None, "")


@app.command()
@engine_flags
def prefix(
    context: typer.Context,
    model: ModelArgument = None,
    kv_dtype: Formats = _DEFAULT.kv_dtype,
    length: Annotated[
        int, typer.Option("--context", help="Tokens of the prompt that is answered twice.", metavar="N")
    ] = 4096,
    requests: Annotated[
        int, typer.Option(help="Number of requests with a common beginning of 2,000 tokens; 0: none.")
    ] = 32,
    json: Json = False,
) -> None:
    """What the prefix cache saves where prompts begin alike, and what it costs where they do not."""
    options, names = _options(context)
    if printed_config(context, options):
        return
    from lean.eval.bench.prefix import bench_prefix, room

    for name, number, least in (("--context", length, options.engine.block_size + 1), ("--requests", requests, 0)):
        if number < least:
            raise UserError(f"{name} {number} must be at least {least}")
    config = replace(options.engine, max_model_len=room(length))
    llm = start_engine(replace(options, engine=config))
    _show(bench_prefix(llm, names, length, requests), json, None, "")


@app.command()
@engine_flags
def profile(
    context: typer.Context,
    model: ModelArgument = None,
    contexts: Contexts = "128,7500",
    json: Json = False,
) -> None:
    """Show how much time each part of a decode step takes."""
    options = given_options(context, lambda _: {"max_num_seqs": 1, "prefix_cache": False})
    if printed_config(context, options):
        return
    from lean.eval.bench.profile import PARTS, STEPS_IN_ALL, profile

    if options.engine.compile:
        raise UserError("--compile: a compiled step cannot be divided into parts. Remove --compile.")
    numbers = read_numbers("--context", contexts, 1)
    config = replace(options.engine, enforce_eager=True, max_model_len=max(numbers) + STEPS_IN_ALL)
    llm = start_engine(replace(options, engine=config))
    found: dict[int, dict[str, Any]] = {}
    for length in numbers:
        stderr.print(f"measuring with a context of {length:,} tokens")
        found[length] = profile(llm, length)
    if json:
        print_json({"unit": "ms per step", "contexts": {str(length): parts for length, parts in found.items()}})
        return
    print("ms per step         " + "".join(f"{length:>10,}" for length in found))
    for part in (*PARTS, "whole"):
        label = "step without timers" if part == "whole" else part
        print(f"{label:20}" + "".join(f"{parts[part]:10.2f}" for parts in found.values()))
