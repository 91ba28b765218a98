"""LLM: the class for Python users: generate, stream, score."""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

import torch

from lean.cache.usage import CacheUse, cache_use
from lean.config import EngineConfig
from lean.engine.assemble import assemble
from lean.engine.engine import Engine
from lean.engine.outputs import joined
from lean.engine.request import RequestOutput
from lean.errors import RequestError
from lean.kernels.compiling import Compiled
from lean.model.load import LoadedModel
from lean.sampling_params import SamplingParams
from lean.scoring import hidden_states_of, score_many
from lean.store.source import ModelSource
from lean.text.prompt import encode_chat, encode_prompt


class LLM:
    """A model that answers through a quantized, paged KV cache.

    Args:
        model: a local folder, a GGUF file, a known name or a hub id; the `ModelSource` of one; or a `LoadedModel`
            that engines share.
        config: see `EngineConfig`.
        progress: show progress bars on stderr while fetching.
        on_compile: called after each GPU kernel that the start compiles, with its name and all until then.

    Attributes:
        engine: runs the requests. config, model, plan, size, cache, notes, kernel_name, cuda_graphs, graph_bytes:
            its parts, see `lean.engine.parts.Parts`.
        load_s: seconds until the engine was ready.

    Raises:
        UserError: the model or the configuration cannot be used; the message says why and what to do.
    """

    def __init__(
        self,
        model: str | ModelSource | LoadedModel,
        config: EngineConfig | None = None,
        *,
        progress: bool = False,
        on_compile: Callable[[str, Compiled], None] | None = None,
    ) -> None:
        started = time.perf_counter()
        parts = assemble(model, config or EngineConfig(), progress=progress, on_compile=on_compile)
        self.engine = Engine(parts)
        self.config, self.model, self.plan, self.size = parts.config, parts.model, parts.plan, parts.size
        self.cache, self.notes, self.kernel_name = parts.cache, parts.notes, parts.kernel_name
        self.cuda_graphs, self.graph_bytes = parts.cuda_graphs, parts.graph_bytes
        self.load_s = time.perf_counter() - started

    # --- text and tokens ---

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """A conversation to token ids, up to where the answer begins; see `lean.text.prompt.encode_chat`."""
        return encode_chat(self.model.tokenizer, messages)

    def encode(self, prompt: str, *, chat: bool | None = None) -> list[int]:
        """Prompt text to token ids; see `lean.text.prompt.encode_prompt`."""
        return encode_prompt(self.model.tokenizer, prompt, chat)

    def _ids_of(self, prompt: str | Sequence[int], chat: bool | None) -> Sequence[int]:
        return self.encode(prompt, chat=chat) if isinstance(prompt, str) else prompt

    # --- answers ---

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        chat: bool | None = None,
        cache_salt: str | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Yield one output per token: its text, and at the end the finish reason. Leaving the loop aborts the request.

        cache_salt: see `lean.engine.engine.Engine.add`.
        """
        request_id = self.engine.add(self._ids_of(prompt, chat), params, collects=True, cache_salt=cache_salt)
        try:
            yield from self._outputs(request_id)
        finally:
            self.engine.forget(request_id)

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        params: SamplingParams | None = None,
        *,
        chat: bool | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts: a text, or a list or generator of texts and token ids.

        Returns whole outputs in the prompts' order, n for every prompt. ``cache_salt``: see `Engine.add`.

        A request whose numbers became non-finite ends with finish_reason "error" and the error's text.
        """
        if isinstance(prompts, (bytes, bytearray, memoryview)) or not isinstance(prompts, Iterable):
            raise RequestError(f"prompts are a text or a list of texts and token ids, not {type(prompts).__name__}")
        batch: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        request_ids: list[int] = []
        outputs = []
        try:
            for prompt in batch:
                ids = self._ids_of(prompt, chat)
                request_ids.append(self.engine.add(ids, params, collects=True, cache_salt=cache_salt))
            for request_id in request_ids:
                parts = [*self._outputs(request_id)]
                for index in range(max(part.index for part in parts) + 1):
                    outputs.append(joined([part for part in parts if part.index == index]))
        finally:
            for request_id in request_ids:
                self.engine.forget(request_id)
        return outputs

    def _outputs(self, request_id: int) -> Iterator[RequestOutput]:
        """Run steps and yield the outputs of one request until it ends; those of others wait for their callers."""
        ended = False
        while not ended:
            outputs, ended = self.engine.collect(request_id)
            if not outputs and not ended:
                self.engine.step()
            yield from outputs

    # --- scores ---

    def score(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Log-probability of every token but the first, given those before it, all read through the cache.

        See `lean.scoring.score_many`, which scores many sequences together.

        Returns:
            float32 [len(token_ids) - 1] (float64 for a float64 model), natural logarithm, on the CPU.
        """
        return next(score_many(self.engine, [token_ids]))[1].logprobs

    def hidden_states(self, token_ids: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Run tokens through the cache; yields (position of the first row, hidden [rows, hidden_size]) per chunk.

        `logits` turns rows into predictions of the next token. Raises EngineError for non-finite numbers.
        """
        return ((position, hidden) for _, position, hidden in hidden_states_of(self.engine, [token_ids]))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden_size] -> logits [rows, vocab], float32 (float64 for a float64 model).

        Pass rows in the slices of ``model.logit_slices`` to bound the memory.
        """
        return self.engine.runner.logits(hidden)

    # --- the seam for servers ---

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        keep_hidden: bool = False,
        hidden_from: int = 0,
        cache_salt: str | None = None,
    ) -> int:
        """Queue token ids for `step`; returns the request's id. See `lean.engine.engine.Engine.add`."""
        return self.engine.add(
            prompt_token_ids, params, keep_hidden=keep_hidden, hidden_from=hidden_from, cache_salt=cache_salt
        )

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns one output per sequence of `add_request` that got a token or ended."""
        self.engine.step()
        return self.engine.step_outputs()

    def abort(self, request_id: int) -> None:
        """End a request and free its blocks; see `lean.engine.engine.Engine.abort`. Any thread may call it."""
        self.engine.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget what the cache holds of earlier requests; see `lean.engine.engine.Engine.reset_prefix_cache`."""
        self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Finish writing to the prefix cache on disk, for at most 30 seconds, and stop using it.

        Happens by itself where the process ends. What is not compiled yet is not compiled any more.
        """
        if (steps := self.engine.runner.decode_steps) is not None:
            steps.stop_compiling()
        if self.engine.pace is not None:
            self.engine.pace.close()
        self.engine.scheduler.close()

    def wait_until_compiled(self) -> None:
        """With ``compile`` on a CPU: return when all decode steps are compiled. Raises ModelError where they cannot be.

        Until then some steps run uncompiled. Call it from the thread that runs the engine.
        """
        if (steps := self.engine.runner.decode_steps) is not None:
            steps.finish_compiling()

    @property
    def has_work(self) -> bool:
        """Whether a step would compute or deliver anything."""
        return self.engine.has_work

    @property
    def num_preemptions(self) -> int:
        """How often a running request had to give its blocks to an older one and start again."""
        return self.engine.scheduler.num_preemptions

    @property
    def peak_use(self) -> CacheUse:
        """What the cache held at the step with the most tokens."""
        return cache_use(self.plan, self.engine.manager, self.engine.peak)

    def stats(self) -> CacheUse:
        """What the cache holds now."""
        return self.engine.stats()

    def check_integrity(self) -> None:
        """Raise AssertionError unless requests, scheduler and blocks agree; see `Engine.check_integrity`."""
        self.engine.check_integrity()
