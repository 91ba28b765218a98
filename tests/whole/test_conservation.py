"""No block is lost, no request starves and no cached token is overwritten, under any requests and failing steps.

The scheduler, the block manager and the prefix cache without a model: a shadow of the cache remembers which token of
which history was written into which slot, and another what each hash of the index stands for. A tiny model under
cancellations, exceptions and threads is in test_cancellation.py.
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
from shelf import Shelf

from lean.cache.block_manager import BlockManager
from lean.cache.block_pool import NULL_BLOCK
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


def histories(request: Request, end: int) -> list[int]:
    """Per position, a value of its token, all before it and the salt. So K and V of a position depend on tokens."""
    begin = hash(request.cache_salt)
    return list(accumulate(request.tokens(0, end), lambda before, token: hash((before, token)), initial=begin))[1:]


class Conservation(RuleBasedStateMachine):
    """The engine's step without an engine: schedule, write, read, then advance, fork and draw, or take back."""

    steps = hits = 0

    @initialize(
        pools=st.sampled_from(sorted(POOLS)),
        num_blocks=st.integers(4, 16),
        max_num_seqs=st.integers(1, 5),
        prefill_chunk=st.integers(1, 30),
        step_tokens=st.integers(5, 40),
        tail_memory=st.sampled_from([None, 0, 5_000, 20_000]),
        disk=st.booleans(),
        seed=st.integers(0, 2**32),
    )
    def start(self, pools, num_blocks, max_num_seqs, prefill_chunk, step_tokens, tail_memory, disk, seed):
        windows, options = POOLS[pools]
        self.config = EngineConfig(
            block_size=8,
            num_blocks=num_blocks if 0 in windows else None,
            max_num_seqs=max_num_seqs,
            prefill_chunk=prefill_chunk,
            max_num_batched_tokens=step_tokens,
            prefix_tail_memory=tail_memory,
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
        self.disk = disk
        if disk:
            self.scheduler.disk = self.shelf = Shelf(self)
        self.next_id = 0
        self.alive: dict[int, Request] = {}  # every sequence that has not ended, siblings to come included
        self.meaning: dict[bytes, list[int]] = {}  # what a block with this hash holds
        self.texts: list[Request] = []  # requests whose tokens later ones begin with
        draw = self.random.randint
        for _ in range(draw(0, 8)):  # requests from the start make forks and preemptions common
            self.put(draw(1, 32), draw(5, 40), draw(1, 3), "answer", self.random.choice(("anew", "as before")))

    # --- what callers do ---

    @rule(
        length=st.integers(1, MODEL_LENGTH + 1),
        max_tokens=st.integers(1, 40),
        n=st.integers(1, 5),
        wanted=st.sampled_from(["answer", "answer", "answer", "prompt_logprobs", "rows", "last rows"]),
        begins=st.sampled_from(["anew", "as before", "as before", "as before"]),
    )
    def add(self, length, max_tokens, n, wanted, begins):
        self.put(length, max_tokens, n, wanted, begins)

    def put(self, length: int, max_tokens: int, n: int, wanted: str, begins: str) -> None:
        keep_hidden = "rows" in wanted
        n = 1 if keep_hidden else min(n, self.config.max_num_seqs)
        prompt, salt = [self.random.randrange(3) for _ in range(length)], self.random.choice((None, None, "a"))
        if begins == "as before" and self.texts:
            said = self.random.choice(self.texts)
            # All tokens of an earlier sequence and new ones, or a shorter beginning and then other tokens.
            kept = said.num_tokens if self.random.random() < 0.6 else self.random.randint(0, said.num_tokens)
            prompt = [*said.tokens(0, kept), *prompt[: self.random.randint(0, 20)]] or prompt
            salt = said.cache_salt if self.random.random() < 0.8 else salt
        limit = self.size.max_model_len
        max_tokens = min(max_tokens, max(1, limit - len(prompt)))
        params = SamplingParams(max_tokens=max_tokens, n=n, prompt_logprobs=0 if wanted == "prompt_logprobs" else None)
        family = [Request(self.next_id + i, prompt, params, self.next_id, i, cache_salt=salt) for i in range(n)]
        first = family[0]
        first.siblings, first.keep_hidden = family[1:], keep_hidden
        first.num_hidden = self.random.randrange(len(prompt)) if wanted == "last rows" else 0
        if len(prompt) + (not keep_hidden) > limit:
            with pytest.raises(RequestError, match=str(limit)):
                self.scheduler.add(first)
            return
        self.scheduler.add(first)
        self.next_id += n
        self.alive |= {request.seq_id: request for request in family}
        self.texts = [*self.texts[-9:], first]

    @precondition(lambda self: self.alive)
    @rule(choice=st.randoms(use_true_random=False))
    def abort(self, choice):
        """At any phase; the siblings go too."""
        group = self.alive[choice.choice(sorted(self.alive))].request_id
        for request in [r for r in self.alive.values() if r.request_id == group]:
            self.end(request, "abort")

    @rule(really=st.sampled_from([False, False, False, True]))
    def reset(self, really):
        """Sequences that run go on, but nothing that is in the cache now is found by others."""
        if not really:  # else most runs would have nothing to find
            return
        self.scheduler.reset_prefix_cache()
        self.meaning = {}
        assert not any(pool.index for pool in self.manager.pools)

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
        if not chunks and any(request.reading for request in self.scheduler.waiting):
            return True
        self.check_chunks(chunks)
        if fails != "before":
            self.make_copies()
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
                self.deliver(chunk)
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

    def make_copies(self) -> None:
        for copy in self.manager.copies:
            self.cache[copy.pool][copy.target] = list(self.cache[copy.pool][copy.source])
        self.manager.copies.clear()
        for copy in self.manager.state_copies:
            self.states[copy.target] = self.states[copy.source]
        self.manager.state_copies.clear()

    def check_chunks(self, chunks: list[Chunk]) -> None:
        running = self.scheduler.running
        assert chunks, "work is left, but nothing runs"
        assert [chunk.request for chunk in chunks] == running[: len(chunks)]
        assert self.disk or chunks[0].request.seq_id == min(self.alive), "the oldest goes on in every step"
        assert sum(chunk.end - chunk.start for chunk in chunks) <= self.config.step_tokens
        assert sum(1 + len(request.siblings) for request in running) <= self.config.max_num_seqs
        for chunk in chunks:
            request = chunk.request
            assert 0 <= chunk.start < chunk.end <= request.num_tokens
            assert chunk.end - chunk.start <= self.config.prefill_chunk
            assert chunk.completes == (chunk.end == request.num_tokens)
            assert self.manager.num_tokens(request.seq_id) == chunk.end
            assert request.num_cached_tokens is not None
            Conservation.hits += request.num_cached_tokens == chunk.start > 0
            assert request.reading is None

    def deliver(self, chunk: Chunk) -> None:
        """Take the rows that a request wants, and learn what its hashes mean. No wanted row may have been left out."""
        request, values = chunk.request, histories(chunk.request, chunk.end)
        if request.keep_hidden:
            assert chunk.start <= request.num_hidden
            request.num_hidden = max(request.num_hidden, chunk.end)
        if request.params.prompt_logprobs is not None:
            known, all_known = len(request.prompt_logprobs), len(request.prompt_token_ids)
            assert known == all_known or chunk.start <= max(0, known - 1)
            request.prompt_logprobs = [None] * max(known, min(all_known, chunk.end + 1))
        for index, content in enumerate(request.chain.hashes[: chunk.end // 8] if request.chain else []):
            part = values[8 * index : 8 * index + 8]
            assert self.meaning.setdefault(content, part) == part, "two texts have the same hash"

    def write(self, chunk: Chunk, garbage: bool = False) -> None:
        values = histories(chunk.request, chunk.end)
        for index, pool in enumerate(self.manager.pools):
            table = self.manager.table(chunk.request.seq_id, index)
            for position in range(chunk.start, chunk.end):
                block = table[position // 8]
                assert block != NULL_BLOCK
                assert pool.refs[block] == 1, "a block is written that another sequence reads"
                assert pool.hashes[block] is None, "a block is written that is in the index"
                self.cache[index][block][position % 8] = "garbage" if garbage else values[position]
        if self.manager.slots is not None:
            slot = self.manager.slot(chunk.request.seq_id)
            assert self.manager.slots.refs[slot] == 1, "a state is written that another sequence reads"
            assert self.manager.slots.hashes[slot] is None, "a state is written that is in the index"
            assert not chunk.start or self.states[slot] == values[chunk.start - 1], (
                "the state is not that of the tokens"
            )
            self.states[slot] = "garbage" if garbage else values[-1]

    def read(self, chunk: Chunk) -> None:
        self.check_visible(chunk.request, chunk.end, chunk.start)

    def check_visible(self, request: Request, end: int, first_row: int) -> None:
        """What rows from ``first_row`` on see of the first ``end`` tokens is this sequence's own history."""
        values, seq_id = histories(request, end), request.seq_id
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

    # --- what always holds ---

    @invariant()
    def every_block_is_free_or_held_by_who_needs_it(self):
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        holders = [request.seq_id for request in self.scheduler.running]
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
        found = [request.seq_id for request in everyone]
        assert (sorted(found) if self.disk else found) == sorted(self.alive)

    @invariant()
    def what_is_in_the_cache_is_whole(self):
        """Sequences that did not run are checked too."""
        if not hasattr(self, "manager") or self.manager.copies or self.manager.state_copies:
            return
        for request in self.scheduler.running:
            held = self.manager.num_tokens(request.seq_id)
            if held:
                self.check_visible(request, held, held)

    @invariant()
    def the_index_names_the_blocks_that_hold_what_it_says(self):
        if not hasattr(self, "manager"):
            return
        for pool, blocks in zip(self.manager.pools, self.cache):
            for content, block in pool.index.items():
                assert blocks[block] == self.meaning[content]
        if self.manager.slots is not None:
            for content, slot in self.manager.slots.index.items():
                assert self.states[slot] == self.meaning[content][-1]

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        # The oldest gets a token in every step and is never preempted. When it has ended, the next one is the oldest.
        bound = sum(len(r.prompt_token_ids) + r.params.max_tokens for r in self.alive.values())
        # Every part of a prefix that is read may take a step of its own.
        bound += sum(len(r.prompt_token_ids) for r in self.alive.values()) if self.disk else 0
        for _ in range(bound):
            if not self.one_step():
                break
        assert not self.alive, "requests that do not end"
        assert not self.scheduler.has_work
        all_blocks_free(self.manager)


TestConservation = Conservation.TestCase
TestConservation.settings = settings(
    max_examples=200 * SCALE,
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
