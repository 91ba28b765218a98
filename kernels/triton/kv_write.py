"""Encode K and V vectors and scatter them into their slots: the recipe of `lean.quant.codecs`, to the byte."""

# mypy: allow-untyped-defs

import triton
import triton.language as tl

from lean.kernels.triton.common import (
    BF16,
    FP16,
    FP32,
    INT3,
    INT8,
    OF_STEP,
    UNIT,
    bits_of_grid,
    fp32_to_bf16,
    high_bits,
    load_float,
    rotate,
)

MIN_SCALE = tl.constexpr(2.0**-14)  # the recipe's, as `lean.quant.codecs`; a test compares them
MAX_SCALE = tl.constexpr(65504.0)
MIN_BYTE, MAX_BYTE, NAN_BYTE, NUM_SCALES = (tl.constexpr(number) for number in (0x08, 0xF7, 0xFF, 6))
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
def sum_of_halves(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """x [ROWS, WIDTH] -> [ROWS]: element i is added to element i + half, until one is left."""
    STEPS: tl.constexpr = WIDTH.bit_length() - 1
    for step in tl.static_range(STEPS):
        a, b = tl.split(tl.permute(tl.reshape(x, [ROWS, 2, WIDTH >> (step + 1)]), [0, 2, 1]))
        x = a + b
    return tl.reshape(x, [ROWS])


@triton.jit
def grid_codes(y, inverse, limit, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The codes of y [ROWS, WIDTH], as fp32, with the reciprocals of the scales [ROWS]."""
    z = y * tl.broadcast_to(inverse[:, None], [ROWS, WIDTH])
    return tl.floor(tl.minimum(tl.maximum(z, -limit), limit - 1.0))


@triton.jit
def scale_of_byte(byte):
    return (byte << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def search_scale(y, limit, dims, DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """(codes int32 [ROWS, WIDTH], scale bytes int32 [ROWS]) of groups y [ROWS, WIDTH]. dims: those of the elements."""
    absmax = tl.max(tl.abs(y), axis=1)
    bad = tl.max(tl.where(tl.abs(y) < float("inf"), 0, 1), axis=1) > 0
    empty = bad | (absmax == 0)
    y = tl.where(empty[:, None], 0.0, y)
    ratio = tl.where(bad, 1.0, tl.div_rn(absmax, tl.full([ROWS], 0.0, tl.float32) + (limit - 0.5)))
    bits = ratio.to(tl.int32, bitcast=True)
    largest = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (112 << 3)
    largest = tl.minimum(tl.maximum(largest, MIN_BYTE), MAX_BYTE)
    one = tl.full([ROWS], 1.0, tl.float32)
    # A loop, not six copies of its body: with these ptxas gives up its optimizations where codes lie in two planes.
    best = tl.maximum(largest - (NUM_SCALES - 1), MIN_BYTE)
    least = tl.full([ROWS], float("inf"), tl.float32)
    for step in range(NUM_SCALES):
        byte = tl.maximum(largest - (NUM_SCALES - 1 - step), MIN_BYTE)
        scale = scale_of_byte(byte)
        code = grid_codes(y, tl.div_rn(one, scale), limit, ROWS, WIDTH)
        error = y - (code + 0.5) * tl.broadcast_to(scale[:, None], [ROWS, WIDTH])
        error = tl.where(dims < DIM, error * error, 0.0)
        total = sum_of_halves(error, ROWS, WIDTH)
        better = total < least
        best, least = tl.where(better, byte, best), tl.where(better, total, least)
    code = grid_codes(y, tl.div_rn(one, scale_of_byte(best)), limit, ROWS, WIDTH).to(tl.int32)
    byte = tl.where(bad, NAN_BYTE, tl.where(absmax == 0, 0, best))
    return tl.where(empty[:, None], 0, code), byte


@triton.jit
def write_plane(
    codes, ptr, mask, SHIFT: tl.constexpr, BITS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Bits SHIFT .. SHIFT + BITS of codes int32 [ROWS, PADDED] as the plane that begins at ``ptr`` [ROWS]."""
    PER_BYTE: tl.constexpr = 8 // BITS
    x = tl.reshape((codes >> SHIFT) & ((1 << BITS) - 1), [ROWS, PADDED // UNIT, PER_BYTE, UNIT // PER_BYTE])
    x = x << tl.reshape(BITS * tl.arange(0, PER_BYTE), [1, 1, PER_BYTE, 1])
    packed = tl.reshape(tl.sum(x, axis=2), [ROWS, PADDED // PER_BYTE])
    byte = tl.arange(0, PADDED // PER_BYTE)
    full = mask[:, None] & (byte < DIM // PER_BYTE)[None, :]
    tl.store(ptr[:, None] + byte[None, :], packed.to(tl.uint8), mask=full)


@triton.jit
def write_grid(
    y, codes, scales, mask, FORMAT: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """y [ROWS, PADDED] as codes and one-byte scales at pointers [ROWS]."""
    BITS: tl.constexpr = bits_of_grid(FORMAT)
    HIGH: tl.constexpr = high_bits(FORMAT)
    WIDTH: tl.constexpr = min(GROUP, PADDED)
    GROUPS: tl.constexpr = PADDED // WIDTH
    columns = tl.broadcast_to(tl.arange(0, PADDED)[None, :], [ROWS, PADDED])
    dims = tl.reshape(columns, [ROWS * GROUPS, WIDTH])
    code, byte = search_scale(
        tl.reshape(y, [ROWS * GROUPS, WIDTH]), 2.0 ** (BITS - 1), dims, DIM, ROWS * GROUPS, WIDTH
    )  # fmt: skip
    code = tl.reshape(code, [ROWS, PADDED])
    write_plane(code, codes, mask, BITS - HIGH, HIGH, DIM, PADDED, ROWS)
    if BITS > HIGH:
        write_plane(code, codes + DIM * HIGH // 8, mask, 0, BITS - HIGH, DIM, PADDED, ROWS)
    group = tl.arange(0, GROUPS)
    group_mask = mask[:, None] & (group * WIDTH < DIM)[None, :]
    tl.store(scales[:, None] + group[None, :], tl.reshape(byte, [ROWS, GROUPS]).to(tl.uint8), mask=group_mask)


@triton.jit
def write_vectors(
    x, base, slot_offsets, codes_offset, scales_offset, mask, heads,
    FORMAT: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    ROTATION: tl.constexpr, BLOCK_SIZE: tl.constexpr, CODE_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """x [ROWS, PADDED], one vector a row; padding columns are zeros and stay so.

    GROUP: the dims that share a scale; of int8 and fp8 all, or those of V where V lies in K.
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
    elif FORMAT >= INT3:
        y = rotate(x, ROWS, PADDED, ROTATION)
        write_grid(y, codes, scales, mask, FORMAT, DIM, PADDED, ROWS, GROUP)
    else:
        y = rotate(x, ROWS, PADDED, ROTATION)
        TOP: tl.constexpr = 127.0 if FORMAT == INT8 else 448.0
        scales = scales.to(tl.pointer_type(tl.int16))
        if GROUP == DIM:
            scale, bad = scale_of_group(y, TOP)
            scale_of_column, bad_column = tl.broadcast_to(scale[:, None], [ROWS, PADDED]), bad[:, None]
        else:
            first = (columns < GROUP)[None, :]
            scale, bad = scale_of_group(tl.where(first, y, 0.0), TOP)
            rest_scale, rest_bad = scale_of_group(tl.where(first, 0.0, y), TOP)
            scale_of_column = tl.where(first, scale[:, None], rest_scale[:, None])
            bad_column = (first & bad[:, None]) | ((columns >= GROUP)[None, :] & rest_bad[:, None])
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
    K_GROUP: tl.constexpr, V_GROUP: tl.constexpr,
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
            K_FORMAT, K_DIM, K_PADDED, ROWS, K_ROTATION, BLOCK_SIZE, K_BYTES, K_SCALE_BYTES, K_GROUP,
        )  # fmt: skip
    else:
        v_columns = tl.arange(0, V_PADDED)
        v_offsets = (token * value_stride + heads * value_head_stride)[:, None] + v_columns[None, :]
        v = load_float(value, v_offsets, mask[:, None] & (v_columns < V_DIM)[None, :], X_BF16)
        write_vectors(
            v, base, where, v_codes_offset, v_scales_offset, mask, heads,
            V_FORMAT, V_DIM, V_PADDED, ROWS, V_ROTATION, BLOCK_SIZE, V_BYTES, V_SCALE_BYTES, V_GROUP,
        )  # fmt: skip
