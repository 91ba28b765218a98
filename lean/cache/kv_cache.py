"""The cache's tensors: one uint8 arena per pool, block-major, and the metadata that a step's attention reads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lean.cache.block_manager import BlockManager
from lean.cache.plan import CacheGroup, CachePlan, LayerShape
from lean.cache.size import CacheSize
from lean.cache.states import StateCache
from lean.kernels.ops import LayerPool


@dataclass(frozen=True)
class LayerCache:
    """Where one attention layer's K/V lie: its group, and its part of the group's pools.

    ``own_window`` is the model's window, 0 for full attention; a --window does not change it. ``writes``: False for a
    layer that reads the K/V of an earlier layer.
    """

    group: CacheGroup
    pool: LayerPool
    exact: LayerPool | None
    own_window: int
    writes: bool = True

    def alone(self) -> "LayerCache":
        """The same bytes, as if there were no other layer."""
        return replace(self, pool=self.pool.alone(), exact=None if self.exact is None else self.exact.alone())


class KVCache:
    """Arenas ``[num_blocks + 1, block_bytes]`` of all pools; the bytes of a block for all layers are contiguous.

    ``states``: of layers that keep no K/V; None where the model has none.

    Memory is not cleared: bytes that were never written must not influence any result.
    """

    def __init__(self, plan: CachePlan, size: CacheSize, shapes: Sequence[LayerShape], device: torch.device) -> None:
        self.plan = plan
        self.arenas = [
            torch.empty(rule.num_blocks + 1, pool.block_bytes, dtype=torch.uint8, device=device)
            for rule, pool in zip(size.rules, plan.pools)
        ]
        self.states = StateCache(plan.states, size.num_slots, device) if plan.states else None
        self.layers: dict[int, LayerCache] = {}
        for group in plan.groups:
            for layer in group.layers:
                exact = None if group.exact_pool_id is None else self._share(group.exact_pool_id, layer)
                self.layers[layer] = LayerCache(group, self._share(group.pool_id, layer), exact, shapes[layer].window)
        for index, shape in enumerate(shapes):
            if shape.kv_layer is not None:
                self.layers[index] = replace(self.layers[shape.kv_layer], writes=False)

    def find(self, index: int) -> tuple[int, LayerCache]:
        """The place of an attention layer among the layers, and its cache."""
        return index, self.layers[index]

    def make_copies(self, manager: BlockManager) -> None:
        """Copy the blocks within their pools, and the states, that the manager wants copied before the next write."""
        # Each entry goes when it has been made: after an interrupt none is repeated whose source a later one overwrote.
        while manager.copies:
            copy = manager.copies[0]
            self.arenas[copy.pool][copy.target] = self.arenas[copy.pool][copy.source]
            del manager.copies[0]
        while self.states is not None and manager.state_copies:
            self.states.copy(manager.state_copies[:1])
            del manager.state_copies[0]

    @property
    def block_bytes(self) -> list[int]:
        """Bytes of a block by pool; states are the last pool."""
        return [arena.shape[1] for arena in self.arenas] + ([self.states.slot_bytes] if self.states else [])

    def read_blocks(self, pool: int, blocks: Sequence[int]) -> torch.Tensor:
        """A copy of blocks of a pool: uint8 [blocks, bytes of a block] on the CPU."""
        if pool == len(self.arenas) and self.states is not None:
            return self.states.read_slots(blocks)
        arena = self.arenas[pool]
        return arena.index_select(0, torch.tensor(blocks, device=arena.device)).cpu()

    def write_blocks(self, pool: int, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """Write what `read_blocks` gave into blocks of a pool."""
        if pool == len(self.arenas) and self.states is not None:
            self.states.write_slots(blocks, rows)
            return
        arena = self.arenas[pool]
        arena.index_copy_(0, torch.tensor(blocks, device=arena.device), rows.to(arena.device))

    def _share(self, pool: int, layer: int) -> LayerPool:
        spec = self.plan.pools[pool]
        return LayerPool(self.arenas[pool], spec.layouts[spec.layers.index(layer)], spec.offset(layer))
