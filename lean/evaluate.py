"""``lean eval``: what a cache costs in accuracy, on any text."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lean.errors import UserError
from lean.flags import Json, ModelArgument, choose_model, engine_flags, given_options, option, start
from lean.terminal import print_json, stderr

if TYPE_CHECKING:
    from lean.engine import LLM
    from lean.eval.corpus import Corpus
    from lean.eval.perplexity import Perplexity
    from lean.options import Options

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Measure what a cache costs in accuracy, computed through that cache.",
)

_KLD_TOKENS = 2048

TextFile = Annotated[Path | None, option("A UTF-8 text file of yours.", metavar="FILE")]
CorpusName = Annotated[
    str | None, option("python-docs (Python's help topics, always there) or wikitext2.", "python-docs", metavar="NAME")
]
Bos = Annotated[str, typer.Option(help="Where a BOS goes: first (before the text), every (sequence), none.")]


def read_corpus(text: Path | None, corpus: str | None) -> "Corpus":
    """The text that --text or --corpus names."""
    from lean.eval.corpus import load_corpus, load_text

    if text is not None and corpus is not None:
        raise UserError("two texts: give --text or --corpus, not both")
    return load_text(text) if text is not None else load_corpus(corpus or "python-docs")


def read_options(context: typer.Context, sequences: int = 1) -> "Options":
    """Options of an evaluation that runs so many sequences at a time where nothing else is said."""
    return given_options(context, lambda _: {"max_num_seqs": sequences})


def start_engine(options: "Options") -> "LLM":
    from lean.hub import resolve

    name = choose_model(options.model)
    return start(name, resolve(name, trust_remote_code=options.engine.trust_remote_code), options)


def printed_config(context: typer.Context, options: "Options") -> bool:
    """Whether only the options were asked for."""
    if context.params["print_config"]:
        print(options.to_yaml(), end="")
    return bool(context.params["print_config"])


def config_report(llm: "LLM") -> dict[str, Any]:
    """What a result holds for: the options as they were, and what they became."""
    import torch
    import transformers

    return {
        **asdict(llm.config),
        "model": llm.model.info.source.name,
        "model_dtype": str(llm.model.info.dtype).removeprefix("torch."),
        "device": str(llm.model.device),
        "kernels": llm.kernels,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@contextmanager
def progress_bar(what: str, total: int, of: str = "tokens") -> Iterator[Any]:
    """A bar on stderr with the remaining time; yields the function that is told how many more are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn(f"{{task.completed:,}}/{{task.total:,}} {of}"))
    with Progress(*columns, TimeRemainingColumn(), console=stderr, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


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
    from lean.eval.perplexity import perplexity, prepare

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


def _number(value: float | None) -> str:
    """A perplexity; None is one that no float holds."""
    if value is None:
        return "beyond any number"
    return f"{value:.4f}" if value < 1e5 else f"{value:.4g}"


def _print_ppl(report: dict[str, Any], curve: "Perplexity | None") -> None:
    from lean.cache_groups import mib

    error = "" if report["token_ppl"] is None else f" ± {report['token_ppl_stderr']:.4f}"
    print(f"token perplexity {_number(report['token_ppl'])}{error}")
    print(
        f"word {_number(report['word_ppl'])}, byte {_number(report['byte_ppl'])}, "
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
    from lean.engine import LLM
    from lean.eval.fidelity import (
        compare,
        divergence,
        floor_config,
        full_config,
        greedy_continuations,
        prompts_of,
        read_reference,
    )
    from lean.eval.perplexity import prepare

    source = read_corpus(text, corpus)
    llm = start_engine(options)
    exact = LLM(llm.model, full_config(options.engine))
    length = min(llm.size.max_model_len, exact.size.max_model_len)
    scored = prepare(llm, source, max_tokens=max_tokens, context=min(context_length or length, length), bos=bos)
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
        prompts = prompts_of(scored.token_ids, greedy, min(64, max(1, len(scored.token_ids) // 2)))
        answers = [greedy_continuations(engine, prompts, greedy_tokens) for engine in (exact, llm)]
        report["greedy_divergence"] = asdict(divergence(*answers))
    if json:
        print_json(report)
    else:
        _print_kld(report)


def _print_kld(report: dict[str, Any]) -> None:
    print(f"mean KLD {report['kld_mean']:.6f} ± {report['kld_stderr']:.6f} nats (exact cache in other chunks: ", end="")
    print(f"{report['floor_kld_mean']:.6f})")
    print(f"median {report['kld_median']:.6f}, 99% {report['kld_p99']:.5f}, 99.9% {report['kld_p999']:.5f}")
    print(f"top-1 agreement {report['top1']:.4f} ± {report['top1_stderr']:.4f}, top-5 {report['top5']:.4f}")
    print(
        f"perplexity {_number(report['ppl'])}, exact {_number(report['ppl_exact'])}: "
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


@app.command()
@engine_flags
def needle(
    context: typer.Context,
    model: ModelArgument = None,
    text: TextFile = None,
    corpus: CorpusName = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the whole prompt, separated by commas.")] = "512,2048",
    depths: Annotated[str, typer.Option(help="Where the line is hidden, in percent of the text.")] = "0,25,50,75,100",
    trials: Annotated[int, typer.Option(help="Lines asked for per length and depth.")] = 4,
    seed: Annotated[int, typer.Option(help="Other lines, at other places of the text.")] = 0,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Ask through its template.", show_default="where one is"),
    ] = None,
    plot: Annotated[Path | None, option("Draw the map there.", metavar="PNG")] = None,
    json: Json = False,
) -> None:
    """Does the model find a line again that was hidden in a long text? Shows what windows forget and formats blur."""
    options = read_options(context, max(1, trials))
    if printed_config(context, options):
        return
    from lean.eval.needle import draw_map, needle_report, print_map, run_needle

    wanted = read_numbers("lengths", lengths), read_numbers("depths", depths)
    source = read_corpus(text, corpus)
    llm = start_engine(options)
    total = len(wanted[0]) * len(wanted[1]) * trials
    with progress_bar("asking", total, "needles") as told:
        cells = list(run_needle(llm, source.text, *wanted, trials=trials, seed=seed, chat=chat, progress=told))
    title = f"{llm.model.info.source.name}, KV {options.engine.kv_dtype}"
    if plot is not None:
        draw_map(cells, str(plot), title)
    if json:
        print_json(needle_report(cells) | {"corpus": source.report(), "config": config_report(llm)})
    else:
        print_map(cells, title)


def read_numbers(name: str, text: str) -> list[int]:
    """``512,2048`` to numbers. Raises UserError."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"cannot read --{name} {text!r}: write whole numbers, e.g. 512,2048") from None


@app.command()
@engine_flags
def tasks(
    context: typer.Context,
    model: ModelArgument = None,
    names: Annotated[
        str, option("lm-eval tasks, or lean_cloze, which needs no download.", "lean_cloze", "--tasks", metavar="T[,T]")
    ] = "lean_cloze",
    num_fewshot: Annotated[int | None, option("Examples before every item.", "as the task says")] = None,
    limit: Annotated[float | None, option("Only so many items of each task; below 1: that share.", "all")] = None,
    include_path: Annotated[Path | None, option("A folder with more tasks.", metavar="DIR")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the model's chat template.")] = False,
    json: Json = False,
) -> None:
    """Tasks of lm-evaluation-harness, every item read through the cache."""
    options = given_options(context)
    if printed_config(context, options):
        return
    from lean.eval.tasks import check_tasks, run_tasks

    wanted = [name.strip() for name in names.split(",")]
    check_tasks(wanted, include_path)
    llm = start_engine(options)
    number = int(limit) if limit is not None and limit >= 1 else limit
    report = run_tasks(llm, wanted, num_fewshot, number, include_path, apply_chat_template=chat, progress=not json) | {
        "bytes_per_token": llm.plan.bytes_per_token,
        "config": config_report(llm),
    }
    if json:
        print_json(report)
        return
    for name, task in {**report["tasks"], **report["groups"]}.items():
        items = f" ({task['num_items']} items)" if "num_items" in task else ""
        for metric, found in task["metrics"].items():
            error = "" if found["stderr"] is None else f" ± {found['stderr']:.4f}"
            print(f"{name}{items} {metric}: {found['value']:.4f}{error}")
        cut = task.get("truncated") or {"items": 0}
        if cut["items"]:
            print(
                f"{name}: {cut['items']} of {cut['of']} items truncated (max {cut['max_tokens_dropped']} tokens dropped)"
            )
