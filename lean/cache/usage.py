"""What the cache holds at one moment, pool by pool."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from lean.cache.block_manager import BlockManager
from lean.cache.disk_queues import DiskCounts
from lean.cache.plan import CachePlan
from lean.cache.prefix import PrefixCache, PrefixCounts


@dataclass(frozen=True)
class PoolUse:
    """What one pool holds at one moment; a row of ``kv.pools`` in reports. ``bytes_held`` counts the blocks in use."""

    layers: list[int]
    format: str
    exact: bool
    window: int
    sinks: int
    bytes_per_token: int
    num_blocks: int
    blocks_used: int
    tokens_held: int
    bytes_held: int


@dataclass(frozen=True)
class CacheUse:
    """What the cache holds at one moment.

    ``bytes_held`` counts the blocks in use, exact pools included, and the states. ``bytes_if_bf16`` is for the same
    tokens in bf16, without rounding to blocks, and the same states. ``state_bytes``: of the states alone.
    ``bytes_cached``: of free blocks that the prefix cache knows. ``prefix``: its counts; None in a peak.
    ``disk``: the counts of its disk tier; None without one.
    """

    tokens_held: int
    bytes_held: int
    bytes_if_bf16: int
    pools: list[PoolUse]
    state_bytes: int = 0
    bytes_cached: int = 0
    prefix: PrefixCounts | None = None
    disk: DiskCounts | None = None


class Occupancy(NamedTuple):
    """Counts of one moment, cheap enough for every step; `cache_use` makes a report of them.

    Attributes:
        tokens_held: tokens of all sequences.
        blocks_used, tokens_kept: per pool, the blocks in use and the tokens whose block has not been evicted.
        slots_used: sequences with states.
    """

    tokens_held: int
    blocks_used: list[int]
    tokens_kept: list[int]
    slots_used: int = 0


def occupancy(manager: BlockManager) -> Occupancy:
    """The counts of this moment."""
    slots = 0 if manager.slots is None else manager.slots.num_used
    return Occupancy(manager.tokens_held(), [pool.num_used for pool in manager.pools], manager.tokens_kept(), slots)


def cache_use(plan: CachePlan, manager: BlockManager, at: Occupancy) -> CacheUse:
    """What the pools of ``plan`` and ``manager`` held at one moment."""
    pools = [
        PoolUse(
            layers=list(spec.layers),
            format=spec.name,
            exact=spec.exact,
            window=spec.window,
            sinks=spec.num_sink_tokens,
            bytes_per_token=spec.bytes_per_token,
            num_blocks=pool.num_blocks,
            blocks_used=used,
            tokens_held=kept,
            bytes_held=used * spec.block_bytes,
        )
        for spec, pool, used, kept in zip(plan.pools, manager.pools, at.blocks_used, at.tokens_kept)
    ]
    bf16 = sum(use.tokens_held * spec.bytes_per_token_bf16 for use, spec in zip(pools, plan.pools) if not spec.exact)
    states = at.slots_used * plan.state_bytes
    return CacheUse(at.tokens_held, states + sum(pool.bytes_held for pool in pools), states + bf16, pools, states)


def with_prefix(use: CacheUse, plan: CachePlan, manager: BlockManager, prefix: PrefixCache) -> CacheUse:
    """The same with what the prefix cache holds now and has done."""
    nbytes = sum(pool.num_cached * spec.block_bytes for spec, pool in zip(plan.pools, manager.pools))
    if manager.slots is not None:
        nbytes += manager.slots.num_cached * plan.state_bytes
    return replace(use, bytes_cached=nbytes, prefix=prefix.counts())
