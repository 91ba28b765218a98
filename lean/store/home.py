"""lean's own folder, and how files are locked and replaced."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO, Any


def cache_dir() -> Path:
    """lean's own folder: $LEAN_HOME, else $XDG_CACHE_HOME/lean, else ~/.cache/lean."""
    if home := os.environ.get("LEAN_HOME"):
        return Path(home).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "lean"


def exclusive(file: IO[Any], *, refusal: Exception | None = None, waiting: str | None = None) -> None:
    """Lock an open file until it is closed. The system also releases the lock when the process is killed.

    Args:
        refusal: raised where another process holds the lock. None waits for that process.
        waiting: shown on stderr before waiting.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if refusal is not None:
            raise refusal from None
        if waiting is not None:
            from rich.console import Console

            Console(stderr=True).print(waiting)
        fcntl.flock(file, fcntl.LOCK_EX)


def write_atomically(file: Path, content: bytes) -> None:
    """Replace a file in one step: even after a crash it has the old content or the new content, never a part.

    Raises:
        OSError: the file cannot be written. The old content stays.
    """
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
