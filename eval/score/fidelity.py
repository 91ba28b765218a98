"""Fidelity of a cache: KL divergence from the exact cache, and agreement with it, on the same tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from lean.config import EngineConfig
from lean.eval.decoding import greedy, raise_failed
from lean.eval.score.perplexity import Interrupted, Part, ScoredText, exp, mean_and_stderr
from lean.llm import LLM
from lean.model.load import LoadedModel
from lean.scoring import hidden_states_of

_TOP = 5


def full_config(config: EngineConfig) -> EngineConfig:
    """The exact cache without a window: the reference that also shows the cost of a window."""
    return replace(config.exact(), window=None, sinks=None, num_blocks=None, kv_memory=None)


def floor_config(config: EngineConfig) -> EngineConfig:
    """The exact cache at another chunk size: it differs by rounding alone, the floor for every format."""
    return replace(config.exact(), prefill_chunk=max(1, config.chunk_tokens // 4))


@dataclass(frozen=True)
class Reference:
    """The exact cache's last hidden states of a text, per part [tokens, hidden_size]. Logits are computed from them."""

    llm: LLM
    scored: ScoredText
    hidden: list[torch.Tensor]


def _rows(part: Part) -> int:
    """Rows of a part that are run: all but the last token, which is only a target."""
    return len(part.token_ids) - 1


@torch.inference_mode()
def read_reference(llm: LLM, scored: ScoredText, progress: Callable[[int], None] | None = None) -> Reference:
    """Run a text through the exact cache."""
    parts = scored.parts
    hidden: list[torch.Tensor] = [torch.empty(0)] * len(parts)
    for index, position, rows in hidden_states_of(llm.engine, [part.token_ids[:-1] for part in parts]):
        if not position:
            hidden[index] = rows.new_empty(_rows(parts[index]), rows.shape[1])
        hidden[index][position : position + len(rows)] = rows
        if progress is not None:
            progress(len(rows))
    return Reference(llm, scored, hidden)


@dataclass(frozen=True)
class Fidelity:
    """A candidate cache compared with the exact one over the scored tokens of a text.

    Standard errors assume independent tokens.

    Attributes:
        kld_*: KL(exact || candidate) of the next-token distributions in nats: mean, median, 99th and 99.9th percentile.
        top1: share of tokens with the same most likely prediction. top5: mean share of the exact cache's five most
            likely tokens that are among the candidate's five.
        ppl, ppl_exact: token perplexity with the candidate and with the exact cache.
        nll_delta: mean NLL difference, candidate minus exact, in nats per token. Both caches read the same tokens, so
            this difference is far more certain than either perplexity.
        partial: the comparison was interrupted, and some tokens are missing.
    """

    tokens_scored: int
    kld_mean: float
    kld_stderr: float
    kld_median: float
    kld_p99: float
    kld_p999: float
    top1: float
    top1_stderr: float
    top5: float
    top5_stderr: float
    ppl: float | None
    ppl_exact: float | None
    nll_delta: float
    nll_delta_stderr: float
    partial: bool = False


@torch.inference_mode()
def compare(reference: Reference, candidate: LLM, progress: Callable[[int], None] | None = None) -> Fidelity:
    """Score the reference's text through another cache of the same model.

    ``progress`` gets the number of tokens of each chunk that was read.

    Raises:
        Interrupted: by KeyboardInterrupt, after some tokens were compared; holds their Fidelity.
        EngineError: non-finite numbers.
    """
    parts = reference.scored.parts
    columns = [torch.empty(5, _rows(part), dtype=torch.float64) for part in parts]
    done = [0] * len(parts)
    try:
        for index, end in _compare_parts(columns, reference, candidate, progress):
            done[index] = end
    except KeyboardInterrupt:
        if any(end >= part.first for end, part in zip(done, parts)):
            raise Interrupted(replace(_fidelity(columns, parts, done), partial=True)) from None
        raise
    return _fidelity(columns, parts, done)


