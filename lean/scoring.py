"""Log-probabilities of given tokens, read through the cache: the base of every accuracy figure that lean prints."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from lean.engine.engine import Engine
from lean.engine.logprobs import log_probabilities
from lean.engine.request import read_token_ids
from lean.errors import EMPTY_PROMPT, EngineError, RequestError
from lean.kernels.reference import workspace_bytes
from lean.model.load import LoadedModel


class TokenScores(NamedTuple):
    """Scores of every token of a sequence but the first, given the tokens before it. On the CPU.

    logprobs: float32 [n - 1] (float64 for a float64 model), natural logarithm. greedy: bool [n - 1], whether the token
    was the most likely one (the lowest id among equals). Ids that pad the vocabulary belong to the distribution, as in
    transformers, but are never the most likely.
    """

    logprobs: torch.Tensor
    greedy: torch.Tensor


def hidden_states_of(
    engine: Engine, sequences: Sequence[Sequence[int]], first_rows: Sequence[int] | None = None
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """The last hidden states of sequences of token ids, which run together as far as they fit.

    Args:
        first_rows: for each sequence the position of the first row that is wanted; what comes before it may be read
            from the prefix cache. None: all rows are wanted and computed.

    Yields:
        (index of the sequence, position of the first row, hidden [rows, hidden_size]); the rows of one sequence come
        in order.

    Raises:
        RequestError: a sequence cannot be served. EngineError: the model computes non-finite numbers.
    """
    request_ids: list[int] = []
    try:
        first_rows = first_rows or [0] * len(sequences)
        for sequence, first in zip(sequences, first_rows, strict=True):
            request_ids.append(engine.add(sequence, collects=True, keep_hidden=True, hidden_from=first))
        waiting = {request_id: (index, first) for index, (request_id, first) in enumerate(zip(request_ids, first_rows))}
        while waiting:
            for request_id, (index, position) in list(waiting.items()):
                outputs, ended = engine.collect(request_id)
                for output in outputs:
                    if output.hidden is not None:
                        yield index, position, output.hidden
                        position += output.hidden.shape[0]
                        waiting[request_id] = index, position
                    if output.finish_reason in ("error", "abort"):
                        raise EngineError(output.error or "the request was aborted")
                if ended:
                    del waiting[request_id]
                    engine.forget(request_id)
            if waiting:
                engine.step()
    finally:
        for request_id in request_ids:
            engine.forget(request_id)


@torch.inference_mode()
def score_rows(engine: Engine, hidden: torch.Tensor, targets: torch.Tensor) -> TokenScores:
    """Score rows [n, hidden_size] against the tokens [n] that they should predict.

    A single row is doubled: the product of one row is shared by threads and would round differently.
    """
    logits = engine.runner.logits(hidden if len(hidden) > 1 else hidden.expand(2, -1))
    with engine.runner.row_bits():
        logprobs = log_probabilities(logits, targets[:, None].expand(len(logits), 1))[:, 0]
    greedy = logits[:, : engine.model.token_limit].argmax(-1) == targets
    return TokenScores(logprobs[: len(targets)].cpu(), greedy[: len(targets)].cpu())


def score_many(
    engine: Engine, sequences: Sequence[Sequence[int]], progress: Callable[[int], None] | None = None
) -> Iterator[tuple[int, TokenScores]]:
    """Score sequences of token ids together, as many at once as the engine runs.

    ``progress`` is called with the number of tokens scored since its last call.

    Yields:
        (index of the sequence, its scores), in the order in which sequences end. In deterministic mode the other
        sequences do not change a sequence's bits.

    Raises:
        RequestError: a sequence cannot be served. EngineError: the model computes non-finite numbers.
    """
    sequences = [read_token_ids(sequence, engine.model.vocab_size) for sequence in sequences]
    scores = empty_scores(engine, sequences)
    for ids in sequences:
        if not ids:
            raise RequestError(EMPTY_PROMPT)
    for index, ids in enumerate(sequences):
        if len(ids) == 1:
            yield index, scores[index]
    for index, scored in score_into(scores, engine, sequences, progress):
        if scored == len(sequences[index]) - 1:
            yield index, scores[index]


def empty_scores(engine: Engine, sequences: Sequence[Sequence[int]]) -> list[TokenScores]:
    """Room for the scores of sequences.

    It is made beforehand: small results made between the slices would keep malloc from reusing their memory.
    """
    dtype = torch.float64 if engine.model.info.dtype is torch.float64 else torch.float32
    sizes = [max(0, len(ids) - 1) for ids in sequences]
    return [TokenScores(torch.empty(size, dtype=dtype), torch.empty(size, dtype=torch.bool)) for size in sizes]


def score_into(
    scores: list[TokenScores],
    engine: Engine,
    sequences: Sequence[Sequence[int]],
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, int]]:
    """Score sequences into ``scores``, chunk by chunk; see `score_many`. Sequences of one token have no scores.

    Logits exist for ``model.logit_rows`` rows at once. The last token of a sequence is a target only, and is not run.

    Yields:
        (index of the sequence, number of its scores so far), after each chunk.
    """
    sequences = [read_token_ids(sequence, engine.model.vocab_size) for sequence in sequences]
    running = [index for index, ids in enumerate(sequences) if len(ids) > 1]
    for run, position, hidden in hidden_states_of(engine, [sequences[index][:-1] for index in running]):
        index = running[run]
        targets = torch.tensor(sequences[index][position + 1 : position + 1 + hidden.shape[0]], device=hidden.device)
        for part in engine.model.logit_slices(hidden.shape[0]):
            found = score_rows(engine, hidden[part], targets[part])
            place = slice(position + part.start, position + part.stop)
            scores[index].logprobs[place], scores[index].greedy[place] = found
        if progress is not None:
            progress(len(targets))
        yield index, position + hidden.shape[0]


def score_workspace_bytes(model: LoadedModel) -> int:
    """Memory that `LLM.score` needs beside weights, pools and activations: attention tiles and logit slices.

    A slice of logits exists in the model's dtype, in float32 and once more inside the reduction.
    """
    widest = max(model.info.layers, key=lambda layer: layer.num_q_heads * (layer.k_dim + layer.v_dim))
    dtype = model.info.dtype
    itemsize = max(4, dtype.itemsize)  # what attention and logits compute in
    tiles = workspace_bytes(widest.num_q_heads, widest.num_kv_heads, widest.k_dim, widest.v_dim, itemsize)
    return tiles + model.logit_rows * model.vocab_size * (dtype.itemsize + 2 * itemsize)
