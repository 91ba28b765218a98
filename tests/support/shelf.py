"""A disk tier of the prefix cache without a disk, for the state machine of test_conservation.py."""

from collections.abc import Callable
from typing import Any

from lean.cache.chain import Chain
from lean.cache.prefix import Part


class Reading:
    """A prefix on its way from the shelf to memory."""

    def __init__(self, hashes: list[bytes], parts: list[Part], epoch: int, num_before: int) -> None:
        self.hashes, self.parts, self.epoch, self.num_before = hashes, parts, epoch, num_before
        self.given_up = False

    @property
    def done(self) -> bool:
        return self.given_up or not self.parts


class Shelf:
    """The disk tier without a disk: it keeps everything, reads in the course of several steps, and may fail midway."""

    reads = 0  # blocks that all shelves have given

    def __init__(self, machine: Any) -> None:
        self.machine, self.prefix = machine, machine.scheduler.prefix
        self.kept: dict[tuple[int, bytes], object] = {}
        self.readings: list[Reading] = []

    def ask(self, chain: Chain, num_found: int, most_tokens: int) -> Reading | None:
        needs, memory = self.prefix.needs, self.prefix.held
        shelf = [{content for at, content in self.kept if at == pool} for pool in range(len(memory))]
        held = [known.keys() | kept for known, kept in zip(memory, shelf)]
        found = needs.longest_usable(chain.hashes, needs.longest_known(chain.hashes, most_tokens // 8, held), held)
        if 8 * found <= num_found:
            return None
        parts = [Part(i, pool) for pool, i in needs.of(found) if chain.hashes[i] not in memory[pool]]
        self.readings.append(Reading(chain.hashes[:found], parts, self.prefix.epoch, num_found))
        return self.readings[-1]

    def receive(self) -> None:
        if self.readings:
            self.machine.make_copies()
        for reading in self.readings:
            some, reading.parts = reading.parts[:3], reading.parts[3:]
            some = [part for part in some if (part.pool, reading.hashes[part.place]) in self.kept]
            Shelf.reads += len(some)
            fails = self.machine.random.random() < 0.05 or reading.epoch != self.prefix.epoch
            if fails or not self.prefix.insert(reading.hashes, len(reading.hashes), some, self.writer(reading)):
                reading.given_up = True
        self.readings = [reading for reading in self.readings if not reading.done]

    def writer(self, reading: Reading) -> Callable[[int, list[int], list[Part]], None]:
        def write(pool: int, blocks: list[int], parts: list[Part]) -> None:
            for block, part in zip(blocks, parts):
                content = self.kept[pool, reading.hashes[part.place]]
                if pool == len(self.machine.cache):
                    self.machine.states[block] = content
                else:
                    self.machine.cache[pool][block] = list(content)

        return write

    def wait(self, timeout_s: float) -> None:
        assert self.readings, "nothing runs, and nothing is read"

    def give_up(self, reading: Reading) -> None:
        reading.given_up = True

    def save(self, chain: Chain, num_tokens: int) -> None:
        memory = self.prefix.held
        for pool, i in self.prefix.needs.of(num_tokens // 8):
            block = memory[pool].get(chain.hashes[i])
            if block is not None:
                is_state = pool == len(self.machine.cache)
                content = self.machine.states[block] if is_state else tuple(self.machine.cache[pool][block])
                self.kept[pool, chain.hashes[i]] = content

    def forget(self, hashes: list[bytes]) -> None:
        self.kept = {key: content for key, content in self.kept.items() if key[1] not in hashes}

    def reset(self) -> None:
        self.kept.clear()
