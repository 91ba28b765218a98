"""Which tokens run in the next step: first come, first served, prompts in chunks, decodes beside them."""

from collections import deque
from dataclasses import dataclass

from lean.block_manager import BlockManager
from lean.cache_groups import CacheSize
from lean.config import EngineConfig
from lean.errors import EMPTY_PROMPT, RequestError
from lean.request import FinishReason, Request


@dataclass(frozen=True)
class Chunk:
    """Tokens start .. end of one request, all of them new to the cache.

    ``completes``: the chunk ends at the last known token, so that its last row predicts a new one.
    """

    request: Request
    start: int
    end: int
    completes: bool

    @property
    def token_ids(self) -> list[int]:
        return self.request.tokens(self.start, self.end)


class Scheduler:
    """Admits a request when its longest course fits beside those of the running ones, so none ever runs dry."""

    def __init__(self, config: EngineConfig, manager: BlockManager, size: CacheSize) -> None:
        self._config = config
        self._manager = manager
        self._size = size
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def _most_blocks(self, request: Request) -> int:
        """Blocks the request takes in an unbounded pool in the end; bounded pools are sized to hold everybody."""
        return self._manager.blocks_for(request.max_num_tokens)

    @property
    def _unbounded_blocks(self) -> int | None:
        return next((rule.num_blocks for rule in self._size.rules if not rule.bounded), None)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError for one that can never run."""
        prompt, limit = len(request.prompt_token_ids), self._size.max_model_len
        if prompt == 0:
            raise RequestError(EMPTY_PROMPT)
        if prompt + (not request.keep_hidden) > limit:
            raise RequestError(
                f"the prompt has {prompt} tokens, max-model-len is {limit} with room for the answer: "
                "shorten the prompt, or raise --max-model-len or --kv-memory"
            )
        blocks = self._unbounded_blocks
        if blocks is not None and self._most_blocks(request) > blocks:
            raise RequestError(
                f"the request may need {self._most_blocks(request)} cache blocks of {self._manager.block_size} tokens, "
                f"there are {blocks}: lower --max-tokens, or raise --kv-memory or --num-blocks"
            )
        self.waiting.append(request)

    def _admit(self) -> None:
        blocks = self._unbounded_blocks
        reserved = sum(self._most_blocks(request) for request in self.running)
        while self.waiting and len(self.running) < self._config.max_num_seqs:
            need = self._most_blocks(self.waiting[0])
            if blocks is not None and reserved + need > blocks:
                return
            reserved += need
            self.running.append(self.waiting.popleft())

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, their blocks taken: in order of arrival, until the step's tokens are given away."""
        self._admit()
        budget = self._config.max_num_batched_tokens
        chunks = []
        for request in self.running:
            start = request.num_computed_tokens
            end = min(request.num_tokens, start + min(self._config.prefill_chunk, budget))
            if end == start:
                break
            self._manager.append(request.id, end - start)
            chunks.append(Chunk(request, start, end, end == request.num_tokens))
            budget -= end - start
        return chunks

    def take_back(self, chunk: Chunk) -> None:
        """The step of this chunk failed: give its blocks back, so that it can be scheduled again."""
        self._manager.truncate(chunk.request.id, chunk.start)

    def advance(self, chunk: Chunk) -> None:
        """The chunk has run: count it, and free what no later token can see."""
        chunk.request.num_computed_tokens = chunk.end
        if chunk.request.finish_reason is None:
            self._manager.evict(chunk.request.id)

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """Take a running or waiting request out and free its blocks."""
        request.finish_reason, request.error = reason, error
        self._manager.free(request.id)
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)
