"""Where requests wait, and when one may run: first come, first served.

A request that begins anew begins with the longest prefix that the prefix cache has of it. One whose prefix is being
read from the disk waits, and those behind it may run first.
"""

from collections import deque
from collections.abc import Sequence

from lean.cache.block_manager import BlockManager
from lean.cache.chain import Chain
from lean.cache.disk_tier import DiskTier
from lean.cache.prefix import Hit, PrefixCache
from lean.cache.size import CacheSize
from lean.config import EngineConfig
from lean.engine.request import Request
from lean.errors import EMPTY_PROMPT, RequestError


class PromptTooLong(RequestError):
    """The prompt and its answer are longer than any sequence may be. ``wanted``: tokens that would be enough."""

    def __init__(self, prompt: int, limit: int, keep_hidden: bool) -> None:
        self.wanted = prompt + (not keep_hidden)
        what = "it" if keep_hidden else "prompt and answer"
        super().__init__(f"the prompt has {prompt} tokens, and max-model-len is {limit} for {what}")


class Entrance:
    """The queue of waiting requests, and the rules by which one begins.

    Attributes:
        waiting: requests in order of arrival, those that were preempted first.
        disk: reads and writes prefixes on disk; None without a folder.
    """

    def __init__(self, config: EngineConfig, manager: BlockManager, size: CacheSize, prefix: PrefixCache) -> None:
        self._config, self._manager, self._size, self._prefix = config, manager, size, prefix
        self.waiting: deque[Request] = deque()
        self.disk: DiskTier | None = None
        self._in_vain: tuple[int, ...] | None = None  # the moment when the first waiting request did not fit

    @property
    def _unbounded(self) -> int | None:
        """Index of a pool that keeps every token; all such pools have the same number of blocks."""
        return next((index for index, rule in enumerate(self._size.rules) if not rule.bounded), None)

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

    def find(self, request: Request) -> Hit:
        """The longest prefix of a request, which holds no blocks, that is in the cache."""
        return self._prefix.find(self.chain(request), request.tokens, request.most_cached_tokens)

    def chain(self, request: Request) -> Chain:
        if request.chain is None:
            request.chain = Chain(request.cache_salt, self._manager.block_size)
        return request.chain

    def _fits(self, request: Request, hit: Hit, running: Sequence[Request]) -> bool:
        """Whether all known tokens of a waiting request fit beside those of the running requests.

        Each request that can still grow counts one block more: else it would often be preempted at once. Of the blocks
        of a hit those that are free count as those that are new do.
        """
        if self._unbounded is None or not running:
            return True
        blocks_for, num_tokens = self._manager.blocks_for, self._manager.num_tokens

        def soon(request: Request, held: int) -> int:
            """Blocks that the request will take beside those of the tokens that it holds."""
            known, most = blocks_for(request.num_tokens), blocks_for(request.max_num_tokens)
            return min(known + 1, max(known, most)) - blocks_for(held)

        still = sum(soon(r, num_tokens(r.seq_id)) for r in running)
        need = soon(request, hit.num_tokens) + self._prefix.revives(self.chain(request), hit)
        return still + need <= self._manager.pools[self._unbounded].num_free

    def admit(self, running: list[Request]) -> bool:
        """Move the first waiting request to the running ones, if there is room. Those that wait for the disk stay."""
        slots = sum(1 + len(request.siblings) for request in running)
        for place, request in enumerate(self.waiting):
            if request.reading is not None and not request.reading.done:
                continue
            if slots + 1 + len(request.siblings) > self._config.max_num_seqs:
                return False
            now = self._moment(request, running)
            if now == self._in_vain:
                return False
            hit = self.find(request)
            if self._reads(request, hit):
                continue
            if not self._fits(request, hit, running):
                self._in_vain = now
                return False
            del self.waiting[place]
            running.append(request)
            self._count(request, hit)
            self.begin(request, hit)
            return True
        return False

    def _moment(self, request: Request, running: Sequence[Request]) -> tuple[int, ...]:
        """What decides whether a request fits: who runs, how many blocks are free, and how many contents are known.

        A long prompt has thousands of blocks to look up; most steps of decoding change none of this.
        """
        pools = self._manager.pools
        return (
            request.seq_id,
            *(r.seq_id for r in running),
            *(p.num_free for p in pools),
            *(len(p.index) for p in pools),
        )

    def _reads(self, request: Request, hit: Hit) -> bool:
        """Whether a waiting request must wait until the disk has given more of its prefix than memory has."""
        if self.disk is None or request.asked_disk:
            return False
        request.asked_disk = True
        request.reading = self.disk.ask(self.chain(request), hit.num_tokens, request.most_cached_tokens)
        return request.reading is not None

    def _count(self, request: Request, hit: Hit) -> None:
        if request.num_cached_tokens is None:
            request.num_cached_tokens = hit.num_tokens
            if request.most_cached_tokens:
                before = hit.num_tokens if request.reading is None else request.reading.num_before
                self._prefix.count(request.num_tokens, hit, max(0, hit.num_tokens - before))
        request.reading = None

    def begin(self, request: Request, hit: Hit) -> None:
        """Let a request that holds no blocks begin with what was found."""
        self._prefix.begin(request.seq_id, self.chain(request), hit)
        request.num_computed_tokens, request.branch = hit.num_tokens, hit.branch
