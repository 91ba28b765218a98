"""The hashes by which the contents of blocks are known."""

import hashlib
from array import array
from collections.abc import Callable

TokenIds = Callable[[int, int], list[int]]
"""Token ids at positions start .. end - 1."""


class Chain:
    """The hashes of a sequence's full blocks. Each is made of the hash before it and the tokens of its block.

    The first one is made of the salt: sequences with different salts share nothing.
    """

    def __init__(self, salt: str | None, block_size: int) -> None:
        kind = b"shared" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass")
        self._salt, self._block_size = hashlib.sha256(kind).digest(), block_size
        self.hashes: list[bytes] = []
        self.epoch = 0  # of the cache when the sequence began; see `PrefixCache.reset`

    def extend(self, token_ids: TokenIds, num_blocks: int) -> None:
        """Hash the blocks up to the first ``num_blocks`` that are not hashed yet."""
        size = self._block_size
        for index in range(len(self.hashes), num_blocks):
            parent = self.hashes[-1] if self.hashes else self._salt
            ids = array("i", token_ids(index * size, (index + 1) * size))
            self.hashes.append(hashlib.sha256(parent + ids.tobytes()).digest())

    def copy(self) -> "Chain":
        """The chain of a fork."""
        other = Chain(None, self._block_size)
        other._salt, other.hashes, other.epoch = self._salt, list(self.hashes), self.epoch
        return other
