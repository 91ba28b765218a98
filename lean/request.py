"""A request: what is asked for, how far it is, what came out."""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch

from lean.config import DEFAULT_MAX_TOKENS
from lean.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. None means: the model's own ``generation_config.json``, else greedy.

    Attributes:
        max_tokens: most tokens to generate; fewer where the model's length ends first.
        temperature: 0 is greedy (the lowest id wins ties).
        top_p: sample among the fewest tokens whose probability reaches top_p.
        top_k: sample among the k likeliest; 0 is off.
        seed: makes sampling repeatable; None draws one.
        ignore_eos: go on after end-of-sequence tokens.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def need(field: str, ok: bool, what: str) -> None:
            if not ok:
                raise RequestError(f"{field.replace('_', '-')} must be {what}, got {getattr(self, field)!r}")

        def whole(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        def real(value: object) -> bool:
            return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)

        t, p, k, seed = self.temperature, self.top_p, self.top_k, self.seed
        need("max_tokens", whole(self.max_tokens) and self.max_tokens >= 1, "a whole number of at least 1")
        need("temperature", t is None or (real(t) and t >= 0), "a finite number of at least 0")
        need("top_p", p is None or (real(p) and 0 < p <= 1), "above 0 and at most 1")
        need("top_k", k is None or (whole(k) and k >= 0), "a whole number of at least 0")
        need("seed", seed is None or (whole(seed) and 0 <= seed < 2**63), "a whole number from 0 to 2^63 - 1")


@dataclass(eq=False)
class Request:
    """One sequence on its way through the engine. Written by the engine and the scheduler only."""

    id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    generator: torch.Generator | None = None  # None: greedy
    keep_hidden: bool = False  # scoring: every row's last hidden state is wanted, nothing is sampled
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0  # tokens whose K/V are in the cache
    hidden: list[torch.Tensor] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_num_tokens(self) -> int:
        """Most tokens whose K/V this request can ever put into the cache: the last token drawn is never written."""
        return len(self.prompt_token_ids) + (0 if self.keep_hidden else self.params.max_tokens - 1)

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions start .. end of prompt and output together."""
        n = len(self.prompt_token_ids)
        if end <= n:
            return self.prompt_token_ids[start:end]
        return self.prompt_token_ids[start:n] + self.output_token_ids[max(0, start - n) : end - n]


@dataclass(frozen=True)
class RequestOutput:
    """What one step, or one whole generation, gave.

    ``text`` and ``token_ids`` are new since the last output when streaming, everything otherwise. End-of-sequence
    tokens are in ``token_ids`` but never in ``text``.
    """

    request_id: int
    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: FinishReason | None = None
    error: str | None = None
