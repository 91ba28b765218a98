"""Which tokens run in the next step: first come, first served; prompts in chunks, decodes beside them.

Requests run and wait in order of arrival. A request begins with the longest prefix that the prefix cache has of it.
When a pool has no free block, the youngest running request is preempted: its blocks are freed, and it waits before all
others to begin again. The oldest request is never preempted, and one request alone always fits. So every request ends.
A request whose prefix is being read from the disk waits, and those behind it may run first.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from lean.cache.block_manager import BlockManager
from lean.cache.disk_tier import DiskTier
from lean.cache.prefix import PrefixCache
from lean.cache.size import CacheSize
from lean.config import EngineConfig
from lean.engine.entrance import Entrance
from lean.engine.request import FinishReason, Request
from lean.errors import EngineError

DISK_WAIT_S = 0.02  # for how long a step waits where there is nothing else to do


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

    Attributes:
        prefix: knows which blocks hold what. All sequences register there what they have computed.
        waiting, running: sequences in order of arrival, those that were preempted first.
        num_prompt_tokens: prompt tokens that steps have computed; those of a preempted request count again.
    """

    def __init__(self, config: EngineConfig, manager: BlockManager, size: CacheSize) -> None:
        self._config = config
        self._manager = manager
        self._size = size
        self.prefix = PrefixCache(manager, config.prefix_cache)
        self._entrance = Entrance(config, manager, size, self.prefix)
        self.waiting = self._entrance.waiting
        self.running: list[Request] = []
        self.num_preemptions = self.num_prompt_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def disk(self) -> DiskTier | None:
        """Reads and writes prefixes on disk; None without a folder."""
        return self._entrance.disk

    @disk.setter
    def disk(self, tier: DiskTier) -> None:
        self._entrance.disk = tier

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError for one that can never run."""
        self._entrance.add(request)

    # --- the step ---

    def schedule(self) -> list[Chunk]:
        """The next step's chunks in order of arrival, up to the step's token budget. Their blocks are taken.

        Empty where all requests wait for the disk.
        """
        if self.disk is not None:
            self.disk.receive()
        budget = self._config.step_tokens
        preemptions = self.num_preemptions
        chunks: list[Chunk] = []
        while budget and (
            len(chunks) < len(self.running)
            or (self.num_preemptions == preemptions and self._entrance.admit(self.running))
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
        if not chunks and self.waiting and self.disk is not None:
            self.disk.wait(DISK_WAIT_S)
        return chunks

    @property
    def _keeps_states(self) -> bool:
        """Whether there are slots for states beside those of running sequences."""
        return self._size.num_slots > self._config.max_num_seqs and self.prefix.enabled

    def _end_for_states(self, request: Request, start: int, end: int) -> int:
        """Where a chunk ends so that its states can be kept with a tail: states are known after whole chunks only."""
        if not self._keeps_states:
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
            self._entrance.begin(request, self._entrance.find(request))

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
        self.num_prompt_tokens += max(0, min(chunk.end, len(request.prompt_token_ids)) - chunk.start)
        if chunk.start // size == chunk.end // size:
            return
        chain = self._entrance.chain(request)
        self.prefix.register(request.seq_id, chain, request.tokens, chunk.start, chunk.end)
        for end in {self._last_boundary(request), request.branch}:
            if chunk.start < end <= chunk.end:
                self._keep(request, end)
        # States are known at the end of a chunk only. Those of an answer's last boundary let a chat go on from there.
        decoded = self._keeps_states and chunk.end % size == 0 and chunk.end > len(request.prompt_token_ids)
        if decoded and self.prefix.keep_state(request.seq_id, chain, chunk.end, request.state_kept_at):
            request.state_kept_at = chunk.end
        self._manager.evict(request.seq_id)

    def _last_boundary(self, request: Request) -> int:
        """The longest prefix of a prompt, in full blocks, that another request with this prompt can begin with."""
        size = self._manager.block_size
        return (len(request.prompt_token_ids) - 1) // size * size

    def _leave(self, request: Request) -> None:
        """Free the blocks of a request; where it has come to is where another one may go on."""
        try:
            if request.num_computed_tokens:
                self._keep(request, request.num_computed_tokens)
        finally:
            self._manager.free(request.seq_id)

    def _keep(self, request: Request, num_tokens: int) -> None:
        """Let other requests begin with the first tokens of this one, in full blocks."""
        chain = self._entrance.chain(request)
        if self.prefix.keep_tail(request.seq_id, chain, num_tokens) and self.disk is not None:
            self.disk.save(chain, num_tokens)

    def fork(self, request: Request) -> list[Request]:
        """Let the siblings of a request run once its prompt has been computed; returns it and its siblings."""
        family = [request, *request.siblings]
        request.siblings = []
        for sibling in family[1:]:
            self._manager.fork(request.seq_id, sibling.seq_id)
            sibling.num_computed_tokens = request.num_computed_tokens
            sibling.num_cached_tokens = request.num_cached_tokens
            sibling.chain = self._entrance.chain(request).copy()
            sibling.prompt_logprobs = list(request.prompt_logprobs)
        place = self.running.index(request) + 1
        self.running[place:place] = family[1:]
        return family

    def reset_prefix_cache(self) -> None:
        """Forget what the blocks hold, and what the folder on disk has of this kind of engine."""
        self.prefix.reset()
        if self.disk is not None:
            self.disk.reset()

    def close(self) -> None:
        """Finish writing to the folder on disk."""
        if self.disk is not None:
            self.disk.close()

    # --- the end ---

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """Remove a running or waiting request, and free its blocks."""
        request.finish_reason, request.error = reason, error
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if request.reading is not None and self.disk is not None:
            self.disk.give_up(request.reading)
        if reason == "error":
            self.prefix.forget(request.seq_id)
            if self.disk is not None and request.chain is not None:
                self.disk.forget(request.chain.hashes)
            self._manager.free(request.seq_id)
        else:
            self._leave(request)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every sequence is in one place, and only running ones hold blocks."""
        running, waiting = ([request.seq_id for request in queue] for queue in (self.running, self.waiting))
        everyone = [*running, *waiting]
        assert len(set(everyone)) == len(everyone), "a sequence is in two places"
        assert self._manager.seq_ids <= set(running), "a sequence that does not run holds blocks"
