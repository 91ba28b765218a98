"""From the body of a request to token ids and sampling parameters, in threads beside the event loop."""

from __future__ import annotations

import asyncio
import copy
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from lean.config import DEFAULT_CHAT_MAX_TOKENS
from lean.errors import RequestError
from lean.options import SAMPLING_KEYS
from lean.sampling_params import SamplingParams
from lean.server.bounds import Bounds, most_tokens
from lean.server.config import ServerConfig
from lean.server.errors import ApiError, bad_field, refused
from lean.server.fields import MOST_INT, Wire, is_ids
from lean.server.messages import turns_of
from lean.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    read_body,
    unknown_fields,
)
from lean.text.prompt import encode_chat, has_second_bos, token_ids
from lean.text.template import has_template

if TYPE_CHECKING:
    from lean.llm import LLM

log = logging.getLogger("lean")

NUM_THREADS = 2
LARGE_BODY = 2**18  # bytes; reading 4 MiB of text takes seconds

R = TypeVar("R")
W = TypeVar("W", bound=Wire)


@dataclass(frozen=True)
class Prepared:
    """A request that the engine can take.

    Attributes:
        prompts: token ids of each prompt. texts: the prompts as text, for echo; else empty.
        prompt_report: most likely tokens that ``prompt_logprobs`` reports; None: it is not asked for.
        echo: the answer begins with the prompt. no_answer: it has nothing else (max_tokens 0).
        stream, include_usage, usage_in_chunks: how the answer is sent.
        unknown: fields of the request that nobody knows.
        cache_salt: the request's own; the key's is beside it.
    """

    chat: bool
    model: str
    prompts: list[list[int]]
    params: SamplingParams
    texts: tuple[str, ...] = ()
    prompt_report: int | None = None
    echo: bool = False
    no_answer: bool = False
    stream: bool = False
    include_usage: bool = False
    usage_in_chunks: bool = False
    unknown: int = 0
    cache_salt: str | None = None


