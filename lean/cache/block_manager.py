"""Which sequence owns which block: ids and counts only, no tensors.

A pool keeps every token of a sequence. With a window it keeps the first ``num_sink_tokens``, and what a token at the
last block boundary sees: so a sequence that begins alike can go on from there. Evicted blocks go back to the pool, and
the table names the null block in their place, so that positions stay aligned.

Sequences may share blocks, after a fork and through the prefix cache. A block that another sequence reads, or that is
in the index, is copied before a sequence writes into it (copy on write).
"""

from array import array
from collections.abc import Sequence, Set
from dataclasses import dataclass

from lean.cache.block_pool import NULL_BLOCK, BlockPool
from lean.kernels.layout import blocks_for, first_in_window


@dataclass(frozen=True)
class PoolRule:
    """A pool's ``num_blocks`` usable blocks, and which tokens it keeps. window 0 keeps all."""

    num_blocks: int
    window: int = 0
    num_sink_tokens: int = 0

    @property
    def bounded(self) -> bool:
        return self.window > 0

    def seen(self, num_tokens: int, block_size: int) -> tuple[int, int]:
        """(sinks, first): a token after ``num_tokens`` sees blocks 0 .. sinks - 1, and those from ``first`` on."""
        return blocks_for(self.num_sink_tokens, block_size), first_in_window(num_tokens, self.window) // block_size


@dataclass(frozen=True)
class BlockCopy:
    """A block whose bytes must be copied within its pool before the next write."""

    pool: int
    source: int
    target: int


@dataclass(frozen=True)
class StateCopy:
    """A slot whose states must be copied before the next write."""

    source: int
    target: int


@dataclass
class _Sequence:
    tables: list[array]  # per pool, one id (int32) per block of positions
    num_tokens: int
    first_kept: list[int]  # per pool: index of the first block that is not evicted, sinks aside
    num_evicted: list[int]  # per pool: how often its table names the null block
    slot: int = NULL_BLOCK  # of its states


