"""Attention of single rows, split over the keys (arXiv:2311.01282 calls it Flash-Decoding), and the parts' merge."""

# mypy: allow-untyped-defs

import triton
import triton.language as tl

from lean.kernels.triton.attention import attend_ranges
from lean.kernels.triton.common import HEADROOM, LOG2E, OF_STEP, dim_of, load_float, rotate_back, store_float

MERGE = tl.constexpr(16)  # parts that are merged at once


@triton.jit
def sequence_of_row(query_start_loc, num_seqs, row):
    """The sequence that packed row ``row`` belongs to; num_seqs for a row of no sequence."""
    seq = 0
    for first in range(0, num_seqs, 128):
        s = first + tl.arange(0, 128)
        ends = tl.load(query_start_loc + 1 + s, mask=s < num_seqs, other=2147483647)
        seq += tl.sum((ends <= row).to(tl.int32), axis=0)
    return seq


@triton.jit
def locate(query_start_loc, seq_lens, num_seqs, first_row, EVERY_ROW: tl.constexpr):
    """(row, sequence, position, whether this program computes it). Axis 0 of the grid counts packed rows or, without
    EVERY_ROW, sequences, of which those with a single row are computed."""
    if EVERY_ROW:
        row = first_row + tl.program_id(0)
        seq = sequence_of_row(query_start_loc, num_seqs, row)
        ours = seq < num_seqs
        end = tl.load(query_start_loc + 1 + seq, mask=ours, other=0)
    else:
        seq = tl.program_id(0)
        row = tl.load(query_start_loc + seq)
        end = tl.load(query_start_loc + 1 + seq)
        ours = end == row + 1
    length = tl.load(seq_lens + seq, mask=ours, other=0)
    return row, seq, length - (end - row), ours


