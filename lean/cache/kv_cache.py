"""The cache's tensors: one uint8 arena per pool, block-major, and the metadata that a step's attention reads."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from lean.cache.block_manager import BlockCopy, BlockManager
from lean.cache.plan import CacheGroup, CachePlan, CacheSize, LayerShape
from lean.kernels.ops import LayerPool


@dataclass(frozen=True)
class LayerCache:
    """What one attention layer needs to find its K/V: its group and its share of the group's pools.

    ``own_window`` is the model's, 0 for full attention, whatever window the user put over it.
    """

    group: CacheGroup
    pool: LayerPool
    exact: LayerPool | None
    own_window: int


class CountedLayers(dict[int, LayerCache]):
    """Layers by index that count how often each is looked up."""

    def __init__(self, layers: dict[int, LayerCache]) -> None:
        super().__init__(layers)
        self.count: Counter[int] = Counter()

    def __getitem__(self, layer: int) -> LayerCache:
        self.count[layer] += 1
        return super().__getitem__(layer)


class KVCache:
    """Arenas ``[num_blocks + 1, block_bytes]`` of all pools; a block's bytes for all layers lie together.

    Memory is not cleared: nothing that was never written may ever matter.
    """

    def __init__(self, plan: CachePlan, size: CacheSize, shapes: Sequence[LayerShape], device: torch.device) -> None:
        self.plan = plan
        self.arenas = [
            torch.empty(rule.num_blocks + 1, pool.block_bytes, dtype=torch.uint8, device=device)
            for rule, pool in zip(size.rules, plan.pools)
        ]
        self.layers: dict[int, LayerCache] = {}
        for group in plan.groups:
            for layer in group.layers:
                exact = None if group.exact_pool is None else self._share(group.exact_pool, layer)
                self.layers[layer] = LayerCache(group, self._share(group.pool, layer), exact, shapes[layer].window)

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copy whole blocks within their pools, in order."""
        for copy in copies:
            self.arenas[copy.pool][copy.target] = self.arenas[copy.pool][copy.source]

    def _share(self, pool: int, layer: int) -> LayerPool:
        spec = self.plan.pools[pool]
        return LayerPool(self.arenas[pool], spec.layouts[spec.layers.index(layer)], spec.offset(layer))


@dataclass(frozen=True)
class PoolUse:
    """What one pool holds at one moment; a row of ``kv.pools`` in reports. Bytes are those of its blocks in use."""

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

    ``bytes_held`` is what the blocks in use really occupy, exact copies included; ``bytes_if_bf16`` is for the same
    tokens in bf16, without blocks.
    """

    tokens_held: int
    bytes_held: int
    bytes_if_bf16: int
    pools: list[PoolUse]


def cache_use(plan: CachePlan, manager: BlockManager) -> CacheUse:
    """Occupancy of all pools at this moment."""
    pools = [
        PoolUse(
            layers=list(spec.layers),
            format=spec.name,
            exact=spec.exact,
            window=spec.window,
            sinks=spec.num_sink_tokens,
            bytes_per_token=spec.bytes_per_token,
            num_blocks=pool.num_blocks,
            blocks_used=pool.num_used,
            tokens_held=manager.tokens_kept(index),
            bytes_held=pool.num_used * spec.block_bytes,
        )
        for index, (spec, pool) in enumerate(zip(plan.pools, manager.pools))
    ]
    bf16 = sum(use.tokens_held * spec.bytes_per_token_bf16 for use, spec in zip(pools, plan.pools) if not spec.exact)
    return CacheUse(manager.tokens_held(), sum(pool.bytes_held for pool in pools), bf16, pools)
