"""What attention loads and computes tile by tile: query rows, codes of keys and values, and the softmax of scores."""

# mypy: allow-untyped-defs

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
    INT8,
    LOG2E,
    dim_of,
    exp2,
    halves,
    load_float,
    log2_above,
    rotate,
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
def load_query_halves(
    ptr, offsets, row_mask, DIM: tl.constexpr, PADDED: tl.constexpr, HALVES: tl.constexpr, ROWS: tl.constexpr,
    IS_BF16: tl.constexpr, ROTATION: tl.constexpr,
):  # fmt: skip
    """Query rows in the stored basis as the two tiles of `dim_of`, fp32; twice one tile without halves."""
    if ROTATION[0] == 0:  # as it lies, each half for itself
        a = load_query(ptr, offsets, row_mask, DIM, PADDED, ROWS, IS_BF16, ROTATION, 0, HALVES)
        b = load_query(ptr, offsets, row_mask, DIM, PADDED, ROWS, IS_BF16, ROTATION, 1, HALVES) if HALVES == 2 else a
    else:
        a, b = halves(
            load_query(ptr, offsets, row_mask, DIM, PADDED, ROWS, IS_BF16, ROTATION, 0, 1), ROWS, PADDED, HALVES
        )
    return a, b


@triton.jit
def power_of_two_below(x):
    """(2^-e, 2^e) with 2^e <= x < 2^(e+1) for normal x >= 0: scales x to [1, 2) without rounding."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    return ((254 - exponent) << 23).to(tl.float32, bitcast=True), (exponent << 23).to(tl.float32, bitcast=True)


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
def weigh(
    m, total, s, positions, j, stored, near, far, v_scale, softcap,
    V_VECTOR_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ONE_POSITION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Scores ``s`` [ROWS, TILE] of the keys ``j`` added to every row's state: (m, total, the weights of V, what the
    accumulator is multiplied by). v_scale: [TILE], read with V_VECTOR_SCALE; the weights contain it."""
    if SOFTCAP:
        # softcap x tanh(s / softcap), only then in log2 units.
        s = (softcap * LOG2E) * (1 - 2 / (tl.exp2(s * (2 * LOG2E / softcap)) + 1))
    if ONE_POSITION:
        s = tl.where(stored[None, :], s, float("-inf"))
    else:
        distance = positions[:, None] - j[None, :]
        s = tl.where((distance >= near) & (distance < far) & stored[None, :], s, float("-inf"))
    if V_VECTOR_SCALE:
        new_m = tl.maximum(m, tl.max(s + log2_above(v_scale)[None, :], axis=1))
    else:
        new_m = tl.maximum(m, tl.max(s, axis=1))
    # A row that has seen nothing keeps -inf; subtracting 0 instead makes its weights exact zeros, not NaN.
    top = tl.where(new_m == float("-inf"), 0.0, new_m)
    kept = exp2(m - top, WIDEN)
    p = exp2(s - (top - HEADROOM)[:, None], WIDEN)
    total = total * kept + tl.sum(p, axis=1)
    if V_VECTOR_SCALE:
        p = p * v_scale[None, :]
    return new_m, total, p, kept
