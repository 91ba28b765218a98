"""Block accounting: exactly the blocks that a token from the last boundary on can see are held, and none is lost."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lean.cache.block_manager import BlockCopy, BlockManager, PoolRule, StateCopy
from lean.cache.block_pool import NULL_BLOCK


def manager(*rules: PoolRule, block_size: int = 8) -> BlockManager:
    return BlockManager(rules or (PoolRule(16),), block_size)


def visible(index: int, num_tokens: int, block_size: int, window: int, num_sink_tokens: int) -> bool:
    """Whether a token at ``num_tokens`` or later sees any position of a block, position by position."""
    positions = range(index * block_size, (index + 1) * block_size)
    return any(not window or num_tokens - p < window or p < num_sink_tokens for p in positions)


def test_a_sequence_gets_as_many_blocks_as_its_tokens_need():
    m = manager()
    for num_tokens, blocks in ((1, 1), (7, 1), (1, 2), (15, 3), (1, 4)):
        m.append(0, num_tokens)
        assert len(m.table(0, 0)) == m.pools[0].num_used == blocks
    assert m.num_tokens(0) == m.tokens_held() == 25


def test_blocks_are_distinct_and_never_the_null_block():
    m = manager()
    m.append(0, 60)
    m.append(1, 60)
    assert sorted(m.table(0, 0) + m.table(1, 0)) == list(range(1, 17))


@pytest.mark.parametrize("rules", [(PoolRule(4), PoolRule(2)), (PoolRule(2), PoolRule(4))], ids=str)
def test_append_takes_from_all_pools_or_from_none(rules):
    m = manager(*rules)
    m.append(0, 9)
    assert not m.can_append(0, 8)
    assert not m.can_append(1, 1)
    for seq_id in (0, 1):
        with pytest.raises(ValueError, match=rf"sequence {seq_id}.*no blocks"):
            m.append(seq_id, 8)
    assert [pool.num_used for pool in m.pools] == [2, 2]
    assert m.num_tokens(0) == 9
    assert m.num_tokens(1) == 0
    m.check_integrity()


@pytest.mark.parametrize("num_sink_tokens", [0, 1, 4, 8, 9])
@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 20])
def test_eviction_frees_exactly_the_blocks_no_later_token_can_see(window, num_sink_tokens):
    m = manager(PoolRule(64, window, num_sink_tokens))
    for num_tokens in range(1, 100):
        m.append(0, 1)
        m.evict(0)
        kept = [block != NULL_BLOCK for block in m.table(0, 0)]
        boundary = num_tokens // 8 * 8
        assert kept == [visible(i, boundary, 8, window, num_sink_tokens) for i in range(len(kept))], num_tokens
        assert m.pools[0].num_used == sum(kept)
    m.check_integrity()


def test_surviving_blocks_keep_their_place_in_the_table():
    m = manager(PoolRule(16, 8, 4))
    m.append(0, 50)
    before = list(m.table(0, 0))
    m.evict(0)
    assert list(m.table(0, 0)) == [before[0], *[NULL_BLOCK] * 4, *before[5:]]


def test_tokens_kept_leaves_evicted_blocks_out():
    m = manager(PoolRule(16), PoolRule(16, 8, 4))
    m.append(0, 50)
    m.append(1, 3)
    m.evict(0)
    assert m.tokens_held() == 53
    assert m.tokens_kept() == [53, 53 - 4 * 8]


def test_truncate_forgets_the_end_and_gives_its_blocks_back():
    m = manager(PoolRule(16), PoolRule(16, 20, 4))
    m.append(0, 50)
    m.evict(0)
    m.truncate(0, 50)
    m.truncate(0, 49)
    assert [len(m.table(0, pool)) for pool in (0, 1)] == [7, 7]
    m.truncate(0, 48)
    assert [len(m.table(0, pool)) for pool in (0, 1)] == [6, 6]
    assert m.num_tokens(0) == 48
    m.check_integrity()


def test_truncate_is_refused_where_the_window_before_it_is_gone():
    m = manager(PoolRule(16), PoolRule(16, 20, 4))
    m.append(0, 60)
    m.evict(0)  # a token at 56 sees those from 37 on: the first block that stays begins at 32
    m.truncate(0, 51)
    with pytest.raises(ValueError, match="evicted"):
        m.truncate(0, 50)
    assert m.num_tokens(0) == 51
    m.check_integrity()
    for num_tokens in (-1, 52):
        with pytest.raises(ValueError, match=f"holds 51 tokens, cannot truncate to {num_tokens}"):
            m.truncate(0, num_tokens)
    m.truncate(0, 8)  # what is left is the block of the sinks, and it is whole
    assert [pool.num_used for pool in m.pools] == [1, 1]


def test_free_gives_everything_back_once():
    m = manager(PoolRule(16), PoolRule(16, 8))
    m.append(0, 50)
    m.evict(0)
    m.append(1, 10)
    m.free(0)
    m.free(0)
    m.free(7)
    assert [pool.num_used for pool in m.pools] == [2, 2]
    m.free(1)
    assert [pool.num_free for pool in m.pools] == [16, 16]
    assert m.tokens_held() == m.num_tokens(0) == 0


def known(m: BlockManager, seq_id: int) -> None:
    """Register every full block of a sequence."""
    for index, pool in enumerate(m.pools):
        for i in range(m.num_tokens(seq_id) // m.block_size):
            pool.register(m.table(seq_id, index)[i], bytes([seq_id, i]))


def test_a_block_with_a_hash_is_copied_before_it_is_written_even_by_its_only_user():
    m = manager(PoolRule(4))
    m.append(0, 16)
    known(m, 0)
    first, last = m.table(0, 0)
    m.truncate(0, 15)
    m.append(0, 1)
    assert m.copies == [BlockCopy(0, last, m.table(0, 0)[1])]
    assert m.table(0, 0)[1] not in (first, last)
    assert m.pools[0].index == {bytes([0, 0]): first, bytes([0, 1]): last}
    m.check_integrity()


def test_where_no_block_is_left_for_a_copy_the_only_user_takes_the_hash_away():
    m = manager(PoolRule(2))
    m.append(0, 16)
    known(m, 0)
    m.truncate(0, 15)
    assert m.can_append(0, 1)
    m.append(0, 1)
    assert m.copies == []
    assert list(m.pools[0].index) == [bytes([0, 0])]
    m.check_integrity()


def test_a_sequence_gives_its_blocks_back_last_block_first():
    m = manager(PoolRule(4))
    m.append(0, 32)
    known(m, 0)
    table = list(m.table(0, 0))
    m.free(0)
    assert [m.pools[0].take() for _ in range(4)] == table[::-1]


def test_a_sequence_that_adopts_blocks_shares_them_and_goes_on_behind_them():
    m = manager(PoolRule(8), PoolRule(8, 8, 4))
    m.append(0, 40)
    known(m, 0)
    tables = [m.table(0, index)[:4] for index in (0, 1)]
    tables[1][1] = tables[1][2] = NULL_BLOCK  # a token at 32 sees 0..3 and 25..32
    m.adopt(1, 32, tables)
    assert [pool.num_used for pool in m.pools] == [5, 5]
    m.append(1, 9)
    m.evict(1)
    assert [m.num_tokens(0), m.num_tokens(1)] == [40, 41]
    assert list(m.table(1, 1))[1:4] == [NULL_BLOCK] * 3
    assert m.copies == []
    with pytest.raises(ValueError, match="sequence 1 exists"):
        m.adopt(1, 32, tables)
    m.check_integrity()
    m.free(0)
    m.free(1)
    assert [pool.num_free for pool in m.pools] == [8, 8]


@pytest.mark.parametrize(
    "damage",
    [
        lambda m: m.pools[0].refs.__setitem__(1, 2),
        lambda m: m.pools[0].refs.__setitem__(NULL_BLOCK, 1),
        lambda m: m.pools[0].refs.__setitem__(16, 1),
        lambda m: m.pools[0]._free.__setitem__(NULL_BLOCK, None),
        lambda m: m.pools[0]._free.__setitem__(1, None),
        lambda m: m.pools[0]._free.pop(16),
        lambda m: m.table(0, 0).append(1),
        lambda m: m.table(0, 0).__setitem__(0, 9),
        lambda m: m.table(0, 0).__setitem__(1, m.table(0, 0)[0]),
        lambda m: m.table(0, 0).pop(),
        lambda m: m.pools[0].hashes.__setitem__(1, b"1"),
        lambda m: m.pools[0].index.__setitem__(b"1", 1),
        lambda m: m.pools[0].tails.add(1),
        lambda m: m.pools[0].tails.add(9),
    ],
)
def test_check_integrity_finds_damage(damage):
    m = manager()
    m.append(0, 20)
    m.check_integrity()
    damage(m)
    with pytest.raises(AssertionError):
        m.check_integrity()


def test_states_are_shared_after_a_fork_and_copied_before_one_of_the_two_writes():
    m = BlockManager((PoolRule(16),), 8, num_slots=2)
    m.append(0, 5)
    m.fork(0, 1)
    assert m.slot(0) == m.slot(1)
    assert not m.state_copies
    m.append(1, 1)
    assert m.slot(0) != m.slot(1)
    assert m.state_copies == [StateCopy(m.slot(0), m.slot(1))]
    m.append(0, 1)
    assert len(m.state_copies) == 1  # it is the only reader now
    m.check_integrity()
    assert not m.can_append(2, 1)  # there are two slots
    m.free(1)
    assert m.can_append(2, 1)


def test_no_token_is_taken_back_from_states():
    m = BlockManager((PoolRule(16),), 8, num_slots=1)
    m.append(0, 5)
    m.truncate(0, 5)
    with pytest.raises(ValueError, match="states hold 5 tokens"):
        m.truncate(0, 4)
    assert m.num_tokens(0) == 5
    m.check_integrity()


class Conservation(RuleBasedStateMachine):
    """free + used = total after every step, over pools with and without window."""

    SEQUENCES = st.integers(0, 3)
    WINDOWED = st.builds(PoolRule, st.integers(1, 30), st.integers(1, 40), st.integers(0, 12))
    POOLS = st.lists(WINDOWED | st.builds(PoolRule, st.integers(1, 30)), min_size=1, max_size=3)

    @initialize(rules=POOLS, block_size=st.sampled_from([8, 16]), num_slots=st.sampled_from([0, 0, 3]))
    def start(self, rules, block_size, num_slots):
        self.manager = BlockManager(rules, block_size, num_slots)
        self.lengths: dict[int, int] = {}

    @rule(seq_id=SEQUENCES, count=st.integers(1, 70))
    def append(self, seq_id, count):
        if self.manager.can_append(seq_id, count):
            self.manager.append(seq_id, count)
            self.lengths[seq_id] = self.lengths.get(seq_id, 0) + count
        else:
            with pytest.raises(ValueError, match="no blocks"):
                self.manager.append(seq_id, count)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def evict(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.lengths)))
        self.manager.evict(seq_id)
        for index, pool_rule in enumerate(self.manager.rules):
            for i, block in enumerate(self.manager.table(seq_id, index)):
                size, length = self.manager.block_size, self.lengths[seq_id]
                rest = size, pool_rule.window, pool_rule.num_sink_tokens
                # Between the two it depends on whether the sequence was longer once.
                assert block != NULL_BLOCK or not visible(i, length, *rest)
                assert block == NULL_BLOCK or visible(i, length // size * size, *rest)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def truncate(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.lengths)))
        length = data.draw(st.integers(0, self.lengths[seq_id]))
        try:
            self.manager.truncate(seq_id, length)
        except ValueError:
            assert any(pool_rule.bounded for pool_rule in self.manager.rules) or self.manager.slots is not None
            return
        self.lengths[seq_id] = length
        for index, pool_rule in enumerate(self.manager.rules):
            table = self.manager.table(seq_id, index)
            for position in range(length):
                if not pool_rule.window or length - position < pool_rule.window:
                    assert table[position // self.manager.block_size] != NULL_BLOCK

    @rule(seq_id=SEQUENCES)
    def free(self, seq_id):
        self.manager.free(seq_id)
        self.lengths.pop(seq_id, None)

    @invariant()
    def nothing_is_lost(self):
        self.manager.check_integrity()
        for index, pool in enumerate(self.manager.pools):
            tables = [self.manager.table(seq_id, index) for seq_id in self.lengths]
            assert pool.num_used == sum(block != NULL_BLOCK for table in tables for block in table)
            assert pool.num_free + pool.num_used == pool.num_blocks
        if self.manager.slots is not None:
            assert self.manager.slots.num_used == len(self.lengths)
        assert self.manager.tokens_held() == sum(self.lengths.values())


TestConservation = Conservation.TestCase
TestConservation.settings = settings(max_examples=80, stateful_step_count=40)
