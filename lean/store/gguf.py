"""GGUF files: checks before a reader trusts their numbers, and the metadata that transformers does not read.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lean.errors import ModelError
from lean.store.checkpoint import DOUBT, wrong_size

GGUF_UINT32, GGUF_STRING, GGUF_ARRAY = 4, 8, 9
GGUF_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
# Pre-tokenizers (`tokenizer.ggml.pre`) that make every digit a separate word.
DIGIT_SPLITTING = ("smollm",)


@dataclass(frozen=True)
class GgufHeader:
    """What lean takes from a header: how long the file must be, and the name of its pre-tokenizer."""

    nbytes: int
    pretokenizer: str


def read_gguf(file: Path) -> GgufHeader:
    """Check that all that a GGUF file's metadata and tensor table describe lies inside the file.

    The Python readers do not check: they multiply dimensions modulo 2**64 and follow any offset.

    Raises:
        ModelError: not a GGUF file, shorter than it says, or with a header that no writer produces.
    """
    try:
        actual = file.stat().st_size
        with file.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise ModelError(f"{file.name} ({actual} bytes) does not start with GGUF's magic: {DOUBT}")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _walk(_Cursor(data, 4))
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{file.name} ({actual} bytes) has an impossible header, {error}: {DOUBT}") from error
    if header.nbytes > actual:
        raise wrong_size(file, f"at least {header.nbytes}", actual)
    return header


def load_gguf_tokenizer(file: Path) -> Any:
    """The tokenizer of a GGUF file.

    transformers does not read `tokenizer.ggml.pre`. Where it makes every digit a word, transformers' tokenizer would
    turn spaces and newlines before a number into other tokens than those that the model was trained on.
    """
    from tokenizers.pre_tokenizers import Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    if read_gguf(file).pretokenizer in DIGIT_SPLITTING:
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    return tokenizer


def _walk(cursor: _Cursor) -> GgufHeader:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    version, tensors, pairs = cursor.take("<IQQ")
    if version not in (2, 3):
        raise ValueError(f"version {version}")
    alignment, pretokenizer = 32, b""
    for _ in range(pairs):
        key, (kind,) = cursor.string(), cursor.take("<I")
        if key == b"general.alignment" and kind == GGUF_UINT32:
            (alignment,) = cursor.take("<I")
        elif key == b"tokenizer.ggml.pre" and kind == GGUF_STRING:
            pretokenizer = cursor.string()
        else:
            cursor.skip_value(kind)
    if alignment.bit_count() != 1:
        raise ValueError(f"alignment {alignment}")
    end = 0
    for _ in range(tensors):
        name, (rank,) = cursor.string()[:80], cursor.take("<I")
        if not 1 <= rank <= 4:
            raise ValueError(f"tensor {name!r} has {rank} dimensions")
        dims, (kind, offset) = cursor.take(f"<{rank}Q"), cursor.take("<IQ")
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if 0 in dims or dims[0] % block_size:
            raise ValueError(f"tensor {name!r} has shape {dims} in blocks of {block_size}")
        end = max(end, offset + math.prod(dims) // block_size * block_bytes)
    nbytes = -(-cursor.position // alignment) * alignment + end
    return GgufHeader(nbytes, pretokenizer.decode("utf-8", "replace"))


class _Cursor:
    """Reads little-endian values one after another; ValueError beyond the end."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data, self.position = data, position

    def skip(self, count: int) -> int:
        """Step over `count` bytes and return where they begin."""
        begin, self.position = self.position, self.position + count
        if self.position > len(self.data):
            raise ValueError("cut off")
        return begin

    def take(self, layout: str) -> tuple[int, ...]:
        return struct.unpack_from(layout, self.data, self.skip(struct.calcsize(layout)))

    def string(self) -> bytes:
        begin = self.skip(self.take("<Q")[0])
        return self.data[begin : self.position]

    def skip_value(self, kind: int) -> None:
        count = 1
        if kind == GGUF_ARRAY:
            kind, count = self.take("<IQ")
        if kind in GGUF_SCALAR_BYTES:
            self.skip(GGUF_SCALAR_BYTES[kind] * count)
        elif kind == GGUF_STRING:
            for _ in range(count):
                self.skip(self.take("<Q")[0])
        else:  # or an array of arrays: no writer makes one, and the readers recurse into it
            raise ValueError(f"metadata of type {kind}")
