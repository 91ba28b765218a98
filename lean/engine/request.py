"""A request: its prompt and parameters, its progress, and its outputs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy
import torch

from lean.errors import RequestError, shown
from lean.sampling_params import SamplingParams
from lean.text.detokenizer import Detokenizer
from lean.text.stop_strings import StopStrings

if TYPE_CHECKING:
    from lean.cache.chain import Chain
    from lean.cache.disk_queues import Reading
    from lean.engine.logprobs import TokenLogprob
    from lean.engine.sampler import Sampler

FinishReason = Literal["stop", "length", "abort", "error"]


def read_token_ids(given: Any, vocab_size: int) -> list[int]:
    """Token ids as a caller gives them, as a list of Python's integers.

    Args:
        given: a sequence of integers (list, tuple, range, ``array.array``; numpy's integers count as integers), or a
            numpy array or torch tensor of integers with one dimension.
        vocab_size: rows of the embedding.

    Raises:
        RequestError: text, bytes, a set, a generator or another object; an array of more dimensions; an entry that is
            no integer (a bool, a float, text, a list, a tensor), or not from 0 to ``vocab_size`` - 1.
    """
    kind = type(given).__name__
    if isinstance(given, (numpy.ndarray, torch.Tensor)):
        if given.ndim != 1:
            raise RequestError(f"a prompt is one list of token ids, not a {kind} with {given.ndim} dimensions")
        ids = given.tolist()
    elif isinstance(given, (str, bytes, bytearray, memoryview)) or not isinstance(given, (Sequence, array)):
        raise RequestError(f"a prompt is text or a list of token ids, not {kind}")
    else:
        ids = [int(token) if isinstance(token, numpy.integer) else token for token in given]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise RequestError(f"token id {shown(token, 40)}: must be an integer from 0 to {vocab_size - 1}")
    return ids


@dataclass(eq=False)
class Request:
    """One sequence in the engine. Only the engine and the scheduler change it.

    Attributes:
        seq_id: the id of this sequence, in order of arrival.
        request_id: the id that the caller knows; ``index`` counts the n sequences of one request.
        sampler, detokenizer, stop_strings: make tokens and text; None for a scoring request.
        keep_hidden: for scoring: return the last hidden states of the rows, sample nothing.
        num_hidden: rows that need not be delivered, or have been. A preempted request does not deliver them again.
        siblings: the other sequences of the request; they start as forks when the prompt has been computed.
        cache_salt: only requests with the same salt share K/V; None: those without one.
        chain: the hashes of the sequence's blocks. branch: where a tail should be kept, see `lean.cache.prefix`.
        state_kept_at: tokens of the answer's last block boundary where its states were kept; 0: none.
        reading: its prefix is being read from the disk. asked_disk: the disk has been asked for its prefix.
        num_computed_tokens: tokens whose K/V are in the cache.
        num_cached_tokens: how many of these were found in the cache when the request first ran; None before.
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
    cache_salt: str | None = None
    chain: Chain | None = None
    branch: int = 0
    state_kept_at: int = 0
    reading: Reading | None = None
    asked_disk: bool = False
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    num_hidden: int = 0
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

    @property
    def most_cached_tokens(self) -> int:
        """How many leading tokens may be read from the cache: rows that are still wanted must be computed."""
        if self.keep_hidden:
            return min(self.num_hidden, self.num_tokens - 1)
        if self.params.prompt_logprobs is not None:
            return max(0, len(self.prompt_logprobs) - 1)
        return self.num_tokens - 1

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
        cached_tokens: prompt tokens whose K/V were found in the prefix cache.
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
