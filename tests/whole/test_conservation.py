"""No block is lost, no request starves and no cached token is overwritten, under any requests and failing steps.

The scheduler and the block manager without a model: a shadow of the cache remembers which token of which history was
written into which slot. A tiny model under cancellations, exceptions and threads is in test_cancellation.py.
"""

import os
import random
from itertools import accumulate

import hypothesis.strategies as st
import pytest
import torch
from engine_state import all_blocks_free
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lean.cache.block_manager import NULL_BLOCK, BlockManager
from lean.cache.plan import LayerShape, plan_cache
from lean.cache.size import size_cache
from lean.cache.states import StateKey, StateShape
from lean.config import EngineConfig
from lean.engine.request import Request
from lean.engine.scheduler import Chunk, Scheduler
from lean.errors import RequestError
from lean.quant import FP32
from lean.sampling_params import SamplingParams

# CI takes some 40,000 steps; LEAN_CONSERVATION=20 does twenty times as many.
SCALE = int(os.environ.get("LEAN_CONSERVATION", "1"))
MODEL_LENGTH = 96
STATES = [StateShape(StateKey(1, "conv"), (2,), torch.float32)]
POOLS = {
    "unbounded": ([0], {"kv_dtype": "fp32"}),
    "unbounded and window": ([0, 16], {"kv_dtype": "fp32"}),
    "window only": ([16, 5], {"kv_dtype": "fp32"}),
    "residual and sinks": ([0], {"kv_dtype": "int8", "kv_residual_length": 9, "sinks": 3}),
    "unbounded and states": ([0], {"kv_dtype": "fp32"}),
    "window and states": ([16], {"kv_dtype": "fp32"}),
    "window, residual and sinks": ([0, 16], {"kv_dtype": "k8v4", "kv_residual_length": 12, "sinks": 9}),
}


def histories(token_ids: list[int]) -> list[int]:
    """Per position, a value that depends on its token and all before it, as K and V of that position do."""
    return list(accumulate(token_ids, lambda before, token: hash((before, token)), initial=0))[1:]


