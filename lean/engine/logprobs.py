"""Log-probabilities of chosen tokens, and of the most likely ones: computed on the device, then read by the host."""

import math
from dataclasses import dataclass

import numpy
import torch

from lean.errors import EngineError


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability (natural logarithm), and the most likely tokens at its position.

    ``top`` holds (id, log-probability) in descending order; equal logits are ordered by id.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def log_probabilities(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of ids, [rows, k], under logits [rows, vocab]; ``ids``: int64 [rows, k].

    The model's own distribution, as in transformers: ids that pad the vocabulary are a part of it.
    """
    return torch.log_softmax(logits, dim=-1).gather(-1, ids)


def measure(logits: torch.Tensor, token_ids: torch.Tensor, top: int, num_tokens: int | None = None) -> torch.Tensor:
    """Log-probabilities of one token per row, and of the row's ``top`` most likely tokens, for `token_logprobs`.

    They come from the raw logits, before bias, penalties and temperature, in float32 or better. No value is read from
    the device.

    Args:
        logits: [rows, vocab]. token_ids: int64 [rows].
        num_tokens: ids from here on pad the vocabulary and are never among the most likely ones; None: there are none.

    Returns:
        float64 [rows, 3, 1 + top]: ids, logits and log-probabilities; first of the token itself, then of the most
        likely ones in any order.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ids = token_ids[:, None]
    tokens = logits[:, :num_tokens]
    if top := min(top, tokens.shape[-1]):
        ids = torch.cat((ids, _most_likely(tokens, top)), dim=-1)
    logprobs = log_probabilities(logits, ids)
    return torch.stack((ids.double(), logits.gather(-1, ids).double(), logprobs.double()), dim=1)


def _most_likely(logits: torch.Tensor, top: int) -> torch.Tensor:
    """Ids of each row's ``top`` largest logits, the lowest ids among ties: int64 [rows, top], in any order.

    Ranked by logit, like greedy decoding: two logits may round to one log-probability. topk orders ties randomly, so
    that ids that are not below the last place are ranked once more by numbers that differ.
    """
    vocab = logits.shape[-1]
    least = logits.topk(top).values[:, -1:]
    rank = torch.arange(vocab, 0, -1, dtype=torch.int32, device=logits.device)
    return (rank * (logits >= least) + vocab * (logits > least)).topk(top).indices


def token_logprobs(measured: numpy.ndarray, top: int) -> list[TokenLogprob]:
    """The rows that `measure` returned, with ``top`` of the most likely tokens.

    Ids at -inf are never among them, so they may be fewer.

    Raises:
        EngineError: a token has no finite log-probability in its row.
    """
    found = []
    for ids, logits, logprobs in measured.tolist():
        token = int(ids[0])
        if not math.isfinite(logprobs[0]):
            raise EngineError(f"token {token} has no finite log-probability: it is not a token of this model")
        ranked = sorted(row for row in zip((-x for x in logits[1:]), ids[1:], logprobs[1:]) if row[0] < math.inf)
        best = tuple((int(other), logprob) for _, other, logprob in ranked[:top])
        found.append(TokenLogprob(token, logprobs[0], best))
    return found
