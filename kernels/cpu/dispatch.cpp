// The entry points: the instruction set is chosen here, at run time.
#include "args.h"

#define DECLARE(isa)                               \
    namespace isa {                                \
    void kv_write(const WriteArgs&);               \
    void encode_keys(const EncodeArgs&);           \
    void paged_attention(const AttentionArgs&);    \
    }
DECLARE(portable)
#if defined(__x86_64__)
DECLARE(avx2)
DECLARE(avx512)
#endif

enum Isa : int64_t { PORTABLE, AVX2, AVX512 };

#pragma GCC visibility push(default)
extern "C" {

// Whether this CPU runs the code of an instruction set.
int64_t lean_has_isa(int64_t isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (isa == AVX512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512vnni") && lean_has_isa(AVX2);
    if (isa == AVX2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
    return isa == PORTABLE;
}

void lean_kv_write(const WriteArgs* args, int64_t isa) {
#if defined(__x86_64__)
    if (isa == AVX512) return avx512::kv_write(*args);
    if (isa == AVX2) return avx2::kv_write(*args);
#endif
    portable::kv_write(*args);
}

void lean_encode_keys(const EncodeArgs* args, int64_t isa) {
#if defined(__x86_64__)
    if (isa == AVX512) return avx512::encode_keys(*args);
    if (isa == AVX2) return avx2::encode_keys(*args);
#endif
    portable::encode_keys(*args);
}

void lean_paged_attention(const AttentionArgs* args, int64_t isa) {
#if defined(__x86_64__)
    if (isa == AVX512) return avx512::paged_attention(*args);
    if (isa == AVX2) return avx2::paged_attention(*args);
#endif
    portable::paged_attention(*args);
}
}
