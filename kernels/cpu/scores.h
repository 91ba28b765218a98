// Scores of a tile's keys, from the codes of K.
#pragma once
#include "query.h"
#include "softmax.h"

namespace ISA {

namespace {

// The last bytes of W rows, which may end where the arena ends, copied and filled up with codes of 0.
template <int F> INLINE void copy_tails(const uint8_t* const* rows, int64_t dim, int64_t rest, uint8_t (*tails)[16]) {
    memset(tails, 0, 16 * W);
    for (int i = 0; i < W; ++i) {
        const uint8_t* row = rows[i] + row_bytes(F, dim);
        if (F == INT4)  // a short group, as the beginning of a whole one
            for (int64_t j = 0; j < rest; ++j) {
                const int nibble = j < rest / 2 ? row[j] & 15 : row[j - rest / 2] >> 4;
                tails[i][j % 16] |= (uint8_t)(nibble << (j < 16 ? 0 : 4));
            }
        else memcpy(tails[i], row, row_bytes(F, rest));
    }
}

// 16 bytes of W keys from dim d on (load_dwords).
template <int F> INLINE void load_chunk(const Tile& tile, int64_t key, int64_t d, ints words[4]) {
    const uint8_t* const* rows = tile.k + key;
    if (d + chunk_dims(F) <= tile.k_dim) return load_dwords(rows, row_bytes(F, d), words);
    uint8_t tails[W][16];
    const uint8_t* copies[W];
    copy_tails<F>(rows, d, tile.k_dim - d, tails);
    for (int i = 0; i < W; ++i) copies[i] = tails[i];
    load_dwords(copies, 0, words);
}

// Calls use(d, x) for the dims 0 .. k_pad in order, with x[V] = the decoded elements of V vectors of keys. Beyond k_dim
// they are 0.
template <int F, int V, typename Use>
INLINE void each_dim(const Tile& tile, int64_t key, Use&& use) {
    constexpr int DIMS = chunk_dims(F);
    for (int64_t d = 0; d < tile.k_dim; d += DIMS) {
        ints words[V][4];
        for (int v = 0; v < V; ++v) load_chunk<F>(tile, key + v * W, d, words[v]);
        const auto nibbles = [&]<bool HIGH>() INLINED {
            for (int c = 0; c < 4; ++c) {
                const auto one = [&]<int J>() INLINED {
                    vec x[V];
                    UNROLL for (int v = 0; v < V; ++v) {
                        x[v] = element<F, J, HIGH>(words[v][c]);
                        if (F == INT4) x[v] *= load(tile.k_groups + d / INT4_GROUP * TILE + key + v * W);
                    }
                    use(d + c * dword_dims(F) + J + 16 * HIGH, x);
                };
                one.template operator()<0>();
                if constexpr (dword_dims(F) > 1) one.template operator()<1>();
                if constexpr (dword_dims(F) > 2) one.template operator()<2>(), one.template operator()<3>();
            }
        };
        nibbles.template operator()<false>();
        if constexpr (F == INT4) nibbles.template operator()<true>();
    }
}

// R rows, straight from the codes.
template <int F, int R> void score_few(const Tile& tile, const Query& query, float* scores) {
    for (int64_t key = tile.first / STRIP * STRIP; key < tile.last; key += STRIP) {
        for (int64_t i = key; i < std::min(key + STRIP, tile.num_next); ++i)
            prefetch_row(tile.next_k[i], row_bytes(F, tile.k_dim));
        vec acc[R][2] = {};
        each_dim<F, 2>(tile, key, [&](int64_t d, const vec* x) INLINED {
            UNROLL for (int r = 0; r < R; ++r) {
                const vec q = set1(query.x[r * tile.k_pad + d]);
                UNROLL for (int v = 0; v < 2; ++v) acc[r][v] = fma(q, x[v], acc[r][v]);
            }
        });
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int v = 0; v < 2; ++v) store(scores + r * TILE + key + v * W, acc[r][v]);
    }
}

// Any number of rows, over decoded strips [k_pad][STRIP].
template <int F> void score_many(const Tile& tile, const Query& query, int64_t rows, float* scores, float* strip) {
    for (int64_t key = tile.first / STRIP * STRIP; key < tile.last; key += STRIP) {
        each_dim<F, 2>(tile, key, [&](int64_t d, const vec* x) INLINED {
            store(strip + d * STRIP, x[0]);
            store(strip + d * STRIP + W, x[1]);
        });
        for (int64_t row = 0; row < rows; row += ROWS) {
            const float* q = query.x + row * tile.k_pad;
            vec acc[ROWS][2] = {};
            for (int64_t d = 0; d < tile.k_dim; ++d) {
                const vec a = load(strip + d * STRIP), b = load(strip + d * STRIP + W);
                UNROLL for (int r = 0; r < ROWS; ++r) {
                    const vec x = set1(q[r * tile.k_pad + d]);
                    acc[r][0] = fma(x, a, acc[r][0]);
                    acc[r][1] = fma(x, b, acc[r][1]);
                }
            }
            UNROLL for (int r = 0; r < ROWS; ++r) {
                store(scores + (row + r) * TILE + key, acc[r][0]);
                store(scores + (row + r) * TILE + key + W, acc[r][1]);
            }
        }
    }
}

// int8 codes by integer products, which are exact, so their order does not matter. Four dims of a key lie in a lane.

#if defined(HAS_DOT)
// The scores of R rows with the keys of two vectors; at(d) gives the codes plus 128 of the dims 4d .. 4d + 4 of both.
template <int R, typename At>
INLINE void integer_scores(const Query& query, int64_t row, int64_t k_pad, int64_t k_dim, float* scores, At&& at) {
    const int64_t stride = k_pad / 4;
    const int32_t* digits = query.digits + row * DIGITS * stride;
    ints acc[R][DIGITS][2];
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int n = 0; n < DIGITS; ++n)
            UNROLL for (int v = 0; v < 2; ++v) acc[r][n][v] = ints{} + query.start[(row + r) * DIGITS + n];
    for (int64_t d = 0; 4 * d < k_dim; ++d) {
        const ints* x = at(d);
        const ints a = x[0], b = x[1];
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int n = 0; n < DIGITS; ++n) {
                const ints q = ints{} + digits[(r * DIGITS + n) * stride + d];
                acc[r][n][0] = dot4(acc[r][n][0], a, q);
                acc[r][n][1] = dot4(acc[r][n][1], b, q);
            }
    }
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int v = 0; v < 2; ++v) {
            const vec low = fma(to_float(acc[r][1][v]), set1(256.0f), to_float(acc[r][2][v]));
            const vec all = fma(to_float(acc[r][0][v]), set1(65536.0f), low);
            store(scores + r * TILE + v * W, all * set1(query.unit[row + r]));
        }
}

