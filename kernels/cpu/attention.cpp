// paged_attention: fused decode of the blocks and attention, for prefill and decode alike.
//
// A row (query token x head) gives the same bits whatever else the call holds, and on any number of threads:
// - Keys are cut at fixed positions into splits of SPLIT keys, each with a softmax state of its own; the states are
//   merged in ascending order. Who computes a split, and how many rows beside, changes nothing.
// - Within a split keys come in tiles at multiples of TILE (online softmax, arXiv:1805.02867). A score is one chain of
//   multiply-adds over the dims in order, a tile's weighted sum of V one chain over its keys in order. The two ways to
//   compute these chains, from codes in registers for few rows and over decoded tiles for many, order them alike.
// - What a row does not see gets the weight 0, and its K is never looked at.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "codecs.h"

namespace ISA {

namespace {

constexpr int64_t TILE = 128, SPLIT = 512;  // keys
constexpr int64_t STRIP = 2 * W;            // keys that are decoded together
constexpr int64_t FEW = 8;                  // so many rows are attended from registers
constexpr int64_t ROWS = W == 16 ? 8 : 4;   // rows of one product over decoded tiles
constexpr int64_t ITEM_ROWS = 96;           // rows for which a tile is decoded once
constexpr int64_t PARTIAL_BYTES = 4 << 20;  // for the states of splits that other threads compute
constexpr int DIGITS = 3;                    // of a query in integer products
constexpr float NOTHING = -INFINITY;

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// The keys of a tile and how to read them. Keys that no row sees point to a row of zeros.
struct Tile {
    int64_t first, last;  // the keys first .. last of the tile are seen by some row
    int64_t k_dim, k_pad, v_dim, v_pad;
    const uint8_t *k[TILE], *v[TILE];
    alignas(64) float k_scale[TILE], v_scale[TILE];  // INT4: 1
    float *k_groups, *v_groups;                      // INT4: [groups][TILE] and [TILE][groups]
    const uint8_t* zeros;
    // Of the next tile, fetched meanwhile.
    const uint8_t *next_k[TILE], *next_v[TILE];
    int64_t num_next;
};

INLINE void prefetch_row(const uint8_t* row, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
}

// Rows of a query, in the basis of K and times the scale of the scores. With integer products also as fixed-point
// numbers of three signed digits to the base 256: row = unit * (digits[0] * 65536 + digits[1] * 256 + digits[2]), to
// 2^-24 of its largest element.
struct Query {
    float* x;         // [padded][k_pad], zeros beyond k_dim
    int32_t* digits;  // [padded][DIGITS][k_pad / 4], four dims each
    int32_t* start;   // [padded][DIGITS], -128 times the sum of the digits: integer products take codes plus 128
    float* unit;      // [padded]
};

// Rows with their state.
struct Rows {
    int64_t count, padded;  // padded to a multiple of ROWS
    float* weights;                // [padded][TILE]: scores, then probabilities times the scale of V
    float *max, *sum, *acc;        // of this split: [padded], [padded], [padded][v_pad]
    float* alpha;                  // [padded], what the tile multiplies acc by
};

// ---- Scores -------------------------------------------------------------------------------------------------------

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

// ---- Weighted sums of V -------------------------------------------------------------------------------------------

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

// ---- One format, any number of rows -------------------------------------------------------------------------------

struct Format {
    void (*score)(const Tile&, const Query&, const Rows&, float* strip);
    void (*sum)(const Tile&, const Rows&, float* values);
};

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

constexpr Format FORMATS[] = {
    {score<FP32>, sum<FP32>}, {score<FP16>, sum<FP16>}, {score<BF16>, sum<BF16>},
    {score<INT8>, sum<INT8>}, {score<E4M3>, sum<E4M3>}, {score<INT4>, sum<INT4>},
};
constexpr float K_UNIT[] = {k_unit(FP32), k_unit(FP16), k_unit(BF16), k_unit(INT8), k_unit(E4M3), k_unit(INT4)};
constexpr float V_UNIT[] = {v_unit(FP32), v_unit(FP16), v_unit(BF16), v_unit(INT8), v_unit(E4M3), v_unit(INT4)};

// ---- Softmax ------------------------------------------------------------------------------------------------------

// Scores of one row to weights, over the keys first .. last that it sees (none: all weights are 0).
INLINE void softmax(const Tile& tile, Rows& rows, int64_t row, int64_t first, int64_t last, float cap) {
    float* weights = rows.weights + row * TILE;
    const int64_t begin = tile.first / STRIP * STRIP, end = round_up(tile.last, STRIP);
    rows.alpha[row] = 1;
    if (first >= last) {
        for (int64_t key = begin; key < end; key += W) store(weights + key, vec{});
        return;
    }
    const int64_t from = first / W * W, to = round_up(last, W);
    vec top = set1(NOTHING);
    for (int64_t key = from; key < to; key += W) {
        vec x = load(weights + key) * load(tile.k_scale + key);
        if (cap != 0) x = tanh(x) * set1(cap);
        if (key < first || key + W > last) {
            const ints index = lane_index() + (int32_t)key;
            x = select((index >= (int32_t)first) & (index < (int32_t)last), x, set1(NOTHING));
        }
        store(weights + key, x);
        top = vmax(x, top);
    }
    const float old = rows.max[row], most = std::max(old, reduce_max(top)), base = most == NOTHING ? 0 : most;
    vec total = {};
    for (int64_t key = begin; key < from; key += W) store(weights + key, vec{});
    for (int64_t key = from; key < to; key += W) {
        const vec p = exp2(load(weights + key) - set1(base));
        total += p;
        vec w = p * load(tile.v_scale + key);
        if (key < first || key + W > last) {  // an unseen scale may be NaN
            const ints index = lane_index() + (int32_t)key;
            w = select((index >= (int32_t)first) & (index < (int32_t)last), w, vec{});
        }
        store(weights + key, w);
    }
    for (int64_t key = to; key < end; key += W) store(weights + key, vec{});
    const float alpha = exp2(old - base);
    rows.alpha[row] = alpha;
    rows.sum[row] = rows.sum[row] * alpha + reduce_add(total);
    rows.max[row] = most;
}

// max, sum and acc [v_pad] of a split added to those of the splits before it. A split without keys has the sum 0.
void merge(float* max, float* sum, float* acc, float other_max, float other_sum, const float* other, int64_t v_pad) {
    if (other_sum == 0) return;
    const float top = std::max(*max, other_max), base = top == NOTHING ? 0 : top;
    const vec a = exp2(set1(*max - base)), b = exp2(set1(other_max - base));
    *sum = *sum * a[0] + other_sum * b[0];
    *max = top;
    for (int64_t d = 0; d < v_pad; d += W) store(acc + d, load(acc + d) * a + load(other + d) * b);
}

// ---- Which keys a row sees, and where it reads them -----------------------------------------------------------------

// Six ranges of keys, disjoint, every one of which moves up with the row: sink tokens (which meet query_sink) and the
// others, each read from the quantized pool or, leading or recent, from the exact one.
constexpr int RANGES = 6;
constexpr bool IS_EXACT[RANGES] = {false, true, true, false, true, true};
constexpr bool IS_SINK[RANGES] = {true, true, true, false, false, false};

struct Range {
    int64_t first, last;
};

INLINE Range range_of(const AttentionArgs& a, int range, int64_t i) {
    const int64_t sinks = a.num_sink_tokens, residual = a.residual_length, exact_sinks = a.num_exact_sinks;
    const int64_t left = a.window ? std::max<int64_t>(0, i - a.window + 1) : 0;
    const int64_t start = IS_SINK[range] ? 0 : std::max(sinks, left);
    const int64_t end = IS_SINK[range] ? std::min(sinks, i + 1) : i + 1;
    const int64_t recent = i + 1 - residual;  // the first key that is read exact for being recent
    if (!IS_EXACT[range]) return {std::max(start, exact_sinks), std::min(end, recent)};
    if (!residual) return {0, 0};
    if (range == 1 || range == 4) return {start, std::min(end, exact_sinks)};
    return {std::max({start, exact_sinks, recent}), end};
}

// ---- Work ---------------------------------------------------------------------------------------------------------

// Rows of one sequence and one KV head: tokens first .. first + count of the query, the first at `position`.
struct Item {
    int64_t seq, head, first, count, position;
    int64_t first_split, num_splits, task;  // task: the first of its tasks, where each split is one
};

// Memory of one thread, kept between calls.
struct Workspace {
    std::unique_ptr<float[], void (*)(float*)> memory{nullptr, nullptr};
    size_t size = 0;