class BlockManager:
    """Block tables of all sequences over all pools; and the slot of each sequence's states, where layers keep states.

    A slot is shared and copied as a block is. States hold all tokens of a
    sequence at once, so no token can be taken back from them.
    """

    def __init__(self, rules: Sequence[PoolRule], block_size: int, num_slots: int = 0) -> None:
        """``num_slots``: for states; 0: the model's layers keep none."""
        self.rules = tuple(rules)
        self.block_size = block_size
        self.pools = [BlockPool(rule.num_blocks) for rule in rules]
        self.slots = BlockPool(num_slots) if num_slots else None
        self.copies: list[BlockCopy] = []  # to be made in this order before the next write; the maker clears the list
        self.state_copies: list[StateCopy] = []  # likewise
        self._sequences: dict[int, _Sequence] = {}

    def blocks_for(self, num_tokens: int) -> int:
        return blocks_for(num_tokens, self.block_size)

    def _empty(self) -> _Sequence:
        return _Sequence([array("i") for _ in self.pools], 0, [0] * len(self.pools), [0] * len(self.pools))

    def _last_is_shared(self, seq: _Sequence, pool: int) -> bool:
        """Whether the next token goes into a block that another sequence reads too."""
        return seq.num_tokens % self.block_size > 0 and self.pools[pool].refs[seq.tables[pool][-1]] > 1

    def _last_is_known(self, seq: _Sequence, pool: int) -> bool:
        """Whether the next token goes into a block that has a hash."""
        return seq.num_tokens % self.block_size > 0 and self.pools[pool].hashes[seq.tables[pool][-1]] is not None

    def _slot_is_shared(self, seq: _Sequence) -> bool:
        """Whether the sequence needs a slot before it writes: it has none, or another sequence reads it too."""
        return self.slots is not None and (seq.slot == NULL_BLOCK or self.slots.refs[seq.slot] > 1)

    def can_append(self, seq_id: int, num_tokens: int) -> bool:
        """Whether every pool has the blocks, and the states a slot, for ``num_tokens`` more tokens."""
        seq = self._sequences.get(seq_id) or self._empty()
        if self.slots is not None and self.slots.num_free < self._slot_is_shared(seq):
            return False
        need = self.blocks_for(seq.num_tokens + num_tokens) - self.blocks_for(seq.num_tokens)
        return all(pool.num_free >= need + self._last_is_shared(seq, index) for index, pool in enumerate(self.pools))

    def append(self, seq_id: int, num_tokens: int) -> None:
        """Make room for ``num_tokens`` > 0 more tokens of a sequence, new or known.

        Changes all pools, or none where it raises ValueError. May add to ``copies`` and ``state_copies``.
        """
        if not self.can_append(seq_id, num_tokens):
            raise ValueError(f"sequence {seq_id}: no blocks for {num_tokens} more tokens")
        seq = self._sequences.get(seq_id)
        if seq is None:
            seq = self._sequences[seq_id] = self._empty()
        if self.slots is not None:
            self._own_slot(seq, self.slots)
        need = self.blocks_for(seq.num_tokens + num_tokens) - self.blocks_for(seq.num_tokens)
        for index, (pool, table) in enumerate(zip(self.pools, seq.tables)):
            shared, known = self._last_is_shared(seq, index), self._last_is_known(seq, index)
            if shared or (known and pool.num_free > need):
                source, table[-1] = table[-1], pool.take()
                pool.drop(source)
                self.copies.append(BlockCopy(index, source, table[-1]))
            elif known:  # no block is left for a copy, and nobody else reads this one
                pool.forget(table[-1])
            for _ in range(need):
                table.append(pool.take())
        seq.num_tokens += num_tokens

    def _own_slot(self, seq: _Sequence, slots: BlockPool) -> None:
        """Give a sequence a slot of its own, without a hash, to write into."""
        known = slots.hashes[seq.slot] is not None
        if self._slot_is_shared(seq) or (known and slots.num_free):
            source, seq.slot = seq.slot, slots.take()
            if source != NULL_BLOCK:
                slots.drop(source)
                self.state_copies.append(StateCopy(source, seq.slot))
        elif known:
            slots.forget(seq.slot)

    def adopt(self, seq_id: int, num_tokens: int, tables: Sequence[array], slot: int = NULL_BLOCK) -> None:
        """A new sequence that begins with ``num_tokens`` > 0 tokens in full blocks that are in the index.

        tables: per pool the blocks by position, the null block where a token after them sees none. slot: the states
        after these tokens.
        """
        if seq_id in self._sequences:
            raise ValueError(f"sequence {seq_id} exists")
        first = [rule.seen(num_tokens, self.block_size)[1] for rule in self.rules]
        evicted = [table.count(NULL_BLOCK) for table in tables]
        self._sequences[seq_id] = _Sequence(list(tables), num_tokens, first, evicted, slot)
        self._share(self._sequences[seq_id])

    def _share(self, seq: _Sequence) -> None:
        """Add a reference to everything that a sequence holds."""
        if self.slots is not None and seq.slot != NULL_BLOCK:
            self.slots.share(seq.slot)
        for pool, table in zip(self.pools, seq.tables):
            for block in table:
                if block != NULL_BLOCK:
                    pool.share(block)

    def fork(self, parent: int, child: int) -> None:
        """A new sequence with all tokens of another. It takes no blocks until one of the two writes."""
        if child in self._sequences:
            raise ValueError(f"sequence {child} exists")
        seq = self._sequences[parent]
        self._sequences[child] = _Sequence(
            [table[:] for table in seq.tables], seq.num_tokens, list(seq.first_kept), list(seq.num_evicted), seq.slot
        )
        self._share(self._sequences[child])

    def evict(self, seq_id: int) -> None:
        """Free the blocks that no token from the last block boundary on can see."""
        seq = self._sequences[seq_id]
        boundary = seq.num_tokens // self.block_size * self.block_size
        for index, (rule, pool, table) in enumerate(zip(self.rules, self.pools, seq.tables)):
            sinks, first = rule.seen(boundary, self.block_size)
            for block_index in range(max(seq.first_kept[index], sinks), first):
                pool.drop(table[block_index])
                table[block_index] = NULL_BLOCK
                seq.num_evicted[index] += 1
            seq.first_kept[index] = max(seq.first_kept[index], first)

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Drop the tokens from ``num_tokens`` on.

        Raises ValueError where the window before them has been evicted, or where states hold them.
        """
        seq = self._sequences[seq_id]
        if not 0 <= num_tokens <= seq.num_tokens:
            raise ValueError(f"sequence {seq_id} holds {seq.num_tokens} tokens, cannot truncate to {num_tokens}")
        if self.slots is not None and num_tokens < seq.num_tokens:
            raise ValueError(f"sequence {seq_id}: its states hold {seq.num_tokens} tokens")
        for rule, table in zip(self.rules, seq.tables):
            seen = range(first_in_window(num_tokens, rule.window) // self.block_size, self.blocks_for(num_tokens))
            if any(table[index] == NULL_BLOCK for index in seen):
                raise ValueError(f"sequence {seq_id}: the window before token {num_tokens} has been evicted")
        seq.num_tokens = num_tokens
        for index, (pool, table) in enumerate(zip(self.pools, seq.tables)):
            while len(table) > self.blocks_for(num_tokens):
                block = table.pop()
                if block == NULL_BLOCK:
                    seq.num_evicted[index] -= 1
                else:
                    pool.drop(block)
            seq.first_kept[index] = min(seq.first_kept[index], len(table))

    def free(self, seq_id: int) -> None:
        """Free all blocks of a sequence, the last one first, so that beginnings are known longest.

        Unknown sequences are ignored.
        """
        seq = self._sequences.pop(seq_id, None)
        if seq is None:
            return
        if self.slots is not None and seq.slot != NULL_BLOCK:
            self.slots.drop(seq.slot)
        for pool, table in zip(self.pools, seq.tables):
            for block in reversed(table):
                if block != NULL_BLOCK:
                    pool.drop(block)

    def slot(self, seq_id: int) -> int:
        """Where the states of a sequence lie; the null slot without states."""
        return self._sequences[seq_id].slot

    def table(self, seq_id: int, pool: int) -> array:
        """Block ids of a sequence in one pool by position, the null block where evicted. Callers must not change it."""
        return self._sequences[seq_id].tables[pool]

    @property
    def seq_ids(self) -> Set[int]:
        """The sequences that hold tokens."""
        return self._sequences.keys()

    def num_tokens(self, seq_id: int) -> int:
        return self._sequences[seq_id].num_tokens if seq_id in self._sequences else 0

    def tokens_held(self) -> int:
        """Tokens of all sequences in the cache."""
        return sum(seq.num_tokens for seq in self._sequences.values())

    def tokens_kept(self) -> list[int]:
        """Per pool, the tokens of all sequences whose block has not been evicted."""
        kept = [self.tokens_held()] * len(self.pools)
        for seq in self._sequences.values():
            for pool, evicted in enumerate(seq.num_evicted):
                kept[pool] -= self.block_size * evicted
        return kept

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is free, or referenced as often as the tables name it."""
        for index, pool in enumerate(self.pools):
            pool.check_integrity()
            named = [0] * (pool.num_blocks + 1)
            for seq in self._sequences.values():
                assert len(seq.tables[index]) == self.blocks_for(seq.num_tokens), "a table does not fit its tokens"
                assert seq.tables[index].count(NULL_BLOCK) == seq.num_evicted[index], "evicted blocks are miscounted"
                for block in seq.tables[index]:
                    named[block] += block != NULL_BLOCK
            assert named == pool.refs, f"pool {index}: references differ from the tables"
        if self.slots is not None:
            self.slots.check_integrity()
            named = [0] * (self.slots.num_blocks + 1)
            for seq in self._sequences.values():
                assert bool(seq.num_tokens) == (seq.slot != NULL_BLOCK), "a sequence with tokens has no states"
                named[seq.slot] += seq.slot != NULL_BLOCK
            assert named == self.slots.refs, "states: references differ from the sequences"
