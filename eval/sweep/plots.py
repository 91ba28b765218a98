"""Pictures of a sweep: memory against accuracy, and a map of the needles found. They need the extra ``eval``."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from lean.eval.sweep.cells import EXACT, Cell, Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, distinct for every kind of colour vision (https://jfly.uni-koeln.de/color/).
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
_SHAPES = "osD^vP"  # one per window; the first is for no window
_MIB = 2**20
_BELOW = 4.0  # the KLD axis begins at the smallest KLD of a quantized cell divided by this
_AROUND = [  # offsets of a name from its point, in points of 1/72 inch, nearest first
    (x, y)
    for far in (9, 13, 18, 24, 31, 40, 52, 66)
    for x, y in product((far, -far, 0, far / 2, -far / 2), (0, far, -far, far / 2, -far / 2))
    if max(abs(x), abs(y)) == far
]


@dataclass(frozen=True)
class Look:
    """Light or dark; wide, with panels side by side, or narrow, with one panel above the other."""

    dark: bool = False
    narrow: bool = False

    @property
    def ink(self) -> str:
        return "#e3e5e8" if self.dark else "#1f2328"

    @property
    def ground(self) -> str:
        return "#16181c" if self.dark else "#ffffff"


LIGHT = Look()


def picture(figure: Figure, kind: str) -> bytes:
    """A figure as ``png`` or ``svg``. Text in an SVG becomes outlines, so that no font is needed."""
    stream = io.BytesIO()
    figure.savefig(stream, format=kind, dpi=150, facecolor=figure.get_facecolor())
    return stream.getvalue()


def draw_frontier(cells: Sequence[Measured], undominated: Sequence[Measured], look: Look = LIGHT) -> Figure:
    """Bytes held against mean KLD and against perplexity. Undominated cells are joined by a line and named."""
    from matplotlib.figure import Figure

    shown = [cell for cell in cells if cell.window_reached]
    figure = Figure(figsize=(4.6, 9.0) if look.narrow else (11.0, 5.4), layout="constrained", facecolor=look.ground)
    axes = figure.subplots(2, 1) if look.narrow else figure.subplots(1, 2)
    quantized = [cell.fidelity.kld_mean for cell in shown if cell.cell != Cell(EXACT) and cell.fidelity.kld_mean > 0]
    lowest = min(quantized, default=1e-6) / _BELOW

    def kld(cell: Measured) -> float:
        return max(cell.fidelity.kld_mean, lowest)

    def perplexity(cell: Measured) -> float:
        return float("nan") if cell.fidelity.ppl is None else cell.fidelity.ppl

    _points(axes[0], shown, undominated, kld, look, with_errors=True)
    _points(axes[1], shown, undominated, perplexity, look)
    axes[0].set_yscale("log")
    least = min(cell.fidelity.kld_mean for cell in shown)
    below = f" (exact: {max(0.0, least):.0e}, drawn at the lower edge)" if least < lowest else ""
    axes[0].set_title(f"mean KLD, nats{below}", loc="left", fontsize=10.5, color=look.ink)
    axes[1].set_title("perplexity", loc="left", fontsize=10.5, color=look.ink)
    for axis in axes:
        axis.margins(x=0.12, y=0.1)
        _dress(axis, look)
        axis.set_xlabel(f"KV cache of one sequence of {shown[0].nbytes.context:,} tokens, MiB", fontsize=10)
    figure.legend(
        handles=_legend(shown, look), loc="outside lower center", ncols=3 if look.narrow else 5, fontsize=9.5,
        frameon=False, labelcolor=look.ink,
    )  # fmt: skip
    figure.draw_without_rendering()  # fixes sizes and positions, which the names need
    _name(axes[0], shown, undominated, kld, look)
    _name(axes[1], shown, undominated, perplexity, look)
    return figure


def _styles(shown: Sequence[Measured]) -> tuple[dict[str, str], dict[int | None, str]]:
    """The colour of every format, and the shape of every window."""
    formats = [f for f in dict.fromkeys(cell.cell.kv_dtype for cell in shown) if f != EXACT]
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(formats)}
    windows = sorted({cell.cell.window for cell in shown}, key=lambda window: (window is not None, window or 0))
    return colours, {window: _SHAPES[index % len(_SHAPES)] for index, window in enumerate(windows)}


def _points(
    axis: Axes,
    shown: Sequence[Measured],
    undominated: Sequence[Measured],
    value: Callable[[Measured], float],
    look: Look,
    with_errors: bool = False,
) -> None:
    colours, shapes = _styles(shown)
    line = [(cell.nbytes.held / _MIB, value(cell)) for cell in undominated]
    axis.plot(*zip(*line), color=look.ink, alpha=0.55, linewidth=1.2, zorder=1)
    for cell in shown:
        x, y, colour = cell.nbytes.held / _MIB, value(cell), colours.get(cell.cell.kv_dtype, look.ink)
        filled = cell.cell.residual or cell.cell.kv_dtype == EXACT
        error = 2 * cell.fidelity.kld_stderr
        if with_errors and 0 < error < y:
            axis.errorbar(x, y, yerr=error, color=colour, linewidth=1, capsize=2, zorder=2)
        axis.plot(
            x, y, shapes[cell.cell.window], markersize=8, markeredgewidth=1.6, markeredgecolor=colour,
            markerfacecolor=colour if filled else look.ground, zorder=3,
        )  # fmt: skip


def _dress(axis: Axes, look: Look) -> None:
    """Plain numbers on the logarithmic axis of memory, and the colours of the look."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_facecolor(look.ground)
    axis.tick_params(which="both", colors=look.ink, labelsize=9.5)
    axis.xaxis.label.set_color(look.ink)
    axis.grid(alpha=0.22, color=look.ink)
    for spine in axis.spines.values():
        spine.set_color(look.ink)
        spine.set_alpha(0.4)


