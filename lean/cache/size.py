"""How many blocks every pool gets, and how long a sequence may be as a result."""

from dataclasses import dataclass

from lean.cache.block_manager import PoolRule
from lean.cache.plan import CachePlan, PoolSpec
from lean.config import EngineConfig
from lean.errors import ConfigError
from lean.kernels.layout import blocks_for
from lean.units import ENDLESS, mib

MOST_TAILS = 64  # by default, however large the cache is


class DoesNotFit(ConfigError):
    """The pools, or a sequence of the configured length in them, do not fit. The message ends without advice."""


@dataclass(frozen=True)
class CacheSize:
    """Sizes of all pools.

    Attributes:
        rules: one per pool, in the plan's order.
        num_tokens: tokens that fit into the unbounded pools; where every pool is bounded, max_num_seqs x max_model_len.
        max_model_len: the longest sequence; at most ``model_max_len``, the longest that the model takes.
        nbytes: bytes of all pools, null blocks included, and of the states.
        num_slots: sequences and tails whose states fit; 0 where the model's layers keep none.
        num_tails: tails of the prefix cache for which bounded pools have blocks beside those of running sequences.
    """

    rules: tuple[PoolRule, ...]
    num_tokens: int
    max_model_len: int
    model_max_len: int
    nbytes: int
    num_slots: int = 0
    num_tails: int = 0


