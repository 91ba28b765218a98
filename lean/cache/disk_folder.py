"""The folder of a prefix cache on disk: one folder in it for each kind of engine, and in that one file per block.

    DIR/lean-prefix-cache                      says that the folder is ours
    DIR/FINGERPRINT/about.json                 what the fingerprint stands for
    DIR/FINGERPRINT/ab/abcdef...-0             a block, see `lean.cache.block_file`

Any number of processes may use one folder: files are only ever added whole, replaced by equal ones, or removed. Files
that have not been used for longest go first where the folder is larger than it may be.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lean.cache.block_file import PART, DamagedFile, Key, check_block, read_block, write_block
from lean.errors import ConfigError, one_line

MARKER, ABOUT = "lean-prefix-cache", "about.json"
PART_AGE_S = 600.0  # a file that has been in writing for longer belongs to a process that was killed
_FILL = 0.9  # how full the folder is once files had to go, so that they go seldom
_RESCANS = 8  # how often the files of other processes are counted while the whole size is written
_ENGINE, _SHELF, _BLOCK = (
    re.compile(r"[0-9a-f]{64}"),
    re.compile(r"[0-9a-f]{2}"),
    re.compile(r"([0-9a-f]{64})-(\d{1,4})"),
)


class StoredFile(NamedTuple):
    """A file of the cache. ``used``: when it was read or written last, in seconds of the system's clock."""

    used: float
    nbytes: int
    path: Path


@dataclass(frozen=True)
class EngineKind:
    """What one kind of engine has in the folder. ``about``: what its fingerprint stands for; {} if unknown."""

    fingerprint: str
    about: dict[str, Any]
    num_files: int
    nbytes: int
    used: float


