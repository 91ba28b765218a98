"""The cache's tensors: one uint8 arena per pool, block-major, and the metadata that a step's attention reads."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from lean.cache.block_manager import BlockCopy
from lean.cache.plan import CacheGroup, CachePlan, LayerShape
from lean.cache.size import CacheSize
from lean.kernels.ops import LayerPool


@dataclass(frozen=True)
class LayerCache:
    """Where one attention layer's K/V lie: its group, and its part of the group's pools.

    ``own_window`` is the model's window, 0 for full attention; a --window does not change it.
    """

    group: CacheGroup
    pool: LayerPool
    exact: LayerPool | None
    own_window: int


class KVCache:
    """Arenas ``[num_blocks + 1, block_bytes]`` of all pools; the bytes of a block for all layers are contiguous.

    Memory is not cleared: bytes that were never written must not influence any result.
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
                exact = None if group.exact_pool_id is None else self._share(group.exact_pool_id, layer)
                self.layers[layer] = LayerCache(group, self._share(group.pool_id, layer), exact, shapes[layer].window)

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copy whole blocks within their pools, in order."""
        for copy in copies:
            self.arenas[copy.pool][copy.target] = self.arenas[copy.pool][copy.source]

    def _share(self, pool: int, layer: int) -> LayerPool:
        spec = self.plan.pools[pool]
        return LayerPool(self.arenas[pool], spec.layouts[spec.layers.index(layer)], spec.offset(layer))
