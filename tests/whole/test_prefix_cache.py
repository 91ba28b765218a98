"""A request that begins with what the prefix cache has gives what it gives on an empty engine, to the bit.

Deterministic mode, float32. Compared are tokens, log-probabilities and hidden states; each case asserts the hit.
"""

import functools
import itertools
from collections.abc import Callable

import census_models
import pytest
import torch
from desk import FORMATS, PENALIZED, SEEDED, Desk, Job, ask, loader, start
from engine_state import manager, nothing_left, preempt, scheduler, wrap_part
from helpers import refusal
from tiny import tokens

from lean import EngineConfig, SamplingParams
from lean.engine.request import RequestOutput
from lean.model.info import inspect_model
from lean.model.load import LoadedModel, load_model
from lean.store.source import resolve

CENSUS = ("gemma4_text+shared", "deepseek_v3")
SMALL, WINDOW, NO_SINKS = {"prefill_chunk": 7}, {"window": 40, "sinks": 3}, {"window": 21, "sinks": 0}
CASES = [
    ("llama", "fp32", {}),
    ("llama", "fp32", WINDOW),
    ("llama", "int8 with residual", SMALL),
    ("llama", "int8 with residual", WINDOW | SMALL),
    ("llama", "int8 without residual", NO_SINKS),
    ("llama", "fp8 with residual", NO_SINKS),
    ("llama", "fp8 without residual", SMALL),
    ("llama", "k8v4 with residual", {"block_size": 32}),
    ("llama", "k8v4 without residual", WINDOW),
    ("llama", "int4 with residual", {"prefill_chunk": 33}),
    ("gemma3", "int4 with residual", {}),
    ("gemma3", "fp32", WINDOW | SMALL),
    ("mixtral", "int8 with residual", {}),
    ("gpt_oss", "k8v4 with residual", SMALL),
    ("gpt_oss", "fp32", {}),
    ("gemma4_text+shared", "int8 with residual", {}),
    ("deepseek_v3", "int8 with residual", {}),
]
PRODUCT = [
    ("llama", form, window | {"prefill_chunk": chunk})
    for form, window, chunk in itertools.product(FORMATS, ({}, WINDOW, NO_SINKS), (5, 64))
]


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    """``model(kind)``: of the desk's kinds or of the census, read once."""
    plain = loader(tiny)

    @functools.cache
    def read(kind: str) -> LoadedModel:
        if kind not in CENSUS:
            return plain(kind)
        folder = tmp_path_factory.mktemp("census") / "model"
        census_models.build(kind, folder)
        info = inspect_model(resolve(str(folder)), EngineConfig(dtype="float32"))
        return load_model(info, torch.device("cpu"), deterministic=True)

    return read


@pytest.fixture(scope="module")
def cold(model):
    """``cold(kind, form, ids, params, **config)``: the outputs of an engine that remembers nothing."""
    engine = functools.cache(lambda kind, form, config: start(model(kind), form, prefix_cache=False, **dict(config)))
    made: dict[tuple, list[tuple]] = {}

    def answer(kind: str, form: str, ids: list[int], params: SamplingParams, **config: object) -> list[tuple]:
        options = tuple(config.items())
        key = kind, form, options, tuple(ids), repr(params)
        if key not in made:
            made[key] = said(engine(kind, form, options).generate([ids], params))
        return made[key]

    return answer


def said(outputs: list[RequestOutput]) -> list[tuple]:
    return [(out.token_ids, out.logprobs, out.text) for out in outputs]


def check(cold: Callable, model: Callable, kind: str, form: str, config: dict) -> None:
    """The same prompt again, an answer that goes on, and a branch: its second visitor computes, its third does not."""
    llm = start(model(kind), form, **config)
    size = llm.config.block_size
    prompt, params = tokens(5 * size + 3), ask(5)
    [first] = llm.generate([prompt], ask(size))
    assert first.cached_tokens == 0
    longer = [*prompt, *first.token_ids, *tokens(9, 5)]
    branches = [[*prompt[: 2 * size + 5], *tokens(size + 7, seed)] for seed in (6, 7)]
    wanted = {
        "the same": (prompt, 5 * size),
        "longer": (longer, 6 * size),
        "a branch": (branches[0], None),
        "the branch again": (branches[1], 2 * size),
    }
    for name, (ids, cached) in wanted.items():
        found = llm.generate([ids], params)
        assert said(found) == cold(kind, form, ids, params, **config), name
        assert cached is None or found[0].cached_tokens == cached, name
    together = llm.generate([ids for ids, _ in wanted.values()] + [tokens(40, 8)], params)
    assert all(out.cached_tokens for out in together[:4])
    for ids, out in zip((ids for ids, _ in wanted.values()), together):
        assert said([out]) == cold(kind, form, ids, params, **config)
    nothing_left(llm)


