"""A request gives the same numbers alone, beside others, preempted and forked, to the bit.

Compared are token ids, log-probabilities and, for scoring requests, hidden states. Deterministic mode, one thread;
lengths exceed the sliding window of 32 tokens, the residual and the exact sinks. Continued requests are in
test_continuation.py.
"""

import random
from contextlib import suppress

import pytest
from desk import (
    COUNTED,
    FEW,
    PENALIZED,
    SEEDED,
    SEVERAL,
    Alone,
    Desk,
    Job,
    ask,
    impatient,
    loader,
    same,
    start,
)
from engine_state import nothing_left
from helpers import refusal
from tiny import tokens

from lean import SamplingParams
from lean.errors import RequestError

JOBS = [
    Job(40, ask(5)),
    Job(3, ask(6, **PENALIZED)),
    Job(35, ask(4, **COUNTED)),
    Job(17, ask(5, n=3, **SEEDED)),
    Job(45, score=True),
    Job(20, ask(3, prompt_logprobs=2)),
    Job(1, ask(8)),
    Job(31, ask(4, n=2)),
    Job(48, ask(3, **SEEDED)),
    Job(5, ask(4, top_p=0.9, min_p=0.01, top_k=50, **SEEDED)),
    Job(33, score=True),
    Job(16, ask(2, logit_bias={70: 5.0}, logprobs=3)),
    Job(8, ask(5, n=2, **PENALIZED)),
    Job(37, ask(3, prompt_logprobs=0, **SEEDED)),
    Job(2, score=True),
    Job(26, ask(5, **COUNTED)),
]


@pytest.fixture(scope="module")
def model(tiny):
    return loader(tiny)


@pytest.fixture(scope="module")
def alone(model):
    return Alone(model)


@pytest.mark.parametrize(("kind", "form"), SEVERAL)
def test_a_request_gives_the_same_alone_and_in_a_crowd_in_any_order_and_after_a_cancelled_one(model, alone, kind, form):
    shuffled = random.Random(form).sample(JOBS, len(JOBS))
    many = kind == "llama" and form in ("fp32", "int4 with residual")
    crowds = [shuffled[:2], shuffled[2:7], shuffled] + [JOBS, JOBS[::-1]] * many
    for number, crowd in enumerate(crowds):
        # Steps of 24 tokens mix pieces of several prompts; blocks of the cancelled request go to the later ones.
        llm = start(
            model(kind), form, prefill_chunk=(16, 7, 13)[number % 3], max_num_seqs=16, max_num_batched_tokens=24
        )
        desk = Desk(llm)
        cancelled = desk.add(Job(60, ask(50)))
        for job in crowd:
            desk.add(job)
        for _ in range(2 + number):
            desk.step()
        llm.abort(cancelled)
        desk.run()
        assert desk.parts[cancelled][-1].finish_reason == "abort"
        same(desk, alone, kind, form, skip=(cancelled,))


@pytest.mark.parametrize(("kind", "form"), SEVERAL)
def test_a_preempted_request_gives_the_same_as_alone_and_so_do_preempted_siblings(model, alone, kind, form):
    desk = Desk(start(model(kind), form, block_size=8, num_blocks=13))
    old = desk.add(Job(36, ask(13)))
    forked = desk.add(Job(23, ask(18, n=3, **PENALIZED)))
    young = desk.add(Job(16, ask(12, **COUNTED)))
    desk.run()
    assert [desk.preempted[request_id] for request_id in (old, forked, young)] == [0, 2, 1]
    same(desk, alone, kind, form)


@pytest.mark.parametrize(("kind", "form"), FEW)
def test_a_request_preempted_twice_gives_the_same_as_alone(model, alone, kind, form):
    """The youngest is admitted again when the first has ended, and is preempted again."""
    desk = Desk(start(model(kind), form, block_size=8, num_blocks=11))
    desk.add(Job(32, ask(20)))
    desk.add(Job(18, ask(39, **COUNTED)))
    youngest = desk.add(Job(7, ask(32, **PENALIZED)))
    desk.run()
    assert desk.preempted[youngest] == 2
    same(desk, alone, kind, form)


