"""Encode K and V vectors and scatter them into their slots: the recipe of `lean.quant.codecs`, to the byte."""

# mypy: allow-untyped-defs

import triton
import triton.language as tl

from lean.kernels.triton.common import (
    BF16,
    FP16,
    FP32,
    GROUP,
    HALF_GROUP,
    INT4,
    INT8,
    OF_STEP,
    fp32_to_bf16,
    load_float,
    rotate,
)

MIN_SCALE = tl.constexpr(2.0**-14)  # the recipe's, as `lean.quant.codecs`; a test compares them
MAX_SCALE = tl.constexpr(65504.0)
ROUNDING = tl.constexpr(12582912.0)  # 1.5 x 2^23: adding and taking it away rounds |x| < 2^22 half to even


@triton.jit
def scale_of(absmax, top):
    """The scale as fp32: rounded to fp16 and clamped before it is used."""
    scale = tl.div_rn(absmax, tl.full(absmax.shape, 0.0, tl.float32) + top).to(tl.float16).to(tl.float32)
    return tl.minimum(tl.maximum(scale, MIN_SCALE), MAX_SCALE)


@triton.jit
def scale_of_group(y, TOP: tl.constexpr):
    """(scale, whether it is not finite) of the rows of y [ROWS, dims], each [ROWS]."""
    bad = tl.max(tl.where(tl.abs(y) < float("inf"), 0, 1), axis=1) > 0
    return scale_of(tl.max(tl.abs(y), axis=1), TOP), bad


@triton.jit
def scale_bits(scale, bad):
    """int16 bits of the fp16 scale; of torch's NaN where a vector is not finite."""
    return tl.where(bad, 0x7E00, scale.to(tl.float16).to(tl.int16, bitcast=True)).to(tl.int16)