class Conservation(RuleBasedStateMachine):
    """The engine's step without an engine: schedule, write, read, then advance, fork and draw, or take back."""

    steps = 0

    @initialize(
        pools=st.sampled_from(sorted(POOLS)),
        num_blocks=st.integers(4, 16),
        max_num_seqs=st.integers(1, 5),
        prefill_chunk=st.integers(1, 30),
        step_tokens=st.integers(5, 40),
        seed=st.integers(0, 2**32),
    )
    def start(self, pools, num_blocks, max_num_seqs, prefill_chunk, step_tokens, seed):
        windows, options = POOLS[pools]
        self.config = EngineConfig(
            block_size=8,
            num_blocks=num_blocks if 0 in windows else None,
            max_num_seqs=max_num_seqs,
            prefill_chunk=prefill_chunk,
            max_num_batched_tokens=step_tokens,
            **options,
        )
        layers = [LayerShape(1, 1, 16, 16, window) for window in windows]
        plan = plan_cache(layers, self.config, FP32, STATES if "states" in pools else ())
        self.size = size_cache(plan, self.config, MODEL_LENGTH, 2**30)
        self.manager = BlockManager(self.size.rules, 8, self.size.num_slots)
        self.states = [None] * (self.size.num_slots + 1)
        self.scheduler = Scheduler(self.config, self.manager, self.size)
        self.cache = [[[None] * 8 for _ in range(rule.num_blocks + 1)] for rule in self.size.rules]
        self.random = random.Random(seed)
        self.next_id = 0
        self.alive: dict[int, Request] = {}  # every sequence that has not ended, siblings to come included
        self.texts: dict[int, list[int]] = {}  # the tokens of kept sequences
        draw = self.random.randint
        for _ in range(draw(0, 8)):  # requests from the start make forks, kept sequences and preemptions common
            self.put(draw(1, 16), draw(15, 40), draw(1, 3), draw(0, 1) == 1, False, "nothing")

    # --- what callers do ---

    @rule(
        length=st.integers(1, MODEL_LENGTH + 1),
        max_tokens=st.integers(1, 40),
        n=st.integers(1, 5),
        keep_cache=st.booleans(),
        keep_hidden=st.sampled_from([False, False, False, True]),
        continues=st.sampled_from(["nothing", "kept", "kept", "any"]),
    )
    def add(self, length, max_tokens, n, keep_cache, keep_hidden, continues):
        self.put(length, max_tokens, n, keep_cache, keep_hidden, continues)

    def put(self, length: int, max_tokens: int, n: int, keep_cache: bool, keep_hidden: bool, continues: str) -> None:
        n = 1 if keep_cache or keep_hidden else min(n, self.config.max_num_seqs)
        source = None
        prompt = [self.random.randrange(3) for _ in range(length)]
        if continues == "kept" and self.texts:
            source = self.random.choice(sorted(self.texts))
            said = self.texts[source]
            # All tokens of the kept sequence and new ones, or a shorter beginning and then other tokens.
            kept = len(said) if self.random.random() < 0.6 else self.random.randint(0, len(said))
            prompt = [*said[:kept], *prompt[: self.random.randint(0, 20)]] or prompt
        elif continues == "any":
            source = self.random.randint(0, self.next_id + 3)
        limit = self.size.max_model_len
        max_tokens = min(max_tokens, max(1, limit - len(prompt)))
        params = SamplingParams(max_tokens=max_tokens, n=n)
        family = [Request(self.next_id + i, prompt, params, self.next_id, i) for i in range(n)]
        first = family[0]
        first.siblings, first.keep_hidden = family[1:], keep_hidden
        first.keep_cache, first.continues = keep_cache, source
        if len(prompt) + (not keep_hidden) > limit:
            with pytest.raises(RequestError, match=str(limit)):
                self.scheduler.add(first)
            return
        self.scheduler.add(first)
        self.next_id += n
        self.alive |= {request.seq_id: request for request in family}

    @precondition(lambda self: self.alive)
    @rule(choice=st.randoms(use_true_random=False))
    def abort(self, choice):
        """At any phase; the siblings go too."""
        group = self.alive[choice.choice(sorted(self.alive))].request_id
        for request in [r for r in self.alive.values() if r.request_id == group]:
            self.end(request, "abort")

    @rule()
    def release(self):
        self.scheduler.release(self.random.choice([*self.texts, self.next_id + 5, 0]))
        self.forget_released()

    # --- steps ---

    @precondition(lambda self: self.alive)
    @rule(count=st.integers(1, 30))
    def step(self, count):
        for _ in range(count):
            self.one_step()

    @precondition(lambda self: self.alive)
    @rule(phase=st.sampled_from(["before", "copied", "written", "drawing"]))
    def failed_step(self, phase):
        self.one_step(phase)

    @precondition(lambda self: self.alive)
    @rule()
    def step_with_bad_numbers(self):
        self.one_step(bad=True)

    def one_step(self, fails: str | None = None, bad: bool = False) -> bool:
        """Returns whether anything ran."""
        if not self.alive:
            return False
        Conservation.steps += 1
        chunks = self.scheduler.schedule()
        self.forget_released()
        self.check_chunks(chunks)
        if fails != "before":
            for copy in self.manager.copies:
                self.cache[copy.pool][copy.target] = list(self.cache[copy.pool][copy.source])
            self.manager.copies.clear()
            for copy in self.manager.state_copies:
                self.states[copy.target] = self.states[copy.source]
            self.manager.state_copies.clear()
        if fails in ("before", "copied", "written"):
            if fails == "written":
                for chunk in chunks[: self.random.randint(0, len(chunks))]:
                    self.write(chunk, garbage=True)
            for chunk in chunks:
                self.scheduler.take_back([chunk])
            return True
        for chunk in chunks:
            self.write(chunk)
        for chunk in chunks:
            self.read(chunk)
        wrong = self.random.choice(chunks) if bad else None
        for chunk in chunks:
            if chunk is not wrong:
                self.scheduler.advance(chunk)
            else:
                for request in (chunk.request, *chunk.request.siblings):
                    self.end(request, "error")
        for chunk in chunks:
            request = chunk.request
            if not chunk.completes or chunk is wrong:
                continue
            if request.keep_hidden:
                self.end(request, "length")
                continue
            for sequence in self.scheduler.fork(request):
                if fails == "drawing" and self.random.random() < 0.5:
                    return True
                sequence.output_token_ids.append(self.random.randrange(3))
                if len(sequence.output_token_ids) == sequence.params.max_tokens or self.random.random() < 0.02:
                    self.end(sequence, "length")
        return True

    def check_chunks(self, chunks: list[Chunk]) -> None:
        running = self.scheduler.running
        assert chunks, "work is left, but nothing runs"
        assert [chunk.request for chunk in chunks] == running[: len(chunks)]
        assert chunks[0].request.seq_id == min(self.alive), "the oldest goes on in every step"
        assert sum(chunk.end - chunk.start for chunk in chunks) <= self.config.step_tokens
        assert sum(1 + len(request.siblings) for request in running) <= self.config.max_num_seqs
        for chunk in chunks:
            request = chunk.request
            assert 0 <= chunk.start < chunk.end <= request.num_tokens
            assert chunk.end - chunk.start <= self.config.prefill_chunk
            assert chunk.completes == (chunk.end == request.num_tokens)
            assert self.manager.num_tokens(request.seq_id) == chunk.end
            assert request.num_cached_tokens <= chunk.start

    def write(self, chunk: Chunk, garbage: bool = False) -> None:
        values = histories(chunk.request.tokens(0, chunk.end))
        for index, pool in enumerate(self.manager.pools):
            table = self.manager.table(chunk.request.seq_id, index)
            for position in range(chunk.start, chunk.end):
                block = table[position // 8]
                assert block != NULL_BLOCK
                assert pool.refs[block] == 1, "a block is written that another sequence reads"
                self.cache[index][block][position % 8] = "garbage" if garbage else values[position]
        if self.manager.slots is not None:
            slot = self.manager.slot(chunk.request.seq_id)
            assert self.manager.slots.refs[slot] == 1, "a state is written that another sequence reads"
            assert not chunk.start or self.states[slot] == values[chunk.start - 1], (
                "the state is not that of the tokens"
            )
            self.states[slot] = "garbage" if garbage else values[-1]

    def read(self, chunk: Chunk) -> None:
        self.check_visible(chunk.request.seq_id, chunk.request.tokens(0, chunk.end), chunk.start)

    def check_visible(self, seq_id: int, token_ids: list[int], first_row: int) -> None:
        """What rows from ``first_row`` on see through the tables is this sequence's own history."""
        values = histories(token_ids)
        for index, rule_ in enumerate(self.size.rules):
            table = self.manager.table(seq_id, index)
            for position, value in enumerate(values):
                sink = position < rule_.num_sink_tokens
                if not rule_.window or sink or first_row - position < rule_.window:
                    block = table[position // 8]
                    assert block != NULL_BLOCK, f"position {position} is gone, row {first_row} sees it"
                    assert self.cache[index][block][position % 8] == value, f"pool {index}, position {position}"
        if self.manager.slots is not None:
            assert self.states[self.manager.slot(seq_id)] == values[-1], "the state holds other tokens"

    # --- the end of a sequence ---

    def end(self, request: Request, reason: str) -> None:
        self.scheduler.finish(request, reason)
        del self.alive[request.seq_id]
        assert (request.seq_id in self.scheduler.kept) <= (request.keep_cache and reason != "error")
        if request.seq_id in self.scheduler.kept:
            self.texts[request.seq_id] = request.tokens(0, request.num_tokens)

    def forget_released(self) -> None:
        self.texts = {seq_id: text for seq_id, text in self.texts.items() if seq_id in self.scheduler.kept}

    # --- what always holds ---

    @invariant()
    def every_block_is_free_or_held_by_who_needs_it(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        running, kept = self.scheduler.running, self.scheduler.kept
        holders = [request.seq_id for request in running] + list(kept)
        assert self.manager.tokens_held() == sum(map(self.manager.num_tokens, holders))
        for index, pool in enumerate(self.manager.pools):
            tables = [self.manager.table(i, index) for i in holders if self.manager.num_tokens(i)]
            assert pool.num_used == len({block for table in tables for block in table} - {NULL_BLOCK})
            assert pool.num_free + pool.num_used == pool.num_blocks
        if self.manager.slots is not None:
            slots = {self.manager.slot(i) for i in holders if self.manager.num_tokens(i)}
            assert NULL_BLOCK not in slots
            assert self.manager.slots.num_used == len(slots)

    @invariant()
    def requests_stand_in_order_of_arrival(self):
        if not hasattr(self, "manager"):
            return
        queue = [*self.scheduler.running, *self.scheduler.waiting]
        everyone = [one for request in queue for one in (request, *request.siblings)]
        assert [request.seq_id for request in everyone] == sorted(self.alive)

    @invariant()
    def what_is_in_the_cache_is_whole(self):
        """Sequences that did not run and sequences that are only kept are checked too."""
        if not hasattr(self, "manager") or self.manager.copies or self.manager.state_copies:
            return
        texts = {request.seq_id: request.tokens(0, request.num_tokens) for request in self.scheduler.running}
        assert {i: tuple(text) for i, text in self.texts.items()} == {
            i: tuple(text) for i, text in self.scheduler.kept.items()
        }
        for seq_id, text in (texts | self.texts).items():
            held = self.manager.num_tokens(seq_id)
            if held:
                self.check_visible(seq_id, text[:held], held)

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        # The oldest gets a token in every step and is never preempted. When it has ended, the next one is the oldest.
        bound = sum(len(r.prompt_token_ids) + r.params.max_tokens for r in self.alive.values())
        for _ in range(bound):
            if not self.one_step():
                break
        assert not self.alive, "requests that do not end"
        assert not self.scheduler.has_work
        for seq_id in list(self.texts):
            self.scheduler.release(seq_id)
        all_blocks_free(self.manager)


TestConservation = Conservation.TestCase
TestConservation.settings = settings(
    max_examples=400 * SCALE,
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
