"""The header of one GGUF file: its metadata and its table of tensors, read with bounds on memory and time.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from lean.errors import ModelError, one_line
from lean.store.checkpoint import DOUBT, wrong_size

MAGIC = b"GGUF"
VERSIONS = (2, 3)
UINT32, BOOL, STRING, ARRAY = 4, 7, 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# A vocabulary of 262,144 tokens has 1.3 million elements in four arrays and 10 MB of text.
MAX_PAIRS, MAX_TENSORS, MAX_ELEMENTS, MAX_BYTES = 1 << 16, 1 << 18, 1 << 22, 1 << 28


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file: ``shape`` row-major, its last dimension the one that is stored in blocks.

    Attributes:
        type: number of the ggml type, e.g. 0 for F32; the type is one that the installed gguf package knows.
        file: the file that holds the bytes.
        offset: of the first byte, from the beginning of that file.
        nbytes: bytes of the encoded tensor.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    file: Path
    offset: int
    nbytes: int

    @cached_property
    def type_name(self) -> str:
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType(self.type).name


@dataclass(frozen=True)
class GgufHeader:
    """The metadata of one file as Python values, and its tensors by name. ``nbytes``: the file's least length."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    nbytes: int


def read_gguf_header(file: Path) -> GgufHeader:
    """Read a header, and check that all that it describes lies inside the file.

    The gguf package does not check: it multiplies dimensions modulo 2**64 and follows any offset.

    Raises:
        ModelError: not a GGUF file, shorter than it says, of a kind lean cannot read, or with a header that no writer
            produces.
    """
    try:
        if not file.is_file():  # opening a pipe would wait for its other end
            raise ModelError(f"{file} is no file: pass a GGUF file")
        actual = file.stat().st_size
        with file.open("rb") as stream:
            if stream.read(4) != MAGIC:
                stream.seek(0)
                raise ModelError(f"{file.name} ({actual} bytes) is not a GGUF file: {_what_it_is(stream.read(512))}")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _walk(file, _Cursor(data, 4))
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{file.name} ({actual} bytes) has an impossible header, {error}: {DOUBT}") from error
    if header.nbytes > actual:
        raise wrong_size(file, f"at least {header.nbytes}", actual)
    return header


def _what_it_is(begin: bytes) -> str:
    """What a file without GGUF's magic holds, from its first bytes."""
    if not begin:
        return "it is empty; incomplete download?"
    if begin.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer; fetch the file itself with `git lfs pull`"
    if begin.lstrip()[:1] == b"<":
        return "it is a web page; download the file itself, not the page about it"
    if begin.startswith(b"PK\3\4"):
        return "it is a zip archive, or pickled weights of PyTorch"
    if begin[8:9] == b"{":
        return "it is a safetensors file; pass the folder that holds it and its config.json"
    if begin[:4] in (b"lmgg", b"fmgg", b"tjgg", b"algg"):
        return "it is a GGML file, the format before GGUF; convert the model anew"
    if begin.lstrip()[:1] in (b"{", b"["):
        return "it is JSON"
    return f"it begins with {begin[:4]!r}, not with {MAGIC!r}; {DOUBT}"


