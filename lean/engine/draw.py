"""One token for each row of scores: temperature, top-k, top-p, min-p, and one draw.

All rows are computed at once, and no value is read from the device: shapes do not depend on what the scores are. Top-k
and top-p look at a fixed number of the most likely ids. A row that may keep more ids is left undecided, and the caller
draws it again from more.
"""

from typing import NamedTuple

import torch

UNDECIDED = -1


class Settings(NamedTuple):
    """What each row is drawn with: float64 [rows, 1].

    temperature: above 0. top_k: used only with ``by_top_k`` of `draw_from`. top_p: 2 where it is off. min_p: 0 where it
    is off. number: uniform, from 0 to 1 - 2^-53.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    number: torch.Tensor


def draw_from_all(scores: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Token ids, int64 [rows], without top-k and top-p. ``scores``: float32 or float64 [rows, vocab]; not changed."""
    probs = _probs(scores, _largest(scores), settings)
    return _pick(probs, _above_min_p(probs, settings), settings)


def draw_from(scores: torch.Tensor, settings: Settings, reach: int, *, by_top_k: bool) -> torch.Tensor:
    """Token ids with top-p, int64 [rows]; `UNDECIDED` where more than the ``reach`` most likely ids may be kept.

    by_top_k: every row has a top_k, of at most ``reach``.
    """
    vocab = scores.shape[-1]
    whole = reach >= vocab
    if by_top_k:
        ids, probs, open_end = _within_top_k(scores, settings, min(reach, vocab))
    else:
        probs = _probs(scores, _largest(scores), settings)
        ids, open_end = None, None
        if not whole:
            ids = scores.topk(reach).indices.sort().values  # ascending, as draws need them
            probs = probs.gather(-1, ids)
    kept, tail_kept = _within_top_p(probs, settings)
    found = _pick(probs, kept & _above_min_p(probs, settings), settings)
    tokens = found if ids is None else ids.gather(-1, found[:, None])[:, 0]
    if whole:
        return tokens
    return tokens.masked_fill(tail_kept if open_end is None else open_end, UNDECIDED)


def _largest(scores: torch.Tensor) -> torch.Tensor:
    return scores.amax(-1, keepdim=True).double()


def _probs(scores: torch.Tensor, largest: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Probabilities of ids whose scores are given, float64.

    The largest score is subtracted first: a tiny temperature then gives -inf and 0, never inf - inf.
    """
    return scores.to(torch.float64, copy=True).sub_(largest).div_(settings.temperature).softmax(-1)


def _within_top_k(
    scores: torch.Tensor, settings: Settings, reach: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, their probabilities, whether more ids tie with the k-th than were looked at).

    Ids within the top k come first, in ascending order; the others have probability 0.
    """
    vocab = scores.shape[-1]
    values, ids = scores.topk(reach)
    kth = values.gather(-1, settings.top_k.long() - 1)
    possible = (values >= kth) & (values > -torch.inf)
    ids = torch.where(possible, ids, ids + vocab).sort().values
    dropped = ids >= vocab
    ids = torch.where(dropped, ids - vocab, ids)
    known = scores.gather(-1, ids).masked_fill_(dropped, -torch.inf)
    return ids, _probs(known, _largest(values), settings), possible.all(-1)


def _within_top_p(probs: torch.Tensor, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """(which ids are the most likely ones that reach top_p together, whether the least likely id is one of them).

    Among equal probabilities the lower id comes first: near-ties that swap places then hardly change a draw.
    """
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    within = ordered.cumsum(-1) - ordered < settings.top_p
    kept = torch.zeros_like(within).scatter_(-1, order, within)
    tail = (ordered <= ordered[:, -1:]) & (ordered > 0)
    return kept, (within & tail).any(-1)


def _above_min_p(probs: torch.Tensor, settings: Settings) -> torch.Tensor:
    return probs >= settings.min_p * probs.amax(-1, keepdim=True)


def _pick(probs: torch.Tensor, kept: torch.Tensor, settings: Settings) -> torch.Tensor:
    """The place of one of the kept ids in each row, int64 [rows].

    Inverse transform on one uniform number: independent of vocabulary padding and of torch's multinomial. The number is
    at most 1 - 2^-53, so that its product with the sum is below the sum. Sums at ids that are not kept count as 0: a
    GPU adds in parallel, so that a sum may grow by rounding where nothing is added.
    """
    weights = probs * kept
    sums = weights.cumsum(-1).masked_fill_(weights == 0, 0.0)
    reached = sums > sums.amax(-1, keepdim=True) * settings.number
    return reached.view(torch.uint8).argmax(-1)  # the first one