def _legend(shown: Sequence[Measured], look: Look) -> list[Any]:
    from matplotlib.lines import Line2D

    colours, shapes = _styles(shown)

    def entry(label: str, shape: str, colour: str, filled: bool = True) -> Line2D:
        face = colour if filled else look.ground
        return Line2D([], [], linestyle="", marker=shape, color=colour, markerfacecolor=face, label=label, markersize=8)

    entries = [entry(name, "o", colour) for name, colour in ((EXACT, look.ink), *colours.items())]
    if any(cell.cell.residual for cell in shown):
        entries += [entry("with residual", "o", "#888888"), entry("no residual", "o", "#888888", filled=False)]
    if len(shapes) > 1:
        entries += [entry(f"window {w:,}" if w else "no window", shape, "#888888") for w, shape in shapes.items()]
    return entries


def _name(
    axis: Axes,
    shown: Sequence[Measured],
    undominated: Sequence[Measured],
    value: Callable[[Measured], float],
    look: Look,
) -> None:
    """Write the names of the undominated cells where they cover no points, lines or names and stay inside the axes."""
    from matplotlib.transforms import Bbox

    figure: Any = axis.figure
    scale, renderer = figure.dpi / 72, figure._get_renderer()
    frame = axis.get_window_extent(renderer).padded(-4)

    def place(cell: Measured) -> Any:
        return axis.transData.transform((cell.nbytes.held / _MIB, value(cell)))

    points = [place(cell) for cell in shown]
    taken = [Bbox.from_extents(x - 7, y - 7, x + 7, y + 7) for x, y in points]
    joints = [place(cell) for cell in undominated]
    for (x0, y0), (x1, y1) in pairwise(joints):  # the line between them, as small boxes
        count = max(2, int(max(abs(x1 - x0), abs(y1 - y0)) / 6))
        steps = [(x0 + (x1 - x0) * i / count, y0 + (y1 - y0) * i / count) for i in range(1, count)]
        taken += [Bbox.from_extents(x - 3, y - 3, x + 3, y + 3) for x, y in steps]
    for cell, (x, y) in zip(undominated, joints):
        at = (cell.nbytes.held / _MIB, value(cell))
        label = axis.annotate(
            cell.cell.name.replace(", ", "\n"), at, (0, 0), textcoords="offset points", fontsize=9.5, color=look.ink,
            va="center", linespacing=1.1,
        )  # fmt: skip
        dx, dy, box = _free_place((x, y), label.get_window_extent(renderer).size, scale, taken, frame)
        label.set_position((dx, dy))
        label.set_horizontalalignment("left" if dx > 0 else "right" if dx < 0 else "center")
        taken.append(box.padded(3))
        if max(abs(dx), abs(dy)) > 18:  # a thin line joins a distant name and its point
            end = (min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1))
            ends = axis.transData.inverted().transform([(x, y), end])
            axis.plot(*zip(*ends), color=look.ink, alpha=0.5, linewidth=0.6, zorder=1)


def _free_place(
    point: tuple[float, float], size: tuple[float, float], scale: float, taken: Sequence[Any], frame: Any
) -> tuple[float, float, Any]:
    """The offset of a name from its point, in points, and its box in pixels: the one that covers least and is nearest.

    size: of the name in pixels. scale: pixels per point. taken: boxes of what must stay visible. frame: of the axes.
    """
    from matplotlib.transforms import Bbox

    (x, y), (width, height) = point, size
    places = []
    for dx, dy in _AROUND:
        left = x + dx * scale - (0 if dx > 0 else width if dx < 0 else width / 2)
        box = Bbox.from_bounds(left, y + dy * scale - height / 2, width, height)
        hidden = sum(_overlap(box, other) for other in taken)
        outside = width * height - _overlap(box, frame)
        places.append((10 * (hidden + outside) + (dx * dx + dy * dy) ** 0.5, dx, dy, box))
    _, dx, dy, box = min(places, key=lambda place: place[0])
    return dx, dy, box


def _overlap(one: Any, other: Any) -> float:
    """Area that two boxes share, in square pixels."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return max(0.0, width) * max(0.0, height)


def draw_needles(cells: Sequence[Measured], look: Look = LIGHT) -> Figure:
    """The share of needles found: a row for every cell, a column for every prompt length and depth."""
    from matplotlib.figure import Figure

    rows = [cell for cell in cells if cell.needle]
    columns = [(trial["length"], trial["depth"]) for trial in rows[0].needle["cells"]]  # type: ignore[index]
    values = [[trial["accuracy"] for trial in cell.needle["cells"]] for cell in rows if cell.needle]
    size = (max(5.0, 3.0 + 0.62 * len(columns)), 1.6 + 0.34 * len(rows))
    figure = Figure(figsize=size, layout="constrained", facecolor=look.ground)
    axis = figure.subplots()
    axis.imshow(values, cmap="cividis", vmin=0, vmax=1, aspect="auto")  # readable with any colour vision
    for (row, shares), column in product(enumerate(values), range(len(columns))):
        ink = "black" if shares[column] >= 0.5 else "white"
        axis.text(column, row, f"{shares[column]:.0%}", ha="center", va="center", color=ink, fontsize=8.5)
    axis.set_yticks(range(len(rows)), [cell.cell.name for cell in rows])
    axis.set_xticks(range(len(columns)), [f"{length:,}\n{depth:g}%" for length, depth in columns], fontsize=8.5)
    axis.set_xlabel("prompt tokens, needle depth")
    axis.set_title("share of needles found", loc="left", fontsize=10.5, color=look.ink)
    axis.tick_params(colors=look.ink)
    axis.xaxis.label.set_color(look.ink)
    return figure
