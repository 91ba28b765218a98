"""First come, first served: chunked prompts beside decodes, admission by the worst case, and nothing left behind."""

import pytest
from helpers import refusal

from lean.cache.block_manager import BlockManager
from lean.cache.plan import LayerShape, plan_cache
from lean.cache.size import size_cache
from lean.config import EngineConfig
from lean.engine.request import Request
from lean.engine.scheduler import Scheduler
from lean.llm import LLM
from lean.quant import FP32
from lean.sampling_params import SamplingParams

SMALL_POOL = {"block_size": 16, "num_blocks": 8, "kv_residual_length": 0}


class Course:
    """A scheduler and the requests on it, which share no tokens; an answer is as long as max_tokens allows."""

    def __init__(self, model_length: int = 1000, window: int = 0, **config) -> None:
        self.config = EngineConfig(**{"block_size": 16, "kv_residual_length": 0, **config})
        layers = [LayerShape(1, 1, 16, 16), *([LayerShape(1, 1, 16, 16, window)] if window else [])]
        self.size = size_cache(plan_cache(layers, self.config, FP32), self.config, model_length, 2**24)
        self.manager = BlockManager(self.size.rules, self.config.block_size)
        self.scheduler = Scheduler(self.config, self.manager, self.size)
        self.ended: list[int] = []

    def add(self, request_id: int, prompt: int, max_tokens: int = 1, **fields) -> Request:
        ids = list(range(1000 * request_id, 1000 * request_id + prompt))
        request = Request(request_id, ids, SamplingParams(max_tokens=max_tokens), **fields)
        self.scheduler.add(request)
        return request

    def step(self) -> dict[int, tuple[int, int]]:
        """Run one step; returns per sequence the range of tokens that ran."""
        chunks = self.scheduler.schedule()
        for chunk in chunks:
            request = chunk.request
            self.scheduler.advance(chunk)
            if chunk.completes:
                request.output_token_ids += [7] * (not request.keep_hidden)
                if request.keep_hidden or len(request.output_token_ids) == request.params.max_tokens:
                    self.scheduler.finish(request, "length")
                    self.ended.append(request.seq_id)
        self.manager.check_integrity()
        return {chunk.request.seq_id: (chunk.start, chunk.end) for chunk in chunks}

    def run(self, limit: int = 1000) -> list[dict[int, tuple[int, int]]]:
        steps = []
        while self.scheduler.has_work:
            steps.append(self.step())
            assert steps[-1], "work is left, but nothing runs"
            assert len(steps) < limit
        assert all(pool.num_used == 0 for pool in self.manager.pools)
        return steps


def test_requests_are_served_in_the_order_they_came():
    course = Course(max_num_seqs=2)
    for request_id in (5, 3, 9, 1):
        course.add(request_id, prompt=20, max_tokens=3)
    assert list(course.step()) == [5, 3]
    course.run()
    assert course.ended == [5, 3, 9, 1]


def test_a_prompt_runs_in_chunks_that_meet_and_ends_with_its_last_token():
    course = Course(prefill_chunk=7)
    request = course.add(0, prompt=20, max_tokens=3)
    seen = [course.step()[0] for _ in range(5)]
    assert seen == [(0, 7), (7, 14), (14, 20), (20, 21), (21, 22)]
    assert request.finish_reason == "length"
    assert course.manager.tokens_held() == 0


def test_a_chunk_hands_out_prompt_and_answer_tokens_alike():
    request = Request(0, [1, 2, 3], SamplingParams())
    request.output_token_ids += [4, 5]
    pieces = {(0, 3): [1, 2, 3], (1, 2): [2], (2, 5): [3, 4, 5], (3, 4): [4], (4, 5): [5], (5, 5): []}
    assert {span: request.tokens(*span) for span in pieces} == pieces


def test_decodes_run_beside_the_chunks_of_a_later_prompt():
    course = Course(prefill_chunk=8, max_num_batched_tokens=10)
    course.add(0, prompt=5, max_tokens=20)
    course.step()
    course.add(1, prompt=20)
    assert course.step() == {0: (5, 6), 1: (0, 8)}
    course.add(2, prompt=3)
    assert course.step() == {0: (6, 7), 1: (8, 16), 2: (0, 1)}
    assert course.step() == {0: (7, 8), 1: (16, 20), 2: (1, 3)}
    course.run()


