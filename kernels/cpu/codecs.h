// Stored codes to float and back: the C++ side of quant/codecs.py, which defines the bytes.
#pragma once
#include <cmath>
#include <utility>

#include "args.h"
#include "simd.h"

namespace ISA {

constexpr int INT4_GROUP = 32;  // dims that share a scale; the last group of a vector may be shorter
constexpr float MIN_SCALE = 0x1p-14f, MAX_SCALE = 65504.0f;

INLINE constexpr int64_t row_bytes(int64_t format, int64_t dim) {
    return format == FP32 ? 4 * dim : format == INT4 ? dim / 2 : format == INT8 || format == E4M3 ? dim : 2 * dim;
}
// first: where V lies in K, INT8 and E4M3 have a scale for V's dims and one for the rest.
INLINE constexpr int64_t scale_groups(int64_t format, int64_t dim, int64_t first) {
    if (format == INT4) return (dim + INT4_GROUP - 1) / INT4_GROUP;
    return format == INT8 || format == E4M3 ? 1 + (first < dim) : 0;
}
INLINE constexpr int64_t scale_groups(int64_t format, int64_t dim) { return scale_groups(format, dim, dim); }

INLINE float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
INLINE uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE uint16_t to_bf16(float x) {
    const uint32_t bits = to_bits(x);
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE uint16_t to_half(float x) {
    const uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return 0x7e00;
    if (size >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // from 65520 on
    if (size < 0x38800000)  // below 2^-14: adding 0.5 leaves the subnormal's bits, rounded, at the bottom
        return (uint16_t)(sign | (to_bits(from_bits(size) + 0.5f) - to_bits(0.5f)));
    return (uint16_t)(sign | (((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10)));
}

// Input or output rows of the ops: fp32, fp16 or bf16.
INLINE void load_row(const void* from, int64_t at, int64_t dtype, int64_t dim, float* x) {
    const uint8_t* p = (const uint8_t*)from + at * (dtype == FP32 ? 4 : 2);
    if (dtype == FP32) {
        memcpy(x, p, 4 * dim);
        return;
    }
    int64_t d = 0;
    for (; d + W <= dim; d += W) store(x + d, dtype == BF16 ? load_bf16(p + 2 * d) : load_half(p + 2 * d));
    for (; d < dim; ++d) {
        uint16_t h;
        memcpy(&h, p + 2 * d, 2);
        x[d] = dtype == BF16 ? from_bits((uint32_t)h << 16) : from_half(h);
    }
}

INLINE void store_row(void* to, int64_t at, int64_t dtype, int64_t dim, const float* x) {
    if (dtype == FP32) {
        memcpy((float*)to + at, x, 4 * dim);
        return;
    }
    uint8_t* p = (uint8_t*)to + 2 * at;
    int64_t d = 0;
    if (dtype == BF16)
        for (; d + W <= dim; d += W) {
            typedef uint16_t halves __attribute__((vector_size(2 * W)));
            const vec y = load(x + d);
            const uints bits = (uints)y, nan = (uints)(y != y);
            const halves h = __builtin_convertvector(((bits + 0x7fff + (bits >> 16 & 1)) >> 16 & ~nan) | (nan & 0x7fc0), halves);
            memcpy(p + 2 * d, &h, sizeof h);
        }
    for (; d < dim; ++d) {
        const uint16_t h = dtype == BF16 ? to_bf16(x[d]) : to_half(x[d]);
        memcpy(p + 2 * d, &h, 2);
    }
}

// One stride of the butterfly below a vector's width: lane i meets lane i ^ S.
template <int S, int... I> INLINE vec butterfly(vec x, std::integer_sequence<int, I...>) {
    const vec other = __builtin_shufflevector(x, x, (I ^ S)...);
    return select(ints{(I & S ? -1 : 0)...}, other - x, x + other);
}
template <int S> INLINE vec butterfly(vec x, int64_t n) {
    return S < n ? butterfly<S>(x, std::make_integer_sequence<int, W>()) : x;
}

// quant/rotation.py, in blocks of n dims: strides 1, 2, 4, ..., additions only, then one multiply.
inline void rotate(float* x, int64_t dim, int64_t n) {
    const int64_t whole = dim / W * W;
    if (n == 1) return;
    const float norm = (float)(1.0 / std::sqrt((double)n));
    const auto strides = [&](int64_t stride, int64_t begin, int64_t end) {
        for (; stride < n; stride *= 2)
            for (int64_t first = begin; first < end; first += 2 * stride)
                for (int64_t i = first; i < first + stride; ++i) {
                    const float a = x[i], b = x[i + stride];
                    x[i] = a + b;
                    x[i + stride] = a - b;
                }
    };
    for (int64_t d = 0; d < whole; d += W) {
        vec y = butterfly<2>(butterfly<1>(load(x + d), n), n);
        if constexpr (W > 4) y = butterfly<4>(y, n);
        if constexpr (W > 8) y = butterfly<8>(y, n);
        store(x + d, y);
    }
    strides(W, 0, whole);
    strides(1, whole, dim);
    for (int64_t i = 0; i < dim; ++i) x[i] *= norm;
}

// Encoding.

INLINE int8_t to_int(float z, float low, float high) {
    z = z < low ? low : z > high ? high : z;
    return (int8_t)(int32_t)((z + 12582912.0f) - 12582912.0f);  // 1.5 * 2^23 rounds half to even
}

INLINE uint8_t to_e4m3(float z) {
    z = z < -448.0f ? -448.0f : z > 448.0f ? 448.0f : z;
    const uint32_t bits = to_bits(z), sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    // Below 2^-6 adding 2^14 leaves multiples of 2^-9, rounded, at the bottom of the sum.
    const uint32_t small = to_bits(from_bits(size) + 16384.0f) - to_bits(16384.0f);
    const uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    return (uint8_t)(sign | (size < 0x3c800000 ? small : normal));
}

// One group: its scale, fp16, and y divided by it. A group with a non-finite value gets NaN and zeros.
inline uint16_t scale_group(float* y, int64_t n, float top) {
    uint32_t absmax = 0;  // bits of non-negative floats are ordered like the floats, NaN last
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t size = to_bits(y[i]) & 0x7fffffff;
        absmax = size > absmax ? size : absmax;
    }
    if (absmax >= 0x7f800000) {
        memset(y, 0, 4 * n);
        return 0x7e00;
    }
    float scale = from_bits(absmax) / top;
    scale = scale < MIN_SCALE ? MIN_SCALE : scale > MAX_SCALE ? MAX_SCALE : scale;
    const uint16_t half = to_half(scale);
    scale = from_half(half);
    for (int64_t i = 0; i < n; ++i) y[i] = y[i] / scale;
    return half;
}

// y [dim], overwritten, to its codes and scales; first_group: as `first` of scale_groups.
inline void encode(float* y, int64_t dim, int64_t first_group, int64_t format, uint8_t* codes, uint8_t* scales) {
    if (format <= BF16) {
        store_row(codes, 0, format, dim, y);
        return;
    }
    const int64_t width = format == INT4 ? INT4_GROUP : first_group;
    for (int64_t first = 0; first < dim; first += width, scales += 2) {
        const int64_t n = dim - first < width ? dim - first : width;
        float* z = y + first;
        const uint16_t scale = scale_group(z, n, format == E4M3 ? 448.0f : format == INT4 ? 7.0f : 127.0f);
        memcpy(scales, &scale, 2);
        if (format == E4M3) {
            for (int64_t i = 0; i < n; ++i) codes[first + i] = to_e4m3(z[i]);
        } else if (format == INT8) {
            for (int64_t i = 0; i < n; ++i) codes[first + i] = (uint8_t)to_int(z[i], -127.0f, 127.0f);
        } else {
            uint8_t* group = codes + first / 2;
            for (int64_t i = 0; i < n / 2; ++i)
                group[i] = (uint8_t)((to_int(z[i], -8.0f, 7.0f) & 15) | to_int(z[i + n / 2], -8.0f, 7.0f) << 4);
        }
    }
}

// Decoding K, keys along the lanes. `words` hold 16 bytes of each of W keys (load_dwords).

constexpr int dword_dims(int format) { return format == FP32 ? 1 : format <= BF16 ? 2 : 4; }  // INT4: per nibble
constexpr int chunk_dims(int format) { return format == INT4 ? 32 : 4 * dword_dims(format); }

// What a decoded K code has to be multiplied by, beside its scale. dot: with integer products.
constexpr float k_unit(int64_t format, bool dot) {
#if defined(HAS_DOT)
    if (format == INT8 && dot) return 1.0f;
#endif
    return format == INT8 ? 0x1p-24f : format == INT4 ? 0x1p-28f : 1.0f;
}
// Likewise for V.
constexpr float v_unit(int format) { return format == E4M3 ? E4M3_SCALE : 1.0f; }
constexpr float V_UNIT[] = {v_unit(FP32), v_unit(FP16), v_unit(BF16), v_unit(INT8), v_unit(E4M3), v_unit(INT4)};

// Element J of one dword of every key; for INT4 the low nibble of byte J or the high one.
template <int F, int J, bool HIGH> INLINE vec element(ints word) {
    if constexpr (F == INT8) return to_float(top_byte<J>(word));
    if constexpr (F == E4M3) return e4m3(top_byte<J>(word));
    if constexpr (F == INT4) return to_float(top_byte<J>((HIGH ? word : word << 4) & (int32_t)0xf0f0f0f0));
    if constexpr (F == FP32) return as_float(word);
    if constexpr (F == BF16) return as_float(J ? word & (int32_t)0xffff0000 : word << 16);
    if constexpr (F == FP16) return half_of(J ? word >> 16 : word);
}

// Decoding V, dims along the lanes.

// The number of dims whose codes one call of `load_values` takes; whole vectors only.
constexpr int unit_dims(int format) { return format == INT4 ? 2 * W : W; }

// Unit u of a row: x[0], for INT4 with its scale and x[1], at dims unit_at(u) and, x[1], 16 further on.
template <int F> INLINE void load_values(const uint8_t* row, int64_t u, const float* scales, vec* x) {
    if constexpr (F == INT8) x[0] = to_float(load_bytes(row + u * W));
    if constexpr (F == E4M3) x[0] = load_e4m3(row + u * W);
    if constexpr (F == FP32) x[0] = load((const float*)row + u * W);
    if constexpr (F == FP16) x[0] = load_half(row + 2 * u * W);
    if constexpr (F == BF16) x[0] = load_bf16(row + 2 * u * W);
    if constexpr (F == INT4) {
        const ints bytes = load_bytes(row + u * W);
        const vec scale = set1(scales[u * W / 16]);
        x[0] = to_float((bytes << 28) >> 28) * scale;
        x[1] = to_float(bytes >> 4) * scale;
    }
}
template <int F> INLINE constexpr int64_t unit_at(int64_t u) {
    return F == INT4 ? u * W / 16 * 32 + u * W % 16 : u * W;
}

// A whole row of any dim.
template <int F> INLINE void decode_values(const uint8_t* row, const float* scales, int64_t dim, float* x) {
    const int64_t units = dim / INT4_GROUP * INT4_GROUP / unit_dims(F);
    vec v[2];
    for (int64_t u = 0; u < units; ++u) {
        load_values<F>(row, u, scales, v);
        store(x + unit_at<F>(u), v[0]);
        if (F == INT4) store(x + unit_at<F>(u) + 16, v[1]);
    }
    const int64_t done = units * unit_dims(F), rest = dim - done;
    if (!rest) return;
    if constexpr (F == INT4) {
        for (int64_t i = 0; i < rest / 2; ++i) {
            const int8_t byte = (int8_t)row[done / 2 + i];
            x[done + i] = (float)((int8_t)(uint8_t)(byte << 4) >> 4) * scales[done / INT4_GROUP];
            x[done + rest / 2 + i] = (float)(byte >> 4) * scales[done / INT4_GROUP];
        }
    } else {
        alignas(64) uint8_t tail[4 * INT4_GROUP + 64] = {};  // a vector load may not leave the arena
        memcpy(tail, row + row_bytes(F, done), row_bytes(F, rest));
        alignas(64) float values[INT4_GROUP + W];
        for (int64_t u = 0; u * W < rest; ++u) {
            load_values<F>(tail, u, scales, v);
            store(values + u * W, v[0]);
        }
        memcpy(x + done, values, 4 * rest);
    }
}

}  // namespace ISA