class Preparer:
    """Reads requests for one model. Each thread has a tokenizer of its own: a shared one can be busy.

    Args:
        names: what the model is called in the API; the first is the name in answers.
        defaults: of fields that a request leaves out; None as max_tokens of chats: `DEFAULT_CHAT_MAX_TOKENS`.
        chat_max_tokens: default of max_tokens in chats.
    """

    def __init__(
        self,
        llm: LLM,
        config: ServerConfig,
        names: tuple[str, ...],
        defaults: SamplingParams,
        chat_max_tokens: int = DEFAULT_CHAT_MAX_TOKENS,
    ) -> None:
        self.config, self.names, self.defaults, self.chat_max_tokens = config, names, defaults, chat_max_tokens
        model = llm.model
        self.max_model_len, max_num_seqs = llm.size.max_model_len, llm.config.max_num_seqs
        self.max_in_flight = max_num_seqs + config.max_waiting  # prompts that run and wait
        self.bounds = Bounds(
            config,
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
            max_in_flight=self.max_in_flight,
            vocab_size=model.vocab_size,
            token_limit=model.token_limit,
            longest_token=max(map(len, model.tokenizer.get_vocab())),
        )
        self.has_template = has_template(model.tokenizer)
        self._large = asyncio.Semaphore(NUM_THREADS - 1)  # the last thread is for bodies that are read at once
        self._copies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(NUM_THREADS):
            self._copies.put(copy.deepcopy(model.tokenizer))
        self._own = threading.local()
        self._has_warned = False
        self._pool = ThreadPoolExecutor(NUM_THREADS, "lean-prepare", self._begin)

    def _begin(self) -> None:
        self._own.tokenizer = self._copies.get()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the calling thread of the pool."""
        return self._own.tokenizer

    async def run(self, call: Callable[[Preparer, bytes], R], body: bytes) -> R:
        """Call a method of this object in a thread of the pool. Large bodies hold up none that are not."""
        async with self._large if len(body) > LARGE_BODY else nullcontext():
            return await asyncio.get_running_loop().run_in_executor(self._pool, call, self, body)

    def close(self) -> None:
        """End the threads; those that compute end when they are done."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # --- in a thread of the pool ---

    def _read(self, kind: type[W], body: bytes) -> W:
        return read_body(kind, body, self.bounds.most_counted, self.bounds.check_size)

    def chat(self, body: bytes) -> Prepared:
        """Body of /v1/chat/completions."""
        request = self._read(ChatRequest, body)
        prepared = self._common(request, chat=True)
        report = request.top_logprobs or 0
        if request.top_logprobs is not None and not request.logprobs:
            raise bad_field("top_logprobs", "needs logprobs: true")
        self.bounds.bound("top_logprobs", report, self.config.max_logprobs)
        params = replace(prepared.params, logprobs=report if request.logprobs else None)
        turns = self._turns(request)
        self.bounds.check_text(sum(len(turn["content"]) for turn in turns), "messages")
        ids = self._chat_ids(turns)
        self.bounds.check_prompts([ids], "messages")
        return replace(prepared, prompts=[ids], params=params)

    def completion(self, body: bytes) -> Prepared:
        """Body of /v1/completions."""
        request = self._read(CompletionRequest, body)
        prepared = self._common(request, chat=False)
        self.bounds.bound("logprobs", request.logprobs or 0, self.config.max_logprobs)
        given = request.prompt
        single = isinstance(given, str) or is_ids(given)
        items = [given] if single else given
        self.bounds.check_text(max((len(item) for item in items if isinstance(item, str)), default=0), "prompt")
        special = True if request.add_special_tokens is None else request.add_special_tokens
        ids = [self._text_ids(item, special, "prompt") if isinstance(item, str) else item for item in items]
        if special:
            self._warn_of_bos([one for one, item in zip(ids, items) if isinstance(item, str)])
        self.bounds.check_prompts(ids, "prompt")
        echo = bool(request.echo)
        texts = tuple(item if isinstance(item, str) else self.tokenizer.decode(item) for item in items) if echo else ()
        measured = prepared.params.prompt_logprobs
        if echo and request.logprobs is not None:
            measured = max(request.logprobs, measured or 0)
        params = replace(prepared.params, logprobs=request.logprobs, prompt_logprobs=measured)
        return replace(prepared, prompts=ids, params=params, texts=texts, echo=echo)

    def tokenize(self, body: bytes) -> dict[str, Any]:
        """Body of /tokenize, and its answer."""
        request = self._read(TokenizeRequest, body)
        unknown_fields(request)
        self.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise bad_field("prompt", "or messages must be given, not both")
        if request.messages is not None and request.add_special_tokens:
            raise bad_field("add_special_tokens", "goes with a prompt: chat templates write their own special tokens")
        if request.prompt is not None:
            special = True if request.add_special_tokens is None else request.add_special_tokens
            ids = self._text_ids(request.prompt, special, "prompt")
        else:
            ids = self._chat_ids(self._turns(request))
        names = self.tokenizer.convert_ids_to_tokens(ids) if request.return_token_strs else None
        return {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids, "token_strs": names}

    def detokenize(self, body: bytes) -> dict[str, Any]:
        """Body of /detokenize, and its answer."""
        request = self._read(DetokenizeRequest, body)
        unknown_fields(request)
        self.check_model(request.model)
        self.bounds.check_ids(request.tokens, "tokens", self.bounds.vocab_size)
        return {"prompt": self.tokenizer.decode(request.tokens)}

    def check_model(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError for a model that is not served."""
        if not name:
            return self.names[0]
        if name not in self.names:
            raise ApiError(
                404, "this server has no model of that name; GET /v1/models lists its names", "model", "model_not_found"
            )
        return name

    # --- parts ---

    def _common(self, request: GenerationRequest, chat: bool) -> Prepared:
        unknown = unknown_fields(request)
        model = self.check_model(request.model)
        options = request.stream_options
        if options is not None and not request.stream:
            raise bad_field("stream_options", "needs stream: true")
        return Prepared(
            chat,
            model,
            [],
            self._params(request, chat),
            prompt_report=request.prompt_logprobs,
            no_answer=most_tokens(request) == 0,
            stream=bool(request.stream),
            include_usage=bool(options and options.include_usage),
            usage_in_chunks=bool(options and options.include_usage and options.continuous_usage_stats),
            unknown=unknown,
            cache_salt=request.cache_salt,
        )

    def _params(self, request: GenerationRequest, chat: bool) -> SamplingParams:
        """The defaults, and what the request says."""
        self.bounds.check_fields(request)
        given = {key: getattr(request, key) for key in SAMPLING_KEYS if key not in ("logprobs", "max_tokens")}
        if given["top_k"] == -1:  # vLLM's way to turn it off
            given["top_k"] = 0
        if request.seed is not None and request.seed < 0:
            given["seed"] = None if request.seed == -1 else request.seed & MOST_INT  # -1 asks for a random one
        most = most_tokens(request)
        default = self.chat_max_tokens if chat else self.defaults.max_tokens
        given["max_tokens"] = default if most is None else max(1, most)
        if request.min_tokens is not None and most is None:
            given["max_tokens"] = max(default, request.min_tokens)
        try:
            return replace(self.defaults, **{key: value for key, value in given.items() if value is not None})
        except RequestError as error:
            raise refused(error) from None

    def _turns(self, request: ChatRequest | TokenizeRequest) -> list[dict[str, str]]:
        if not self.has_template:
            raise ApiError(400, "the model has no chat template: use /v1/completions", "messages")
        return turns_of(request.messages or [])

    def _chat_ids(self, turns: list[dict[str, str]]) -> list[int]:
        try:
            return encode_chat(self.tokenizer, turns)
        except RequestError as error:
            raise ApiError(400, str(error).removesuffix("; try --no-chat"), "messages") from None

    def _warn_of_bos(self, texts: list[list[int]]) -> None:
        """Say, once, that clients write a BOS before texts to which the tokenizer adds one."""
        if not self._has_warned and any(has_second_bos(self.tokenizer, ids) for ids in texts):
            self._has_warned = True
            log.warning(
                "the prompt of a completion begins with %s and the tokenizer adds another one: the client should send "
                "add_special_tokens: false; later ones are not reported",
                self.tokenizer.bos_token,
            )

    def _text_ids(self, text: str, special: bool, name: str) -> list[int]:
        try:
            return token_ids(self.tokenizer, text, add_special_tokens=special)
        except RequestError as error:
            raise bad_field(name, f"cannot be read: {error}") from None
