"""The ops of lean: `kv_write`, `encode_keys` and `paged_attention`.

The wrappers check the arguments, the back ends rely on them.

The ops take a pool's one uint8 arena, a byte offset and format numbers, so that ``torch.compile`` sees a single mutated
tensor and no typed views. Each back end takes the arguments as one value (`lean.kernels.call`). Which one serves is
decided in `lean.kernels.serving`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lean.kernels import reference
from lean.kernels.call import CALLS, AttentionCall, from_arguments
from lean.kernels.cpu import binding as cpu
from lean.kernels.layout import ALIGNMENT, KVLayout
from lean.kernels.serving import triton_serves

_LIBRARY = torch.library.Library("lean", "DEF")
_LIBRARY.define(
    "kv_write(Tensor(a!) arena, Tensor key, Tensor value, Tensor slot_mapping, "
    "int layer_offset, int block_size, int k_format, int v_format, bool v_in_k) -> ()"
)
_LIBRARY.define(
    "encode_keys(Tensor(a!) arena, Tensor exact_arena, Tensor slot_mapping, Tensor exact_slot_mapping, "
    "int layer_offset, int exact_layer_offset, int block_size, int num_kv_heads, int k_dim, "
    "int k_format, int exact_k_format) -> ()"
)
_LIBRARY.define(
    "paged_attention(Tensor query, Tensor? query_sink, Tensor arena, Tensor block_tables, "
    "Tensor? exact_arena, Tensor? exact_block_tables, Tensor query_start_loc, Tensor seq_lens, Tensor? sink_logits, "
    "int layer_offset, int exact_layer_offset, int block_size, int num_kv_heads, int v_dim, "
    "int k_format, int v_format, int exact_k_format, int exact_v_format, float scale, float softcap, "
    "int window, int num_sink_tokens, int residual_length, int num_exact_sinks, bool v_in_k) -> Tensor"
)


def on_gpu(name: str) -> Callable[[Any], Any]:
    """The op ``name`` on CUDA and HIP; Triton is imported when the first tensor arrives."""

    def serve(call: Any) -> Any:
        if not triton_serves(call.need):
            return getattr(reference, name)(call)
        from lean.kernels.triton import backend

        return getattr(backend, name)(call)

    return serve


for _name in CALLS:
    _back_ends = {"CompositeExplicitAutograd": getattr(reference, _name), "CPU": getattr(cpu, _name)}
    if _name != "encode_keys":  # Triton's kernels read no K by channel
        _back_ends["CUDA"] = on_gpu(_name)
    for _key, _serve in _back_ends.items():
        _LIBRARY.impl(_name, from_arguments(_name, _serve), _key)


@torch.library.register_fake("lean::kv_write")
def _(*args: Any) -> None:
    return None


@torch.library.register_fake("lean::encode_keys")
def _(*args: Any) -> None:
    return None


@torch.library.register_fake("lean::paged_attention")
def _(*args: Any) -> torch.Tensor:
    call = AttentionCall._make(args)
    return call.query.new_empty(*call.query.shape[:2], call.v_dim)


@dataclass(frozen=True)
class LayerPool:
    """One layer's share of a block pool.

    Attributes:
        arena: uint8 [num_blocks, block_bytes]; block 0 is the null block.
        layout: the layer's part of a block.
        offset: where in a block that part starts, in bytes.
        codes: K's and V's format as numbers (`KVFormat.code`).
        frame: KV heads, dims, block size, rotations and whether V lies in K, which two pools that serve one query must
            have in common. Computed once, like ``codes``: every layer reads them in every step.
    """

    arena: torch.Tensor
    layout: KVLayout
    offset: int
    codes: tuple[int, int] = field(init=False, repr=False)
    frame: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        layout = self.layout
        if self.arena.dtype != torch.uint8 or self.arena.dim() != 2 or self.arena.stride(1) != 1:
            raise ValueError(
                f"arena must be uint8 [num_blocks, block_bytes], got {self.arena.dtype} {self.arena.shape}"
            )
        starts = (self.offset, self.arena.stride(0), self.arena.storage_offset())
        if any(start % ALIGNMENT for start in starts):
            raise ValueError(f"layer offset, block stride and arena start {starts} must be multiples of {ALIGNMENT}")
        if self.offset + layout.nbytes > self.arena.shape[1]:
            raise ValueError(f"layer of {layout.nbytes} bytes at {self.offset} leaves a block of {self.arena.shape[1]}")
        if layout.fault:
            raise ValueError(layout.fault)
        k, v = layout.k_format, layout.v_format
        object.__setattr__(self, "codes", (k.code, v.code))
        frame = (
            layout.num_kv_heads, layout.k_dim, layout.v_dim, layout.block_size, k.rotate, v.rotate, layout.v_in_k,
        )  # fmt: skip
        object.__setattr__(self, "frame", frame)

    def alone(self) -> "LayerPool":
        """The same bytes as a pool that no other layer shares."""
        return LayerPool(self.arena[:, self.offset : self.offset + self.layout.nbytes], self.layout, 0)


def kv_write(pool: LayerPool, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Encode new K/V and write them into their slots of the pool. K that is stored by channel is left to `encode_keys`.

    Args:
        key: [num_tokens, num_kv_heads, k_dim], after RoPE.
        value: [num_tokens, num_kv_heads, v_dim]; where V lies in K it is not read, and only its shape counts.
        slot_mapping: int64 [num_tokens], block id x block_size + slot; negative entries are padding.
    """
    layout, num_tokens = pool.layout, slot_mapping.shape[0]
    heads = layout.num_kv_heads
    if key.shape != (num_tokens, heads, layout.k_dim) or value.shape != (num_tokens, heads, layout.v_dim):
        if key.shape[1:] != (heads, layout.k_dim) or value.shape[1:] != (heads, layout.v_dim):
            raise ValueError(f"key {tuple(key.shape)} / value {tuple(value.shape)} do not fit {layout}")
        raise ValueError(f"{key.shape[0]} keys, {value.shape[0]} values, {num_tokens} slots")
    torch.ops.lean.kv_write(
        pool.arena, key, value, slot_mapping, pool.offset, layout.block_size, *pool.codes, layout.v_in_k
    )


