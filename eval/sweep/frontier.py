"""The frontier of a sweep, and the recommended cell. Differences within two standard errors do not count."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lean.eval.score.perplexity import in_words
from lean.eval.sweep.cells import EXACT, Measured
from lean.units import mib

SIGMAS = 2.0
KLD_LIMIT = 0.01
"""Nats per token. Plain fp8, often called lossless, costs the demo model about the same."""
NLL_LIMIT = 0.01
"""Nats per token: a perplexity 1% higher."""
MORE_MEMORY, TIMES_CLOSER = 1.2, 4.0
"""A cache is recommended over one up to 1.2 times smaller where it is surely at least 4 times closer to exact."""


def surely_closer(one: Measured, other: Measured) -> bool:
    """Whether ``one`` is closer to the exact cache by more than two combined standard errors of the mean KLD.

    The errors are combined as if they were independent. Both cells read the same tokens, so the real error of the
    difference is smaller: some different cells count as equal, but no equal cells count as different.
    """
    error = math.hypot(one.fidelity.kld_stderr, other.fidelity.kld_stderr)
    return one.fidelity.kld_mean < other.fidelity.kld_mean - SIGMAS * error


def tied(one: Measured, other: Measured) -> bool:
    """Whether neither cell is surely closer to the exact cache."""
    return not surely_closer(one, other) and not surely_closer(other, one)


def frontier(cells: Iterable[Measured]) -> list[Measured]:
    """The undominated cells by bytes held: each is surely closer to the exact cache than all smaller kept cells.

    Cells are visited from the smallest to the largest. A cell that is tied with a kept one is dropped; a larger cell
    can still be kept. Cells whose window the text never reached are left out.
    """
    kept: list[Measured] = []
    ranked = [cell for cell in cells if cell.window_reached]
    for cell in sorted(ranked, key=lambda cell: (cell.nbytes.held, cell.fidelity.kld_mean)):
        if all(surely_closer(cell, smaller) for smaller in kept):
            kept.append(cell)
    return kept


def _found(cell: Measured) -> tuple[float, float] | None:
    """Share of needles found and its standard error; None without a needle test."""
    return (cell.needle["accuracy"], cell.needle["stderr"]) if cell.needle else None


def shortcomings(cell: Measured, exact: Measured) -> list[str]:
    """Reasons not to recommend a cell: the limits that it does not surely meet."""
    own = cell.fidelity
    margin = f"by {SIGMAS:g} standard errors"
    found = []
    if own.kld_mean + SIGMAS * own.kld_stderr > KLD_LIMIT:
        found.append(f"mean KLD {own.kld_mean:.6f} ±{own.kld_stderr:.6f} is not below {KLD_LIMIT:g} {margin}")
    if own.nll_delta + SIGMAS * own.nll_delta_stderr > NLL_LIMIT:
        rise, error = math.expm1(own.nll_delta), own.nll_delta_stderr
        found.append(f"perplexity changes by {rise:+.2%} ±{error:.2%}, not below {NLL_LIMIT:+.0%} {margin}")
    mine, theirs = _found(cell), _found(exact)
    if mine and theirs and mine[0] < theirs[0] - SIGMAS * math.hypot(mine[1], theirs[1]):
        found.append(f"it finds {mine[0]:.0%} of the needles, the exact cache {theirs[0]:.0%}")
    return found


@dataclass(frozen=True)
class Recommendation:
    """The recommended cell, without a window and surely within the limits.

    reasons: for this cell and against others. windows: for each window its cost, and the smallest cache that is as
    good as the exact one with this window.
    """

    cell: Measured
    reasons: list[str]
    windows: list[str]


def recommend(cells: Sequence[Measured]) -> Recommendation:
    """Choose among measured cells; one of them must be the exact cache without a window.

    The choice is the smallest cell that surely meets the limits, or a slightly larger one that is many times closer.
    """
    full = [cell for cell in cells if cell.cell.window is None]
    exact = next(cell for cell in full if cell.cell.kv_dtype == EXACT)
    by_size = sorted(full, key=lambda cell: (cell.nbytes.held, cell.fidelity.kld_mean))
    good = [cell for cell in by_size if cell is exact or not shortcomings(cell, exact)]
    smallest = best = good[0]
    for cell in good:
        near = cell is not exact and cell.nbytes.held <= MORE_MEMORY * smallest.nbytes.held
        surely = cell.fidelity.kld_mean + SIGMAS * cell.fidelity.kld_stderr
        if near and surely < best.fidelity.kld_mean / TIMES_CLOSER and surely_closer(cell, best):
            best = cell
    return Recommendation(best, _reasons(best, smallest, by_size, exact), _windows(cells, exact))


def _reasons(best: Measured, smallest: Measured, by_size: list[Measured], exact: Measured) -> list[str]:
    reasons = _gains(best, smallest, exact)
    size = best.nbytes
    smaller = [cell for cell in by_size if cell.nbytes.held < size.held]
    refused = [(cell, why) for cell in smaller if (why := shortcomings(cell, exact))]
    for cell, why in refused[-2:]:
        reasons.append(f"The smaller {cell.cell.name} ({mib(cell.nbytes.held)}) is not recommended: {'; '.join(why)}.")
    for what, same in (("more memory", False), ("the same memory", True)):
        equal = [
            cell.cell.name
            for cell in by_size
            if cell is not best and tied(cell, best) and cell.nbytes.held >= size.held
            if (cell.nbytes.held == size.held) is same
        ]
        if equal:
            reasons.append(
                f"Equally close to the exact cache within two standard errors, with {what}: {', '.join(equal)}."
            )
    return reasons


def _gains(best: Measured, smallest: Measured, exact: Measured) -> list[str]:
    """The rule that chose the cell, its memory, and its accuracy."""
    own, size = best.fidelity, best.nbytes
    limits = f"mean KLD below {KLD_LIMIT:g} nats, perplexity less than {NLL_LIMIT:.0%} higher"
    if best is exact:
        return [f"No smaller cache meets the limits ({limits}) with a margin of two standard errors."]
    first = f"It is the smallest cache that meets the limits ({limits}) with a margin of two standard errors."
    if best is not smallest:
        more = size.held / smallest.nbytes.held - 1
        closer = smallest.fidelity.kld_mean / own.kld_mean
        first = (
            f"For {more:.0%} more memory than {smallest.cell.name}, the smallest cache that meets the limits "
            f"({limits}) with a margin of two standard errors, it is {closer:.0f} times closer to the exact cache."
        )
    return [
        first,
        f"One sequence of {size.context:,} tokens takes {mib(size.held)} instead of {mib(size.held_bf16)} in bf16: "
        f"{size.held_ratio:.2f} times less, whole blocks and exact copies included ({size.token_ratio:.2f} times less "
        "per token).",
        f"Over {own.tokens_scored:,} tokens its mean KLD is {own.kld_mean:.6f} ±{own.kld_stderr:.6f}, and its "
        f"perplexity is {in_words(own.ppl, 3)}, with the exact cache {in_words(own.ppl_exact, 3)}. The most likely "
        f"token is the same for {own.top1:.1%} of them. It decodes at {best.speed.ratio:.2f} times the speed of the "
        "exact cache.",
    ]


def _windows(cells: Sequence[Measured], exact: Measured) -> list[str]:
    lines = []
    for window in dict.fromkeys(cell.cell.window for cell in cells if cell.cell.window):
        inside = [cell for cell in cells if cell.cell.window == window]
        plain = next((cell for cell in inside if cell.cell.kv_dtype == EXACT), None)
        if not plain or not plain.window_reached:
            lines.append(f"Window {window:,}: not ranked, since the text is too short to reach beyond the window.")
            continue
        best = min((cell for cell in inside if not surely_closer(plain, cell)), key=lambda cell: cell.nbytes.held)
        forgets = ""
        if (mine := _found(best)) and (theirs := _found(exact)):
            forgets = f" It finds {mine[0]:.0%} of the needles; the exact cache without a window finds {theirs[0]:.0%}."
        lines.append(
            f"Window {window:,} with an exact cache: mean KLD {plain.fidelity.kld_mean:.6f}, perplexity "
            f"{in_words(plain.fidelity.ppl, 3)}, without a window {in_words(exact.fidelity.ppl_exact, 3)}. The "
            f"smallest cache that is not worse by two standard errors is {best.cell.name}: {mib(best.nbytes.held)} at "
            f"{best.nbytes.context:,} tokens, constant beyond the window.{forgets}"
        )
    return lines
