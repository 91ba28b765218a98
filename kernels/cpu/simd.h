// One vector type for three instruction sets. Everything here is compiled once per set, in its own namespace.
//
// Arithmetic uses the compiler's vector extensions; intrinsics stand where it would not find the instruction. Sources
// are compiled without contraction, so a fused multiply-add is where `fma` is written and nowhere else.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define ISA avx512
#elif defined(__AVX2__)
#define ISA avx2
#else
#define ISA portable
#endif
#define INLINE inline __attribute__((always_inline))
#define INLINED __attribute__((always_inline))  // for lambdas: what they capture stays in registers
#define UNROLL _Pragma("GCC unroll 32")         // likewise for the arrays of a loop

namespace ISA {

#if defined(__AVX512F__)
constexpr int W = 16;  // lanes
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
typedef float vec __attribute__((vector_size(4 * W)));
typedef int32_t ints __attribute__((vector_size(4 * W)));
typedef uint32_t uints __attribute__((vector_size(4 * W)));
typedef float vec_u __attribute__((vector_size(4 * W), aligned(4), may_alias));

INLINE vec set1(float x) { return x - vec{}; }
INLINE vec load(const float* p) { return *(const vec_u*)p; }
INLINE void store(float* p, vec x) { *(vec_u*)p = x; }
INLINE vec select(ints mask, vec a, vec b) { return mask ? a : b; }
INLINE vec vmax(vec a, vec b) { return a > b ? a : b; }  // b where either is NaN
INLINE vec to_float(ints x) { return __builtin_convertvector(x, vec); }
INLINE vec as_float(ints x) { return (vec)x; }
INLINE ints as_ints(vec x) { return (ints)x; }

INLINE vec fma(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

#if defined(__AVX512VNNI__)
#define HAS_DOT
INLINE ints round(vec x) { return (ints)_mm512_cvtps_epi32(x); }
INLINE void store_bytes(uint8_t* p, ints x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x)); }
// c plus, in every lane, the sum of four unsigned bytes of a times signed bytes of b.
INLINE ints dot4(ints c, ints a, ints b) { return (ints)_mm512_dpbusd_epi32((__m512i)c, (__m512i)a, (__m512i)b); }
#endif

INLINE ints lane_index() {
    ints x;
    for (int i = 0; i < W; ++i) x[i] = i;
    return x;
}

INLINE float reduce_add(vec x) {
    float lanes[W];
    store(lanes, x);
    for (int n = W / 2; n; n /= 2)
        for (int i = 0; i < n; ++i) lanes[i] += lanes[i + n];
    return lanes[0];
}

INLINE float reduce_max(vec x) {
    float lanes[W];
    store(lanes, x);
    for (int n = W / 2; n; n /= 2)
        for (int i = 0; i < n; ++i) lanes[i] = lanes[i] > lanes[i + n] ? lanes[i] : lanes[i + n];
    return lanes[0];
}

// 2^x for x <= 0; exactly 0 below 2^-126, so that no denormal is ever multiplied. NaN stays NaN. Relative error 1e-7:
// Taylor's polynomial of degree 7 of 2^f around 0, |f| <= 1/2.
INLINE vec exp2(vec x) {
    const vec magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const ints tiny = x < set1(-126.0f);
    x = tiny ? set1(-126.0f) : x;
    const vec shifted = x + magic;
    const vec f = x - (shifted - magic);
    vec p = set1(1.5252734e-5f);
    UNROLL for (float c : {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
        p = fma(p, f, set1(c));
    p = as_float(as_ints(p) + ((as_ints(shifted) - as_ints(magic)) << 23));
    return tiny ? vec{} : p;
}

INLINE float exp2(float x) { return exp2(set1(x))[0]; }

// tanh by 1 - 2 / (e^2|x| + 1), and near 0 by the rational-free polynomial of Cephes' tanhf (netlib.org/cephes).
INLINE vec tanh(vec x) {
    const vec size = as_float(as_ints(x) & 0x7fffffff);
    const vec z = x * x;
    vec p = set1(-5.70498872745e-3f);
    UNROLL for (float c : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f})
        p = fma(p, z, set1(c));
    const vec near = fma(p * z, x, x);
    const vec e = exp2(size * set1(-2.8853901f));  // e^-2|x|
    vec far = (set1(1.0f) - e) / (set1(1.0f) + e);
    far = as_float(as_ints(far) | (as_ints(x) & INT32_MIN));
    return size < set1(0.625f) ? near : far;
}

// Numbers of fewer bits.

INLINE float from_half(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, size = h & 0x7fff;
    uint32_t bits;
    if (size >= 0x7c00) bits = 0x7f800000 | (size & 0x3ff) << 13;
    else if (size >= 0x400) bits = (size << 13) + (112u << 23);
    else {
        const float subnormal = (float)size * 0x1p-24f;
        memcpy(&bits, &subnormal, 4);
    }
    bits |= sign;
    float x;
    memcpy(&x, &bits, 4);
    return x;
#endif
}

INLINE vec load_half(const uint8_t* p) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    vec x;
    for (int i = 0; i < W; ++i) {
        uint16_t h;
        memcpy(&h, p + 2 * i, 2);
        x[i] = from_half(h);
    }
    return x;
#endif
}

// The lower 16 bits of each lane as fp16.
INLINE vec half_of(ints x) {
    alignas(64) uint16_t half[W];
#if defined(__AVX512F__)
    _mm256_store_si256((__m256i*)half, _mm512_cvtepi32_epi16((__m512i)x));
#else
    for (int i = 0; i < W; ++i) half[i] = (uint16_t)x[i];
#endif
    return load_half((const uint8_t*)half);
}

