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

from lean.kernels.triton.common import (
    BF16,
    FP8,
    FP16,
    FP32,
    GROUP,
    HALF_GROUP,
    HEADROOM,
    INT4,
    INT8,
    LOG2E,
    dim_of,
    exp2,
    halves,
    load_float,
    log2_above,
    rotate,
    unit_of,
    widen_fp8,
    widen_int4,
    widen_int8,
)


@triton.jit
def load_query(
    ptr, offsets, row_mask, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, IS_BF16: tl.constexpr,
    ROTATION: tl.constexpr, HALF: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Query rows at ``offsets`` [ROWS] in the stored basis, fp32 [ROWS, PADDED / HALVES]; padding is zeros."""
    dims = dim_of(tl.arange(0, PADDED // HALVES), HALF, HALVES)
    mask = row_mask[:, None] & (dims < DIM)[None, :]
    return rotate(load_float(ptr, offsets[:, None] + dims[None, :], mask, IS_BF16), ROWS, PADDED, ROTATION)


@triton.jit
def power_of_two_below(x):
    """(2^-e, 2^e) with 2^e <= x < 2^(e+1) for normal x >= 0: scales x to [1, 2) without rounding."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    return ((254 - exponent) << 23).to(tl.float32, bitcast=True), (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def query_for(
    rows, scale, COMPUTE: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr, IS_BF16: tl.constexpr,
    ROTATION: tl.constexpr,
):  # fmt: skip
    """Query rows as operands of dtype COMPUTE: (first, second half, their remainders, factor [ROWS]).

    fp16: each row is scaled to a largest element in [1, 2), so that bf16's range fits. bf16: what rounding takes from
    the (rotated) query is a second operand.
    """
    PADDED: tl.constexpr = DIMS[2]
    HALVES: tl.constexpr = DIMS[4]
    ptr, offsets, row_mask = rows
    if ROTATION[0] == 0:  # as it lies, each half for itself
        a = load_query(ptr, offsets, row_mask, DIMS[0], PADDED, ROWS, IS_BF16, ROTATION, 0, HALVES)
        b = (
            load_query(ptr, offsets, row_mask, DIMS[0], PADDED, ROWS, IS_BF16, ROTATION, 1, HALVES)
            if HALVES == 2
            else a
        )
    else:
        a, b = halves(
            load_query(ptr, offsets, row_mask, DIMS[0], PADDED, ROWS, IS_BF16, ROTATION, 0, 1), ROWS, PADDED, HALVES
        )
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
def load_where(ptr, mask, MASKED: tl.constexpr):
    """Zeros where the mask is False. Without MASKED everything is loaded, and loads have no predicates."""
    return tl.load(ptr, mask=mask, other=0) if MASKED else tl.load(ptr)


