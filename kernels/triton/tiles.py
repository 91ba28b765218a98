"""What attention loads and computes tile by tile: query rows, codes of keys and values, and the softmax of scores."""

# mypy: allow-untyped-defs

import triton
import triton.language as tl

from lean.kernels.triton.common import (
    BF16,
    FP8,
    FP16,
    FP32,
    HEADROOM,
    INT8,
    LOG2E,
    UNIT,
    bits_of_grid,
    dim_of,
    exp2,
    halves,
    high_bits,
    load_float,
    log2_above,
    rotate,
    scale_of_bits,
    widen_fp8,
    widen_int4,
    widen_int8,
    widen_words,
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
    """[TILE, PADDED / HALVES] elements of the keys whose codes begin at byte offsets ``rows`` [TILE]; not of formats
    from INT3 on."""
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


@triton.constexpr_function
def groups_of(padded, group):
    """Groups of the scales in a padded vector."""
    return max(1, padded // group)


@triton.jit
def load_group_scales(
    scales, block, slot, stored, STORED: tl.constexpr, GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr
):
    """fp16 [TILE, PADDED_GROUPS]: of the STORED one-byte scales of every key the first GROUPS; 0 for groups that there
    are not, and for keys that are not ``stored`` [TILE]. block, slot: [TILE], offset of the key's block, slot in it.

    One or two scales are read with the 4 bytes around them, since an asynchronous copy moves at least 4 bytes.
    """
    if STORED <= 2 and GROUPS == STORED:
        KEYS: tl.constexpr = 4 // STORED
        word = tl.load((scales + (block + slot // KEYS * 4)).to(tl.pointer_type(tl.int32)), stored, other=0)
        at = (slot % KEYS * (8 * STORED))[:, None] + (8 * tl.arange(0, STORED))[None, :]
        scale = scale_of_bits(((word[:, None] >> at) << 7) & 0x7F80)
    else:
        group = tl.arange(0, PADDED_GROUPS)
        mask = stored[:, None] & (group < GROUPS)[None, :]
        byte = tl.load((scales + (block + slot * STORED))[:, None] + group[None, :], mask, other=0)
        scale = scale_of_bits(byte.to(tl.int32) << 7)
    return scale


@triton.jit
def scale_columns(scale, TILE: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    """[TILE, GROUPS] -> [TILE, COLUMNS], each scale for its share of the columns."""
    SHARE: tl.constexpr = COLUMNS // GROUPS
    return tl.reshape(tl.broadcast_to(scale[:, :, None], [TILE, GROUPS, SHARE]), [TILE, COLUMNS])


@triton.jit
def load_int4(
    codes, rows, scale, DIM: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr,
    COMPUTE: tl.constexpr, WIDEN: tl.constexpr, PURE: tl.constexpr,
):  # fmt: skip
    """Both halves, [TILE, PADDED / 2] each, of (code + 1/2)/8 x scale, rounded to COMPUTE once. scale: from
    `load_group_scales`, of which a 0 gives zeros.

    The product never overflows, since |code + 1/2| < 8, and its rounding is 2^-11 of a vector's largest element at
    most: no more than that of the query or of the weights. One dot over all groups then serves, instead of one each.
    """
    columns = tl.arange(0, PADDED // 2)
    scale = scale_columns(scale, TILE, GROUPS, PADDED // 2)
    ptr = codes + rows[:, None] + columns[None, :]
    packed = load_where(ptr, (columns < DIM // 2)[None, :], PADDED != DIM)
    low, high = widen_int4(packed, WIDEN, PURE)
    if COMPUTE == FP32:
        return low.to(tl.float32) * scale.to(tl.float32), high.to(tl.float32) * scale.to(tl.float32)
    else:
        return low * scale, high * scale


@triton.jit
def load_plane(ptr, rows, BITS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr):
    """int32 [TILE, PADDED / 4]: the bits of four neighbouring dims in the lowest bits of a word's bytes, from the plane
    of BITS bits that begins at byte offsets ``rows`` [TILE]."""
    UNITS: tl.constexpr = PADDED // UNIT
    columns = tl.arange(0, UNITS * BITS)
    address = (ptr + rows).to(tl.pointer_type(tl.int32))[:, None] + columns[None, :]
    mask = (columns < DIM * BITS // UNIT)[None, :]
    words = load_where(address, mask, PADDED != DIM)
    words = tl.reshape(words, [TILE, UNITS, 1, BITS])
    shifts = BITS * tl.arange(0, 8 // BITS)
    words = words >> tl.reshape(shifts, [1, 1, 8 // BITS, 1])
    return tl.reshape(words, [TILE, PADDED // 4]) & (0x01010101 * ((1 << BITS) - 1))


@triton.jit
def load_planes(
    codes, rows, scale, FORMAT: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr,
    TILE: tl.constexpr, COMPUTE: tl.constexpr, WIDEN: tl.constexpr, PURE: tl.constexpr,
):  # fmt: skip
    """[TILE, PADDED] of (code + 1/2) / 2^(bits - 1) x scale of the formats of two planes; as `load_int4` otherwise."""
    BITS: tl.constexpr = bits_of_grid(FORMAT)
    HIGH: tl.constexpr = high_bits(FORMAT)
    high = load_plane(codes, rows, HIGH, DIM, PADDED, TILE)
    low = load_plane(codes, rows + DIM * HIGH // 8, BITS - HIGH, DIM, PADDED, TILE)
    words = (high << (8 - HIGH)) | (low << (8 - BITS)) | (0x01010101 << (7 - BITS))
    x = widen_words(words, TILE, PADDED // 4, WIDEN, PURE)  # (code + 1/2) 2^(8 - bits)
    scale = scale_columns(scale * 0.0078125, TILE, GROUPS, PADDED)  # exact, as a scale has four bits
    if COMPUTE == FP32:
        return x.to(tl.float32) * scale.to(tl.float32)
    else:
        return x * scale


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