    float* get(size_t floats) {
        if (floats > size) {
            memory = {(float*)::operator new[](floats * 4, std::align_val_t(64)),
                      [](float* p) { ::operator delete[](p, std::align_val_t(64)); }};
            size = floats;
        }
        return memory.get();
    }
};
thread_local Workspace workspace, partial_states;

class Worker {
  public:
    explicit Worker(const AttentionArgs& a, int64_t max_rows) : a(a), group(a.num_q_heads / a.num_kv_heads) {
        const int64_t padded = round_up(max_rows, ROWS), dim = std::max(a.k_dim, a.v_dim);
        v_pad = round_up(a.v_dim, 2 * W);
        k_pad = round_up(a.k_dim, 32);  // whole chunks of every format
        const int64_t sizes[] = {
            padded * k_pad, padded * DIGITS * k_pad / 4, padded * DIGITS, padded,                     // the query
            padded * k_pad, padded * DIGITS * k_pad / 4, padded * DIGITS, padded,                     // for the sinks
            padded * TILE, padded, padded, padded * v_pad, padded,                                    // Rows
            padded, padded, padded * v_pad,                                                           // the running state
            k_pad * STRIP, TILE * v_pad,                                                            // decoded tiles
            scale_groups(INT4, a.k_dim) * TILE, scale_groups(INT4, a.v_dim) * TILE, dim + 16, round_up(a.v_dim, 2 * W),
        };
        constexpr int COUNT = sizeof(sizes) / sizeof(*sizes);
        int64_t total = 0;
        for (int64_t size : sizes) total += round_up(size, 16);
        float* at = workspace.get(total);
        float** parts[COUNT] = {&query.x, (float**)&query.digits, (float**)&query.start, &query.unit, &query_sink.x,
            (float**)&query_sink.digits, (float**)&query_sink.start, &query_sink.unit, &rows.weights, &rows.max, &rows.sum, &rows.acc,
            &rows.alpha, &max, &sum, &acc, &strip, &values, &tile.k_groups, &tile.v_groups, &zeros, &out};
        for (int i = 0; i < COUNT; ++i) {
            *parts[i] = at;
            at += round_up(sizes[i], 16);
        }
        memset(zeros, 0, 4 * (dim + 16));
        tile.zeros = (const uint8_t*)zeros;
        tile.k_dim = a.k_dim;
        tile.k_pad = k_pad;
        tile.v_dim = a.v_dim;
        tile.v_pad = v_pad;
    }