def test_a_step_never_exceeds_its_token_budget_and_wastes_none_of_it():
    course = Course(prefill_chunk=16, max_num_batched_tokens=24, max_num_seqs=4)
    for request_id, prompt in enumerate((60, 5, 33, 100, 7)):
        course.add(request_id, prompt, max_tokens=9)
    while course.scheduler.has_work:
        step = course.step()
        assert sum(end - start for start, end in step.values()) <= 24
        assert all(end - start <= 16 for start, end in step.values())
        left = 24 - sum(end - start for start, end in step.values())
        for request in course.scheduler.running:
            waits = request.num_tokens - request.num_computed_tokens - (request.seq_id in step)
            assert not left or not waits or request.seq_id in step


def test_no_more_than_max_num_seqs_run_at_once():
    course = Course(max_num_seqs=3)
    for request_id in range(8):
        course.add(request_id, prompt=4, max_tokens=4)
    assert {len(step) for step in course.run()} <= {1, 2, 3}
    assert course.ended == list(range(8))


def test_a_request_is_admitted_when_what_is_known_of_it_fits_beside_the_others():
    course = Course(num_blocks=8)
    course.add(0, prompt=64, max_tokens=17)  # 4 blocks now
    course.add(1, prompt=40, max_tokens=20)  # 3 blocks, and one more for each of the two: 9 in all
    course.add(2, prompt=8, max_tokens=1)  # would fit, but waits for its turn
    assert list(course.step()) == [0]
    course.run()
    assert course.ended == [0, 2, 1]
    assert course.scheduler.num_preemptions == 0


def test_max_num_seqs_requests_run_at_once_when_the_cache_holds_the_longest_course_of_each():
    course = Course(model_length=48, max_num_seqs=6, max_num_batched_tokens=40)
    assert course.size.num_tokens == 6 * 48
    for request_id in range(6):
        course.add(request_id, prompt=20, max_tokens=29)
    steps = course.run()
    assert max(len(step) for step in steps) == 6
    assert course.scheduler.num_preemptions == 0


def test_when_the_cache_is_full_the_youngest_is_preempted_and_comes_back_before_all_others():
    course = Course(num_blocks=8, max_num_seqs=2)
    requests = [course.add(index, prompt=40, max_tokens=60) for index in range(4)]  # 7 blocks each in the end
    course.step()
    course.step()
    while not course.scheduler.num_preemptions:
        assert list(course.step()) == [0, 1] or course.scheduler.num_preemptions
    assert [request.seq_id for request in course.scheduler.running] == [0]
    assert [request.seq_id for request in course.scheduler.waiting] == [1, 2, 3]
    assert requests[1].num_computed_tokens == 0 < len(requests[1].output_token_ids)
    assert course.manager.num_tokens(1) == 0
    course.run()
    assert course.ended == [0, 1, 2, 3]
    assert all(request.num_tokens == 100 for request in requests)


def test_a_preempted_request_computes_its_answer_again_with_its_prompt_and_then_goes_on():
    course = Course(num_blocks=8, prefill_chunk=32, prefix_cache=False)
    course.add(0, prompt=60, max_tokens=40)
    course.add(1, prompt=30, max_tokens=40)
    steps = [step.get(1) for step in course.run()]
    again = [chunk for chunk in steps if chunk][1:]
    restart = again.index((0, 32))
    length = again[restart - 1][1] + 1  # the token drawn last is part of it
    assert again[restart + 1] == (32, length)
    assert again[restart + 2] == (length, length + 1)


@pytest.mark.parametrize("window", [0, 20])
def test_a_preempted_request_goes_on_from_the_blocks_that_nobody_has_taken_meanwhile(window):
    course = Course(num_blocks=8, prefill_chunk=32, window=window)
    course.add(0, prompt=90, max_tokens=4)
    request = course.add(1, prompt=17, max_tokens=40)
    course.step()
    course.step()
    while request.num_tokens < 36:
        course.step()
        if not course.scheduler.has_work:
            break
    course.scheduler.preempt(request)
    assert course.manager.num_tokens(1) == 0
    assert course.step()[1] == (32, 36)  # two full blocks are found again
    assert request.num_cached_tokens == 0  # it counts what was found when the request came
    course.run()


def test_the_last_token_drawn_needs_no_slot():
    course = Course(num_blocks=8)
    course.add(0, prompt=112, max_tokens=17)  # 128 tokens in the cache
    assert course.step() == {0: (0, 112)}
    course.run()


