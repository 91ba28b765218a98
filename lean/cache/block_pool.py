"""The blocks of one pool: how many sequences use each, which content is known, and which block is taken next."""

from collections import OrderedDict

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1 .. num_blocks with reference counts. Block 0 is the null block and is never taken.

    A block may be registered under the hash of its content. It keeps the hash and its place in the index when nobody
    uses it any more, and can be shared again, until `take` needs it for something else. Who writes a block that has a
    hash copies it first, or takes the hash away.

    Free blocks wait in two queues, least recently used first. Blocks of tails (see `lean.cache.prefix`) are taken when
    no other block is left. Blocks without a hash hold nothing of use and are taken first.

    Attributes:
        refs, hashes: by block. index: hash -> the block that holds this content.
        tails: blocks of tails, in use or free; all of them have a hash.
        num_evictions: blocks whose hash was lost because the block was taken.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * (num_blocks + 1)
        self.hashes: list[bytes | None] = [None] * (num_blocks + 1)
        self.index: dict[bytes, int] = {}
        self.tails: set[int] = set()
        self.num_evictions = 0
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._free_tails: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._free_tails)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Free blocks whose content is known. Counts them all: for reports."""
        return sum(not self.refs[block] for block in self.index.values())

    # --- references ---

    def take(self) -> int:
        """Take the free block that is worth least; its hash is removed. Raises KeyError when no block is free."""
        block, _ = (self._free or self._free_tails).popitem(last=False)
        self.refs[block] = 1
        if self.hashes[block] is not None:
            self.forget(block)
            self.num_evictions += 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a block in use, or to a free one that has a hash."""
        if self.refs[block] < 1:
            if self.hashes[block] is None:
                raise ValueError(f"block {block} is not in use")
            del self._queue(block)[block]
        self.refs[block] += 1

    def drop(self, block: int) -> None:
        """Remove a reference; a block without references is free."""
        if self.refs[block] < 1:
            raise ValueError(f"block {block} is not in use")
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self._queue(block)[block] = None
            if self.hashes[block] is None:
                self._free.move_to_end(block, last=False)

    def _queue(self, block: int) -> OrderedDict[int, None]:
        """Where the block waits while it is free."""
        return self._free_tails if block in self.tails else self._free

    # --- known content ---

    def register(self, block: int, content: bytes) -> None:
        """The block, in use and full, holds the content of this hash.

        Of two blocks with the same content only one is in the index: the one in use, of two in use the first one.
        """
        if self.hashes[block] is not None:
            return
        known = self.index.get(content)
        tail = known in self.tails
        if known is not None:
            if self.refs[known]:
                return
            self.forget(known)
        self.index[content], self.hashes[block] = block, content
        if tail:
            self.tails.add(block)

    def forget(self, block: int) -> None:
        """Take the hash of a block away; a free block is the next to be taken."""
        content = self.hashes[block]
        if content is None:
            return
        if not self.refs[block]:
            del self._queue(block)[block]
            self._free[block] = None
            self._free.move_to_end(block, last=False)
        del self.index[content]
        self.hashes[block] = None
        self.tails.discard(block)

    def forget_all(self) -> None:
        """Take all hashes away."""
        for block in list(self.index.values()):
            self.forget(block)

    def keep_longer(self, block: int) -> None:
        """A block with a hash becomes part of a tail: it is taken after all others."""
        if block not in self.tails:
            if not self.refs[block]:
                del self._free[block]
                self._free_tails[block] = None
            self.tails.add(block)

    def touch(self, block: int) -> None:
        """A free block with a hash is taken after the others of its queue."""
        self._queue(block).move_to_end(block)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is in use or in one queue, and the index names what has a hash."""
        free = set(self._free) | set(self._free_tails)
        assert NULL_BLOCK not in free, "the null block is in the free queue"
        assert self.refs[NULL_BLOCK] == 0, "the null block is referenced"
        assert len(free) == self.num_free, "a block is in two queues"
        for block in range(1, self.num_blocks + 1):
            assert (self.refs[block] == 0) == (block in free), f"block {block}: {self.refs[block]} references"
        assert self._free_tails.keys() <= self.tails, "a block of no tail waits among the tails"
        assert not self._free.keys() & self.tails, "a block of a tail waits among the others"
        assert all(self.hashes[block] is not None for block in self.tails), "a block of a tail has no hash"
        named = {content: block for block, content in enumerate(self.hashes) if content is not None}
        assert named == self.index, "the index differs from the hashes"
        assert len(named) == sum(content is not None for content in self.hashes), "two blocks have the same hash"
