"""The index over all pools: the longest prefix whose every visible block is known, and which tails are kept."""

import pytest

from lean.cache import prefix
from lean.cache.block_manager import BlockManager, PoolRule
from lean.cache.chain import Chain
from lean.cache.prefix import Hit, PrefixCache

# Pools with a window have so few blocks that the middle of a long sequence is soon overwritten.
FULL, WINDOW, RESIDUAL = PoolRule(64), PoolRule(10, 20), PoolRule(7, 9, 3)
SIZE = 8


class Desk:
    """Sequences that compute tokens on a cache, as the scheduler lets them."""

    def __init__(self, *rules: PoolRule, num_slots: int = 0, enabled: bool = True) -> None:
        self.manager = BlockManager(rules or (FULL,), SIZE, num_slots)
        self.cache = PrefixCache(self.manager, enabled)
        self.count = 0

    def find(self, ids: list[int], salt: str | None = None, most: int | None = None) -> Hit:
        return self.cache.find(Chain(salt, SIZE), lambda a, b: ids[a:b], len(ids) - 1 if most is None else most)

    def run(self, ids: list[int], *, salt: str | None = None, tails: tuple[int, ...] = (), step: int = 13) -> Hit:
        """Compute a sequence from what is known of it, keep tails at some lengths and its end, and free it."""
        chain, seq_id = Chain(salt, SIZE), self.count
        self.count += 1
        hit = self.cache.find(chain, lambda a, b: ids[a:b], len(ids) - 1)
        self.cache.begin(seq_id, chain, hit)
        for start in range(hit.num_tokens, len(ids), step):
            end = min(len(ids), start + step)
            self.manager.append(seq_id, end - start)
            self.cache.register(seq_id, chain, lambda a, b: ids[a:b], start, end)
            for at in tails:
                if start < at <= end:
                    self.cache.keep_tail(seq_id, chain, at)
            self.manager.evict(seq_id)
            self.manager.check_integrity()
        self.cache.keep_tail(seq_id, chain, len(ids))
        self.manager.free(seq_id)
        self.manager.check_integrity()
        return hit


def ids(count: int, seed: int = 0) -> list[int]:
    return [1000 * seed + i for i in range(count)]


def test_an_unbounded_pool_finds_every_full_block_but_leaves_a_token_to_compute():
    desk = Desk()
    desk.run(ids(50))
    assert desk.find(ids(100)) == Hit(48)
    assert desk.find([*ids(20), *ids(30, 1)]) == Hit(16)
    assert [desk.find(ids(n)).num_tokens for n in (7, 8, 9, 48, 49)] == [0, 0, 8, 40, 48]
    assert desk.find(ids(100), most=23) == Hit(16)
    assert desk.find(ids(30, 1)) == Hit()


@pytest.mark.parametrize("rules", [(FULL, RESIDUAL), (FULL, WINDOW), (FULL, WINDOW, RESIDUAL), (WINDOW, RESIDUAL)])
def test_where_a_pool_forgets_a_prefix_is_found_where_its_tail_was_kept(rules):
    desk = Desk(*rules)
    desk.run(ids(150), tails=(80,))
    assert desk.find(ids(200)) == Hit(144)  # the last boundary
    assert desk.find([*ids(80), *ids(50, 1)]) == Hit(80)
    fork = [*ids(104), *ids(50, 1)]
    assert desk.find(fork) == Hit(80, branch=104)
    assert desk.run(fork, tails=(104,)) == Hit(80, branch=104)
    assert desk.find([*ids(104), *ids(50, 2)]) == Hit(104)  # the second visitor paid, the third does not