@triton.jit
def round_clamped(z, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Nearest integer in LOW .. HIGH, ties to even, as int32. The clamp comes first, which changes nothing."""
    z = tl.minimum(tl.maximum(z, LOW), HIGH)
    return ((z + ROUNDING) - ROUNDING).to(tl.int32)


@triton.jit
def e4m3_bits(z):
    """fp32 in -448 .. 448 -> e4m3fn codes as int32, nearest, ties to even."""
    bits = z.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes count steps of 2^-9; the eighth step is the smallest normal code.
    small = ((magnitude.to(tl.float32, bitcast=True) * 512.0 + ROUNDING) - ROUNDING).to(tl.int32)
    return tl.where(magnitude < (121 << 23), small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def write_vectors(
    x, base, slot_offsets, codes_offset, scales_offset, mask, heads,
    FORMAT: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    ROTATION: tl.constexpr, BLOCK_SIZE: tl.constexpr, CODE_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """x [ROWS, PADDED], one vector a row; padding columns are zeros and stay so.

    FIRST: of int8 and fp8, the dims of the first scale: all, or those of V where V lies in K.
    """
    block, slot = slot_offsets
    codes = base + codes_offset + block + (heads * BLOCK_SIZE + slot) * CODE_BYTES
    scales = base + scales_offset + block + (heads * BLOCK_SIZE + slot) * SCALE_BYTES
    columns = tl.arange(0, PADDED)
    full = mask[:, None] & (columns < DIM)[None, :]
    if FORMAT == FP32:
        y = rotate(x, ROWS, PADDED, ROTATION)
        tl.store(codes.to(tl.pointer_type(tl.float32))[:, None] + columns[None, :], y, mask=full)
    elif FORMAT == FP16:
        y = rotate(x, ROWS, PADDED, ROTATION)
        tl.store(codes.to(tl.pointer_type(tl.float16))[:, None] + columns[None, :], y.to(tl.float16), mask=full)
    elif FORMAT == BF16:
        y = rotate(x, ROWS, PADDED, ROTATION)
        tl.store(codes.to(tl.pointer_type(tl.int16))[:, None] + columns[None, :], fp32_to_bf16(y), mask=full)
    elif FORMAT == INT4:
        GROUPS: tl.constexpr = PADDED // GROUP
        y = tl.reshape(rotate(x, ROWS, PADDED, ROTATION), [ROWS, GROUPS, GROUP])
        absmax = tl.max(tl.abs(y), axis=2)
        bad = tl.max(tl.where(tl.abs(y) < float("inf"), 0, 1), axis=2) > 0
        scale = scale_of(absmax, 7.0)
        z = tl.where(bad[:, :, None], 0.0, tl.div_rn(y, tl.broadcast_to(scale[:, :, None], [ROWS, GROUPS, GROUP])))
        q = tl.permute(tl.reshape(round_clamped(z, -8.0, 7.0), [ROWS, GROUPS, 2, HALF_GROUP]), [0, 1, 3, 2])
        low, high = tl.split(q)
        packed = tl.reshape((low & 15) | ((high & 15) << 4), [ROWS, PADDED // 2]).to(tl.uint8)
        byte = tl.arange(0, PADDED // 2)
        tl.store(codes[:, None] + byte[None, :], packed, mask=mask[:, None] & (byte < DIM // 2)[None, :])
        group = tl.arange(0, GROUPS)
        group_mask = mask[:, None] & (group < DIM // GROUP)[None, :]
        tl.store(
            scales.to(tl.pointer_type(tl.int16))[:, None] + group[None, :], scale_bits(scale, bad), mask=group_mask
        )
    else:
        y = rotate(x, ROWS, PADDED, ROTATION)
        TOP: tl.constexpr = 127.0 if FORMAT == INT8 else 448.0
        scales = scales.to(tl.pointer_type(tl.int16))
        if FIRST == DIM:
            scale, bad = scale_of_group(y, TOP)
            scale_of_column, bad_column = tl.broadcast_to(scale[:, None], [ROWS, PADDED]), bad[:, None]
        else:
            first = (columns < FIRST)[None, :]
            scale, bad = scale_of_group(tl.where(first, y, 0.0), TOP)
            rest_scale, rest_bad = scale_of_group(tl.where(first, 0.0, y), TOP)
            scale_of_column = tl.where(first, scale[:, None], rest_scale[:, None])
            bad_column = (first & bad[:, None]) | ((columns >= FIRST)[None, :] & rest_bad[:, None])
            tl.store(scales + 1, scale_bits(rest_scale, rest_bad), mask=mask)
        z = tl.where(bad_column, 0.0, tl.div_rn(y, scale_of_column))
        if FORMAT == INT8:
            q = round_clamped(z, -127.0, 127.0)
        else:
            q = e4m3_bits(tl.minimum(tl.maximum(z, -448.0), 448.0))
        tl.store(codes[:, None] + columns[None, :], (q & 255).to(tl.uint8), mask=full)
        tl.store(scales, scale_bits(scale, bad), mask=mask)


@triton.jit(do_not_specialize=OF_STEP)
def kv_write(
    base, key, value, slot_mapping, num_vectors, key_stride, key_head_stride, value_stride, value_head_stride,
    block_stride, k_scales_offset, v_codes_offset, v_scales_offset,
    X_BF16: tl.constexpr, NUM_KV_HEADS: tl.constexpr, K_FORMAT: tl.constexpr, V_FORMAT: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_PADDED: tl.constexpr, V_PADDED: tl.constexpr,
    K_BYTES: tl.constexpr, V_BYTES: tl.constexpr, K_SCALE_BYTES: tl.constexpr, V_SCALE_BYTES: tl.constexpr,
    K_ROTATION: tl.constexpr, V_ROTATION: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    K_FIRST: tl.constexpr,
):  # fmt: skip
    """ROWS vectors (token x KV head) of K, or in the grid's second row of V, where V is stored. Slots below 0 are
    skipped."""
    vector = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (vector // NUM_KV_HEADS).to(tl.int64)
    heads = vector % NUM_KV_HEADS
    slots = tl.load(slot_mapping + token, mask=vector < num_vectors, other=-1)
    mask = slots >= 0
    block = (slots // BLOCK_SIZE).to(tl.int64) * block_stride
    where = (block, slots % BLOCK_SIZE)
    # Names of their own: of one name Triton wants one shape, and K and V may be of different sizes.
    if tl.program_id(1) == 0:
        k_columns = tl.arange(0, K_PADDED)
        k_offsets = (token * key_stride + heads * key_head_stride)[:, None] + k_columns[None, :]
        k = load_float(key, k_offsets, mask[:, None] & (k_columns < K_DIM)[None, :], X_BF16)
        write_vectors(
            k, base, where, 0, k_scales_offset, mask, heads,
            K_FORMAT, K_DIM, K_PADDED, ROWS, K_ROTATION, BLOCK_SIZE, K_BYTES, K_SCALE_BYTES, K_FIRST,
        )  # fmt: skip
    else:
        v_columns = tl.arange(0, V_PADDED)
        v_offsets = (token * value_stride + heads * value_head_stride)[:, None] + v_columns[None, :]
        v = load_float(value, v_offsets, mask[:, None] & (v_columns < V_DIM)[None, :], X_BF16)
        write_vectors(
            v, base, where, v_codes_offset, v_scales_offset, mask, heads,
            V_FORMAT, V_DIM, V_PADDED, ROWS, V_ROTATION, BLOCK_SIZE, V_BYTES, V_SCALE_BYTES, V_DIM,
        )  # fmt: skip
