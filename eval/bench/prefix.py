"""``lean bench prefix``: what the prefix cache saves, and what it costs where no two prompts begin alike."""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from lean.config import EngineConfig
from lean.errors import EngineError, UserError
from lean.eval.bench.model import bench_tokens, with_format
from lean.eval.bench.timing import BenchRow
from lean.eval.decoding import greedy, raise_failed
from lean.llm import LLM

COMMON, OWN, ANSWER = 2000, 50, 16  # tokens of the requests that begin alike: of all, of each, of its answer
_ROUNDS = 3
_APART, _APART_ROUNDS = 256, 8  # tokens of a prompt that begins like no other; turns of each engine


def room(context: int) -> int:
    """max_model_len of the engines."""
    return max(context, COMMON + OWN, _APART) + 2 * ANSWER


def bench_prefix(llm: LLM, kv_dtypes: Sequence[str], context: int, requests: int) -> Iterator[BenchRow]:
    """Four rows for each format; each compares an engine with the prefix cache to one without, or to its first time.

    Milliseconds to the first token of a prompt of ``context`` tokens that was computed before; of one whose blocks are
    read from files, which the system may have in its memory; of all answers to ``requests`` requests
    together that begin with the same tokens; of a prompt that begins like no other, and its answer.

    Raises:
        UserError: the benchmark's text is too short. EngineError: a prompt was not found again.
    """
    for kv_dtype in kv_dtypes:
        config = replace(with_format(llm.config, kv_dtype), max_num_seqs=8, prefix_tail_memory=None)
        cached, plain = (LLM(llm.model, replace(config, prefix_cache=on)) for on in (True, False))
        first, again = _again(cached, bench_tokens(llm, context))
        yield _row(llm, kv_dtype, "prompt again", context, again, "first time", first)
        yield _row(llm, kv_dtype, "prompt from disk", context, _from_disk(llm, config, context), "first time", first)
        if requests:
            prompts = _alike(llm, requests)
            plain.generate([prompts[0][:OWN]], greedy(2))  # a warm-up
            with_cache, without = _together(cached, prompts), _together(plain, prompts)
            name = f"{requests} requests that begin alike"
            yield _row(llm, kv_dtype, name, COMMON + OWN, [with_cache], "no prefix cache", [without])
        yield _row(llm, kv_dtype, "no common beginning", _APART, *_apart(cached, plain))


def _row(llm: LLM, kv_dtype: str, name: str, context: int, own: list[float], peer: str, other: list[float]) -> BenchRow:
    shape, (fast, slow) = llm.model.info.layers[0], map(statistics.median, (own, other))
    return BenchRow(
        name, kv_dtype, shape.num_q_heads, shape.num_kv_heads, shape.k_dim, context, torch.get_num_threads(),
        median_ms=1e3 * fast, spread=(max(own) - min(own)) / 2 / fast, peer=peer, peer_ms=1e3 * slow, ratio=slow / fast,
    )  # fmt: skip


def _first_token(llm: LLM, ids: list[int]) -> tuple[float, int]:
    """(seconds to the first token of the answer, tokens that were found in the cache)."""
    started, stream = time.perf_counter(), llm.stream(ids, greedy(2))
    output = next(stream)
    seconds = time.perf_counter() - started
    stream.close()
    return seconds, output.cached_tokens


def _again(llm: LLM, ids: list[int]) -> tuple[list[float], list[float]]:
    """Seconds to the first token of a prompt that is not in the cache, and that is."""
    first, again = [], []
    for turn in range(_ROUNDS + 1):
        llm.reset_prefix_cache()
        cold, warm = _first_token(llm, ids), _first_token(llm, ids)
        if cold[1] or not warm[1]:
            raise EngineError(f"of a prompt of {len(ids)} tokens {cold[1]} and then {warm[1]} were found in the cache")
        if turn:  # the first one is a warm-up
            first.append(cold[0])
            again.append(warm[0])
    return first, again


def _from_disk(llm: LLM, config: EngineConfig, context: int) -> list[float]:
    """Seconds to the first token of a prompt whose prefix is on disk and not in the arenas."""
    with tempfile.TemporaryDirectory(prefix="lean-bench-") as folder:
        # An engine that keeps files loads its model itself.
        stored = LLM(llm.model.info.source, replace(config, prefix_cache=True, prefix_cache_dir=folder))
        tier, ids, seconds = stored.engine.scheduler.disk, bench_tokens(llm, context), []
        assert tier is not None
        for turn in range(_ROUNDS + 1):
            one, found = _first_token(stored, ids)
            if turn:  # the first one computes the prompt
                seconds.append(one)
                if not found:
                    raise EngineError("the prompt was not found on disk")
            tier.flush()
            stored.engine.scheduler.prefix.reset()
        stored.close()
    return seconds


def _alike(llm: LLM, requests: int) -> list[list[int]]:
    """Prompts with the same first COMMON tokens and OWN others each."""
    ids = bench_tokens(llm, COMMON + OWN * requests)
    return [ids[:COMMON] + ids[start : start + OWN] for start in range(COMMON, len(ids), OWN)]


def _together(llm: LLM, prompts: list[list[int]]) -> float:
    """Seconds until all answers of prompts that are submitted together are there."""
    llm.reset_prefix_cache()
    started = time.perf_counter()
    raise_failed(llm.generate(prompts, greedy(ANSWER)))
    return time.perf_counter() - started


def _apart(cached: LLM, plain: LLM) -> tuple[list[float], str, list[float]]:
    """Seconds of answers to prompts that begin like no other: both engines take turns, in the order ABBA."""
    limit = cached.model.token_limit
    seconds: dict[str, list[float]] = {"cached": [], "plain": []}
    engines = {"cached": cached, "plain": plain}
    for turn in range(_APART_ROUNDS + 1):
        ids = [(7 * turn + 31 * place) % limit for place in range(_APART)]
        for name in engines if turn % 2 else reversed(engines):
            started = time.perf_counter()
            [output] = engines[name].generate([ids], greedy(2 * ANSWER))
            if output.cached_tokens:
                raise UserError("the benchmark's prompts begin alike: the vocabulary is too small for them")
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return seconds["cached"], "no prefix cache", seconds["plain"]
