"""What the kernels share: the number formats on a GPU, the rotation, and how codes are widened.

Formats travel as the constants below, those with planes of codes and one-byte scales (`Kind.GRID`) in order of their
bits from INT3 on. A decoded tile is exact up to a power of two, its *unit*, which is folded back in fp32: e4m3 bits
moved into an fp16 are value/256, numbers of b bits are divided by 2^(b - 1), so that number x scale never leaves fp16.
"""

# mypy: allow-untyped-defs

import triton
import triton.language as tl

from lean.quant import FORMATS, Kind

FP32, FP16, BF16, INT8, FP8, INT3, INT4, INT5, INT6 = (tl.constexpr(code) for code in range(9))
FORMAT_CODES = {"fp32": 0, "fp16": 1, "bf16": 2, "int8": 3, "fp8": 4}
FORMAT_CODES |= {fmt.name: 2 + fmt.bits for fmt in FORMATS.values() if fmt.kind is Kind.GRID}

# How codes are widened: portable Triton, or PTX on packed words. V's PTX stays where it is written, because V is to be
# widened as it was loaded; with PACKED_PURE the compiler may move it.
PORTABLE, PACKED, PACKED_PURE = (tl.constexpr(code) for code in range(3))

UNIT = tl.constexpr(32)  # dims whose codes lie together; of int4 low nibbles hold the first half, high ones the second
HALF_UNIT = tl.constexpr(16)
# Probabilities are held as 2^HEADROOM times themselves: the largest still fits fp16 when multiplied by a code's unit,
# and fp16 then resolves 2^-38 of a row's largest.
HEADROOM = tl.constexpr(12)
LOG2E = tl.constexpr(1.4426950408889634)
# Integers that change from step to step. Triton would compile a kernel again for a 1 and for a multiple of 16, and
# serving would pause for that.
OF_STEP = ("num_seqs", "num_rows", "num_vectors", "num_parts", "first_row", "table_stride", "exact_table_stride")


@triton.jit
def dim_of(columns, HALF: tl.constexpr, HALVES: tl.constexpr):
    """The dims of a vector that ``columns`` of a tile hold: all in order, or every unit's low or high nibbles'."""
    if HALVES == 1:
        return columns
    else:
        return columns // HALF_UNIT * UNIT + columns % HALF_UNIT + HALF * HALF_UNIT


@triton.jit
def bf16_to_fp32(bits):
    """int16 bits of a bf16 -> fp32, exact."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def fp32_to_bf16(x):
    """fp32 -> int16 bits of the nearest bf16, ties to even; NaN is torch's 0x7fc0."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def load_float(ptr, offsets, mask, IS_BF16: tl.constexpr):
    """Model values as fp32; a bf16 tensor is passed as its int16 bits, which the interpreter can compute with."""
    x = tl.load(ptr + offsets, mask=mask, other=0)
    if IS_BF16:
        return bf16_to_fp32(x)
    else:
        return x.to(tl.float32)


