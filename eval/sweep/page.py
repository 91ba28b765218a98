"""``report.html``: a sweep as one self-contained page, readable without a network."""

import base64
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lean.errors import UserError
from lean.eval.sweep.plots import LIGHT, Look, draw_frontier, draw_needles, picture
from lean.eval.sweep.table import Judged, frontier_csv, not_run, table
from lean.store.home import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --quiet: #59626c; --ground: #ffffff; --band: #f3f5f7;
  --line: #d5dae0; --mark: #0b62a4; --chosen: #e3f0fb; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e5e8; --quiet: #a2abb5; --ground: #16181c; --band: #20242a;
  --line: #3a4048; --mark: #6cb4f0; --chosen: #16324a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 76rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p, li { max-width: 75ch; }
.quiet { color: var(--quiet); font-size: .9rem; }
.answer { border-left: 4px solid var(--mark); background: var(--band); padding: .8rem 1rem; }
.answer p { margin: .35rem 0; }
.answer strong { font-size: 1.2rem; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .35rem .45rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { background: var(--band); font-weight: 600; }
td:first-child, th:first-child { text-align: left; }
tr:last-child td { border-bottom: 0; }
tr.undominated td:first-child { font-weight: 700; }
tr.chosen td { background: var(--chosen); }
img { display: block; max-width: 100%; height: auto; margin: 0 auto; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; font-size: .9rem; margin: 0; }
dt { color: var(--quiet); } dd { margin: 0; min-width: 0; }
.map { width: auto; } .map td, .map th { text-align: center; } .map td:first-child { text-align: left; }
"""


def write_report(judged: Judged, folder: Path) -> list[Path]:
    """Write ``frontier.csv``, the pictures and ``report.html``; return their paths.

    Raises UserError where they cannot be written.
    """
    files: dict[str, bytes] = {
        "frontier.csv": frontier_csv(judged).encode(),
        "frontier.png": picture(_frontier(judged, LIGHT), "png"),
        "report.html": html(judged).encode(),
    }
    if judged.sweep.measured[0].needle:
        files["needles.png"] = picture(draw_needles(judged.sweep.measured), "png")
    try:
        for name, content in files.items():
            write_atomically(folder / name, content)
    except OSError as error:
        raise UserError(f"cannot write the report into {folder}: {error.strerror or error}") from None
    return [folder / name for name in files]


def _frontier(judged: Judged, look: Look) -> "Figure":
    return draw_frontier(judged.sweep.measured, judged.undominated, look)


def html(judged: Judged) -> str:
    """The page. Each picture is there in four versions, light or dark and wide or narrow; the browser shows one."""
    config, recommendation = judged.sweep.config, judged.recommendation
    model, corpus, where = config["model"], config["corpus"], config["environment"]
    best = recommendation.cell
    cells = judged.sweep.measured
    title = f"{model['name']}: accuracy and speed of smaller KV caches"
    summary = (
        f"{len(cells)} cache configurations, {best.fidelity.tokens_scored:,} tokens of {corpus['name']}, "
        f"{model['dtype']} on {where['device']}"
    )
    parts = [
        f"<h1>{escape(title)}</h1><p class=quiet>{escape(summary)}</p>",
        f"<div class=answer><p>Recommended: <strong>{escape(best.cell.name)}</strong></p>"
        f"{_paragraphs(recommendation.reasons)}</div>",
        _paragraphs(recommendation.windows),
        "<h2>Memory against accuracy</h2>",
        _picture(lambda look: _frontier(judged, look), "memory of the KV cache against mean KLD and perplexity"),
        "<p class=quiet>The named and joined configurations form the frontier: each has a lower mean KLD than all "
        "smaller ones on it, by more than two combined standard errors. They are bold in the table. Bars show two "
        "standard errors.</p>",
        "<h2>All configurations</h2>",
        _table(judged),
        _impossible(judged),
        _needle_map(judged),
        "<h2>How it was measured</h2>",
        _paragraphs(how_measured(judged), "li", "ul"),
        "<h2>Environment</h2>",
        _facts(judged),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<style>{_STYLE}</style></head>\n<body>\n' + "\n".join(filter(None, parts))
    ) + "\n</body></html>\n"


def how_measured(judged: Judged) -> list[str]:
    """The rules behind the figures, one paragraph each."""
    config, cell = judged.sweep.config, judged.recommendation.cell
    grid, speed, own = config["grid"], cell.speed, cell.fidelity
    lines = [
        f"Every token was read through the cache of the row: {own.tokens_scored:,} tokens of the text in sequences of "
        f"at most {min(grid['max_tokens'], config['engine']['max_model_len']):,} tokens, prompt chunks of "
        f"{config['engine']['prefill_chunk']}, BOS: {grid['bos']}.",
        "KLD: KL divergence, in nats, of the next-token distribution from that of the exact cache without a window, on "
        "the same tokens. ± is one standard error; tokens count as independent.",
        "The row “exact” is the floor: the exact cache at a quarter of the chunk size differs by rounding alone.",
        "top-1: share of tokens with the same most likely prediction. top-5: mean share of the exact cache's five most "
        "likely tokens that are among the five of the row.",
        f"Memory: one sequence of {grid['context']:,} tokens of a bf16 model, in blocks of "
        f"{config['engine']['block_size']} tokens and with the residual's exact copies. The ratio compares it with a "
        "bf16 cache without blocks and without a window. Per token: without exact copies.",
        f"Speed: one sequence decodes after {speed.context:,} tokens. {speed.steps} steps of each cache take turns "
        "with steps of the exact cache in the model's dtype; the speed is the median ratio of their times. The "
        f"recommended configuration makes {speed.tokens_per_s:.1f} tokens/s, the exact cache "
        f"{speed.exact_tokens_per_s:.1f}; quartiles of the ratio: {speed.ratio_low:.2f} to {speed.ratio_high:.2f}.",
    ]
    if config["needle"]:
        depths = ", ".join(f"{depth:g}" for depth in config["needle"]["depths"])
        lines.append(
            f"Needles: {config['needle']['trials']} prompts for every length and depth ({depths}%). One line in each "
            "prompt holds a number, which the greedy answer must repeat exactly."
        )
    for name, task in (cell.tasks or {"tasks": {}})["tasks"].items():
        cut = task["truncated"]
        lines.append(
            f"Task {name} of lm-evaluation-harness: {task['num_items']} items, each after {task['num_fewshot']} "
            f"examples; {cut['items']} of {cut['of']} truncated (at most {cut['max_tokens_dropped']} tokens dropped)."
        )
        for kind, words in (("failed", "failed"), ("encoded_apart", "merge at the boundary and were encoded apart")):
            other = task.get(kind) or {"items": 0}  # results of earlier versions do not count them
            if other["items"]:
                lines.append(f"Task {name}: {other['items']} items {words}, the first {other['first']}.")
    return lines


def _paragraphs(lines: list[str], tag: str = "p", around: str = "") -> str:
    inner = "".join(f"<{tag}>{escape(line)}</{tag}>" for line in lines)
    return f"<{around}>{inner}</{around}>" if around else inner


def _picture(draw: "Callable[[Look], Figure]", alt: str) -> str:
    def source(look: Look) -> str:
        return "data:image/svg+xml;base64," + base64.b64encode(picture(draw(look), "svg")).decode()

    dark, narrow = "(prefers-color-scheme: dark)", "(max-width: 640px)"
    return (
        f'<picture><source media="{narrow} and {dark}" srcset="{source(Look(dark=True, narrow=True))}">'
        f'<source media="{narrow}" srcset="{source(Look(narrow=True))}">'
        f'<source media="{dark}" srcset="{source(Look(dark=True))}">'
        f'<img alt="{escape(alt)}" src="{source(LIGHT)}"></picture>'
    )


def _table(judged: Judged) -> str:
    head, rows = table(judged)
    lines = [f"<tr>{''.join(f'<th>{escape(text)}</th>' for text in head)}</tr>"]
    for cell, row in zip(judged.sweep.measured, rows):
        kind = "undominated" * (cell in judged.undominated) + " chosen" * (cell is judged.recommendation.cell)
        texts = "".join(f"<td>{escape(text)}</td>" for text in row)
        lines.append(f'<tr class="{kind}" title="{escape(cell.cell.name)}">{texts}</tr>')
    notes = {f"{cell.cell.name}: {note}" for cell in judged.sweep.measured for note in cell.notes}
    return f"<div class=wide><table>{''.join(lines)}</table></div>" + _paragraphs(sorted(notes))


def _impossible(judged: Judged) -> str:
    lines = not_run(judged)
    return f"<h2>Not run</h2>{_paragraphs(lines, 'li', 'ul')}" if lines else ""


def _needle_map(judged: Judged) -> str:
    """Needles found of those hidden, by cell, length and depth; a stronger colour means more found."""
    cells = [cell for cell in judged.sweep.measured if cell.needle]
    if not cells:
        return ""
    columns = cells[0].needle["cells"]  # type: ignore[index]
    head = "".join(f"<th>{trial['length']:,}<br>{trial['depth']:g}%</th>" for trial in columns)
    lines = [f"<tr><th>prompt tokens<br>needle depth</th>{head}</tr>"]
    for cell in cells:
        shares = "".join(
            f'<td style="background: rgb(11 98 164 / {0.55 * trial["accuracy"]:.2f})">'
            f"{trial['correct']}/{trial['trials']}</td>"
            for trial in cell.needle["cells"]  # type: ignore[index]
        )
        lines.append(f"<tr><td>{escape(cell.cell.name)}</td>{shares}</tr>")
    return f"<h2>Needles found</h2><div class=wide><table class=map>{''.join(lines)}</table></div>"


def _facts(judged: Judged) -> str:
    config = judged.sweep.config
    dates = sorted(cell.date for cell in judged.sweep.measured)
    facts: dict[str, Any] = {
        **{f"model {key}": value for key, value in config["model"].items()},
        **{f"text {key}": value for key, value in config["corpus"].items()},
        **config["environment"],
        "measured": dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}",
    }
    return f"<dl>{''.join(f'<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>' for key, value in facts.items())}</dl>"