@triton.jit
def load_half(
    codes, rows, stored, HALF: tl.constexpr, HALVES: tl.constexpr, FORMAT: tl.constexpr, COMPUTE: tl.constexpr,
    DIM: tl.constexpr, PADDED: tl.constexpr, WIDEN: tl.constexpr, ONLY_STORED: tl.constexpr, PURE: tl.constexpr,
):  # fmt: skip
    """[TILE, PADDED / HALVES] elements of the keys whose codes begin at byte offsets ``rows`` [TILE]; not for int4."""
    columns = tl.arange(0, PADDED // HALVES)
    dims = dim_of(columns, HALF, HALVES)
    MASKED: tl.constexpr = ONLY_STORED or PADDED != DIM
    mask = (dims < DIM)[None, :]
    if ONLY_STORED:
        mask = stored[:, None] & mask
    start = codes + rows
    if FORMAT == INT8:
        x = widen_int8(load_where(start[:, None] + dims[None, :], mask, MASKED), WIDEN, PURE)
    elif FORMAT == FP8:
        x = widen_fp8(load_where(start[:, None] + dims[None, :], mask, MASKED), WIDEN, PURE)
    elif FORMAT == FP16:
        x = load_where(start.to(tl.pointer_type(tl.float16))[:, None] + dims[None, :], mask, MASKED)
    elif FORMAT == BF16:
        x = load_where(start.to(tl.pointer_type(tl.bfloat16))[:, None] + dims[None, :], mask, MASKED)
    else:
        x = load_where(start.to(tl.pointer_type(tl.float32))[:, None] + dims[None, :], mask, MASKED)
    return x.to(tl.float32) if COMPUTE == FP32 else x


@triton.jit
def load_int4(
    codes, scales, rows, scale_rows, stored, DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    COMPUTE: tl.constexpr, WIDEN: tl.constexpr, PURE: tl.constexpr,
):  # fmt: skip
    """Both halves, [TILE, PADDED / 2] each, of code/8 x scale, rounded to COMPUTE once; zeros where nothing is stored.

    The product never overflows, since |code/8| <= 1, and its rounding is 2^-11 of a vector's largest element at most:
    no more than that of the query or of the weights. One dot over all groups then serves, instead of one per group.
    """
    columns = tl.arange(0, PADDED // 2)
    groups = tl.arange(0, PADDED // GROUP)
    group_mask = stored[:, None] & (groups < DIM // GROUP)[None, :]
    scale_ptr = (scales + scale_rows).to(tl.pointer_type(tl.float16))[:, None] + groups[None, :]
    scale = tl.load(scale_ptr, mask=group_mask, other=0.0)
    scale = tl.reshape(tl.broadcast_to(scale[:, :, None], [TILE, PADDED // GROUP, HALF_GROUP]), [TILE, PADDED // 2])
    ptr = codes + rows[:, None] + columns[None, :]
    packed = load_where(ptr, (columns < DIM // 2)[None, :], PADDED != DIM)
    low, high = widen_int4(packed, WIDEN, PURE)
    if COMPUTE == FP32:
        return low.to(tl.float32) * scale.to(tl.float32), high.to(tl.float32) * scale.to(tl.float32)
    else:
        return low * scale, high * scale


@triton.jit
def load_scales(scales, table, block_stride, start, first, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """fp32 [TILE], one scale per key; 1 for keys outside first .. end.

    Read two at a time, since 4 bytes are the least that an asynchronous copy moves.
    """
    j = start + 2 * tl.arange(0, TILE // 2)
    stored = (j + 1 >= first) & (j < end)
    block = tl.load(table + j // BLOCK_SIZE, mask=stored, other=0).to(tl.int64) * block_stride
    pairs = tl.load((scales + (block + j % BLOCK_SIZE * 2)).to(tl.pointer_type(tl.int32)), mask=stored, other=0)
    pair = tl.join((pairs & 0xFFFF).to(tl.int16), (pairs >> 16).to(tl.int16))
    scale = tl.reshape(pair, [TILE]).to(tl.float16, bitcast=True).to(tl.float32)
    j = start + tl.arange(0, TILE)
    return tl.where((j >= first) & (j < end), scale, 1.0)


@triton.jit
def attend(
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
    q0, q1, rest0, rest1, factor = query
    table, base, block_stride, k_scales_offset, v_codes_offset, v_scales_offset = pool
    K_UNIT: tl.constexpr = unit_of(K_FORMAT)
    V_UNIT: tl.constexpr = unit_of(V_FORMAT)
    K_VECTOR_SCALE: tl.constexpr = (K_FORMAT == INT8) or (K_FORMAT == FP8)
    V_VECTOR_SCALE: tl.constexpr = (V_FORMAT == INT8) or (V_FORMAT == FP8)
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
        if K_FORMAT == INT4:
            k0, k1 = load_int4(
                k_codes, k_scales, block + slot * K_BYTES, block + slot * K_SCALE_BYTES, stored,
                K_DIM, K_PADDED, TILE, K_COMPUTE, WIDEN, True,
            )  # fmt: skip
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
        if SOFTCAP:
            # softcap x tanh(s / softcap), only then in log2 units.
            s = (softcap * LOG2E) * (1 - 2 / (tl.exp2(s * (2 * LOG2E / softcap)) + 1))
        if ONE_POSITION:
            s = tl.where(stored[None, :], s, float("-inf"))
        else:
            distance = positions[:, None] - j[None, :]
            s = tl.where((distance >= near) & (distance < far) & stored[None, :], s, float("-inf"))
        if V_VECTOR_SCALE:
            v_scale = load_scales(v_scales, table, block_stride, start, first, end, BLOCK_SIZE, TILE)
            new_m = tl.maximum(m, tl.max(s + log2_above(v_scale)[None, :], axis=1))
        else:
            new_m = tl.maximum(m, tl.max(s, axis=1))
        # A row that has seen nothing keeps -inf; subtracting 0 instead makes its weights exact zeros, not NaN.
        top = tl.where(new_m == float("-inf"), 0.0, new_m)
        kept = exp2(m - top, WIDEN)
        p = exp2(s - (top - HEADROOM)[:, None], WIDEN)
        total = total * kept + tl.sum(p, axis=1)
        m = new_m
        if V_VECTOR_SCALE:
            p = p * v_scale[None, :]
        acc0 = acc0 * kept[:, None]
        if V_FORMAT == INT4:
            v0, v1 = load_int4(
                v_codes, v_scales, block + slot * V_BYTES, block + slot * V_SCALE_BYTES, stored,
                V_DIM, V_PADDED, TILE, V_COMPUTE, WIDEN, False,
            )  # fmt: skip
        else:
            v0 = load_half(
                v_codes, block + slot * V_BYTES, stored, 0, V_HALVES, V_FORMAT, V_COMPUTE,
                V_DIM, V_PADDED, WIDEN, V_MASK, False,
            )  # fmt: skip
            v1 = v0
            if V_HALVES == 2:
                v1 = load_half(
                    v_codes, block + slot * V_BYTES, stored, 1, V_HALVES, V_FORMAT, V_COMPUTE,
                    V_DIM, V_PADDED, WIDEN, V_MASK, False,
                )  # fmt: skip
        weights = p.to(v0.dtype)
        acc0 = tl.dot(weights, v0, acc0, input_precision="ieee")
        if V_HALVES == 2:
            acc1 = tl.dot(weights, v1, acc1 * kept[:, None], input_precision="ieee")
    return m, total, acc0 * V_UNIT, acc1 * V_UNIT


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
            query = query_for(q_sink, scale, FORMATS[2], ROWS, DIMS, Q_BF16, K_ROTATION)
            m, total, acc0, acc1 = attend(
                m, total, acc0, acc1, query, positions, first_position, last_position,
                num_exact_sinks, num_sink_tokens, residual_length, anywhere, main, kv_head, softcap,
                FORMATS, DIMS, BLOCK_SIZE, EXACT_TILE, 1, WIDEN, SOFTCAP, ONE_POSITION,
            )  # fmt: skip
        if HAS_RESIDUAL:
            query = query_for(q_sink, scale, EXACT_FORMATS[2], ROWS, DIMS, Q_BF16, K_ROTATION)
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
        query = query_for(q, scale, FORMATS[2], ROWS, DIMS, Q_BF16, K_ROTATION)
        m, total, acc0, acc1 = attend(
            m, total, acc0, acc1, query, positions, first_position, last_position,
            tl.maximum(main_lo, tl.maximum(num_sink_tokens, num_exact_sinks)), main_hi, residual_length, far,
            main, kv_head, softcap,
            FORMATS, DIMS, BLOCK_SIZE, TILE, STAGES, WIDEN, SOFTCAP, ONE_POSITION,
        )  # fmt: skip
    if EXACT and HAS_RESIDUAL:
        query = query_for(q, scale, EXACT_FORMATS[2], ROWS, DIMS, Q_BF16, K_ROTATION)
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
