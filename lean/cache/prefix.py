"""The prefix cache: a sequence that begins like an earlier one goes on from the blocks of the earlier one.

What a block holds depends on the tokens in it and before it alone. So full blocks are known by a hash of these tokens,
and a sequence may begin with the blocks that others have filled. A hit gives the same bits as computing them again
where rows do not depend on the step that computes them (deterministic mode).

A hit at p tokens needs, in every pool, the blocks that the pool's rule shows to the token after them; where layers keep
states, also the states after exactly these tokens. In a bounded pool this is the tail of the prefix: the blocks of the
window before p, and those of the sinks. Sequences forget the middle, so a prefix can be found again only where its tail
was kept: its blocks are then taken after all others. Where a longer prefix is known, but not its tail, the sequence
that computes it once more keeps the tail there (a branch), and the next one finds it.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lean.cache.block_manager import BlockManager
from lean.cache.block_pool import NULL_BLOCK, BlockPool
from lean.cache.chain import Chain, TokenIds
from lean.cache.needs import Needs

MOST_KNOWN = 65_536  # hashes that are remembered without content, where every pool is bounded


@dataclass(frozen=True)
class Hit:
    """The longest prefix that a sequence can begin with, in full blocks.

    Attributes:
        num_tokens: its length; 0: none.
        branch: tokens of a longer prefix that is known but cannot be used, as its tail is gone; else 0.
    """

    num_tokens: int = 0
    branch: int = 0


class Part(NamedTuple):
    """A block of a prefix: its ``place`` in the sequence, and its ``pool``; states are the last pool."""

    place: int
    pool: int


Write = Callable[[int, list[int], list[Part]], None]
"""Write the contents of parts of one pool into its blocks: pool, blocks, parts."""


@dataclass
class PrefixCounts:
    """What the prefix cache has done since the engine started.

    Attributes:
        tokens_asked: prompt tokens of the requests that looked for a prefix.
        tokens_found: those of them that were found. tokens_read: those of them that were read from the disk.
        evictions: blocks, of all pools, whose content was forgotten because the block was needed.
        tails_kept: how often a tail was kept. tails_used: how often a prefix with a tail was found.
    """

    tokens_asked: int = 0
    tokens_found: int = 0
    tokens_read: int = 0
    evictions: int = 0
    tails_kept: int = 0
    tails_used: int = 0


class PrefixCache:
    """Finds and registers the blocks of a manager by content. Holds ids and counts only, no tensors."""

    def __init__(self, manager: BlockManager, enabled: bool = True) -> None:
        self.enabled = enabled
        self._manager = manager
        self._size = manager.block_size
        self.needs = Needs(manager.rules, manager.slots is not None, manager.block_size)
        self._unbounded = [pool for rule, pool in zip(manager.rules, manager.pools) if not rule.bounded]
        self._everything = [*manager.pools, *([] if manager.slots is None else [manager.slots])]
        self._known: OrderedDict[bytes, None] = OrderedDict()  # only where every pool is bounded
        self.epoch = 0  # counts the resets
        self._counts = PrefixCounts()

    @property
    def has_tails(self) -> bool:
        """Whether a hit needs more than the blocks of unbounded pools."""
        return len(self._everything) > len(self._unbounded)

    @property
    def held(self) -> list[dict[bytes, int]]:
        """By pool, the block of every content that is known; states are the last pool. Callers must not change it."""
        return [pool.index for pool in self._everything]

    # --- looking up ---

    def find(self, chain: Chain, token_ids: TokenIds, most_tokens: int) -> Hit:
        """The longest prefix of at most ``most_tokens`` tokens that is in the cache. Changes nothing but the chain."""
        most = most_tokens // self._size
        if not self.enabled or most < 1:
            return Hit()
        chain.extend(token_ids, most)
        held = self.held
        if self._unbounded:
            known = self.needs.longest_known(chain.hashes, most, held)
        else:
            known = next((i for i, content in enumerate(chain.hashes[:most]) if content not in self._known), most)
        found = self.needs.longest_usable(chain.hashes, known, held)
        return Hit(found * self._size, known * self._size if known > found else 0)

    def revives(self, chain: Chain, hit: Hit) -> int:
        """How many free blocks of an unbounded pool a hit takes; blocks in use cost nothing."""
        hashes = chain.hashes[: hit.num_tokens // self._size]
        return max((sum(not pool.refs[pool.index[h]] for h in hashes) for pool in self._unbounded), default=0)

    def count(self, num_tokens: int, hit: Hit, tokens_read: int = 0) -> None:
        """Count a request with a prompt of ``num_tokens`` that looked for a prefix; ``tokens_read``: from the disk."""
        self._counts.tokens_asked += num_tokens
        self._counts.tokens_found += hit.num_tokens
        self._counts.tokens_read += tokens_read
        self._counts.tails_used += self.has_tails and hit.num_tokens > 0

    def begin(self, seq_id: int, chain: Chain, hit: Hit) -> None:
        """A sequence that holds nothing begins with what was found, before anything else is taken."""
        chain.epoch = self.epoch
        if not hit.num_tokens:
            return
        num_blocks, tables = hit.num_tokens // self._size, []
        self._remember(chain.hashes[:num_blocks])
        for rule, pool in zip(self._manager.rules, self._manager.pools):
            table = array("i", bytes(4 * num_blocks))  # of null blocks
            for i in self.needs.seen(rule, num_blocks):
                table[i] = pool.index[chain.hashes[i]]
            tables.append(table)
        slots = self._manager.slots
        slot = NULL_BLOCK if slots is None else slots.index[chain.hashes[num_blocks - 1]]
        self._manager.adopt(seq_id, hit.num_tokens, tables, slot)

    # --- what has been computed ---

    def register(self, seq_id: int, chain: Chain, token_ids: TokenIds, start: int, end: int) -> None:
        """Tokens start .. end - 1 of a sequence have been computed, and nothing has been evicted since."""
        first, last = start // self._size, end // self._size
        if not self.enabled or first == last or chain.epoch != self.epoch:
            return
        chain.extend(token_ids, last)
        for index, pool in enumerate(self._manager.pools):
            table = self._manager.table(seq_id, index)
            for i in range(first, last):
                pool.register(table[i], chain.hashes[i])
        self._remember(chain.hashes[first:last])

    def _remember(self, hashes: list[bytes]) -> None:
        """Where every pool is bounded: these hashes have been used last."""
        if self._unbounded:
            return
        for content in hashes:
            self._known[content] = None
            self._known.move_to_end(content)
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def keep_tail(self, seq_id: int, chain: Chain, num_tokens: int) -> bool:
        """Keep what a hit at ``num_tokens``, in full blocks, needs from the bounded pools, and the states.

        Nothing is kept where a part is missing: a block has been evicted, or the states hold other tokens. Returns
        whether a hit at that length is possible now.
        """
        end = num_tokens // self._size
        if not self.enabled or not end or chain.epoch != self.epoch:
            return False
        manager = self._manager
        parts: list[tuple[BlockPool, int | None]] = []
        for index, (rule, pool) in enumerate(zip(manager.rules, manager.pools)):
            if not rule.bounded:
                continue
            table = manager.table(seq_id, index)
            for i in self.needs.seen(rule, end):
                if chain.hashes[i] not in pool.index and table[i] != NULL_BLOCK:
                    pool.register(table[i], chain.hashes[i])  # the block that was known for it has been taken
                parts.append((pool, pool.index.get(chain.hashes[i])))
        if manager.slots is not None:
            if manager.num_tokens(seq_id) == end * self._size:
                manager.slots.register(manager.slot(seq_id), chain.hashes[end - 1])
            parts.append((manager.slots, manager.slots.index.get(chain.hashes[end - 1])))
        if any(block is None for _, block in parts):
            return False
        for pool, block in parts:
            pool.keep_longer(block or NULL_BLOCK)
        self._counts.tails_kept += self.has_tails
        return True

    def keep_state(self, seq_id: int, chain: Chain, num_tokens: int, earlier: int) -> bool:
        """Keep the states of a sequence that holds ``num_tokens``, a multiple of the block size; whether they are kept.

        earlier: where this sequence's states were kept the last time: these are forgotten; 0: nowhere.
        """
        slots = self._manager.slots
        if slots is None or not self.enabled or chain.epoch != self.epoch:
            return False
        slots.register(self._manager.slot(seq_id), chain.hashes[num_tokens // self._size - 1])
        old = slots.index.get(chain.hashes[earlier // self._size - 1]) if earlier else None
        if old is not None and not slots.refs[old]:
            slots.forget(old)
        return True

    def insert(self, hashes: Sequence[bytes], num_blocks: int, parts: Sequence[Part], write: Write) -> bool:
        """Take in contents of a prefix of ``num_blocks`` that were kept elsewhere; afterwards they are free and known.

        What is known of the prefix already stays. Returns False where the free blocks do not suffice for both: nothing
        is changed then but the order in which blocks are taken.
        """
        missing: list[list[Part]] = [[] for _ in self._everything]
        for part in parts:
            if hashes[part.place] not in self._everything[part.pool].index:
                missing[part.pool].append(part)
        kept = [0] * len(missing)
        for index, i in self.needs.of(num_blocks):
            pool = self._everything[index]
            block = pool.index.get(hashes[i])
            if block is not None and not pool.refs[block]:
                pool.touch(block)
                kept[index] += 1
        if any(pool.num_free < n + len(new) for pool, n, new in zip(self._everything, kept, missing)):
            return False
        for index, (pool, new) in enumerate(zip(self._everything, missing)):
            self._insert(index, pool, hashes, new, write)
        self._remember(list(hashes[:num_blocks]))
        return True

    def _insert(self, index: int, pool: BlockPool, hashes: Sequence[bytes], parts: list[Part], write: Write) -> None:
        """Write parts into free blocks of one pool, and register them."""
        if not parts:
            return
        blocks = [pool.take() for _ in parts]
        written = False
        try:
            write(index, blocks, parts)
            written = True
        finally:
            for part, block in sorted(zip(parts, blocks), reverse=True):  # the first block becomes the newest
                if written:
                    pool.register(block, hashes[part.place])
                    if pool not in self._unbounded:
                        pool.keep_longer(block)
                pool.drop(block)

    def forget(self, seq_id: int) -> None:
        """A sequence went wrong: nothing that it has read or written is found again, as the cause may lie there."""
        manager = self._manager
        if seq_id not in manager.seq_ids:
            return
        for index, pool in enumerate(manager.pools):
            for block in set(manager.table(seq_id, index)) - {NULL_BLOCK}:
                pool.forget(block)
        if manager.slots is not None:
            manager.slots.forget(manager.slot(seq_id))

    # --- the whole ---

    def counts(self) -> PrefixCounts:
        """What has been done until now."""
        return replace(self._counts, evictions=sum(pool.num_evictions for pool in self._everything))

    def reset(self) -> None:
        """Forget all content. Sequences that hold blocks keep them, and register no more."""
        self.epoch += 1
        self._known.clear()
        for pool in self._everything:
            pool.forget_all()
