"""The disk tier of the prefix cache: prefixes survive a restart, and processes share them.

When the end of a prefix is kept, the blocks that the folder does not have are copied out of the arenas and written in
the background. A sequence whose prefix lies on disk, further than memory has it, waits until that has been read; other
sequences go on. What has been read lies in free blocks that are known, as if it had been computed before. A prefix that
would take longer to read than to compute is not read: both speeds are those of this engine so far.
"""

import time
import weakref
from collections.abc import Sequence
from dataclasses import replace

from lean.cache.block_file import Key
from lean.cache.block_manager import BlockManager
from lean.cache.chain import Chain
from lean.cache.disk_folder import EngineFolder
from lean.cache.disk_queues import PAUSE_S, SLICE_BYTES, DiskCounts, Reader, Reading, Said, Slice, Writer
from lean.cache.kv_cache import KVCache
from lean.cache.prefix import Part, PrefixCache
from lean.errors import one_line

LEAST_MEASURED = 16  # tokens of a step from which the speed of computing a prompt is learned
MOST_READINGS = 8  # prefixes that are read at once, those that were given up and have not ended included
UNKNOWN_S = 5.0  # for how long a prefix is read where the speed of computing is not known yet
CLOSE_S = 30.0  # for how long a process that ends waits for its writes


class _Held:
    """The contents that memory or the folder has of one pool."""

    def __init__(self, pool: int, memory: dict[bytes, int], folder: EngineFolder, stored: set[Key]) -> None:
        self._pool, self._memory, self._folder, self._stored = pool, memory, folder, stored

    def __contains__(self, content: bytes) -> bool:
        if content in self._memory:
            return True
        key = Key(self._pool, content)
        found = key in self._folder
        if not found:
            self._stored.discard(key)  # removed to keep the size, or by another process
        return found