def _walk(file: Path, cursor: _Cursor) -> GgufHeader:
    (version,) = cursor.take("<I")
    if version not in VERSIONS:
        if int.from_bytes(version.to_bytes(4, "big"), "little") in VERSIONS:
            raise ModelError(f"{file.name} is big-endian: lean reads little-endian GGUF files; convert the model anew")
        raise ModelError(f"{file.name} has GGUF version {version}, lean reads 2 and 3: convert the model anew")
    num_tensors, num_pairs = cursor.take("<QQ")
    if num_pairs > MAX_PAIRS:
        raise ValueError(f"{num_pairs} metadata pairs")
    if num_tensors > MAX_TENSORS:
        raise ValueError(f"{num_tensors} tensors")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key, (kind,) = cursor.text(), cursor.take("<I")
        if key in metadata:
            raise ModelError(f"{file.name}: the metadata has {one_line(key, 80)!r} twice: lean cannot know which holds")
        metadata[key] = cursor.value(kind, key)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment.bit_count() != 1:
        raise ValueError(f"alignment {one_line(alignment, 40)}")
    entries = [_tensor_entry(file, cursor) for _ in range(num_tensors)]
    begin = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset, nbytes in entries:
        if name in tensors:
            raise ModelError(f"{file.name} holds the tensor {one_line(name, 80)!r} twice")
        if offset % alignment:
            raise ValueError(f"tensor {one_line(name, 80)!r} begins at {offset}, no multiple of {alignment}")
        tensors[name] = GgufTensor(name, shape, kind, file, begin + offset, nbytes)
    end, last = begin, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise ValueError(f"tensors {one_line(last, 80)!r} and {one_line(tensor.name, 80)!r} overlap")
        end, last = tensor.offset + tensor.nbytes, tensor.name
    return GgufHeader(metadata, tensors, end)


def _tensor_entry(file: Path, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int, int]:
    """(name, shape, type, offset in the data, bytes) of the next tensor."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name, (rank,) = cursor.text(), cursor.take("<I")
    shown = repr(one_line(name, 80))
    if not 1 <= rank <= 4:
        raise ValueError(f"tensor {shown} has {rank} dimensions")
    dims, (kind, offset) = cursor.take(f"<{rank}Q"), cursor.take("<IQ")
    try:
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise ModelError(
            f"{file.name}: tensor {shown} has type {kind}, which gguf {installed_version('gguf')} does not know: "
            "install a newer gguf, or take a file in another quantization"
        ) from None
    if 0 in dims or dims[0] % block_size:
        raise ValueError(f"tensor {shown} has shape {dims[::-1]} in blocks of {block_size}")
    return name, dims[::-1], kind, offset, math.prod(dims) // block_size * block_bytes


class _Cursor:
    """Reads little-endian values one after another; ValueError beyond the end, or beyond the bounds of a header."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data, self.position = data, position
        self.elements = 0

    def skip(self, count: int) -> int:
        """Step over `count` bytes and return where they begin."""
        begin, self.position = self.position, self.position + count
        if self.position > len(self.data):
            raise ValueError("cut off")
        if self.position > MAX_BYTES:
            raise ValueError(f"longer than {MAX_BYTES} bytes")
        return begin

    def take(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack_from(layout, self.data, self.skip(struct.calcsize(layout)))

    def text(self, errors: str = "strict") -> str:
        begin = self.skip(self.take("<Q")[0])
        return self.data[begin : self.position].decode("utf-8", errors)

    def texts(self, count: int, errors: str) -> list[str]:
        """As `text`, without a call per word: vocabularies are long."""
        data, position, end = self.data, self.position, min(len(self.data), MAX_BYTES)
        words, begin = [], position
        for _ in range(count):
            begin = position + 8
            position = begin + int.from_bytes(data[begin - 8 : begin], "little")
            if position > end or begin > end:
                break
            words.append(data[begin:position].decode("utf-8", errors))
        self.skip(position - self.position)
        return words

    def value(self, kind: int, key: str) -> Any:
        """One metadata value. Text that no tokenizer reads may have bytes that are not UTF-8."""
        errors = "strict" if key.startswith("tokenizer.") else "replace"
        if kind == STRING:
            return self.text(errors)
        if kind in SCALARS:
            return self.take(f"<{SCALARS[kind]}")[0]
        if kind != ARRAY:
            raise ValueError(f"{one_line(key, 80)!r} has metadata type {kind}")
        kind, count = self.take("<IQ")
        self.elements += count
        if self.elements > MAX_ELEMENTS:
            raise ValueError(f"more than {MAX_ELEMENTS} elements in arrays")
        if kind == STRING:
            return self.texts(count, errors)
        if kind in SCALARS:
            return list(self.take(f"<{count}{SCALARS[kind]}"))
        # Or an array of arrays: no writer makes one.
        raise ValueError(f"{one_line(key, 80)!r} is an array of metadata type {kind}")
