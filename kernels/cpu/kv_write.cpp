// kv_write: encode new K and V and put them into their slots. encode_keys: K by channel, from the exact pool.
#include <omp.h>

#include <vector>

#include "channels.h"

namespace ISA {

namespace {

struct Part {
    const void* x;
    int64_t token, head, dim, group, format, rotate, codes, scales;
};

void write(const WriteArgs& a, const Part& part, int64_t token, int64_t head, float* y) {
    const int64_t slot = a.slots[token];
    uint8_t* block = a.pool.arena + slot / a.block_size * a.pool.block_bytes;
    const int64_t row = head * a.block_size + slot % a.block_size;
    uint8_t* codes = block + part.codes + row * row_bytes(part.format, part.dim);
    const int64_t at = token * part.token + head * part.head;
    if (part.format == a.dtype && !part.rotate) {  // copied, so that every NaN keeps its bits
        const int64_t size = a.dtype == FP32 ? 4 : 2;
        memcpy(codes, (const uint8_t*)part.x + at * size, part.dim * size);
        return;
    }
    load_row(part.x, at, a.dtype, part.dim, y);
    if (part.rotate) rotate(y, part.dim, part.rotate);
    uint8_t* scales = block + part.scales + row * scale_bytes(part.format) * scale_groups(part.format, part.dim, part.group);
    encode(y, part.dim, part.group, part.format, codes, scales);
}

}  // namespace

void kv_write(const WriteArgs& a) {
    const Part parts[2] = {
        {a.key, a.key_token, a.key_head, a.k_dim, a.pool.k_group, a.pool.k_format, a.k_rotate,
         a.pool.k_codes, a.pool.k_scales},
        {a.value, a.value_token, a.value_head, a.v_dim, a.pool.v_group, a.pool.v_format, a.v_rotate, a.pool.v_codes,
         a.pool.v_scales},
    };
    const int first_part = by_channel(a.pool.k_format) ? 1 : 0, num_parts = a.v_in_k ? 1 : 2;
    const int64_t rows = a.num_tokens * a.num_kv_heads, dim = a.k_dim > a.v_dim ? a.k_dim : a.v_dim;
    // Waking a thread costs as much as about ten rows.
#pragma omp parallel num_threads(rows < 64 ? 1 : (int)a.threads)
    {
        float small[512];
        float* y = dim <= 512 ? small : new float[dim];
#pragma omp for
        for (int64_t row = 0; row < rows; ++row)
            for (int i = first_part; i < num_parts; ++i)
                if (a.slots[row / a.num_kv_heads] >= 0)
                    write(a, parts[i], row / a.num_kv_heads, row % a.num_kv_heads, y);
        if (y != small) delete[] y;
    }
}

void encode_keys(const EncodeArgs& a) {
    std::vector<int64_t> ends;  // tokens that complete a group
    for (int64_t token = 0; token < a.num_tokens; ++token)
        if (a.slots[token] >= 0 && a.slots[token] % CHANNEL_TOKENS == CHANNEL_TOKENS - 1) ends.push_back(token);
    const int64_t tasks = (int64_t)ends.size() * a.num_kv_heads, dim = a.k_dim;
    if (!tasks) return;
#pragma omp parallel num_threads(tasks < 2 ? 1 : (int)(tasks < a.threads ? tasks : a.threads))
    {
        std::vector<float> y((size_t)(CHANNEL_TOKENS * dim));
        std::vector<int8_t> codes(y.size());
#pragma omp for
        for (int64_t task = 0; task < tasks; ++task) {
            const int64_t head = task % a.num_kv_heads, token = ends[task / a.num_kv_heads];
            const auto first_row = [&](int64_t slot) { return head * a.block_size + slot % a.block_size - (CHANNEL_TOKENS - 1); };
            const int64_t slot = a.slots[token], exact = a.exact_slots[token];
            const uint8_t* from = a.exact_arena + exact / a.block_size * a.exact_block_bytes;
            uint8_t* block = a.arena + slot / a.block_size * a.block_bytes;
            load_row(from, first_row(exact) * dim, a.exact_k_format, CHANNEL_TOKENS * dim, y.data());
            encode_channels(y.data(), dim, a.k_format, codes.data(), block + first_row(slot) * row_bytes(a.k_format, dim),
                            block + a.k_scales + first_row(slot) / CHANNEL_TOKENS * 2 * dim);
        }
    }
}

}  // namespace ISA
