"""The messages of a chat request, as `lean.text.prompt` takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lean.server.errors import bad_field
from lean.server.protocol import Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def turns_of(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Role and content of each message. Raises ApiError, which names the field, for what is not supported."""
    return [_turn(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _turn(message: Message, where: str) -> dict[str, str]:
    if message.role not in ROLES:
        raise bad_field(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    extra = message.model_extra or {}
    for name in ("tool_calls", "function_call", "audio"):
        if extra.get(name):
            raise bad_field(f"{where}.{name}", "is not supported by this server", "unsupported_parameter")
    content = message.content
    if content is None:
        refusal = extra.get("refusal")
        content = refusal if isinstance(refusal, str) else ""
    if not isinstance(content, str):
        content = "\n".join(_text(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    return {"role": ROLES[message.role], "content": content}


def _text(part: Mapping[str, Any], where: str) -> str:
    """The text of a content part."""
    if part.get("type") != "text":
        raise bad_field(f"{where}.type", "must be text: this server reads nothing else", "unsupported_parameter")
    text = part.get("text")
    if not isinstance(text, str):
        raise bad_field(f"{where}.text", "must be a string")
    return text