    // All splits, merged, to the output.
    void attend(const Item& item) {
        begin(item);
        for (int64_t row = 0; row < rows.count; ++row) max[row] = NOTHING;
        memset(sum, 0, 4 * rows.count);
        memset(acc, 0, 4 * rows.count * v_pad);
        for (int64_t s = item.first_split; s < item.first_split + item.num_splits; ++s) {
            split(item, s);
            for (int64_t row = 0; row < rows.count; ++row)
                merge(max + row, sum + row, acc + row * v_pad, rows.max[row], rows.sum[row], rows.acc + row * v_pad,
                      v_pad);
        }
        finish(item);
    }

    // One split, its state to `state` [count][v_pad + 2].
    void attend_split(const Item& item, int64_t s, float* state) {
        begin(item);
        split(item, s);
        for (int64_t row = 0; row < rows.count; ++row, state += v_pad + 2) {
            memcpy(state, rows.acc + row * v_pad, 4 * v_pad);
            state[v_pad] = rows.max[row];
            state[v_pad + 1] = rows.sum[row];
        }
    }

    // The states [splits][count][v_pad + 2] of all splits, merged, to the output.
    void attend_states(const Item& item, const float* states) {
        const int64_t count = item.count * group, stride = v_pad + 2;
        for (int64_t row = 0; row < count; ++row) {
            max[row] = NOTHING;
            sum[row] = 0;
            memset(acc + row * v_pad, 0, 4 * v_pad);
            for (int64_t s = 0; s < item.num_splits; ++s) {
                const float* state = states + (s * count + row) * stride;
                merge(max + row, sum + row, acc + row * v_pad, state[v_pad], state[v_pad + 1], state, v_pad);
            }
        }
        finish(item);
    }

