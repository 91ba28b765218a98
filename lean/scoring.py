"""Log-probabilities of given tokens, read through the cache: the base of every figure that lean prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from lean.engine.request import check_token_ids
from lean.errors import EMPTY_PROMPT, RequestError

if TYPE_CHECKING:
    from lean.llm import LLM


class TokenScores(NamedTuple):
    """Of every token of a sequence but the first, given those before it.

    logprobs: float32 [n - 1] (float64 for a float64 model), natural logarithm. greedy: bool [n - 1], whether it was the
    likeliest token (the lowest id among equals). Both on the CPU. Rows that pad the vocabulary belong to the
    distribution, as in transformers, but are never the likeliest.
    """

    logprobs: torch.Tensor
    greedy: torch.Tensor


@torch.inference_mode()
def score_rows(llm: LLM, hidden: torch.Tensor, targets: torch.Tensor) -> TokenScores:
    """Rows [n, hidden_size] against the tokens [n] that they should predict.

    A lone row is doubled on the way: several threads would share its sum and round it otherwise than in company.
    """
    logits = llm.logits(hidden if len(hidden) > 1 else hidden.expand(2, -1))
    logprobs = logits.gather(1, targets[:, None].expand(len(logits), 1))[:, 0] - logits.logsumexp(-1)
    greedy = logits[:, : llm.model.token_limit].argmax(-1) == targets
    return TokenScores(logprobs[: len(targets)].cpu(), greedy[: len(targets)].cpu())


def score_many(
    llm: LLM, sequences: Sequence[Sequence[int]], progress: Callable[[int], None] | None = None
) -> Iterator[tuple[int, TokenScores]]:
    """Score sequences of token ids together, as many at once as the engine runs.

    Logits exist for ``model.logit_rows`` rows at once. The last token of a sequence is a target only, and is not run.
    ``progress`` is told how many more tokens have been scored.

    Yields:
        (index of the sequence, its scores), as sequences end; a deterministic engine gives the same bits whatever runs
        beside a sequence.

    Raises:
        RequestError: a sequence cannot be served. EngineError: the model computes non-finite numbers.
    """
    sequences = [list(sequence) for sequence in sequences]
    dtype = torch.float64 if llm.model.info.dtype is torch.float64 else torch.float32
    # Results made beforehand: small ones made between the slices would keep malloc from reusing their memory.
    scores = [
        TokenScores(torch.empty(max(0, len(ids) - 1), dtype=dtype), torch.empty(max(0, len(ids) - 1), dtype=torch.bool))
        for ids in sequences
    ]
    running = [index for index, ids in enumerate(sequences) if len(ids) > 1]
    for ids in sequences:
        if not ids:
            raise RequestError(EMPTY_PROMPT)
        check_token_ids(ids[-1:], llm.model.vocab_size)
    for index, ids in enumerate(sequences):
        if len(ids) == 1:
            yield index, scores[index]
    for run, position, hidden in llm.hidden_states_of([sequences[index][:-1] for index in running]):
        index = running[run]
        targets = torch.tensor(sequences[index][position + 1 : position + 1 + hidden.shape[0]], device=hidden.device)
        for part in llm.model.logit_slices(hidden.shape[0]):
            found = score_rows(llm, hidden[part], targets[part])
            place = slice(position + part.start, position + part.stop)
            scores[index].logprobs[place], scores[index].greedy[place] = found
        if progress is not None:
            progress(len(targets))
        if position + hidden.shape[0] == len(sequences[index]) - 1:
            yield index, scores[index]


def score_workspace_bytes(llm: LLM) -> int:
    """Memory that `LLM.score` needs beside weights, pools and activations: attention tiles and logit slices.

    A slice of logits exists in the model's dtype, in float32 and once more inside the reduction.
    """
    from lean.kernels.reference import workspace_bytes

    widest = max(llm.model.info.layers, key=lambda layer: layer.num_q_heads * (layer.k_dim + layer.v_dim))
    dtype = llm.model.info.dtype
    itemsize = max(4, dtype.itemsize)  # what attention and logits compute in
    tiles = workspace_bytes(widest.num_q_heads, widest.num_kv_heads, widest.k_dim, widest.v_dim, itemsize)
    return tiles + llm.model.logit_rows * llm.model.vocab_size * (dtype.itemsize + 2 * itemsize)
