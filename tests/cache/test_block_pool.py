"""A pool's blocks: which is taken next, and what the index says of them."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lean.cache.block_pool import BlockPool


def filled(pool: BlockPool, *contents: bytes) -> list[int]:
    """A block in use for each content."""
    blocks = [pool.take() for _ in contents]
    for block, content in zip(blocks, contents):
        pool.register(block, content)
    return blocks


def test_blocks_without_a_hash_are_taken_first_then_the_least_recently_used_then_tails():
    pool = BlockPool(5)
    a, b, c = filled(pool, b"a", b"b", b"c")
    plain = pool.take()
    pool.keep_longer(a)
    for block in (a, c, b, plain):
        pool.drop(block)
    never_used = ({1, 2, 3, 4, 5} - {a, b, c, plain}).pop()
    taken = [pool.take() for _ in range(5)]
    assert set(taken[:2]) == {plain, never_used}
    assert taken[2:] == [c, b, a]
    assert pool.index == {}
    assert pool.num_evictions == 3
    with pytest.raises(KeyError):
        pool.take()


def test_a_free_block_is_revived_by_its_hash_and_is_then_used_most_recently():
    pool = BlockPool(2)
    a, b = filled(pool, b"a", b"b")
    pool.drop(a)
    pool.drop(b)
    assert pool.num_cached == 2
    pool.share(pool.index[b"a"])
    assert (pool.num_free, pool.num_cached) == (1, 1)
    pool.drop(a)
    assert pool.take() == b
    assert pool.index == {b"a": a}


def test_a_block_that_nobody_uses_cannot_be_shared_without_a_hash():
    pool = BlockPool(2)
    block = pool.take()
    pool.drop(block)
    for call in (pool.share, pool.drop):
        with pytest.raises(ValueError, match=f"block {block} is not in use"):
            call(block)


def test_of_two_blocks_with_one_content_the_index_names_the_one_in_use():
    pool = BlockPool(4)
    [first] = filled(pool, b"a")
    [second] = filled(pool, b"a")
    assert (pool.index[b"a"], pool.hashes[second]) == (first, None)
    pool.keep_longer(first)
    pool.drop(first)
    [third] = filled(pool, b"a")
    assert pool.index == {b"a": third}
    assert pool.tails == {third}, "what was kept longer stays so"
    pool.check_integrity()


class Model(RuleBasedStateMachine):
    """The pool beside a plain model of it: two lists of free blocks, and dictionaries."""

    CONTENTS = st.sampled_from([bytes([n]) for n in range(9)])

    @initialize(count=st.integers(1, 8))
    def start(self, count):
        self.pool = BlockPool(count)
        self.free = list(range(1, count + 1))  # in the order in which they are taken, tails behind the others
        self.users: dict[int, int] = {}
        self.content: dict[int, bytes] = {}
        self.tails: set[int] = set()

    def give_back(self, block):
        plain = [b for b in self.free if b not in self.tails]
        kept = [b for b in self.free if b in self.tails]
        if block not in self.content:
            plain.insert(0, block)
        elif block in self.tails:
            kept.append(block)
        else:
            plain.append(block)
        self.free = plain + kept

    @precondition(lambda self: self.free)
    @rule()
    def take(self):
        block = self.pool.take()
        assert block == self.free.pop(0)
        self.content.pop(block, None)
        self.tails.discard(block)
        self.users[block] = 1

    @precondition(lambda self: self.users)
    @rule(data=st.data(), content=CONTENTS)
    def register(self, data, content):
        block = data.draw(st.sampled_from(sorted(self.users)))
        self.pool.register(block, content)
        if block in self.content:
            return
        other = next((b for b, c in self.content.items() if c == content), None)
        if other in self.users:
            return
        if other is not None:
            self.free.remove(other)
            self.free.insert(0, other)
            del self.content[other]
            if other in self.tails:
                self.tails.remove(other)
                self.tails.add(block)
        self.content[block] = content

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def find(self, data):
        block = data.draw(st.sampled_from(sorted(self.content)))
        assert self.pool.index[self.content[block]] == block
        self.pool.share(block)
        if block in self.free:
            self.free.remove(block)
        self.users[block] = self.users.get(block, 0) + 1

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def drop(self, data):
        block = data.draw(st.sampled_from(sorted(self.users)))
        self.pool.drop(block)
        self.users[block] -= 1
        if not self.users[block]:
            del self.users[block]
            self.give_back(block)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def keep_longer(self, data):
        block = data.draw(st.sampled_from(sorted(self.content)))
        self.pool.keep_longer(block)
        if block in self.tails:
            return
        self.tails.add(block)
        if block in self.free:
            self.free.remove(block)
            self.free.append(block)

    @rule()
    def forget_all(self):
        known = list(self.pool.index.values())
        self.pool.forget_all()
        gone = [block for block in reversed(known) if block in self.free]
        self.free = [*gone, *(block for block in self.free if block not in gone)]
        self.content, self.tails = {}, set()

    @invariant()
    def the_pool_is_as_the_model(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity()
        assert self.pool.index == {content: block for block, content in self.content.items()}
        assert self.pool.tails == self.tails
        assert [self.pool.refs[b] for b in range(1, self.pool.num_blocks + 1)] == [
            self.users.get(b, 0) for b in range(1, self.pool.num_blocks + 1)
        ]
        assert self.pool.num_cached == sum(block in self.free for block in self.content)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
