// The signs of the rotation: quant/rotation.py chooses them.
#pragma once
#include <cstdint>

constexpr int64_t SIGN_PERIOD = 256;

struct Signs {
    uint32_t bits[SIGN_PERIOD];  // the sign bit of a float to flip, of element d % SIGN_PERIOD

    constexpr Signs() : bits() {
        for (uint32_t d = 0; d < SIGN_PERIOD; ++d) {
            const uint32_t pairs = (d & d >> 3 & 7) | (d >> 3 & d >> 4 & 8);  // bits 0 and 3, 1 and 4, 2 and 5, 6 and 7
            bits[d] = (0x6996u >> pairs & 1) << 31;                            // the parity of four bits
        }
    }
};
constexpr Signs SIGNS;