def test_what_can_never_fit_is_refused_with_both_numbers_and_the_flag():
    course = Course(model_length=200, num_blocks=8)
    message = refusal(course.add, 0, prompt=128)
    assert all(word in message for word in ("128 tokens", "max-model-len is 128"))
    message = refusal(course.add, 0, prompt=120, max_tokens=10)  # 129 tokens in the cache
    words = ("9 cache blocks of 16", "there are only 8", "--max-tokens to at most 9", "--num-blocks")
    assert all(word in message for word in words)
    refusal(course.add, 0, prompt=0)
    assert not course.scheduler.has_work
    course.add(0, prompt=127)
    course.add(1, prompt=120, max_tokens=9)
    course.add(2, prompt=128, keep_hidden=True)
    course.run()
    assert course.ended == [0, 1, 2]


@pytest.mark.parametrize("max_num_batched_tokens", [64, 96])
def test_a_short_request_behind_a_long_one_is_served(max_num_batched_tokens):
    course = Course(prefill_chunk=64, max_num_batched_tokens=max_num_batched_tokens)
    course.add(0, prompt=900, max_tokens=50)
    course.add(1, prompt=5, max_tokens=2)
    steps = course.run()
    assert course.ended == [1, 0]
    if max_num_batched_tokens > 64:
        assert steps[0] == {0: (0, 64), 1: (0, 5)}


def test_a_short_request_behind_one_that_fills_the_cache_is_served():
    course = Course(num_blocks=8)
    course.add(0, prompt=100, max_tokens=29)
    course.add(1, prompt=5, max_tokens=2)
    course.run()
    assert course.ended == [0, 1]


def test_requests_can_be_taken_out_while_they_wait_and_while_they_run():
    course = Course(max_num_seqs=2, prefill_chunk=8, window=16)
    requests = [course.add(request_id, prompt=30, max_tokens=5) for request_id in range(4)]
    course.step()
    for request in (requests[3], requests[0]):
        course.scheduler.finish(request, "error", "gone")
        course.manager.check_integrity()
    assert course.manager.num_tokens(0) == 0
    assert [request.seq_id for request in course.scheduler.running] == [1]
    course.run()
    assert course.ended == [1, 2]


def test_blocks_behind_a_window_are_given_back_as_the_sequence_moves_on():
    course = Course(window=16, prefill_chunk=8)
    course.add(0, prompt=100, max_tokens=50)
    held = []
    while course.scheduler.has_work:
        course.step()
        held.append([pool.num_used for pool in course.manager.pools])
    assert max(full for full, _ in held) == 10
    assert max(sliding for _, sliding in held) == 2


def test_a_step_that_failed_can_be_scheduled_again():
    course = Course(prefill_chunk=8)
    course.add(0, prompt=20, max_tokens=3)
    course.step()
    for chunk in course.scheduler.schedule():  # and the model raises
        course.scheduler.take_back([chunk])
    assert course.step() == {0: (8, 16)}
    assert course.manager.num_tokens(0) == 16
    course.run()


def test_an_idle_scheduler_schedules_nothing():
    course = Course()
    assert course.step() == {}
    course.add(0, prompt=3)
    course.run()
    assert course.step() == {}


@pytest.fixture(scope="module")
def llm(tiny):
    return LLM(str(tiny("llama", num_hidden_layers=1)), EngineConfig(**SMALL_POOL))


def test_eight_blocks_of_sixteen_hold_128_tokens_answer_included(llm):
    assert llm.size.max_model_len == llm.size.num_tokens == 128
    assert any("512 to 128" in note for note in llm.notes)


@pytest.mark.parametrize("prompt", range(111, 130))
def test_prompts_around_the_size_of_the_pool_are_served_or_refused_as_the_arithmetic_says(llm, prompt):
    ask = SamplingParams(max_tokens=20, ignore_eos=True)
    if prompt < 128:
        (output,) = llm.generate([[5] * prompt], ask)
        assert len(output.token_ids) == min(20, 128 - prompt)
        assert output.finish_reason == "length"
    else:
        message = refusal(llm.generate, [[5] * prompt], ask)
        assert all(word in message for word in (f"{prompt} tokens", "128"))
    assert llm.stats().bytes_held == 0


@pytest.mark.parametrize("tokens", [127, 128, 129, 130])
def test_a_text_to_score_may_fill_the_pool_and_end_one_token_later(llm, tokens):
    if tokens <= 129:
        assert llm.score([5] * tokens).shape == (tokens - 1,)
    else:
        assert "129 tokens" in refusal(llm.score, [5] * tokens)
    assert llm.stats().bytes_held == 0
