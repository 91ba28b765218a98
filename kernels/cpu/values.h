// Weighted sums of a tile's values, from the codes of V.
#pragma once
#include "softmax.h"

namespace ISA {

namespace {

// Rows for which a code is decoded once: where that costs little, it is done again for more.
constexpr int CHEAP = FEW < 4 ? FEW : 4, DEAR = W == 16 ? FEW : CHEAP;

// total[R][v_pad] = weights x V for R rows from `row` on, straight from the codes; false where the dims do not fit.
template <int F, int R> bool sum_few(const Tile& tile, const Rows& rows, int64_t row, float* total) {
    constexpr int V = unit_vectors(F), HELD = 4 * R <= (W == 16 ? 16 : 12) ? 4 : 2;  // what the registers hold
    constexpr int N = V < HELD ? HELD / V : 1;
    const int64_t groups = scale_groups(F, tile.v_dim, tile.v_group), units = tile.v_dim / unit_dims(F);
    if (units < N || tile.v_dim % (is_grid(F) ? UNIT : W)) return false;
    const float* weights = rows.weights + row * TILE;
    total += row * tile.v_pad;
    for (int64_t begin = 0; begin < units; begin += N) {
        const int64_t u = std::min(begin, units - N);  // the last ones may be done twice
        vec sum[R][N * V] = {};
        for (int64_t key = tile.first; key < tile.last; ++key) {
            if (key < tile.num_next && u == 0 && row == 0) prefetch_row(tile.next_v[key], row_bytes(F, tile.v_dim));
            vec x[N * V];
            UNROLL for (int n = 0; n < N; ++n)
                load_values<F>(tile.v[key], tile.v_dim, u + n, tile.v_groups + key * groups, tile.v_group, x + n * V);
            UNROLL for (int r = 0; r < R; ++r) {
                const vec w = set1(weights[r * TILE + key]);
                UNROLL for (int n = 0; n < N * V; ++n) sum[r][n] = fma(w, x[n], sum[r][n]);
            }
        }
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int n = 0; n < N * V; ++n)
                store(total + r * tile.v_pad + u * unit_dims(F) + n * W, sum[r][n]);
    }
    return true;
}

// The keys first .. last, decoded: values[key - first][v_pad].
template <int F> void decode_keys(const Tile& tile, int64_t first, int64_t last, float* values) {
    const int64_t groups = scale_groups(F, tile.v_dim, tile.v_group);
    for (int64_t key = first; key < last; ++key, values += tile.v_pad) {
        if (key < tile.num_next) prefetch_row(tile.next_v[key], row_bytes(F, tile.v_dim));
        decode_values<F>(tile.v[key], tile.v_groups + key * groups, tile.v_group, tile.v_dim, values);
        for (int64_t d = tile.v_dim; d < tile.v_pad; ++d) values[d] = 0;
    }
}
constexpr void (*DECODE_KEYS[])(const Tile&, int64_t, int64_t, float*) = {
    decode_keys<FP32>, decode_keys<FP16>, decode_keys<BF16>, decode_keys<INT8>, decode_keys<E4M3>,
    decode_keys<INT3>, decode_keys<INT4>, decode_keys<INT5>, decode_keys<INT6>,
};

// total[R][v_pad] += weights[R][TILE] x values[count][v_pad] for the dims of N vectors.
template <int R, int N>
INLINE void sum_dims(const float* values, int64_t count, const float* weights, int64_t v_pad, bool begin, float* total) {
    vec sum[R][N] = {};
    if (!begin)
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int n = 0; n < N; ++n) sum[r][n] = load(total + r * v_pad + n * W);
    for (int64_t key = 0; key < count; ++key, values += v_pad) {
        vec x[N];
        UNROLL for (int n = 0; n < N; ++n) x[n] = load(values + n * W);
        UNROLL for (int r = 0; r < R; ++r) {
            const vec w = set1(weights[r * TILE + key]);
            UNROLL for (int n = 0; n < N; ++n) sum[r][n] = fma(w, x[n], sum[r][n]);
        }
    }
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int n = 0; n < N; ++n) store(total + r * v_pad + n * W, sum[r][n]);
}

// Likewise for `dims` dims, a multiple of 2 W.
template <int R>
void sum_rows(const float* values, int64_t count, const float* weights, int64_t v_pad, int64_t dims, bool begin,
              float* total) {
    int64_t d = 0;
    if constexpr (R <= 2)  // too few chains to keep the multipliers busy
        for (; d + 4 * W <= dims; d += 4 * W) sum_dims<R, 4>(values + d, count, weights, v_pad, begin, total + d);
    for (; d < dims; d += 2 * W) sum_dims<R, 2>(values + d, count, weights, v_pad, begin, total + d);
}

// total[rows][v_pad] = weights x V, over decoded keys: for few rows as many at a time as stay in the first cache. For
// more rows their dims in parts that stay there while every row takes them.
void sum_decoded(int64_t format, const Tile& tile, const Rows& rows, float* values, float* total) {
    const int64_t step = rows.count <= DECODE_ROWS ? 16 : TILE;
    for (int64_t key = tile.first; key < tile.last; key += step) {
        const int64_t last = std::min(key + step, tile.last);
        DECODE_KEYS[format](tile, key, last, values);
        for (int64_t d = 0; d < tile.v_pad; d += 4 * W) {
            const int64_t dims = std::min<int64_t>(4 * W, tile.v_pad - d);
            each_rows<ROWS>(rows.count, [&]<int R>(int64_t row) INLINED {
                sum_rows<R>(values + d, last - key, rows.weights + row * TILE + key, tile.v_pad, dims,
                            key == tile.first, total + row * tile.v_pad + d);
            });
        }
    }
}

// acc = acc * alpha + weights x V.
void sum_tile(int64_t format, const Tile& tile, const Rows& rows, float* values, float* total) {
    bool done = false;
    if (rows.count <= FEW) {
        const auto few = [&]<int F, int AT_ONCE>() INLINED {
            each_rows<AT_ONCE>(rows.count, [&]<int R>(int64_t row) INLINED { done = sum_few<F, R>(tile, rows, row, total); });
        };
        if (format == BF16) few.template operator()<BF16, CHEAP>();
        if (format == INT8) few.template operator()<INT8, CHEAP>();
        if (format == E4M3) few.template operator()<E4M3, DEAR>();
        if (format == INT3) few.template operator()<INT3, DEAR>();
        if (format == INT4) few.template operator()<INT4, DEAR>();
        if (format == INT5) few.template operator()<INT5, DEAR>();
        if (format == INT6) few.template operator()<INT6, DEAR>();
    }
    if (!done) sum_decoded(format, tile, rows, values, total);
    for (int64_t row = 0; row < rows.count; ++row)
        for (int64_t d = row * tile.v_pad; d < row * tile.v_pad + tile.v_dim; d += W)
            store(rows.acc + d, fma(load(rows.acc + d), set1(rows.alpha[row]), load(total + d)));
}

}  // namespace

}  // namespace ISA
