"""What the beginning of a sequence needs of every pool, so that the sequence can go on after it."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from lean.cache.block_manager import PoolRule


class Contents(Protocol):
    """The contents of one pool that can be used, by hash."""

    def __contains__(self, content: bytes, /) -> bool: ...


@dataclass(frozen=True)
class Needs:
    """What a hit needs of each pool. States are one more pool, the last one, of one block for each prefix.

    Attributes:
        rules: of the pools. states: whether layers keep states. block_size: tokens per block.
    """

    rules: tuple[PoolRule, ...]
    states: bool
    block_size: int

    @property
    def num_pools(self) -> int:
        return len(self.rules) + self.states

    def of(self, num_blocks: int) -> Iterator[tuple[int, int]]:
        """(pool, index of the block in the sequence) of all that a hit of ``num_blocks`` > 0 reads.

        In every pool the last block comes first.
        """
        for pool, rule in enumerate(self.rules):
            yield from ((pool, i) for i in self.seen(rule, num_blocks))
        if self.states:
            yield len(self.rules), num_blocks - 1

    def seen(self, rule: PoolRule, num_blocks: int) -> Iterable[int]:
        """The blocks of a prefix that a token after it sees under a rule, last one first."""
        sinks, first = rule.seen(num_blocks * self.block_size, self.block_size)
        return itertools.chain(reversed(range(first, num_blocks)), reversed(range(min(sinks, first))))

    def longest_known(self, hashes: Sequence[bytes], most: int, held: Sequence[Contents]) -> int:
        """Blocks at the beginning, at most ``most``, that every unbounded pool holds. ``held``: contents by pool."""
        for rule, contents in zip(self.rules, held):
            if not rule.bounded:
                most = next((i for i in range(most) if hashes[i] not in contents), most)
        return most

    def longest_usable(self, hashes: Sequence[bytes], known: int, held: Sequence[Contents]) -> int:
        """The largest number of blocks, at most ``known``, whose tail every bounded pool holds, and whose states."""
        found, before = known, -1
        while found != before:
            before = found
            for rule, contents in zip(self.rules, held):
                if rule.bounded:
                    found = self._with_tail(rule, contents, hashes, found)
            while self.states and found and hashes[found - 1] not in held[-1]:
                found -= 1
        return found

    def _with_tail(self, rule: PoolRule, contents: Contents, hashes: Sequence[bytes], most: int) -> int:
        """The largest number of blocks, at most ``most``, whose tail is in one bounded pool."""
        end = most
        while end:
            missing = next((i for i in self.seen(rule, end) if hashes[i] not in contents), None)
            if missing is None:
                break
            end = missing  # every shorter prefix that has this block needs it too
        return end
