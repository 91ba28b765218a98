"""How many blocks every pool gets, and so how long a sequence may be."""

from dataclasses import dataclass

from lean.cache.block_manager import PoolRule
from lean.cache.plan import CachePlan, PoolSpec
from lean.config import EngineConfig
from lean.errors import ConfigError
from lean.kernels.layout import blocks_for
from lean.units import ENDLESS, mib


def _bounded_blocks(pool: PoolSpec, config: EngineConfig, max_model_len: int) -> int:
    """Most blocks that ``max_num_seqs`` sequences can hold at once in a pool with a window, new tokens included.

    A sequence that adds q tokens holds its window - 1 + q last tokens. What a step adds in all, cut over the sequences,
    starts at most one more block each.
    """
    size = config.block_size
    kept = pool.most_blocks(max_model_len, size)
    step = min(config.step_tokens, config.max_num_seqs * config.prefill_chunk)
    total = config.max_num_seqs * (kept + 1) + blocks_for(step, size)
    return min(total, config.max_num_seqs * blocks_for(max_model_len, size))


@dataclass(frozen=True)
class CacheSize:
    """Sizes of all pools. ``num_tokens`` fit into the unbounded ones (all of them, where every pool is bounded).

    ``max_model_len`` is the longest sequence, at most ``model_max_len``, what the model itself can take.
    """

    rules: tuple[PoolRule, ...]
    num_tokens: int
    max_model_len: int
    model_max_len: int
    nbytes: int


def size_cache(
    plan: CachePlan, config: EngineConfig, model_max_len: int, free_bytes: int, share: float = 1.0
) -> CacheSize:
    """Give every pool its number of blocks.

    Args:
        model_max_len: longest sequence the model itself can take without a window.
        free_bytes: memory the device can give.
        share: the part of it that the cache may take where the configuration does not say.

    Raises:
        ConfigError: the memory asked for is not there, holds less than one block, or less than max_model_len tokens.
    """
    wanted = config.max_model_len
    model_max_len = ENDLESS if plan.bounded else model_max_len
    if wanted is not None and wanted > model_max_len:
        raise ConfigError(
            f"max-model-len {wanted} exceeds the {model_max_len} positions of this model: a --window takes any length"
        )
    budget = int(free_bytes * share) if config.kv_memory is None else config.kv_memory
    if budget > free_bytes:
        raise ConfigError(f"kv-memory {mib(budget)} exceeds the {mib(free_bytes)} that are free: lower --kv-memory")
    max_model_len = wanted or model_max_len
    size = plan.block_size
    # One block more than usable in every pool: the null block.
    bounded = {i: _bounded_blocks(p, config, max_model_len) for i, p in enumerate(plan.pools) if p.window}
    bounded_bytes = sum((n + 1) * plan.pools[i].block_bytes for i, n in bounded.items())
    row_bytes = sum(pool.block_bytes for pool in plan.pools if not pool.window)
    least = bounded_bytes + 2 * row_bytes
    if config.num_blocks is None and least > budget:
        raise ConfigError(
            f"the KV cache needs at least {mib(least)} with blocks of {size} tokens, {mib(budget)} are given: "
            "raise --kv-memory, or lower --prefill-chunk or --kv-residual-length"
        )
    blocks = 0
    if not row_bytes and config.num_blocks is not None:
        raise ConfigError("num-blocks has nothing to size: every layer has a window, and so memory enough")
    if row_bytes:
        needed = blocks_for(max_model_len, size)
        blocks = (budget - bounded_bytes) // row_bytes - 1 if config.num_blocks is None else config.num_blocks
        if config.num_blocks is None and config.kv_memory is None:
            blocks = min(blocks, config.max_num_seqs * needed)
        if bounded_bytes + (blocks + 1) * row_bytes > free_bytes:
            raise ConfigError(
                f"{blocks} blocks take {mib(bounded_bytes + (blocks + 1) * row_bytes)}, "
                f"{mib(free_bytes)} are free: lower --num-blocks"
            )
        if blocks < needed:
            if wanted is not None:
                raise ConfigError(
                    f"max-model-len {wanted} needs {needed} blocks of {size} tokens "
                    f"({mib(bounded_bytes + (needed + 1) * row_bytes)}), only {blocks} fit: "
                    "raise --kv-memory or --num-blocks, or lower --max-model-len"
                )
            max_model_len = blocks * size
    rules = tuple(
        PoolRule(bounded.get(i, blocks), pool.window, pool.num_sink_tokens) for i, pool in enumerate(plan.pools)
    )
    tokens = blocks * size if row_bytes else config.max_num_seqs * max_model_len
    nbytes = sum((rule.num_blocks + 1) * pool.block_bytes for rule, pool in zip(rules, plan.pools))
    return CacheSize(rules, tokens, max_model_len, model_max_len, nbytes)
