"""Attention to latent vectors: one KV head whose V is the first numbers of its K, so that each key is loaded once.

The numbers of a key are held as two tiles: its V, and the rest of it (the rotated part).
"""

# mypy: allow-untyped-defs
# ruff: noqa: SIM109 - formats are compile-time constants, which Triton compares one by one

import triton
import triton.language as tl

from lean.kernels.triton.common import BF16, FP8, FP16, FP32, INT4, INT8, unit_of
from lean.kernels.triton.tiles import (
    groups_of,
    load_group_scales,
    load_half,
    load_int4,
    load_query_halves,
    power_of_two_below,
    weigh,
)


@triton.jit
def in_bf16(x):
    """fp32 as the sum of two bf16 numbers, up to their rounding."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def latent_query(
    rows, scale, COMPUTE: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr, IS_BF16: tl.constexpr,
    ROTATION: tl.constexpr,
):  # fmt: skip
    """Query rows as operands of dtype COMPUTE, as `attention.query_for` makes them: the halves of the part that meets V
    (a, b) and of the rest (c, d), their remainders, and the factor [ROWS]."""
    ptr, offsets, row_mask = rows
    a, b = load_query_halves(ptr, offsets, row_mask, DIMS[1], DIMS[3], DIMS[5], ROWS, IS_BF16, ROTATION)
    c, d = load_query_halves(ptr + DIMS[1], offsets, row_mask, DIMS[7], DIMS[8], DIMS[5], ROWS, IS_BF16, ROTATION)
    if COMPUTE == FP16:
        largest = tl.maximum(tl.max(tl.abs(a), axis=1), tl.max(tl.abs(c), axis=1))
        if DIMS[5] == 2:
            largest = tl.maximum(largest, tl.maximum(tl.max(tl.abs(b), axis=1), tl.max(tl.abs(d), axis=1)))
        down, factor = power_of_two_below(largest)
        a, b = (a * down[:, None]).to(tl.float16), (b * down[:, None]).to(tl.float16)
        c, d = (c * down[:, None]).to(tl.float16), (d * down[:, None]).to(tl.float16)
        return a, b, c, d, a, b, c, d, factor * scale
    elif COMPUTE == BF16:
        high_a, rest_a = in_bf16(a)
        high_b, rest_b = in_bf16(b)
        high_c, rest_c = in_bf16(c)
        high_d, rest_d = in_bf16(d)
        one = tl.full([ROWS], 1.0, tl.float32)
        return high_a, high_b, high_c, high_d, rest_a, rest_b, rest_c, rest_d, one * scale
    else:
        return a, b, c, d, a, b, c, d, tl.full([ROWS], 1.0, tl.float32) * scale


@triton.jit
def load_scale_pairs(ptr, stored):
    """fp32 [TILE] twice: the scales of V and of the rest of the keys at ``ptr`` [TILE]; 1 where nothing is stored."""
    pair = tl.load(ptr.to(tl.pointer_type(tl.int32)), mask=stored, other=0)
    first = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    second = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.where(stored, first, 1.0), tl.where(stored, second, 1.0)


@triton.jit
def attend_latent(
    m, total, acc0, acc1, query, positions, first_position, last_position, lo, hi, near, far, pool, kv_head, softcap,
    FORMATS: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    WIDEN: tl.constexpr, SOFTCAP: tl.constexpr, ONE_POSITION: tl.constexpr,
):  # fmt: skip
    """Add the keys j in lo .. hi with near <= position - j < far to every row's state.

    Arguments as of `attention.attend_keys_and_values`; query: from `latent_query`. kv_head counts the parts into which
    the query heads are cut, DIMS[9] for each KV head.
    """
    FORMAT: tl.constexpr = FORMATS[0]
    COMPUTE: tl.constexpr = FORMATS[2]
    BYTES: tl.constexpr = FORMATS[4]
    SCALE_BYTES: tl.constexpr = FORMATS[6]
    V_DIM: tl.constexpr = DIMS[1]
    V_PADDED: tl.constexpr = DIMS[3]
    HALVES: tl.constexpr = DIMS[5]
    REST: tl.constexpr = DIMS[7]
    REST_PADDED: tl.constexpr = DIMS[8]
    GROUP: tl.constexpr = FORMATS[8]
    V_GROUPS: tl.constexpr = groups_of(V_PADDED, GROUP)
    REST_GROUPS: tl.constexpr = groups_of(REST_PADDED, GROUP)
    UNIT: tl.constexpr = unit_of(FORMAT)
    VECTOR_SCALE: tl.constexpr = (FORMAT == INT8) or (FORMAT == FP8)
    RAW: tl.constexpr = (FORMAT == FP32) or (FORMAT == FP16) or (FORMAT == BF16)
    a, b, c, d, rest_a, rest_b, rest_c, rest_d, factor = query
    table, base, block_stride, scales_offset, _, _ = pool
    first = tl.maximum(lo, first_position - far + 1)
    end = tl.minimum(hi, last_position - near + 1)
    head = kv_head // DIMS[9]
    codes = base + head * (BLOCK_SIZE * BYTES)
    rest_codes = codes + V_DIM * BYTES // DIMS[0]
    scales = base + scales_offset + head * (BLOCK_SIZE * SCALE_BYTES)
    acc0 = acc0 * (1.0 / UNIT)
    acc1 = acc1 * (1.0 / UNIT)
    score_factor = factor * UNIT
    for start in tl.range(first // TILE * TILE, end, TILE, num_stages=STAGES):
        j = start + tl.arange(0, TILE)
        stored = (j >= first) & (j < end)
        block = tl.load(table + j // BLOCK_SIZE, mask=stored, other=0).to(tl.int64) * block_stride
        slot = j % BLOCK_SIZE
        rows = block + slot * BYTES
        if FORMAT == INT4:
            v_group_scale = load_group_scales(scales, block, slot, stored, SCALE_BYTES, V_DIM // GROUP, V_GROUPS)
            v0, v1 = load_int4(
                codes, rows, v_group_scale, V_DIM, V_PADDED, V_GROUPS, TILE, COMPUTE, WIDEN, False
            )  # fmt: skip
            k_group_scale = load_group_scales(
                scales + V_DIM // GROUP, block, slot, stored, SCALE_BYTES, (REST + GROUP - 1) // GROUP, REST_GROUPS
            )
            k0, k1 = load_int4(
                rest_codes, rows, k_group_scale, REST, REST_PADDED, REST_GROUPS, TILE, COMPUTE, WIDEN, True
            )  # fmt: skip
        else:
            v0 = load_half(codes, rows, stored, 0, HALVES, FORMAT, COMPUTE, V_DIM, V_PADDED, WIDEN, RAW, False)
            k0 = load_half(
                rest_codes, rows, stored, 0, HALVES, FORMAT, COMPUTE, REST, REST_PADDED, WIDEN, False, True
            )  # fmt: skip
            v1, k1 = v0, k0
            if HALVES == 2:
                v1 = load_half(codes, rows, stored, 1, HALVES, FORMAT, COMPUTE, V_DIM, V_PADDED, WIDEN, RAW, False)
                k1 = load_half(
                    rest_codes, rows, stored, 1, HALVES, FORMAT, COMPUTE, REST, REST_PADDED, WIDEN, False, True
                )  # fmt: skip
        s = tl.dot(a, tl.trans(v0), input_precision="ieee")
        if HALVES == 2:
            s = tl.dot(b, tl.trans(v1), s, input_precision="ieee")
        if COMPUTE == BF16 and DIMS[6]:
            s = tl.dot(rest_a, tl.trans(v0), s)
            if HALVES == 2:
                s = tl.dot(rest_b, tl.trans(v1), s)
        v_scale = s
        if VECTOR_SCALE:
            v_scale, rest_scale = load_scale_pairs(scales + block + slot * SCALE_BYTES, stored)
            s = s * v_scale[None, :] + tl.dot(c, tl.trans(k0), input_precision="ieee") * rest_scale[None, :]
        else:
            s = tl.dot(c, tl.trans(k0), s, input_precision="ieee")
            if HALVES == 2:
                s = tl.dot(d, tl.trans(k1), s, input_precision="ieee")
            if COMPUTE == BF16 and DIMS[6]:
                s = tl.dot(rest_c, tl.trans(k0), s)
                if HALVES == 2:
                    s = tl.dot(rest_d, tl.trans(k1), s)
        s = s * score_factor[:, None]
        m, total, p, kept = weigh(
            m, total, s, positions, j, stored, near, far, v_scale, softcap,
            VECTOR_SCALE, SOFTCAP, ONE_POSITION, WIDEN,
        )  # fmt: skip
        weights = p.to(v0.dtype)
        acc0 = tl.dot(weights, v0, acc0 * kept[:, None], input_precision="ieee")
        if HALVES == 2:
            acc1 = tl.dot(weights, v1, acc1 * kept[:, None], input_precision="ieee")
    return m, total, acc0 * UNIT, acc1 * UNIT