def _fidelity(columns: list[torch.Tensor], parts: Sequence[Part], done: list[int]) -> Fidelity:
    """From the columns of `_compare_parts`, of which ``done`` rows per part are filled."""
    scored = [found[:, part.first - 1 : end] for found, part, end in zip(columns, parts, done)]
    kld, top1, top5, exact, nll = torch.cat(scored, dim=1)
    kld_mean, kld_stderr = mean_and_stderr(kld)
    top1_mean, top1_stderr = mean_and_stderr(top1)
    top5_mean, top5_stderr = mean_and_stderr(top5)
    delta, delta_stderr = mean_and_stderr(nll - exact)
    return Fidelity(
        tokens_scored=len(kld),
        kld_mean=kld_mean,
        kld_stderr=kld_stderr,
        kld_median=float(kld.median()),
        kld_p99=float(kld.quantile(0.99)),
        kld_p999=float(kld.quantile(0.999)),
        top1=top1_mean,
        top1_stderr=top1_stderr,
        top5=top5_mean,
        top5_stderr=top5_stderr,
        ppl=exp(float(nll.mean())),
        ppl_exact=exp(float(exact.mean())),
        nll_delta=delta,
        nll_delta_stderr=delta_stderr,
    )


def _compare_parts(
    columns: list[torch.Tensor], reference: Reference, candidate: LLM, progress: Callable[[int], None] | None
) -> Iterator[tuple[int, int]]:
    """Fill ``columns``, float64 [5, rows] per part: KLD, top-1, top-5, NLL exact and NLL candidate of every row.

    Yields:
        (index of the part, number of its rows so far), after each chunk.
    """
    parts = reference.scored.parts
    for index, position, hidden in hidden_states_of(candidate.engine, [part.token_ids[:-1] for part in parts]):
        targets = torch.tensor(parts[index].token_ids[position + 1 :][: len(hidden)], device=hidden.device)
        for part in candidate.model.logit_slices(len(hidden)):
            place = slice(position + part.start, position + part.stop)
            columns[index][:, place] = _compare_rows(
                reference.llm.logits(reference.hidden[index][place]),
                candidate.logits(hidden[part]),
                targets[part],
                candidate.model.token_limit,
            )
        if progress is not None:
            progress(len(hidden))
        yield index, position + len(hidden)


def _compare_rows(exact: torch.Tensor, found: torch.Tensor, targets: torch.Tensor, token_limit: int) -> torch.Tensor:
    """Logits [rows, vocab] of both caches -> KLD, top-1, top-5, NLL exact, NLL candidate: float64 [5, rows] on the CPU.

    Ids from ``token_limit`` on pad the vocabulary: they belong to the distribution, but not to the most likely tokens.
    """
    p, q = exact.log_softmax(-1), found.log_softmax(-1)
    kld = (p.exp() * (p - q)).sum(-1)
    ours, theirs = (x[:, :token_limit].topk(min(_TOP, token_limit)).indices for x in (q, p))
    same = (ours[:, :, None] == theirs[:, None]).any(1).double().mean(-1)
    nll = [-x.gather(1, targets[:, None])[:, 0] for x in (p, q)]
    agree = ours[:, 0] == theirs[:, 0]
    return torch.stack([kld.double(), agree.double(), same, *(x.double() for x in nll)]).cpu()


@dataclass(frozen=True)
class Divergence:
    """Number of equal tokens at the beginning of greedy continuations from two caches.

    mean, stderr: over the prompts; an identical continuation counts ``max_tokens``. identical: prompts whose
    continuations are equal to the end.
    """

    mean: float
    stderr: float
    identical: int
    prompts: int
    max_tokens: int


def greedy_continuations(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Token ids of greedy continuations, ``max_tokens`` for each prompt. Raises EngineError where a request fails."""
    outputs = llm.generate(prompts, greedy(max_tokens))
    raise_failed(outputs)
    return [output.token_ids for output in outputs]


def divergence(exact: list[list[int]], found: list[list[int]]) -> Divergence:
    """Compare the greedy continuations from two caches, prompt by prompt."""
    lengths = [
        next((step for step, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), len(a)) for a, b in zip(exact, found)
    ]
    longest = max(map(len, exact))
    mean, stderr = mean_and_stderr(torch.tensor(lengths))
    return Divergence(mean, stderr, sum(length == longest for length in lengths), len(lengths), longest)


def prompts_of(token_ids: Sequence[int], count: int, length: int) -> list[list[int]]:
    """``count`` prompts of ``length`` tokens, spread evenly over a text; a short text gives fewer prompts."""
    room = max(0, len(token_ids) - length)
    starts = sorted({round(room * index / max(1, count - 1)) for index in range(count)})
    return [list(token_ids[start : start + length]) for start in starts]


def floor(reference: Reference, model: LoadedModel, config: EngineConfig) -> Fidelity:
    """The effect of rounding alone: the exact cache at a quarter of the chunk size."""
    return compare(reference, LLM(model, floor_config(config)))
