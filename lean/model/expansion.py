"""Long prompt chunks of latent attention: K and V of every head, made from the latent vectors in the cache.

Attention to latent vectors takes 2 rank + rope multiply-adds for each query, key and head; attention to K and V of the
head takes nope + rope + v_head_dim, which is about half. To make K and V takes rank x (nope + v_head_dim) for each key
and head. That pays where a chunk brings many queries for each key.

Every query still reads what the cache holds, quantized or exact by the rule of the residual: the vectors come from the
blocks. K and V are made for a few heads at a time, in pools of their own, which the attention op reads as any pool.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from lean.cache.kv_cache import LayerCache
from lean.cache.plan import CacheGroup
from lean.kernels.layout import KVLayout, blocks_for
from lean.kernels.ops import LayerPool, kv_write, paged_attention
from lean.kernels.parts import read_slots
from lean.model.latent import LatentProjection
from lean.quant import raw_format, rotate_back

FEW_ROWS = 64  # a shorter chunk stays absorbed: setting up the pools would take longer than what is saved
POOL_BYTES = 32 * 2**20  # of K and V that are held at once; those of one head may take more
_TOKENS = 512  # latent vectors that are expanded by one product


class PromptRows(NamedTuple):
    """The rows of one sequence in a packed step: ``num_rows`` from ``first`` on. ``seq``: its place in the step.
    ``seq_len``: its tokens in the cache, this step's included."""

    seq: int
    first: int
    num_rows: int
    seq_len: int


def may_expand(is_latent: bool, device: torch.device, deterministic: bool) -> bool:
    """Whether an engine expands at all. In deterministic mode a row's bits must not depend on its chunk, and a GPU's
    kernels take latent vectors in every chunk."""
    return is_latent and device.type == "cpu" and not deterministic


def pays(projection: LatentProjection, rows: PromptRows, k_dim: int, group: CacheGroup) -> bool:
    """Whether expanding takes less arithmetic for these rows than attending to the latent vectors does.

    k_dim: rank + rope. Under a window a chunk sees few keys, and stays absorbed.
    """
    if group.window:
        return False
    rank, nope, v_head_dim = projection.rank, projection.nope, projection.v_head_dim
    pairs = rows.num_rows * (rows.seq_len - rows.num_rows) + rows.num_rows * (rows.num_rows + 1) // 2
    absorbed = pairs * (k_dim + rank) + rows.num_rows * rank * (nope + v_head_dim)
    vectors = sum(last - first for part in _keys(rows, group) for first, last in part)
    return pairs * (nope + k_dim - rank + v_head_dim) + vectors * rank * (nope + v_head_dim) < absorbed


