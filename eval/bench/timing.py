"""Shared by all benchmarks: rows of figures, timing in turns, a table and a picture.

Contenders take turns in one run after a warm-up, and medians are reported. Machines are shared and noisy: ratios from
one run are reliable, absolute times are not.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lean.eval.bench.shape import Shape
from lean.eval.pictures import require_matplotlib, save_picture


@dataclass(frozen=True)
class BenchRow:
    """One measurement of a KV format, ``format``, and of the ``peer`` that it took turns with.

    Attributes:
        name: of the benchmark.
        context: tokens in the cache; for a prefill: tokens of the prompt.
        median_ms: of one call, step or prompt. spread: half the interquartile range of the times, over the median.
        gb_s: bytes that must be read, per second. bandwidth_share: gb_s over this machine's read bandwidth.
        ratio: peer_ms / median_ms; above 1 lean is faster.
    """

    name: str
    format: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    threads: int
    median_ms: float
    spread: float
    gb_s: float | None = None
    bandwidth_share: float | None = None
    peer: str | None = None
    peer_ms: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated calls."""

    median: float
    spread: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Timing":
        median = statistics.median(seconds)
        if len(seconds) < 3:
            return cls(median, (max(seconds) - min(seconds)) / 2 / median)
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, (high - low) / 2 / median)


def synchronize(device: torch.device) -> None:
    """Wait for the work of a GPU; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Wall-clock time of one call, including its work on ``device``."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def take_turns(
    calls: Mapping[str, Callable[[], object]], rounds: int, device: torch.device, warm_up: int = 1
) -> dict[str, Timing]:
    """Time every contender once per round, in alternating order, after ``warm_up`` rounds without timing."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(warm_up + rounds):
        for name in names if turn % 2 else names[::-1]:
            taken = seconds_of(calls[name], device)
            if turn >= warm_up:
                seconds[name].append(taken)
    return {name: Timing.of(taken) for name, taken in seconds.items()}


def rows_beside_peers(
    make: Callable[..., BenchRow], timings: Mapping[str, Timing], ours: Sequence[str], peers: Sequence[str]
) -> list[BenchRow]:
    """One row for every pair of a lean contender and a peer; ``make(contender, **figures)`` makes the row."""
    rows = []
    for name in ours:
        timing = timings[name]
        others: list[str | None] = [*peers] or [None]
        for peer in others:
            figures: dict[str, Any] = {"median_ms": 1e3 * timing.median, "spread": timing.spread, "peer": peer}
            if peer is not None:
                figures |= {"peer_ms": 1e3 * timings[peer].median, "ratio": timings[peer].median / timing.median}
            rows.append(make(name, **figures))
    return rows


def print_rows(rows: Sequence[BenchRow], json_too: bool = False) -> None:
    """Print a table, or with ``json_too`` one JSON object per line."""
    if json_too:
        for row in rows:
            print(json.dumps({key: _short(value) for key, value in asdict(row).items()}, allow_nan=False), flush=True)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("benchmark", "KV", "heads", "context", "ms", "±", "GB/s", "of max", "peer", "peer ms", "ratio")
    for row in rows:
        table.add_row(
            row.name,
            row.format,
            str(Shape(row.num_q_heads, row.num_kv_heads, row.head_dim)),
            f"{row.context:,}",
            f"{row.median_ms:.3g}",
            f"{row.spread:.0%}",
            "" if row.gb_s is None else f"{row.gb_s:.1f}",
            "" if row.bandwidth_share is None else f"{row.bandwidth_share:.0%}",
            row.peer or "",
            "" if row.peer_ms is None else f"{row.peer_ms:.3g}",
            "" if row.ratio is None else f"{row.ratio:.2f}x",
        )
    console = Console(highlight=False)
    Console(highlight=False, width=max(console.width, 110)).print(table)  # no cut columns in pipes and files


def _short(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def draw_rows(rows: Sequence[BenchRow], file: str, title: str) -> None:
    """Milliseconds against context, one line per format and peer, as a PNG. Needs the extra ``eval``."""
    require_matplotlib("--plot")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        lines.setdefault(f"lean {row.format}", {})[row.context] = row.median_ms
        if row.peer is not None and row.peer_ms is not None:
            lines.setdefault(row.peer, {})[row.context] = row.peer_ms
    figure, axis = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for name, points in lines.items():
        ours = name.startswith("lean ")
        contexts = sorted(points)
        values = [points[context] for context in contexts]
        axis.plot(contexts, values, "o-" if ours else "s--", label=name, linewidth=2 if ours else 1.2, markersize=4)
    axis.set(title=title, xlabel="context, tokens", ylabel="ms")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    save_picture(figure, str(file), dpi=130)
    plt.close(figure)
