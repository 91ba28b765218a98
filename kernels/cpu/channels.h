// K by channel (Kind.CHANNEL of quant/formats.py): the C++ side of quant/channels.py, which defines the bytes.
#pragma once
#include "codecs.h"

namespace ISA {

constexpr int CHANNEL_TOKENS = 32;  // tokens that share a scale and a zero for each channel

// One channel's scale, zero and factor of its codes, for W channels.
struct Channels {
    vec zero, inverse;
    ints byte, nothing;  // nothing: all codes are 0
};

INLINE vec rint_within(vec x, float limit) {
    const vec low = set1(-limit), high = set1(limit), magic = set1(12582912.0f);  // 1.5 * 2^23 rounds half to even
    x = x < low ? low : x > high ? high : x;
    return (x + magic) - magic;
}

// absmax: bits of the largest size.
INLINE Channels channels_of(vec low, vec high, ints absmax, float n) {
    const ints bad = absmax >= 0x7f800000;
    low = select(bad, vec{}, low), high = select(bad, vec{}, high);
    const vec size = select(bad, vec{}, as_float(absmax));
    const vec span = (high - low) / set1(2 * n - 1), least = size / set1(126 + n);
    const ints bits = as_ints(span > least ? span : least);
    ints byte = ((bits + 0xfffff) >> 20) - (112 << 3);
    byte = byte < MIN_BYTE ? ints{} + MIN_BYTE : byte > MAX_BYTE ? ints{} + MAX_BYTE : byte;
    const vec inverse = set1(1.0f) / (as_float(byte << 20) * set1(0x1p112f));
    vec zero = rint_within(low * inverse, 300) + set1(n);
    zero = zero < set1(-128) ? set1(-128) : zero > set1(127) ? set1(127) : zero;
    const ints nothing = bad | (absmax == 0);
    byte = bad ? ints{} + NAN_BYTE : absmax == 0 ? ints{} : byte;
    return {select(nothing, vec{}, zero), inverse, byte, nothing};
}

// y [CHANNEL_TOKENS][dim] to the codes of a group's rows and to its scales and zeros; codes [CHANNEL_TOKENS][dim] is
// working memory. dim is a multiple of 16.
inline void encode_channels(const float* y, int64_t dim, int64_t format, int8_t* codes, uint8_t* rows, uint8_t* channels) {
    const float n = (float)(1 << (grid_bits(format) - 1));
    for (int64_t d = 0; d < dim; d += W) {
        vec low = load(y + d), high = low;
        ints absmax = as_ints(low) & 0x7fffffff;
        for (int t = 1; t < CHANNEL_TOKENS; ++t) {
            const vec x = load(y + t * dim + d);
            const ints size = as_ints(x) & 0x7fffffff;
            low = x < low ? x : low, high = x > high ? x : high;
            absmax = size > absmax ? size : absmax;
        }
        const Channels of = channels_of(low, high, absmax, n);
        for (int t = 0; t < CHANNEL_TOKENS; ++t) {
            vec code = rint_within(load(y + t * dim + d) * of.inverse, 300) - of.zero;
            code = code < set1(-n) ? set1(-n) : code > set1(n - 1) ? set1(n - 1) : code;
            const ints whole = __builtin_convertvector(select(of.nothing, vec{}, code), ints);
            for (int i = 0; i < W; ++i) codes[t * dim + d + i] = (int8_t)whole[i];
        }
        const ints zero = __builtin_convertvector(of.zero, ints);
        for (int i = 0; i < W; ++i) {
            channels[d + i] = (uint8_t)of.byte[i];
            channels[dim + d + i] = (uint8_t)zero[i];
        }
    }
    for (int t = 0; t < CHANNEL_TOKENS; ++t)
        pack_codes(codes + t * dim, 0, dim, dim, format, rows + t * row_bytes(format, dim));
}

// The one-byte scales of W channels; 0xF8 and above are NaN.
INLINE vec scales_of_bytes(const uint8_t* from) {
    const ints byte = load_bytes(from) & 0xff;
    return select(byte >= 0xf8, set1(NAN), as_float(byte << 20) * set1(0x1p112f));
}

// Scales and zeros of a group to floats; the zeros less 1/2, since kernels decode a code as code + 1/2.
inline void decode_channels(const uint8_t* channels, int64_t dim, float* scale, float* zero) {
    for (int64_t d = 0; d < dim; d += W) {
        store(scale + d, scales_of_bytes(channels + d));
        store(zero + d, to_float(load_bytes(channels + dim + d)) - set1(0.5f));
    }
}

}  // namespace ISA