@pytest.mark.parametrize("step", [1, 5, 8, 13, 64, 200])
@pytest.mark.parametrize("length", range(40, 57))
def test_the_tail_at_the_last_boundary_is_there_for_every_length(length, step):
    desk = Desk(*(PoolRule(64, window, sinks) for window, sinks in ((0, 0), (20, 0), (9, 3), (1, 0), (8, 0), (17, 30))))
    desk.run(ids(length), step=step)
    assert desk.find(ids(length + 1)) == Hit(length // SIZE * SIZE)


def test_a_hit_takes_the_visible_blocks_and_no_others():
    desk = Desk(FULL, RESIDUAL)
    desk.run(ids(64))
    chain = Chain(None, SIZE)
    hit = desk.cache.find(chain, lambda a, b: ids(80)[a:b], 79)
    assert hit == Hit(64)
    assert desk.cache.revives(chain, hit) == 8
    desk.cache.begin(99, chain, hit)
    assert desk.cache.revives(chain, hit) == 0, "blocks in use cost nothing"
    table = list(desk.manager.table(99, 1))
    assert [i for i, block in enumerate(table) if block] == [0, 7]
    assert [pool.num_used for pool in desk.manager.pools] == [8, 2]


def test_other_salts_share_nothing():
    desk = Desk(FULL, PoolRule(64, 9, 3))
    salts = (None, "", "a", "b", "shared", "salt:a", "\ud800")
    for salt in salts:
        assert desk.run(ids(60), salt=salt) == Hit()
    for salt in salts:
        assert desk.find(ids(60), salt) == Hit(56)


def test_a_hash_depends_on_every_token_before_it_and_on_their_order():
    texts = [ids(16), [*ids(8), *ids(8)[::-1]], [*ids(8)[::-1], *ids(8)], ids(16)[::-1], [0] * 16, [256] * 16]
    last = set()
    for text in texts:
        chain = Chain(None, SIZE)
        chain.extend(lambda a, b, text=text: text[a:b], 2)
        last.add(chain.hashes[1])
    assert len(last) == len(texts)


def test_tails_outlive_other_blocks_and_the_oldest_tail_goes_first():
    desk = Desk(FULL, PoolRule(8, 9, 3))  # a tail takes 2 blocks, of the sinks and of the window; a sequence 4
    desk.run(ids(30, 1))
    desk.run(ids(30, 2))
    for seed in range(3, 6):
        desk.run(ids(60, seed), step=8)
    found = [desk.find([*ids(60, seed)]).num_tokens for seed in range(1, 6)]
    assert found == [0, 8, 56, 56, 56]  # of the second tail the block of the sinks is left
    assert desk.cache.counts().tails_kept == 5
    assert desk.cache.counts().evictions > 0


def test_where_every_pool_is_bounded_old_hashes_are_forgotten(monkeypatch):
    monkeypatch.setattr(prefix, "MOST_KNOWN", 20)
    desk = Desk(WINDOW)
    desk.run(ids(100))  # 12 blocks
    assert desk.find([*ids(40), *ids(20, 1)]) == Hit(0, branch=40)
    desk.run(ids(100, 2))
    assert desk.find([*ids(40), *ids(20, 1)]) == Hit()


def test_where_every_pool_is_bounded_a_prefix_that_is_used_stays_known(monkeypatch):
    monkeypatch.setattr(prefix, "MOST_KNOWN", 20)
    desk = Desk(PoolRule(200, 20))
    desk.run(ids(40), tails=(32,))
    for seed in range(2, 8):
        desk.run(ids(60, seed))
        assert desk.run(ids(40), tails=(32,)) == Hit(32)


def test_a_reset_forgets_everything_and_what_runs_meanwhile_registers_no_more():
    desk = Desk(FULL, RESIDUAL)
    desk.run(ids(40))
    chain = Chain(None, SIZE)
    desk.cache.begin(50, chain, desk.find(ids(50, 1)))
    desk.manager.append(50, 30)
    desk.cache.register(50, chain, lambda a, b: ids(50, 1)[a:b], 0, 30)
    desk.cache.reset()
    assert desk.find(ids(40)) == desk.find(ids(50, 1)) == Hit()
    desk.manager.append(50, 20)
    desk.cache.register(50, chain, lambda a, b: ids(50, 1)[a:b], 30, 50)
    desk.cache.keep_tail(50, chain, 48)
    desk.manager.free(50)
    assert not any(pool.index for pool in desk.manager.pools)
    desk.manager.check_integrity()
    desk.run(ids(40))
    assert desk.find(ids(50)) == Hit(40)


def test_states_are_part_of_a_tail_and_are_kept_where_they_hold_the_prefix():
    desk = Desk(FULL, num_slots=4)
    desk.run(ids(40), step=24, tails=(24, 32))  # at 32 the states hold 40 tokens already
    assert desk.find([*ids(30), *ids(30, 1)]) == Hit(24)
    assert desk.find(ids(60)) == Hit(40)
    assert desk.find([*ids(34), *ids(30, 1)]) == Hit(24, branch=32)
    chain = Chain(None, SIZE)
    desk.cache.begin(7, chain, desk.cache.find(chain, lambda a, b: ids(60)[a:b], 59))
    kept = desk.manager.slot(7)
    desk.manager.append(7, 4)
    assert desk.manager.slot(7) != kept
    assert [(copy.source, copy.target) for copy in desk.manager.state_copies[-1:]] == [(kept, desk.manager.slot(7))]
    assert desk.find(ids(60)) == Hit(40)


def test_a_cache_that_is_off_finds_and_registers_nothing():
    desk = Desk(FULL, RESIDUAL, enabled=False)
    desk.run(ids(60))
    assert desk.find(ids(60)) == Hit()
    assert not any(pool.index for pool in desk.manager.pools)
