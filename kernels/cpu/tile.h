// The keys that are attended together: where their codes lie, and their scales.
#pragma once
#include "channels.h"
#include "visible.h"

namespace ISA {

namespace {

constexpr int64_t TILE = 128, SPLIT = 512;  // keys
constexpr int64_t STRIP = 2 * W;            // keys whose K is decoded together
constexpr int64_t DECODE_ROWS = 8;          // up to this many rows memory bounds the speed, and keys are prefetched
// Up to FEW rows are multiplied with codes decoded in registers; more rows share a tile decoded into memory.
#if defined(__AVX512F__)
constexpr int FEW = 8;
#elif defined(__AVX2__)
constexpr int FEW = 4;
#else
constexpr int FEW = 0;
#endif

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Floats between decoded values. Rows of the same multiple of a page would share few lines of the first cache.
constexpr int64_t padded_v(int64_t v_dim) {
    const int64_t dims = round_up(v_dim, 2 * W);
    return dims % 512 ? dims : dims + 2 * W;
}

constexpr int64_t NO_REST = INT64_MAX;

// The keys of a tile and how to read them. Keys that no row sees point to a row of zeros.
struct Tile {
    int64_t first, last;  // the keys first .. last of the tile are seen by some row
    int64_t k_dim, k_pad, v_dim, v_pad;
    const uint8_t *k[TILE], *v[TILE];
    alignas(64) float k_scale[TILE], v_scale[TILE];  // of grid formats: 1
    alignas(64) float k_rest[TILE];                  // the scale of the dims from rest_from on, over k_scale
    int64_t rest_from;                               // NO_REST: all dims have one scale
    float *k_groups, *v_groups;                      // of grid formats: [groups][TILE] and [TILE][groups]
    int64_t k_group, v_group;                        // dims that share a scale
    const uint8_t* channels[TILE / CHANNEL_TOKENS];  // of K by channel: each group's scales and zeros
    const uint8_t* zeros;
    // The next tile's, prefetched while this one is computed.
    const uint8_t *next_k[TILE], *next_v[TILE];
    int64_t num_next;
};

INLINE void prefetch_row(const uint8_t* row, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
}

// Scales of `count` rows from `row` on, times unit: to per_key, or for a grid format to groups[key * by_key + group * by_group].
// wanted: scales of a row that are loaded, of those stored.
void load_scales(int64_t format, int64_t wanted, int64_t stored, const uint8_t* scales, int64_t row, int64_t count, float unit,
                 float* per_key, float* groups, int64_t by_key, int64_t by_group) {
    const auto at = [&](int64_t i) {
        uint16_t h;
        memcpy(&h, scales + 2 * i, 2);
        return from_half(h);
    };
    if (is_grid(format)) {
        for (int64_t i = 0; i < count; ++i) {
            per_key[i] = 1;
            for (int64_t g = 0; g < wanted; ++g)
                groups[i * by_key + g * by_group] = scale_of_byte(scales[(row + i) * stored + g]) * unit;
        }
    } else if (format <= BF16) {
        for (int64_t i = 0; i < count; ++i) per_key[i] = 1;
    } else {
        int64_t i = 0;
        if (stored == 1)
            for (; i + W <= count; i += W) store(per_key + i, load_half(scales + 2 * (row + i)) * set1(unit));
        for (; i < count; ++i) per_key[i] = at((row + i) * stored) * unit;
    }
}

// Calls use(key, count, block, row) for runs of keys first .. last that lie together: count rows from `row` on of the
// KV head's rows in a block.
template <typename Use>
INLINE void each_run(const AttentionArgs& a, const Item& item, bool exact, int64_t first, int64_t last, Use&& use) {
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

// The keys first .. last of the tile that starts at `start`, and where the next tile's lie, up to `end`, if `fetch`.
void load_tile(const AttentionArgs& a, const Item& item, bool exact, int64_t start, int64_t first, int64_t last,
               int64_t end, bool fetch, Tile& tile) {
    const Pool& pool = exact ? a.exact : a.pool;
    const int64_t k_bytes = row_bytes(pool.k_format, a.k_dim), v_bytes = row_bytes(pool.v_format, a.v_stored_dim);
    const bool v_in_k = a.v_stored_dim != a.v_dim;
    const int64_t k_scales = scale_groups(pool.k_format, a.k_dim, pool.k_group);
    const int64_t v_groups = scale_groups(pool.v_format, a.v_dim, pool.v_group), v_scales = v_in_k ? k_scales : v_groups;
    const bool has_rest = !is_grid(pool.k_format) && k_scales == 2;
    const float k_unit = ISA::k_unit(pool.k_format, !has_rest), v_unit = ISA::v_unit(pool.v_format);
    tile.k_group = pool.k_group;
    tile.v_group = pool.v_group;
    tile.rest_from = has_rest ? a.v_dim : NO_REST;
    tile.first = first - start;
    tile.last = last - start;
    const auto channels_at = [&](const uint8_t* block, int64_t row) {
        return block + pool.k_scales + row / CHANNEL_TOKENS * 2 * a.k_dim;
    };
    const auto nothing = [&](int64_t key) {
        tile.k[key] = tile.v[key] = tile.zeros;
        tile.k_scale[key] = tile.v_scale[key] = tile.k_rest[key] = 0;
        if (is_grid(pool.k_format) && !by_channel(pool.k_format))
            for (int64_t g = 0; g < k_scales; ++g) tile.k_groups[g * TILE + key] = 0;
    };
    for (int64_t key = tile.first / STRIP * STRIP; key < tile.first; ++key) nothing(key);
    for (int64_t key = tile.last; key < round_up(tile.last, STRIP); ++key) nothing(key);
    each_run(a, item, exact, first, last, [&](int64_t position, int64_t count, const uint8_t* block, int64_t row) {
        const int64_t key = position - start;
        for (int64_t i = 0; i < count; ++i) {
            tile.k[key + i] = block + pool.k_codes + (row + i) * k_bytes;
            tile.v[key + i] = block + pool.v_codes + (row + i) * v_bytes;
        }
        if (by_channel(pool.k_format)) {
            for (int64_t i = 0; i < count; ++i) {
                tile.k_scale[key + i] = 1;
                tile.channels[(key + i) / CHANNEL_TOKENS] = channels_at(block, row + i);
            }
        } else
            load_scales(pool.k_format, k_scales, k_scales, block + pool.k_scales, row, count, k_unit, tile.k_scale + key,
                        tile.k_groups + key, 1, TILE);
        for (int64_t i = 0; has_rest && i < count; ++i) {
            uint16_t pair[2];
            memcpy(pair, block + pool.k_scales + 4 * (row + i), 4);
            tile.k_rest[key + i] = from_half(pair[1]) / from_half(pair[0]);
        }
        load_scales(pool.v_format, v_groups, v_scales, block + pool.v_scales, row, count, v_unit,
                    tile.v_scale + key, tile.v_groups + key * v_groups, v_groups, 1);
    });
    tile.num_next = 0;
    if (!fetch) return;
    const int64_t next = start + TILE;
    const auto see = [&](int64_t position, int64_t count, const uint8_t* block, int64_t row) {
        const int64_t key = position - next;
        for (int64_t i = 0; i < count; ++i) {
            tile.next_k[key + i] = block + pool.k_codes + (row + i) * k_bytes;
            tile.next_v[key + i] = block + pool.v_codes + (row + i) * v_bytes;
        }
        for (int64_t i = 0; by_channel(pool.k_format) && i < count; i += CHANNEL_TOKENS)
            prefetch_row(channels_at(block, row + i), 2 * a.k_dim);
        tile.num_next = key + count;
    };
    each_run(a, item, exact, next, std::min(next + TILE, end), see);
}

}  // namespace

}  // namespace ISA
