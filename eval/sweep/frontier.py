"""Which cells of a sweep nothing beats, and which one to take. Nothing is ranked inside two standard errors."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lean.eval.score.perplexity import in_words
from lean.eval.sweep.cells import EXACT, Measured
from lean.units import mib

SIGMAS = 2.0
KLD_LIMIT = 0.01
"""Nats per token. Plain fp8, which is widely called lossless, costs the demo model about as much."""
NLL_LIMIT = 0.01
"""Nats per token: a perplexity 1% higher."""
MORE_MEMORY, TIMES_CLOSER = 1.2, 4.0
"""A cache up to a fifth larger is worth it where it is surely so many times closer."""


def surely_closer(one: Measured, other: Measured) -> bool:
    """Whether ``one`` is closer to the exact cache by more than two combined standard errors of the mean KLD.

    The errors are combined as if they were independent. Both cells read the same tokens, which makes the real error of
    the difference smaller: some that could be told apart count as equal, never the other way round.
    """
    error = math.hypot(one.fidelity.kld_stderr, other.fidelity.kld_stderr)
    return one.fidelity.kld_mean < other.fidelity.kld_mean - SIGMAS * error


def tied(one: Measured, other: Measured) -> bool:
    return not surely_closer(one, other) and not surely_closer(other, one)


def frontier(cells: Iterable[Measured]) -> list[Measured]:
    """The undominated cells, by bytes held: each is surely closer to the exact cache than all smaller ones kept.

    Going up from the smallest, a cell that is tied with one already kept is not worth its bytes; but it does not shield
    that one from a still larger cell which surely beats it. A window that the text never reached is not ranked.
    """
    kept: list[Measured] = []
    ranked = [cell for cell in cells if cell.window_reached]
    for cell in sorted(ranked, key=lambda cell: (cell.nbytes.held, cell.fidelity.kld_mean)):
        if all(surely_closer(cell, smaller) for smaller in kept):
            kept.append(cell)
    return kept


def _found(cell: Measured) -> tuple[float, float] | None:
    """Share of needles found and its standard error, where they were looked for."""
    return (cell.needle["accuracy"], cell.needle["stderr"]) if cell.needle else None


def shortcomings(cell: Measured, exact: Measured) -> list[str]:
    """What keeps a cell from being recommended: a limit that it does not surely keep. Empty: nothing."""
    own = cell.fidelity
    found = []
    if own.kld_mean + SIGMAS * own.kld_stderr > KLD_LIMIT:
        found.append(f"mean KLD {own.kld_mean:.6f} ±{own.kld_stderr:.6f} is not surely below {KLD_LIMIT:g}")
    if own.nll_delta + SIGMAS * own.nll_delta_stderr > NLL_LIMIT:
        rise, error = math.expm1(own.nll_delta), own.nll_delta_stderr
        found.append(f"perplexity is {rise:+.2%} ±{error:.2%}, not surely below {NLL_LIMIT:+.0%}")
    mine, theirs = _found(cell), _found(exact)
    if mine and theirs and mine[0] < theirs[0] - SIGMAS * math.hypot(mine[1], theirs[1]):
        found.append(f"it finds {mine[0]:.0%} of the needles, the exact cache {theirs[0]:.0%}")
    return found


@dataclass(frozen=True)
class Recommendation:
    """A cell without a window that surely keeps the limits, and why it and no other; one sentence each.

    windows: what each window costs, and the smallest cache that is as good as the exact one with it.
    """

    cell: Measured
    reasons: list[str]
    windows: list[str]


def recommend(cells: Sequence[Measured]) -> Recommendation:
    """Choose among measured cells, the exact cache that sees all among them.

    The smallest that surely keeps the limits, or a little larger one where that is many times closer.
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
    own, size = best.fidelity, best.nbytes
    limits = f"mean KLD below {KLD_LIMIT:g} nats and a perplexity less than {NLL_LIMIT:.0%} higher"
    if best is exact:
        reasons = [f"No smaller cache surely keeps within the limits ({limits}), two standard errors included."]
    else:
        first = f"It is the smallest that surely keeps within the limits ({limits}), two standard errors included."
        if best is not smallest:
            more = size.held / smallest.nbytes.held - 1
            closer = smallest.fidelity.kld_mean / own.kld_mean
            first = (
                f"For {more:.0%} more memory than {smallest.cell.name}, the smallest that surely keeps within the "
                f"limits ({limits}, two standard errors included), it is {closer:.0f} times closer to the exact cache."
            )
        reasons = [
            first,
            f"One sequence of {size.context:,} tokens holds {mib(size.held)} instead of {mib(size.held_bf16)} in bf16, "
            f"{size.held_ratio:.2f} times less with blocks and exact copies counted ({size.token_ratio:.2f} times per "
            "token).",
            f"Over {own.tokens_scored:,} tokens its mean KLD is {own.kld_mean:.6f} ±{own.kld_stderr:.6f}, its "
            f"perplexity {in_words(own.ppl, 3)} against {in_words(own.ppl_exact, 3)}, and the likeliest token is the "
            f"same for {own.top1:.1%}. It decodes at {best.speed.ratio:.2f} times the speed of the exact cache.",
        ]
    smaller = [cell for cell in by_size if cell.nbytes.held < size.held]
    refused = [(cell, why) for cell in smaller if (why := shortcomings(cell, exact))]
    for cell, why in refused[-2:]:
        reasons.append(f"Smaller, {cell.cell.name} ({mib(cell.nbytes.held)}): {'; '.join(why)}.")
    for what, held in (("the smaller one was taken", False), ("they hold the same, any of them will do", True)):
        equal = [
            cell.cell.name
            for cell in by_size
            if cell is not best and tied(cell, best) and cell.nbytes.held >= size.held
            if (cell.nbytes.held == size.held) is held
        ]
        if equal:
            reasons.append(f"Not to be told apart from it within two standard errors: {', '.join(equal)}; {what}.")
    return reasons


def _windows(cells: Sequence[Measured], exact: Measured) -> list[str]:
    lines = []
    for window in dict.fromkeys(cell.cell.window for cell in cells if cell.cell.window):
        inside = [cell for cell in cells if cell.cell.window == window]
        plain = next((cell for cell in inside if cell.cell.kv_dtype == EXACT), None)
        if not plain or not plain.window_reached:
            lines.append(f"A window of {window:,}: no scored token of this text had anything beyond it; not ranked.")
            continue
        best = min((cell for cell in inside if not surely_closer(plain, cell)), key=lambda cell: cell.nbytes.held)
        forgets = ""
        if (mine := _found(best)) and (theirs := _found(exact)):
            forgets = f" It finds {mine[0]:.0%} of the needles, the exact cache that sees all {theirs[0]:.0%}."
        lines.append(
            f"A window of {window:,} by itself: mean KLD {plain.fidelity.kld_mean:.6f}, perplexity "
            f"{in_words(plain.fidelity.ppl, 3)} against {in_words(exact.fidelity.ppl_exact, 3)}. The smallest cache "
            f"not surely worse than that is {best.cell.name}: {mib(best.nbytes.held)} at {best.nbytes.context:,} "
            f"tokens, and no more beyond the window.{forgets}"
        )
    return lines
