"""The next tokens of all sequences of a step: computed together, and read by the host together."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy
import torch

from lean.engine.draw import UNDECIDED, Settings, draw_from, draw_from_all
from lean.engine.host import read, send
from lean.engine.logprobs import measure
from lean.engine.sampler import Sampler

REACH = 256  # top-k and top-p look at this number of the most likely ids first
_WIDER, _FEW = 32, 8
# Most scores at once. On a GPU 32 MiB in float64; on a CPU what its caches hold.
_SCORES = {"cpu": 2**18, "cuda": 2**22}


class Turn(NamedTuple):
    """A sequence that draws its next token from row ``row`` of a step's logits.

    ``logprobs``: report the log-probability of the token and of this number of most likely ones; None: no report.
    """

    sampler: Sampler
    row: int
    logprobs: int | None = None


class Sample(NamedTuple):
    """A sequence's next token; ``measured`` [3, 1 + top] is for `lean.engine.logprobs.token_logprobs`."""

    token: int
    measured: numpy.ndarray | None


class _Kind(NamedTuple):
    """Turns of one kind are drawn together. ``reach``: see `draw_from`; 0: neither top-k nor top-p."""

    greedy: bool
    penalized: bool
    reach: int = 0
    by_top_k: bool = False


@torch.inference_mode()
def sample(
    logits: torch.Tensor, turns: Sequence[Turn], also: Sequence[torch.Tensor] = (), num_tokens: int | None = None
) -> tuple[list[Sample], list[numpy.ndarray]]:
    """Every turn's token, and the values of other tensors of the step, float64, which the host reads with them.

    The host waits for the device once. It waits again only where a row's top-k or top-p may keep more ids than `REACH`.

    Args:
        logits: float32 or float64 [rows, vocab]; not changed.
        num_tokens: ids from here on pad the vocabulary and are never drawn; None: there are none.
    """
    found: dict[int, Sample] = {}
    others: list[numpy.ndarray] = []
    num_tokens = min(num_tokens or logits.shape[-1], logits.shape[-1])
    reach, pending = REACH, list(range(len(turns)))
    while pending or also:
        tokens, order = _draw(logits, num_tokens, turns, pending, reach)
        measured, measured_of = _measure(logits, num_tokens, turns, tokens, order)
        values = read([*tokens, *measured, *also])
        drawn = [int(token) for part in values[: len(tokens)] for token in part.tolist()]
        rows = iter(row for part in values[len(tokens) : len(tokens) + len(measured)] for row in part)
        reports = dict(zip(measured_of, rows))
        others += values[len(tokens) + len(measured) :]
        found |= {i: Sample(token, reports.get(i)) for i, token in zip(order, drawn) if token != UNDECIDED}
        pending = [i for i in pending if i not in found]
        reach, also = _wider(reach, num_tokens), ()
    for i, turn in enumerate(turns):  # after all reads: a step that fails before can be computed again
        turn.sampler.record(found[i].token)
    return [found[i] for i in range(len(turns))], others


def _draw(
    logits: torch.Tensor, num_tokens: int, turns: Sequence[Turn], pending: Sequence[int], reach: int
) -> tuple[list[torch.Tensor], list[int]]:
    """(tokens in parts, int64 [rows] each; the turns that they belong to)."""
    kinds: dict[_Kind, list[int]] = {}
    for i in pending:
        kinds.setdefault(_kind(turns[i].sampler, num_tokens, reach), []).append(i)
    drawing = [i for kind, own in kinds.items() if not kind.greedy for i in own]
    settings = send([_settings(turns[i].sampler) for i in drawing], torch.float64, logits.device) if drawing else None
    tokens, order, start = [], [], 0
    for kind, own in kinds.items():
        for part in _slices(own, logits):
            if kind.penalized:
                rows = torch.stack([turns[i].sampler.scores(logits[turns[i].row])[:num_tokens] for i in part])
            else:
                rows = _rows(logits[:, :num_tokens], [turns[i].row for i in part])
            if kind.greedy:
                tokens.append(rows.argmax(-1))
                continue
            assert settings is not None
            columns = Settings(*settings[start : start + len(part)].split(1, dim=-1))
            start += len(part)
            if kind.reach:
                tokens.append(draw_from(rows, columns, kind.reach, by_top_k=kind.by_top_k))
            else:
                tokens.append(draw_from_all(rows, columns))
        order += own
    return tokens, order


def _kind(sampler: Sampler, vocab: int, reach: int) -> _Kind:
    if sampler.greedy:
        return _Kind(True, sampler.penalizes)
    params = sampler.params
    top_k = params.top_k if params.top_k and params.top_k < vocab else 0
    if not top_k and (params.top_p is None or params.top_p == 1):
        return _Kind(False, sampler.penalizes)
    while reach < top_k:
        reach = _wider(reach, vocab)
    return _Kind(False, sampler.penalizes, reach, top_k > 0)


def _wider(reach: int, vocab: int) -> int:
    """The next number of ids to look at. Sorting a vocabulary is as fast as finding the largest eighth of it."""
    reach *= _WIDER
    return reach if reach * _FEW <= vocab else vocab


def _settings(sampler: Sampler) -> tuple[float, ...]:
    """A row of `Settings`."""
    params = sampler.params
    top_p = 2.0 if params.top_p is None or params.top_p == 1 else params.top_p
    return sampler.temperature, params.top_k or 0, top_p, params.min_p or 0.0, sampler.number


def _measure(
    logits: torch.Tensor, num_tokens: int, turns: Sequence[Turn], tokens: Sequence[torch.Tensor], order: Sequence[int]
) -> tuple[list[torch.Tensor], list[int]]:
    """(what `measure` returns for the turns that report log-probabilities, in parts; those turns)."""
    places = [place for place, i in enumerate(order) if turns[i].logprobs is not None]
    if not places:
        return [], []
    drawn = torch.cat(list(tokens)).clamp(min=0)  # of an undecided row nothing is used
    measured = []
    for part in _slices(places, logits):
        own = [turns[order[place]] for place in part]
        rows = _rows(logits, [turn.row for turn in own])
        ids = torch.stack([drawn[place] for place in part])
        measured.append(measure(rows, ids, max(turn.logprobs or 0 for turn in own), num_tokens))
    return measured, [order[place] for place in places]


def _slices(items: list[int], logits: torch.Tensor) -> Iterator[list[int]]:
    """As many rows at once as are good for memory."""
    step = max(1, _SCORES[logits.device.type] // logits.shape[-1])
    return (items[start : start + step] for start in range(0, len(items), step))


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows of the logits; not copied where they follow each other."""
    first = rows[0]
    if rows == list(range(first, first + len(rows))):
        return logits[first : first + len(rows)]
    return torch.stack([logits[row] for row in rows])
