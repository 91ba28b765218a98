"""A file of results, one JSON object per line. It holds whole lines only, so that a later run knows what is done."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from lean.cli.batch_rows import RowId, is_id, read_object, shown
from lean.errors import LeanError, RequestError, one_line
from lean.store.home import exclusive

ROW_START = b'{"id": '  # of every line; shows that a cut line was written by lean


def read_done(out: Path, prompts: Path | None = None) -> set[RowId]:
    """The ids of the rows that earlier runs wrote. A last line that is incomplete is removed from the file.

    Raises:
        RequestError: ``out`` cannot be a file of results, is the same file as ``prompts``, is being written by another
            run, or holds something that lean did not write. The file is then left as it is.
    """
    out = Path(out)
    try:
        if out.is_dir():
            raise RequestError(f"{out} is a folder: name a file for the results")
        place = followed(out)
        if not place.parent.is_dir():
            raise RequestError(f"cannot write {out}: there is no folder {place.parent}, make it first")
        if prompts is not None and (place == followed(prompts) or (out.exists() and out.samefile(prompts))):
            raise RequestError(f"{out} holds the prompts: name another file for the results")
        if not out.exists():
            if not os.access(place.parent, os.W_OK | os.X_OK):
                raise RequestError(f"cannot write {out}: its folder is read-only")
            return set()
        with open_results(out) as (_, done):
            return done
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise RequestError(f"cannot write {out}: {getattr(error, 'strerror', None) or one_line(error)}") from None


def followed(path: Path) -> Path:
    """The file that a path leads to through all links; it need not exist.

    Raises OSError for links in a circle, as `Path.resolve` did before Python 3.13.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        path.stat()
    return Path(os.path.realpath(path))


@contextmanager
def open_results(out: Path) -> Iterator[tuple[BinaryIO, set[RowId]]]:
    """Open a file of results to append whole lines; yields it and the ids in it. A lock keeps other runs out."""
    if out.exists() and not out.is_file():
        raise RequestError(f"{out} is not a regular file: name another file for the results")
    with out.open("ab", buffering=0) as file:
        taken = RequestError(f"another run is writing to {out}: wait for it, or name another file")
        exclusive(file, refusal=taken)
        done, end = _read_results(out)
        if end < os.fstat(file.fileno()).st_size:
            file.truncate(end)
        yield file, done


def _read_results(out: Path) -> tuple[set[RowId], int]:
    """The ids in a file of results, and the offset after its last whole line. Only the last line may be incomplete."""
    lines: dict[RowId, int] = {}
    end = 0
    cut: RequestError | None = None
    with out.open("rb") as file:
        for number, line in enumerate(file, 1):
            if cut:
                raise cut
            where = f"{out} line {number}"
            try:
                result = read_object(line)
                if not line.endswith(b"\n"):
                    raise RequestError("the line is incomplete")
            except RequestError as error:
                cut = RequestError(f"{where} is damaged ({error}): repair it or name another file")
                begun = line.rstrip(b"\0")  # zeros: left by a power failure
                if not begun.startswith(ROW_START[: len(begun)]):
                    raise cut from None
                continue
            row_id = result.get("id")
            if not is_id(row_id) or "finish_reason" not in result:
                raise RequestError(f"{where} is not a result of `lean run --prompts`: name another file")
            if row_id in lines:
                raise RequestError(
                    f"{where}: id {shown(row_id)} is already used in line {lines[row_id]}: remove one of the lines"
                )
            lines[row_id] = number
            end += len(line)
    return set(lines), end


class ResultsWriter:
    """Appends whole lines."""

    def __init__(self, file: BinaryIO, out: Path) -> None:
        self._file = file
        self._out = out
        self._end = os.fstat(file.fileno()).st_size

    def write(self, result: dict[str, Any]) -> None:
        try:
            line = json.dumps(result, ensure_ascii=False, allow_nan=False).encode("utf-8")
        except UnicodeEncodeError:  # half of a surrogate pair exists in JSON only as an escape
            line = json.dumps(result, allow_nan=False).encode("ascii")
        rest = memoryview(line + b"\n")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise LeanError(f"cannot write {self._out}: {error.strerror or error}") from error
        self._end += len(line) + 1

    def take_back(self) -> None:
        """Remove what was written of an incomplete line."""
        self._file.truncate(self._end)
