// paged_attention: fused decode of the blocks and attention, for prefill and decode alike.
//
// The bits of a row (query token x head) depend neither on the call's other rows nor on the number of threads:
// - Keys are cut at fixed positions into splits of SPLIT keys. Each split has its own softmax state, and the states are
//   merged in ascending order. Neither the thread that computes a split nor the rows beside change a bit.
// - Within a split keys come in tiles at multiples of TILE (online softmax, arXiv:1805.02867). A score is one chain of
//   multiply-adds over the dims in order, a tile's weighted sum of V one chain over its keys in order. The two ways to
//   compute these chains, from codes in registers for few rows and over decoded tiles for many, order them alike.
// - A key that a row does not see gets the weight 0, and its K does not affect the row.
#include <omp.h>

#include <atomic>
#include <vector>

#include "worker.h"

namespace ISA {

namespace {

constexpr int64_t ITEM_ROWS = 96;           // rows for which a tile is decoded once
constexpr int64_t PARTIAL_BYTES = 64 << 20;  // for the states of splits that other threads compute
constexpr int64_t WORTH_A_THREAD = 1 << 17;  // multiply-adds, about 20 us: more than waking a thread takes

}  // namespace

void paged_attention(const AttentionArgs& a) {
    const int64_t group = a.num_q_heads / a.num_kv_heads, per_item = std::max<int64_t>(1, ITEM_ROWS / group);
    std::vector<Item> items;
    items.reserve((size_t)(a.num_seqs * a.num_kv_heads));
    int64_t max_rows = 0, num_splits = 0, partial_rows = 0, work = 0;
    for (int64_t seq = 0; seq < a.num_seqs; ++seq) {
        const int64_t begin = a.query_start_loc[seq], end = a.query_start_loc[seq + 1];
        // The last tokens see the most keys: they are started first.
        for (int64_t stop = end; stop > begin; stop -= per_item) {
            const int64_t first = std::max(begin, stop - per_item), count = stop - first;
            const int64_t position = a.seq_lens[seq] - (end - first);
            int64_t low = INT64_MAX, high = 0;
            for (int range = 0; range < RANGES; ++range) {
                const auto [from, to] = range_of(a, range, Item{.count = count, .position = position});
                if (from >= to) continue;
                low = std::min(low, from / SPLIT), high = std::max(high, (to - 1) / SPLIT + 1);
                work += (to - from) * count * a.num_q_heads * (a.k_dim + a.v_dim);
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
    const int64_t threads = std::min(a.threads, 1 + work / WORTH_A_THREAD);
    const int64_t num_items = (int64_t)items.size(), state = padded_v(a.v_dim) + 2;
    const bool by_split = num_items < 4 * threads && num_splits > num_items && partial_rows * state * 4 <= PARTIAL_BYTES;
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
    const auto run = [&] {
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
    };
    const int team = (int)std::min(threads, num_tasks);
    if (team <= 1) run();
    else {
#pragma omp parallel num_threads(team)
        run();
    }
    const int64_t done = a.query_start_loc[a.num_seqs], row = a.num_q_heads * a.v_dim * (a.dtype == FP32 ? 4 : 2);
    memset((uint8_t*)a.out + done * row, 0, (size_t)((a.num_tokens - done) * row));
}

}  // namespace ISA