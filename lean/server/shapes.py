"""The JSON of answers: usage, log-probabilities, choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lean.engine.logprobs import TokenLogprob
    from lean.text.vocabulary import Vocabulary


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def chat_logprobs(entries: Sequence[TokenLogprob], vocabulary: Vocabulary) -> dict[str, Any]:
    """``logprobs`` of a chat's choice."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        written = list(vocabulary.bytes_of(token_id))
        return {"token": vocabulary.text_of(token_id), "logprob": logprob, "bytes": written}

    return {
        "content": [
            {**entry(one.token_id, one.logprob), "top_logprobs": [entry(*pair) for pair in one.top]} for one in entries
        ],
        "refusal": None,
    }


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprob | None],
    top: int,
    vocabulary: Vocabulary,
    start: int = 0,
) -> dict[str, list[Any]]:
    """``logprobs`` of a completion's choice.

    Args:
        entries: one per token; None for a prompt's first token.
        top: most likely tokens to report. The token itself is always among them. Where two are the same text, the more
            likely one is reported.
        start: characters of the text before these tokens.
    """
    tops: list[dict[str, float] | None] = []
    for one in entries:
        if one is None:
            tops.append(None)
            continue
        found: dict[str, float] = {}
        for token_id, logprob in (*one.top[:top], (one.token_id, one.logprob)):
            found.setdefault(vocabulary.text_of(token_id), logprob)
        tops.append(found)
    return {
        "tokens": [vocabulary.text_of(token_id) for token_id in token_ids],
        "token_logprobs": [None if one is None else one.logprob for one in entries],
        "top_logprobs": tops,
        "text_offset": vocabulary.offsets(token_ids, start),
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None], top: int, vocabulary: Vocabulary
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's ``prompt_logprobs``: by token id; the rank is null where the token is not among the most likely ones."""

    def of(one: TokenLogprob) -> dict[str, dict[str, Any]]:
        rows = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(one.top[:top], 1)}
        rows.setdefault(one.token_id, (one.logprob, None))  # type: ignore[arg-type]
        return {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": vocabulary.text_of(token_id)}
            for token_id, (logprob, rank) in rows.items()
        }

    return [None if one is None else of(one) for one in entries]
