"""Which tokens run in the next step: first come, first served; prompts in chunks, decodes beside them.

Requests run and wait in order of arrival. When a pool has no free block, sequences that are kept for a next turn are
released first. Then the youngest running request is preempted: its blocks are freed, and it waits before all others
until its tokens can be computed again. The oldest request is never preempted, and one request alone always fits. So
every request ends.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from lean.cache.block_manager import BlockManager
from lean.cache.size import CacheSize
from lean.config import EngineConfig
from lean.engine.request import FinishReason, Request
from lean.errors import EMPTY_PROMPT, EngineError, RequestError


class PromptTooLong(RequestError):
    """The prompt and its answer are longer than any sequence may be. ``wanted``: tokens that would be enough."""

    def __init__(self, prompt: int, limit: int, keep_hidden: bool) -> None:
        self.wanted = prompt + (not keep_hidden)
        what = "it" if keep_hidden else "prompt and answer"
        super().__init__(f"the prompt has {prompt} tokens, and max-model-len is {limit} for {what}")


@dataclass(frozen=True)
class Chunk:
    """Tokens start .. end - 1 of one request, all of them new to the cache.

    ``completes``: the chunk ends at the last known token, so its last row predicts a new one.
    """

    request: Request
    start: int
    end: int
    completes: bool

    @property
    def draws(self) -> bool:
        """Whether a token is drawn after its last row."""
        return self.completes and not self.request.keep_hidden

    @property
    def token_ids(self) -> list[int]:
        return self.request.tokens(self.start, self.end)


def common_prefix(a: list[int], b: list[int]) -> int:
    """Number of equal leading elements."""
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(index for index in range(shorter) if a[index] != b[index])


class Scheduler:
    """Decides which requests run, and moves them from waiting to running to finished."""

    def __init__(self, config: EngineConfig, manager: BlockManager, size: CacheSize) -> None:
        self._config = config
        self._manager = manager
        self._size = size
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.kept: dict[int, list[int]] = {}  # finished sequences in the cache -> their tokens; oldest first
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def _unbounded(self) -> int | None:
        """Index of a pool that keeps every token; all such pools have the same number of blocks."""
        return next((index for index, rule in enumerate(self._size.rules) if not rule.bounded), None)

    # --- admission ---

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError for one that can never run."""
        prompt, limit = len(request.prompt_token_ids), self._size.max_model_len
        if prompt == 0:
            raise RequestError(EMPTY_PROMPT)
        if prompt + (not request.keep_hidden) > limit:
            raise PromptTooLong(prompt, limit, request.keep_hidden)
        if self._unbounded is not None:
            # Bounded pools have blocks for max_num_seqs sequences.
            size, blocks = self._manager.block_size, self._size.rules[self._unbounded].num_blocks
            need = self._manager.blocks_for(request.max_num_tokens)
            if need > blocks:
                room = blocks * size + 1 - prompt
                raise RequestError(
                    f"the request may need {need} cache blocks of {size} tokens, but there are only {blocks}: lower "
                    f"--max-tokens to at most {room}, or raise --kv-memory or --num-blocks"
                )
        self.waiting.append(request)

    def _fits(self, request: Request) -> bool:
        """Whether all known tokens of a waiting request fit beside those of the running requests.

        Each request that can still grow counts one block more: else it would often be preempted at once.
        """
        if self._unbounded is None or not self.running:
            return True
        blocks_for, num_tokens = self._manager.blocks_for, self._manager.num_tokens

        def soon(request: Request, held: int) -> int:
            """Blocks that the request will take beside those of the tokens that it holds."""
            known, most = blocks_for(request.num_tokens), blocks_for(request.max_num_tokens)
            return min(known + 1, max(known, most)) - blocks_for(held)

        still = sum(soon(r, num_tokens(r.seq_id)) for r in self.running)
        need = soon(request, self._reusable(request))
        free = self._manager.pools[self._unbounded].num_free
        for seq_id in self.kept:
            if seq_id != request.continues:
                free += blocks_for(num_tokens(seq_id))
        return still + need <= free

    def _reusable(self, request: Request) -> int:
        """Number of leading tokens that the continued sequence has in the cache; at least one is left to compute.

        0 where every row of the prompt must be computed, and where states hold more than these tokens.
        """
        tokens = self.kept.get(request.continues) if request.continues is not None else None
        if tokens is None or request.continues is None:
            return 0
        if request.keep_hidden or request.params.prompt_logprobs is not None:
            return 0
        held = self._manager.num_tokens(request.continues)
        known = min(common_prefix(tokens, request.tokens(0, request.num_tokens)), held, request.num_tokens - 1)
        return known if self._manager.slots is None or known == held else 0

    def _admit_one(self) -> bool:
        """Move the first waiting request to the running ones, if there is room."""
        slots = sum(1 + len(request.siblings) for request in self.running)
        if not self.waiting or slots + 1 + len(self.waiting[0].siblings) > self._config.max_num_seqs:
            return False
        request = self.waiting[0]
        if not self._fits(request):
            return False
        self.running.append(self.waiting.popleft())
        reusable = self._reusable(request)
        if request.continues is None:
            return True
        if reusable:
            self._manager.fork(request.continues, request.seq_id)
            request.num_computed_tokens = request.num_cached_tokens = reusable
            self._resume_at(request, reusable)
        self.release(request.continues)
        return True

    # --- the step ---

    def schedule(self) -> list[Chunk]:
        """The next step's chunks in order of arrival, up to the step's token budget. Their blocks are taken."""
        budget = self._config.step_tokens
        preemptions = self.num_preemptions
        chunks: list[Chunk] = []
        while budget and (
            len(chunks) < len(self.running) or (self.num_preemptions == preemptions and self._admit_one())
        ):
            request = self.running[len(chunks)]
            # The last known token is computed again where a failed step left nothing else to do.
            start = min(request.num_computed_tokens, request.num_tokens - 1)
            self._resume_at(request, start)
            start = request.num_computed_tokens
            end = min(request.num_tokens, start + min(self._config.chunk_tokens, budget))
            if not self._make_room(request, end - start):
                break
            self._manager.append(request.seq_id, end - start)
            chunks.append(Chunk(request, start, end, end == request.num_tokens))
            budget -= end - start
        return chunks

    def _resume_at(self, request: Request, start: int) -> None:
        """Let a request go on at token ``start``, or from the beginning where tokens in its sight have been evicted."""
        if self._manager.num_tokens(request.seq_id) == start:
            return
        try:
            self._manager.truncate(request.seq_id, start)
            request.num_computed_tokens = start
        except ValueError:
            self._manager.free(request.seq_id)
            request.num_computed_tokens = request.num_cached_tokens = 0

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Free blocks until the request can go on; False where the request itself was preempted."""
        while not self._manager.can_append(request.seq_id, num_tokens):
            if self.kept:
                self.release(next(iter(self.kept)))
                continue
            victim = self.running[-1]
            if victim is self.running[0]:
                raise EngineError(f"request {request.seq_id} does not fit into an empty cache")
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def preempt(self, request: Request) -> None:
        """Free all blocks of the youngest running request. It waits before all others to start again."""
        self._manager.free(request.seq_id)
        request.num_computed_tokens = request.num_cached_tokens = 0
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def take_back(self, chunks: Iterable[Chunk]) -> None:
        """The step of these chunks failed: give their blocks back, so that they can be scheduled again.

        Sequences with states begin anew: the step may have changed some of them.
        """
        for chunk in chunks:
            self._resume_at(chunk.request, chunk.start)

    def advance(self, chunk: Chunk) -> None:
        """The chunk has been computed: count it, and free the blocks that no later token can see."""
        chunk.request.num_computed_tokens = chunk.end
        self._manager.evict(chunk.request.seq_id)

    def fork(self, request: Request) -> list[Request]:
        """Let the siblings of a request run once its prompt has been computed; returns it and its siblings."""
        family = [request, *request.siblings]
        request.siblings = []
        for sibling in family[1:]:
            self._manager.fork(request.seq_id, sibling.seq_id)
            sibling.num_computed_tokens = request.num_computed_tokens
            sibling.num_cached_tokens = request.num_cached_tokens
            sibling.prompt_logprobs = list(request.prompt_logprobs)
        place = self.running.index(request) + 1
        self.running[place:place] = family[1:]
        return family

    # --- the end ---

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """Remove a running or waiting request, and free its blocks unless they are kept for a next request."""
        request.finish_reason, request.error = reason, error
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if request.keep_cache and reason != "error" and self._manager.num_tokens(request.seq_id):
            self.kept[request.seq_id] = request.tokens(0, request.num_tokens)
        else:
            self._manager.free(request.seq_id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every sequence is in one place, and only running and kept ones hold blocks."""
        running, waiting = ([request.seq_id for request in queue] for queue in (self.running, self.waiting))
        everyone = [*running, *waiting, *self.kept]
        assert len(set(everyone)) == len(everyone), "a sequence is in two places"
        assert self._manager.seq_ids <= {*running, *self.kept}, "a sequence that neither runs nor is kept holds blocks"

    def release(self, seq_id: int) -> None:
        """Free a kept sequence; unknown ones are ignored."""
        if self.kept.pop(seq_id, None) is not None:
            self._manager.free(seq_id)
