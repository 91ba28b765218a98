// Formats whose codes lie in planes, with one-byte scales (Kind.GRID and Kind.CHANNEL of quant/formats.py): their bytes,
// and back.
#pragma once
#include "args.h"
#include "simd.h"

namespace ISA {

constexpr int UNIT = 32;  // dims whose codes lie together in a plane; the last unit of a vector may be shorter
constexpr int MAX_GROUP = 128, NUM_SCALES = 6;
constexpr int32_t MIN_BYTE = 0x08, MAX_BYTE = 0xf7, NAN_BYTE = 0xff;  // one-byte scales

// Formats whose codes lie in planes: their bits, and those of the first plane.
INLINE constexpr bool is_grid(int64_t format) { return format >= INT3; }
INLINE constexpr bool by_channel(int64_t format) { return format >= PC3; }
INLINE constexpr int grid_bits(int64_t format) { return (int)(format - (by_channel(format) ? PC3 : INT3)) + 3; }
INLINE constexpr int high_bits(int64_t format) { return grid_bits(format) == 3 ? 2 : 4; }
INLINE constexpr int low_bits(int64_t format) { return grid_bits(format) - high_bits(format); }

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

INLINE float scale_of_byte(int32_t byte) { return from_half((uint16_t)(byte << 7)); }

// One group of a grid format, y [n]: its codes and the byte of its scale, the best of six. width: n, or more where the
// group is the last and short.
inline uint8_t search_group(const float* y, int64_t n, int64_t width, int64_t format, int8_t* codes) {
    uint32_t absmax = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t size = to_bits(y[i]) & 0x7fffffff;
        absmax = size > absmax ? size : absmax;
    }
    if (absmax == 0 || absmax >= 0x7f800000) {
        memset(codes, 0, (size_t)n);
        return absmax ? NAN_BYTE : 0;
    }
    const float limit = (float)(1 << (grid_bits(format) - 1));
    const uint32_t bits = to_bits(from_bits(absmax) / (limit - 0.5f));
    const int32_t nearest = (int32_t)((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (112 << 3);
    const int32_t largest = nearest < MIN_BYTE ? MIN_BYTE : nearest > MAX_BYTE ? MAX_BYTE : nearest;
    alignas(64) float padded[MAX_GROUP];
    const int64_t whole = (n + W - 1) / W * W;
    memcpy(padded, y, 4 * (size_t)n);
    memset(padded + n, 0, 4 * (size_t)(width - n));
    const auto code_of = [&](vec x, vec inverse) INLINED {
        const vec z = x * inverse, low = set1(-limit), high = set1(limit - 1);
        return floor(z < low ? low : z > high ? high : z);
    };
    int32_t best = 0;
    float least = 0;
    for (int step = NUM_SCALES - 1; step >= 0; --step) {
        const int32_t byte = largest - step < MIN_BYTE ? MIN_BYTE : largest - step;
        const vec scale = set1(scale_of_byte(byte)), inverse = set1(1.0f) / scale;
        vec sum[MAX_GROUP / W];
        for (int64_t i = 0; i < whole; i += W) {
            const vec x = load(padded + i), error = x - (code_of(x, inverse) + 0.5f) * scale;
            sum[i / W] = error * error;
            if (i + W > n) sum[i / W] = lane_index() + (int32_t)i < (int32_t)n ? sum[i / W] : vec{};
        }
        for (int64_t i = whole; i < width; i += W) sum[i / W] = vec{};
        for (int64_t half = width / W / 2; half; half /= 2)
            for (int64_t i = 0; i < half; ++i) sum[i] += sum[i + half];
        const float total = reduce_add(sum[0]);
        if (step == NUM_SCALES - 1 || total < least) best = byte, least = total;
    }
    const vec inverse = set1(1.0f) / set1(scale_of_byte(best));
    for (int64_t i = 0; i < whole; i += W) {
        float code[W];
        store(code, code_of(load(padded + i), inverse));
        for (int64_t l = 0; l < W && i + l < n; ++l) codes[i + l] = (int8_t)code[l];
    }
    return (uint8_t)best;
}

// A plane of BITS bits of the codes of a unit, which begin at bit `shift`.
template <int BITS> INLINE void pack_plane(const int8_t* codes, int64_t n, int shift, uint8_t* to) {
    const int64_t bytes = n * BITS / 8;
    for (int64_t k = 0; k < bytes; ++k) {
        uint32_t byte = 0;
        UNROLL for (int i = 0; i < 8 / BITS; ++i)
            byte |= ((uint32_t)codes[k + i * bytes] >> shift & ((1 << BITS) - 1)) << (i * BITS);
        to[k] = (uint8_t)byte;
    }
}

// The codes of dims first .. first + n of a row of `dim`; first is a multiple of UNIT.
inline void pack_codes(const int8_t* codes, int64_t first, int64_t n, int64_t dim, int64_t format, uint8_t* row) {
    const int high = high_bits(format), low = low_bits(format);
    for (int64_t d = 0; d < n; d += UNIT) {
        const int64_t count = n - d < UNIT ? n - d : UNIT;
        uint8_t *to = row + (first + d) * high / 8, *to_low = row + (dim * high + (first + d) * low) / 8;
        if (high == 4) pack_plane<4>(codes + d, count, low, to);
        else pack_plane<2>(codes + d, count, low, to);
        if (low == 2) pack_plane<2>(codes + d, count, 0, to_low);
        else if (low == 1) pack_plane<1>(codes + d, count, 0, to_low);
    }
}

// y [dim] to the codes and scales of a grid format.
inline void encode_grid(const float* y, int64_t dim, int64_t group, int64_t format, uint8_t* codes, uint8_t* scales) {
    int8_t of_group[MAX_GROUP];
    for (int64_t first = 0; first < dim; first += group) {
        const int64_t n = dim - first < group ? dim - first : group;
        *scales++ = search_group(y + first, n, group, format, of_group);
        pack_codes(of_group, first, n, dim, format, codes);
    }
}

// The code of dim j of a grid format.
inline int grid_code(const uint8_t* row, int64_t dim, int64_t j, int64_t format) {
    const int64_t unit = j / UNIT * UNIT, n = dim - unit < UNIT ? dim - unit : UNIT;
    const auto plane = [&](const uint8_t* from, int bits) {
        const int64_t bytes = n * bits / 8, i = j - unit;
        return from[unit * bits / 8 + i % bytes] >> (i / bytes * bits) & ((1 << bits) - 1);
    };
    const int high = high_bits(format), low = low_bits(format);
    const int code = plane(row, high) << low | (low ? plane(row + dim * high / 8, low) : 0);
    return code >= 1 << (grid_bits(format) - 1) ? code - (1 << grid_bits(format)) : code;
}

// Four bytes of `value`.
constexpr int32_t bytes_of(int value) { return (int32_t)(0x01010101u * (uint32_t)value); }

template <int S, typename T> INLINE T shifted(T x) {
    if constexpr (S >= 0) return x << S;
    else return x >> -S;
}

// The dims 4 I .. 4 I + 4 of a unit of every key, as signed bytes (code + 1/2) 2^(8 - bits), from the dwords of its
// planes.
template <int F, int I> INLINE ints grid_word(const ints* high, const ints* low) {
    constexpr int BITS = grid_bits(F), HIGH = high_bits(F), LOW = low_bits(F);
    constexpr int top = 8 - HIGH, below = top - LOW;  // where the planes' bits go
    ints x = shifted<top - I / HIGH * HIGH>(high[I % HIGH]) & bytes_of(((1 << HIGH) - 1) << top);
    if constexpr (LOW > 0) x |= shifted<below - I / LOW * LOW>(low[I % LOW]) & bytes_of(((1 << LOW) - 1) << below);
    return x | bytes_of(1 << (7 - BITS));
}

// Dims 16 u .. 16 u + 16 of a row as signed bytes (code + 1/2) 2^(8 - bits).
template <int F> INLINE words grid_bytes(const uint8_t* row, int64_t dim, int64_t u) {
    constexpr int BITS = grid_bits(F), HIGH = high_bits(F), LOW = low_bits(F);
    const uint32_t half = (uint32_t)(u & 1) * 4;  // the first of the four dwords, of eight in a unit
    const int64_t unit = u / 2;
    const auto plane = [&]<int B>(const uint8_t* from) INLINED {
        words x;
        if constexpr (B == 4) {
            memcpy(&x, from + unit * 16, 16);
            return x >> half & 0x0f0f0f0f;
        } else if constexpr (B == 2) {
            uint64_t pair;
            memcpy(&pair, from + unit * 8, 8);
            typedef uint64_t pairs __attribute__((vector_size(16)));
            return (words)(pairs{pair, pair}) >> (words{0, 0, 2, 2} + half) & 0x03030303;
        } else {
            uint32_t one;
            memcpy(&one, from + unit * 4, 4);
            return (words{} + one) >> (words{0, 1, 2, 3} + half) & 0x01010101;
        }
    };
    words x = plane.template operator()<HIGH>(row) << (8 - HIGH);
    if constexpr (LOW > 0) x |= plane.template operator()<LOW>(row + dim * HIGH / 8) << (8 - BITS);
    return x | (uint32_t)bytes_of(1 << (7 - BITS));
}

}  // namespace ISA
