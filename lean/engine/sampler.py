"""From logits to a token id, and to log-probabilities."""

import hashlib
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lean.errors import EngineError
from lean.sampling_params import SamplingParams


class Sampler:
    """Chooses the tokens of one sequence.

    Order, as in vLLM and transformers: logit_bias, repetition penalty (prompt and output), presence and frequency
    penalty (output only); then the argmax, or temperature, top-k, top-p, min-p and one draw.

    Every sequence has its own random numbers, seeded from SHA-256 of (seed, index, prompt token ids). The same prompt
    with the same seed and index always gets the same numbers in any batch. Other prompts with the same seed, and the
    siblings of a prompt (index 0 .. n - 1), get independent numbers.

    Args:
        params: with the model's defaults filled in; fields that are still None are off. Keys of logit_bias are below
            the vocabulary's size.
        prompt_token_ids: read at the first `sample`, not copied.
        index: index of the sequence among the prompt's n sequences.
    """

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int], index: int = 0) -> None:
        self._params = params
        self._prompt_token_ids = prompt_token_ids
        self._temperature = params.temperature or 0.0
        self._repetition_penalty = params.repetition_penalty or 1.0
        self._random: random.Random | None = None  # None: greedy
        if self._temperature:
            seed = secrets.randbits(63) if params.seed is None else params.seed
            text = f"{seed} {index} {' '.join(map(str, prompt_token_ids))}"
            # torch's CPU generator keeps 32 bits of its seed; this one keeps them all.
            self._random = random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest()))
        self._counts: dict[int, int] | None = {} if params.presence_penalty or params.frequency_penalty else None
        # Made with the first logits, then changed by one element per token.
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None  # ids, what is added to each
        self._seen: torch.Tensor | None = None  # [vocab] bool: in the prompt or the output
        self._penalty: torch.Tensor | None = None  # [vocab] presence and frequency penalty as of now

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor) -> int:
        """Choose the next id. ``logits``: float32 or float64 [vocab], padding ids at -inf; not changed."""
        scores = self._penalized(logits)
        token = self._draw(scores, self._random) if self._random else int(scores.argmax())
        self._record(token)
        return token

    def _penalized(self, logits: torch.Tensor) -> torch.Tensor:
        bias, repetition = self._params.logit_bias, self._repetition_penalty
        if not bias and repetition == 1 and self._counts is None:
            return logits
        scores = logits.to(torch.float64, copy=True)
        if bias:
            if self._bias is None:
                ids = torch.tensor(list(bias), device=scores.device)
                self._bias = ids, scores.new_tensor(list(bias.values()))
            scores.index_add_(0, *self._bias)
        if repetition != 1:
            if self._seen is None:
                self._seen = torch.zeros_like(scores, dtype=torch.bool)
                self._seen[torch.tensor(self._prompt_token_ids, dtype=torch.long, device=scores.device)] = True
            # A penalty near 0 or infinity must neither make an id impossible nor make several ids infinite.
            limit = torch.finfo(scores.dtype).max
            changed = torch.where(scores > 0, scores / repetition, scores * repetition).clamp_(-limit, limit)
            scores = torch.where(self._seen & (scores > -torch.inf), changed, scores)
        if self._counts is not None:
            if self._penalty is None:
                self._penalty = torch.zeros_like(scores)
            scores -= self._penalty
        return scores

    def _record(self, token: int) -> None:
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None and self._penalty is not None:
            count = self._counts[token] = self._counts.get(token, 0) + 1
            self._penalty[token] = self._params.presence_penalty + self._params.frequency_penalty * count

    def _draw(self, scores: torch.Tensor, numbers: random.Random) -> int:
        params = self._params
        # Subtract the maximum first: a tiny temperature then gives -inf and 0, never inf - inf.
        scaled = (scores.double() - scores.max().double()) / self._temperature
        possible = scaled > -torch.inf
        if params.top_k and params.top_k < scaled.numel():
            possible &= scores >= scores.topk(params.top_k).values[-1]
        ids = possible.nonzero()[:, 0]  # ascending: near-ties that swap places then hardly change a draw
        probs = torch.softmax(scaled[ids], dim=-1)
        if params.top_p is not None and params.top_p < 1:
            # Only ids that may be kept are sorted: the ids below this bound together hold less than 1 - top_p.
            likely = probs >= (1 - params.top_p) / (2 * len(probs))
            ids, probs = ids[likely], probs[likely]
            ordered, order = probs.sort(descending=True, stable=True)
            within = ordered.cumsum(0) - ordered < params.top_p
            kept = torch.zeros_like(within).scatter_(0, order, within)
            ids, probs = ids[kept], probs[kept]
        kept = (probs >= (params.min_p or 0) * probs.max()) & (probs > 0)  # a GPU's cumsum may round up on zeros
        ids, probs = ids[kept], probs[kept]
        # Inverse transform on one uniform number: independent of vocabulary padding and of torch's multinomial. The
        # number is at most 1 - 2^-53, so that its product with the sum is below the sum.
        cumulative = probs.cumsum(0)
        return int(ids[torch.searchsorted(cumulative, cumulative[-1] * numbers.random(), right=True)])


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability (natural logarithm), and the most likely tokens at its position.

    ``top`` holds (id, log-probability) in descending order; equal logits are ordered by id.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
    """Log-probabilities of one token per row, and of the row's ``top`` most likely tokens.

    They come from the raw logits, before bias, penalties and temperature, in float32 or better. Ids at -inf (padding)
    are never among ``top``, which may be shorter than requested.

    Raises:
        EngineError: a token in ``token_ids`` has no finite log-probability in its row.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs = torch.log_softmax(logits, dim=-1)
    most_likely: list[list[tuple[int, float]]] = [[] for _ in token_ids]
    top = min(top, logits.shape[-1])
    if top:
        # Ranked by logit, like greedy decoding: two logits may round to one log-probability. topk orders ties randomly.
        least = logits.topk(top, dim=-1).values[:, -1:]
        candidates = (logits >= least) & (logits > -torch.inf)
        found = zip(candidates.nonzero().tolist(), logits[candidates].tolist(), logprobs[candidates].tolist())
        ranked: list[list[tuple[float, int, float]]] = [[] for _ in token_ids]
        for (row, token), logit, logprob in found:
            ranked[row].append((-logit, token, logprob))
        most_likely = [[(token, logprob) for _, token, logprob in sorted(row)[:top]] for row in ranked]
    ids = torch.tensor(token_ids, dtype=torch.long, device=logits.device)
    chosen = logprobs.gather(1, ids[:, None])[:, 0]
    if not bool(chosen.isfinite().all()):
        bad = token_ids[int(chosen.isfinite().logical_not().nonzero()[0])]
        raise EngineError(f"token {bad} has no finite log-probability: it is not a token of this model")
    return [TokenLogprob(*row) for row in zip(token_ids, chosen.tolist(), map(tuple, most_likely))]
