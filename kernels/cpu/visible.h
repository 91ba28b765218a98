// Rows that are attended together, which keys they see, and where they read them.
#pragma once
#include <algorithm>

#include "args.h"
#include "simd.h"

namespace ISA {

namespace {

// Rows of one sequence and one KV head: tokens first .. first + count of the query, the first at `position`.
struct Item {
    int64_t seq, head, first, count, position;
    int64_t first_split, num_splits, task;  // task: the first of its tasks, where each split is one
};

// Six disjoint ranges of keys. None of their bounds decreases from one row to the next. Sink tokens are read with
// query_sink, other keys with the query. Both come from the quantized pool, or, as exact sinks or recent keys, from the
// exact pool.
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

// The keys that some row of an item sees in a range.
INLINE Range range_of(const AttentionArgs& a, int range, const Item& item) {
    return {range_of(a, range, item.position).first, range_of(a, range, item.position + item.count - 1).last};
}

}  // namespace

}  // namespace ISA
