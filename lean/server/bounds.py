"""How much a request may hold: its fields, its texts and its prompts."""

from __future__ import annotations

from typing import Any

from lean.errors import shown
from lean.server.config import ServerConfig
from lean.server.errors import bad_field
from lean.server.protocol import CompletionRequest, GenerationRequest

TOO_LONG = "context_length_exceeded"


def most_tokens(request: GenerationRequest) -> int | None:
    """The tokens that an answer may have; None: the request does not say."""
    return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens


class Bounds:
    """Refuses what is too much. Every method raises ApiError, which names the field.

    Args:
        max_model_len, max_num_seqs: the engine's. max_in_flight: prompts that may run and wait.
        vocab_size: rows of the embedding. token_limit: ids below it are tokens.
        longest_token: characters.

    Attributes:
        most_counted: entries of fields that are counted while a body is read.
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_in_flight: int,
        vocab_size: int,
        token_limit: int,
        longest_token: int,
    ) -> None:
        self.config, self.max_model_len, self.max_num_seqs = config, max_model_len, max_num_seqs
        self.vocab_size, self.token_limit, self._longest_token = vocab_size, token_limit, longest_token
        self.most_counted = {"messages": config.max_messages, "logit_bias": config.max_logit_bias}
        self._most_entries = {
            "prompt": min(config.max_prompts, max_in_flight),
            "stop": config.max_stop_strings,
            "stop_token_ids": config.max_stop_strings,
        }

    def bound(self, name: str, value: int, most: int, what: str = "") -> None:
        """Refuse a number above ``most``: of a field, or of ``what`` it has."""
        if value > most:
            has = f"has {value} {what}: this server takes" if what else "is too large: this server takes"
            raise bad_field(name, f"{has} at most {most}")

    def check_size(self, name: str, value: Any) -> None:
        """Refuse a field with too many entries, whatever they are."""
        if not isinstance(value, list) or name not in self._most_entries:
            return
        is_prompt = name == "prompt" and bool(value)
        if is_prompt and isinstance(value[0], int):
            self._check_length(len(value), name)
            return
        self.bound(name, len(value), self._most_entries[name], "entries")
        if is_prompt:
            self._check_length(max((len(item) for item in value if isinstance(item, list)), default=0), name)

    def check_fields(self, request: GenerationRequest) -> None:
        """Refuse numbers, stop strings, ids and biases that are too large."""
        config = self.config
        self.bound("n", request.n or 1, min(config.max_n, self.max_num_seqs))
        if most_tokens(request) == 0 and not (isinstance(request, CompletionRequest) and request.echo):
            raise bad_field("max_tokens", "must be at least 1, or 0 with echo")
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        self.bound("stop", max(map(len, stop), default=0), config.max_stop_length, "characters in one string")
        self.check_ids(request.stop_token_ids or [], "stop_token_ids", self.token_limit)
        self._check_bias(request.logit_bias or {})
        self.bound("prompt_logprobs", request.prompt_logprobs or 0, config.max_logprobs)
        if request.prompt_logprobs is not None and request.stream:
            raise bad_field("prompt_logprobs", "cannot be combined with stream: true")

    def _check_bias(self, bias: dict[str, float]) -> None:
        for key in bias:
            if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < self.token_limit):
                raise bad_field(
                    "logit_bias", f"has the key {shown(key)}: keys are token ids, from 0 to {self.token_limit - 1}"
                )

    def check_ids(self, ids: list[int], name: str, limit: int) -> None:
        """Refuse ids from ``limit`` on."""
        if ids and max(ids) >= limit:
            raise bad_field(name, f"must have token ids from 0 to {limit - 1}")

    def check_text(self, characters: int, name: str) -> None:
        """Refuse a text that is too long however it is tokenized: tokenizing it would take seconds."""
        most = self.max_model_len * self._longest_token
        if characters > most:
            raise bad_field(
                name,
                f"has {characters} characters, so the prompt is too long: the maximum context length is "
                f"{self.max_model_len} tokens for prompt and answer together, and these are at most {most} characters",
                TOO_LONG,
            )

    def check_prompts(self, prompts: list[list[int]], name: str) -> None:
        """Refuse prompts that are empty, too long, or have ids without a row in the embedding."""
        for ids in prompts:
            self.check_ids(ids, name, self.vocab_size)
            if not ids:
                raise bad_field(name, "must not be empty")
            self._check_length(len(ids), name)

    def _check_length(self, tokens: int, name: str) -> None:
        if tokens >= self.max_model_len:
            # Clients know this error by these words: "prompt is too long", "maximum context length".
            raise bad_field(
                name,
                f"has {tokens} tokens, so the prompt is too long: the maximum context length is "
                f"{self.max_model_len} tokens for prompt and answer together",
                TOO_LONG,
            )