@triton.jit
def store_float(ptr, offsets, x, mask, IS_BF16: tl.constexpr):
    if IS_BF16:
        tl.store(ptr + offsets, fp32_to_bf16(x), mask=mask)
    else:
        tl.store(ptr + offsets, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def apply_signs(x, DIM: tl.constexpr):
    """x [ROWS, DIM] fp32 with the signs of `quant.rotation.sign_bit` applied."""
    d = tl.arange(0, DIM)
    pairs = (d & (d >> 3) & 7) | ((d >> 3) & (d >> 4) & 8)
    flips = ((0x6996 >> pairs) & 1) << 31  # 0x6996: the parities of all numbers of four bits
    return (x.to(tl.int32, bitcast=True) ^ flips[None, :]).to(tl.float32, bitcast=True)


@triton.jit
def rotate(x, ROWS: tl.constexpr, DIM: tl.constexpr, ROTATION: tl.constexpr):
    """`quant.rotate` on x [ROWS, DIM] fp32, which begins with the first element of a vector. ROTATION (0, 1) leaves x
    alone."""
    if ROTATION[0] == 0:
        return x
    else:
        return butterfly(apply_signs(x, DIM), ROWS, DIM, ROTATION)


@triton.jit
def rotate_back(x, ROWS: tl.constexpr, DIM: tl.constexpr, ROTATION: tl.constexpr):
    """`quant.rotate_back`; as `rotate`."""
    if ROTATION[0] == 0:
        return x
    else:
        return apply_signs(butterfly(x, ROWS, DIM, ROTATION), DIM)


@triton.jit
def butterfly(x, ROWS: tl.constexpr, DIM: tl.constexpr, ROTATION: tl.constexpr):
    """The recipe's butterfly on x [ROWS, DIM] fp32; additions in the order of `quant.rotation.butterfly`.

    ROTATION: (strides, factor): blocks of 2^strides dims, then one multiply. Every stride pairs neighbours and writes
    all sums before all differences, so the next stride's partners become neighbours and after the last every element is
    in its place.
    """
    STRIDES: tl.constexpr = ROTATION[0]
    SIZE: tl.constexpr = 2**STRIDES
    BLOCKS: tl.constexpr = ROWS * DIM // SIZE
    x = tl.reshape(x, [BLOCKS, SIZE])
    for _ in tl.static_range(STRIDES):
        a, b = tl.split(tl.reshape(x, [BLOCKS, SIZE // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), [0, 2, 1]), [BLOCKS, SIZE])
    return tl.reshape(x * ROTATION[1], [ROWS, DIM])


@triton.jit
def halves(x, ROWS: tl.constexpr, DIM: tl.constexpr, HALVES: tl.constexpr):
    """x [ROWS, DIM] as the two tiles of `dim_of`; twice itself where there is one."""
    if HALVES == 1:
        return x, x
    else:
        parts = tl.permute(tl.reshape(x, [ROWS, DIM // UNIT, 2, HALF_UNIT]), [0, 1, 3, 2])
        low, high = tl.split(parts)
        return tl.reshape(low, [ROWS, DIM // 2]), tl.reshape(high, [ROWS, DIM // 2])


@triton.constexpr_function
def bits_of_grid(number_format):
    """Bits of a code of the formats from INT3 on."""
    return number_format - 2


@triton.constexpr_function
def high_bits(number_format):
    """Bits of the first plane of such a format."""
    return 2 if number_format == INT3.value else 4


@triton.constexpr_function
def unit_of(number_format):
    """The factor from a decoded element to its number, beside the scale."""
    if number_format >= INT3.value:
        return float(2 ** (bits_of_grid(number_format) - 1))
    return 256.0 if number_format == FP8.value else 1.0


INT8_PTX = tl.constexpr("""
{
.reg .b32 u, lo, hi, bias;
xor.b32 u, $2, 0x80808080;
prmt.b32 lo, u, 0x64646464, 0x4140;
prmt.b32 hi, u, 0x64646464, 0x4342;
mov.b32 bias, 0x64806480;
sub.f16x2 $0, lo, bias;
sub.f16x2 $1, hi, bias;
}
""")


@triton.jit
def widen_int8(codes, WIDEN: tl.constexpr, PURE: tl.constexpr):
    """uint8 two's complement -> fp16. Packed: code + 128 as the low mantissa byte of 1024, then minus 1152."""
    if WIDEN == PORTABLE:
        return codes.to(tl.int8, bitcast=True).to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            INT8_PTX,
            "=r,=r,r",
            [codes],
            dtype=tl.float16,
            is_pure=PURE,
            pack=4,
        )


FP8_PTX = tl.constexpr("""
{
.reg .b32 high, low, t;
shr.b32 t, $2, 1;
and.b32 t, t, 0x3f3f3f3f;
lop3.b32 high, $2, 0x80808080, t, 0xea;
shl.b32 low, $2, 7;
and.b32 low, low, 0x80808080;
prmt.b32 $0, low, high, 0x5140;
prmt.b32 $1, low, high, 0x7362;
}
""")


@triton.jit
def widen_fp8(codes, WIDEN: tl.constexpr, PURE: tl.constexpr):
    """uint8 e4m3fn -> fp16 of value/256. It needs no e4m3 hardware, and is faster than the hardware's conversion.

    Packed: of all four codes at once, sign, exponent and two mantissa bits become an fp16's high byte, the last
    mantissa bit its low byte.
    """
    if WIDEN == PORTABLE:
        bits = codes.to(tl.uint16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            FP8_PTX,
            "=r,=r,r",
            [codes],
            dtype=tl.float16,
            is_pure=PURE,
            pack=4,
        )


INT4_PTX = tl.constexpr("""
{
.reg .b32 lo, hi, a, b, c, d, coarse, bias, fine, fine_bias;
shl.b32 lo, $4, 1;
lop3.b32 lo, lo, 0x1e1e1e1e, 0x11111111, 0x6a;
lop3.b32 hi, $4, 0xf0f0f0f0, 0x80808080, 0x6a;
prmt.b32 a, lo, 0x64646464, 0x4140;
prmt.b32 b, lo, 0x64646464, 0x4342;
prmt.b32 c, hi, 0x64646464, 0x4140;
prmt.b32 d, hi, 0x64646464, 0x4342;
mov.b32 coarse, 0x2c002c00;
mov.b32 bias, 0xd410d410;
mov.b32 fine, 0x20002000;
mov.b32 fine_bias, 0xc878c878;
fma.rn.f16x2 $0, a, coarse, bias;
fma.rn.f16x2 $1, b, coarse, bias;
fma.rn.f16x2 $2, c, fine, fine_bias;
fma.rn.f16x2 $3, d, fine, fine_bias;
}
""")


@triton.jit
def widen_int4(codes, WIDEN: tl.constexpr, PURE: tl.constexpr):
    """uint8 with two nibbles -> (low, high) fp16 of (code + 1/2)/8.

    Packed: 2 (code + 8) + 1 or 16 (code + 8) in the low bits of the mantissa of 1024; one multiply-add takes bias and
    factor away, exactly.
    """
    if WIDEN == PORTABLE:
        signed = codes.to(tl.int8, bitcast=True)
        low = ((signed << 4).to(tl.int8) >> 4).to(tl.float16) * 0.125 + 0.0625
        return low, (signed >> 4).to(tl.float16) * 0.125 + 0.0625
    else:
        return tl.inline_asm_elementwise(
            INT4_PTX,
            "=r,=r,=r,=r,r",
            [codes],
            dtype=(tl.float16, tl.float16),
            is_pure=PURE,
            pack=4,
        )


@triton.jit
def scale_of_bits(bits):
    """int32 with the bits of an fp16 -> fp16."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


WORD_PTX = tl.constexpr("""
{
.reg .b32 u, lo, hi, bias;
xor.b32 u, $4, 0x80808080;
prmt.b32 lo, u, 0x64646464, 0x4140;
prmt.b32 hi, u, 0x64646464, 0x4342;
mov.b32 bias, 0x64806480;
sub.f16x2 lo, lo, bias;
sub.f16x2 hi, hi, bias;
mov.b32 {$0, $1}, lo;
mov.b32 {$2, $3}, hi;
}
""")


@triton.jit
def widen_words(words, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDEN: tl.constexpr, PURE: tl.constexpr):
    """int32 [ROWS, COLUMNS], four signed bytes each -> fp16 [ROWS, 4 COLUMNS]."""
    if WIDEN == PORTABLE:
        x = (words[:, :, None] >> (8 * tl.arange(0, 4))[None, None, :]).to(tl.int8).to(tl.float16)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            WORD_PTX,
            "=h,=h,=h,=h,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=PURE,
            pack=1,
        )
        x = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(x, [ROWS, 4 * COLUMNS])


@triton.jit
def exp2(x, WIDEN: tl.constexpr):
    """2^x. Results below 2^-126 may be 0, which saves two multiplications for each."""
    if WIDEN == PORTABLE:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def log2_above(x):
    """An integer e with x < 2^e <= 2x for normal x > 0, as fp32: an upper bound of log2(x)."""
    return ((x.to(tl.int32, bitcast=True) >> 23) - 126).to(tl.float32)
