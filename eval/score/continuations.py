"""Log-probabilities of continuations, many at once. The tokens of the contexts are run but not scored."""

from collections.abc import Iterator, Sequence

import torch

from lean.engine.request import read_token_ids
from lean.errors import EMPTY_PROMPT, EngineError, LeanError, RequestError
from lean.llm import LLM
from lean.scoring import TokenScores, hidden_states_of, score_rows

SEQUENCES_AT_ONCE = 1024  # given to the engine together; it runs up to max_num_seqs of them and queues the rest


def score_continuations(llm: LLM, sequences: Sequence[tuple[Sequence[int], int]]) -> Iterator[tuple[int, float, bool]]:
    """Score the ends of sequences through the cache, in batches.

    Sequences that differ in their last token only are run once: most answers of multiple-choice items are one token.
    Contexts that begin alike are read from the prefix cache.

    Args:
        sequences: (token ids, number of tokens at the end to score: from 1 to all but the first).

    Yields:
        (index of the sequence, log-probability of its end, whether greedy decoding gives this end), longest sequences
        first. A deterministic engine gives the same bits in every batch.

    Raises:
        RequestError: a sequence cannot be served. EngineError: the model computes non-finite numbers.
    """
    families: dict[tuple[int, ...], list[int]] = {}  # all tokens but the last -> the sequences that begin with them
    for index, (ids, count) in enumerate(sequences):
        if not ids:
            raise RequestError(EMPTY_PROMPT)
        if not 1 <= count < len(ids):
            raise RequestError(f"cannot score {count} of {len(ids)} tokens: at least 1, and never the first token")
        read_token_ids(ids[-1:], llm.model.vocab_size)
        families.setdefault(tuple(ids[:-1]), []).append(index)
    prefixes = sorted(families, key=len, reverse=True)
    for start in range(0, len(prefixes), SEQUENCES_AT_ONCE):
        part = prefixes[start : start + SEQUENCES_AT_ONCE]
        inner: dict[int, list[TokenScores]] = {run: [] for run in range(len(part))}
        # The rows that predict the first targets.
        first = [len(prefix) - max(sequences[index][1] for index in families[prefix]) for prefix in part]
        for run, position, rows in hidden_states_of(llm.engine, part, first):
            prefix, family = part[run], families[part[run]]
            targets = prefix[position + 1 : position + len(rows) + 1]
            inner[run].append(_scores(llm, rows[: len(targets)], targets))
            if position + len(rows) < len(prefix):
                continue
            logprobs, greedy = (torch.cat(found) for found in zip(*inner.pop(run)))
            last = list(dict.fromkeys(sequences[index][0][-1] for index in family))
            final = _scores(llm, rows[-1:].expand(len(last), -1), last)
            for index in family:
                ids, count = sequences[index]
                place, begin = last.index(ids[-1]), len(logprobs) - count + 1
                logprob = float(logprobs[begin:].double().sum() + final.logprobs[place].double())
                yield index, logprob, bool(greedy[begin:].all() and final.greedy[place])


def score_each(
    llm: LLM, sequences: Sequence[tuple[Sequence[int], int]]
) -> Iterator[tuple[int, tuple[float, bool] | LeanError]]:
    """As `score_continuations`, but the error of a sequence is yielded in the place of its score.

    After an error the sequences that have no score yet run one by one.
    """
    rest = dict.fromkeys(range(len(sequences)))
    try:
        for index, logprob, greedy in score_continuations(llm, sequences):
            del rest[index]
            yield index, (logprob, greedy)
    except (RequestError, EngineError) as error:
        if len(sequences) == 1:
            yield 0, error
            return
        for index in rest:
            yield index, next(score_each(llm, [sequences[index]]))[1]


@torch.inference_mode()
def _scores(llm: LLM, rows: torch.Tensor, targets: Sequence[int]) -> TokenScores:
    """Rows [n, hidden_size] against the tokens [n] that they should predict, in slices."""
    wanted = torch.tensor(list(targets), dtype=torch.long, device=rows.device)
    parts = [score_rows(llm.engine, rows[part], wanted[part]) for part in llm.model.logit_slices(len(wanted))]
    if not parts:
        return TokenScores(torch.empty(0), torch.empty(0, dtype=torch.bool))
    logprobs, greedy = (torch.cat(part) for part in zip(*parts))
    return TokenScores(logprobs, greedy)
