"""What one sequence draws its tokens with: parameters, penalties and random numbers."""

import hashlib
import random
import secrets
from collections.abc import Collection, Sequence

import torch

from lean.engine.host import send
from lean.sampling_params import SamplingParams


class Sampler:
    """What one sequence brings to `lean.engine.sampling.sample`, which chooses its tokens.

    Order, as in vLLM and transformers: logit_bias, repetition penalty (prompt and output), presence and frequency
    penalty (output only); then the argmax, or temperature, top-k, top-p, min-p and one draw.

    Every sequence has its own random numbers, seeded from SHA-256 of (seed, index, prompt token ids). The same prompt
    with the same seed and index always gets the same numbers in any batch. Other prompts with the same seed, and the
    siblings of a prompt (index 0 .. n - 1), get independent numbers.

    Args:
        params: with the model's defaults filled in; fields that are still None are off. Keys of logit_bias are below
            the vocabulary's size.
        prompt_token_ids: read with the first `scores`, not copied.
        index: index of the sequence among the prompt's n sequences.
        ends: tokens that end the sequence; they are not drawn before min_tokens others.
    """

    def __init__(
        self, params: SamplingParams, prompt_token_ids: Sequence[int], index: int = 0, ends: Collection[int] = ()
    ) -> None:
        self.params = params
        self._prompt_token_ids = prompt_token_ids
        self.temperature = params.temperature or 0.0
        self._barred = list(ends) if params.min_tokens else []
        self._drawn = 0
        self._repetition_penalty = params.repetition_penalty or 1.0
        self._random: random.Random | None = None  # None: greedy
        self._number: float | None = None
        if self.temperature:
            seed = secrets.randbits(63) if params.seed is None else params.seed
            text = f"{seed} {index} {' '.join(map(str, prompt_token_ids))}"
            # torch's CPU generator keeps 32 bits of its seed; this one keeps them all.
            self._random = random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest()))
        self._counts: dict[int, int] | None = {} if params.presence_penalty or params.frequency_penalty else None
        # Made with the first logits, then changed by one element per token.
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None  # ids, what is added to each
        self._seen: torch.Tensor | None = None  # [vocab] bool: in the prompt or the output
        self._penalty: torch.Tensor | None = None  # [vocab] presence and frequency penalty as of now

    @property
    def greedy(self) -> bool:
        return self._random is None

    @property
    def penalizes(self) -> bool:
        """Whether there is a bias or a penalty, or a token that must not be drawn now."""
        changed = bool(self.params.logit_bias) or self._repetition_penalty != 1 or self._counts is not None
        return changed or bool(self._barred)

    @property
    def number(self) -> float:
        """The uniform number of the next draw, from 0 to 1 - 2^-53. The same one until `record` is called."""
        assert self._random is not None
        if self._number is None:
            self._number = self._random.random()
        return self._number

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits with bias and penalties, float64 [vocab].

        ``logits``: float32 or float64 [vocab]; not changed.
        """
        bias, repetition = self.params.logit_bias, self._repetition_penalty
        scores = logits.to(torch.float64, copy=True)
        if bias:
            if self._bias is None:
                ids = send(list(bias), torch.long, scores.device)
                self._bias = ids, send(list(bias.values()), scores.dtype, scores.device)
            scores.index_add_(0, *self._bias)
        if repetition != 1:
            if self._seen is None:
                self._seen = torch.zeros_like(scores, dtype=torch.bool)
                self._seen.index_fill_(0, send(self._prompt_token_ids, torch.long, scores.device), True)
            # A penalty near 0 or infinity must neither make an id impossible nor make several ids infinite.
            limit = torch.finfo(scores.dtype).max
            changed = torch.where(scores > 0, scores / repetition, scores * repetition).clamp_(-limit, limit)
            scores = torch.where(self._seen & (scores > -torch.inf), changed, scores)
        if self._counts is not None:
            if self._penalty is None:
                self._penalty = torch.zeros_like(scores)
            scores -= self._penalty
        if self._barred:
            scores.index_fill_(0, send(self._barred, torch.long, scores.device), -torch.inf)
        return scores

    def record(self, token: int) -> None:
        """The token has been chosen: it counts for penalties, and the next draw gets another number."""
        self._number = None
        self._drawn += 1
        if self._drawn >= self.params.min_tokens:
            self._barred = []
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None and self._penalty is not None:
            count = self._counts[token] = self._counts.get(token, 0) + 1
            self._penalty[token] = self.params.presence_penalty + self.params.frequency_penalty * count
