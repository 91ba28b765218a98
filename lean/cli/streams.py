"""Standard input, output and error, however the process was started: closed, full, or with a reader that has left."""

import errno
import io
import os
import select
import sys
from collections.abc import Callable
from typing import Any, NoReturn

# The reader of a pipe, a FIFO or a socket has left.
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ESHUTDOWN, errno.ENOTCONN)


class OutputLost(BaseException):
    """Standard output takes nothing more. No Exception: code that goes on after an error must not go on after this one.

    Attributes:
        gone: its reader has left, and so nobody misses the rest.
    """

    def __init__(self, reason: str, gone: bool = False) -> None:
        super().__init__(reason)
        self.gone = gone


def guard_streams() -> None:
    """Make the three streams safe to use.

    - A missing descriptor is opened on the null device. Otherwise the next file that is opened would take its number,
      and messages would be written into that file.
    - Standard output raises `OutputLost` for what it cannot take, once. Later output is dropped, so that nothing fails
      while the command ends.
    - Standard error drops what it cannot take: the answer on standard output matters more.
    - A character that a stream's encoding does not have is written as "?".
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number: this one
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  it stays open
    sys.stdout = _guarded(sys.stdout, 1, _lose)
    sys.stderr = _guarded(sys.stderr, 2, lambda error: None)


def _lose(error: OSError) -> NoReturn:
    raise OutputLost(f"cannot write to standard output: {error.strerror}", error.errno in _GONE)


def _guarded(stream: Any, descriptor: int, lose: Callable[[OSError], None]) -> io.TextIOWrapper:
    """``stream`` is what Python made of the descriptor: None if it was closed."""
    raw = _Output(descriptor, lose, closed=stream is None)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=encoding,
        errors="replace",
        newline="\n",
        line_buffering=descriptor == 2 or getattr(stream, "line_buffering", False),
        write_through=getattr(stream, "write_through", False),
    )


class _Output(io.FileIO):
    """A descriptor that reports its first failure, and drops everything after it."""

    def __init__(self, descriptor: int, lose: Callable[[OSError], None], closed: bool) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._lose = lose
        self._missing, self._dead = closed, False

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if self._dead:
            return size
        try:
            if self._missing:
                raise OSError(errno.EBADF, "it is closed")
            while (written := super().write(data)) is None:  # it does not block, and its reader is slow
                select.select([], [self], [])
            return written
        except OSError as error:
            self._dead = True
            self._lose(error)
            return size
