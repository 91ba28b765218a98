// What the binding hands over: one packed block per call. `binding.py` packs the same fields in the same order.
// All members are 8 bytes wide, so there is no padding. Strides of tensors count elements, those of arenas bytes.
// k_rotate, v_rotate: the width of the blocks in which vectors are rotated, 0: they are not.
#pragma once
#include <cstdint>

// Of inputs (the first three) and of stored codes. From INT3 on: one-byte scales and planes of codes; from PC3 on: of K,
// with scales and zeros by channel. See quant/formats.py.
enum Dtype : int64_t { FP32, FP16, BF16, INT8, E4M3, INT3, INT4, INT5, INT6, PC3, PC4, PC5 };

// Where one layer's K and V lie in every block of a pool: kernels/layout.py says it, codes [kv_head][slot][row bytes],
// scales [kv_head][slot][group], by channel [kv_head][slot / CHANNEL_TOKENS][2 k_dim]. Where V lies in K, V's offsets are
// K's.
struct Pool {
    uint8_t* arena;
    int64_t block_bytes;
    int64_t k_codes, k_scales, v_codes, v_scales;  // byte offsets in a block
    int64_t k_format, v_format;
    int64_t k_group, v_group;  // dims that share a scale; the last group of a vector may be shorter
};

struct WriteArgs {
    Pool pool;
    const void *key, *value;  // [num_tokens, num_kv_heads, dim], last stride 1
    int64_t key_token, key_head, value_token, value_head;
    const int64_t* slots;  // [num_tokens], negative: padding
    int64_t num_tokens, num_kv_heads, k_dim, v_dim, block_size, dtype, k_rotate, v_rotate, v_in_k, threads;
};

// Of K by channel: the pool that it is stored in, and the exact pool that it is read from.
struct EncodeArgs {
    uint8_t *arena, *exact_arena;
    int64_t block_bytes, exact_block_bytes;
    int64_t k_scales, k_format, exact_k_format;  // codes and exact copies lie at the beginning of the layer's part
    const int64_t *slots, *exact_slots;          // [num_tokens], negative: padding
    int64_t num_tokens, num_kv_heads, k_dim, block_size, threads;
};

struct AttentionArgs {
    Pool pool, exact;
    const int32_t *tables, *exact_tables;  // [num_seqs, stride]
    int64_t table_stride, exact_table_stride;
    const void *query, *query_sink;  // [num_tokens, num_q_heads, k_dim], last stride 1; query_sink may be null
    int64_t query_token, query_head, sink_token, sink_head;
    void* out;  // [num_tokens, num_q_heads, v_dim], contiguous, in the query's dtype
    const int32_t *query_start_loc, *seq_lens;
    const float* sink_logits;  // [num_q_heads] or null
    int64_t num_tokens, num_seqs, num_q_heads, num_kv_heads, k_dim, v_dim, block_size, dtype, k_rotate, v_rotate;
    int64_t v_stored_dim;  // of the stored vectors that V is read from: v_dim, or k_dim where V lies in K
    int64_t window, num_sink_tokens, residual_length, num_exact_sinks, threads;
    double scale, softcap;
};
