// Weighted sums of a tile's values, from the codes of V.
#pragma once
#include "softmax.h"

namespace ISA {

namespace {

// acc = acc * alpha + weights x V for R rows and the dims of N units from u on, straight from the codes.
template <int F, int R, int N> void sum_units(const Tile& tile, int64_t u, const Rows& rows, float* acc) {
    constexpr int V = F == INT4 ? 2 : 1;
    const int64_t groups = scale_groups(F, tile.v_dim);
    const float* weights = rows.weights;
    vec sum[R][N * V] = {};
    for (int64_t key = tile.first; key < tile.last; ++key) {
        if (key < tile.num_next && u == 0) prefetch_row(tile.next_v[key], row_bytes(F, tile.v_dim));
        vec x[N * V];
        UNROLL for (int n = 0; n < N; ++n)
            load_values<F>(tile.v[key], u + n, F == INT4 ? tile.v_groups + key * groups : nullptr, x + n * V);
        UNROLL for (int r = 0; r < R; ++r) {
            const vec w = set1(weights[r * TILE + key]);
            UNROLL for (int n = 0; n < N * V; ++n) sum[r][n] = fma(w, x[n], sum[r][n]);
        }
    }
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int n = 0; n < N * V; ++n) {
            float* to = acc + r * tile.v_pad + unit_at<F>(u + n / V) + n % V * 16;
            store(to, fma(load(to), set1(rows.alpha[r]), sum[r][n]));
        }
}

template <int F, int R> void sum_few(const Tile& tile, const Rows& rows) {
    constexpr int REGISTERS = W == 16 ? 24 : 12, V = F == INT4 ? 2 : 1;
    constexpr int N = 4 * R <= REGISTERS ? 4 / V : 2 * R <= REGISTERS ? 2 / V : 1;
    const int64_t units = tile.v_dim / unit_dims(F);
    int64_t u = 0;
    for (; u + N <= units; u += N) sum_units<F, R, N>(tile, u, rows, rows.acc);
    for (; u < units; ++u) sum_units<F, R, 1>(tile, u, rows, rows.acc);
}

// Any number of rows, over the decoded tile [TILE][v_pad].
template <int F> void sum_many(const Tile& tile, const Rows& rows, float* values) {
    const int64_t groups = scale_groups(F, tile.v_dim);
    const float* weights = rows.weights;
    for (int64_t key = tile.first; key < tile.last; ++key) {
        float* x = values + key * tile.v_pad;
        decode_values<F>(tile.v[key], F == INT4 ? tile.v_groups + key * groups : nullptr, tile.v_dim, x);
        for (int64_t d = tile.v_dim; d < tile.v_pad; ++d) x[d] = 0;
    }
    for (int64_t d = 0; d < tile.v_pad; d += 2 * W)
        for (int64_t row = 0; row < rows.padded; row += ROWS) {
            vec sum[ROWS][2] = {};
            for (int64_t key = tile.first; key < tile.last; ++key) {
                const vec a = load(values + key * tile.v_pad + d), b = load(values + key * tile.v_pad + d + W);
                UNROLL for (int r = 0; r < ROWS; ++r) {
                    const vec w = set1(weights[(row + r) * TILE + key]);
                    sum[r][0] = fma(w, a, sum[r][0]);
                    sum[r][1] = fma(w, b, sum[r][1]);
                }
            }
            UNROLL for (int r = 0; r < ROWS; ++r)
                UNROLL for (int v = 0; v < 2; ++v) {
                    float* to = rows.acc + (row + r) * tile.v_pad + d + v * W;
                    store(to, fma(load(to), set1(rows.alpha[row + r]), sum[r][v]));
                }
        }
}

template <int F> void sum(const Tile& tile, const Rows& rows, float* values) {
    if (tile.v_dim % (F == INT4 ? INT4_GROUP : W)) return sum_many<F>(tile, rows, values);
    switch (rows.count) {
        case 1: return sum_few<F, 1>(tile, rows);
        case 2: return sum_few<F, 2>(tile, rows);
        case 3: return sum_few<F, 3>(tile, rows);
        case 4: return sum_few<F, 4>(tile, rows);
        case 5: return sum_few<F, 5>(tile, rows);
        case 6: return sum_few<F, 6>(tile, rows);
        case 7: return sum_few<F, 7>(tile, rows);
        case 8: return sum_few<F, 8>(tile, rows);
        default: return sum_many<F>(tile, rows, values);
    }
}

constexpr void (*SUM[])(const Tile&, const Rows&, float* values) = {
    sum<FP32>, sum<FP16>, sum<BF16>, sum<INT8>, sum<E4M3>, sum<INT4>,
};

}  // namespace

}  // namespace ISA
