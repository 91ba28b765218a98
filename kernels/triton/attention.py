"""Attention over one contiguous range of keys of a paged pool: the inner function of decode and prefill.

State of a row (online softmax, arXiv:1805.02867): ``m`` is the largest log2 of probability x V scale among the keys it
has seen, ``total`` the sum of its probabilities over 2^(m - HEADROOM), ``acc`` their weighted sum of V. Because ``m``
contains V's scale, the largest weight of every row is 2^HEADROOM at any scale, so the fp16 weights of a row never all
underflow. Masked keys do not enter ``m``.
"""

# mypy: allow-untyped-defs
# ruff: noqa: SIM109 - formats are compile-time constants, which Triton compares one by one

import triton
import triton.language as tl

from lean.kernels.triton.common import BF16, FP8, FP16, FP32, INT3, INT4, INT8, PACKED_PURE, unit_of
from lean.kernels.triton.latent import attend_latent, latent_query
from lean.kernels.triton.tiles import (
    groups_of,
    load_group_scales,
    load_half,
    load_int4,
    load_planes,
    load_query_halves,
    load_scales,
    power_of_two_below,
    weigh,
)


@triton.jit
def query_for(
    rows, scale, COMPUTE: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr, IS_BF16: tl.constexpr,
    ROTATION: tl.constexpr,
):  # fmt: skip
    """Query rows as operands of dtype COMPUTE: (first, second half, their remainders, factor [ROWS]).

    fp16: each row is scaled to a largest element in [1, 2), so that bf16's range fits. bf16: what rounding takes from
    the (rotated) query is a second operand.
    """
    HALVES: tl.constexpr = DIMS[4]
    ptr, offsets, row_mask = rows
    a, b = load_query_halves(ptr, offsets, row_mask, DIMS[0], DIMS[2], HALVES, ROWS, IS_BF16, ROTATION)
    if COMPUTE == FP16:
        largest = tl.max(tl.abs(a), axis=1)
        if HALVES == 2:
            largest = tl.maximum(largest, tl.max(tl.abs(b), axis=1))
        down, factor = power_of_two_below(largest)
        a, b = (a * down[:, None]).to(tl.float16), (b * down[:, None]).to(tl.float16)
        return a, b, a, b, factor * scale
    elif COMPUTE == BF16:
        high_a, high_b = a.to(tl.bfloat16), b.to(tl.bfloat16)
        rest_a, rest_b = (a - high_a.to(tl.float32)).to(tl.bfloat16), (b - high_b.to(tl.float32)).to(tl.bfloat16)
        return high_a, high_b, rest_a, rest_b, tl.full([ROWS], 1.0, tl.float32) * scale
    else:
        return a, b, a, b, tl.full([ROWS], 1.0, tl.float32) * scale


