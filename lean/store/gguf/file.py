"""A GGUF model on disk: one file, or all parts of a split one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lean.errors import ModelError, one_line
from lean.store.gguf.header import MAGIC, GgufHeader, GgufTensor, read_gguf_header

PART_NAME = re.compile(r"(?P<stem>.+-)(?P<number>\d{5})(?P<rest>-of-(?P<count>\d{5})\.gguf)", re.IGNORECASE)
PART_KEYS = ("split.no", "split.count", "split.tensors.count")


@dataclass(frozen=True)
class GgufFile:
    """The metadata and the tensors of a GGUF model; nothing of a tensor's bytes is read.

    Attributes:
        path: the file that was passed, the first part of a split model.
        parts: all files, in order.
        metadata: every pair, as str, bool, int, float, or a list of these. Of a split model, the first part's.
        tensors: of all parts, by name.
        nbytes: the least length of all parts together.
    """

    path: Path
    parts: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    nbytes: int


def is_gguf(file: Path) -> bool:
    """Whether a regular file begins with GGUF's magic."""
    try:
        if not file.is_file():
            return False
        with file.open("rb") as stream:
            return stream.read(4) == MAGIC
    except OSError:
        return False


def part_files(file: Path) -> list[Path]:
    """The file, or the parts that exist of the split model whose first part it is, by their names alone."""
    match = PART_NAME.fullmatch(file.name)
    if not match or int(match["number"]) != 1:
        return [file]
    paths = (file.with_name(_part_name(match, number)) for number in range(1, int(match["count"]) + 1))
    return [path for path in paths if path.is_file()]


def _part_name(match: re.Match[str], number: int) -> str:
    return f"{match['stem']}{number:05}{match['rest']}"


def read_gguf(file: Path) -> GgufFile:
    """Read the headers of a GGUF model. Pass the first part of a split one.

    Raises:
        ModelError: a file is not GGUF, damaged, missing, or not the first part.
    """
    first = read_gguf_header(file)
    number, count, total = (_part_key(file, first, key) for key in PART_KEYS)
    if count < 2:  # 0 is what merging tools leave behind
        return GgufFile(file, (file,), first.metadata, first.tensors, first.nbytes)
    if number >= count:
        raise ModelError(f"{file.name} says that it is part {number + 1} of {count}: the file is damaged")
    match = PART_NAME.fullmatch(file.name)
    if not match or (int(match["number"]), int(match["count"])) != (number + 1, count):
        raise ModelError(
            f"{file.name} is part {number + 1} of {count} of a split model: give the parts back their names, "
            f"NAME-00001-of-{count:05}.gguf and so on"
        )
    if number:
        raise ModelError(f"{file.name} is part {number + 1} of {count}: pass the first part, {_part_name(match, 1)}")
    parts = tuple(file.with_name(_part_name(match, index)) for index in range(1, count + 1))
    if missing := [part.name for part in parts if not part.is_file()]:
        more = f" and {len(missing) - 1} more parts" if len(missing) > 1 else ""
        raise ModelError(f"{missing[0]}{more} of {count} not found beside {file.name}: put all parts into one folder")
    headers = [first, *(read_gguf_header(part) for part in parts[1:])]
    return _joined(parts, headers, total)


def _joined(parts: tuple[Path, ...], headers: list[GgufHeader], total: int) -> GgufFile:
    """All parts as one model, after checking that they belong together."""
    file, first = parts[0], headers[0]
    tensors: dict[str, GgufTensor] = {}
    for index, (part, header) in enumerate(zip(parts, headers, strict=True)):
        number, count = (_part_key(part, header, key) for key in PART_KEYS[:2])
        if (number, count) != (index, len(parts)):
            raise ModelError(f"{part.name} says that it is part {number + 1} of {count}: parts of two models?")
        for key, value in header.metadata.items():
            if key not in PART_KEYS and key in first.metadata and first.metadata[key] != value:
                raise ModelError(f"{file.name} and {part.name} differ in {one_line(key, 80)!r}: parts of two models?")
        for name, tensor in header.tensors.items():
            if name in tensors:
                both = f"{tensors[name].file.name} and {part.name}"
                raise ModelError(f"{both} both hold the tensor {one_line(name, 80)!r}: parts of two models?")
            tensors[name] = tensor
    if len(tensors) != total:
        raise ModelError(
            f"{file.name} promises {total} tensors in {len(parts)} parts, which hold {len(tensors)}: "
            "parts of two models?"
        )
    return GgufFile(file, parts, first.metadata, tensors, sum(header.nbytes for header in headers))


def _part_key(file: Path, header: GgufHeader, key: str) -> int:
    value = header.metadata.get(key, 0)
    if type(value) is not int or value < 0:
        raise ModelError(f"{file.name}: {key} is {one_line(value, 40)!r}, not a number of parts or tensors")
    return value