  private:
    const AttentionArgs& a;
    const int64_t group;
    const Item* loaded = nullptr;  // whose query lies in `query`
    int64_t k_pad, v_pad;
    Tile tile;
    Query query, query_sink;
    Rows rows;
    float *max, *sum, *acc, *strip, *values, *zeros, *out;

    void load_query(const Item& item, const void* from, int64_t token_stride, int64_t head_stride, const Query& to) {
        const float factor = (float)(a.softcap != 0 ? a.scale / a.softcap : a.scale * M_LOG2E);
        for (int64_t row = 0; row < rows.count; ++row) {
            float* q = to.x + row * k_pad;
            const int64_t head = item.head * group + row % group;
            load_row(from, (item.first + row / group) * token_stride + head * head_stride, a.dtype, a.k_dim, q);
            if (a.k_rotate) rotate(q, a.k_dim);
            for (int64_t d = 0; d < a.k_dim; ++d) q[d] *= factor;
            for (int64_t d = a.k_dim; d < k_pad; ++d) q[d] = 0;
#if defined(HAS_DOT)
            if (a.pool.k_format == INT8) to_digits(q, to, row);
#endif
        }
        memset(to.x + rows.count * k_pad, 0, 4 * (rows.padded - rows.count) * k_pad);
    }

#if defined(HAS_DOT)
    void to_digits(const float* q, const Query& to, int64_t row) {
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
        const vec up = set1(!good || size < 0x1p-100f ? 0 : LARGEST / size);  // what is smaller scores 0
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

    void begin(const Item& item) {
        if (loaded == &item) return;
        loaded = &item;
        rows.count = item.count * group;
        rows.padded = round_up(rows.count, ROWS);
        load_query(item, a.query, a.query_token, a.query_head, query);
        if (a.query_sink && a.num_sink_tokens)
            load_query(item, a.query_sink, a.sink_token, a.sink_head, query_sink);
        for (int64_t row = rows.count; row < rows.padded; ++row) rows.alpha[row] = 0;
        memset(rows.weights + rows.count * TILE, 0, 4 * (rows.padded - rows.count) * TILE);
    }

    void split(const Item& item, int64_t s) {
        for (int64_t row = 0; row < rows.padded; ++row) rows.max[row] = NOTHING;
        memset(rows.sum, 0, 4 * rows.padded);
        memset(rows.acc, 0, 4 * rows.padded * v_pad);
        for (int range = 0; range < RANGES; ++range) {
            const int64_t first = std::max(range_of(a, range, item.position).first, s * SPLIT);
            const int64_t end = range_of(a, range, item.position + item.count - 1).last;
            const int64_t last = std::min(end, (s + 1) * SPLIT);
            for (int64_t start = first / TILE * TILE; start < last; start += TILE)
                attend_tile(item, range, start, std::max(first, start), std::min(last, start + TILE), end);
        }
    }

    // Calls use(key, count, block, row) for runs of keys first .. last that lie together: count rows from `row` on of
    // the KV head's rows in a block.
    template <typename Use> void each_run(const Item& item, bool exact, int64_t first, int64_t last, Use&& use) {
        const Pool& pool = exact ? a.exact : a.pool;
        const int32_t* table = exact ? a.exact_tables + item.seq * a.exact_table_stride
                                     : a.tables + item.seq * a.table_stride;
        while (first < last) {
            const int64_t slot = first % a.block_size, count = std::min(a.block_size - slot, last - first);
            const uint8_t* block = pool.arena + (int64_t)table[first / a.block_size] * pool.block_bytes;
            use(first, count, block, item.head * a.block_size + slot);
            first += count;
        }
    }

    void load_tile(const Item& item, bool exact, int64_t start, int64_t first, int64_t last, int64_t end) {
        const Pool& pool = exact ? a.exact : a.pool;
        const int64_t k_bytes = row_bytes(pool.k_format, a.k_dim), v_bytes = row_bytes(pool.v_format, a.v_dim);
        tile.first = first - start;
        tile.last = last - start;
        const auto nothing = [&](int64_t key) {
            tile.k[key] = tile.v[key] = tile.zeros;
            tile.k_scale[key] = tile.v_scale[key] = 0;
            if (pool.k_format == INT4)
                for (int64_t g = 0; g < scale_groups(INT4, a.k_dim); ++g) tile.k_groups[g * TILE + key] = 0;
        };
        for (int64_t key = tile.first / STRIP * STRIP; key < tile.first; ++key) nothing(key);
        for (int64_t key = tile.last; key < round_up(tile.last, STRIP); ++key) nothing(key);
        each_run(item, exact, first, last, [&](int64_t position, int64_t count, const uint8_t* block, int64_t row) {
            const int64_t key = position - start;
            for (int64_t i = 0; i < count; ++i) {
                tile.k[key + i] = block + pool.k_codes + (row + i) * k_bytes;
                tile.v[key + i] = block + pool.v_codes + (row + i) * v_bytes;
            }
            load_scales(pool.k_format, a.k_dim, block + pool.k_scales, row, count, K_UNIT[pool.k_format],
                        tile.k_scale + key, tile.k_groups + key, 1, TILE);
            const int64_t groups = scale_groups(pool.v_format, a.v_dim);
            load_scales(pool.v_format, a.v_dim, block + pool.v_scales, row, count, V_UNIT[pool.v_format],
                        tile.v_scale + key, tile.v_groups + key * groups, groups, 1);
        });
        tile.num_next = 0;
        if (rows.count > FEW) return;
        each_run(item, exact, start + TILE, std::min(start + 2 * TILE, end),
                 [&](int64_t position, int64_t count, const uint8_t* block, int64_t row) {
            const int64_t key = position - start - TILE;
            for (int64_t i = 0; i < count; ++i) {
                tile.next_k[key + i] = block + pool.k_codes + (row + i) * k_bytes;
                tile.next_v[key + i] = block + pool.v_codes + (row + i) * v_bytes;
            }
            tile.num_next = key + count;
        });
    }

    // Scales of `count` rows from `row` on, times unit: to per_key, or for INT4 to groups[key * by_key + group * by_group].
    void load_scales(int64_t format, int64_t dim, const uint8_t* scales, int64_t row, int64_t count, float unit,
                     float* per_key, float* groups, int64_t by_key, int64_t by_group) {
        const auto at = [&](int64_t i) {
            uint16_t h;
            memcpy(&h, scales + 2 * i, 2);
            return from_half(h);
        };
        if (format == INT4) {
            const int64_t n = scale_groups(INT4, dim);
            for (int64_t i = 0; i < count; ++i) {
                per_key[i] = 1;
                for (int64_t g = 0; g < n; ++g) groups[i * by_key + g * by_group] = at((row + i) * n + g) * unit;
            }
        } else if (format <= BF16) {
            for (int64_t i = 0; i < count; ++i) per_key[i] = 1;
        } else {
            int64_t i = 0;
            for (; i + W <= count; i += W) store(per_key + i, load_half(scales + 2 * (row + i)) * set1(unit));
            for (; i < count; ++i) per_key[i] = at(row + i) * unit;
        }
    }

    void attend_tile(const Item& item, int range, int64_t start, int64_t first, int64_t last, int64_t end) {
        const Pool& pool = IS_EXACT[range] ? a.exact : a.pool;
        load_tile(item, IS_EXACT[range], start, first, last, end);
        FORMATS[pool.k_format].score(tile, IS_SINK[range] && a.query_sink ? query_sink : query, rows, strip);
        const float cap = (float)(a.softcap * M_LOG2E);
        for (int64_t token = 0; token < item.count; ++token) {
            const Range seen = range_of(a, range, item.position + token);
            const int64_t begin = std::max(seen.first, first) - start, stop = std::min(seen.last, last) - start;
            for (int64_t h = 0; h < group; ++h) softmax(tile, rows, token * group + h, begin, stop, cap);
        }
        for (int64_t row = rows.count; row < rows.padded; ++row)
            for (int64_t key = 0; key < TILE; key += W) store(rows.weights + row * TILE + key, vec{});
        FORMATS[pool.v_format].sum(tile, rows, values);
    }

    void finish(const Item& item) {
        for (int64_t row = 0; row < item.count * group; ++row) {
            const int64_t head = item.head * group + row % group, token = item.first + row / group;
            float total = sum[row], kept = 1;
            if (a.sink_logits) {
                const float logit = a.sink_logits[head] * (float)M_LOG2E, top = std::max(max[row], logit);
                const float base = top == NOTHING ? 0 : top;
                kept = exp2(max[row] - base);
                total = total * kept + exp2(logit - base);
            }
            if (total == 0) total = 1;
            for (int64_t d = 0; d < a.v_dim; d += W)
                store(out + d, load(acc + row * v_pad + d) * set1(kept) / set1(total));
            if (a.v_rotate) rotate(out, a.v_dim);
            store_row(a.out, (token * a.num_q_heads + head) * a.v_dim, a.dtype, a.v_dim, out);
        }
    }
};

}  // namespace

void paged_attention(const AttentionArgs& a) {
    const int64_t group = a.num_q_heads / a.num_kv_heads, per_item = std::max<int64_t>(1, ITEM_ROWS / group);
    std::vector<Item> items;
    int64_t max_rows = 0, num_splits = 0, partial_rows = 0;
    for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
        const int64_t begin = a.query_start_loc[seq], end = a.query_start_loc[seq + 1];
        // The last tokens see the most keys: they are started first.
        for (int64_t stop = end; stop > begin; stop -= per_item) {
            const int64_t first = std::max(begin, stop - per_item), count = stop - first;
            const int64_t position = a.seq_lens[seq] - (end - first);
            int64_t low = INT64_MAX, high = 0;
            for (int range = 0; range < RANGES; ++range) {
                const int64_t from = range_of(a, range, position).first, to = range_of(a, range, position + count - 1).last;
                if (from < to) low = std::min(low, from / SPLIT), high = std::max(high, (to - 1) / SPLIT + 1);
            }
            const int64_t splits = high > low ? high - low : 0;
            for (int64_t head = 0; head < a.num_kv_heads; ++head) {
                items.push_back({seq, head, first, count, position, low, splits, num_splits});
                num_splits += splits;
                partial_rows += splits * count * group;
            }
            max_rows = std::max(max_rows, count * group);
        }
    }
    const int64_t num_items = (int64_t)items.size(), state = round_up(a.v_dim, 2 * W) + 2;
    const bool by_split = num_items < 4 * a.threads && num_splits > num_items && partial_rows * state * 4 <= PARTIAL_BYTES;
    std::vector<int64_t> tasks, offsets;  // by split: the item of every task, and where its states lie
    float* states = nullptr;
    std::unique_ptr<std::atomic<int64_t>[]> left;
    if (by_split) {
        left.reset(new std::atomic<int64_t>[num_items]);
        int64_t offset = 0;
        for (int64_t i = 0; i < num_items; ++i) {
            // An item without keys still has one task, which writes its zeros.
            left[i] = std::max<int64_t>(1, items[i].num_splits);
            items[i].task = (int64_t)tasks.size();
            tasks.insert(tasks.end(), (size_t)left[i].load(), i);
            offsets.push_back(offset);
            offset += items[i].num_splits * items[i].count * group * state;
        }
        states = partial_states.get((size_t)offset);
    }
    const int64_t num_tasks = by_split ? (int64_t)tasks.size() : num_items;
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads((int)std::max<int64_t>(1, std::min(a.threads, num_tasks)))
    {
        Worker worker(a, max_rows);
        for (int64_t task; (task = next++) < num_tasks;) {
            if (!by_split) {
                worker.attend(items[task]);
                continue;
            }
            const int64_t i = tasks[task];
            const Item& item = items[i];
            const int64_t s = task - item.task, size = item.count * group * state;
            if (item.num_splits) worker.attend_split(item, item.first_split + s, states + offsets[i] + s * size);
            if (--left[i] == 0) worker.attend_states(item, states + offsets[i]);
        }
    }
    const int64_t done = a.query_start_loc[a.num_seqs], row = a.num_q_heads * a.v_dim * (a.dtype == FP32 ? 4 : 2);
    memset((uint8_t*)a.out + done * row, 0, (size_t)((a.num_tokens - done) * row));
}

}  // namespace ISA
