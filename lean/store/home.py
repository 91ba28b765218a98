"""lean's own folder, and how files are locked and replaced."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import IO, Any

from lean.errors import LeanError, UserError, one_line


class NoHome(UserError):
    """The user has no home folder, and no variable names another place."""


def cache_dir() -> Path:
    """lean's own folder: $LEAN_HOME, else $XDG_CACHE_HOME/lean, else ~/.cache/lean. Raises NoHome."""
    home = os.environ.get("LEAN_HOME")
    folder = Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lean"
    try:
        return folder.expanduser().absolute()
    except RuntimeError:
        raise NoHome(
            "this user has no home folder, so there is no place for lean's files: set LEAN_HOME to a folder"
        ) from None


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


# The named place does not suit; anything else (a full disk, a quota) is no mistake of the user.
_WRONG_PLACE = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EINVAL,
)


def write_result(file: Path, content: bytes) -> None:
    """Write a file that the user named: whole, or not at all. Links are followed; a device gets the bytes as they are.

    Raises:
        UserError: nothing can be written in that place. LeanError: the disk is full, or fails.
    """
    try:
        target = Path(os.path.realpath(file))
        if target.exists() and not target.is_file():  # /dev/stdout, a FIFO: nothing to replace
            target.write_bytes(content)
        else:
            write_atomically(target, content)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        number = getattr(error, "errno", errno.EINVAL)
        kind = UserError if number in _WRONG_PLACE else LeanError
        raise kind(f"cannot write {one_line(file)}: {getattr(error, 'strerror', None) or one_line(error)}") from None