@pytest.mark.parametrize(("kind", "form", "config"), CASES, ids=str)
def test_a_warm_request_gives_the_bits_of_a_cold_one_alone_and_in_a_batch(cold, model, kind, form, config):
    check(cold, model, kind, form, config)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "form", "config"), PRODUCT, ids=str)
def test_a_warm_request_gives_the_bits_of_a_cold_one_in_every_format(cold, model, kind, form, config):
    check(cold, model, kind, form, config)


FEW = [("llama", "fp32"), ("llama", "k8v4 with residual"), ("gemma3", "int4 with residual")]


@pytest.mark.parametrize(("kind", "form"), FEW)
def test_after_strangers_filled_the_cache_what_is_left_of_a_prefix_is_found(cold, model, kind, form):
    """The end of a prefix goes first. Tails have no extra blocks here, so that some are lost too."""
    llm = start(model(kind), form, num_blocks=16, max_model_len=200, prefix_tail_memory=0, max_num_seqs=2)
    prompt, cached = tokens(100), []
    for seed, length in enumerate((0, 60, 130, 150, 190), 20):
        if length:
            llm.generate([tokens(length, seed)], ask(4))
        found = llm.generate([prompt], ask(5))
        assert said(found) == cold(kind, form, prompt, ask(5))
        cached.append(found[0].cached_tokens)
        llm.check_integrity()
    assert cached[:2] == [0, 96]
    assert llm.stats().prefix.evictions
    if form == "fp32":
        assert any(0 < found < 96 for found in cached[1:]), cached
    nothing_left(llm)


@pytest.mark.parametrize(("kind", "form"), FEW)
@pytest.mark.parametrize("steps", [3, 9])
def test_a_preempted_request_goes_on_where_its_last_block_ended(cold, model, kind, form, steps):
    desk = Desk(start(model(kind), form, prefill_chunk=16))
    request_id = desk.add(Job(45, ask(20, **PENALIZED)))
    for _ in range(steps):
        desk.step()
    request = desk.requests[request_id]
    computed = request.num_computed_tokens
    preempt(desk.llm, request_id)
    assert request.num_computed_tokens == 0
    desk.step()
    assert request.num_computed_tokens > computed // 16 * 16 >= 32
    desk.run()
    [(ids, logprobs, *_)] = desk.result(request_id)
    assert [(ids, logprobs)] == [row[:2] for row in cold(kind, form, tokens(45, 45), ask(20, **PENALIZED))]
    assert desk.parts[request_id][0].cached_tokens == 0
    desk.all_free()


@pytest.mark.parametrize(("kind", "form"), FEW)
def test_forks_of_a_warm_request_give_the_bits_of_cold_ones_and_can_be_gone_on_from(cold, model, kind, form):
    llm, params = start(model(kind), form, max_num_seqs=4), ask(40, n=3, **SEEDED)
    prompt = tokens(52)
    llm.generate([prompt], ask(3))
    found = llm.generate([prompt], params)
    assert said(found) == cold(kind, form, prompt, params)
    assert [out.cached_tokens for out in found] == [48] * 3
    for out in found:
        longer = [*prompt, *out.token_ids, *tokens(9, 2)]
        [again] = llm.generate([longer], ask(4))
        assert again.cached_tokens == (52 + 39) // 16 * 16
        assert said([again]) == cold(kind, form, longer, ask(4))
    nothing_left(llm)


@pytest.mark.parametrize("steps", [1, 2, 4, 9])
def test_a_cancelled_request_can_be_gone_on_from(model, steps):
    desk = Desk(start(model("llama"), "int4 with residual", prefill_chunk=24))
    request_id = desk.add(Job(60, ask(30)))
    for _ in range(steps):
        desk.step()
    request = desk.requests[request_id]
    computed = request.num_computed_tokens
    desk.llm.abort(request_id)
    [found] = desk.llm.generate([[*request.tokens(0, request.num_tokens), *tokens(5, 9)]], ask(2))
    assert found.cached_tokens == computed // 16 * 16 > 0


# --- what is never read, and never registered ---


