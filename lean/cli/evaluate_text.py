"""``lean eval ppl`` and ``lean eval kld``: how much accuracy a cache costs on a text."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lean.cli.engine_flags import engine_flags
from lean.cli.evaluate import (
    Bos,
    CorpusName,
    TextFile,
    app,
    config_report,
    progress_bar,
    read_corpus,
    read_options,
    start_engine,
)
from lean.cli.flags import Json, ModelArgument, choose_model, option, printed_config, start
from lean.cli.terminal import print_json
from lean.errors import UserError

if TYPE_CHECKING:
    from lean.eval.score.fidelity import Fidelity
    from lean.eval.score.perplexity import Perplexity, ScoredText
    from lean.llm import LLM
    from lean.options import Options

_KLD_TOKENS = 2048
_PROMPT_TOKENS = 64  # length of the prompts whose greedy answers are compared

ContextLength = Annotated[
    int | None,
    option(
        "Sequence length: predict each token from at most N tokens before it.",
        "the longest that the engine takes",
        "--context",
        metavar="N",
    ),
]


@app.command()
@engine_flags
def ppl(
    context: typer.Context,
    model: ModelArgument = None,
    text: TextFile = None,
    corpus: CorpusName = None,
    max_tokens: Annotated[int | None, option("Score only the first N tokens.", "all", metavar="N")] = None,
    context_length: ContextLength = None,
    stride: Annotated[
        int | None,
        option("Number of tokens scored per sequence. Less than --context: sequences overlap.", "--context"),
    ] = None,
    bos: Bos = "first",
    curve: Annotated[
        bool, typer.Option("--curve", help="Also show the mean negative log-likelihood (NLL) by position.")
    ] = False,
    json: Json = False,
) -> None:
    """Perplexity of a text."""
    options = read_options(context, prefix_cache=False)
    if printed_config(context, options):
        return
    from lean.eval.score.perplexity import Interrupted, perplexity, prepare

    source = read_corpus(text, corpus)
    llm = start_engine(options)
    scored = prepare(llm, source, max_tokens=max_tokens, context=context_length, stride=stride, bos=bos)
    interrupt: KeyboardInterrupt | None = None
    try:
        with progress_bar("scoring", _rows(scored)) as progress:
            result = perplexity(llm, scored, progress)
    except Interrupted as stopped:
        interrupt, result = stopped, stopped.result
    report = result.report() | {
        "chunk": llm.config.chunk_tokens,
        "bytes_per_token": llm.plan.bytes_per_token,
        "bytes_held": llm.peak_use.bytes_held,
        "config": config_report(llm),
    }
    if curve:
        report["curve"] = [bucket._asdict() for bucket in result.curve()]
    if json:
        print_json(report)
    else:
        _print_ppl(report, result if curve else None)
    if interrupt:
        raise interrupt


def _print_ppl(report: dict[str, Any], curve: "Perplexity | None") -> None:
    from lean.eval.score.perplexity import in_words
    from lean.units import mib

    error = "" if report["token_ppl"] is None else f" ± {report['token_ppl_stderr']:.4f}"
    if report["partial"]:
        print(f"PARTIAL, interrupted after {report['tokens_scored']:,} tokens")
    print(f"token perplexity {in_words(report['token_ppl'])}{error}")
    if not report["partial"]:
        print(
            f"word {in_words(report['word_ppl'])}, byte {in_words(report['byte_ppl'])}, "
            f"{report['bits_per_byte']:.4f} bits per byte"
        )
    print(f"NLL {report['nll']:.5f} ± {report['nll_stderr']:.5f} nats per token")
    print(
        f"{report['tokens_scored']:,} tokens of {report['corpus']['name']} (sha256 "
        f"{report['corpus']['sha256'][:16]}) in {report['sequences']:,} sequences; context {report['context']:,}, "
        f"stride {report['stride']:,}, chunk {report['chunk']}, BOS {report['bos']}"
    )
    print(f"KV {report['bytes_per_token']:,} bytes/token, at most {mib(report['bytes_held'])} held")
    if curve is None:
        return
    buckets = curve.curve()
    highest = max(bucket.nll for bucket in buckets)
    print("\nposition             NLL")
    for bucket in buckets:
        bar = "#" * round(40 * bucket.nll / highest) if highest > 0 else ""
        print(f"{bucket.start:>7,}..{bucket.end - 1:<9,} {bucket.nll:6.3f} ± {bucket.nll_stderr:.3f}  {bar}")


@app.command()
@engine_flags
def kld(
    context: typer.Context,
    model: ModelArgument = None,
    text: TextFile = None,
    corpus: CorpusName = None,
    max_tokens: Annotated[int, typer.Option(help="Score only the first N tokens.", metavar="N")] = _KLD_TOKENS,
    context_length: ContextLength = None,
    bos: Bos = "first",
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="Also show the error of the attention output of every layer.")
    ] = False,
    greedy: Annotated[
        int,
        option(
            "Also report after how many tokens the greedy answers to N prompts first differ from those with an "
            "unquantized cache.",
            metavar="N",
        ),
    ] = 0,
    greedy_tokens: Annotated[int, typer.Option(help="Length of the greedy answers, in tokens.")] = 64,
    json: Json = False,
) -> None:
    """Kullback-Leibler divergence (KLD) of predictions with this cache from those with an unquantized, full cache."""
    options = read_options(context, prefix_cache=False)
    if printed_config(context, options):
        return
    if greedy < 0 or greedy_tokens < 1:
        raise UserError(f"--greedy {greedy} must be at least 0, --greedy-tokens {greedy_tokens} at least 1")
    from lean.eval.score.fidelity import full_config
    from lean.eval.score.perplexity import prepare
    from lean.llm import LLM

    source = read_corpus(text, corpus)
    for name, value in (("context", context_length), ("max-tokens", max_tokens)):
        if value is not None and value < 1:
            raise UserError(f"--{name} {value} must be at least 1")
    options, llm = _start_candidate(options, context_length, max_tokens)
    exact = LLM(llm.model, full_config(options.engine))
    length = context_length or options.engine.max_model_len
    scored = prepare(llm, source, max_tokens=max_tokens, context=length, bos=bos)
    found, floor, interrupt = _compare_both(exact, llm, scored)
    report = asdict(found) | {
        "partial": interrupt is not None,
        "floor_kld_mean": floor and floor.kld_mean,
        "floor_kld_stderr": floor and floor.kld_stderr,
        "corpus": source.report(),
        "context": scored.context,
        "chunk": llm.config.chunk_tokens,
        "bos": scored.bos,
        "bytes_per_token": llm.plan.bytes_per_token,
        "bytes_held": llm.peak_use.bytes_held,
        "config": config_report(llm),
    }
    if per_layer and not interrupt:
        report["layers"] = _layer_errors(llm, scored.parts[0].token_ids[: llm.config.chunk_tokens])
    if greedy and not interrupt:
        report["greedy_divergence"] = _greedy_divergence(exact, llm, scored.token_ids, greedy, greedy_tokens)
    if json:
        print_json(report)
    else:
        _print_kld(report)
    if interrupt:
        raise interrupt


def _rows(scored: "ScoredText") -> int:
    """Tokens to run: in each part all but the last, which is only a target."""
    return sum(len(part.token_ids) - 1 for part in scored.parts)


def _compare_both(
    exact: "LLM", llm: "LLM", scored: "ScoredText"
) -> "tuple[Fidelity, Fidelity | None, KeyboardInterrupt | None]":
    """The fidelity of the candidate, and of the floor. After an interrupt: what is known of the candidate, if anything.

    Raises KeyboardInterrupt where nothing is known yet.
    """
    from lean.eval.score.fidelity import compare, floor_config, full_config, read_reference
    from lean.llm import LLM

    found: Fidelity | None = None
    try:
        with progress_bar("exact cache, candidate, floor", 3 * _rows(scored)) as progress:
            reference = read_reference(exact, scored, progress)
            found = compare(reference, llm, progress)
            floor = compare(reference, LLM(llm.model, floor_config(full_config(llm.config))), progress)
    except KeyboardInterrupt as interrupt:
        found = found or getattr(interrupt, "result", None)
        if found is None:
            raise
        return found, None, interrupt
    return found, floor, None


def _start_candidate(options: "Options", context_length: int | None, max_tokens: int) -> "tuple[Options, LLM]":
    """The engine to compare, and its options: max_model_len is the longest sequence that is scored.

    Two exact engines with full attention share the memory. No engine may be longer than the text needs, or than the
    model allows under full attention, also where the candidate has a window.
    """
    from lean.model.info import inspect_model
    from lean.store.source import resolve

    name, engine = choose_model(options.model), options.engine
    source = resolve(name, trust_remote_code=engine.trust_remote_code)
    limit = inspect_model(source, engine).max_position_embeddings
    limit = min(limit, engine.max_model_len or limit)
    if context_length is not None and context_length > limit:
        raise UserError(
            f"--context {context_length:,}: the exact cache has no window, and takes at most {limit:,} tokens here"
        )
    length = min(context_length or max_tokens + 1, limit)
    options = replace(options, engine=replace(engine, max_model_len=length))
    return options, start(name, source, options)


def _layer_errors(llm: "LLM", token_ids: list[int]) -> list[dict[str, Any]]:
    from lean.probe import probe_tokens

    layers = probe_tokens(llm, token_ids).layers
    return [{"layer": index, **error._asdict()} for index, error in enumerate(layers)]


def _greedy_divergence(exact: "LLM", llm: "LLM", token_ids: list[int], count: int, length: int) -> dict[str, Any]:
    """``count`` prompts from the text, answered greedily by both engines."""
    from lean.eval.score.fidelity import divergence, greedy_continuations, prompts_of

    prompts = prompts_of(token_ids, count, min(_PROMPT_TOKENS, max(1, len(token_ids) // 2)))
    both = [greedy_continuations(engine, prompts, length) for engine in (exact, llm)]
    return asdict(divergence(*both))


def _print_kld(report: dict[str, Any]) -> None:
    from lean.eval.score.perplexity import in_words

    if report["partial"]:
        print(f"PARTIAL, interrupted after {report['tokens_scored']:,} tokens of this cache")
    floor = report["floor_kld_mean"]
    print(f"mean KLD {report['kld_mean']:.6f} ± {report['kld_stderr']:.6f} nats", end="")
    print(f" (floor: exact cache, other chunk size: {'not measured' if floor is None else f'{floor:.6f}'})")
    print(f"median {report['kld_median']:.6f}, 99% {report['kld_p99']:.5f}, 99.9% {report['kld_p999']:.5f}")
    print(f"top-1 agreement {report['top1']:.4f} ± {report['top1_stderr']:.4f}, top-5 {report['top5']:.4f}")
    print(
        f"perplexity {in_words(report['ppl'])}, exact cache {in_words(report['ppl_exact'])}; "
        f"NLL difference {report['nll_delta']:+.5f} ± {report['nll_delta_stderr']:.5f}"
    )
    if "greedy_divergence" in report:
        greedy = report["greedy_divergence"]
        print(
            f"greedy answers first differ after {greedy['mean']:.1f} ± {greedy['stderr']:.1f} of "
            f"{greedy['max_tokens']} tokens; {greedy['identical']} of {greedy['prompts']} answers are identical"
        )
    print(
        f"{report['tokens_scored']:,} tokens of {report['corpus']['name']} (sha256 {report['corpus']['sha256'][:16]}); "
        f"context {report['context']:,}, chunk {report['chunk']}, BOS {report['bos']}; "
        f"KV {report['bytes_per_token']:,} bytes/token"
    )
    if "layers" in report:
        print("\nrelative error of the attention output, with inputs from an exact cache, without a residual")
        print("layer     keys   values     both")
        for row in report["layers"]:
            print(f"{row['layer']:5}  {row['keys']:7.4f}  {row['values']:7.4f}  {row['both']:7.4f}")
        worst = sorted(report["layers"], key=lambda row: -row["both"])[:4]
        layers = ",".join(str(layer) for layer in sorted(row["layer"] for row in worst))
        print(f"largest errors; to keep these layers unquantized: --kv-skip-layers {layers}")