def encode_keys(
    pool: LayerPool, exact: LayerPool, slot_mapping: torch.Tensor, exact_slot_mapping: torch.Tensor
) -> None:
    """Encode K by channel, from the copies in the exact pool, of every group of tokens that a new token completes.

    The new tokens are in the exact pool already. A token completes a group of CHANNEL_TOKENS where its slot is the last
    one of them. Its group lies in one block of either pool, and the exact pool still holds all of it: both pools keep
    the block that a sequence writes into.

    Args:
        pool, exact: the same layer's. K of ``pool`` is stored by channel (`KVFormat.by_channel`).
        slot_mapping, exact_slot_mapping: int64 [num_tokens], the new tokens' slots in the two pools, as in `kv_write`.
    """
    layout = pool.layout
    if not layout.k_format.by_channel or exact.layout.k_format.quantized:
        raise ValueError(f"keys are encoded from an exact pool by channel, not from {exact.layout} to {layout}")
    if exact.frame != pool.frame or slot_mapping.shape != exact_slot_mapping.shape:
        raise ValueError(f"the exact pool {exact.layout} or its slots do not match {layout}")
    torch.ops.lean.encode_keys(
        pool.arena, exact.arena, slot_mapping, exact_slot_mapping, pool.offset, exact.offset, layout.block_size,
        layout.num_kv_heads, layout.k_dim, pool.codes[0], exact.codes[0],
    )  # fmt: skip


def write_tokens(
    pool: LayerPool,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_mapping: torch.Tensor,
    exact: LayerPool | None = None,
    exact_slot_mapping: torch.Tensor | None = None,
) -> None:
    """Write new K/V into a layer's pool and, with a residual, into its exact pool: see `kv_write`.

    Afterwards attention may read them. K that is stored by channel needs the exact pool.
    """
    kv_write(pool, key, value, slot_mapping)
    if exact is not None and exact_slot_mapping is not None:
        kv_write(exact, key, value, exact_slot_mapping)
    if pool.layout.k_format.by_channel:
        if exact is None or exact_slot_mapping is None:
            raise ValueError(f"{pool.layout.k_format.name} is encoded from an exact pool, and there is none")
        encode_keys(pool, exact, slot_mapping, exact_slot_mapping)