def size_cache(
    plan: CachePlan, config: EngineConfig, model_max_len: int, free_bytes: int, share: float = 1.0
) -> CacheSize:
    """Give every pool its number of blocks.

    Bounded pools and states get what ``max_num_seqs`` sequences can hold there at most, and what some tails of the
    prefix cache need. The unbounded pools share the rest.

    Args:
        model_max_len: longest sequence that the model takes without a window.
        free_bytes: memory that the device can give.
        share: the part of it that the cache may take where the configuration does not say.

    Raises:
        DoesNotFit: the configured memory exceeds the free memory; it holds less than one block, or fewer than
            max_model_len tokens; or max_model_len exceeds the model's positions.
        ConfigError: an option has no effect.
    """
    model_max_len = ENDLESS if plan.bounded else model_max_len
    max_model_len = config.max_model_len or model_max_len
    if max_model_len > model_max_len:
        raise DoesNotFit(f"max-model-len {max_model_len} exceeds the {model_max_len} positions of this model")
    size, needed = plan.block_size, blocks_for(max_model_len, plan.block_size)
    row_bytes = sum(pool.block_bytes for pool in plan.pools if not pool.window)
    if not row_bytes and config.num_blocks is not None:
        raise ConfigError("--num-blocks has no effect: every layer has a window, so pool sizes are fixed. Remove it")
    asked = _asked_tails(plan, config)
    num_tails = asked or 0
    bounded = {i: _bounded_blocks(pool, config, max_model_len) for i, pool in enumerate(plan.pools) if pool.window}
    # One block more than usable in every pool: the null block. Likewise of states.
    bounded_bytes = sum((n + 1) * plan.pools[i].block_bytes for i, n in bounded.items())
    bounded_bytes += (config.max_num_seqs + 1) * plan.state_bytes + num_tails * plan.tail_bytes
    budget = _budget(config, int(free_bytes * share), free_bytes, bounded_bytes + 2 * row_bytes)
    blocks = _unbounded_blocks(config, budget, bounded_bytes, row_bytes, needed) if row_bytes else 0
    if asked is None:
        # Tails neither shorten the longest sequence nor make a cache too large that fits without them.
        least = bounded_bytes + (min(blocks, max(needed, config.num_blocks or 0)) + 1) * row_bytes
        most = free_bytes if config.num_blocks is not None else budget
        kv_bytes = bounded_bytes + (blocks + 1) * row_bytes
        num_tails = max(0, min(MOST_TAILS, kv_bytes // 8 // plan.tail_bytes, (most - least) // plan.tail_bytes))
        bounded_bytes += num_tails * plan.tail_bytes
        blocks = _unbounded_blocks(config, budget, bounded_bytes, row_bytes, needed) if row_bytes else 0
    if row_bytes:
        _check_fit(config, blocks, needed, bounded_bytes, row_bytes, budget, free_bytes)
        max_model_len = min(max_model_len, blocks * size)
    counts = {i: n + num_tails * plan.pools[i].tail_blocks(size) for i, n in bounded.items()}
    rules = tuple(
        PoolRule(counts.get(i, blocks), pool.window, pool.num_sink_tokens) for i, pool in enumerate(plan.pools)
    )
    tokens = blocks * size if row_bytes else config.max_num_seqs * max_model_len
    nbytes = bounded_bytes + (blocks + 1) * row_bytes
    num_slots = config.max_num_seqs + num_tails if plan.states else 0
    return CacheSize(rules, tokens, max_model_len, model_max_len, nbytes, num_slots, num_tails)


def _asked_tails(plan: CachePlan, config: EngineConfig) -> int | None:
    """Tails that the configuration says; None where it leaves the number open."""
    if not config.prefix_cache or not plan.tail_bytes:
        return 0
    return None if config.prefix_tail_memory is None else config.prefix_tail_memory // plan.tail_bytes


def _budget(config: EngineConfig, usual: int, free_bytes: int, least: int) -> int:
    """Bytes for all pools: the configured number or ``usual``. Raises DoesNotFit where ``least`` does not fit."""
    budget = usual if config.kv_memory is None else config.kv_memory
    if budget > free_bytes:
        raise DoesNotFit(f"kv-memory {mib(budget)} exceeds the {mib(free_bytes)} of free memory")
    if config.num_blocks is None and least > budget:
        raise DoesNotFit(
            f"the KV cache needs at least {mib(least)} with blocks of {config.block_size} tokens, but may use "
            f"{mib(budget)} ({mib(free_bytes)} are free)"
        )
    return budget


def _unbounded_blocks(config: EngineConfig, budget: int, bounded_bytes: int, row_bytes: int, needed: int) -> int:
    """Usable blocks of every unbounded pool. ``row_bytes``: one block of each. ``needed``: for the longest sequence."""
    if config.num_blocks is not None:
        return config.num_blocks
    blocks = (budget - bounded_bytes) // row_bytes - 1
    return blocks if config.kv_memory is not None else min(blocks, config.max_num_seqs * needed)


def _check_fit(
    config: EngineConfig, blocks: int, needed: int, bounded_bytes: int, row_bytes: int, budget: int, free_bytes: int
) -> None:
    """Raise DoesNotFit where the blocks exceed the free memory, or a configured length exceeds the blocks."""
    nbytes = bounded_bytes + (blocks + 1) * row_bytes
    if nbytes > free_bytes:
        raise DoesNotFit(f"{blocks} blocks take {mib(nbytes)}, but {mib(free_bytes)} are free")
    if blocks < needed and config.max_model_len is not None:
        limit = f"num-blocks is {blocks}" if config.num_blocks else f"only {blocks} fit the {mib(budget)} for the cache"
        raise DoesNotFit(
            f"max-model-len {config.max_model_len} needs {needed} blocks of {config.block_size} tokens "
            f"({mib(bounded_bytes + (needed + 1) * row_bytes)}), but {limit} ({mib(free_bytes)} are free)"
        )


def _bounded_blocks(pool: PoolSpec, config: EngineConfig, max_model_len: int) -> int:
    """Most blocks that ``max_num_seqs`` sequences can hold at once in a pool with a window, new tokens included.

    A sequence that adds q tokens holds its last window - 1 + q tokens. The tokens of a step, divided among the
    sequences, start at most one additional block each.
    """
    size = config.block_size
    kept = pool.most_blocks(max_model_len, size)
    step = min(config.step_tokens, config.max_num_seqs * config.chunk_tokens)
    total = config.max_num_seqs * (kept + 1) + blocks_for(step, size)
    return min(total, config.max_num_seqs * blocks_for(max_model_len, size))