void score_integer(const Tile& tile, const Query& query, int64_t rows, float* scores, float* strip) {
    ints* codes = (ints*)strip;  // [k_pad / 4][2]
    for (int64_t key = tile.first / STRIP * STRIP; key < tile.last; key += STRIP) {
        for (int64_t i = key; i < std::min(key + STRIP, tile.num_next); ++i) prefetch_row(tile.next_k[i], tile.k_dim);
        for (int64_t d = 0; d < tile.k_dim; d += 16)
            for (int v = 0; v < 2; ++v) {
                ints words[4];
                load_chunk<INT8>(tile, key + v * W, d, words);
                UNROLL for (int c = 0; c < 4; ++c) codes[(d / 4 + c) * 2 + v] = words[c] ^ (int32_t)0x80808080;
            }
        const auto at = [&](int64_t d) INLINED { return codes + 2 * d; };
        int64_t row = 0;
        for (; row + 4 <= rows; row += 4)
            integer_scores<4>(query, row, tile.k_pad, tile.k_dim, scores + row * TILE + key, at);
        float* to = scores + row * TILE + key;
        if (rows - row == 3) integer_scores<3>(query, row, tile.k_pad, tile.k_dim, to, at);
        if (rows - row == 2) integer_scores<2>(query, row, tile.k_pad, tile.k_dim, to, at);
        if (rows - row == 1) integer_scores<1>(query, row, tile.k_pad, tile.k_dim, to, at);
    }
}
#endif

template <int F> void score(const Tile& tile, const Query& query, const Rows& rows, float* strip) {
#if defined(HAS_DOT)
    if constexpr (F == INT8) {
        score_integer(tile, query, rows.count, rows.weights, strip);
        return;
    } else
#endif
    switch (rows.count) {
        case 1: return score_few<F, 1>(tile, query, rows.weights);
        case 2: return score_few<F, 2>(tile, query, rows.weights);
        case 3: return score_few<F, 3>(tile, query, rows.weights);
        case 4: return score_few<F, 4>(tile, query, rows.weights);
        case 5: return score_few<F, 5>(tile, query, rows.weights);
        case 6: return score_few<F, 6>(tile, query, rows.weights);
        case 7: return score_few<F, 7>(tile, query, rows.weights);
        case 8: return score_few<F, 8>(tile, query, rows.weights);
        default: return score_many<F>(tile, query, rows.padded, rows.weights, strip);
    }
}

constexpr void (*SCORE[])(const Tile&, const Query&, const Rows&, float* strip) = {
    score<FP32>, score<FP16>, score<BF16>, score<INT8>, score<E4M3>, score<INT4>,
};

}  // namespace

}  // namespace ISA
