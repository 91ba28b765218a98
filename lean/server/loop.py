"""The engine's thread: requests come through a queue, outputs go to the event loop once per step."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from lean.errors import RequestError, one_line
from lean.server.errors import ENGINE_FAILED, SHUTTING_DOWN, ApiError, refused

if TYPE_CHECKING:
    from lean.cache.disk_queues import DiskCounts
    from lean.cache.prefix import PrefixCounts
    from lean.engine.request import RequestOutput
    from lean.llm import LLM
    from lean.sampling_params import SamplingParams

log = logging.getLogger("lean")

MOST_FAILURES = 3  # steps that fail one after the other before the engine is given up


class Snapshot(NamedTuple):
    """The engine after a step.

    ``blocks``: per pool, blocks in use and in all. ``prefix``: what the prefix cache has done; None while loading.
    ``disk``: what its disk tier has done; None without one.
    """

    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    steps: int = 0
    blocks: tuple[tuple[int, int], ...] = ()
    prefix: PrefixCounts | None = None
    disk: DiskCounts | None = None


class Part(NamedTuple):
    """An output of prompt number ``prompt`` of a job, and when its step ended (`time.monotonic`)."""

    prompt: int
    output: RequestOutput
    time: float


class Job:
    """Prompts that one HTTP request gave to the engine, with the same parameters.

    The event loop makes it and reads it; the engine's thread only passes it back. `accepted` waits until every prompt
    waits in the engine. Then `parts` gives the outputs. One task at a time may wait.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], params: SamplingParams, cache_salt: str | None = None) -> None:
        self.prompts, self.params, self.cache_salt = prompts, params, cache_salt
        self._open = len(prompts) * params.n  # sequences that have not ended
        self._parts: list[Part] = []
        self._reader: asyncio.Future[None] | None = None  # of the task that waits for news
        self._error: Exception | None = None
        self._accepted = False
        self.request_ids: list[int] = []  # of the engine's thread
        self.arrived = time.monotonic()
        self.started: float | None = None  # when the first step began that the engine gave to it

    @property
    def ended(self) -> bool:
        return self._error is not None or not self._open

    async def accepted(self) -> None:
        """Wait until the engine has taken the prompts. Raises ApiError if it refuses one."""
        while not (self._accepted or self._error):
            await self._news()
        if self._error is not None:
            raise self._error

    async def parts(self) -> list[Part]:
        """The outputs that came since the last call; none when all have been given (see `ended`), or after `wake`.

        Raises ApiError if the engine failed, or the server ends.
        """
        if not self._parts and not self.ended:
            await self._news()
        if self._parts:
            parts, self._parts = self._parts, []
            return parts
        if self._error is not None:
            raise self._error
        return []

    async def _news(self) -> None:
        self._reader = asyncio.get_running_loop().create_future()
        await self._reader

    def wake(self) -> None:
        """Let the task that waits go on."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def accept(self) -> None:
        self._accepted = True
        self.wake()

    def put(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self._open -= part.output.finish_reason is not None
        self._parts += parts
        self.wake()

    def fail(self, error: Exception) -> None:
        """End the job. What came before can still be read."""
        if not self.ended:
            self._error = error
            self.wake()


class EngineLoop:
    """Runs an engine in a thread of its own. All methods but the thread's own are for the event loop's thread.

    Args:
        load: makes the engine, in the engine's thread.
        on_ready: called on the event loop when the engine is ready.
        on_end: called on the event loop when the thread ends by itself, with the error that ended it: of ``load``, or
            of an engine that cannot go on.
        on_step: called in the engine's thread after a step, with its tokens: those of prompts that it computed, and
            those that it generated.

    Attributes:
        snapshot: the engine after its last step.
        llm: the engine, once it is ready.
    """

    def __init__(
        self,
        load: Callable[[], LLM],
        on_ready: Callable[[], None] = lambda: None,
        on_end: Callable[[BaseException], None] = lambda error: None,
        on_step: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self._load, self._on_ready, self._on_end, self._on_step = load, on_ready, on_end, on_step
        self._commands: queue.SimpleQueue[Callable[[LLM], object] | None] = queue.SimpleQueue()  # None: stop
        self._jobs: set[Job] = set()  # the event loop's: not ended
        self._owners: dict[int, tuple[Job, int]] = {}  # the thread's: request id -> job and number of the prompt
        self._left: dict[int, int] = {}  # the thread's: request id -> sequences that have not ended
        self._queued: list[Job] = []  # the thread's: jobs without a step so far
        self._closed: ApiError | None = None  # the event loop's: what later jobs get
        self._failures = self._steps = 0
        self.snapshot = Snapshot()
        self.llm: LLM | None = None
        self._thread = threading.Thread(target=self._run, name="lean-engine", daemon=True)

    # --- for the event loop ---

    def start(self) -> None:
        """Start the thread. Call it in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Give a job to the engine. It ends at once where the engine takes none any more."""
        if self._closed is not None:
            job.fail(self._closed)
            return
        self._jobs.add(job)
        self.call(lambda llm: self._add(llm, job))

    def cancel(self, job: Job) -> None:
        """The client has left: end the job's requests after the running step."""
        self._jobs.discard(job)
        if not job.ended:
            self.call(lambda llm: self._abort(llm, job))

    def call(self, command: Callable[[LLM], object]) -> None:
        """Let the engine's thread call ``command`` between two steps. An error there ends the engine."""
        self._commands.put(command)

    def cancel_all(self, error: ApiError) -> None:
        """End all jobs with an error, and those that come later."""
        self._closed = error
        for job in list(self._jobs):
            self.cancel(job)
            job.fail(error)

    def stop(self, timeout: float | None = None) -> None:
        """End the thread after the running step, and wait for it. What still runs ends with an error."""
        self.cancel_all(ApiError(503, SHUTTING_DOWN))
        self._commands.put(None)
        self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _dispatch(self, batch: list[tuple[Job, list[Part]]]) -> None:
        for job, parts in batch:
            job.put(parts)
            if job.ended:
                self._jobs.discard(job)

    def _fail(self, job: Job, error: ApiError) -> None:
        self._jobs.discard(job)
        job.fail(error)

    # --- the engine's thread ---

    def _post(self, call: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the event loop has been closed: nobody waits
            self._loop.call_soon_threadsafe(call, *args)

    def _run(self) -> None:
        try:
            self.llm = self._load()
            self._publish(self.llm)
            self._post(self._on_ready)
            self._serve(self.llm)
        except BaseException as error:
            self._post(self._end_all, error)

    def _end_all(self, error: BaseException) -> None:
        self._closed = ApiError(500, ENGINE_FAILED)
        for job in list(self._jobs):
            self._fail(job, ApiError(500, ENGINE_FAILED))
        self._on_end(error)

    def _serve(self, llm: LLM) -> None:
        """Run steps while there is work, and commands between them, until the order to stop."""
        while self._obey(llm):
            if not llm.has_work:
                continue
            begun, prompt_tokens = time.monotonic(), llm.engine.scheduler.num_prompt_tokens
            try:
                outputs = llm.step()
                self._failures = 0
            except Exception as error:
                self._recover(llm, error)
                continue
            self._steps += 1
            tokens = llm.engine.scheduler.num_prompt_tokens - prompt_tokens
            tokens += sum(len(output.token_ids) for output in outputs)
            if tokens:  # else the step delivered the end of a request, or waited for the disk
                self._on_step(tokens)
            self._note_started(llm, begun)
            self._publish(llm)
            self._deliver(outputs)

    def _obey(self, llm: LLM) -> bool:
        """Carry out all commands; wait for one if the engine is idle. False: stop."""
        wait = not llm.has_work
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if command is None:
                return False
            command(llm)

    def _add(self, llm: LLM, job: Job) -> None:
        try:
            for number, prompt in enumerate(job.prompts):
                request_id = llm.add_request(prompt, job.params, cache_salt=job.cache_salt)
                job.request_ids.append(request_id)
                self._owners[request_id], self._left[request_id] = (job, number), job.params.n
        except RequestError as error:
            self._abort(llm, job)
            self._post(self._fail, job, refused(error))
        except Exception as error:
            self._abort(llm, job)
            log.error("a request could not be added: %s: %s", type(error).__name__, one_line(error))
            self._post(self._fail, job, ApiError(500, ENGINE_FAILED))
        else:
            self._queued.append(job)
            self._post(job.accept)

    def _note_started(self, llm: LLM, begun: float) -> None:
        """Note the step's beginning in the jobs whose first request no longer waits."""
        if not self._queued:
            return
        waiting = {request.request_id for request in llm.engine.scheduler.waiting}
        for job in self._queued:
            if job.request_ids[0] not in waiting:
                job.started = begun
        self._queued = [job for job in self._queued if job.started is None]

    def _abort(self, llm: LLM, job: Job) -> None:
        for request_id in job.request_ids:
            self._owners.pop(request_id, None)
            self._left.pop(request_id, None)
            llm.abort(request_id)
        if job in self._queued:
            self._queued.remove(job)
        self._publish(llm)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Hand a step's outputs to the event loop, in one call. Those of cancelled jobs have no owner."""
        now = time.monotonic()
        batch: dict[Job, list[Part]] = {}
        for output in outputs:
            if output.request_id not in self._owners:
                continue
            job, number = self._owners[output.request_id]
            batch.setdefault(job, []).append(Part(number, output, now))
            if output.finish_reason is not None:
                self._left[output.request_id] -= 1
                if not self._left[output.request_id]:
                    del self._owners[output.request_id], self._left[output.request_id]
        if batch:
            self._post(self._dispatch, list(batch.items()))

    def _recover(self, llm: LLM, error: Exception) -> None:
        """A step failed: end every request. Raises if the engine cannot go on."""
        log.error("a step of the engine failed: %s: %s", type(error).__name__, one_line(error))
        self._failures += 1
        for job in {job for job, _ in self._owners.values()}:
            self._abort(llm, job)
            self._post(self._fail, job, ApiError(500, ENGINE_FAILED))
        llm.engine.step_outputs()  # of the requests that were just aborted
        llm.check_integrity()
        if llm.has_work or self._failures >= MOST_FAILURES:
            raise error
        self._publish(llm)

    def _publish(self, llm: LLM) -> None:
        scheduler, pools = llm.engine.scheduler, llm.engine.manager.pools
        self.snapshot = Snapshot(
            len(scheduler.running),
            len(scheduler.waiting),
            scheduler.num_preemptions,
            self._steps,
            tuple((pool.num_used, pool.num_blocks) for pool in pools),
            scheduler.prefix.counts(),
            None if scheduler.disk is None else scheduler.disk.counts(),
        )
