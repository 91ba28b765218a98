"""The engine's thread: jobs in, outputs out, and its faults."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest
from http_server import SETTINGS, WAIT_S

from lean import LLM, EngineConfig, EngineError, ModelError, SamplingParams
from lean.server.errors import ApiError
from lean.server.loop import MOST_FAILURES, EngineLoop, Job

PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny):
    return LLM(str(tiny("llama", num_hidden_layers=1)), EngineConfig(**SETTINGS))


@asynccontextmanager
async def running(llm, **named):
    """A loop on an engine; at its end nothing is left in the engine."""
    ready = asyncio.Event()
    ended = asyncio.get_running_loop().create_future()
    loop = EngineLoop(lambda: llm, ready.set, ended.set_result, **named)
    loop.ended = ended
    loop.start()
    await asyncio.wait_for(ready.wait(), WAIT_S)
    try:
        yield loop
    finally:
        await asyncio.to_thread(loop.stop)
        assert not loop.alive
        llm.step()  # delivers what aborts left
        llm.check_integrity()
        assert not llm.has_work


async def answer(loop, *prompts, params=PARAMS):
    """The token ids of each sequence of a job, by prompt and index."""
    job = Job(prompts, params)
    loop.submit(job)
    await job.accepted()
    found = {}
    while parts := await asyncio.wait_for(job.parts(), WAIT_S):
        for part in parts:
            found.setdefault((part.prompt, part.output.index), []).extend(part.output.token_ids)
    return found


async def rest_of(job):
    """How a job ends: the status of its error, or None."""
    try:
        while await asyncio.wait_for(job.parts(), WAIT_S):
            pass
    except ApiError as error:
        return error.status


def in_loop(llm, test, **named):
    async def main():
        async with running(llm, **named) as loop:
            return await test(loop)

    return asyncio.run(main())


def test_a_job_gets_what_generate_gives(llm):
    prompts = [[5, 6, 7], [9] * 40]
    expected = [one.token_ids for one in llm.generate(prompts, PARAMS)]

    async def test(loop):
        together = await answer(loop, *prompts)
        alone = await asyncio.gather(*(answer(loop, prompt) for prompt in prompts))
        return together, alone

    together, alone = in_loop(llm, test)
    assert together == {(0, 0): expected[0], (1, 0): expected[1]}
    assert [one[0, 0] for one in alone] == expected


def test_every_sequence_of_a_prompt_is_delivered(llm):
    params = SamplingParams(max_tokens=4, temperature=1, seed=1, n=3, ignore_eos=True)
    found = in_loop(llm, lambda loop: answer(loop, [5, 6], params=params))
    assert {key: len(ids) for key, ids in found.items()} == {(0, index): 4 for index in range(3)}


def test_each_step_tells_the_prompt_tokens_it_computed_and_the_tokens_it_generated(tiny):
    tokens = []
    llm = LLM(str(tiny("llama", num_hidden_layers=1)), EngineConfig(**SETTINGS, prefill_chunk=16))
    in_loop(llm, lambda loop: answer(loop, [9] * 40), on_step=tokens.append)
    assert tokens == [16, 16, 8 + 1, *[1] * 5]


def test_a_refused_prompt_ends_its_job_alone(llm):
    async def test(loop):
        good = asyncio.create_task(answer(loop, [5, 6]))
        with pytest.raises(ApiError) as caught:
            await answer(loop, [5], [])  # the second one is empty
        return caught.value.status, await good

    status, good = in_loop(llm, test)
    assert status == 400
    assert len(good[0, 0]) == 6


def test_a_cancelled_job_frees_its_blocks_while_others_run(llm):
    async def test(loop):
        job = Job([[7] * 50], LONG)
        loop.submit(job)
        await job.accepted()
        await job.parts()
        loop.cancel(job)
        await answer(loop, [5, 6])  # commands are obeyed in order: the cancel came before
        return loop.snapshot.running, len(llm.engine.requests)

    assert in_loop(llm, test) == (0, 0)


def fail_steps(llm, monkeypatch, times):
    """The next ``times`` steps with something to compute fail."""
    execute, left = llm.engine.runner.execute, [times]

    def failing(chunks):
        if left[0]:
            left[0] -= 1
            raise EngineError("a test made this step fail")
        return execute(chunks)

    monkeypatch.setattr(llm.engine.runner, "execute", failing)


def test_a_failed_step_ends_every_job_and_the_engine_goes_on(llm, monkeypatch, caplog):
    async def test(loop):
        fail_steps(llm, monkeypatch, 1)
        both = await asyncio.gather(answer(loop, [5]), answer(loop, [6]), return_exceptions=True)
        return both, await answer(loop, [5, 6])

    both, after = in_loop(llm, test)
    assert 500 in [getattr(one, "status", None) for one in both]
    assert all(isinstance(one, ApiError) or len(one[0, 0]) == 6 for one in both)
    assert len(after[0, 0]) == 6
    assert "a test made this step fail" in caplog.text


def test_an_engine_that_fails_again_and_again_is_given_up(llm, monkeypatch):
    async def test(loop):
        fail_steps(llm, monkeypatch, MOST_FAILURES)
        for _ in range(MOST_FAILURES):
            with pytest.raises(ApiError):
                await answer(loop, [5])
        return await asyncio.wait_for(loop.ended, WAIT_S)

    assert isinstance(in_loop(llm, test), EngineError)


def test_a_call_happens_in_the_thread_of_the_engine(llm):
    async def test(loop):
        found = asyncio.get_running_loop().create_future()
        here = asyncio.get_running_loop()
        loop.call(lambda engine: here.call_soon_threadsafe(found.set_result, (engine, threading.current_thread().name)))
        return await asyncio.wait_for(found, WAIT_S)

    assert in_loop(llm, test) == (llm, "lean-engine")


def test_a_model_that_cannot_be_loaded_is_reported():
    def load():
        raise ModelError("no such model")

    async def main():
        ended = asyncio.get_running_loop().create_future()
        loop = EngineLoop(load, on_end=ended.set_result)
        loop.start()
        return await asyncio.wait_for(ended, WAIT_S)

    assert isinstance(asyncio.run(main()), ModelError)


def test_the_end_ends_jobs_that_run(llm):
    async def main():
        async with running(llm) as loop:
            job = Job([[7] * 50], LONG)
            loop.submit(job)
            await job.accepted()
        return await rest_of(job)

    assert asyncio.run(main()) == 503


def test_a_job_that_comes_after_the_end_of_all_jobs_ends_at_once(llm):
    async def test(loop):
        loop.cancel_all(ApiError(503, "the end"))
        job = Job([[5, 6]], PARAMS)
        loop.submit(job)
        return await rest_of(job)

    assert in_loop(llm, test) == 503
