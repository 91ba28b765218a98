"""The arguments of the ops as values: `WriteCall`, `EncodeCall` and `AttentionCall`, which every back end takes whole.

`Need` is what decides which back end can serve a call (`lean.kernels.serving`).

The fields stand in the order of the op's schema in `lean.kernels.ops`; a test compares the two.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from lean.kernels.layout import KVLayout
from lean.quant import KVFormat


@cache
def layout_of(
    k_format: int, v_format: int, num_kv_heads: int, k_dim: int, v_dim: int, block_size: int, v_in_k: bool = False
) -> KVLayout:
    """The layout of one layer, from the formats as numbers (`KVFormat.code`); one object for equal arguments."""
    formats = KVFormat.from_code(k_format), KVFormat.from_code(v_format)
    return KVLayout(*formats, num_kv_heads, k_dim, v_dim, block_size, v_in_k)


class Need(NamedTuple):
    """What a layer asks of kernels: formats as numbers (`KVFormat.code`), head dims, the dtype of its queries, and
    whether V lies in K."""

    k_format: int
    v_format: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    v_in_k: bool = False


class WriteCall(NamedTuple):
    """The arguments of `kv_write`; `lean.kernels.ops.kv_write` has checked them.

    Of a K format by channel (`KVFormat.by_channel`) K is not written: see `EncodeCall`.

    Attributes:
        arena: uint8 [num_blocks, block_bytes], the pool. It is changed in place.
        key: [num_tokens, num_kv_heads, k_dim], after RoPE.
        value: [num_tokens, num_kv_heads, v_dim], in the dtype of ``key``.
        slot_mapping: int64 [num_tokens], block id x block_size + slot; negative entries are padding.
        layer_offset: where in a block the layer's part starts, in bytes.
        block_size: tokens of a block.
        k_format, v_format: formats as numbers, `KVFormat.code`.
        v_in_k: V is the first v_dim numbers of K, and only K is stored (`KVLayout`).
    """

    arena: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    slot_mapping: torch.Tensor
    layer_offset: int
    block_size: int
    k_format: int
    v_format: int
    v_in_k: bool = False

    @property
    def layout(self) -> KVLayout:
        """The layer's part of a block."""
        _, num_kv_heads, k_dim = self.key.shape
        sizes = num_kv_heads, k_dim, self.value.shape[2], self.block_size
        return layout_of(self.k_format, self.v_format, *sizes, self.v_in_k)

    @property
    def need(self) -> Need:
        dims = self.key.shape[2], self.value.shape[2]
        return Need(self.k_format, self.v_format, *dims, self.key.dtype, self.v_in_k)


class EncodeCall(NamedTuple):
    """The arguments of `encode_keys`; `lean.kernels.ops.encode_keys` has checked them.

    Attributes:
        arena: uint8 [num_blocks, block_bytes], the quantized pool. It is changed in place.
        exact_arena: uint8 [num_blocks, block_bytes], the exact pool.
        slot_mapping, exact_slot_mapping: int64 [num_tokens], the slots of the same tokens in the two pools, block id x
            block_size + slot; negative entries are padding.
        layer_offset, exact_layer_offset: where in a block of each pool the layer's part starts, in bytes.
        block_size: tokens of a block, in both pools.
        num_kv_heads, k_dim: of the layer.
        k_format, exact_k_format: K's formats in the two pools as numbers, `KVFormat.code`.
    """

    arena: torch.Tensor
    exact_arena: torch.Tensor
    slot_mapping: torch.Tensor
    exact_slot_mapping: torch.Tensor
    layer_offset: int
    exact_layer_offset: int
    block_size: int
    num_kv_heads: int
    k_dim: int
    k_format: int
    exact_k_format: int

    def _layout(self, k_format: int) -> KVLayout:
        return layout_of(k_format, self.exact_k_format, self.num_kv_heads, self.k_dim, self.k_dim, self.block_size)

    @property
    def layout(self) -> KVLayout:
        """The layer's part of a block of the quantized pool; of V it says nothing."""
        return self._layout(self.k_format)

    @property
    def exact_layout(self) -> KVLayout:
        """Likewise of the exact pool."""
        return self._layout(self.exact_k_format)


