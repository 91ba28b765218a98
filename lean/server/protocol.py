"""The requests of the API: OpenAI's fields, and vLLM's extensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from lean.server.errors import ApiError, bad_field
from lean.server.fields import (
    MOST_INT,
    TOO_MANY,
    Content,
    LogitBias,
    Prompt,
    RequiredTokenIds,
    Stop,
    Tally,
    TokenIds,
    Wire,
    counted,
    kinds_of,
)

# Fields that change nothing in an answer: nothing is said about them.
HARMLESS = {
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "priority",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}

# Fields that would change the answer, and that this server does not support. With one of the values beside them they
# change nothing; null and empty values never do.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "response_format": ({"type": "text"},),
    "tools": (),
    "tool_choice": ("none", "auto"),
    "functions": (),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "suffix": (),
    "best_of": (1,),
    # vLLM; those that a request has as fields of its own are not looked up here
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "bad_words": (),
    "chat_template": (),
    "chat_template_kwargs": (),
    "continue_final_message": (False,),
    "documents": (),
    "echo": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0,),
    "logits_processors": (),
    "logprob_token_ids": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_weight_versions": (False,),
    "skip_special_tokens": (True,),
    "structured_outputs": (),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "watermarking": (False,),
    # llama.cpp
    "dry_multiplier": (0.0,),
    "grammar": (),
    "json_schema": (),
    "mirostat": (0,),
    "repeat_penalty": (1.0,),
    "typical_p": (1.0,),
    "xtc_probability": (0.0,),
}

T = TypeVar("T", bound=Wire)
Count = Annotated[int, Field(ge=0, le=MOST_INT)]


class StreamOptions(Wire):
    """What a stream has beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Wire):
    """The fields that chats and completions share. null, like a missing field, is the server's default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=MOST_INT)] | None = None
    stop: Stop = None
    logit_bias: LogitBias = None
    # vLLM's
    top_k: Annotated[int, Field(ge=-1, le=MOST_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds = None
    min_tokens: Count | None = None
    prompt_logprobs: Count | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^@/\\\x00]+$")] | None = None


class Message(Wire):
    """One message of a conversation."""

    role: str
    content: Content = None


# Reading ends at the first fault: a body of a million faults costs no more than one of one.
Messages = Annotated[list[Annotated[Message, counted("messages")]], Field(min_length=1, fail_fast=True)]


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Count | None = None


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Count | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(Wire):
    """Body of POST /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Wire):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: RequiredTokenIds


def read_body(
    kind: type[T],
    body: bytes,
    most: Mapping[str, int] = MappingProxyType({}),
    check_size: Callable[[str, Any], None] = lambda name, value: None,
) -> T:
    """A request of JSON. Raises ApiError, which names the first field at fault.

    Args:
        most: how many entries messages and logit_bias may have, by these names. Reading ends at the first one too many.
        check_size: gets name and value of another field that may hold very much, before each entry is looked at.
    """
    request = _parsed(kind, body, most)
    for name, one in kinds_of(kind):
        value = getattr(request, name)
        check_size(name, value)
        if not one.allows(value):
            raise bad_field(name, f"must be {one.what}")
    return request


def _parsed(kind: type[T], body: bytes, most: Mapping[str, int]) -> T:
    try:
        return kind.model_validate_json(body, context=Tally(most))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        message = first["msg"][:1].lower() + first["msg"][1:]
        if first["type"] == "json_invalid" and "recursion limit" in message:
            raise ApiError(400, "the body is nested too deeply") from None
        if first["type"] == "json_invalid":
            raise ApiError(400, f"the body is no JSON: {message.removeprefix('invalid JSON: ')}") from None
        if not first["loc"]:
            raise ApiError(400, f"the body must be a JSON object: {message}") from None
        param = field_path(first["loc"][:1] if first["type"] == TOO_MANY else first["loc"])
        if first["type"] == "missing":
            message = "is missing"
        raise bad_field(param, message.replace("input should be", "must be")) from None


def field_path(place: tuple[int | str, ...]) -> str:
    """``messages[0].content`` of ("messages", 0, "content"), at most 80 characters."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).removeprefix(".")
    return text if len(text) <= 80 else f"{text[:77]}..."


def unknown_fields(request: Wire) -> int:
    """How many fields nobody here knows. Raises ApiError for one that is known and not supported."""
    unknown = 0
    for name, value in (request.model_extra or {}).items():
        if name in UNSUPPORTED:
            empty = value is None or (isinstance(value, list | dict | str) and not value)
            if not empty and not any(_same(value, neutral) for neutral in UNSUPPORTED[name]):
                raise bad_field(name, "is not supported by this server: leave it out", "unsupported_parameter")
        elif name not in HARMLESS:
            unknown += 1
    return unknown


def _same(value: Any, neutral: Any) -> bool:
    """Equality, without Python's True == 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