@triton.jit
def first_split(position, window, SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The split in which the window of ``position`` begins: the row's part numbers count from here."""
    if HAS_WINDOW:
        return tl.maximum(0, position - window + 1) // SPLIT
    else:
        return 0


@triton.jit(do_not_specialize=OF_STEP)
def decode(
    query, query_sink, parts, sums, query_start_loc, seq_lens, num_seqs, first_row,
    query_stride, query_head_stride, sink_stride, sink_head_stride,
    table, table_stride, base, block_stride, k_scales_offset, v_codes_offset, v_scales_offset,
    exact_table, exact_table_stride, exact_base, exact_block_stride,
    exact_k_scales_offset, exact_v_codes_offset, exact_v_scales_offset,
    scale, softcap, window, num_sink_tokens, residual_length, num_exact_sinks, num_parts,
    Q_BF16: tl.constexpr, GROUP_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, ROWS: tl.constexpr,
    FORMATS: tl.constexpr, EXACT_FORMATS: tl.constexpr, DIMS: tl.constexpr, RULE: tl.constexpr,
    K_ROTATION: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, EXACT_TILE: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr, EXTRA: tl.constexpr, EVERY_ROW: tl.constexpr,
):  # fmt: skip
    """One row, one KV head with all its query heads, one part: with EXTRA part 0 is sinks and exact pool; the others
    are splits of the main pool, keys k x SPLIT .. (k + 1) x SPLIT, from `first_split` on.

    Grid (rows or sequences, kv heads, parts). parts: fp32 [programs, q_heads, num_parts, V_DIM], written where a part
    has keys; sums: fp32 [programs, q_heads, num_parts, 2], m and total of `attend`, -inf and 0 without keys.
    """
    V_DIM: tl.constexpr = DIMS[1]
    V_PADDED: tl.constexpr = DIMS[3]
    V_HALVES: tl.constexpr = DIMS[5]
    row, seq, position, ours = locate(query_start_loc, seq_lens, num_seqs, first_row, EVERY_ROW)
    if not ours:
        return
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    r = tl.arange(0, ROWS)
    row_mask = r < GROUP_SIZE
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc0 = tl.zeros([ROWS, V_PADDED // V_HALVES], tl.float32)
    acc1 = tl.zeros([ROWS, V_PADDED // V_HALVES if V_HALVES == 2 else 1], tl.float32)
    # One address of the program and small offsets of its rows: an address per row would take registers all along.
    first_head = (tl.program_id(0).to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP_SIZE
    out = r * num_parts
    sums += (first_head * num_parts + part) * 2
    parts += (first_head * num_parts + part) * V_DIM
    lo = (first_split(position, window, SPLIT, RULE[0]) + part - EXTRA) * SPLIT
    if part >= EXTRA and lo > position - residual_length:
        tl.store(sums + out * 2, m, mask=row_mask)
        tl.store(sums + out * 2 + 1, total, mask=row_mask)
        return
    positions = tl.zeros([ROWS], tl.int32) + position
    first_head = kv_head.to(tl.int64) * GROUP_SIZE
    query += row.to(tl.int64) * query_stride + first_head * query_head_stride
    query_sink += row.to(tl.int64) * sink_stride + first_head * sink_head_stride
    q = query, r * query_head_stride, row_mask
    q_sink = query_sink, r * sink_head_stride, row_mask
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
    if part >= EXTRA:
        m, total, acc0, acc1 = attend_ranges(
            m, total, acc0, acc1, q, q_sink, positions, position, position, lo, lo + SPLIT, main, exact, kv_head,
            scale, softcap, window, num_sink_tokens, residual_length, num_exact_sinks,
            FORMATS, EXACT_FORMATS, DIMS, RULE, ROWS, BLOCK_SIZE, TILE, EXACT_TILE, STAGES, WIDEN,
            True, False, True, False, Q_BF16, K_ROTATION,
        )  # fmt: skip
    elif EXTRA:
        m, total, acc0, acc1 = attend_ranges(
            m, total, acc0, acc1, q, q_sink, positions, position, position, 0, 0, main, exact, kv_head,
            scale, softcap, window, num_sink_tokens, residual_length, num_exact_sinks,
            FORMATS, EXACT_FORMATS, DIMS, RULE, ROWS, BLOCK_SIZE, TILE, EXACT_TILE, STAGES, WIDEN,
            True, True, False, True, Q_BF16, K_ROTATION,
        )  # fmt: skip
    tl.store(sums + out * 2, m, mask=row_mask)
    tl.store(sums + out * 2 + 1, total, mask=row_mask)
    for half in tl.static_range(V_HALVES):
        dims = dim_of(tl.arange(0, V_PADDED // V_HALVES), half, V_HALVES)
        mask = row_mask[:, None] & (dims < V_DIM)[None, :]
        tl.store(parts + out[:, None] * V_DIM + dims[None, :], acc0 if half == 0 else acc1, mask=mask)


@triton.jit(do_not_specialize=OF_STEP)
def merge(
    parts, sums, out, query_start_loc, seq_lens, sink_logits, num_seqs, first_row, num_parts, window, residual_length,
    Q_BF16: tl.constexpr, SINKS_BF16: tl.constexpr, NUM_Q_HEADS: tl.constexpr, V_DIM: tl.constexpr,
    V_PADDED: tl.constexpr, V_ROTATION: tl.constexpr, SPLIT: tl.constexpr, EXTRA: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SINK_LOGITS: tl.constexpr, EVERY_ROW: tl.constexpr, OF_PREFILL: tl.constexpr,
):  # fmt: skip
    """The parts of one row and head as one, turned back into the model's basis. Grid (rows or sequences, q_heads).

    Parts are added sixteen at a time from the row's first on, so that how many the longest row has changes nothing.
    With EVERY_ROW rows of no sequence become zeros. OF_PREFILL: the one part that `prefill` left of each of its rows.
    """
    row, seq, position, ours = locate(query_start_loc, seq_lens, num_seqs, first_row, EVERY_ROW)
    if OF_PREFILL and ours:  # noqa: SIM102
        if tl.load(query_start_loc + seq + 1) == tl.load(query_start_loc + seq) + 1:
            return
    head = tl.program_id(1)
    columns = tl.arange(0, V_PADDED)
    out += row.to(tl.int64) * NUM_Q_HEADS * V_DIM + head * V_DIM
    if not ours:
        if EVERY_ROW:
            store_float(out, columns, tl.zeros([V_PADDED], tl.float32), columns < V_DIM, Q_BF16)
        return
    last = position - residual_length
    live = EXTRA
    if OF_PREFILL:
        live = num_parts
    elif last >= 0:
        live += tl.maximum(0, last // SPLIT - first_split(position, window, SPLIT, HAS_WINDOW) + 1)
    live = tl.minimum(live, num_parts)
    first = (tl.program_id(0).to(tl.int64) * NUM_Q_HEADS + head) * num_parts
    p = tl.arange(0, MERGE)
    top = float("-inf")
    for start in range(0, live, MERGE):
        m = tl.load(sums + (first + start + p) * 2, mask=start + p < live, other=float("-inf"))
        top = tl.maximum(top, tl.max(m, axis=0))
    if HAS_SINK_LOGITS:
        logit = load_float(sink_logits, head, True, SINKS_BF16) * LOG2E
        top = tl.maximum(top, logit)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    acc = tl.zeros([V_PADDED], tl.float32)
    for start in range(0, live, MERGE):
        part = start + p
        m = tl.load(sums + (first + part) * 2, mask=part < live, other=float("-inf"))
        part_totals = tl.load(sums + (first + part) * 2 + 1, mask=part < live, other=0.0)
        weight = tl.exp2(m - top)
        total += tl.sum(part_totals * weight, axis=0)
        mask = ((part < live) & (part_totals != 0))[:, None] & (columns < V_DIM)[None, :]
        x = tl.load(parts + (first + part)[:, None] * V_DIM + columns[None, :], mask=mask, other=0.0)
        acc += tl.sum(x * weight[:, None], axis=0)
    if HAS_SINK_LOGITS:
        total += tl.exp2(logit - top + HEADROOM)
    acc = acc / tl.where(total == 0, 1.0, total)
    acc = tl.reshape(rotate_back(tl.reshape(acc, [1, V_PADDED]), 1, V_PADDED, V_ROTATION), [V_PADDED])
    store_float(out, columns, acc, columns < V_DIM, Q_BF16)