@triton.jit
def attend_keys_and_values(
    m, total, acc0, acc1, query, positions, first_position, last_position, lo, hi, near, far, pool, kv_head, softcap,
    FORMATS: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    WIDEN: tl.constexpr, SOFTCAP: tl.constexpr, ONE_POSITION: tl.constexpr,
):  # fmt: skip
    """Add the keys j in lo .. hi with near <= position - j < far to every row's state.

    query: from `query_for`, its factor turning a dot product into a score (in log2 units, without SOFTCAP).
    positions: int32 [ROWS], which lie in first_position .. last_position. pool: (the sequence's row of the block table,
    arena, block stride, offsets of K's scales, V's codes, V's scales).

    Tiles start at multiples of TILE, so a row meets its keys in the same order beside any other rows. A tile that a row
    does not see leaves its state unchanged to the bit.
    """
    K_FORMAT: tl.constexpr = FORMATS[0]
    V_FORMAT: tl.constexpr = FORMATS[1]
    K_COMPUTE: tl.constexpr = FORMATS[2]
    V_COMPUTE: tl.constexpr = FORMATS[3]
    K_BYTES: tl.constexpr = FORMATS[4]
    V_BYTES: tl.constexpr = FORMATS[5]
    K_SCALE_BYTES: tl.constexpr = FORMATS[6]
    V_SCALE_BYTES: tl.constexpr = FORMATS[7]
    K_DIM: tl.constexpr = DIMS[0]
    V_DIM: tl.constexpr = DIMS[1]
    K_PADDED: tl.constexpr = DIMS[2]
    V_PADDED: tl.constexpr = DIMS[3]
    K_HALVES: tl.constexpr = DIMS[4]
    V_HALVES: tl.constexpr = DIMS[5]
    K_GROUPS: tl.constexpr = groups_of(K_PADDED, FORMATS[8])
    V_GROUPS: tl.constexpr = groups_of(V_PADDED, FORMATS[9])
    q0, q1, rest0, rest1, factor = query
    table, base, block_stride, k_scales_offset, v_codes_offset, v_scales_offset = pool
    K_UNIT: tl.constexpr = unit_of(K_FORMAT)
    V_UNIT: tl.constexpr = unit_of(V_FORMAT)
    K_VECTOR_SCALE: tl.constexpr = (K_FORMAT == INT8) or (K_FORMAT == FP8)
    V_VECTOR_SCALE: tl.constexpr = (V_FORMAT == INT8) or (V_FORMAT == FP8)
    V_PURE: tl.constexpr = WIDEN == PACKED_PURE
    V_MASK: tl.constexpr = (V_FORMAT == FP32) or (V_FORMAT == FP16) or (V_FORMAT == BF16)
    first = tl.maximum(lo, first_position - far + 1)
    end = tl.minimum(hi, last_position - near + 1)
    k_codes = base + kv_head * (BLOCK_SIZE * K_BYTES)
    v_codes = base + v_codes_offset + kv_head * (BLOCK_SIZE * V_BYTES)
    k_scales = base + k_scales_offset + kv_head * (BLOCK_SIZE * K_SCALE_BYTES)
    v_scales = base + v_scales_offset + kv_head * (BLOCK_SIZE * V_SCALE_BYTES)
    acc0 = acc0 * (1.0 / V_UNIT)
    acc1 = acc1 * (1.0 / V_UNIT)
    score_factor = factor * K_UNIT
    for start in tl.range(first // TILE * TILE, end, TILE, num_stages=STAGES):
        j = start + tl.arange(0, TILE)
        stored = (j >= first) & (j < end)
        block = tl.load(table + j // BLOCK_SIZE, mask=stored, other=0).to(tl.int64) * block_stride
        slot = j % BLOCK_SIZE
        if K_FORMAT >= INT3:
            k_scale_of_group = load_group_scales(
                k_scales, block, slot, stored, K_SCALE_BYTES, K_SCALE_BYTES, K_GROUPS
            )  # fmt: skip
            if K_FORMAT == INT4:
                k0, k1 = load_int4(
                    k_codes, block + slot * K_BYTES, k_scale_of_group,
                    K_DIM, K_PADDED, K_GROUPS, TILE, K_COMPUTE, WIDEN, True,
                )  # fmt: skip
            else:
                k0 = load_planes(
                    k_codes, block + slot * K_BYTES, k_scale_of_group, K_FORMAT,
                    K_DIM, K_PADDED, K_GROUPS, TILE, K_COMPUTE, WIDEN, True,
                )  # fmt: skip
                k1 = k0
        else:
            k0 = load_half(
                k_codes, block + slot * K_BYTES, stored, 0, K_HALVES, K_FORMAT, K_COMPUTE,
                K_DIM, K_PADDED, WIDEN, False, True,
            )  # fmt: skip
            k1 = k0
            if K_HALVES == 2:
                k1 = load_half(
                    k_codes, block + slot * K_BYTES, stored, 1, K_HALVES, K_FORMAT, K_COMPUTE,
                    K_DIM, K_PADDED, WIDEN, False, True,
                )  # fmt: skip
        s = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        if K_HALVES == 2:
            s = tl.dot(q1, tl.trans(k1), s, input_precision="ieee")
        if K_COMPUTE == BF16 and DIMS[6]:
            s = tl.dot(rest0, tl.trans(k0), s)
            if K_HALVES == 2:
                s = tl.dot(rest1, tl.trans(k1), s)
        if K_VECTOR_SCALE:
            s = s * load_scales(k_scales, table, block_stride, start, first, end, BLOCK_SIZE, TILE)[None, :]
        s = s * score_factor[:, None]
        v_scale = s
        if V_VECTOR_SCALE:
            v_scale = load_scales(v_scales, table, block_stride, start, first, end, BLOCK_SIZE, TILE)
        m, total, p, kept = weigh(
            m, total, s, positions, j, stored, near, far, v_scale, softcap,
            V_VECTOR_SCALE, SOFTCAP, ONE_POSITION, WIDEN,
        )  # fmt: skip
        acc0 = acc0 * kept[:, None]
        if V_FORMAT >= INT3:
            v_scale_of_group = load_group_scales(
                v_scales, block, slot, stored, V_SCALE_BYTES, V_SCALE_BYTES, V_GROUPS
            )  # fmt: skip
            if V_FORMAT == INT4:
                v0, v1 = load_int4(
                    v_codes, block + slot * V_BYTES, v_scale_of_group,
                    V_DIM, V_PADDED, V_GROUPS, TILE, V_COMPUTE, WIDEN, V_PURE,
                )  # fmt: skip
            else:
                v0 = load_planes(
                    v_codes, block + slot * V_BYTES, v_scale_of_group, V_FORMAT,
                    V_DIM, V_PADDED, V_GROUPS, TILE, V_COMPUTE, WIDEN, V_PURE,
                )  # fmt: skip
                v1 = v0
        else:
            v0 = load_half(
                v_codes, block + slot * V_BYTES, stored, 0, V_HALVES, V_FORMAT, V_COMPUTE,
                V_DIM, V_PADDED, WIDEN, V_MASK, V_PURE,
            )  # fmt: skip
            v1 = v0
            if V_HALVES == 2:
                v1 = load_half(
                    v_codes, block + slot * V_BYTES, stored, 1, V_HALVES, V_FORMAT, V_COMPUTE,
                    V_DIM, V_PADDED, WIDEN, V_MASK, V_PURE,
                )  # fmt: skip
        weights = p.to(v0.dtype)
        acc0 = tl.dot(weights, v0, acc0, input_precision="ieee")
        if V_HALVES == 2:
            acc1 = tl.dot(weights, v1, acc1 * kept[:, None], input_precision="ieee")
    return m, total, acc0 * V_UNIT, acc1 * V_UNIT


@triton.jit
def query_of(
    rows, scale, COMPUTE: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr, IS_BF16: tl.constexpr,
    ROTATION: tl.constexpr,
):  # fmt: skip
    """What `attend` takes as its query."""
    if DIMS[9]:
        return latent_query(rows, scale, COMPUTE, ROWS, DIMS, IS_BF16, ROTATION)
    else:
        return query_for(rows, scale, COMPUTE, ROWS, DIMS, IS_BF16, ROTATION)


@triton.jit
def attend(
    m, total, acc0, acc1, query, positions, first_position, last_position, lo, hi, near, far, pool, kv_head, softcap,
    FORMATS: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    WIDEN: tl.constexpr, SOFTCAP: tl.constexpr, ONE_POSITION: tl.constexpr,
):  # fmt: skip
    """`attend_keys_and_values`, or `attend_latent` where V lies in K."""
    if DIMS[9]:
        return attend_latent(
            m, total, acc0, acc1, query, positions, first_position, last_position, lo, hi, near, far, pool, kv_head,
            softcap, FORMATS, DIMS, BLOCK_SIZE, TILE, STAGES, WIDEN, SOFTCAP, ONE_POSITION,
        )  # fmt: skip
    else:
        return attend_keys_and_values(
            m, total, acc0, acc1, query, positions, first_position, last_position, lo, hi, near, far, pool, kv_head,
            softcap, FORMATS, DIMS, BLOCK_SIZE, TILE, STAGES, WIDEN, SOFTCAP, ONE_POSITION,
        )  # fmt: skip


@triton.jit
def attend_ranges(
    m, total, acc0, acc1, q, q_sink, positions, first_position, last_position, main_lo, main_hi, main, exact, kv_head,
    scale, softcap, window, num_sink_tokens, residual_length, num_exact_sinks,
    FORMATS: tl.constexpr, EXACT_FORMATS: tl.constexpr, DIMS: tl.constexpr, RULE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, EXACT_TILE: tl.constexpr, STAGES: tl.constexpr, WIDEN: tl.constexpr,
    ONE_POSITION: tl.constexpr, SINKS: tl.constexpr, MAIN: tl.constexpr, EXACT: tl.constexpr, Q_BF16: tl.constexpr,
    K_ROTATION: tl.constexpr,
):  # fmt: skip
    """The ranges of a row, in the reference's order: SINKS, read with their own query; MAIN, the quantized keys in
    main_lo .. main_hi inside the window; EXACT, the exact pool's.

    q, q_sink: (pointer, offsets, mask) of the query rows. Every range loads them again, which takes fewer registers
    than one copy for all ranges. K_ROTATION rotates them into the stored basis. scale: to log2 units, without softcap.
    RULE: `plan_attention.Rule`.
    """
    HAS_WINDOW: tl.constexpr = RULE[0]
    HAS_SINKS: tl.constexpr = RULE[1]
    SINKS_IN_MAIN: tl.constexpr = RULE[2]
    HAS_RESIDUAL: tl.constexpr = RULE[3]
    SOFTCAP: tl.constexpr = RULE[4]
    anywhere = 1 << 30
    far = 1 << 30
    if HAS_WINDOW:
        far = window
    if SINKS and HAS_SINKS:
        if SINKS_IN_MAIN:
            query = query_of(q_sink, scale, FORMATS[2], ROWS, DIMS, Q_BF16, K_ROTATION)
            m, total, acc0, acc1 = attend(
                m, total, acc0, acc1, query, positions, first_position, last_position,
                num_exact_sinks, num_sink_tokens, residual_length, anywhere, main, kv_head, softcap,
                FORMATS, DIMS, BLOCK_SIZE, EXACT_TILE, 1, WIDEN, SOFTCAP, ONE_POSITION,
            )  # fmt: skip
        if HAS_RESIDUAL:
            query = query_of(q_sink, scale, EXACT_FORMATS[2], ROWS, DIMS, Q_BF16, K_ROTATION)
            m, total, acc0, acc1 = attend(
                m, total, acc0, acc1, query, positions, first_position, last_position,
                0, tl.minimum(num_sink_tokens, num_exact_sinks), 0, anywhere, exact, kv_head, softcap,
                EXACT_FORMATS, DIMS, BLOCK_SIZE, EXACT_TILE, 1, WIDEN, SOFTCAP, ONE_POSITION,
            )  # fmt: skip
            if SINKS_IN_MAIN:  # sinks that are exact only while the residual reaches them
                m, total, acc0, acc1 = attend(
                    m, total, acc0, acc1, query, positions, first_position, last_position,
                    num_exact_sinks, num_sink_tokens, 0, residual_length, exact, kv_head, softcap,
                    EXACT_FORMATS, DIMS, BLOCK_SIZE, EXACT_TILE, 1, WIDEN, SOFTCAP, ONE_POSITION,
                )  # fmt: skip
    if MAIN:
        query = query_of(q, scale, FORMATS[2], ROWS, DIMS, Q_BF16, K_ROTATION)
        m, total, acc0, acc1 = attend(
            m, total, acc0, acc1, query, positions, first_position, last_position,
            tl.maximum(main_lo, tl.maximum(num_sink_tokens, num_exact_sinks)), main_hi, residual_length, far,
            main, kv_head, softcap,
            FORMATS, DIMS, BLOCK_SIZE, TILE, STAGES, WIDEN, SOFTCAP, ONE_POSITION,
        )  # fmt: skip
    if EXACT and HAS_RESIDUAL:
        query = query_of(q, scale, EXACT_FORMATS[2], ROWS, DIMS, Q_BF16, K_ROTATION)
        m, total, acc0, acc1 = attend(  # exact sinks that the residual no longer reaches
            m, total, acc0, acc1, query, positions, first_position, last_position,
            num_sink_tokens, num_exact_sinks, residual_length, far, exact, kv_head, softcap,
            EXACT_FORMATS, DIMS, BLOCK_SIZE, EXACT_TILE, 1, WIDEN, SOFTCAP, ONE_POSITION,
        )  # fmt: skip
        m, total, acc0, acc1 = attend(
            m, total, acc0, acc1, query, positions, first_position, last_position,
            num_sink_tokens, anywhere, 0, tl.minimum(residual_length, far), exact, kv_head, softcap,
            EXACT_FORMATS, DIMS, BLOCK_SIZE, EXACT_TILE, 2, WIDEN, SOFTCAP, ONE_POSITION,
        )  # fmt: skip
    return m, total, acc0, acc1
