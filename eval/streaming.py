"""Endless streams: one run far past the window, with memory, time per token and likelihood measured along the way."""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lean.cache.usage import CacheUse
from lean.config import DEFAULT_MODEL, EngineConfig
from lean.errors import run_main
from lean.eval.corpus import python_docs
from lean.eval.pictures import require_matplotlib, save_picture
from lean.eval.soak import resident_bytes, tiny_model
from lean.llm import LLM
from lean.model.load import LoadedModel
from lean.report import start_up_line
from lean.sampling_params import SamplingParams
from lean.scoring import score_rows
from lean.store.home import write_result


@dataclass(frozen=True)
class Point:
    """State after ``tokens`` tokens. ``ms_per_token`` and ``nll`` (nats per token): means since the point before."""

    tokens: int
    ms_per_token: float
    nll: float | None
    blocks_used: int
    bytes_held: int
    rss_bytes: int


def _point(use: CacheUse, tokens: int, count: int, seconds: float, nll: float | None) -> Point:
    blocks = sum(pool.blocks_used for pool in use.pools)
    return Point(tokens, 1e3 * seconds / count, nll, blocks, use.bytes_held, resident_bytes())


@torch.inference_mode()
def score_stream(llm: LLM, token_ids: list[int], every: int) -> Iterator[Point]:
    """Score a text through the cache, with a point after about every ``every`` tokens."""
    targets = torch.tensor(token_ids)
    total, count, done, started = 0.0, 0, 0, time.perf_counter()
    use = llm.stats()
    for position, hidden in llm.hidden_states(token_ids):
        wanted = targets[position + 1 : position + 1 + hidden.shape[0]].to(hidden.device)  # the last row has no target
        for part in llm.model.logit_slices(len(wanted)):
            total -= float(score_rows(llm.engine, hidden[part], wanted[part]).logprobs.double().sum())
        count += len(wanted)
        end = position + hidden.shape[0]
        use = llm.stats() if end < len(token_ids) else use  # the last chunk ends the request and frees everything
        if end - done >= every or end == len(token_ids):
            yield _point(use, end, end - done, time.perf_counter() - started, total / max(1, count))
            total, count, done, started = 0.0, 0, end, time.perf_counter()


def decode_stream(llm: LLM, prompt: list[int], tokens: int, every: int) -> Iterator[Point]:
    """Generate ``tokens`` tokens one by one, with a point after every ``every`` tokens."""
    params = SamplingParams(max_tokens=tokens + 1, temperature=1.0, seed=0, ignore_eos=True)
    done, started = 0, time.perf_counter()
    for count, _ in enumerate(llm.stream(prompt, params), 1):
        if count % every == 0:
            yield _point(llm.stats(), count, count - done, time.perf_counter() - started, None)
            done, started = count, time.perf_counter()
        if count == tokens:  # before the request ends, since its end frees the blocks
            return


def mean_nll(points: list[Point], start: int, end: int) -> float:
    """Mean NLL of the points between ``start`` and ``end`` tokens, weighted by their tokens; NaN without points."""
    total, count, before = 0.0, 0, 0
    for point in points:
        if before >= start and point.tokens <= end and point.nll is not None:
            total += point.nll * (point.tokens - before)
            count += point.tokens - before
        before = point.tokens
    return total / count if count else float("nan")


def plot(runs: dict[str, list[Point]], file: str) -> None:
    """Draw memory, time and, for scored texts, NLL against tokens as one picture. Needs the extra ``eval``."""
    require_matplotlib("--plot")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [
        ("KV cache, MiB", lambda p: p.bytes_held / 2**20),
        ("resident memory, MiB", lambda p: p.rss_bytes / 2**20),
        ("ms per token", lambda p: p.ms_per_token),
    ]
    if any(point.nll is not None for points in runs.values() for point in points):
        panels.append(("NLL, nats per token", lambda p: p.nll))
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.2), layout="constrained")
    for axis, (title, value) in zip(axes, panels):
        for name, points in runs.items():
            axis.plot([p.tokens for p in points], [value(p) for p in points], label=name, linewidth=1.5)
        axis.set(title=title, xlabel="tokens")
        axis.set_ylim(0, 1.15 * axis.get_ylim()[1])
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    save_picture(figure, str(file), dpi=120)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lean.eval.streaming", description=main.__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="the model (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=20_000, help="length of a run (default: %(default)s)")
    parser.add_argument("--window", type=int, default=508, help="attention window in tokens (default: %(default)s)")
    parser.add_argument(
        "--sinks", type=int, nargs="+", default=[4, 0], help="numbers of sink tokens, one run each (default: 4 0)"
    )
    parser.add_argument("--kv-dtype", default="int8", help="KV format (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="use a tiny model with random weights, made for the run")
    parser.add_argument("--generate", action="store_true", help="generate token by token instead of scoring a text")
    parser.add_argument("--every", type=int, default=1024, help="tokens between points (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all points to FILE")
    parser.add_argument("--plot", metavar="FILE", help="draw all points to FILE (PNG)")
    parser.add_argument("--draw", metavar="JSON", nargs="+", help="draw the points of these files; run nothing")
    return parser.parse_args()


def _show(point: Point) -> None:
    nll = "" if point.nll is None else f", NLL {point.nll:.3f}"
    print(
        f"{point.tokens:8,} tokens: {point.ms_per_token:7.2f} ms/token, {point.blocks_used} blocks, "
        f"{point.bytes_held / 2**20:.2f} MiB held, RSS {point.rss_bytes / 2**20:.0f} MiB{nll}",
        flush=True,
    )


def run(args: argparse.Namespace) -> dict[str, list[Point]]:
    """One run for every number of sinks, each point printed at once; the points by the name of the run."""
    runs: dict[str, list[Point]] = {}
    model: LoadedModel | str = args.model
    if args.tiny:
        with tempfile.TemporaryDirectory() as folder:
            tiny_model(Path(folder))
            model = LLM(folder).model
    for sinks in args.sinks:
        config = EngineConfig(args.kv_dtype, window=args.window, sinks=sinks, max_num_seqs=1)
        llm = LLM(model, config, progress=True)
        model = llm.model
        print(start_up_line(llm))
        if args.generate:
            stream = decode_stream(llm, [model.token_limit // 2], args.tokens, args.every)
        else:
            ids = model.tokenizer(python_docs(), add_special_tokens=False)["input_ids"][: args.tokens]
            stream = score_stream(llm, ids, args.every)
        name = f"{args.kv_dtype}, window {args.window:,}, {sinks} sinks"
        points = runs[name] = []
        for point in stream:
            points.append(point)
            _show(point)
        if not args.generate:
            early, late = mean_nll(points, 2048, 8192), mean_nll(points, 8192, args.tokens)
            print(f"{name}: NLL of tokens 2,048..8,192 {early:.4f}, of 8,192..{args.tokens:,} {late:.4f}")
    return runs


def main() -> None:
    """Run a stream far past the window; show memory, time per token and likelihood along the way."""
    args = _options()
    runs: dict[str, list[Point]] = {}
    for file in args.draw or ():
        runs |= {name: [Point(**p) for p in points] for name, points in json.loads(Path(file).read_text()).items()}
    if not args.draw:
        runs = run(args)
    if args.json:
        text = json.dumps({n: [asdict(p) for p in points] for n, points in runs.items()})
        write_result(Path(args.json), text.encode())
    if args.plot:
        plot(runs, args.plot)


if __name__ == "__main__":
    run_main(main)
