"""The inside of an engine, for tests that look at it or disturb it. Tests name no private attribute of an engine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lean.cache.block_manager import BlockManager
from lean.engine import assemble
from lean.engine.request import Request
from lean.engine.runner import Runner
from lean.engine.scheduler import Scheduler
from lean.llm import LLM
from lean.sampling_params import SamplingParams

# --- the parts of an engine ---


def manager(llm: LLM) -> BlockManager:
    return llm.engine.manager


def scheduler(llm: LLM) -> Scheduler:
    return llm.engine.scheduler


def runner(llm: LLM) -> Runner:
    return llm.engine.runner


def _live(llm: LLM) -> dict[int, list[Request]]:
    """The sequences that have not ended, by request id."""
    return llm.engine.requests


# --- what an engine holds ---


def request_ids(llm: LLM) -> list[int]:
    """The requests that have not ended, in ascending order."""
    return sorted(_live(llm))


def first_sequence(llm: LLM, request_id: int) -> Request:
    """The first sequence of a request that has not ended."""
    return _live(llm)[request_id][0]


def running_sequences(llm: LLM) -> list[Request]:
    """The sequences that run, in order of arrival."""
    return list(scheduler(llm).running)


def waiting_sequences(llm: LLM) -> list[Request]:
    """The sequences that wait to be admitted, for the first time or after preemption, in order of arrival."""
    return list(scheduler(llm).waiting)


def hold(llm: LLM, ids: list[int]) -> int:
    """Compute a prompt and keep it in the cache until the request is aborted; returns its id."""
    request_id = llm.add_request(ids, SamplingParams(2, temperature=0, ignore_eos=True))
    while not any(output.request_id == request_id for output in llm.step()):
        pass
    return request_id


def block_table(llm: LLM, seq_id: int, pool: int) -> list[int]:
    """A sequence's blocks in one pool."""
    return list(manager(llm).table(seq_id, pool))


def blocks_in_use(llm: LLM) -> tuple[int, ...]:
    """The number of blocks that sequences hold, per pool."""
    return tuple(pool.num_used for pool in manager(llm).pools)


def check_integrity(llm: LLM) -> None:
    llm.check_integrity()


def all_blocks_free(blocks: BlockManager) -> None:
    blocks.check_integrity()
    pools = [*blocks.pools, *([] if blocks.slots is None else [blocks.slots])]
    assert all((pool.num_free, pool.num_used) == (pool.num_blocks, 0) for pool in pools)


def nothing_left(llm: LLM) -> None:
    """No request, no output for a caller that waits, and every block is free."""
    llm.check_integrity()
    assert _live(llm) == {}
    assert not len(llm.engine.mailbox)
    all_blocks_free(manager(llm))


# --- what tests do to an engine ---


def wrap_part(patch: pytest.MonkeyPatch, llm: LLM, part: str, wrap: Callable[[Callable], Callable]) -> None:
    """Put ``wrap(function)`` in the place of a part of every step.

    part: "run", from the chunks of a step to hidden states; or "logits", from hidden states to logits.
    """
    patch.setattr(runner(llm), part, wrap(getattr(runner(llm), part)))


def on_preempt(llm: LLM, call: Callable[[Request], None]) -> None:
    """Call ``call`` with every request that is preempted, just before it is."""
    preempt_now = scheduler(llm).preempt

    def reported(request: Request) -> None:
        call(request)
        preempt_now(request)

    scheduler(llm).preempt = reported


def preempt(llm: LLM, seq_id: int) -> None:
    """Preempt a running sequence."""
    [request] = [request for request in running_sequences(llm) if request.seq_id == seq_id]
    scheduler(llm).preempt(request)


@contextmanager
def positions_from(llm: LLM, offset: int) -> Iterator[None]:
    """Every sequence begins at position ``offset`` instead of 0."""
    runner(llm).position_offset = offset
    try:
        yield
    finally:
        runner(llm).position_offset = 0


@contextmanager
def another_thread_steps(llm: LLM) -> Iterator[None]:
    """The engine is locked, as while another thread is in the middle of a step."""
    with llm.engine.lock:
        yield


def step_at_second_look(llm: LLM, steps: int) -> None:
    """Run steps when the engine looks for the second time whether a request has ended, as another thread may do."""

    class Racing(dict):
        looks = 0

        def __contains__(self, key: object) -> bool:
            Racing.looks += 1
            if Racing.looks == 2 and super().__contains__(key):
                for _ in range(steps):
                    llm.engine.step()
            return super().__contains__(key)

    llm.engine.requests = Racing()


def forbid_reading_weights(patch: pytest.MonkeyPatch) -> None:
    """From here on an engine that reads weights fails the test."""

    def fail(*_: Any) -> None:
        pytest.fail("the weights were read")

    patch.setattr(assemble, "load_model", fail)
