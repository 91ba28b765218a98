"""What must hold for a checkpoint before any of its weights is loaded, or any of its code could run.

A checkpoint is untrusted data: it may be half downloaded, mixed from two versions, or made to mislead. Everything here
reads names, sizes and headers only.
"""

from __future__ import annotations

import json
import math
import mmap
import re
import struct
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lean.errors import ModelError

CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
GGUF_UINT32, GGUF_STRING, GGUF_ARRAY = 4, 8, 9
GGUF_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
DOUBT = "incomplete download or LFS pointer?"


def check_checkpoint(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Refuse a folder that transformers would load wrongly, only in part, or by running code that came with it.

    Which tensors the model needs is not known here; the loader compares them with what it got.

    Raises:
        ModelError: no config, no safetensors, an unknown architecture, untrusted code, or missing or damaged weights.
    """
    if not folder.is_dir():
        raise ModelError(f"no such folder: {folder}")
    try:
        listed = {entry.name for entry in folder.iterdir() if entry.is_file()}
        _require_safetensors(folder, listed)
        config = _read_object(folder / CONFIG)
        _check_architecture(folder, config, trust_remote_code)
        _check_routes(config, listed)
        if SINGLE in listed:  # transformers prefers it to an index, too
            read_header(folder / SINGLE)
        else:
            _check_shards(folder, listed)
    except OSError as error:
        raise ModelError(f"cannot read {error.filename or folder}: {error.strerror or error}") from error


def _require_safetensors(folder: Path, listed: set[str]) -> None:
    if "adapter_config.json" in listed:
        raise ModelError(f"{folder} holds a PEFT adapter: merge it into its base model and pass the result")
    if not any(name.endswith(".safetensors") for name in listed):
        if any(fnmatch(name, pattern) for name in listed for pattern in PICKLES):
            raise ModelError(
                f"{folder} has pickled weights only, and unpickling runs whatever code they carry: where you trust "
                "them, convert with transformers' from_pretrained(...).save_pretrained(...) and pass the result"
            )
        if gguf := sorted(name for name in listed if name.endswith(".gguf")):
            raise ModelError(f"{folder} holds GGUF files: pass the file itself, {folder / gguf[0]}")
    if CONFIG not in listed:
        raise ModelError(f"no {CONFIG} in {folder}: pass the folder of a transformers checkpoint")
    if SINGLE not in listed and INDEX not in listed:
        raise ModelError(f"neither {SINGLE} nor {INDEX} in {folder}: the weights are missing or renamed")


def _check_architecture(folder: Path, config: dict[str, Any], trust_remote_code: bool) -> None:
    """Known to transformers: it uses its own classes and ignores `auto_map`. Otherwise only trusted code will do.

    This holds when trust_remote_code is passed to transformers as False. Left at None, it asks on stdin.
    """
    from transformers import CONFIG_MAPPING, __version__

    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return
    if "auto_map" not in config:
        raise ModelError(f"model_type {model_type!r} is unknown to transformers {__version__}, and lean does not guess")
    if not trust_remote_code:
        raise ModelError(f"model_type {model_type!r} needs code from {folder}: read it, then pass --trust-remote-code")


def _check_routes(config: dict[str, Any], listed: set[str]) -> None:
    """Close the ways by which transformers would take other files than the ones checked here."""
    if config.get("transformers_weights") is not None:
        raise ModelError(f'{CONFIG} sets "transformers_weights": remove it and name the file {SINGLE} or {INDEX}')
    if rank := next((name for name in sorted(listed) if re.match(r"shard-\d{5}-model-\d{5}-of-", name)), None):
        raise ModelError(f"{rank} belongs to a distributed training checkpoint: export it with save_pretrained")


def _check_shards(folder: Path, listed: set[str]) -> None:
    """Every file of the index must be there, whole, and hold the tensors it is said to hold; others are never read."""
    index = _read_object(folder / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(index.get("metadata"), dict):
        raise ModelError(f'{INDEX} is malformed: it needs a "metadata" and a non-empty "weight_map"')
    shards = sorted(set(map(str, weight_map.values())))
    for shard in shards:
        # The name is judged, and links are followed: in the hub's cache every file is a link into a folder beside
        # the snapshot. Who can place a link could place the bytes, but the index arrives from elsewhere.
        if not re.fullmatch(r"[\w.-]+\.safetensors", shard):
            raise ModelError(f"{INDEX} names {shard[:80]!r}: not a .safetensors file of this folder")
    if missing := [shard for shard in shards if shard not in listed]:
        names = ", ".join(map(repr, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise ModelError(f"{len(missing)} of {len(shards)} weight files are missing: {names}; incomplete download?")
    owner: dict[str, str] = {}
    for shard in shards:
        for tensor in read_header(folder / shard):
            if owner.setdefault(tensor, shard) != shard:
                raise ModelError(f"{owner[tensor]} and {shard} both hold {tensor!r}: files of two checkpoints?")
    if absent := [tensor for tensor, shard in weight_map.items() if owner.get(tensor) != shard]:
        first = f"{absent[0]!r} to {weight_map[absent[0]]!r}, which does not hold it"
        raise ModelError(f"{INDEX} assigns {first} ({len(absent)} such): stale index?")


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """The tensors of a safetensors file as its header describes them, after checking that the file holds them all.

    Raises:
        ModelError: the header is damaged, or the file is not exactly as long as it says.
    """
    from safetensors import SafetensorError, safe_open

    actual = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if prefix == b"version ":
            pointed = re.search(rb"^size (\d{1,20})$", stream.read(1024), re.MULTILINE)
            raise _wrong_size(file, int(pointed[1]) if pointed else "a safetensors header", actual)
        length = int.from_bytes(prefix, "little")
        if 8 + length > actual:
            raise _wrong_size(file, f"at least {8 + length}", actual)
        if length > MAX_HEADER_BYTES:
            raise _wrong_size(file, f"a header of at most {MAX_HEADER_BYTES}, not {length},", actual)
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            expected = 8 + length + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ModelError(f"{file.name} ({actual} bytes): unreadable header: {DOUBT}") from error
    if actual != expected:
        raise _wrong_size(file, expected, actual)
    try:
        with safe_open(file, framework="numpy"):  # its own validation: gaps, overlaps, shapes against sizes
            return header
    except SafetensorError as error:
        raise ModelError(f"{file.name} ({actual} bytes): inconsistent header, {str(error)!r}: {DOUBT}") from error


def check_gguf(file: Path) -> None:
    """Walk a GGUF file's metadata and tensor table: everything they promise must lie inside the file.

    The Python readers believe these numbers: they multiply dimensions modulo 2**64 and follow offsets unchecked.

    Raises:
        ModelError: not a GGUF file, shorter than it says, or with a header that no writer produces.
    """
    try:
        actual = file.stat().st_size
        with file.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise ModelError(f"{file.name} ({actual} bytes) does not start with GGUF's magic: {DOUBT}")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                needed = _gguf_size(_Cursor(data, 4))
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror or error}") from error
    except EOFError:
        raise ModelError(f"{file.name} ({actual} bytes) ends within its header: {DOUBT}") from None
    except ValueError as error:
        raise ModelError(f"{file.name} has an impossible header: {error}") from error
    if needed > actual:
        raise _wrong_size(file, f"at least {needed}", actual)


def _gguf_size(cursor: _Cursor) -> int:
    """How long the file must be for its last tensor to fit."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    version, tensors, pairs = cursor.take("<IQQ")
    if version not in (2, 3):
        raise ValueError(f"version {version}")
    alignment = 32
    for _ in range(pairs):
        key, (kind,) = cursor.string(), cursor.take("<I")
        if key == b"general.alignment" and kind == GGUF_UINT32:
            (alignment,) = cursor.take("<I")
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
    return -(-cursor.position // alignment) * alignment + end


class _Cursor:
    """Reads little-endian values one after another; EOFError beyond the end."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self.data, self.position = data, position

    def skip(self, count: int) -> int:
        """Step over `count` bytes and return where they begin."""
        begin, self.position = self.position, self.position + count
        if self.position > len(self.data):
            raise EOFError
        return begin

    def take(self, layout: str) -> tuple[int, ...]:
        return struct.unpack_from(layout, self.data, self.skip(struct.calcsize(layout)))

    def string(self) -> bytes:
        begin = self.skip(self.take("<Q")[0])
        return self.data[begin : self.position]

    def skip_value(self, kind: int) -> None:
        if kind == GGUF_ARRAY:
            kind, count = self.take("<IQ")
        else:
            count = 1
        if kind in GGUF_SCALAR_BYTES:
            self.skip(GGUF_SCALAR_BYTES[kind] * count)
        elif kind == GGUF_STRING:
            for _ in range(count):
                self.skip(self.take("<Q")[0])
        else:  # an array of arrays too: the readers recurse into it, and nobody writes one
            raise ValueError(f"metadata of type {kind}")


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON ({error}): {DOUBT}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} is not a JSON object")
    return value


def _wrong_size(file: Path, expected: object, actual: int) -> ModelError:
    return ModelError(f"{file.name}: expected {expected} bytes, found {actual}: {DOUBT}")
