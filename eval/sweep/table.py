"""A sweep as rows: the printed table, ``frontier.csv``, and the object of ``--json``."""

import csv
import io
from dataclasses import dataclass, fields
from typing import Any

from lean.eval.score.fidelity import Fidelity
from lean.eval.score.perplexity import in_words
from lean.eval.sweep.cells import Measured, to_json
from lean.eval.sweep.frontier import Recommendation, frontier, recommend
from lean.eval.sweep.run import Sweep
from lean.units import mib


@dataclass(frozen=True)
class Judged:
    """A sweep with its frontier and recommendation. ``undominated``: see `lean.eval.sweep.frontier.frontier`."""

    sweep: Sweep
    undominated: list[Measured]
    recommendation: Recommendation

    def verdict(self, cell: Measured) -> str:
        if cell is self.recommendation.cell:
            return "recommended"
        if not cell.window_reached:
            return "window not reached"
        return "frontier" if cell in self.undominated else ""


def judge(sweep: Sweep) -> Judged:
    return Judged(sweep, frontier(sweep.measured), recommend(sweep.measured))


def table(judged: Judged) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row of text for every measured cell. Needles and tasks have columns only if they were run."""
    cells = judged.sweep.measured
    head = ["format", "residual", "window", "per token", f"at {cells[0].nbytes.context:,} tokens", "ppl"]
    head += ["mean KLD", "p99.9", "top-1", "top-5", "speed"]
    head += ["needles"] * bool(cells[0].needle) + [f"{task} {metric}" for task, metric in _metrics(cells[0])] + [""]
    rows = []
    for cell in cells:
        own, size = cell.fidelity, cell.nbytes
        row = [cell.cell.kv_dtype, str(cell.cell.residual or "-"), f"{cell.cell.window:,}" if cell.cell.window else "-"]
        row += [f"{size.token_ratio:.2f}x", f"{mib(size.held)} ({size.held_ratio:.2f}x)", in_words(own.ppl, 3)]
        row += [f"{own.kld_mean:z.6f} ±{own.kld_stderr:.6f}", f"{own.kld_p999:.4f}", f"{own.top1:.3f}"]
        row += [f"{own.top5:.3f}", f"{cell.speed.ratio:.2f}x"]
        if cell.needle:
            row.append(f"{cell.needle['correct']}/{cell.needle['trials']}")
        row += [_value(metric) for metric in _metrics(cell).values()]
        rows.append([*row, judged.verdict(cell)])
    return head, rows


def _metrics(cell: Measured) -> dict[tuple[str, str], dict[str, Any]]:
    tasks = cell.tasks["tasks"] if cell.tasks else {}
    return {(task, name): metric for task, found in tasks.items() for name, metric in found["metrics"].items()}


def _value(metric: dict[str, Any]) -> str:
    if not isinstance(metric["value"], int | float):
        return "-" if metric["value"] is None else str(metric["value"])
    return f"{metric['value']:.3f}" + (f" ±{metric['stderr']:.3f}" if metric["stderr"] is not None else "")


def markdown(judged: Judged) -> str:
    """The table, the cells that could not run, and the recommendation."""
    head, rows = table(judged)
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    padded = [[text.ljust(width) for text, width in zip(row, widths)] for row in (head, *rows)]
    padded.insert(1, ["-" * max(3, width) for width in widths])
    parts = ["\n".join(f"| {' | '.join(line)} |" for line in padded)]
    if lines := not_run(judged):
        parts.append("\n".join(f"not run: {line}" for line in lines))
    parts += [f"Recommended: {judged.recommendation.cell.cell.name}."]
    parts += [*judged.recommendation.reasons, *judged.recommendation.windows]
    return "\n\n".join(parts)


def not_run(judged: Judged) -> list[str]:
    """Cells that could not run, with their reasons. Cells with the same reason share a line."""
    names: dict[str, list[str]] = {}
    for result in judged.sweep.impossible:
        names.setdefault(result.reason, []).append(result.cell.name)
    return [f"{'; '.join(cells)}: {reason}" for reason, cells in names.items()]


def frontier_csv(judged: Judged) -> str:
    """Every cell, measured or not, with all its figures. ``undominated`` and ``recommended`` are 0 or 1."""
    stream = io.StringIO()
    figures = [item.name for item in fields(Fidelity)]
    head = ["name", "kv_dtype", "residual", "window", "undominated", "recommended", "window_reached"]
    head += ["bytes_per_token", "bytes_per_token_bf16", "context", "bytes_held", "bytes_held_bf16", *figures]
    head += ["decode_ratio", "decode_tokens_per_s", "decode_context", "needle_accuracy", "not_run"]
    writer = csv.DictWriter(stream, head, restval="", lineterminator="\n")
    writer.writeheader()
    for result in judged.sweep.results:
        cell = result.cell
        row: dict[str, Any] = {"name": cell.name, "kv_dtype": cell.kv_dtype, "residual": cell.residual}
        row["window"] = cell.window or ""
        if isinstance(result, Measured):
            size, speed = result.nbytes, result.speed
            row |= {name: getattr(result.fidelity, name) for name in figures}
            row |= {
                "undominated": int(result in judged.undominated),
                "recommended": int(result is judged.recommendation.cell),
                "window_reached": int(result.window_reached),
                "bytes_per_token": size.per_token,
                "bytes_per_token_bf16": size.per_token_bf16,
                "context": size.context,
                "bytes_held": size.held,
                "bytes_held_bf16": size.held_bf16,
                "decode_ratio": speed.ratio,
                "decode_tokens_per_s": speed.tokens_per_s,
                "decode_context": speed.context,
                "needle_accuracy": result.needle["accuracy"] if result.needle else "",
            }
        else:
            row["not_run"] = result.reason
        writer.writerow(row)
    return stream.getvalue()


def sweep_report(judged: Judged) -> dict[str, Any]:
    """The object of ``lean sweep --json``."""
    return {
        "cells": [to_json(result) for result in judged.sweep.results],
        "undominated": [cell.cell.name for cell in judged.undominated],
        "recommended": judged.recommendation.cell.cell.name,
        "reasons": judged.recommendation.reasons,
        "windows": judged.recommendation.windows,
        "config": judged.sweep.config,
    }
