"""A request: its prompt and parameters, its progress, and its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from lean.errors import RequestError, one_line
from lean.sampling_params import SamplingParams
from lean.text.detokenizer import Detokenizer
from lean.text.stop_strings import StopStrings

if TYPE_CHECKING:
    from lean.engine.sampler import Sampler, TokenLogprob

FinishReason = Literal["stop", "length", "abort", "error"]


def check_token_ids(token_ids: Sequence[object], vocab_size: int) -> None:
    """Raise RequestError unless every entry is an integer from 0 to ``vocab_size`` - 1, the rows of the embedding."""
    for token in token_ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise RequestError(f"token id {one_line(repr(token), 40)}: must be an integer from 0 to {vocab_size - 1}")


@dataclass(eq=False)
class Request:
    """One sequence in the engine. Only the engine and the scheduler change it.

    Attributes:
        seq_id: the id of this sequence, in order of arrival.
        request_id: the id that the caller knows; ``index`` counts the n sequences of one request.
        sampler, detokenizer, stop_strings: make tokens and text; None for a scoring request.
        keep_hidden: for scoring: return the last hidden state of every row, sample nothing.
        siblings: the other sequences of the request; they start as forks when the prompt has been computed.
        keep_cache: keep the K/V in the cache after the end, for a request that continues this one.
        continues: id of the kept sequence whose K/V this one may reuse.
        num_computed_tokens: tokens whose K/V are in the cache.
        num_cached_tokens: how many of these were in the cache before the request came.
        prompt_logprobs: of the prompt's tokens so far, None for the first; empty where not requested.
    """

    seq_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    request_id: int = -1
    index: int = 0
    sampler: Sampler | None = None
    detokenizer: Detokenizer | None = None
    stop_strings: StopStrings = field(default_factory=lambda: StopStrings(()))
    keep_hidden: bool = False
    siblings: list[Request] = field(default_factory=list)
    keep_cache: bool = False
    continues: int | None = None
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_hidden: int = 0  # rows delivered so far; a preempted request computes them again
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_num_tokens(self) -> int:
        """The most tokens that this request can write into the cache. The last drawn token is never written."""
        return len(self.prompt_token_ids) + (0 if self.keep_hidden else self.params.max_tokens - 1)

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids at positions start .. end - 1 of prompt and output together."""
        n = len(self.prompt_token_ids)
        if end <= n:
            return self.prompt_token_ids[start:end]
        return self.prompt_token_ids[start:n] + self.output_token_ids[max(0, start - n) : end - n]


@dataclass(frozen=True)
class RequestOutput:
    """What one step, or a whole generation, produced for one of a request's n sequences.

    When streaming, ``text``, ``token_ids`` and ``logprobs`` hold what is new since the last output, else everything.
    Tokens that end a sequence are in ``token_ids`` but not in ``text``. ``text`` ends before a stop string.

    Attributes:
        index: index of the sequence, 0 .. n - 1.
        cached_tokens: prompt tokens whose K/V were reused from an earlier request.
        logprobs: one per token id; None where not requested.
        prompt_logprobs: one per prompt token (None for the first token), in a sequence's first output; else None.
        hidden: new last hidden states [rows, hidden_size] of a scoring request; else None.
    """

    request_id: int
    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: FinishReason | None = None
    error: str | None = None
    index: int = 0
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    hidden: torch.Tensor | None = None
