"""JSON in pieces, for answers with very many log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

_ENCODER = json.JSONEncoder(separators=(",", ":"))

AT_ONCE = 16  # entries of a list; one of them may have 20 log-probabilities
BLOCK = 2**18  # bytes


def encode(value: Any) -> bytes:
    """A value as JSON without spaces, in ASCII: no reader takes a character in it for the end of a line."""
    return _ENCODER.encode(value).encode()


def pieces(value: Any) -> Iterator[bytes]:
    """What `encode` returns, in pieces. One call of Python's encoder keeps the interpreter from all threads until it
    returns; none of these takes long."""
    if isinstance(value, dict):
        before = b"{"
        for key, item in value.items():
            yield before + encode(key) + b":"
            yield from pieces(item)
            before = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and len(value) > AT_ONCE:
        for start in range(0, len(value), AT_ONCE):
            yield (b"," if start else b"[") + encode(value[start : start + AT_ONCE])[1:-1]
        yield b"]"
    else:
        yield encode(value)


def in_blocks(parts: Iterable[bytes]) -> list[bytes]:
    """The same bytes in blocks of at least `BLOCK` bytes, the last one excepted."""
    blocks, block = [], bytearray()
    for part in parts:
        block += part
        if len(block) >= BLOCK:
            blocks.append(bytes(block))
            block.clear()
    if block:
        blocks.append(bytes(block))
    return blocks
