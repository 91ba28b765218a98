// Softmax over the keys of a tile, and over splits.
#pragma once
#include "tile.h"

namespace ISA {

namespace {

constexpr int ROWS = W == 16 ? 8 : 4;  // rows of one product over decoded tiles
constexpr float NOTHING = -INFINITY;

// Rows with their state.
struct Rows {
    int64_t count;
    float* weights;          // [count][TILE]: scores, then probabilities times the scale of V
    float *max, *sum, *acc;  // of this split: [count], [count], [count][v_pad]
    float* alpha;            // [count], what the tile multiplies acc by
};

// Calls use<R>() for R = count, 1 .. MAX.
template <int MAX, typename Use> INLINE void with_count(int64_t count, Use&& use) {
    if constexpr (MAX > 1)
        if (count < MAX) return with_count<MAX - 1>(count, use);
    if constexpr (MAX > 0) use.template operator()<MAX>();
}

// Calls use<R>(row) for R <= MAX rows from `row` on, until all are done.
template <int MAX, typename Use> INLINE void each_rows(int64_t count, Use&& use) {
    int64_t row = 0;
    if constexpr (MAX > 0)
        for (; row + MAX <= count; row += MAX) use.template operator()<MAX>(row);
    if (row < count) with_count<MAX - 1>(count - row, [&]<int R>() INLINED { use.template operator()<R>(row); });
}

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


}  // namespace

}  // namespace ISA
