"""A GGUF file as plain values that a test can edit and write again, also into files that no writer would make.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from dataclasses import dataclass, replace
from typing import Any

STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass
class Pair:
    """One pair of the metadata. An array's value is (type of the elements, list of the elements)."""

    key: bytes
    kind: int
    value: Any


@dataclass
class TensorRow:
    """One row of the tensor table. ``offset`` counts from the first byte of the data."""

    name: bytes
    dims: tuple[int, ...]
    kind: int
    offset: int


@dataclass
class GgufBytes:
    """The parts of a file. ``data`` begins at a multiple of ``alignment``; ``tail`` bytes follow it."""

    pairs: list[Pair]
    tensors: list[TensorRow]
    data: bytes
    version: int = 3
    alignment: int = 32

    def copy(self) -> "GgufBytes":
        return replace(self, pairs=[replace(p) for p in self.pairs], tensors=[replace(t) for t in self.tensors])

    def pair(self, key: str) -> Pair:
        return next(pair for pair in self.pairs if pair.key == key.encode())

    def pack(self) -> bytes:
        """The bytes of the file. Raises struct.error for a value that its type cannot hold."""
        out = [struct.pack("<4sIQQ", b"GGUF", self.version, len(self.tensors), len(self.pairs))]
        for pair in self.pairs:
            out += [_text(pair.key), struct.pack("<I", pair.kind), _value(pair.kind, pair.value)]
        for row in self.tensors:
            out += [
                _text(row.name),
                struct.pack(f"<I{len(row.dims)}QIQ", len(row.dims), *row.dims, row.kind, row.offset),
            ]
        head = b"".join(out)
        return head + b"\0" * (-len(head) % self.alignment) + self.data


def unpack(content: bytes) -> GgufBytes:
    """Read a file that a writer made. Nothing is checked."""
    position = 0

    def take(layout: str) -> tuple[Any, ...]:
        nonlocal position
        values = struct.unpack_from("<" + layout, content, position)
        position += struct.calcsize("<" + layout)
        return values

    def text() -> bytes:
        (length,) = take("Q")
        return take(f"{length}s")[0]

    def value(kind: int) -> Any:
        if kind == STRING:
            return text()
        if kind == ARRAY:
            element, count = take("IQ")
            return element, [value(element) for _ in range(count)]
        return take(SCALARS[kind])[0]

    _, version, tensors, pairs = take("4sIQQ")
    metadata = []
    for _ in range(pairs):
        key, (kind,) = text(), take("I")
        metadata.append(Pair(key, kind, value(kind)))
    rows = []
    for _ in range(tensors):
        name, (rank,) = text(), take("I")
        rows.append(TensorRow(name, take(f"{rank}Q"), *take("IQ")))
    alignment = next((pair.value for pair in metadata if pair.key == b"general.alignment"), 32)
    start = position + -position % alignment
    return GgufBytes(metadata, rows, content[start:], version, alignment)


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind == ARRAY:
        element, items = value
        if element in SCALARS:
            return struct.pack(f"<IQ{len(items)}{SCALARS[element]}", element, len(items), *items)
        return struct.pack("<IQ", element, len(items)) + b"".join(_value(element, item) for item in items)
    return struct.pack("<" + SCALARS[kind], value)
