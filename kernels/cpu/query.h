// Rows of the query, as the scores take them.
#pragma once
#include "tile.h"

namespace ISA {

namespace {

constexpr int DIGITS = 3;  // of a query in integer products

// Rows of a query, in the basis of K and times the scale of the scores. With integer products also as fixed-point
// numbers of three signed digits to the base 256: row = unit * (digits[0] * 65536 + digits[1] * 256 + digits[2]), to
// 2^-24 of its largest element.
struct Query {
    float* x;         // [rows][k_pad], zeros beyond k_dim
    int32_t* digits;  // [rows][DIGITS][k_pad / 4], four dims each
    int32_t* start;   // [rows][DIGITS], -128 times the sum of the digits: integer products take codes plus 128
    float* unit;      // [rows]
};

// Rows of a query for one group of K by channel: a score is start + the sum of x times (code + 1/2) in the top byte.
struct Folded {
    float* x;              // [rows][k_pad]
    float* start;          // [rows]
    float *scale, *zero;   // [k_pad], of the group's channels

    void fold(const Query& query, int64_t rows, const uint8_t* channels, int64_t k_dim, int64_t k_pad, float unit) const {
        decode_channels(channels, k_dim, scale, zero);
        for (int64_t row = 0; row < rows; ++row) {
            vec total = {};
            float* to = x + row * k_pad;
            for (int64_t d = 0; d < k_dim; d += W) {
                const vec q = load(query.x + row * k_pad + d) * load(scale + d);
                store(to + d, q * set1(unit));
                total = fma(q, load(zero + d), total);
            }
            for (int64_t d = k_dim; d < k_pad; ++d) to[d] = 0;
            start[row] = reduce_add(total);
        }
    }
};

#if defined(HAS_DOT)
void to_digits(const float* q, int64_t k_pad, const Query& to, int64_t row) {
    constexpr float LARGEST = 127 * (65536 + 256);  // below what three digits hold, rounding included
    vec top = {};
    ints finite = ints{} - 1, total[DIGITS] = {};
    for (int64_t d = 0; d < k_pad; d += W) {
        const vec size = as_float(as_ints(load(q + d)) & 0x7fffffff);
        top = vmax(size, top);
        finite &= size < set1(INFINITY);
    }
    bool good = true;
    for (int i = 0; i < W; ++i) good &= finite[i] != 0;
    const float size = reduce_max(top);
    const vec up = set1(!good || size < 0x1p-100f ? 0 : LARGEST / size);  // a smaller row scores 0
    to.unit[row] = good ? size / LARGEST : NAN;
    uint8_t* digits = (uint8_t*)(to.digits + row * DIGITS * (k_pad / 4));
    for (int64_t d = 0; d < k_pad; d += W) {
        ints x = good ? round(load(q + d) * up) : ints{};
        for (int n = DIGITS - 1; n >= 0; --n) {
            const ints digit = (x << 24) >> 24;
            total[n] += digit;
            store_bytes(digits + n * k_pad + d, digit);
            x = (x - digit) >> 8;
        }
    }
    for (int n = 0; n < DIGITS; ++n) to.start[row * DIGITS + n] = -128 * (int32_t)reduce_add(to_float(total[n]));
}
#endif

// The rows of an item, from a tensor with these strides.
void load_query(const AttentionArgs& a, const Item& item, const void* from, int64_t token_stride, int64_t head_stride,
                int64_t k_pad, const Query& to) {
    const float factor = (float)(a.softcap != 0 ? a.scale / a.softcap : a.scale * M_LOG2E);
    const int64_t group = a.num_q_heads / a.num_kv_heads, count = item.count * group;
    for (int64_t row = 0; row < count; ++row) {
        float* q = to.x + row * k_pad;
        const int64_t head = item.head * group + row % group;
        load_row(from, (item.first + row / group) * token_stride + head * head_stride, a.dtype, a.k_dim, q);
        if (a.k_rotate) rotate(q, a.k_dim, a.k_rotate);
        for (int64_t d = 0; d < a.k_dim; ++d) q[d] *= factor;
        for (int64_t d = a.k_dim; d < k_pad; ++d) q[d] = 0;
#if defined(HAS_DOT)
        if (a.pool.k_format == INT8) to_digits(q, k_pad, to, row);
#endif
    }
}

}  // namespace

}  // namespace ISA
