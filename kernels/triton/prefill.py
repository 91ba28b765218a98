"""Attention of many rows of a sequence: tiles of tokens x query heads over all their keys."""

# mypy: allow-untyped-defs

import triton
import triton.language as tl

from lean.kernels.triton.attention import attend_ranges
from lean.kernels.triton.common import OF_STEP, dim_of
from lean.kernels.triton.tiles import load_query


@triton.jit
def sequence_of_tile(query_start_loc, num_seqs, tile, TOKENS: tl.constexpr):
    """(sequence, its first tile): tiles of TOKENS tokens; those of sequence s begin at start // TOKENS + s."""
    seq = -1
    for first in range(0, num_seqs, 128):
        s = first + tl.arange(0, 128)
        starts = tl.load(query_start_loc + s, mask=s < num_seqs, other=0)
        seq += tl.sum(((s < num_seqs) & (starts // TOKENS + s <= tile)).to(tl.int32), axis=0)
    return seq, tl.load(query_start_loc + seq) // TOKENS + seq


@triton.jit(do_not_specialize=OF_STEP)
def turn_query(
    query, out, num_rows, query_stride, query_head_stride,
    Q_BF16: tl.constexpr, NUM_Q_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROTATION: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """out: fp32 [rows, q_heads, DIM], the query in the stored basis. ROWS rows x heads a program.

    `decode` turns its few rows itself; a tile of `prefill` would need more registers for it than for all that follows.
    """
    vector = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = (vector // NUM_Q_HEADS).to(tl.int64)
    mask = row < num_rows
    offsets = row * query_stride + vector % NUM_Q_HEADS * query_head_stride
    x = load_query(query, offsets, mask, DIM, PADDED, ROWS, Q_BF16, ROTATION, 0, 1)
    columns = tl.arange(0, PADDED)
    tl.store(
        out + vector.to(tl.int64)[:, None] * DIM + columns[None, :], x, mask=mask[:, None] & (columns < DIM)[None, :]
    )


@triton.jit(do_not_specialize=OF_STEP)
def prefill(
    query, query_sink, parts, sums, query_start_loc, seq_lens, num_seqs,
    query_stride, query_head_stride, sink_stride, sink_head_stride,
    table, table_stride, base, block_stride, k_scales_offset, v_codes_offset, v_scales_offset,
    exact_table, exact_table_stride, exact_base, exact_block_stride,
    exact_k_scales_offset, exact_v_codes_offset, exact_v_scales_offset,
    scale, softcap, window, num_sink_tokens, residual_length, num_exact_sinks,
    Q_BF16: tl.constexpr, GROUP_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    FORMATS: tl.constexpr, EXACT_FORMATS: tl.constexpr, DIMS: tl.constexpr, RULE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    EXACT_TILE: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr, SKIP_SINGLE_ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS // GROUP_SIZE tokens of one sequence with the query heads of one KV head. Grid (tiles, kv heads).

    parts: fp32 [rows, q_heads, V_DIM], sums: fp32 [rows, q_heads, 2], as of `decode` with one part, for `merge`.

    The query is in the stored basis. SKIP_SINGLE_ROWS: sequences of one row are left to `decode`.
    """
    V_DIM: tl.constexpr = DIMS[1]
    V_PADDED: tl.constexpr = DIMS[3]
    V_HALVES: tl.constexpr = DIMS[5]
    TOKENS: tl.constexpr = ROWS // GROUP_SIZE
    seq, first_tile = sequence_of_tile(query_start_loc, num_seqs, tl.program_id(0), TOKENS)
    begin = tl.load(query_start_loc + seq)
    end = tl.load(query_start_loc + 1 + seq)
    first_row = begin + (tl.program_id(0) - first_tile) * TOKENS
    if first_row >= end or (SKIP_SINGLE_ROWS and end == begin + 1):
        return
    kv_head = tl.program_id(1)
    r = tl.arange(0, ROWS)
    row = first_row + r // GROUP_SIZE
    row_mask = (r < TOKENS * GROUP_SIZE) & (row < end)
    head = kv_head * GROUP_SIZE + r % GROUP_SIZE
    first_position = tl.load(seq_lens + seq) - (end - first_row)
    last_position = first_position + tl.minimum(end - first_row, TOKENS) - 1
    positions = tl.minimum(first_position + r // GROUP_SIZE, last_position)
    q = query, row.to(tl.int64) * query_stride + head * query_head_stride, row_mask
    q_sink = query_sink, row.to(tl.int64) * sink_stride + head * sink_head_stride, row_mask
    main = (
        table + seq.to(tl.int64) * table_stride,
        base,
        block_stride,
        k_scales_offset,
        v_codes_offset,
        v_scales_offset,
    )
    exact = (
        exact_table + seq.to(tl.int64) * exact_table_stride, exact_base, exact_block_stride,
        exact_k_scales_offset, exact_v_codes_offset, exact_v_scales_offset,
    )  # fmt: skip
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc0 = tl.zeros([ROWS, V_PADDED // V_HALVES], tl.float32)
    acc1 = tl.zeros([ROWS, V_PADDED // V_HALVES if V_HALVES == 2 else 1], tl.float32)
    m, total, acc0, acc1 = attend_ranges(
        m, total, acc0, acc1, q, q_sink, positions, first_position, last_position, 0, 1 << 30, main, exact, kv_head,
        scale, softcap, window, num_sink_tokens, residual_length, num_exact_sinks,
        FORMATS, EXACT_FORMATS, DIMS, RULE, ROWS, BLOCK_SIZE, TILE, EXACT_TILE, STAGES, WIDEN, False, True, True, True,
        Q_BF16, (0, 1.0),
    )  # fmt: skip
    vectors = row.to(tl.int64) * NUM_KV_HEADS * GROUP_SIZE + head
    tl.store(sums + vectors * 2, m, mask=row_mask)
    tl.store(sums + vectors * 2 + 1, total, mask=row_mask)
    for half in tl.static_range(V_HALVES):
        dims = dim_of(tl.arange(0, V_PADDED // V_HALVES), half, V_HALVES)
        mask = row_mask[:, None] & (dims < V_DIM)[None, :]
        tl.store(parts + vectors[:, None] * V_DIM + dims[None, :], acc0 if half == 0 else acc1, mask=mask)
