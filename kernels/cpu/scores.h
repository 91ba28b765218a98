// Scores of a tile's keys, from the codes of K.
#pragma once
#include "query.h"
#include "softmax.h"

namespace ISA {

namespace {

// The last bytes of W rows, which may end where the arena ends, copied and filled up with codes of 0.
template <int F> INLINE void copy_tails(const uint8_t* const* rows, int64_t dim, int64_t rest, uint8_t (*tails)[16]) {
    memset(tails, 0, 16 * W);
    for (int i = 0; i < W; ++i) memcpy(tails[i], rows[i] + row_bytes(F, dim), row_bytes(F, rest));
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

// The planes' dwords of W keys, of the dims d .. d + 2 UNIT. Units that begin beyond the last dim are left as they are.
// A load may pass the end of a row by 12 bytes: the part of the scales, 16 bytes or more, follows the last row.
template <int F> INLINE void load_planes(const Tile& tile, int64_t key, int64_t d, ints high[8], ints low[4]) {
    constexpr int HIGH = high_bits(F), LOW = low_bits(F);
    const uint8_t* const* rows = tile.k + key;
    const int64_t dim = tile.k_dim, rest = dim % UNIT, low_plane = dim * HIGH / 8;
    if (rest == 0 || d + 2 * UNIT <= dim) {
        load_dwords(rows, d * HIGH / 8, high);
        if (HIGH == 4 && d + UNIT < dim) load_dwords(rows, (d + UNIT) * HIGH / 8, high + 4);
        if (LOW) load_dwords(rows, low_plane + d * LOW / 8, low);
        return;
    }
    uint8_t whole[W][UNIT + 16];  // with the short last unit as the beginning of a whole one
    const uint8_t* copies[W];
    for (int i = 0; i < W; ++i) {
        memset(whole[i], 0, sizeof whole[i]);
        copies[i] = whole[i];
        for (int64_t j = 0; j < dim - d; ++j) {
            const int code = grid_code(rows[i], dim, d + j, F);
            const auto put = [&](int64_t start, int bits, int part) {
                const int64_t bytes = UNIT * bits / 8, at = start + j / UNIT * bytes + j % UNIT % bytes;
                whole[i][at] |= (uint8_t)((part & ((1 << bits) - 1)) << (j % UNIT / bytes * bits));
            };
            put(0, HIGH, code >> LOW);
            if (LOW) put(UNIT, LOW, code);
        }
    }
    load_dwords(copies, 0, high);
    if (HIGH == 4) load_dwords(copies, 16, high + 4);
    if (LOW) load_dwords(copies, UNIT, low);
}

// `each_dim` of grid formats.
template <int F, int V, typename Use>
INLINE void each_grid_dim(const Tile& tile, int64_t key, Use&& use) {
    for (int64_t d = 0; d < tile.k_dim; d += 2 * UNIT) {
        ints high[V][8], low[V][4];
        for (int v = 0; v < V; ++v) load_planes<F>(tile, key + v * W, d, high[v], low[v]);
        for (int64_t unit = 0; unit < 2 && d + unit * UNIT < tile.k_dim; ++unit) {
            const int64_t first = d + unit * UNIT;
            vec scale[V];
            if constexpr (!by_channel(F))
                for (int v = 0; v < V; ++v) scale[v] = load(tile.k_groups + first / tile.k_group * TILE + key + v * W);
            const auto four = [&]<int I>() INLINED {
                ints word[V];
                UNROLL for (int v = 0; v < V; ++v)
                    word[v] = grid_word<F, I>(high[v] + unit * high_bits(F), low[v] + unit * low_bits(F));
                const auto one = [&]<int J>() INLINED {
                    vec x[V];
                    UNROLL for (int v = 0; v < V; ++v) {
                        x[v] = to_float(top_byte<J>(word[v]));
                        if constexpr (!by_channel(F)) x[v] *= scale[v];
                    }
                    use(first + 4 * I + J, x);
                };
                one.template operator()<0>(), one.template operator()<1>();
                one.template operator()<2>(), one.template operator()<3>();
            };
            four.template operator()<0>(), four.template operator()<1>(), four.template operator()<2>();
            four.template operator()<3>(), four.template operator()<4>(), four.template operator()<5>();
            four.template operator()<6>(), four.template operator()<7>();
        }
    }
}

// Calls use(d, x) for the dims 0 .. k_pad in order, with x[V] = the decoded elements of V vectors of keys. Beyond k_dim
// they are finite where a key's scales are, and the query is 0. Of K by channel x is the code + 1/2 in the top byte.
template <int F, int V, typename Use>
INLINE void each_dim(const Tile& tile, int64_t key, Use&& use) {
    if constexpr (is_grid(F)) return each_grid_dim<F, V>(tile, key, use);
    constexpr int DIMS = chunk_dims(F);
    for (int64_t d = 0; d < tile.k_dim; d += DIMS) {
        ints words[V][4];
        const bool rest = (F == INT8 || F == E4M3) && d >= tile.rest_from;
        for (int v = 0; v < V; ++v) load_chunk<F>(tile, key + v * W, d, words[v]);
        _Pragma("GCC unroll 1") for (int c = 0; c < 4; ++c) {
            const auto one = [&]<int J>() INLINED {
                vec x[V];
                UNROLL for (int v = 0; v < V; ++v) {
                    x[v] = element<F, J>(words[v][c]);
                    if (rest) x[v] *= load(tile.k_rest + key + v * W);
                }
                use(d + c * dword_dims(F) + J, x);
            };
            one.template operator()<0>();
            if constexpr (dword_dims(F) > 1) one.template operator()<1>();
            if constexpr (dword_dims(F) > 2) one.template operator()<2>(), one.template operator()<3>();
        }
    }
}

// R rows q with a strip's keys, straight from the codes; acc: where the sums begin.
template <int F, int R>
INLINE void score_strip(const Tile& tile, int64_t key, const float* q, vec (*acc)[2], float* scores) {
    each_dim<F, 2>(tile, key, [&](int64_t d, const vec* x) INLINED {
        UNROLL for (int r = 0; r < R; ++r) {
            const vec one = set1(q[r * tile.k_pad + d]);
            UNROLL for (int v = 0; v < 2; ++v) acc[r][v] = fma(one, x[v], acc[r][v]);
        }
    });
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int v = 0; v < 2; ++v) store(scores + r * TILE + key + v * W, acc[r][v]);
}

template <int F, int R> void score_few(const Tile& tile, const Query& query, float* scores) {
    for (int64_t key = tile.first / STRIP * STRIP; key < tile.last; key += STRIP) {
        for (int64_t i = key; i < std::min(key + STRIP, tile.num_next); ++i)
            prefetch_row(tile.next_k[i], row_bytes(F, tile.k_dim));
        vec acc[R][2] = {};
        score_strip<F, R>(tile, key, query.x, acc, scores);
    }
}

// The elements of a strip's keys, decoded: strip[k_pad][STRIP].
template <int F> void decode_strip(const Tile& tile, int64_t key, float* strip) {
    each_dim<F, 2>(tile, key, [&](int64_t d, const vec* x) INLINED {
        store(strip + d * STRIP, x[0]);
        store(strip + d * STRIP + W, x[1]);
    });
}
constexpr void (*DECODE_STRIP[])(const Tile&, int64_t, float*) = {
    decode_strip<FP32>, decode_strip<FP16>, decode_strip<BF16>,
    decode_strip<INT8>, decode_strip<E4M3>,
    decode_strip<INT3>, decode_strip<INT4>, decode_strip<INT5>, decode_strip<INT6>,
};

// R rows of a query with the keys of a strip. start [R]: where the sums begin; null: at 0.
template <int R>
void score_rows(const float* strip, const float* q, const float* start, int64_t k_pad, int64_t k_dim, float* scores) {
    vec acc[R][2] = {};
    if (start)
        UNROLL for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = set1(start[r]);
    for (int64_t d = 0; d < k_dim; ++d) {
        const vec a = load(strip + d * STRIP), b = load(strip + d * STRIP + W);
        UNROLL for (int r = 0; r < R; ++r) {
            const vec x = set1(q[r * k_pad + d]);
            acc[r][0] = fma(x, a, acc[r][0]);
            acc[r][1] = fma(x, b, acc[r][1]);
        }
    }
    UNROLL for (int r = 0; r < R; ++r) {
        store(scores + r * TILE, acc[r][0]);
        store(scores + r * TILE + W, acc[r][1]);
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
    const int64_t share = (STRIP * 16 + tile.k_dim - 1) / tile.k_dim;
    for (int64_t key = tile.first / STRIP * STRIP; key < tile.last; key += STRIP) {
        int64_t next = key;
        for (int64_t d = 0; d < tile.k_dim; d += 16) {
            // Spread out, so that fetching ahead does not hold up the loads of this strip.
            const int64_t until = std::min(next + share, std::min(key + STRIP, tile.num_next));
            for (; next < until; ++next) prefetch_row(tile.next_k[next], tile.k_dim);
            for (int v = 0; v < 2; ++v) {
                ints words[4];
                load_chunk<INT8>(tile, key + v * W, d, words);
                UNROLL for (int c = 0; c < 4; ++c) codes[(d / 4 + c) * 2 + v] = words[c] ^ (int32_t)0x80808080;
            }
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

// K by channel: the query takes the scales and zeros of a group once, for all of its keys.
template <int F>
void score_channels(const Tile& tile, const Query& query, const Folded& folded, const Rows& rows, float* strip) {
    static_assert(CHANNEL_TOKENS % STRIP == 0);
    int64_t group = -1;
    for (int64_t key = tile.first / STRIP * STRIP; key < tile.last; key += STRIP) {
        if (key / CHANNEL_TOKENS != group) {
            group = key / CHANNEL_TOKENS;
            folded.fold(query, rows.count, tile.channels[group], tile.k_dim, tile.k_pad, k_unit(F, false));
        }
        for (int64_t i = key; i < std::min(key + STRIP, tile.num_next); ++i)
            prefetch_row(tile.next_k[i], row_bytes(F, tile.k_dim));
        if (rows.count <= FEW) {
            with_count<FEW>(rows.count, [&]<int R>() INLINED {
                vec acc[R][2];
                UNROLL for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = set1(folded.start[r]);
                score_strip<F, R>(tile, key, folded.x, acc, rows.weights);
            });
            continue;
        }
        decode_strip<F>(tile, key, strip);
        each_rows<ROWS>(rows.count, [&]<int R>(int64_t row) INLINED {
            score_rows<R>(strip, folded.x + row * tile.k_pad, folded.start + row, tile.k_pad, tile.k_dim,
                          rows.weights + row * TILE + key);
        });
    }
}

void score_tile(int64_t format, const Tile& tile, const Query& query, const Folded& folded, const Rows& rows,
                float* strip) {
    if (format == PC3) return score_channels<PC3>(tile, query, folded, rows, strip);
    if (format == PC4) return score_channels<PC4>(tile, query, folded, rows, strip);
    if (format == PC5) return score_channels<PC5>(tile, query, folded, rows, strip);
#if defined(HAS_DOT)
    if (format == INT8 && tile.rest_from == NO_REST)
        return score_integer(tile, query, rows.count, rows.weights, strip);
#endif
    if (rows.count <= FEW) {
        const auto few = [&]<int F>() INLINED {
            with_count<FEW>(rows.count, [&]<int R>() INLINED { score_few<F, R>(tile, query, rows.weights); });
        };
        if (format == INT8) return few.template operator()<INT8>();
        if (format == BF16) return few.template operator()<BF16>();
        if (format == E4M3) return few.template operator()<E4M3>();
        if (format == INT3) return few.template operator()<INT3>();
        if (format == INT4) return few.template operator()<INT4>();
        if (format == INT5) return few.template operator()<INT5>();
        if (format == INT6) return few.template operator()<INT6>();
    }
    for (int64_t key = tile.first / STRIP * STRIP; key < tile.last; key += STRIP) {
        for (int64_t i = key; i < std::min(key + STRIP, tile.num_next); ++i)
            prefetch_row(tile.next_k[i], row_bytes(format, tile.k_dim));
        DECODE_STRIP[format](tile, key, strip);
        each_rows<ROWS>(rows.count, [&]<int R>(int64_t row) INLINED {
            score_rows<R>(strip, query.x + row * tile.k_pad, nullptr, tile.k_pad, tile.k_dim,
                          rows.weights + row * TILE + key);
        });
    }
}

}  // namespace

}  // namespace ISA
