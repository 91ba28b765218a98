"""A tiny model under cancellations, exceptions and threads: nothing is left behind, and no other answer changes.

The scheduler and the block manager without a model are in test_conservation.py.
"""

import random
import threading
from collections import Counter

import pytest
import torch
from engine_state import (
    another_thread_steps,
    check_integrity,
    nothing_left,
    request_ids,
    running_sequences,
    step_at_second_look,
    waiting_sequences,
    wrap_part,
)
from tiny import tokens

from lean.config import EngineConfig
from lean.engine import runner
from lean.llm import LLM
from lean.sampling_params import SamplingParams

CONFIG = EngineConfig(
    deterministic=True,
    kv_dtype="int8",
    kv_residual_length=8,
    sinks=2,
    block_size=8,
    num_blocks=9,
    max_num_seqs=5,
    prefill_chunk=8,
    max_num_batched_tokens=24,
)


@pytest.fixture(scope="module")
def loaded(tiny):
    return LLM(str(tiny("llama", num_hidden_layers=2)), EngineConfig(deterministic=True)).model


@pytest.fixture
def llm(loaded):
    llm = LLM(loaded, CONFIG)
    yield llm
    assert not llm.has_work
    nothing_left(llm)


def ask(max_tokens: int, **params) -> SamplingParams:
    return SamplingParams(max_tokens, **{"temperature": 0, "ignore_eos": True, **params})


JOBS = [
    (tokens(37), ask(9)),
    (tokens(20, 1), ask(30)),
    (tokens(3, 2), ask(12, n=2, temperature=0.9, seed=3)),
    (tokens(45, 3), ask(5, temperature=0.7, seed=5, repetition_penalty=1.2)),
    (tokens(16, 4), ask(20, presence_penalty=0.5)),
    (tokens(9, 5), ask(6, n=3)),
]


@pytest.fixture(scope="module")
def alone(loaded):
    """Per job, the tokens of each of its sequences."""
    llm = LLM(loaded, EngineConfig(deterministic=True, kv_dtype="int8", kv_residual_length=8, sinks=2))
    return [[out.token_ids for out in llm.generate([prompt], params)] for prompt, params in JOBS]


