"""Which tokens run in the next step: first come, first served; prompts in chunks, decodes beside them.

Requests run and wait in order of arrival. A request begins with the longest prefix that the prefix cache has of it.
When a pool has no free block, the youngest running request is preempted: its blocks are freed, and it waits before all
others to begin again. The oldest request is never preempted, and one request alone always fits. So every request ends.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from lean.cache.block_manager import BlockManager
from lean.cache.prefix import Chain, Hit, PrefixCache
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


class Scheduler:
    """Decides which requests run, and moves them from waiting to running to finished.

    ``prefix``: knows which blocks hold what. All sequences register there what they have computed.
    """

    def __init__(self, config: EngineConfig, manager: BlockManager, size: CacheSize) -> None:
        self._config = config
        self._manager = manager
        self._size = size
        self.prefix = PrefixCache(manager, config.prefix_cache)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
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

    def _find(self, request: Request) -> Hit:
        """The longest prefix of a request, which holds no blocks, that is in the cache."""
        return self.prefix.find(self._chain(request), request.tokens, request.most_cached_tokens)

    def _chain(self, request: Request) -> Chain:
        if request.chain is None:
            request.chain = Chain(request.cache_salt, self._manager.block_size)
        return request.chain

    def _fits(self, request: Request, hit: Hit) -> bool:
        """Whether all known tokens of a waiting request fit beside those of the running requests.

        Each request that can still grow counts one block more: else it would often be preempted at once. Of the blocks
        of a hit those that are free count as those that are new do.
        """
        if self._unbounded is None or not self.running:
            return True
        blocks_for, num_tokens = self._manager.blocks_for, self._manager.num_tokens

        def soon(request: Request, held: int) -> int:
            """Blocks that the request will take beside those of the tokens that it holds."""
            known, most = blocks_for(request.num_tokens), blocks_for(request.max_num_tokens)
            return min(known + 1, max(known, most)) - blocks_for(held)

        still = sum(soon(r, num_tokens(r.seq_id)) for r in self.running)
        need = soon(request, hit.num_tokens) + self.prefix.revives(self._chain(request), hit)
        return still + need <= self._manager.pools[self._unbounded].num_free

    def _admit_one(self) -> bool:
        """Move the first waiting request to the running ones, if there is room."""
        slots = sum(1 + len(request.siblings) for request in self.running)
        if not self.waiting or slots + 1 + len(self.waiting[0].siblings) > self._config.max_num_seqs:
            return False
        request = self.waiting[0]
        hit = self._find(request)
        if not self._fits(request, hit):
            return False
        self.running.append(self.waiting.popleft())
        if request.num_cached_tokens is None:
            request.num_cached_tokens = hit.num_tokens
            if request.most_cached_tokens:
                self.prefix.count(request.num_tokens, hit)
        self._begin(request, hit)
        return True

    def _begin(self, request: Request, hit: Hit) -> None:
        """Let a request that holds no blocks begin with what was found."""
        self.prefix.begin(request.seq_id, self._chain(request), hit)
        request.num_computed_tokens, request.branch = hit.num_tokens, hit.branch

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
            end = self._end_for_states(request, start, end)
            if not self._make_room(request, end - start):
                break
            self._manager.append(request.seq_id, end - start)
            chunks.append(Chunk(request, start, end, end == request.num_tokens))
            budget -= end - start
        return chunks

    def _end_for_states(self, request: Request, start: int, end: int) -> int:
        """Where a chunk ends so that its states can be kept with a tail: states are known after whole chunks only."""
        if self._size.num_slots <= self._config.max_num_seqs or not self.prefix.enabled:
            return end
        return min((at for at in (request.branch, self._last_boundary(request)) if start < at < end), default=end)

    def _resume_at(self, request: Request, start: int) -> None:
        """Let a request go on at token ``start``, or begin again where tokens in its sight have been evicted."""
        if self._manager.num_tokens(request.seq_id) == start:
            return
        try:
            self._manager.truncate(request.seq_id, start)
            request.num_computed_tokens = start
        except ValueError:
            self._manager.free(request.seq_id)
            self._begin(request, self._find(request))

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Free blocks until the request can go on; False where the request itself was preempted."""
        while not self._manager.can_append(request.seq_id, num_tokens):
            victim = self.running[-1]
            if victim is self.running[0]:
                raise EngineError(f"request {request.seq_id} does not fit into an empty cache")
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def preempt(self, request: Request) -> None:
        """Free all blocks of the youngest running request. It waits before all others to begin again.

        What it has computed stays in the index until its blocks are taken.
        """
        self._leave(request)
        request.num_computed_tokens = 0
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
        """The chunk has been computed: count it, register its blocks, and free those that no later token can see.

        Only a chunk that fills a block changes anything. Tails of prefixes that end in it are kept before the eviction,
        while their blocks are there.
        """
        request, size = chunk.request, self._manager.block_size
        request.num_computed_tokens = chunk.end
        if chunk.start // size == chunk.end // size:
            return
        chain = self._chain(request)
        self.prefix.register(request.seq_id, chain, request.tokens, chunk.start, chunk.end)
        for end in {self._last_boundary(request), request.branch}:
            if chunk.start < end <= chunk.end:
                self.prefix.keep_tail(request.seq_id, chain, end)
        self._manager.evict(request.seq_id)

    def _last_boundary(self, request: Request) -> int:
        """The longest prefix of a prompt, in full blocks, that another request with this prompt can begin with."""
        size = self._manager.block_size
        return (len(request.prompt_token_ids) - 1) // size * size

    def _leave(self, request: Request) -> None:
        """Free the blocks of a request; where it has come to is where another one may go on."""
        if request.num_computed_tokens:
            self.prefix.keep_tail(request.seq_id, self._chain(request), request.num_computed_tokens)
        self._manager.free(request.seq_id)

    def fork(self, request: Request) -> list[Request]:
        """Let the siblings of a request run once its prompt has been computed; returns it and its siblings."""
        family = [request, *request.siblings]
        request.siblings = []
        for sibling in family[1:]:
            self._manager.fork(request.seq_id, sibling.seq_id)
            sibling.num_computed_tokens = request.num_computed_tokens
            sibling.num_cached_tokens = request.num_cached_tokens
            sibling.chain = self._chain(request).copy()
            sibling.prompt_logprobs = list(request.prompt_logprobs)
        place = self.running.index(request) + 1
        self.running[place:place] = family[1:]
        return family

    # --- the end ---

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """Remove a running or waiting request, and free its blocks."""
        request.finish_reason, request.error = reason, error
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if reason == "error":
            self.prefix.forget(request.seq_id)
            self._manager.free(request.seq_id)
        else:
            self._leave(request)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every sequence is in one place, and only running ones hold blocks."""
        running, waiting = ([request.seq_id for request in queue] for queue in (self.running, self.waiting))
        everyone = [*running, *waiting]
        assert len(set(everyone)) == len(everyone), "a sequence is in two places"
        assert self._manager.seq_ids <= set(running), "a sequence that does not run holds blocks"
