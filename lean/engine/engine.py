"""Engine: requests in, outputs out, one step at a time."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from lean.cache.advice import what_fits
from lean.cache.disk_tier import DiskTier
from lean.cache.usage import CacheUse, cache_use, occupancy, with_prefix
from lean.device import free_bytes
from lean.engine.assemble import room
from lean.engine.entrance import PromptTooLong
from lean.engine.mailbox import Mailbox
from lean.engine.outputs import next_output, tokenless_output
from lean.engine.pace import pace_of
from lean.engine.parts import Parts
from lean.engine.request import FinishReason, Request, RequestOutput, read_token_ids
from lean.engine.runner import StepResult
from lean.engine.sampler import Sampler
from lean.engine.scheduler import Chunk, Scheduler
from lean.errors import RequestError
from lean.sampling_params import SamplingParams
from lean.text.detokenizer import Detokenizer
from lean.text.stop_strings import StopStrings


class Engine:
    """Runs requests on a model bound to a cache.

    Any thread may call any method. A step and a change of the engine's state exclude each other.

    Attributes:
        parts: the model, its cache and what runs steps on them; config, model, runner and manager are its own.
        scheduler: which requests run and wait. mailbox: outputs that no caller has taken.
        requests: by request id, the sequences that have not ended. lock: held by whoever changes the engine's state.
        peak: occupancy of the cache at the step with the most tokens.
        pace: chooses the number of threads; None where it is fixed.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.config, self.model, self.runner, self.manager = parts.config, parts.model, parts.runner, parts.manager
        self.scheduler = Scheduler(parts.config, parts.manager, parts.size)
        if parts.disk_folder is not None:
            self.scheduler.disk = DiskTier(parts.disk_folder, self.scheduler.prefix, parts.cache, parts.manager)
        self.peak = occupancy(self.manager)
        self.pace = pace_of(parts.config, self.model.device)
        self._steps = 0
        self._seq_ids = itertools.count()
        self.lock = threading.Lock()
        self.requests: dict[int, list[Request]] = {}
        self.mailbox = Mailbox()
        self._to_abort: deque[int] = deque()  # appended to by any thread

    # --- requests come ---

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        collects: bool = False,
        keep_hidden: bool = False,
        hidden_from: int = 0,
        cache_salt: str | None = None,
    ) -> int:
        """Queue token ids; returns the request's id. Waits for a step that is running in another thread.

        Args:
            prompt_token_ids: integers, see `lean.engine.request.read_token_ids`.
            collects: the caller fetches the outputs with `collect`, and calls `forget` at the end. False: they go to
                `step_outputs`.
            keep_hidden: for scoring: sample nothing, return the last hidden states of the tokens.
            hidden_from: with keep_hidden: the first token whose hidden state is returned. Tokens before it may be read
                from the prefix cache. 0: all are computed.
            cache_salt: the request shares K/V in the prefix cache only with requests of the same salt; None: with those
                that have none.

        Raises:
            RequestError: the request can never be served.
        """
        ids = read_token_ids(prompt_token_ids, self.model.vocab_size)
        params = self._resolve(params or SamplingParams(), len(ids))
        if params.prompt_logprobs is not None and max(ids, default=0) >= self.model.token_limit:
            raise RequestError(f"token id {max(ids)} is padding of the vocabulary and stands for no text")
        if params.n > self.config.max_num_seqs:
            raise RequestError(f"n {params.n} exceeds max-num-seqs {self.config.max_num_seqs}: raise --max-num-seqs")
        if keep_hidden and params.n > 1:
            raise RequestError(f"n {params.n}: only one sequence can be scored")
        if hidden_from and not (keep_hidden and 0 < hidden_from < len(ids)):
            raise RequestError(f"hidden_from {hidden_from} must be the position of a token of a prompt to score")
        if not isinstance(cache_salt, str | None):
            raise RequestError(f"cache_salt must be a text, not {type(cache_salt).__name__}")
        with self._exclusive():
            seq_ids = [next(self._seq_ids) for _ in range(params.n)]
            tokenizer = None if keep_hidden else self.model.tokenizer
            family = _sequences(seq_ids, ids, params, tokenizer, self.model.eos_token_ids)
            first = family[0]
            first.siblings = family[1:]
            first.num_hidden, first.cache_salt = hidden_from, cache_salt
            try:
                self.scheduler.add(first)
            except PromptTooLong as error:
                raise RequestError(f"{error}; shorten the prompt; {self.longer(error.wanted)}") from None
            self.requests[first.request_id] = family
            if collects:
                self.mailbox.open(first.request_id)
        return first.request_id

    def longer(self, wanted: int) -> str:
        """The options with which sequences of ``wanted`` tokens, more than max_model_len, would fit."""
        parts = self.parts
        # The cache's own memory is free for another one.
        free = free_bytes(self.model.device) + parts.size.nbytes - parts.working_bytes
        return what_fits(room(self.model.info, self.model.device, free), self.config, wanted)

    def _resolve(self, params: SamplingParams, prompt_tokens: int) -> SamplingParams:
        """Fill what is None from the model's defaults, and end with the model's length."""
        for token in (*params.stop_token_ids, *(params.logit_bias or {})):
            if token >= self.model.token_limit:
                raise RequestError(f"token id {token} is beyond the {self.model.token_limit} tokens of this model")
        fill = {key: value for key, value in self.model.generation.items() if getattr(params, key) is None}
        room = self.parts.size.max_model_len - prompt_tokens  # below 1: the scheduler refuses the prompt
        if 0 < room < params.min_tokens:
            raise RequestError(
                f"min-tokens {params.min_tokens} must be at most {room}: prompt and answer together have at most "
                f"{self.parts.size.max_model_len} tokens, and the prompt has {prompt_tokens}"
            )
        return replace(params, **fill, max_tokens=min(params.max_tokens, max(1, room, params.min_tokens)))

    # --- a step ---

    def step(self) -> None:
        """Run one step, and deliver its outputs."""
        with self._exclusive():
            self._abort_now()
            self._step()

    def _step(self) -> None:
        chunks = self.scheduler.schedule()
        if not chunks:
            return
        self._steps += 1
        started = time.perf_counter()
        paced = None if self.pace is None else self.pace.start()
        try:
            result = self.runner.execute(chunks)
        except BaseException:
            self.scheduler.take_back(chunks)  # nothing but blocks has been taken: the step can be run again
            raise
        if self.scheduler.disk is not None:
            rows = [chunk.end - chunk.start for chunk in chunks]
            self.scheduler.disk.computed(sum(n for n in rows if n > 1), time.perf_counter() - started)
        if self.pace is not None and paced is not None and all(chunk.end - chunk.start == 1 for chunk in chunks):
            self.pace.end(paced, len(chunks))
        self._commit(chunks, result)

    def _commit(self, chunks: Sequence[Chunk], result: StepResult) -> None:
        """Count what has been computed, and give every request its output."""
        if self.manager.tokens_held() >= self.peak.tokens_held:
            self.peak = occupancy(self.manager)
        for chunk, finite in zip(chunks, result.finite):
            if finite:
                self.scheduler.advance(chunk)
            else:
                self._fail(chunk)
        for chunk, hidden, samples, scored, finite in zip(chunks, *result):  # StepResult's fields, in their order
            if not finite:
                continue
            chunk.request.prompt_logprobs += scored
            if chunk.draws:
                for request, sample in zip(self.scheduler.fork(chunk.request), samples):
                    self._emit(request, next_output(request, sample, self.model.eos_token_ids))
            elif chunk.request.keep_hidden:
                self._emit_hidden(chunk, hidden)

    def _fail(self, chunk: Chunk) -> None:
        layer = self.runner.first_bad_layer(chunk)
        where = "after the last layer" if layer is None else f"first in the K/V of layer {layer}"
        error = (
            f"the model computed non-finite numbers at step {self._steps}, {where}, "
            f"tokens {chunk.start}..{chunk.end - 1}: try --dtype bfloat16 or float32, or check the weights"
        )
        for request in (chunk.request, *chunk.request.siblings):
            self._end(request, "error", error)

    def _emit_hidden(self, chunk: Chunk, rows: torch.Tensor) -> None:
        """Deliver the rows of a scoring request that its caller wants and does not have yet."""
        request = chunk.request
        new = rows[max(0, request.num_hidden - chunk.start) :]
        request.num_hidden += len(new)
        reason: FinishReason | None = "length" if chunk.completes else None
        if len(new):
            self._emit(request, replace(tokenless_output(request, reason), hidden=new))

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        self._emit(request, tokenless_output(request, reason, error))

    def _emit(self, request: Request, output: RequestOutput) -> None:
        """Deliver an output; the last one takes its sequence out of the engine."""
        self.mailbox.put(output)
        if output.finish_reason is not None:
            self.scheduler.finish(request, output.finish_reason, output.error)
            family = self.requests[request.request_id]
            family.remove(request)
            if not family:
                del self.requests[request.request_id]
                self.mailbox.close(request.request_id)

    # --- outputs go ---

    def step_outputs(self) -> list[RequestOutput]:
        """The outputs since the last call of all requests that no caller waits for, in order."""
        with self._exclusive():
            return self.mailbox.take_rest()

    def collect(self, request_id: int) -> tuple[list[RequestOutput], bool]:
        """The outputs since the last call of a request added with ``collects``, and whether they are its last."""
        ended = request_id not in self.requests  # asked first: another thread may run the last step meanwhile
        return self.mailbox.take(request_id), ended

    def forget(self, request_id: int) -> None:
        """The caller of a request added with ``collects`` has left: abort it, and drop its remaining outputs."""
        self.mailbox.leave(request_id)
        self.abort(request_id)
        if request_id not in self.requests:
            self.mailbox.close(request_id)

    def abort(self, request_id: int) -> None:
        """End a request and free its blocks; unknown or ended ones are ignored.

        Takes effect at once, or at the end of the step that is running in another thread. Its sequences end with
        finish_reason "abort".
        """
        self._to_abort.append(request_id)
        self._abort_if_free()

    def reset_prefix_cache(self) -> None:
        """Forget what was computed until now: no later request begins with it.

        In the folder on disk, too, what engines of this kind have kept.
        """
        with self._exclusive():
            self.scheduler.reset_prefix_cache()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """The engine's state belongs to this thread. Aborts from other threads happen at the end."""
        try:
            with self.lock:
                yield
        finally:
            self._abort_if_free()

    def _abort_if_free(self) -> None:
        while self._to_abort and self.lock.acquire(blocking=False):
            try:
                self._abort_now()
            finally:
                self.lock.release()

    def _abort_now(self) -> None:
        while self._to_abort:
            for request in list(self.requests.get(self._to_abort.popleft(), ())):
                self._end(request, "abort")

    # --- state ---

    @property
    def has_work(self) -> bool:
        """Whether a step would compute or deliver anything."""
        return self.scheduler.has_work or bool(self._to_abort) or self.mailbox.has_rest

    def stats(self) -> CacheUse:
        """What the cache holds now."""
        use = cache_use(self.parts.plan, self.manager, occupancy(self.manager))
        use = with_prefix(use, self.parts.plan, self.manager, self.scheduler.prefix)
        disk = self.scheduler.disk
        return use if disk is None else replace(use, disk=disk.counts())

    def check_integrity(self) -> None:
        """Raise AssertionError unless requests, scheduler and blocks agree with each other.

        Every block is free or named by the tables as often as it is referenced, only sequences that run hold blocks,
        and the index names the blocks that have a hash. So all blocks of an idle engine are free. Not while another
        thread forgets.
        """
        with self._exclusive():
            self.manager.check_integrity()
            self.scheduler.check_integrity()
            known = {request.seq_id for family in self.requests.values() for request in family}
            queued = [*self.scheduler.running, *self.scheduler.waiting]
            found = {request.seq_id for first in queued for request in (first, *first.siblings)}
            assert known == found, "the engine and the scheduler know different sequences"
            assert self.mailbox.left <= self.requests.keys(), "outputs of a request that has ended are still dropped"


def _sequences(
    seq_ids: Sequence[int],
    ids: list[int],
    params: SamplingParams,
    tokenizer: Any | None,
    eos_token_ids: Collection[int],
) -> list[Request]:
    """The n sequences of a new request, whose id is the first of ``seq_ids``. Without a tokenizer they draw nothing."""
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    return [
        Request(
            seq_id,
            ids,
            params,
            seq_ids[0],
            index,
            None if tokenizer is None else Sampler(params, ids, index, ends),
            None if tokenizer is None else Detokenizer(tokenizer),
            StopStrings(params.stop),
            keep_hidden=tokenizer is None,
        )
        for index, seq_id in enumerate(seq_ids)
    ]
