"""What a server answers, and whether it may be."""

from __future__ import annotations

import json
from typing import Any

from lean.errors import EngineError


class Response:
    """Status, headers (in lower case) and body of an answer; the body of a stream without its chunks' lengths."""

    def __init__(self, data: bytes) -> None:
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(first.split()[1]) if first.startswith("HTTP/1.1 ") else 0
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self.body = _dechunked(body) if self.headers.get("transfer-encoding") == "chunked" else body


def _dechunked(body: bytes) -> bytes:
    """What was sent of a body in chunks, also of one that was cut off."""
    parts = []
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size or b"0", 16)
        parts.append(body[:length])
        body = body[length + 2 :]
    return b"".join(parts)


def check_error(response: Response, *statuses: int) -> dict[str, Any]:
    """The error object of an answer with one of these statuses."""
    if response.status not in statuses:
        raise EngineError(f"an answer has status {response.status} in place of {statuses}: {response.body[:300]!r}")
    error: dict[str, Any] = json.loads(response.body)["error"]
    if error.keys() != {"message", "type", "param", "code"}:
        raise EngineError(f"an error has the fields {sorted(error)}")
    return error


def check_whole(response: Response, body: dict[str, Any]) -> str:
    """In a word how a request was answered: as it must be, or turned away. Raises EngineError for another answer."""
    if response.status == 429:
        check_error(response, 429)
        return "429"
    if response.status != 200:
        raise EngineError(f"a good request got {response.status}: {response.body[:300]!r}")
    answer = json.loads(response.body)
    texts = [choice.get("text", "") for choice in answer["choices"]]
    check_answer(texts, [choice["finish_reason"] for choice in answer["choices"]], answer["usage"], body)
    return "answered"


def check_stream(response: Response, body: dict[str, Any]) -> str:
    """The same of a request for a stream."""
    if response.status != 200:
        return check_whole(response, body)
    frames = [frame for frame in response.body.decode().split("\n\n") if frame and not frame.startswith(":")]
    if not frames or frames[-1] != "data: [DONE]":
        raise EngineError(f"a stream ends with {frames[-1:]}")
    events = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]
    choices = [choice for event in events for choice in event["choices"]]
    texts: dict[int, str] = {}
    for choice in choices:
        texts[choice["index"]] = texts.get(choice["index"], "") + choice.get("text", "")
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    check_answer([texts[index] for index in sorted(texts)], ends, events[-1]["usage"], body)
    return "answered"


def check_answer(texts: list[str], ends: list[str], usage: dict[str, Any], body: dict[str, Any]) -> None:
    """Raise EngineError unless every choice is there, has ended, and begins with its own prompt."""
    prompts = body.get("prompt", "")
    prompts = prompts if isinstance(prompts, list) else [prompts]
    expected = [prompt for prompt in prompts for _ in range(body["n"])]
    if len(texts) != len(expected) or len(ends) != len(expected) or not set(ends) <= {"stop", "length"}:
        raise EngineError(f"{len(texts)} choices ended with {ends} in place of {len(expected)}")
    if not all(text.startswith(prompt) for text, prompt in zip(texts, expected)):
        raise EngineError(f"answers {texts} do not begin with their prompts {expected}")
    if usage["completion_tokens"] > body["max_tokens"] * len(expected):
        raise EngineError(f"{usage} of max_tokens {body['max_tokens']}")