class AttentionCall(NamedTuple):
    """The arguments of `paged_attention`; `lean.kernels.ops.paged_attention` has checked them.

    Attributes:
        query: [num_tokens, num_q_heads, k_dim], after RoPE; the rows of all sequences, packed.
        query_sink: like ``query``, for the sink keys; None: the query itself.
        arena: uint8 [num_blocks, block_bytes], the quantized pool.
        block_tables: int32 [num_seqs, max_blocks], ids of the quantized pool's blocks.
        exact_arena: uint8 [num_blocks, block_bytes], the exact pool; None without a residual.
        exact_block_tables: int32 [num_seqs, max_blocks], ids of the exact pool's blocks; None without a residual.
        query_start_loc: int32 [num_seqs + 1]; rows query_start_loc[s] .. query_start_loc[s + 1] belong to sequence s.
        seq_lens: int32 [num_seqs], tokens in the cache, this step's included.
        sink_logits: [num_q_heads], one more logit per head, which gives no value; None: there is none.
        layer_offset, exact_layer_offset: where in a block of each pool the layer's part starts, in bytes.
        block_size: tokens of a block, in both pools.
        num_kv_heads: KV heads; query head h uses KV head h // (num_q_heads // num_kv_heads).
        v_dim: elements of a V vector and of an output row.
        k_format, v_format: the quantized pool's formats as numbers, `KVFormat.code`.
        exact_k_format, exact_v_format: the exact pool's; unused without a residual.
        scale: multiplies the scores.
        softcap: scores become softcap * tanh(score / softcap); 0 is off.
        window: a row sees itself and the window - 1 keys before it; 0 is full attention.
        num_sink_tokens: the first keys of a sequence, which every later row sees beyond its window.
        residual_length: a row reads this many latest keys, itself included, from the exact pool; 0: no exact pool.
        num_exact_sinks: the first keys of a sequence, which are read from the exact pool while they are visible.
        v_in_k: V is the first v_dim numbers of K in both pools (`KVLayout`).
    """

    query: torch.Tensor
    query_sink: torch.Tensor | None
    arena: torch.Tensor
    block_tables: torch.Tensor
    exact_arena: torch.Tensor | None
    exact_block_tables: torch.Tensor | None
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    sink_logits: torch.Tensor | None
    layer_offset: int
    exact_layer_offset: int
    block_size: int
    num_kv_heads: int
    v_dim: int
    k_format: int
    v_format: int
    exact_k_format: int
    exact_v_format: int
    scale: float
    softcap: float
    window: int
    num_sink_tokens: int
    residual_length: int
    num_exact_sinks: int
    v_in_k: bool = False

    @property
    def _sizes(self) -> tuple[int, int, int, int, bool]:
        return self.num_kv_heads, self.query.shape[2], self.v_dim, self.block_size, self.v_in_k

    @property
    def layout(self) -> KVLayout:
        """The layer's part of a block of the quantized pool."""
        return layout_of(self.k_format, self.v_format, *self._sizes)

    @property
    def need(self) -> Need:
        return Need(self.k_format, self.v_format, self.query.shape[2], self.v_dim, self.query.dtype, self.v_in_k)

    @property
    def exact_layout(self) -> KVLayout:
        """The layer's part of a block of the exact pool; without one, that of the quantized pool."""
        if self.exact_arena is None:
            return self.layout
        return layout_of(self.exact_k_format, self.exact_v_format, *self._sizes)


CALLS: dict[str, type[WriteCall] | type[EncodeCall] | type[AttentionCall]] = {
    "kv_write": WriteCall,
    "encode_keys": EncodeCall,
    "paged_attention": AttentionCall,
}


def from_arguments(name: str, serve: Callable[[Any], Any]) -> Callable[..., Any]:
    """``serve``, which takes the call value of the op ``name``, as a function of the op's arguments one by one."""
    make, kind = tuple.__new__, CALLS[name]  # torch has checked their number, so `_make` need not
    return lambda *args: serve(make(kind, args))
