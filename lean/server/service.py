"""The server's state: its model, its phase, and the requests in flight."""

from __future__ import annotations

import asyncio
import copy
import gc
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, TypeVar

from lean.config import DEFAULT_CHAT_MAX_TOKENS
from lean.sampling_params import SamplingParams
from lean.server.config import ServerConfig
from lean.server.errors import LOADING, SHUTTING_DOWN, ApiError
from lean.server.loop import EngineLoop
from lean.server.metrics import Metrics
from lean.server.prepare import Preparer
from lean.text.vocabulary import Vocabulary

if TYPE_CHECKING:
    from lean.llm import LLM

R = TypeVar("R")

NUM_ENCODERS = 2  # threads; so one large answer does not hold up the others
FLUSH_S = 2.0  # for the last frames of requests that were cut off


class Phase(Enum):
    """What the server is doing."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class Service:
    """What every request needs. It belongs to the event loop.

    Args:
        load: makes the engine; called in the engine's thread.
        names: what the model is called in the API; the first is the name in answers.
        defaults: sampling parameters that a request leaves out.
        chat_max_tokens: the default of max_tokens in chats.
        on_ready: called when requests can be served.

    Attributes:
        error: what ended the engine, if it did not end by order.
        in_flight: prompts of requests that have not been answered.
    """

    def __init__(
        self,
        load: Callable[[], LLM],
        config: ServerConfig,
        names: tuple[str, ...],
        defaults: SamplingParams,
        chat_max_tokens: int = DEFAULT_CHAT_MAX_TOKENS,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.names = config, names
        self._load_engine, self._defaults, self._chat_max_tokens = load, defaults, chat_max_tokens
        self._on_ready = on_ready
        self.engine = EngineLoop(self._load, self._ready, self._ended, lambda tokens: self.metrics.step(tokens))
        self.metrics = Metrics(names[0], lambda: self.engine.snapshot)
        self.phase = Phase.LOADING
        self.created = int(time.time())
        self.fingerprint = ""
        self.in_flight = 0
        self.error: BaseException | None = None
        self._encoders = ThreadPoolExecutor(NUM_ENCODERS, "lean-encode")
        self._idle, self._stop = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._preparer: Preparer | None = None
        self._vocabulary: Vocabulary | None = None

    # --- the engine's beginning and end ---

    def _load(self) -> LLM:
        """In the engine's thread: the engine, and what is made of its model."""
        llm = self._load_engine()
        self._preparer = Preparer(llm, self.config, self.names, self._defaults, self._chat_max_tokens)
        self._vocabulary = Vocabulary(copy.deepcopy(llm.model.tokenizer))
        # Objects of the libraries live as long as the server. Without this the collector visits them all now and then,
        # and holds up every thread meanwhile.
        gc.collect()
        gc.freeze()
        return llm

    def _ready(self) -> None:
        llm = self.engine.llm
        assert llm is not None
        self.metrics.attach(llm)
        self.fingerprint = f"lean-{_version()}-{llm.config.kv_dtype}-r{llm.plan.residual_length}"
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY
            self._on_ready()

    def _ended(self, error: BaseException) -> None:
        self.error = error
        self.stop()

    def stop(self) -> None:
        """Take no more requests; `wait_for_end` then ends the others. A second call ends them at once."""
        if self._stop.is_set():
            self.engine.cancel_all(ApiError(503, SHUTTING_DOWN))
        self.phase = Phase.DRAINING
        self._stop.set()

    async def wait_for_end(self) -> None:
        """Wait for the order to stop, then until no request is in flight: at most ``shutdown_timeout`` seconds."""
        await self._stop.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), self.config.shutdown_timeout)
        if self.in_flight:
            self.engine.cancel_all(ApiError(503, SHUTTING_DOWN))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), FLUSH_S)

    def close(self) -> None:
        """End the threads."""
        if self._preparer is not None:
            self._preparer.close()
        self._encoders.shutdown(wait=False, cancel_futures=True)
        self.engine.stop(timeout=FLUSH_S)

    # --- requests ---

    def check_phase(self) -> None:
        """Raise ApiError unless requests are served."""
        if self.phase is not Phase.READY:
            raise ApiError(503, LOADING if self.phase is Phase.LOADING else SHUTTING_DOWN)

    @property
    def preparer(self) -> Preparer:
        assert self._preparer is not None
        return self._preparer

    @property
    def vocabulary(self) -> Vocabulary:
        assert self._vocabulary is not None
        return self._vocabulary

    async def beside(self, call: Callable[..., R], *arguments: object) -> R:
        """Call a function in a thread beside the event loop: one that makes a part of an answer, and may take long."""
        return await asyncio.get_running_loop().run_in_executor(self._encoders, call, *arguments)

    def admit(self, prompts: int = 1) -> None:
        """Count prompts that came. Raises ApiError (429) where too many wait already."""
        if self.in_flight + prompts > self.preparer.max_in_flight:
            raise ApiError(429, f"the server has {self.in_flight} requests already: try again later", code="overloaded")
        self.in_flight += prompts
        self._idle.clear()

    def release(self, prompts: int) -> None:
        """These prompts have been answered."""
        self.in_flight -= prompts
        if not self.in_flight:
            self._idle.set()


def new_id(kind: str) -> str:
    """An id of an answer, such as ``chatcmpl-...``."""
    return f"{kind}-{secrets.token_hex(12)}"


def _version() -> str:
    try:
        return version("lean-inference")
    except PackageNotFoundError:  # run from the source tree
        return "dev"
