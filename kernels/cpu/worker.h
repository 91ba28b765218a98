// One thread's part: rows of one sequence and one KV head over splits of keys.
#pragma once
#include <memory>
#include <new>

#include "query.h"
#include "scores.h"
#include "values.h"

namespace ISA {

namespace {

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
        const int64_t dim = std::max(a.k_dim, a.v_dim);
        v_pad = padded_v(a.v_dim);
        k_pad = round_up(a.k_dim, 32);  // whole chunks of every format
        const int64_t sizes[] = {
            max_rows * k_pad, max_rows * DIGITS * k_pad / 4, max_rows * DIGITS, max_rows,  // the query
            max_rows * k_pad, max_rows * DIGITS * k_pad / 4, max_rows * DIGITS, max_rows,  // for the sinks
            max_rows * TILE, max_rows, max_rows, max_rows * v_pad, max_rows,               // Rows
            max_rows, max_rows, max_rows * v_pad,                                          // the running state
            k_pad * STRIP, TILE * v_pad, max_rows * v_pad,                                 // decoded keys, a tile's sum
            max_rows * k_pad, max_rows, k_pad, k_pad,                                      // Folded
            (a.k_dim + UNIT - 1) / UNIT * TILE, (a.v_dim + UNIT - 1) / UNIT * TILE, dim + 16, v_pad,
        };
        constexpr int COUNT = sizeof(sizes) / sizeof(*sizes);
        int64_t total = 0;
        for (int64_t size : sizes) total += round_up(size, 16);
        float* at = workspace.get(total);
        float** parts[COUNT] = {
            &query.x, (float**)&query.digits, (float**)&query.start, &query.unit,
            &query_sink.x, (float**)&query_sink.digits, (float**)&query_sink.start, &query_sink.unit,
            &rows.weights, &rows.max, &rows.sum, &rows.acc, &rows.alpha,
            &max, &sum, &acc,
            &strip, &values, &tile_sum,
            &folded.x, &folded.start, &folded.scale, &folded.zero,
            &tile.k_groups, &tile.v_groups, &zeros, &out,
        };
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
    Folded folded;
    Rows rows;
    float *max, *sum, *acc, *strip, *values, *tile_sum, *zeros, *out;

    void begin(const Item& item) {
        if (loaded == &item) return;
        loaded = &item;
        rows.count = item.count * group;
        load_query(a, item, a.query, a.query_token, a.query_head, k_pad, query);
        if (a.query_sink && a.num_sink_tokens)
            load_query(a, item, a.query_sink, a.sink_token, a.sink_head, k_pad, query_sink);
    }

    void split(const Item& item, int64_t s) {
        for (int64_t row = 0; row < rows.count; ++row) rows.max[row] = NOTHING;
        memset(rows.sum, 0, 4 * rows.count);
        memset(rows.acc, 0, 4 * rows.count * v_pad);
        for (int range = 0; range < RANGES; ++range) {
            const Range seen = range_of(a, range, item);
            const int64_t first = std::max(seen.first, s * SPLIT), last = std::min(seen.last, (s + 1) * SPLIT);
            if (first >= last) continue;
            for (int64_t start = first / TILE * TILE; start < last; start += TILE)
                attend_tile(item, range, start, std::max(first, start), std::min(last, start + TILE), seen.last);
        }
    }

    void attend_tile(const Item& item, int range, int64_t start, int64_t first, int64_t last, int64_t end) {
        const Pool& pool = IS_EXACT[range] ? a.exact : a.pool;
        load_tile(a, item, IS_EXACT[range], start, first, last, end, rows.count <= DECODE_ROWS, tile);
        score_tile(pool.k_format, tile, IS_SINK[range] && a.query_sink ? query_sink : query, folded,
                   rows, strip);
        const float cap = (float)(a.softcap * M_LOG2E);
        for (int64_t token = 0; token < item.count; ++token) {
            const Range seen = range_of(a, range, item.position + token);
            const int64_t begin = std::max(seen.first, first) - start, stop = std::min(seen.last, last) - start;
            for (int64_t h = 0; h < group; ++h) softmax(tile, rows, token * group + h, begin, stop, cap);
        }
        sum_tile(pool.v_format, tile, rows, values, tile_sum);
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
            if (a.v_rotate) rotate_back(out, a.v_dim, a.v_rotate);
            store_row(a.out, (token * a.num_q_heads + head) * a.v_dim, a.dtype, a.v_dim, out);
        }
    }
};

}  // namespace

}  // namespace ISA
