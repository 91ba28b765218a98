"""Frames of a stream (server-sent events). What never changes is encoded once per request."""

from __future__ import annotations

from typing import Any

from lean.server.choice import Piece
from lean.server.pieces import encode, pieces

DONE = b"data: [DONE]\n\n"
WAITING = b": the prompt is being computed\n\n"  # a comment: clients ignore it, proxies see that the connection lives


def event(data: bytes) -> bytes:
    """One event."""
    return b"data: " + data + b"\n\n"


class Frames:
    """Encodes the chunks of one answer.

    Args:
        head: the fields that every chunk begins with: id, object, created, model, system_fingerprint.
        chat: chunks of a chat, else of a completion.
        usage: chunks have a field ``usage``.
    """

    def __init__(self, head: dict[str, Any], chat: bool, usage: bool) -> None:
        self._head = b"data: " + encode(head)[:-1]
        self._chat, self._usage = chat, usage
        self._before: dict[int, bytes] = {}
        end = b',"logprobs":null,"finish_reason":null}]' + (b',"usage":null' if usage else b"") + b"}\n\n"
        self._after = b"}" + end if chat else end

    def _begin(self, index: int) -> bytes:
        if index not in self._before:
            self._before[index] = self._head + b',"choices":[{"index":%d,' % index
        return self._before[index]

    def role(self, index: int, usage: dict[str, Any] | None = None) -> bytes:
        """The first chunk of a chat's choice, before any token."""
        before = self._begin(index) + b'"delta":{"role":"assistant","content":""'
        if usage is None:
            return before + self._after
        return before + b'},"logprobs":null,"finish_reason":null}],"usage":' + encode(usage) + b"}\n\n"

    def piece(self, index: int, piece: Piece, usage: dict[str, Any] | None = None) -> bytes:
        """A chunk with new text."""
        text = encode(piece.text)
        before = self._begin(index)
        if piece.logprobs is None and piece.finish_reason is None and usage is None:
            return before + (b'"delta":{"content":' if self._chat else b'"text":') + text + self._after
        if self._chat:
            content = b'"delta":{"content":' + text + b"}" if piece.text else b'"delta":{}'
        else:
            content = b'"text":' + text
        rest = b"".join(pieces({"logprobs": piece.logprobs, "finish_reason": piece.finish_reason}))[1:]
        tail = b',"usage":' + encode(usage) if self._usage else b""
        return before + content + b"," + rest + b"]" + tail + b"}\n\n"

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The last chunk, which has no choices."""
        return self._head + b',"choices":[],"usage":' + encode(usage) + b"}\n\n"