def test_scores_are_computed_anew_and_rows_from_a_position_on_may_follow_a_prefix(model):
    llm, ids = start(model("llama"), "int8 with residual", prefill_chunk=24), tokens(90)
    whole = torch.cat([rows for _, rows in llm.hidden_states(ids)])
    assert torch.equal(torch.cat([rows for _, rows in llm.hidden_states(ids)]), whole)
    assert llm.stats().prefix.tokens_asked == 0
    for first in (1, 50, 80, 89):
        llm.add_request(ids, keep_hidden=True, hidden_from=first)
        parts = []
        while llm.has_work:
            parts += llm.step()
        assert torch.equal(torch.cat([part.hidden for part in parts]), whole[first:])
        assert parts[0].cached_tokens == first // 16 * 16
    for first, options in ((90, {"keep_hidden": True}), (-1, {"keep_hidden": True}), (5, {})):
        assert "hidden_from" in refusal(llm.add_request, ids, hidden_from=first, **options)


def test_log_probabilities_of_a_prompt_are_computed_anew(model):
    llm, prompt = start(model("llama"), "int8 with residual"), tokens(60)
    [first] = llm.generate([prompt], ask(2, prompt_logprobs=1))
    [second] = llm.generate([prompt], ask(2, prompt_logprobs=1))
    assert (second.cached_tokens, second.prompt_logprobs) == (0, first.prompt_logprobs)
    assert llm.generate([prompt], ask(2))[0].cached_tokens == 48


def test_only_the_same_salt_finds_a_prompt(model):
    llm, prompt = start(model("llama"), "k8v4 with residual"), tokens(60)

    def cached(salt: str | None) -> int:
        return next(iter([*llm.stream(prompt, ask(1), cache_salt=salt)])).cached_tokens

    for salt in (None, "", "a", "b"):
        assert cached(salt) == 0
    for salt in (None, "", "a", "b"):
        assert cached(salt) == 48
    assert "text" in refusal(llm.add_request, prompt, ask(1), cache_salt=5)
    use = llm.stats().prefix
    assert (use.tokens_asked, use.tokens_found, use.tails_used) == (8 * 60, 4 * 48, 4)


def test_a_reset_forgets_what_has_been_computed_also_by_requests_that_run(model):
    llm, prompt = start(model("llama"), "int8 with residual"), tokens(60)
    stream = llm.stream(prompt, ask(30))
    next(stream)
    llm.reset_prefix_cache()
    rest = [*stream]
    assert rest[-1].finish_reason == "length"
    assert llm.generate([prompt], ask(1))[0].cached_tokens == 0
    assert llm.generate([prompt], ask(1))[0].cached_tokens == 48
    nothing_left(llm)


def test_without_the_prefix_cache_nothing_is_registered_and_no_memory_kept_for_tails(model):
    llm = start(model("llama"), "int8 with residual", prefix_cache=False)
    for _ in range(2):
        assert llm.generate([tokens(60)], ask(2))[0].cached_tokens == 0
    assert not any(pool.index for pool in manager(llm).pools)
    assert llm.size.num_tails == 0 < start(model("llama"), "int8 with residual").size.num_tails


def test_a_step_that_fails_or_computes_bad_numbers_registers_nothing(model, monkeypatch):
    llm = start(model("llama"), "int8 with residual", prefill_chunk=16)
    calls = []

    def third_goes_wrong(run: Callable) -> Callable:
        def wrapped(chunks: list, *rest: object) -> torch.Tensor:
            calls.append(len(chunks))
            if len(calls) == 3:
                raise ZeroDivisionError
            return run(chunks, *rest) * (float("nan") if len(calls) == 5 else 1)

        return wrapped

    wrap_part(monkeypatch, llm, "run", third_goes_wrong)
    llm.add_request(tokens(90), ask(2))
    for known in (1, 2, 2, 3, 0):
        try:
            llm.step()
        except ZeroDivisionError:
            assert len(calls) == 3
        assert len(manager(llm).pools[0].index) == known
    assert not scheduler(llm).has_work
    assert llm.generate([tokens(90)], ask(2))[0].cached_tokens == 0
    nothing_left(llm)


@torch.inference_mode()
def test_a_block_that_went_bad_spoils_one_request_and_is_computed_again(model):
    llm = start(model("llama"), "fp32")
    [good] = llm.generate([tokens(90)], ask(2))
    [arena] = llm.cache.arenas
    arena.fill_(255)  # NaN
    [bad] = llm.generate([tokens(90)], ask(2))
    assert (bad.cached_tokens > 0, bad.finish_reason) == (True, "error")
    [again] = llm.generate([tokens(90)], ask(2))
    assert (again.cached_tokens, again.token_ids) == (0, good.token_ids)
    nothing_left(llm)
