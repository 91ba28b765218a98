// Stored codes to float and back: the C++ side of quant/codecs.py, which defines the bytes.
#pragma once
#include <cmath>
#include <utility>

#include "grid.h"
#include "signs.h"

namespace ISA {

constexpr float MIN_SCALE = 0x1p-14f, MAX_SCALE = 65504.0f;

INLINE constexpr int64_t row_bytes(int64_t format, int64_t dim) {
    if (is_grid(format)) return dim * grid_bits(format) / 8;
    return format == FP32 ? 4 * dim : format == INT8 || format == E4M3 ? dim : 2 * dim;
}
// group: dims that share a scale.
INLINE constexpr int64_t scale_groups(int64_t format, int64_t dim, int64_t group) {
    return format <= BF16 ? 0 : (dim + group - 1) / group;
}
INLINE constexpr int64_t scale_bytes(int64_t format) { return is_grid(format) ? 1 : 2; }

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
inline void hadamard(float* x, int64_t dim, int64_t n) {
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

inline void apply_signs(float* x, int64_t dim) {
    for (int64_t first = 0; first < dim; first += SIGN_PERIOD) {
        const int64_t n = dim - first < SIGN_PERIOD ? dim - first : SIGN_PERIOD;
        for (int64_t i = 0; i < n; ++i) x[first + i] = from_bits(to_bits(x[first + i]) ^ SIGNS.bits[i]);
    }
}
inline void rotate(float* x, int64_t dim, int64_t n) {
    apply_signs(x, dim);
    hadamard(x, dim, n);
}
inline void rotate_back(float* x, int64_t dim, int64_t n) {
    hadamard(x, dim, n);
    apply_signs(x, dim);
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

// y [dim], overwritten, to its codes and scales. group: dims that share a scale.
inline void encode(float* y, int64_t dim, int64_t group, int64_t format, uint8_t* codes, uint8_t* scales) {
    if (format <= BF16) {
        store_row(codes, 0, format, dim, y);
        return;
    }
    if (is_grid(format)) return encode_grid(y, dim, group, format, codes, scales);
    for (int64_t first = 0; first < dim; first += group, scales += 2) {
        const int64_t n = dim - first < group ? dim - first : group;
        float* z = y + first;
        const uint16_t scale = scale_group(z, n, format == E4M3 ? 448.0f : 127.0f);
        memcpy(scales, &scale, 2);
        if (format == E4M3)
            for (int64_t i = 0; i < n; ++i) codes[first + i] = to_e4m3(z[i]);
        else
            for (int64_t i = 0; i < n; ++i) codes[first + i] = (uint8_t)to_int(z[i], -127.0f, 127.0f);
    }
}

// Decoding K, keys along the lanes. `words` hold 16 bytes of each of W keys (load_dwords).

constexpr int dword_dims(int format) { return format == FP32 ? 1 : format <= BF16 ? 2 : 4; }
constexpr int chunk_dims(int format) { return 4 * dword_dims(format); }

// What a decoded K code has to be multiplied by, beside its scale. dot: with integer products.
constexpr float k_unit(int64_t format, bool dot) {
#if defined(HAS_DOT)
    if (format == INT8 && dot) return 1.0f;
#endif
    return format == INT8 ? 0x1p-24f : is_grid(format) ? 0x1p-32f * (float)(1 << grid_bits(format)) : 1.0f;
}
// Likewise for V.
constexpr float v_unit(int64_t format) {
    return format == E4M3 ? E4M3_SCALE : is_grid(format) ? 0x1p-8f * (float)(1 << grid_bits(format)) : 1.0f;
}

// Element J of one dword of every key.
template <int F, int J> INLINE vec element(ints word) {
    if constexpr (F == INT8) return to_float(top_byte<J>(word));
    if constexpr (F == E4M3) return e4m3(top_byte<J>(word));
    if constexpr (F == FP32) return as_float(word);
    if constexpr (F == BF16) return as_float(J ? word & (int32_t)0xffff0000 : word << 16);
    if constexpr (F == FP16) return half_of(J ? word >> 16 : word);
}

// Decoding V, dims along the lanes.

// The number of dims whose codes one call of `load_values` takes, and of the vectors it gives.
constexpr int unit_dims(int format) { return is_grid(format) ? 16 : W; }
constexpr int unit_vectors(int format) { return unit_dims(format) / W; }

// Unit u of a row of `dim` dims; of grid formats with the scales, one for each `group` dims.
template <int F>
INLINE void load_values(const uint8_t* row, int64_t dim, int64_t u, const float* scales, int64_t group, vec* x) {
    if constexpr (F == INT8) x[0] = to_float(load_bytes(row + u * W));
    if constexpr (F == E4M3) x[0] = load_e4m3(row + u * W);
    if constexpr (F == FP32) x[0] = load((const float*)row + u * W);
    if constexpr (F == FP16) x[0] = load_half(row + 2 * u * W);
    if constexpr (F == BF16) x[0] = load_bf16(row + 2 * u * W);
    if constexpr (is_grid(F)) {
        ints bytes[16 / W];
        widen_bytes(grid_bytes<F>(row, dim, u), bytes);
        const vec scale = set1(scales[u * 16 / group]);
        UNROLL for (int i = 0; i < 16 / W; ++i) x[i] = to_float(bytes[i]) * scale;
    }
}

// A whole row of any dim.
template <int F>
INLINE void decode_values(const uint8_t* row, const float* scales, int64_t group, int64_t dim, float* x) {
    const int64_t units = dim / UNIT * UNIT / unit_dims(F);
    vec v[unit_vectors(F)];
    for (int64_t u = 0; u < units; ++u) {
        load_values<F>(row, dim, u, scales, group, v);
        UNROLL for (int i = 0; i < unit_vectors(F); ++i) store(x + u * unit_dims(F) + i * W, v[i]);
    }
    const int64_t done = units * unit_dims(F), rest = dim - done;
    if (!rest) return;
    if constexpr (is_grid(F)) {
        const float step = 1 / v_unit(F);
        for (int64_t d = done; d < dim; ++d)
            x[d] = ((float)grid_code(row, dim, d, F) + 0.5f) * step * scales[d / group];
    } else {
        alignas(64) uint8_t tail[4 * UNIT + 64] = {};  // a vector load may not leave the arena
        memcpy(tail, row + row_bytes(F, done), row_bytes(F, rest));
        alignas(64) float values[UNIT + W];
        for (int64_t u = 0; u * W < rest; ++u) {
            load_values<F>(tail, rest, u, scales, group, v);
            store(values + u * W, v[0]);
        }
        memcpy(x + done, values, 4 * rest);
    }
}

}  // namespace ISA