class DiskFolder:
    """A folder that is a prefix cache. ``limit``: most bytes of its files; None: it is not written to."""

    def __init__(self, path: Path, limit: int | None = None) -> None:
        self.path, self.limit = path, limit
        self._nbytes: int | None = None  # of all files, as far as this process knows
        self._uncounted = 0  # bytes written since all files were counted

    @classmethod
    def create(cls, path: Path, limit: int) -> "DiskFolder":
        """The folder, made where it is missing. Raises ConfigError where it cannot be one."""
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            with os.scandir(path) as entries:
                names = {entry.name for entry in entries}
            if names and MARKER not in names:
                raise ConfigError(f"prefix-cache-dir {one_line(path)} holds other files: name a new or an empty folder")
            stat = path.stat()
            if stat.st_uid != os.geteuid() and os.geteuid() != 0:
                raise ConfigError(
                    f"prefix-cache-dir {one_line(path)} belongs to another user: name a folder of your own"
                )
            if stat.st_mode & 0o077:
                path.chmod(0o700)  # others could read what was said, or put files there
            if MARKER not in names:
                (path / MARKER).write_text("The prefix cache of lean. See `lean cache --help`.\n", encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"prefix-cache-dir {one_line(path)} cannot be used: {why}. Name another folder") from None
        return cls(path, limit)

    @classmethod
    def existing(cls, path: Path) -> "DiskFolder":
        """A folder that lean has made. Raises ConfigError for any other."""
        try:
            ours = (path / MARKER).is_file()
        except (OSError, ValueError):
            ours = False
        if not ours:
            raise ConfigError(f"{one_line(path)} is no prefix cache of lean: name the folder of --prefix-cache-dir")
        return cls(path)

    # --- files ---

    def engine_folders(self) -> Iterator[Path]:
        """The folders of all kinds of engines, by name."""
        return iter(
            sorted(entry for entry in _entries(self.path, _ENGINE) if entry.is_dir() and not entry.is_symlink())
        )

    def files(self, engine: Path) -> Iterator[StoredFile]:
        """The blocks of one kind of engine, and what processes that were killed have left; that is removed."""
        for shelf in _entries(engine, _SHELF):
            for path in [] if shelf.is_symlink() else _entries(shelf, None):
                with suppress(OSError):  # another process may remove it at any time
                    stat = path.lstat()
                    if path.name.endswith(PART):
                        if _BLOCK.match(path.name) and time.time() - stat.st_mtime > PART_AGE_S:
                            path.unlink()
                    elif _BLOCK.fullmatch(path.name):
                        yield StoredFile(stat.st_mtime, stat.st_size, path)

    def kinds(self) -> list[EngineKind]:
        """What the folder holds, the kind that was used last first."""
        found = []
        for engine in self.engine_folders():
            files = list(self.files(engine))
            try:
                about = json.loads((engine / ABOUT).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                about = {}
            used = max((file.used for file in files), default=0.0)
            about = about if isinstance(about, dict) else {}
            found.append(EngineKind(engine.name, about, len(files), sum(file.nbytes for file in files), used))
        return sorted(found, key=lambda kind: -kind.used)

    def remove(self, fingerprint: str) -> int:
        """Remove all files of one kind of engine; returns their bytes. Raises OSError where one of them stays."""
        engine, freed, failed = self.path / fingerprint, 0, None
        for file in self.files(engine):
            try:
                file.path.unlink()
                freed += file.nbytes
            except FileNotFoundError:
                continue
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed
        (engine / ABOUT).unlink(missing_ok=True)
        for folder in (*_entries(engine, _SHELF), engine):
            with suppress(OSError):  # not empty: a process writes there
                folder.rmdir()
        return freed

    def check(self, fingerprint: str) -> Iterator[tuple[Path, str | None]]:
        """Read every file of one kind of engine: its path, and what is wrong with it, or None."""
        for file in self.files(self.path / fingerprint):
            name = _BLOCK.fullmatch(file.path.name)
            assert name is not None
            try:
                check_block(file.path, bytes.fromhex(fingerprint), Key(int(name[2]), bytes.fromhex(name[1])))
                yield file.path, None
            except FileNotFoundError:
                continue
            except (OSError, DamagedFile) as error:
                yield file.path, one_line(error)

    # --- the size ---

    def written(self, nbytes: int) -> None:
        """Count a file of ``nbytes`` that was written, and remove old files where the folder is too large now."""
        if self.limit is None:
            return
        self._uncounted += nbytes
        if self._nbytes is not None:
            self._nbytes += nbytes
        if self._nbytes is None or self._nbytes > self.limit or self._uncounted > self.limit // _RESCANS:
            self._make_room(self.limit)

    def _make_room(self, limit: int) -> None:
        files = [file for engine in self.engine_folders() for file in self.files(engine)]
        total, self._uncounted = sum(file.nbytes for file in files), 0
        if total > limit:
            for file in sorted(files):
                if total <= limit * _FILL:
                    break
                with suppress(OSError):
                    file.path.unlink(missing_ok=True)  # another process may have removed it
                    total -= file.nbytes
        self._nbytes = total


class EngineFolder:
    """The blocks of one kind of engine in a folder. Any thread may use it, one of them writes.

    Args:
        about: what decides the bits of a block, as JSON; the fingerprint is made of it.
        fingerprint: 32 bytes.
    """

    def __init__(self, folder: DiskFolder, fingerprint: bytes, about: dict[str, Any]) -> None:
        self.folder, self._fingerprint, self._about = folder, fingerprint, about
        self.path = folder.path / fingerprint.hex()

    def _file(self, key: Key) -> Path:
        name = key.name
        return self.path / name[:2] / name

    def __contains__(self, key: Key) -> bool:
        try:
            return os.path.isfile(self._file(key))
        except ValueError:
            return False

    def write(self, key: Key, payload: memoryview) -> None:
        """Add a block. Raises OSError."""
        file = self._file(key)
        try:
            nbytes = write_block(file, self._fingerprint, key, payload)
        except FileNotFoundError:  # the first block of its folder, or another process has removed that
            for part in (self.path, file.parent):
                part.mkdir(exist_ok=True, mode=0o700)
            self._write_about()
            nbytes = write_block(file, self._fingerprint, key, payload)
        self.folder.written(nbytes)

    def _write_about(self) -> None:
        about = self.path / ABOUT
        if not about.exists():
            part = about.with_name(f"{ABOUT}.{os.getpid()}{PART}")
            part.write_text(json.dumps(self._about, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            part.chmod(0o600)
            part.replace(about)

    def read(self, key: Key, into: memoryview) -> None:
        """Read a block, and note that it was used. Raises OSError, or DamagedFile: the file is then removed."""
        file = self._file(key)
        try:
            read_block(file, self._fingerprint, key, into)
        except DamagedFile:
            with suppress(OSError):
                file.unlink()
            raise

    def used(self, keys: list[Key]) -> list[Key]:
        """A prefix of these blocks was used, the first block last: so beginnings are kept longest.

        Returns the blocks that are not there any more.
        """
        now, missing = time.time_ns(), []
        for place, key in enumerate(keys):
            try:
                os.utime(self._file(key), ns=(now, now + 1000 * place))
            except FileNotFoundError:
                missing.append(key)
            except OSError:  # a read-only folder
                continue
        return missing

    def remove(self, keys: list[Key] | None = None) -> None:
        """Remove some blocks, or all. Raises OSError where one of them stays."""
        if keys is None:
            self.folder.remove(self.path.name)
        for key in keys or []:
            self._file(key).unlink(missing_ok=True)


def _entries(folder: Path, name: re.Pattern | None) -> list[Path]:
    """What a folder holds under names of a kind; nothing where it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if name is None or name.fullmatch(entry.name)]
    except OSError:
        return []
