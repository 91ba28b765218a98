"""The threads of the disk tier: one that writes blocks, and one that reads them. They know no engine and no arena."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lean.cache.block_file import DamagedFile, Key
from lean.cache.disk_folder import EngineFolder
from lean.cache.prefix import Part
from lean.errors import one_line
from lean.units import mib

log = logging.getLogger("lean")

QUEUE_BYTES = 256 * 2**20  # most bytes of blocks that wait to be written
SLICE_BYTES = 32 * 2**20  # a prefix is read and taken in by parts of about this size
SLICES = 4  # most parts that have been read and wait to be taken in
MOST_KNOWN = 65_536  # blocks of the folder that are remembered; of others the folder is asked
PAUSE_S = 60.0  # after a failed write, and before a disk that was slower than computing is tried again


@dataclass
class DiskCounts:
    """What the disk tier has done since the engine started.

    Attributes:
        blocks_written, blocks_read: files. blocks_dropped: that could not wait in the full queue, or not be written.
        damaged: files that were not what their name says. slower: prefixes that were not read, as computing is faster.
    """

    blocks_written: int = 0
    blocks_read: int = 0
    blocks_dropped: int = 0
    damaged: int = 0
    slower: int = 0


@dataclass
class Slice:
    """Blocks of one pool that have been read: ``rows`` [blocks, bytes of a block], uint8."""

    parts: list[Part]
    rows: torch.Tensor


@dataclass(eq=False)
class Reading:
    """A prefix that is being read for a sequence.

    Attributes:
        hashes: of its blocks. parts: what is to be read. epoch: of the prefix cache.
        num_before, num_tokens: of the prefix that memory held when the reading began, and when it has ended.
        nbytes: of the parts. asked_at: when the reading was asked for, in seconds of the monotonic clock.
        users: sequences that wait for it.
        slices: what has been read and not been taken in.
        ended: nothing more will be read. given_up: nothing more is wanted.
    """

    hashes: list[bytes]
    parts: list[Part]
    epoch: int
    num_before: int
    num_tokens: int
    nbytes: int
    asked_at: float = field(default_factory=time.monotonic)
    users: int = 1
    slices: deque[Slice] = field(default_factory=deque)
    ended: bool = False
    given_up: bool = False

    @property
    def done(self) -> bool:
        """Whether the sequence need not wait any more."""
        return self.given_up or (self.ended and not self.slices)


class Said:
    """Says each kind of fault once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, kind: str, line: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            log.warning("%s", line)


class Writer:
    """Writes blocks in a thread of its own, in the order in which they come.

    Attributes:
        stored: blocks that are in the folder, as far as this process knows.
        suspect: blocks that are written again where they are in the folder, as reading their prefix failed.
        distrusted: what had to be removed could not be: nothing may be read from the folder any more.
    """

    def __init__(self, folder: EngineFolder, counts: DiskCounts, said: Said) -> None:
        self._folder, self._counts, self._said = folder, counts, said
        self.stored: set[Key] = set()
        self.suspect: set[Key] = set()
        self.distrusted = False
        self._waiting: dict[Key, torch.Tensor] = {}
        self._jobs: deque[Callable[[], None]] = deque()
        self._nbytes = 0  # of the blocks that wait
        self._busy = self._closed = False
        self._removals = 0  # that have not been done
        self._paused_until = 0.0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="lean prefix cache, writing", daemon=True)
        self._thread.start()

    def knows(self, key: Key) -> bool:
        """Whether a block is in the folder or waits to be written."""
        return key in self.stored or key in self._waiting

    @property
    def room(self) -> int:
        """Bytes of blocks that can be queued now."""
        open_ = not self._closed and time.monotonic() >= self._paused_until
        return max(0, QUEUE_BYTES - self._nbytes) if open_ else 0

    def add(self, key: Key, row: torch.Tensor) -> None:
        """Queue a block: a copy that nobody changes."""
        with self._changed:
            self._nbytes += row.numel()
            self._waiting[key] = row
            self._jobs.append(lambda: self._write(key, row))
            self._changed.notify_all()

    def used(self, keys: list[Key]) -> None:
        """Queue that a prefix of these blocks was used, the first block last."""
        with self._changed:
            if not self._closed:
                self._jobs.append(lambda: self.stored.difference_update(self._folder.used(keys)))
                self._changed.notify_all()

    def forget(self, keys: list[Key] | None) -> None:
        """Remove blocks, or all, also those that wait."""
        with self._changed:
            for key in [*self.stored, *self._waiting] if keys is None else keys:
                self.stored.discard(key)
                self._waiting.pop(key, None)
            self._removals += 1
            if not self._closed:
                self._jobs.append(lambda: self._remove(keys))
                self._changed.notify_all()
                return
        self._remove(keys)

    def doubt(self, keys: list[Key]) -> None:
        """One of these blocks could not be read: write them again when they are kept the next time."""
        self.suspect.update(keys)
        self.stored.difference_update(keys)

    @property
    def is_removing(self) -> bool:
        """Whether the folder may have blocks that are to be removed: nothing must be read now."""
        return self._removals > 0

    def _remove(self, keys: list[Key] | None) -> None:
        try:
            self._folder.remove(keys)
        except OSError as error:
            self.distrusted = True
            self._said(
                "remove", f"the prefix cache on disk cannot be changed ({one_line(error)}): it is not read any more"
            )
        finally:
            with self._changed:
                self._removals -= 1

    def _write(self, key: Key, row: torch.Tensor) -> None:
        wanted, written = self._waiting.get(key) is row, False  # not forgotten since
        try:
            if wanted and time.monotonic() < self._paused_until:
                self._counts.blocks_dropped += 1
            elif wanted:
                if key not in self._folder or key in self.suspect:
                    self._folder.write(key, row.numpy().data)
                    self._counts.blocks_written += 1
                written = True
        except OSError as error:
            self._counts.blocks_dropped += 1
            self._paused_until = time.monotonic() + PAUSE_S
            self._said(
                "write",
                f"the prefix cache cannot be written to {one_line(self._folder.folder.path)} "
                f"({error.strerror or one_line(error)}): answers do not change; lean tries again every {PAUSE_S:.0f} s",
            )
        finally:
            with self._changed:
                self._nbytes -= row.numel()
                if self._waiting.get(key) is row:
                    del self._waiting[key]
                    if written:
                        if len(self.stored) >= MOST_KNOWN:
                            self.stored.clear()
                        self.stored.add(key)
                        self.suspect.discard(key)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job, self._busy = self._jobs.popleft(), True
            try:
                job()
            except Exception as error:  # the thread must live on: others wait for it
                self._said("writer", f"the prefix cache on disk failed: {type(error).__name__}: {one_line(error)}")

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was queued has been written; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write what waits, for at most ``timeout_s``, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is self._thread:  # collected as garbage in the middle of a job
            return
        if not self.flush(timeout_s):
            with self._changed:
                left = mib(self._nbytes)
                self._jobs.clear()
            log.warning("%s of the prefix cache were not written: the disk is slow", left)
        self._thread.join(1.0)


