"""Perplexity of a text, every token scored once through the cache.

The text is cut into parts of at most ``context`` tokens. The first part ends at token ``context``, every further part
``stride`` tokens later. A part scores the tokens after the end of the part before; they also see the tokens in front of
them, at least context - stride. This is the strided loop of https://huggingface.co/docs/transformers/perplexity. With
stride = context no token would be in front, so the last token of the part before is put there, as in the rolling
windows of lm-evaluation-harness.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

import torch

from lean.errors import UserError
from lean.eval.corpus import Corpus
from lean.llm import LLM
from lean.scoring import empty_scores, score_into

BosRule = Literal["first", "every", "none"]
BOS_RULES: tuple[str, ...] = get_args(BosRule)
_MOST_CHARACTERS_PER_TOKEN = 32  # a text is cut to this before it is tokenized
_CURVE_BUCKETS = 24


class Part(NamedTuple):
    """One sequence to run. ``token_ids`` are scored from index ``first`` on, which is index ``start`` of the text."""

    token_ids: list[int]
    first: int
    start: int


@dataclass(frozen=True)
class ScoredText:
    """The scored beginning of a text: its characters, its token ids, and the parts that are run."""

    corpus: Corpus
    text: str
    token_ids: list[int]
    parts: list[Part]
    context: int
    stride: int
    bos: BosRule


def cut(
    token_ids: Sequence[int], context: int, stride: int, bos: BosRule = "none", bos_token_id: int | None = None
) -> list[Part]:
    """Cut a text into parts, as described above.

    ``bos``: put ``bos_token_id`` in front of the first part, of every part, or of no part. The BOS is never scored.
    Without a BOS the first token of the text is not scored either.
    """
    ids, parts = list(token_ids), []
    done, end = 0, context
    while done < len(ids):
        begin = max(0, min(end - context, done - 1))
        front = [bos_token_id] if bos_token_id is not None and (bos == "every" or (bos == "first" and not done)) else []
        if front and begin == done - 1:
            begin = done  # the BOS takes the place of the token before
        first = len(front) + done - begin
        parts.append(Part(front + ids[begin:end], max(1, first), done if first else done + 1))
        done, end = end, end + stride
    return [part for part in parts if part.first < len(part.token_ids)]


def prepare(
    llm: LLM,
    corpus: Corpus,
    *,
    max_tokens: int | None = None,
    context: int | None = None,
    stride: int | None = None,
    bos: str = "first",
) -> ScoredText:
    """Tokenize a text and cut it for an engine. Raises UserError for impossible numbers.

    Args:
        max_tokens: tokens to use from the beginning of the text; None: all.
        context: largest number of tokens that a token is predicted from; None: the engine's max_model_len.
        stride: tokens scored per part; None: ``context``.
        bos: see `cut`; "first" is the rule of lm-evaluation-harness. The token is the tokenizer's BOS, else its EOS.
    """
    for name, value in (("max-tokens", max_tokens), ("context", context), ("stride", stride)):
        if value is not None and value < 1:
            raise UserError(f"{name} {value} must be at least 1")
    if bos not in BOS_RULES:
        raise UserError(f"bos {bos!r} must be one of {', '.join(BOS_RULES)}")
    limit = llm.size.max_model_len
    if context is not None and context > limit:
        fits = llm.engine.longer(context)
        raise UserError(f"context {context:,} exceeds max-model-len {limit:,}: lower --context; {fits}")
    tokenizer = llm.model.tokenizer
    text = corpus.text if max_tokens is None else corpus.text[: _MOST_CHARACTERS_PER_TOKEN * max_tokens]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast, verbose=False)
    ids = encoded["input_ids"]
    if max_tokens is not None and len(ids) > max_tokens:
        ids = ids[:max_tokens]
        end = encoded["offset_mapping"][max_tokens - 1][1] if tokenizer.is_fast else len(tokenizer.decode(ids))
        text = text[:end]
    bos_id = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    rule = cast(BosRule, bos if bos_id is not None else "none")
    context = context or limit
    stride = stride or context
    if stride > context:
        raise UserError(
            f"stride {stride} exceeds context {context}, so some tokens would not be scored: lower --stride"
        )
    context = min(context, len(ids))
    stride = min(stride, context)
    parts = cut(ids, context, stride, rule, bos_id)
    if not parts:
        raise UserError(f"{corpus.name} has {len(ids)} tokens, so there is nothing to score: give a longer text")
    return ScoredText(corpus, text, ids, parts, context, stride, rule)


class Interrupted(KeyboardInterrupt):
    """A measurement was interrupted. ``result``: what was measured until then, marked as partial."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


