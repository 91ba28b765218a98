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

import hashlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace

from lean.cache.block_manager import BlockManager, PoolRule
from lean.cache.block_pool import NULL_BLOCK, BlockPool

MOST_KNOWN = 65_536  # hashes that are remembered without content, where every pool is bounded

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


@dataclass(frozen=True)
class Hit:
    """The longest prefix that a sequence can begin with, in full blocks.

    Attributes:
        num_tokens: its length; 0: none.
        branch: tokens of a longer prefix that is known but cannot be used, as its tail is gone; else 0.
    """

    num_tokens: int = 0
    branch: int = 0


@dataclass
class PrefixCounts:
    """What the prefix cache has done since the engine started.

    Attributes:
        tokens_asked: prompt tokens of the requests that looked for a prefix.
        tokens_found: those of them that were found.
        evictions: blocks, of all pools, whose content was forgotten because the block was needed.
        tails_kept: how often a tail was kept. tails_used: how often a prefix with a tail was found.
    """

    tokens_asked: int = 0
    tokens_found: int = 0
    evictions: int = 0
    tails_kept: int = 0
    tails_used: int = 0


class PrefixCache:
    """Finds and registers the blocks of a manager by content. Holds ids and counts only, no tensors."""

    def __init__(self, manager: BlockManager, enabled: bool = True) -> None:
        self.enabled = enabled
        self._manager = manager
        self._size = manager.block_size
        pools = list(zip(manager.rules, manager.pools))
        self._unbounded = [pool for rule, pool in pools if not rule.bounded]
        self._bounded = [(rule, pool) for rule, pool in pools if rule.bounded]
        self._everything = [*manager.pools, *([] if manager.slots is None else [manager.slots])]
        self._known: OrderedDict[bytes, None] = OrderedDict()  # only where every pool is bounded
        self._epoch = 0
        self._counts = PrefixCounts()

    @property
    def has_tails(self) -> bool:
        """Whether a hit needs more than the blocks of unbounded pools."""
        return bool(self._bounded) or self._manager.slots is not None

    # --- looking up ---

    def find(self, chain: Chain, token_ids: TokenIds, most_tokens: int) -> Hit:
        """The longest prefix of at most ``most_tokens`` tokens that is in the cache. Changes nothing but the chain."""
        most = most_tokens // self._size
        if not self.enabled or most < 1:
            return Hit()
        chain.extend(token_ids, most)
        known = self._longest_known(chain.hashes, most)
        found = self._longest_usable(chain.hashes, known)
        return Hit(found * self._size, known * self._size if known > found else 0)

    def _longest_known(self, hashes: list[bytes], most: int) -> int:
        """Blocks at the beginning that every unbounded pool holds, or, without one, whose hashes are remembered."""
        indices: list[Container[bytes]] = [pool.index for pool in self._unbounded]
        for index in indices or [self._known]:
            most = next((i for i, content in enumerate(itertools.islice(hashes, most)) if content not in index), most)
        return most

    def _longest_usable(self, hashes: list[bytes], most: int) -> int:
        """The largest number of blocks, at most ``most``, whose tail is in every bounded pool."""
        slots = self._manager.slots
        found, before = most, -1
        while found != before:
            before = found
            for rule, pool in self._bounded:
                found = self._with_tail(rule, pool, hashes, found)
            while found and slots is not None and hashes[found - 1] not in slots.index:
                found -= 1
        return found

    def _with_tail(self, rule: PoolRule, pool: BlockPool, hashes: list[bytes], most: int) -> int:
        """The largest number of blocks, at most ``most``, whose tail is in one bounded pool."""
        end = most
        while end:
            missing = next((i for i in self._tail(rule, end) if hashes[i] not in pool.index), None)
            if missing is None:
                break
            end = missing  # every shorter prefix that has this block needs it too
        return end

    def _tail(self, rule: PoolRule, num_blocks: int) -> Iterable[int]:
        """The blocks of a prefix that a token after it sees, last one first."""
        sinks, first = rule.seen(num_blocks * self._size, self._size)
        return itertools.chain(reversed(range(first, num_blocks)), reversed(range(min(sinks, first))))

    def revives(self, chain: Chain, hit: Hit) -> int:
        """How many free blocks of an unbounded pool a hit takes; blocks in use cost nothing."""
        hashes = chain.hashes[: hit.num_tokens // self._size]
        return max((sum(not pool.refs[pool.index[h]] for h in hashes) for pool in self._unbounded), default=0)

    def count(self, num_tokens: int, hit: Hit) -> None:
        """Count a request with a prompt of ``num_tokens`` that looked for a prefix."""
        self._counts.tokens_asked += num_tokens
        self._counts.tokens_found += hit.num_tokens
        self._counts.tails_used += self.has_tails and hit.num_tokens > 0

    def begin(self, seq_id: int, chain: Chain, hit: Hit) -> None:
        """A sequence that holds nothing begins with what was found, before anything else is taken."""
        chain.epoch = self._epoch
        if not hit.num_tokens:
            return
        num_blocks, tables = hit.num_tokens // self._size, []
        self._remember(chain.hashes[:num_blocks])
        for rule, pool in zip(self._manager.rules, self._manager.pools):
            table = array("i", bytes(4 * num_blocks))  # of null blocks
            for i in self._tail(rule, num_blocks):
                table[i] = pool.index[chain.hashes[i]]
            tables.append(table)
        slots = self._manager.slots
        slot = NULL_BLOCK if slots is None else slots.index[chain.hashes[num_blocks - 1]]
        self._manager.adopt(seq_id, hit.num_tokens, tables, slot)

    # --- what has been computed ---

    def register(self, seq_id: int, chain: Chain, token_ids: TokenIds, start: int, end: int) -> None:
        """Tokens start .. end - 1 of a sequence have been computed, and nothing has been evicted since."""
        first, last = start // self._size, end // self._size
        if not self.enabled or first == last or chain.epoch != self._epoch:
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

    def keep_tail(self, seq_id: int, chain: Chain, num_tokens: int) -> None:
        """Keep what a hit at ``num_tokens``, in full blocks, needs from the bounded pools, and the states.

        Nothing is kept where a part is missing: a block has been evicted, or the states hold other tokens.
        """
        end = num_tokens // self._size
        if not self.enabled or not end or not self.has_tails or chain.epoch != self._epoch:
            return
        manager = self._manager
        parts: list[tuple[BlockPool, int | None]] = []
        for index, (rule, pool) in enumerate(zip(manager.rules, manager.pools)):
            if not rule.bounded:
                continue
            table = manager.table(seq_id, index)
            for i in self._tail(rule, end):
                if chain.hashes[i] not in pool.index and table[i] != NULL_BLOCK:
                    pool.register(table[i], chain.hashes[i])  # the block that was known for it has been taken
                parts.append((pool, pool.index.get(chain.hashes[i])))
        if manager.slots is not None:
            if manager.num_tokens(seq_id) == end * self._size:
                manager.slots.register(manager.slot(seq_id), chain.hashes[end - 1])
            parts.append((manager.slots, manager.slots.index.get(chain.hashes[end - 1])))
        if any(block is None for _, block in parts):
            return
        for pool, block in parts:
            pool.keep_longer(block or NULL_BLOCK)
        self._counts.tails_kept += 1

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
        self._epoch += 1
        self._known.clear()
        for pool in self._everything:
            pool.forget_all()