class DiskTier:
    """Between the prefix cache of an engine, its arenas and a folder. One thread at a time may use it."""

    def __init__(self, folder: EngineFolder, prefix: PrefixCache, cache: KVCache, manager: BlockManager) -> None:
        self.folder, self._prefix, self._cache, self._manager = folder, prefix, cache, manager
        self._counts, self._said, self._closed = DiskCounts(), Said(), False
        self._block_bytes = cache.block_bytes
        self._writer = Writer(folder, self._counts, self._said)
        self._reader = Reader(folder, self._block_bytes, self._counts, self._said, self._writer.doubt)
        self._readings: list[Reading] = []
        self._seconds_per_token: float | None = None
        self._end = weakref.finalize(self, _close, self._writer, self._reader)

    def counts(self) -> DiskCounts:
        """What has been done until now."""
        return replace(self._counts)

    # --- reading ---

    def ask(self, chain: Chain, num_found: int, most_tokens: int) -> Reading | None:
        """Begin to read what the folder has of a sequence beyond the ``num_found`` tokens that memory has.

        None: it has no more, computing is faster, or nothing can be read now.
        """
        needs, size = self._prefix.needs, self._prefix.needs.block_size
        most, writer = most_tokens // size, self._writer
        if self._closed or writer.is_removing or writer.distrusted or len(self._readings) >= MOST_READINGS:
            return None
        if most * size <= num_found or not self._prefix.enabled:
            return None
        memory = self._prefix.held
        held = [_Held(i, contents, self.folder, writer.stored) for i, contents in enumerate(memory)]
        found = needs.longest_usable(chain.hashes, needs.longest_known(chain.hashes, most, held), held)
        if found * size <= num_found:
            return None
        hashes = chain.hashes[:found]
        for reading in self._readings:
            if reading.hashes == hashes and not reading.given_up and reading.epoch == self._prefix.epoch:
                reading.users += 1
                return reading
        parts = [Part(i, pool) for pool, i in needs.of(found) if hashes[i] not in memory[pool]]
        nbytes = sum(self._block_bytes[part.pool] for part in parts)
        reading = Reading(hashes, parts, self._prefix.epoch, num_found, found * size, nbytes)
        if not self._pays(reading):
            self._counts.slower += 1
            return None
        self._readings.append(reading)
        self._reader.add(reading)
        return reading

    def _compute_s(self, reading: Reading) -> float:
        """Seconds that computing what is read would take."""
        if self._seconds_per_token is None:
            return UNKNOWN_S
        return (reading.num_tokens - reading.num_before) * self._seconds_per_token

    def _pays(self, reading: Reading) -> bool:
        """Whether reading is faster than computing. Now and then one is tried again, as a disk can become faster."""
        speed = self._reader.bytes_per_s
        if speed is None or (not self._readings and time.monotonic() > self._reader.last_at + PAUSE_S):
            return True
        before = sum(other.nbytes for other in self._readings)
        return (before + reading.nbytes) / speed < self._compute_s(reading)

    def receive(self) -> None:
        """Take what has been read into the arenas, and give up what takes longer than computing."""
        if not self._readings:
            return
        self._cache.make_copies(self._manager)  # left by a step that failed; their sources may be free blocks
        for reading in self._readings:
            while not reading.given_up and (part := self._reader.take(reading)) is not None:
                stale = reading.epoch != self._prefix.epoch
                if stale or not self._take_in(reading, part):
                    self._reader.give_up(reading)
            late = time.monotonic() - reading.asked_at > self._compute_s(reading)
            if late and not reading.done:
                self._counts.slower += 1
                self._reader.give_up(reading)
        # One that was given up stays until the reader has left it: a disk that does not answer is not asked again.
        self._readings = [reading for reading in self._readings if not reading.ended or reading.slices]

    def _take_in(self, reading: Reading, part: Slice) -> bool:
        place = {item: row for row, item in enumerate(part.parts)}

        def write(pool: int, blocks: list[int], parts: list[Part]) -> None:
            self._cache.write_blocks(pool, blocks, part.rows[[place[item] for item in parts]])

        try:
            return self._prefix.insert(reading.hashes, len(reading.hashes), part.parts, write)
        except (RuntimeError, MemoryError) as error:
            self._said("memory", f"the prefix cache on disk is not read: {one_line(error)}")
            return False

    def wait(self, timeout_s: float) -> None:
        """Wait until something has been read."""
        if not any(reading.slices or reading.ended for reading in self._readings):
            self._reader.wait(timeout_s)

    def give_up(self, reading: Reading) -> None:
        """A sequence that waited for it has ended."""
        reading.users -= 1
        if not reading.users:
            self._reader.give_up(reading)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step has computed this many tokens of prompts."""
        if num_tokens >= LEAST_MEASURED:
            now = seconds / num_tokens
            self._seconds_per_token = now if self._seconds_per_token is None else (self._seconds_per_token + now) / 2

    # --- writing ---

    def save(self, chain: Chain, num_tokens: int) -> None:
        """A hit at ``num_tokens``, in full blocks, is possible: write what the folder does not have of it."""
        if self._closed:
            return
        needs, held, hashes = self._prefix.needs, self._prefix.held, chain.hashes
        used: list[Key] = []
        wanted: list[list[tuple[Key, int]]] = [[] for _ in held]
        for pool, i in needs.of(num_tokens // needs.block_size):
            key, block = Key(pool, hashes[i]), held[pool].get(hashes[i])
            used.append(key)
            if block is not None and not self._writer.knows(key):
                wanted[pool].append((key, block))
        for pool, items in enumerate(wanted):
            items.reverse()  # beginnings first: they are worth most where the queue has no room for all
            step = max(1, SLICE_BYTES // max(1, self._block_bytes[pool]))
            for start in range(0, len(items), step):
                self._copy_out(pool, items[start : start + step])
        self._writer.used(used)

    def _copy_out(self, pool: int, items: list[tuple[Key, int]]) -> None:
        """Queue copies of some blocks of a pool, as far as the queue has room."""
        fit = items[: self._writer.room // max(1, self._block_bytes[pool])]
        self._counts.blocks_dropped += len(items) - len(fit)
        if not fit:
            return
        try:
            rows = self._cache.read_blocks(pool, [block for _, block in fit])
        except (RuntimeError, MemoryError) as error:
            self._counts.blocks_dropped += len(fit)
            self._said("memory", f"the prefix cache is not written to disk: {one_line(error)}")
            return
        for (key, _), row in zip(fit, rows):
            self._writer.add(key, row)

    def forget(self, hashes: Sequence[bytes]) -> None:
        """These contents may be bad: remove them."""
        self._writer.forget([Key(pool, content) for pool in range(self._prefix.needs.num_pools) for content in hashes])

    def reset(self) -> None:
        """Remove everything that engines of this kind have in the folder."""
        for reading in self._readings:
            self._reader.give_up(reading)
        self._writer.forget(None)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was kept until now has been written; whether it has."""
        return self._writer.flush(timeout_s)

    def close(self) -> None:
        """Write what waits, and end the threads. Nothing is read or written afterwards."""
        self._closed = True
        for reading in self._readings:
            self._reader.give_up(reading)
        self._end()


def _close(writer: Writer, reader: Reader) -> None:
    reader.close()
    writer.close(CLOSE_S)