class Reader:
    """Reads prefixes in a thread of its own, one after the other."""

    def __init__(
        self,
        folder: EngineFolder,
        block_bytes: list[int],
        counts: DiskCounts,
        said: Said,
        doubt: Callable[[list[Key]], None],
    ) -> None:
        """``block_bytes``: by pool. ``doubt``: called with the blocks of a prefix where one could not be read."""
        self._doubt = doubt
        self._folder, self._block_bytes, self._counts, self._said = folder, block_bytes, counts, said
        self.bytes_per_s: float | None = None  # of the last reading
        self.last_at = -PAUSE_S  # when that ended
        self._jobs: deque[Reading] = deque()
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="lean prefix cache, reading", daemon=True)
        self._thread.start()

    def add(self, reading: Reading) -> None:
        with self._changed:
            reading.ended = self._closed
            self._jobs.append(reading)
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; what is being read is left."""
        with self._changed:
            self._closed = True
            for reading in self._jobs:
                reading.ended = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def wait(self, timeout_s: float) -> None:
        """Wait until something has been read or has ended."""
        with self._changed:
            self._changed.wait(timeout_s)

    def take(self, reading: Reading) -> Slice | None:
        """The next part that has been read; None if there is none now."""
        with self._changed:
            self._changed.notify_all()
            return reading.slices.popleft() if reading.slices else None

    def give_up(self, reading: Reading) -> None:
        """Nothing more of it is wanted."""
        with self._changed:
            reading.given_up = True
            reading.slices.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if self._closed:
                    return
                reading = self._jobs.popleft()
            try:
                self._read(reading)
            except Exception as error:
                self._said("reader", f"the prefix cache on disk failed: {type(error).__name__}: {one_line(error)}")
            finally:
                with self._changed:
                    reading.ended = True
                    self._changed.notify_all()

    def _read(self, reading: Reading) -> None:
        """Read the parts until they end, one fails, or nobody wants them."""
        busy_s, nbytes = 0.0, 0
        for pool, parts in self._slices(reading.parts):
            started = time.perf_counter()
            rows = torch.empty(len(parts), self._block_bytes[pool], dtype=torch.uint8)
            for row, part in zip(rows, parts):
                if reading.given_up or self._closed:
                    break
                if not self._read_block(Key(pool, reading.hashes[part.place]), row):
                    self._doubt(_keys(reading, reading.parts))
                    return
                nbytes += row.numel()
            busy_s += time.perf_counter() - started
            with self._changed:  # what waits here for the engine counts as no time of the disk
                self._changed.wait_for(lambda: len(reading.slices) < SLICES or reading.given_up or self._closed)
                if reading.given_up or self._closed:
                    break
                reading.slices.append(Slice(parts, rows))
                self._changed.notify_all()
        if nbytes or reading.given_up:
            self.bytes_per_s = max(1, nbytes) / max(1e-9, busy_s)
        self.last_at = time.monotonic()
        self._folder.used(_keys(reading, sorted(reading.parts, reverse=True)))

    def _slices(self, parts: list[Part]) -> list[tuple[int, list[Part]]]:
        """The parts of each pool by slices of about SLICE_BYTES, beginnings first."""
        slices = []
        for pool, nbytes in enumerate(self._block_bytes):
            own, step = sorted(part for part in parts if part.pool == pool), max(1, SLICE_BYTES // max(1, nbytes))
            slices += [(pool, own[at : at + step]) for at in range(0, len(own), step)]
        return slices

    def _read_block(self, key: Key, row: torch.Tensor) -> bool:
        try:
            self._folder.read(key, row.numpy().data)
        except FileNotFoundError:  # removed meanwhile
            return False
        except DamagedFile as error:
            self._counts.damaged += 1
            self._said(
                "damaged", f"a file of the prefix cache was damaged and is removed ({error}): it is computed anew"
            )
            return False
        except OSError as error:
            self._said(
                "read", f"the prefix cache on disk cannot be read ({one_line(error)}): the prompt is computed anew"
            )
            return False
        self._counts.blocks_read += 1
        return True


def _keys(reading: Reading, parts: list[Part]) -> list[Key]:
    return [Key(part.pool, reading.hashes[part.place]) for part in parts]
