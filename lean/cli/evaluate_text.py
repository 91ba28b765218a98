"""``lean eval ppl`` and ``lean eval kld``: what a cache costs in accuracy, on any text."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lean.cli.evaluate import (
    Bos,
    CorpusName,
    TextFile,
    app,
    config_report,
    printed_config,
    progress_bar,
    read_corpus,
    read_options,
    start_engine,
)
from lean.cli.flags import Json, ModelArgument, choose_model, engine_flags, option, start
from lean.cli.terminal import print_json
from lean.errors import UserError

if TYPE_CHECKING:
    from lean.eval.score.perplexity import Perplexity

_KLD_TOKENS = 2048
_PROMPT_TOKENS = 64  # of prompts whose greedy answers are compared


@app.command()
@engine_flags
def ppl(
    context: typer.Context,
    model: ModelArgument = None,
    text: TextFile = None,
    corpus: CorpusName = None,
    max_tokens: Annotated[int | None, option("Score only the first so many tokens.", "all")] = None,
    context_length: Annotated[
        int | None, option("Most tokens a token is predicted from.", "the longest the engine takes", "--context")
    ] = None,
    stride: Annotated[int | None, option("Tokens scored per sequence.", "the context")] = None,
    bos: Bos = "first",
    curve: Annotated[bool, typer.Option("--curve", help="Show the NLL by position.")] = False,
    json: Json = False,
) -> None:
    """Perplexity of a text, every token read through the cache."""
    options = read_options(context)
    if printed_config(context, options):
        return
    from lean.eval.score.perplexity import perplexity, prepare

    source = read_corpus(text, corpus)
    llm = start_engine(options)
    scored = prepare(llm, source, max_tokens=max_tokens, context=context_length, stride=stride, bos=bos)
    with progress_bar("scoring", sum(len(part.token_ids) - 1 for part in scored.parts)) as told:
        result = perplexity(llm, scored, told)
    report = result.report() | {
        "chunk": options.engine.prefill_chunk,
        "bytes_per_token": llm.plan.bytes_per_token,
        "bytes_held": llm.peak_use.bytes_held,
        "config": config_report(llm),
    }
    if curve:
        report["curve"] = [bucket._asdict() for bucket in result.curve()]
    if json:
        print_json(report)
        return
    _print_ppl(report, result if curve else None)


def _print_ppl(report: dict[str, Any], curve: "Perplexity | None") -> None:
    from lean.eval.score.perplexity import in_words
    from lean.units import mib

    error = "" if report["token_ppl"] is None else f" ± {report['token_ppl_stderr']:.4f}"
    print(f"token perplexity {in_words(report['token_ppl'])}{error}")
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
    print(f"KV {report['bytes_per_token']:,} bytes/token, {mib(report['bytes_held'])} held at most")
    if curve is None:
        return
    buckets = curve.curve()
    highest = max(bucket.nll for bucket in buckets)
    print("\ntokens seen          NLL")
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
    max_tokens: Annotated[int, typer.Option(help="Score the first so many tokens.")] = _KLD_TOKENS,
    context_length: Annotated[
        int | None, option("Most tokens a token is predicted from.", "the longest the engine takes", "--context")
    ] = None,
    bos: Bos = "first",
    per_layer: Annotated[
        bool, typer.Option("--per-layer", help="Show the error of every layer's attention output.")
    ] = False,
    greedy: Annotated[
        int, option("Also: for how many tokens greedy answers to so many prompts stay the same.", metavar="PROMPTS")
    ] = 0,
    greedy_tokens: Annotated[int, typer.Option(help="Length of these answers.")] = 64,
    json: Json = False,
) -> None:
    """How far a cache moves the model's predictions from those with an exact cache, on the same tokens."""
    options = read_options(context)
    if printed_config(context, options):
        return
    if greedy < 0 or greedy_tokens < 1:
        raise UserError(f"--greedy {greedy} prompts of --greedy-tokens {greedy_tokens}: give positive numbers")
    from lean.eval.score.fidelity import (
        compare,
        divergence,
        floor_config,
        full_config,
        greedy_continuations,
        prompts_of,
        read_reference,
    )
    from lean.eval.score.perplexity import prepare
    from lean.llm import LLM
    from lean.model.info import inspect_model
    from lean.store.source import resolve

    source = read_corpus(text, corpus)
    for name, value in (("context", context_length), ("max-tokens", max_tokens)):
        if value is not None and value < 1:
            raise UserError(f"--{name} {value} must be at least 1")
    # Three engines share the memory, and the exact ones see everything: none is longer than what is read, nor than the
    # model, whatever window the candidate has.
    name = choose_model(options.model)
    found_at = resolve(name, trust_remote_code=options.engine.trust_remote_code)
    limit = inspect_model(found_at, options.engine).max_position_embeddings
    limit = min(limit, options.engine.max_model_len or limit)
    if context_length is not None and context_length > limit:
        raise UserError(
            f"--context {context_length:,}: the exact cache sees everything, and that is {limit:,} tokens here"
        )
    length = min(context_length or max_tokens + 1, limit)
    options = replace(options, engine=replace(options.engine, max_model_len=length))
    llm = start(name, found_at, options)
    exact = LLM(llm.model, full_config(options.engine))
    scored = prepare(llm, source, max_tokens=max_tokens, context=context_length or length, bos=bos)
    rows = sum(len(part.token_ids) - 1 for part in scored.parts)
    with progress_bar("exact cache, floor, candidate", 3 * rows) as told:
        reference = read_reference(exact, scored, told)
        floor = compare(reference, LLM(llm.model, floor_config(full_config(options.engine))), told)
        found = compare(reference, llm, told)
    report = asdict(found) | {
        "floor_kld_mean": floor.kld_mean,
        "floor_kld_stderr": floor.kld_stderr,
        "corpus": source.report(),
        "context": scored.context,
        "chunk": options.engine.prefill_chunk,
        "bos": scored.bos,
        "bytes_per_token": llm.plan.bytes_per_token,
        "bytes_held": llm.peak_use.bytes_held,
        "config": config_report(llm),
    }
    if per_layer:
        from lean.probe import probe_tokens

        layers = probe_tokens(llm, scored.parts[0].token_ids[: options.engine.prefill_chunk]).layers
        report["layers"] = [{"layer": index, **error._asdict()} for index, error in enumerate(layers)]
    if greedy:
        prompts = prompts_of(scored.token_ids, greedy, min(_PROMPT_TOKENS, max(1, len(scored.token_ids) // 2)))
        both = [greedy_continuations(engine, prompts, greedy_tokens) for engine in (exact, llm)]
        report["greedy_divergence"] = asdict(divergence(*both))
    if json:
        print_json(report)
    else:
        _print_kld(report)


def _print_kld(report: dict[str, Any]) -> None:
    from lean.eval.score.perplexity import in_words

    print(f"mean KLD {report['kld_mean']:.6f} ± {report['kld_stderr']:.6f} nats (exact cache in other chunks: ", end="")
    print(f"{report['floor_kld_mean']:.6f})")
    print(f"median {report['kld_median']:.6f}, 99% {report['kld_p99']:.5f}, 99.9% {report['kld_p999']:.5f}")
    print(f"top-1 agreement {report['top1']:.4f} ± {report['top1_stderr']:.4f}, top-5 {report['top5']:.4f}")
    print(
        f"perplexity {in_words(report['ppl'])}, exact {in_words(report['ppl_exact'])}: "
        f"NLL moved by {report['nll_delta']:+.5f} ± {report['nll_delta_stderr']:.5f}"
    )
    if "greedy_divergence" in report:
        greedy = report["greedy_divergence"]
        print(
            f"greedy answers stay the same for {greedy['mean']:.1f} ± {greedy['stderr']:.1f} of {greedy['max_tokens']} "
            f"tokens; {greedy['identical']} of {greedy['prompts']} never differ"
        )
    print(
        f"{report['tokens_scored']:,} tokens of {report['corpus']['name']} (sha256 {report['corpus']['sha256'][:16]}); "
        f"context {report['context']:,}, chunk {report['chunk']}, BOS {report['bos']}; "
        f"KV {report['bytes_per_token']:,} bytes/token"
    )
    if "layers" in report:
        print("\nrelative error of the attention output, on an exact cache's inputs, without a residual")
        print("layer     keys   values     both")
        for row in report["layers"]:
            print(f"{row['layer']:5}  {row['keys']:7.4f}  {row['values']:7.4f}  {row['both']:7.4f}")
        worst = sorted(report["layers"], key=lambda row: -row["both"])[:4]
        print(
            "most to gain: --kv-skip-layers " + ",".join(str(layer) for layer in sorted(row["layer"] for row in worst))
        )