@pytest.mark.parametrize(
    ("kind", "form"), [*FEW, ("llama", "int8 with residual"), ("mixtral", "int4 without residual")]
)
def test_forked_siblings_give_the_same_as_the_request_alone(model, alone, kind, form):
    """All greedy siblings give the answer of a request alone. Of sampled siblings the first does, the others differ."""
    for length in (16, 45):  # full blocks only, and a part of one that is shared
        desk = Desk(start(model(kind), form, prefill_chunk=20, max_num_seqs=7, max_num_batched_tokens=32))
        greedy = desk.add(Job(length, ask(8, n=4)))
        seeded = desk.add(Job(length, ask(8, n=3, **PENALIZED)))
        desk.run()
        (single,) = alone(kind, form, Job(length, ask(8)))
        assert desk.result(greedy) == [single] * 4
        (first,) = alone(kind, form, Job(length, ask(8, **PENALIZED)))
        results = desk.result(seeded)
        assert results[0] == first
        assert results[1] != first != results[2]
        same(desk, alone, kind, form)


@pytest.mark.parametrize(("kind", "form"), FEW)
def test_a_request_preempted_amid_its_prompt_reports_every_prompt_logprob_once(model, alone, kind, form):
    """Chunks of two tokens are slow enough for the answer of an older request to take the blocks of a prompt."""
    desk = Desk(start(model(kind), form, block_size=8, num_blocks=14, prefill_chunk=2))
    desk.add(Job(20, ask(60)))
    long = desk.add(Job(70, ask(6, prompt_logprobs=2)))
    desk.run()
    assert long in desk.mid_prefill
    ((_, _, _, found, _),) = desk.result(long)
    assert [entry and entry.token_id for entry in found] == [None, *desk.jobs[long].prompt[1:]]
    same(desk, alone, kind, form)


@pytest.mark.parametrize(("kind", "form"), FEW)
def test_a_scoring_request_preempted_amid_its_text_gives_every_row_once(model, alone, kind, form):
    desk = Desk(start(model(kind), form, block_size=8, num_blocks=14, prefill_chunk=2))
    desk.add(Job(20, ask(60)))
    scored = desk.add(Job(70, score=True))
    desk.run()
    assert scored in desk.mid_prefill
    same(desk, alone, kind, form)


# --- combinations that went wrong once ---


@pytest.mark.parametrize("length", [1, 2, 20, 40])
def test_every_sibling_reports_the_prompt_logprobs(model, alone, monkeypatch, length):
    desk = Desk(impatient(monkeypatch, start(model("llama"), "fp32", prefill_chunk=16)))
    forked = desk.add(Job(length, ask(6, n=3, prompt_logprobs=1)))
    desk.run()
    (single,) = alone("llama", "fp32", Job(length, ask(6, prompt_logprobs=1)))
    assert desk.result(forked) == [single] * 3


def test_a_scoring_request_with_n_2_ends_or_is_refused(model):
    llm = start(model("llama"), "fp32")
    with suppress(RequestError):
        llm.add_request(tokens(5), SamplingParams(n=2), keep_hidden=True)
    for _ in range(5):
        llm.step()
    nothing_left(llm)


def test_prompt_logprobs_of_an_id_that_is_no_token_hurt_nobody_else(model, monkeypatch):
    """Rows 259 .. 263 of the output layer belong to no token. Both a refusal and an error are fine."""
    llm = impatient(monkeypatch, start(model("llama"), "fp32"))
    with suppress(RequestError):
        llm.add_request([5, 262, 7], ask(3, prompt_logprobs=0))
    good = llm.add_request(tokens(5), ask(3))
    parts = [part for _ in range(6) for part in llm.step()]
    assert [part.finish_reason for part in parts if part.request_id == good] == [None, None, "length"]
    assert not llm.has_work


def test_n_beyond_max_num_seqs_is_refused(model):
    llm = start(model("llama"), "fp32", max_num_seqs=2)
    assert "--max-num-seqs" in refusal(llm.add_request, tokens(5), ask(3, n=3))
    assert not llm.has_work