class Bucket(NamedTuple):
    """Mean NLL of the tokens that were predicted from ``start`` to ``end`` - 1 tokens."""

    start: int
    end: int
    nll: float
    nll_stderr: float
    tokens: int


def mean_and_stderr(values: torch.Tensor) -> tuple[float, float]:
    """Mean and its standard error, computed in float64, for independent values. The error of one value is 0."""
    values = values.double()
    error = values.std() / len(values) ** 0.5 if len(values) > 1 else torch.tensor(0.0)
    return float(values.mean()), float(error)


@dataclass(frozen=True)
class Perplexity:
    """NLL in nats of the scored tokens of a text, in order.

    nll: float64 [tokens]. seen: int64 [tokens], the number of tokens before each one in its part. partial: the scoring
    was interrupted, and some tokens are missing; nothing is then known of words and bytes.
    """

    scored: ScoredText
    nll: torch.Tensor
    seen: torch.Tensor
    partial: bool = False

    def curve(self) -> list[Bucket]:
        """NLL by the number of tokens seen, in buckets of equal width. It shows drift and the edge of a window."""
        longest = int(self.seen.max()) + 1
        width = -(-longest // _CURVE_BUCKETS)
        width = -(-width // 32) * 32 if width > 8 else width
        buckets = []
        for start in range(0, longest, width):
            inside = self.nll[(self.seen >= start) & (self.seen < start + width)]
            if len(inside):
                buckets.append(Bucket(start, start + width, *mean_and_stderr(inside), len(inside)))
        return buckets

    def report(self) -> dict[str, Any]:
        """Token, word and byte perplexity, and the rules behind them. Words are separated by white space."""
        nll, error = mean_and_stderr(self.nll)
        total, text = float(self.nll.sum()), self.scored.text
        words, size = len(re.split(r"\s+", text.strip())), len(text.encode("utf-8"))
        return {
            "partial": self.partial,
            "token_ppl": (ppl := exp(nll)),
            "token_ppl_stderr": ppl and ppl * error,
            "word_ppl": None if self.partial else exp(total / words),
            "byte_ppl": None if self.partial else exp(total / size),
            "bits_per_byte": None if self.partial else total / size / math.log(2),
            "nll": nll,
            "nll_stderr": error,
            "tokens_scored": len(self.nll),
            "words": words,
            "bytes": size,
            "sequences": len(self.scored.parts),
            "corpus": self.scored.corpus.report(),
            "context": self.scored.context,
            "stride": self.scored.stride,
            "bos": self.scored.bos,
        }


def exp(x: float) -> float | None:
    """e^x; None where it exceeds the range of a float, since JSON has no infinity."""
    return math.exp(x) if x < 700 else None


def in_words(ppl: float | None, digits: int = 4) -> str:
    """A perplexity as it is printed. ``ppl``: as from `exp`."""
    if ppl is None:
        return "above 1e304"
    return f"{ppl:.{digits}f}" if ppl < 1e5 else f"{ppl:.4g}"


def perplexity(llm: LLM, scored: ScoredText, progress: Callable[[int], None] | None = None) -> Perplexity:
    """Score a prepared text, its parts in batches.

    Raises:
        Interrupted: by KeyboardInterrupt, after some tokens were scored; holds their Perplexity.
        EngineError: non-finite numbers.
    """
    sequences = [part.token_ids for part in scored.parts]
    scores = empty_scores(llm.engine, sequences)
    done = [0] * len(sequences)

    def result(partial: bool) -> Perplexity:
        nll = [-own.logprobs[part.first - 1 : end].double() for own, part, end in zip(scores, scored.parts, done)]
        seen = [torch.arange(part.first, part.first + len(own)) for part, own in zip(scored.parts, nll)]
        return Perplexity(scored, torch.cat(nll), torch.cat(seen), partial)

    try:
        for index, end in score_into(scores, llm.engine, sequences, progress):
            done[index] = end
    except KeyboardInterrupt:
        if len((found := result(partial=True)).nll):
            raise Interrupted(found) from None
        raise
    return result(partial=False)