class Crowd:
    """Keeps an engine busy with JOBS and collects the tokens of each request."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.llm, self.random = llm, random.Random(seed)
        self.jobs: dict[int, int] = {}
        self.said: dict[int, dict[int, list[int]]] = {}
        self.reasons: dict[int, list[str]] = {}

    def add(self) -> int:
        job = self.random.randrange(len(JOBS))
        request_id = self.llm.add_request(*JOBS[job])
        self.jobs[request_id], self.said[request_id], self.reasons[request_id] = job, {}, []
        return request_id

    def take(self, outputs) -> None:
        for out in outputs:
            self.said[out.request_id].setdefault(out.index, []).extend(out.token_ids)
            if out.finish_reason:
                self.reasons[out.request_id].append(out.finish_reason)

    def step(self) -> None:
        self.take(self.llm.step())

    def finish(self) -> None:
        for _ in range(5000):
            if not self.llm.has_work:
                return
            self.step()
        raise AssertionError("requests that do not end")

    def check(self, alone: list[list[list[int]]], cancelled: set[int]) -> None:
        """Every sequence ended once. Survivors gave their tokens of a run alone, cancelled ones the first of these."""
        for request_id, job in self.jobs.items():
            n = JOBS[job][1].n
            assert len(self.reasons[request_id]) == n
            said = [self.said[request_id].get(index, []) for index in range(n)]
            if request_id in cancelled and "abort" in self.reasons[request_id]:
                assert all(whole[: len(part)] == part for part, whole in zip(said, alone[job]))
            else:
                assert set(self.reasons[request_id]) == {"length"}
                assert said == alone[job]


def phases(llm: LLM) -> dict[str, list[int]]:
    """Request ids by the phase that their requests are in."""
    found: dict[str, list[int]] = {"queued": [], "preempted": [], "prefill": [], "decode": [], "siblings": []}
    for request in waiting_sequences(llm):
        found["preempted" if request.output_token_ids else "queued"].append(request.request_id)
    for request in running_sequences(llm):
        started = "decode" if request.output_token_ids else "prefill" if request.num_computed_tokens else None
        if started:
            found["siblings" if started == "decode" and request.params.n > 1 else started].append(request.request_id)
    return found


def test_three_hundred_requests_cancelled_at_any_phase_leave_nothing_behind_and_harm_nobody(llm, alone):
    crowd, cancelled, when = Crowd(llm, seed=1), set(), Counter()
    while len(cancelled) < 300:
        while len(request_ids(llm)) < 8:
            crowd.add()
        crowd.step()
        candidates = {phase: ids for phase, ids in phases(llm).items() if ids}
        preempted = "preempted" in candidates and crowd.random.random() < 0.7
        for _ in range(1 if preempted else crowd.random.choice((0, 0, 0, 0, 0, 4))):
            phase = "preempted" if preempted else crowd.random.choice([*candidates, None])
            if phase is None:
                continue
            victim = crowd.random.choice(candidates[phase])
            if victim not in cancelled and victim in request_ids(llm):
                when[phase] += 1
                cancelled.add(victim)
                llm.abort(victim)
                assert victim not in request_ids(llm), "at once"
                check_integrity(llm)
    crowd.finish()
    assert all(when[phase] >= 8 for phase in ("queued", "preempted", "prefill", "decode", "siblings")), when
    assert llm.num_preemptions >= 10
    assert sum("length" in reasons for reasons in crowd.reasons.values()) > 20
    crowd.check(alone, cancelled)


@pytest.mark.parametrize("part", ["before the model", "amid the layers", "after the layers", "logits", "sampling"])
def test_steps_that_fail_at_random_change_no_answer(llm, alone, monkeypatch, part):
    crowd, failures = Crowd(llm, seed=2), Counter()

    def perhaps(*_) -> None:
        if failures["armed"] and crowd.random.random() < 0.2:
            failures["all"] += 1
            raise RuntimeError("as a device does")

    def before(function):
        return lambda *args, **kwargs: (perhaps(), function(*args, **kwargs))[1]

    def after(function):
        return lambda *args, **kwargs: (function(*args, **kwargs), perhaps())[0]

    layers = llm.model.module.model.layers
    hook = layers[1].self_attn.register_forward_pre_hook(perhaps) if part == "amid the layers" else None
    if part == "before the model":
        wrap_part(monkeypatch, llm, "run", before)
    elif part == "after the layers":
        wrap_part(monkeypatch, llm, "run", after)
    elif part == "logits":
        wrap_part(monkeypatch, llm, "logits", before)
    elif part == "sampling":
        monkeypatch.setattr(runner, "sample", before(runner.sample))
    for _ in range(14):
        crowd.add()
    cancelled: set[int] = set()
    try:
        for step in range(2000):
            if not llm.has_work:
                break
            failures["armed"] = 1
            try:
                crowd.step()
            except RuntimeError as error:
                assert "as a device" in str(error)  # noqa: PT017
            check_integrity(llm)
            if step % 25 == 24 and request_ids(llm):
                cancelled.add(crowd.random.choice(request_ids(llm)))
                llm.abort(max(cancelled))
    finally:
        failures["armed"] = 0
        if hook:
            hook.remove()
    crowd.finish()
    assert failures["all"] > 10
    crowd.check(alone, cancelled)


def test_an_abort_from_another_thread_takes_effect_at_the_end_of_the_running_step(llm, monkeypatch):
    crowd = Crowd(llm, seed=3)
    ids = [crowd.add() for _ in range(4)]
    crowd.step()

    def meanwhile(run):
        def run_while_aborting(chunks):
            thread = threading.Thread(target=llm.abort, args=(ids[1],))
            thread.start()
            thread.join(10)
            assert not thread.is_alive(), "abort waits for the step"
            assert running_sequences(llm), "nothing is taken away under a running step"
            return run(chunks)

        return run_while_aborting

    with monkeypatch.context() as patched:
        wrap_part(patched, llm, "run", meanwhile)
        crowd.step()
    assert set(crowd.reasons[ids[1]]) == {"abort"}
    assert ids[1] not in request_ids(llm)
    crowd.finish()


def test_aborts_from_many_threads_while_stepping(llm, alone):
    """An aborted request has ended by the end of the step after the call."""
    crowd, done, cancelled = Crowd(llm, seed=4), Counter(), set()
    ended_at: dict[int, int] = {}
    called_at: dict[int, int] = {}
    stop = threading.Event()

    def cancel(seed: int) -> None:
        own = random.Random(seed)
        while not stop.wait(own.random() * 0.02):
            for request_id in own.sample(list(crowd.jobs), 1):
                if request_id not in called_at:
                    llm.abort(request_id)
                    called_at[request_id] = done["steps"]

    threads = [threading.Thread(target=cancel, args=(seed,)) for seed in (1, 2)]
    crowd.add()
    for thread in threads:
        thread.start()
    try:
        while len(called_at) < 40 and done["steps"] < 3000:
            while len(request_ids(llm)) < 8:
                crowd.add()
            crowd.step()
            for request_id, reasons in list(crowd.reasons.items()):
                if reasons and request_id not in request_ids(llm):
                    ended_at.setdefault(request_id, done["steps"])
            done["steps"] += 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    cancelled |= set(called_at)
    crowd.step()
    for request_id in crowd.jobs:
        if crowd.reasons[request_id] and request_id not in request_ids(llm):
            ended_at.setdefault(request_id, done["steps"])
    done["steps"] += 1
    crowd.finish()
    assert len(cancelled) >= 40
    for request_id, when in called_at.items():
        assert ended_at[request_id] <= when + 1, "an abort came late"
    crowd.check(alone, cancelled)


def test_late_outputs_of_an_abandoned_stream_reach_nobody(llm):
    """Also while another thread is in the middle of a step."""
    stream = llm.stream(tokens(5), ask(20))
    next(stream)
    with another_thread_steps(llm):
        stream.close()
    assert llm.step() == []


def test_hidden_states_are_whole_beside_another_thread_that_steps(llm):
    """The other thread may run the last step between reading the outputs and asking whether the request has ended."""
    want = torch.cat([rows for _, rows in llm.hidden_states(tokens(20))])
    step_at_second_look(llm, steps=3)
    found = torch.cat([rows for _, rows in llm.hidden_states(tokens(20))])
    assert found.shape == want.shape
    assert torch.equal(found, want)