INLINE vec load_bf16(const uint8_t* p) {
#if defined(__AVX512F__)
    return as_float((ints)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
#elif defined(__AVX2__)
    return as_float((ints)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
#else
    ints x;
    for (int i = 0; i < W; ++i) {
        uint16_t h;
        memcpy(&h, p + 2 * i, 2);
        x[i] = (int32_t)((uint32_t)h << 16);
    }
    return as_float(x);
#endif
}

// W signed bytes, widened.
INLINE ints load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    ints x;
    for (int i = 0; i < W; ++i) x[i] = (int8_t)p[i];
    return x;
#endif
}

// 16 signed bytes, widened.
typedef uint32_t words __attribute__((vector_size(16)));
INLINE void widen_bytes(words x, ints out[16 / W]) {
#if defined(__AVX512F__)
    out[0] = (ints)_mm512_cvtepi8_epi32((__m128i)x);
#elif defined(__AVX2__)
    out[0] = (ints)_mm256_cvtepi8_epi32((__m128i)x);
    out[1] = (ints)_mm256_cvtepi8_epi32(_mm_unpackhi_epi64((__m128i)x, (__m128i)x));
#else
    int8_t bytes[16];
    memcpy(bytes, &x, 16);
    for (int i = 0; i < 16; ++i) out[i / W][i % W] = bytes[i];
#endif
}

// The largest integer that is not above x, as a float; |x| < 2^31.
INLINE vec floor(vec x) {
    const vec near = to_float(__builtin_convertvector(x, ints));
    return near - (near > x ? set1(1.0f) : vec{});
}

// The e4m3 code in the top byte of each lane (the rest 0), decoded. The bits are those of a float with the exponent 120
// too small; codes without a leading 1 take a detour over 1.mmm - 1, so that no denormal float is ever touched.
INLINE vec e4m3(ints top) {
    const ints size = (ints)((top >> 4) & 0x07f00000);
    const ints small = size < (1 << 23);
    const vec normal = as_float(size + (120 << 23));
    const vec shifted = as_float(size + (121 << 23)) - set1(0x1p-6f);
    return as_float(as_ints(small ? shifted : normal) | (top & INT32_MIN));
}

// W e4m3 codes times 2^-E4M3_SHIFT.
constexpr float E4M3_SCALE = 256.0f;
INLINE vec load_e4m3(const uint8_t* p) {
#if defined(__AVX512F__)  // read as fp16 they are too small by 2^8, denormals included
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
    return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbf80)));
#elif defined(__AVX2__)
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
    return _mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbf80)));
#else
    return e4m3(load_bytes(p) << 24) * set1(1 / E4M3_SCALE);
#endif
}

// Byte B of each lane moved to the top, zeros below.
template <int B> INLINE ints top_byte(ints x) {
    if constexpr (B == 0) return x << 24;
    if constexpr (B == 3) return x & (int32_t)0xff000000;
#if defined(__AVX512F__)
    const __m512i index = _mm512_set1_epi32((int)0x80808080 & 0x00ffffff);
    const __m512i order = _mm512_or_si512(index, _mm512_set4_epi32((12 + B) << 24, (8 + B) << 24, (4 + B) << 24, B << 24));
    return (ints)_mm512_shuffle_epi8((__m512i)x, order);
#elif defined(__AVX2__)
    const __m256i order = _mm256_setr_epi32(0x808080 | B << 24, 0x808080 | (4 + B) << 24, 0x808080 | (8 + B) << 24,
        0x808080 | (12 + B) << 24, 0x808080 | B << 24, 0x808080 | (4 + B) << 24, 0x808080 | (8 + B) << 24,
        0x808080 | (12 + B) << 24);
    return (ints)_mm256_shuffle_epi8((__m256i)x, order);
#else
    return (x << (24 - 8 * B)) & (int32_t)0xff000000;
#endif
}

// 16 bytes at `offset` of W rows, turned: out[c] holds dword c of every row, one row per lane.
INLINE void load_dwords(const uint8_t* const* rows, int64_t offset, ints out[4]) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    __m512i x[4];
    for (int r = 0; r < 4; ++r) {
        const auto at = [&](int row) { return _mm_loadu_si128((const __m128i*)(rows[row] + offset)); };
        x[r] = _mm512_castsi128_si512(at(r));
        x[r] = _mm512_mask_broadcast_i32x4(x[r], 0x00f0, at(4 + r));
        x[r] = _mm512_mask_broadcast_i32x4(x[r], 0x0f00, at(8 + r));
        x[r] = _mm512_mask_broadcast_i32x4(x[r], 0xf000, at(12 + r));
    }
#define P(op) _mm512_##op
#else
    __m256i x[4];
    for (int r = 0; r < 4; ++r)
        x[r] = _mm256_loadu2_m128i((const __m128i*)(rows[4 + r] + offset), (const __m128i*)(rows[r] + offset));
#define P(op) _mm256_##op
#endif
    const auto a = P(unpacklo_epi32)(x[0], x[1]), b = P(unpackhi_epi32)(x[0], x[1]);
    const auto c = P(unpacklo_epi32)(x[2], x[3]), d = P(unpackhi_epi32)(x[2], x[3]);
    out[0] = (ints)P(unpacklo_epi64)(a, c);
    out[1] = (ints)P(unpackhi_epi64)(a, c);
    out[2] = (ints)P(unpacklo_epi64)(b, d);
    out[3] = (ints)P(unpackhi_epi64)(b, d);
#undef P
#else
    for (int i = 0; i < W; ++i)
        for (int c = 0; c < 4; ++c) {
            int32_t word;
            memcpy(&word, rows[i] + offset + 4 * c, 4);
            out[c][i] = word;
        }
#endif
}

}  // namespace ISA