def paged_attention(
    query: torch.Tensor,
    pool: LayerPool,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    num_sink_tokens: int = 0,
    query_sink: torch.Tensor | None = None,
    exact: LayerPool | None = None,
    exact_block_tables: torch.Tensor | None = None,
    residual_length: int = 0,
    num_exact_sinks: int = 0,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of packed query rows over the paged cache; their own K/V must be written already.

    The row at position i of a sequence sees keys j <= i with i - j < window (all with window 0) or j < num_sink_tokens.
    With a residual it reads keys with i - j < residual_length or j < num_exact_sinks from the exact pool. Sink tokens
    are visible beyond the window; exact sinks are read exact while they are visible; sink_logits are neither. K that is
    stored by channel must not be read from an incomplete group: residual_length is then CHANNEL_TOKENS or more.

    Args:
        query: [num_tokens, num_q_heads, k_dim], after RoPE; query head h uses KV head h // group.
        block_tables: int32 [num_seqs, max_blocks], ids of the pool's blocks, 0 (the null block) where evicted.
        query_start_loc: int32 [num_seqs + 1]; rows query_start_loc[s] .. query_start_loc[s + 1] belong to sequence s.
        seq_lens: int32 [num_seqs], tokens in the cache, this step's included.
        scale: multiplies the scores. softcap: scores become softcap * tanh(score / softcap); 0 is off.
        query_sink: like query, rotated back by `layout.sink_shift`; used for the sink keys. None: the query itself.
        sink_logits: [num_q_heads], one more logit per head that takes probability and gives no value (gpt-oss).

    Returns:
        [num_tokens, num_q_heads, v_dim] in the query's dtype; rows beyond query_start_loc[-1] are zeros.
    """
    layout, num_seqs = pool.layout, seq_lens.shape[0]
    shape = query.shape
    if len(shape) != 3 or shape[2] != layout.k_dim or shape[1] % layout.num_kv_heads:
        raise ValueError(f"query {tuple(query.shape)} does not fit {layout}")
    if query_start_loc.shape[0] != num_seqs + 1 or block_tables.shape[0] != num_seqs:
        raise ValueError("query_start_loc, seq_lens and block_tables disagree about the number of sequences")
    if block_tables.dtype.is_floating_point:
        raise ValueError(f"block_tables must hold integers, not {block_tables.dtype}")
    if min(window, num_sink_tokens, residual_length, num_exact_sinks) < 0:
        raise ValueError("window, num_sink_tokens, residual_length and num_exact_sinks must not be negative")
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap must be finite and at least 0, got {softcap}")
    if num_sink_tokens and not window:
        raise ValueError("num_sink_tokens needs a window; full attention sees every key anyway")
    if (residual_length > 0) != (exact is not None) or (exact is not None) != (exact_block_tables is not None):
        raise ValueError("a residual needs an exact pool, its block tables and residual_length > 0")
    if num_exact_sinks and exact is None:
        raise ValueError("num_exact_sinks needs a residual")
    if exact is not None and exact_block_tables is not None:
        if exact.frame != pool.frame:
            raise ValueError(
                f"the exact pool {exact.layout} does not match {layout} in heads, dims, block size and rotation"
            )
        if exact_block_tables.shape[0] != num_seqs:
            raise ValueError("exact_block_tables and seq_lens disagree about the number of sequences")
    if query_sink is not None and query_sink.shape != shape:
        raise ValueError(f"query_sink {tuple(query_sink.shape)} is not shaped like query {tuple(query.shape)}")
    if sink_logits is not None and sink_logits.shape != (shape[1],):
        raise ValueError(f"sink_logits {tuple(sink_logits.shape)} must be [{query.shape[1]}]")
    exact_arena, exact_offset, exact_codes = None, 0, pool.codes
    if exact is not None:
        exact_arena, exact_offset, exact_codes = exact.arena, exact.offset, exact.codes
    return torch.ops.lean.paged_attention(
        query, query_sink, pool.arena, block_tables, exact_arena, exact_block_tables, query_start_loc, seq_lens,
        sink_logits, pool.offset, exact_offset, layout.block_size, layout.num_kv_heads, layout.v_dim,
        *pool.codes, *exact_codes, float(scale), float(softcap),
        window, num_sink_tokens, residual_length, num_exact_sinks, layout.v_in_k,
    )  # fmt: skip