def _keys(rows: PromptRows, group: CacheGroup) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Ranges first .. last of the keys that some row reads quantized, and of those that some row reads exact."""
    length, residual, sinks = rows.seq_len, group.residual_length, group.num_exact_sinks
    if not residual:
        return [(0, length)], []
    recent = max(0, length - rows.num_rows + 1 - residual)
    quantized = [(sinks, length - residual)] if sinks < length - residual else []
    return quantized, [(0, min(sinks, recent)), (recent, length)]


def _blocks(keys: Iterable[tuple[int, int]], size: int) -> list[int]:
    """The blocks of a sequence that hold these keys, in order."""
    return sorted({block for first, last in keys for block in range(first // size, blocks_for(last, size))})


def _layout(
    projection: LatentProjection, k_dim: int, num_heads: int, num_blocks: int, size: int, dtype: torch.dtype
) -> KVLayout:
    """Of the expanded K/V of as many heads as are made together.

    num_blocks: of all keys, in both pools, each of which has a null block beside.
    """
    fmt, dims = raw_format(dtype), (projection.nope + k_dim - projection.rank, projection.v_head_dim)
    count = heads_at_once(num_heads, size * (2 + num_blocks) * sum(dims) * dtype.itemsize)
    return KVLayout(fmt, fmt, count, *dims, size)


def expansion_bytes(
    projection: LatentProjection,
    k_dim: int,
    num_heads: int,
    rows: PromptRows,
    group: CacheGroup,
    size: int,
    dtype: torch.dtype,
) -> int:
    """Bytes of the vectors, and of K and V made from them, that `attend_expanded` holds for these rows of a layer.

    0 where the rows stay absorbed. k_dim: rank + rope. size: tokens of a block.
    """
    if rows.num_rows < FEW_ROWS or not pays(projection, rows, k_dim, group):
        return 0
    pools = [len(_blocks(keys, size)) for keys in _keys(rows, group)]
    layout = _layout(projection, k_dim, num_heads, sum(pools), size, dtype)
    num_pools = 2 if group.residual_length else 1
    return sum(pools) * size * k_dim * dtype.itemsize + (sum(pools) + num_pools) * layout.nbytes


class _Vectors:
    """Latent vectors that rows of one sequence see in one pool, and where in a pool of expanded K/V theirs lie."""

    def __init__(
        self, pool: LayerPool, table: torch.Tensor, keys: Iterable[tuple[int, int]], dtype: torch.dtype
    ) -> None:
        """table: the sequence's row of the pool's block tables."""
        layout, size = pool.layout, pool.layout.block_size
        blocks = _blocks(keys, size)
        self.num_blocks = len(blocks)
        self.table = torch.zeros(1, max(blocks, default=0) + 1, dtype=torch.int32)
        self.table[0, blocks] = torch.arange(1, len(blocks) + 1, dtype=torch.int32)  # block 0 is the null block
        slots = (table[blocks].long()[:, None] * size + torch.arange(size)).flatten()
        self.latent = torch.empty(len(slots), layout.k_dim, dtype=dtype)
        wide = torch.promote_types(dtype, torch.float32)
        for part in range(0, len(slots), _TOKENS):
            vectors, _ = read_slots(pool.arena, layout, pool.offset, slots[part : part + _TOKENS], wide)
            self.latent[part : part + _TOKENS] = (rotate_back(vectors) if layout.k_format.rotate else vectors)[:, 0]

    def pool_for(self, layout: KVLayout) -> LayerPool:
        return LayerPool(torch.empty(self.num_blocks + 1, layout.nbytes, dtype=torch.uint8), layout, 0)

    def expand_into(self, pool: LayerPool, projection: LatentProjection, heads: slice) -> None:
        """Write K and V of some heads, in the order of the vectors."""
        size = pool.layout.block_size
        for first in range(0, len(self.latent), _TOKENS):
            latent = self.latent[first : first + _TOKENS]
            slots = torch.arange(size + first, size + first + len(latent))
            kv_write(pool, *projection.keys_and_values(latent, heads), slots)


def heads_at_once(num_heads: int, bytes_per_head: int) -> int:
    """Heads whose K and V are made together: a divisor of their number, within POOL_BYTES if that holds one head."""
    most = max(1, POOL_BYTES // bytes_per_head)
    return next(count for count in range(min(num_heads, most), 0, -1) if num_heads % count == 0)


def attend_expanded(
    projection: LatentProjection,
    query: torch.Tensor,
    rows: PromptRows,
    layer: LayerCache,
    block_tables: tuple[torch.Tensor, ...],
    *,
    scale: float,
    softcap: float,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of a sequence's rows to what the cache holds: what absorbing the query computes, but for rounding.

    Args:
        query: [num_rows, num_heads, nope + rope], the rows' own query, after RoPE. Their vectors are written already.
        block_tables: per pool, of all sequences of the step.

    Returns:
        [num_rows, num_heads, v_head_dim]
    """
    group, num_heads, dtype = layer.group, query.shape[1], query.dtype
    quantized_keys, exact_keys = _keys(rows, group)
    vectors = _Vectors(layer.pool, block_tables[group.pool_id][rows.seq], quantized_keys, dtype)
    exact = None
    if layer.exact is not None and group.exact_pool_id is not None:
        exact = _Vectors(layer.exact, block_tables[group.exact_pool_id][rows.seq], exact_keys, dtype)
    num_blocks = vectors.num_blocks + (exact.num_blocks if exact is not None else 0)
    own = layer.pool.layout
    layout = _layout(projection, own.k_dim, num_heads, num_blocks, own.block_size, dtype)
    count = layout.num_kv_heads
    pool, exact_pool = vectors.pool_for(layout), None if exact is None else exact.pool_for(layout)
    starts = torch.tensor([0, rows.num_rows], dtype=torch.int32)
    length = torch.tensor([rows.seq_len], dtype=torch.int32)
    out = query.new_empty(rows.num_rows, num_heads, projection.v_head_dim)
    for first in range(0, num_heads, count):
        heads = slice(first, first + count)
        vectors.expand_into(pool, projection, heads)
        if exact is not None and exact_pool is not None:
            exact.expand_into(exact_pool, projection, heads)
        out[:, heads] = paged_attention(
            query[:, heads],
            pool,
            vectors.table,
            starts,
            length,
            scale=scale,
            softcap=softcap,
            exact=exact_pool,
            exact_block_tables=None if exact is None else exact.table,
            residual_length=group.residual_length,
            num_exact_sinks=group.num_exact_sinks,
            sink_logits=None if sink_logits is None else sink_logits[heads],
        )
    return out
