"""LLM: one model, one cache, requests in, tokens out."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from lean.cache.block_manager import BlockManager
from lean.cache.kv_cache import KVCache
from lean.cache.plan import plan_cache
from lean.cache.size import CacheSize, size_cache
from lean.cache.usage import CacheUse, cache_use
from lean.config import EngineConfig
from lean.device import cache_share, choose_device, free_bytes
from lean.engine.decode_steps import CudaGraphs, keep_compiled_code
from lean.engine.outputs import joined, last_output, next_output, score_prompt
from lean.engine.request import FinishReason, Request, RequestOutput, check_token_ids
from lean.engine.runner import Runner
from lean.engine.sampler import Sampler
from lean.engine.scheduler import Chunk, Scheduler
from lean.engine.selftest import try_layers, try_rotation
from lean.errors import ConfigError, EngineError, RequestError
from lean.kernels.ops import backend, is_recordable
from lean.model import rotary
from lean.model.info import ModelInfo, inspect_model
from lean.model.load import LoadedModel, load_model
from lean.quant import raw_format
from lean.sampling_params import SamplingParams
from lean.scoring import score_many
from lean.store.source import ModelSource, resolve
from lean.text.detokenizer import Detokenizer
from lean.text.prompt import encode_chat, encode_prompt
from lean.text.stop_strings import StopStrings


def _finite(rows: torch.Tensor) -> torch.Tensor:
    """Which of rows [n, dim] hold finite numbers only: bool [n], 20 times as fast as looking at every one of them."""
    return rows.amax(-1).isfinite() & rows.amin(-1).isfinite()  # a NaN is both


class LLM:
    """A model answering through a paged KV cache.

    Args:
        model: a local folder, a GGUF file, a known name or a hub id; the `ModelSource` of one; or a `LoadedModel`
            that engines share.
        config: see `EngineConfig`.
        progress: show progress bars on stderr while fetching.

    Raises:
        UserError: the model or the configuration cannot be used; the message says why and what to do.
    """

    def __init__(
        self, model: str | ModelSource | LoadedModel, config: EngineConfig | None = None, *, progress: bool = False
    ) -> None:
        started = time.perf_counter()
        self.config = config = config or EngineConfig()
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device = choose_device(config.device)
        if isinstance(model, LoadedModel):
            info = model.info
            if config.dtype != "auto" and getattr(torch, config.dtype) is not info.dtype:
                raise ConfigError(f"dtype {config.dtype} asked for, the loaded model is {info.dtype}: load it again")
            if config.device != "auto" and device != model.device:
                raise ConfigError(f"device {config.device} asked for, the loaded model is on {model.device}")
            model.check_weights(config.quantization, config.deterministic)
            device = model.device
        else:
            if isinstance(model, str):
                model = resolve(model, progress=progress, trust_remote_code=config.trust_remote_code)
            info = inspect_model(model, config)
        try:
            self.kernel_name = backend(device)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        # What configuration and machine decide is refused before the weights are read.
        self.plan = plan_cache(info.layers, config, raw_format(info.dtype))
        if not isinstance(model, LoadedModel):
            self._size(info, device)
            model = load_model(info, device, config.deterministic)
        self.model = model
        self.size = self._size(info, device)
        self.notes = [*info.notes, *self.plan.notes]
        wanted = config.max_model_len or self.size.model_max_len
        if self.size.max_model_len < wanted:
            self.notes.append(f"max-model-len lowered from {wanted} to {self.size.max_model_len}: that is what fits")
        reach = self.plan.window + self.plan.num_sink_tokens
        if self.plan.window and reach > info.max_position_embeddings:
            self.notes.append(
                f"window {self.plan.window} and {self.plan.num_sink_tokens} sinks reach over {reach} tokens, "
                f"the model is made for {info.max_position_embeddings}: its answers may suffer; lower --window"
            )
        length = min(self.size.max_model_len, info.max_position_embeddings)
        self.notes += rotary.install(model.module, length, info.source.name)
        self._manager = BlockManager(self.size.rules, config.block_size)
        self._scheduler = Scheduler(config, self._manager, self.size)
        self.cache = KVCache(self.plan, self.size, info.layers, device)
        self._runner = Runner(model, self.cache, self._manager, config.deterministic)
        self._ids = itertools.count()
        self._steps = 0
        self._lock = threading.Lock()  # held by whoever changes what stands below
        self._requests: dict[int, list[Request]] = {}  # by the id that callers know: its sequences that have not ended
        self._inbox: dict[int, deque[RequestOutput]] = {}  # of requests that a method below waits for
        self._outbox: list[RequestOutput] = []  # of all others, for the caller of `step`
        self._to_abort: deque[int] = deque()  # appended to by any thread
        self.peak_use = self.stats()
        try_layers(self._runner, self._manager)
        if self.plan.window:
            rotation = try_rotation(self._runner, self._manager)
            self._runner.sink_rotary = rotation if self.plan.num_sink_tokens else None
        self.cuda_graphs = not config.enforce_eager and is_recordable(device)
        self.graph_bytes = 0  # memory that CUDA graphs take
        if device.type == "cuda" and not (self.cuda_graphs or config.enforce_eager):
            self.notes.append(f"no CUDA graphs with these kernels ({self.kernel_name}): decode steps run eagerly")
        if config.compile or self.cuda_graphs:
            self._prepare_decode(device)
        self.load_s = time.perf_counter() - started

    def _prepare_decode(self, device: torch.device) -> None:
        """Compile or record the decode steps. Raises ModelError."""
        compiles, seqs = self.config.compile, self.config.max_num_seqs
        free = free_bytes(device)
        seconds = self._runner.prepare_decode(
            seqs,
            self.size.max_model_len,
            "inductor" if compiles else None,
            CudaGraphs(device) if self.cuda_graphs else None,
        )
        if self.cuda_graphs:
            self.graph_bytes = max(0, free - free_bytes(device))
        if compiles:
            self.notes.append(
                f"compiling decode steps of up to {seqs} sequences took {seconds:.0f} s; "
                f"kept for the next run in {keep_compiled_code()}"
            )

    def _size(self, info: ModelInfo, device: torch.device) -> CacheSize:
        free, share = free_bytes(device), cache_share(device)
        return size_cache(self.plan, self.config, info.max_position_embeddings, free, share)

    # --- the seam for servers and evaluation ---

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        keep_hidden: bool = False,
        keep_cache: bool = False,
        continues: int | None = None,
    ) -> int:
        """Queue token ids; returns the request's id. Any thread may call it; it waits for the step that is running.

        Args:
            keep_hidden: for `hidden_states`: sample nothing, keep the hidden state of every token.
            keep_cache: leave K/V in the cache at the end, until `release` or until their memory is needed, for a
                request that continues this one.
            continues: id of such a request; what both begin with is not computed again.

        Raises:
            RequestError: it can never be served; the message says why, with both numbers.
        """
        return self._add(prompt_token_ids, params, None, keep_hidden, keep_cache, continues)

    def _add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None,
        inbox: deque[RequestOutput] | None,
        keep_hidden: bool = False,
        keep_cache: bool = False,
        continues: int | None = None,
    ) -> int:
        """`add_request`, its outputs going to ``inbox``; None: to the caller of `step`."""
        if isinstance(prompt_token_ids, str) or not isinstance(prompt_token_ids, Sequence):
            raise RequestError(f"a prompt is text or a list of token ids, not {type(prompt_token_ids).__name__}")
        ids = list(prompt_token_ids)
        check_token_ids(ids, self.model.vocab_size)
        params = self._resolve(params or SamplingParams(), len(ids))
        if params.prompt_logprobs is not None and max(ids, default=0) >= self.model.token_limit:
            raise RequestError(f"token id {max(ids)} is padding of the vocabulary and has no log-probability")
        if params.n > self.config.max_num_seqs:
            raise RequestError(f"n {params.n} exceeds max-num-seqs {self.config.max_num_seqs}: raise --max-num-seqs")
        if (keep_cache or keep_hidden) and params.n > 1:
            raise RequestError(f"n {params.n}: only one sequence can be scored, or kept to be continued")
        with self._exclusive():
            numbers = [next(self._ids) for _ in range(params.n)]
            family = [
                Request(
                    number,
                    ids,
                    params,
                    numbers[0],
                    index,
                    None if keep_hidden else Sampler(params, ids, index),
                    None if keep_hidden else Detokenizer(self.model.tokenizer),
                    StopStrings(params.stop),
                    keep_hidden,
                )
                for index, number in enumerate(numbers)
            ]
            request = family[0]
            request.siblings = family[1:]
            request.keep_cache, request.continues = keep_cache, continues
            self._scheduler.add(request)
            self._requests[request.request_id] = family
            if inbox is not None:
                self._inbox[request.request_id] = inbox
        return request.request_id

    def _resolve(self, params: SamplingParams, prompt_tokens: int) -> SamplingParams:
        """Fill what is None from the model's defaults, and end with the model's length."""
        for token in (*params.stop_token_ids, *(params.logit_bias or {})):
            if token >= self.model.token_limit:
                raise RequestError(f"token id {token} is beyond the {self.model.token_limit} tokens of this model")
        fill = {key: value for key, value in self.model.generation.items() if getattr(params, key) is None}
        room = max(1, self.size.max_model_len - prompt_tokens)
        return replace(params, **fill, max_tokens=min(params.max_tokens, room))

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_work or bool(self._to_abort or self._outbox)

    @property
    def num_preemptions(self) -> int:
        """How often a running request had to give its blocks to an older one and start again."""
        return self._scheduler.num_preemptions

    def step(self) -> list[RequestOutput]:
        """Run one step; one output per sequence of `add_request` that got a token or ended, however it did."""
        self._advance()
        with self._exclusive():
            outputs, self._outbox = self._outbox, []
        return outputs

    def abort(self, request_id: int) -> None:
        """End a request and free its blocks; unknown or finished ones are ignored. Any thread may call it.

        Takes effect at once, or at the end of the step that is running in another thread. Its sequences end with
        finish_reason "abort".
        """
        self._to_abort.append(request_id)
        self._abort_if_free()

    def release(self, request_id: int) -> None:
        """Free the cache of a request that was added with keep_cache and has ended."""
        with self._exclusive():
            self._scheduler.release(request_id)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """The engine's state belongs to this thread; what others wanted aborted meanwhile is aborted at the end."""
        try:
            with self._lock:
                yield
        finally:
            self._abort_if_free()

    def _abort_if_free(self) -> None:
        while self._to_abort and self._lock.acquire(blocking=False):
            try:
                self._abort_now()
            finally:
                self._lock.release()

    def _abort_now(self) -> None:
        while self._to_abort:
            for request in list(self._requests.get(self._to_abort.popleft(), ())):
                self._end(request, "abort")

    def _advance(self) -> None:
        """Run one step and hand its outputs to whom they belong."""
        with self._exclusive():
            self._abort_now()
            self._step()

    @torch.inference_mode()
    def _step(self) -> None:
        chunks = self._scheduler.schedule()
        if not chunks:
            return
        self._steps += 1
        try:
            hidden = self._runner.run(chunks)
            rows = hidden.split([chunk.end - chunk.start for chunk in chunks])
            drawing = [index for index, c in enumerate(chunks) if c.completes and not c.request.keep_hidden]
            logits = self._runner.logits(torch.cat([rows[i][-1:] for i in drawing])) if drawing else hidden[:0]
            logits[:, self.model.token_limit :] = -torch.inf
            # Asked all at once: the host waits for the device at every answer that it reads.
            checked = _finite(logits[:, : self.model.token_limit]), _finite(hidden)
            finite = iter(torch.cat(checked).tolist())
            drawn = {index: row for index, row in zip(drawing, logits) if next(finite)}
            sound = [all([*itertools.islice(finite, len(own))]) for own in rows]
            healthy = [ok and (index in drawn or index not in drawing) for index, ok in enumerate(sound)]
            for chunk, own, ok in zip(chunks, rows, healthy):
                if ok and chunk.request.params.prompt_logprobs is not None:
                    score_prompt(chunk, own, self._runner, self.model.token_limit)
        except BaseException:
            # Nothing but blocks has been taken yet: with them back, the step can be run again.
            for chunk in chunks:
                self._scheduler.take_back(chunk)
            raise
        if self._manager.tokens_held() >= self.peak_use.tokens_held:
            self.peak_use = self.stats()
        for chunk, ok in zip(chunks, healthy):
            if ok:
                self._scheduler.advance(chunk)
            else:
                self._fail(chunk)
        for index, chunk in enumerate(chunks):
            if index in drawn and healthy[index]:
                for request in self._scheduler.fork(chunk.request):
                    self._emit(request, next_output(request, drawn[index], self.model.eos_token_ids))
            elif chunk.request.keep_hidden and healthy[index]:
                self._keep(chunk, rows[index])

    def _keep(self, chunk: Chunk, rows: torch.Tensor) -> None:
        """Rows of a scoring request: given to its caller, who has seen some already if it was preempted."""
        request = chunk.request
        new = rows[max(0, request.num_hidden - chunk.start) :]
        request.num_hidden += len(new)
        reason: FinishReason | None = "length" if chunk.completes else None
        self._emit(request, replace(last_output(request, reason), hidden=new))

    def _fail(self, chunk: Chunk) -> None:
        layer = self._runner.first_bad_layer(chunk)
        where = "after the last layer" if layer is None else f"first in the K/V of layer {layer}"
        error = (
            f"the model computed non-finite numbers at step {self._steps}, {where}, "
            f"tokens {chunk.start}..{chunk.end - 1}: try --dtype bfloat16 or float32, or check the weights"
        )
        for request in (chunk.request, *chunk.request.siblings):
            self._end(request, "error", error)

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        self._emit(request, last_output(request, reason, error))

    def _emit(self, request: Request, output: RequestOutput) -> None:
        """Hand an output to whoever waits for it; the last one takes its request out."""
        inbox = self._inbox.get(request.request_id, self._outbox)
        inbox.append(output)
        if output.finish_reason is not None:
            self._scheduler.finish(request, output.finish_reason, output.error)
            family = self._requests[request.request_id]
            family.remove(request)
            if not family:
                del self._requests[request.request_id]
                if isinstance(inbox, deque) and inbox.maxlen == 0:  # forgotten
                    self._inbox.pop(request.request_id, None)

    # --- what people call ---

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """A conversation to token ids, up to where the answer begins; see `lean.text.prompt.encode_chat`."""
        return encode_chat(self.model.tokenizer, messages)

    def encode(self, prompt: str, *, chat: bool | None = None) -> list[int]:
        """Prompt text to token ids; see `lean.text.prompt.encode_prompt`."""
        return encode_prompt(self.model.tokenizer, prompt, chat)

    def _ids_of(self, prompt: str | Sequence[int], chat: bool | None) -> Sequence[int]:
        return self.encode(prompt, chat=chat) if isinstance(prompt, str) else prompt

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        chat: bool | None = None,
        keep_cache: bool = False,
        continues: int | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Yield one output per token: its text piece, and at the end the finish reason. Leaving the loop aborts.

        keep_cache and continues are those of `add_request`.
        """
        ids = self._ids_of(prompt, chat)
        request_id = self._add(ids, params, deque(), keep_cache=keep_cache, continues=continues)
        try:
            yield from self._wait_for(request_id)
        finally:
            self._forget(request_id)

    def _wait_for(self, request_id: int) -> Iterator[RequestOutput]:
        """Run steps and yield the outputs of one request; those of others wait for whoever asks."""
        inbox = self._inbox[request_id]
        while request_id in self._requests or inbox:  # in this order, whichever thread runs the last step
            if not inbox:
                self._advance()
            while inbox:
                yield inbox.popleft()

    def _forget(self, request_id: int) -> None:
        """Nobody waits for this request any more: end it, and drop what it still says."""
        self._inbox[request_id] = deque(maxlen=0)
        self.abort(request_id)
        if request_id not in self._requests:
            self._inbox.pop(request_id, None)

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | None = None,
        *,
        chat: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or token ids) and return whole outputs, in order: n of them for every prompt.

        A request whose numbers became non-finite ends with finish_reason "error" and the error's text.
        """
        batch: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        ids: list[int] = []
        outputs = []
        try:
            for prompt in batch:
                ids.append(self._add(self._ids_of(prompt, chat), params, deque()))
            for request_id in ids:
                parts = [*self._wait_for(request_id)]
                for index in range(max(part.index for part in parts) + 1):
                    outputs.append(joined([part for part in parts if part.index == index]))
        finally:
            for request_id in ids:
                self._forget(request_id)
        return outputs

    def hidden_states(self, token_ids: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Run tokens through the cache; yields (position of the first row, hidden [rows, hidden_size]) per chunk.

        `logits` turns rows into predictions of the next token. Raises EngineError for non-finite numbers.
        """
        return ((position, hidden) for _, position, hidden in self.hidden_states_of([token_ids]))

    def hidden_states_of(self, sequences: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, torch.Tensor]]:
        """`hidden_states` of many sequences, which run together as far as they fit.

        Yields (index of the sequence, position of the first row, hidden [rows, hidden_size]); the rows of one sequence
        come in order.
        """
        ids: list[int] = []
        try:
            for sequence in sequences:
                ids.append(self._add(sequence, None, deque(), keep_hidden=True))
            waiting = {request_id: (index, 0) for index, request_id in enumerate(ids)}
            while waiting:
                for request_id, (index, position) in list(waiting.items()):
                    # Asked before the inbox is emptied, whichever thread runs the last step.
                    ended, inbox = request_id not in self._requests, self._inbox[request_id]
                    while inbox:
                        output = inbox.popleft()
                        if output.hidden is not None:
                            yield index, position, output.hidden
                            position += output.hidden.shape[0]
                            waiting[request_id] = index, position
                        if output.finish_reason in ("error", "abort"):
                            raise EngineError(output.error or "the request was aborted")
                    if ended:
                        del waiting[request_id]
                        self._forget(request_id)
                if waiting:
                    self._advance()
        finally:
            for request_id in ids:
                self._forget(request_id)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> logits [rows, vocab], float32; best given ``model.logit_rows`` at a time."""
        return self._runner.logits(hidden)

    def score(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Log-probability of every token but the first, given those before it, all read through the cache.

        See `lean.scoring.score_many`, which scores many sequences together.

        Returns:
            float32 [len(token_ids) - 1] (float64 for a float64 model), natural logarithm, on the CPU.
        """
        return next(score_many(self, [token_ids]))[1].logprobs

    def stats(self) -> CacheUse:
        """What the cache holds now; `peak_use` keeps the moment with the most tokens."""
        return cache_use(self.plan, self._manager)
