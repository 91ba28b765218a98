"""LLM: one model, one cache, requests in, tokens out."""

import itertools
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from lean import rotary
from lean.block_manager import BlockManager
from lean.cache_groups import CacheSize, plan_cache, size_cache
from lean.config import EngineConfig
from lean.detokenizer import Detokenizer
from lean.device import cache_share, choose_device, free_bytes
from lean.errors import ConfigError, EngineError, ModelError, RequestError, one_line
from lean.hub import ModelSource, resolve
from lean.kernels.ops import backend
from lean.kv_cache import CacheUse, CountedLayers, KVCache, cache_use
from lean.model import LoadedModel, ModelInfo, inspect_model, load_model
from lean.prompt import encode_prompt
from lean.quant import raw_format
from lean.request import Request, RequestOutput, SamplingParams
from lean.runner import LOGIT_SLICE, Runner
from lean.sampler import sample
from lean.scheduler import Chunk, Scheduler


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
            device = model.device
        else:
            if isinstance(model, str):
                model = resolve(model, progress=progress, trust_remote_code=config.trust_remote_code)
            info = inspect_model(model, config.dtype, config.trust_remote_code)
        try:
            self.kernels = backend(device)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        # Everything that can be refused is refused before the weights are read.
        self.plan = plan_cache(info.layers, config, raw_format(info.dtype))
        if not isinstance(model, LoadedModel):
            self._size(info, device)
            model = load_model(info, device, config.deterministic)
        self.model = model
        self.size = self._size(info, device)
        self.notes = [*info.notes, *self.plan.notes]
        wanted = config.max_model_len or info.max_position_embeddings
        if self.size.max_model_len < wanted:
            self.notes.append(f"max-model-len lowered from {wanted} to {self.size.max_model_len}: that is what fits")
        self.notes += rotary.install(model.module, self.size.max_model_len, info.source.name)
        self._manager = BlockManager(self.size.rules, config.block_size)
        self._scheduler = Scheduler(config, self._manager, self.size)
        self.cache = KVCache(self.plan, self.size, device)
        self._runner = Runner(model, self.cache, self._manager, config.deterministic)
        self._requests: dict[int, Request] = {}
        self._text: dict[int, Detokenizer] = {}
        self._ids = itertools.count()
        self._steps = 0
        self._inbox: dict[int, deque[RequestOutput]] = {}  # of requests that a method below waits for
        self._outbox: list[RequestOutput] = []  # of all others, for the caller of `step`
        self.peak_use = self.stats()
        self._probe()
        self.load_s = time.perf_counter() - started

    def _size(self, info: ModelInfo, device: torch.device) -> CacheSize:
        free, share = free_bytes(device), cache_share(device)
        return size_cache(self.plan, self.config, info.max_position_embeddings, free, share)

    def _probe(self) -> None:
        """Run two tokens, so that a model that does not fit fails here and not in somebody's request.

        Every layer must come to lean's attention exactly once: a second call would overwrite the K/V of the first.
        """
        probe = Request(next(self._ids), [0, 0], SamplingParams())
        name, layers = self.model.info.source.name, self.cache.layers
        calls = self.cache.layers = CountedLayers(layers)
        try:
            self._manager.append(probe.id, 2)
            self._runner.logits(self._runner.run([Chunk(probe, 0, 2, True)]))
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from None
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ModelError(f"{name}: cannot run on lean's cache: {one_line(error)}") from error
        finally:
            self.cache.layers = layers
            self._manager.free(probe.id)
        for layer in layers:
            if calls.count[layer] != 1:
                raise ModelError(f"{name}: layer {layer} attends {calls.count[layer]} times a step, lean serves once")

    # --- the seam for servers and evaluation ---

    def add_request(
        self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None, *, keep_hidden: bool = False
    ) -> int:
        """Queue token ids; returns the request's id. Raises RequestError for what can never be served."""
        if isinstance(prompt_token_ids, str) or not isinstance(prompt_token_ids, Sequence):
            raise RequestError(f"a prompt is text or a list of token ids, not {type(prompt_token_ids).__name__}")
        ids = list(prompt_token_ids)
        for token in ids:
            if type(token) is not int or not 0 <= token < self.model.vocab_size:
                raise RequestError(f"token id {token!r} is no integer from 0 to {self.model.vocab_size - 1}")
        params = self._resolve(params or SamplingParams(), len(ids))
        generator = None
        if params.temperature:
            seed = secrets.randbits(63) if params.seed is None else params.seed
            generator = torch.Generator().manual_seed(seed)
        request = Request(next(self._ids), ids, params, generator, keep_hidden)
        self._scheduler.add(request)
        self._requests[request.id] = request
        self._text[request.id] = Detokenizer(self.model.tokenizer)
        return request.id

    def _resolve(self, params: SamplingParams, prompt_tokens: int) -> SamplingParams:
        """Fill what is None from the model's defaults, and end with the model's length."""
        defaults = {"temperature": 0.0, **self.model.generation}
        fill = {key: value for key, value in defaults.items() if getattr(params, key) is None}
        room = max(1, self.size.max_model_len - prompt_tokens)
        return replace(params, **fill, max_tokens=min(params.max_tokens, room))

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_work

    def step(self) -> list[RequestOutput]:
        """Run one step; one output per request of `add_request` that got a token, ended or failed."""
        self._advance()
        outputs, self._outbox = self._outbox, []
        return outputs

    @torch.inference_mode()
    def _advance(self) -> None:
        """Run one step and hand its outputs to whom they belong."""
        chunks = self._scheduler.schedule()
        if not chunks:
            return
        self._steps += 1
        try:
            hidden = self._runner.run(chunks)
            rows = hidden.split([chunk.end - chunk.start for chunk in chunks])
            drawing = [(c, r[-1:]) for c, r in zip(chunks, rows) if c.completes and not c.request.keep_hidden]
            keeping = [(c, r) for c, r in zip(chunks, rows) if not c.completes or c.request.keep_hidden]
            healthy = [bool(r.isfinite().all()) for _, r in keeping]
            logits = self._runner.logits(torch.cat([r for _, r in drawing])) if drawing else hidden[:0]
            finite = logits[:, : self.model.token_limit].isfinite().all(-1).tolist()
        except BaseException:
            # Nothing but blocks has been taken yet: with them back, the step can be run again.
            for chunk in chunks:
                self._scheduler.take_back(chunk)
            raise
        if self._manager.tokens_held() >= self.peak_use.tokens_held:
            self.peak_use = self.stats()
        outputs = [self._keep(chunk, r) if ok else self._fail(chunk) for (chunk, r), ok in zip(keeping, healthy)]
        logits[:, self.model.token_limit :] = -torch.inf
        outputs += [
            self._draw(chunk.request, row) if ok else self._fail(chunk)
            for (chunk, _), row, ok in zip(drawing, logits, finite)
        ]
        for output in outputs:
            if output is not None:
                self._inbox.get(output.request_id, self._outbox).append(output)
        for chunk in chunks:
            self._scheduler.advance(chunk)

    def _keep(self, chunk: Chunk, rows: torch.Tensor) -> RequestOutput | None:
        """Rows that draw nothing: a scoring request keeps them, and ends with its last."""
        if not chunk.request.keep_hidden:
            return None
        chunk.request.hidden.append(rows)
        if not chunk.completes:
            return None
        self._scheduler.finish(chunk.request, "length")
        return self._output(chunk.request, [])

    def _draw(self, request: Request, logits: torch.Tensor) -> RequestOutput:
        token = sample(logits, request.params, request.generator)
        request.output_token_ids.append(token)
        if token in self.model.eos_token_ids and not request.params.ignore_eos:
            self._scheduler.finish(request, "stop")
        elif len(request.output_token_ids) >= request.params.max_tokens:
            self._scheduler.finish(request, "length")
        return self._output(request, [token])

    def _fail(self, chunk: Chunk) -> RequestOutput:
        layer = self._runner.first_bad_layer(chunk)
        where = "after the last layer" if layer is None else f"first in the K/V of layer {layer}"
        error = (
            f"the model computed non-finite numbers at step {self._steps}, {where}, "
            f"tokens {chunk.start}..{chunk.end - 1}: try --dtype bfloat16 or float32, or check the weights"
        )
        self._scheduler.finish(chunk.request, "error", error)
        return self._output(chunk.request, [])

    def _output(self, request: Request, new: list[int]) -> RequestOutput:
        decoder = self._text[request.id]
        stopped = request.finish_reason == "stop"
        text = decoder.add(new[:-1] if stopped else new)
        if request.finish_reason is not None:
            text += decoder.finish()
            self._requests.pop(request.id)
            self._text.pop(request.id)
        prompt = len(request.prompt_token_ids)
        return RequestOutput(request.id, text, new, prompt, request.finish_reason, request.error)

    def abort(self, request_id: int) -> None:
        """Drop a request and free its blocks; unknown or finished ones are ignored."""
        request = self._requests.pop(request_id, None)
        self._text.pop(request_id, None)
        self._inbox.pop(request_id, None)
        if request is not None:
            self._scheduler.finish(request, "abort")

    # --- what people call ---

    def encode(self, prompt: str, *, chat: bool | None = None) -> list[int]:
        """Prompt text to token ids; see `lean.prompt.encode_prompt`."""
        return encode_prompt(self.model.tokenizer, prompt, chat)

    def _ids_of(self, prompt: str | Sequence[int], chat: bool | None) -> Sequence[int]:
        return self.encode(prompt, chat=chat) if isinstance(prompt, str) else prompt

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, chat: bool | None = None
    ) -> Iterator[RequestOutput]:
        """Yield one output per token: its text piece, and at the end the finish reason. Leaving the loop aborts."""
        request_id = self.add_request(self._ids_of(prompt, chat), params)
        try:
            yield from self._wait_for(request_id)
        finally:
            self.abort(request_id)

    def _wait_for(self, request_id: int) -> Iterator[RequestOutput]:
        """Run steps and yield the outputs of one request; those of others wait for whoever asks."""
        inbox = self._inbox.setdefault(request_id, deque())
        while inbox or request_id in self._requests:
            if not inbox:
                self._advance()
            while inbox:
                yield inbox.popleft()

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | None = None,
        *,
        chat: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or token ids) and return one whole output each, in order.

        A request whose numbers became non-finite ends with finish_reason "error" and the error's text.
        """
        batch: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        ids: list[int] = []
        outputs = []
        try:
            for prompt in batch:
                ids.append(self.add_request(self._ids_of(prompt, chat), params))
                self._inbox[ids[-1]] = deque()
            for request_id in ids:
                parts = [*self._wait_for(request_id)]
                text = "".join(part.text for part in parts)
                outputs.append(replace(parts[-1], text=text, token_ids=[t for part in parts for t in part.token_ids]))
        finally:
            for request_id in ids:
                self.abort(request_id)
        return outputs

    def hidden_states(self, token_ids: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Run tokens through the cache; yields (position of the first row, hidden [rows, hidden_size]) per chunk.

        `logits` turns rows into predictions of the next token. Raises EngineError for non-finite numbers.
        """
        request_id = self.add_request(token_ids, keep_hidden=True)
        request = self._requests[request_id]
        self._inbox[request_id] = deque()
        position = 0
        try:
            while request_id in self._requests:
                self._advance()
                while request.hidden:
                    rows = request.hidden.pop(0)
                    yield position, rows
                    position += rows.shape[0]
            if request.error:
                raise EngineError(request.error)
        finally:
            self.abort(request_id)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> logits [rows, vocab], float32; rows are best given LOGIT_SLICE at a time."""
        return self._runner.logits(hidden)

    @torch.inference_mode()
    def score(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Log-probability of every token but the first, given those before it, all read through the cache.

        Logits exist for LOGIT_SLICE rows at once.

        Returns:
            float32 [len(token_ids) - 1] (float64 for a float64 model), natural logarithm, on the CPU.
        """
        targets = torch.tensor(list(token_ids), device=self.model.device)
        # One result made beforehand: small ones made between the slices would keep malloc from reusing their memory.
        dtype = torch.float64 if self.model.info.dtype is torch.float64 else torch.float32
        scores = torch.empty(max(0, len(targets) - 1), dtype=dtype)
        for position, hidden in self.hidden_states(token_ids):
            for start in range(0, hidden.shape[0], LOGIT_SLICE):
                rows = hidden[start : start + LOGIT_SLICE]
                first = position + start + 1
                wanted = targets[first : first + rows.shape[0]]
                logits = self.logits(rows[: wanted.shape[0]])
                score = logits.gather(1, wanted[:, None])[:, 0] - logits.logsumexp(-1)
                scores[first - 1 : first - 1 + len(wanted)] = score
        return scores

    def stats(self) -> CacheUse:
        """What the cache holds now; `peak_use` keeps the moment with the most tokens."""
        return cache_use(self.plan, self._manager)
