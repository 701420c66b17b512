// Activations as int8, for integer products: each block of 32 has its own scale.
// Knows nothing of weights. A row's codes depend only on the row.
#pragma once
#include <algorithm>
#include <cfloat>
#include "integer_dot.h"

namespace native {

constexpr int kGroup = 32;  // neighbouring inputs

// The codes once more in 16 bits, for CPUs that multiply bytes in 16 bits: the even ones, then the odd ones.
template <bool> struct WidenedCodes {
    void widen(const int8_t*) {}
};
template <> struct WidenedCodes<true> {
    int16_t widened[2][kGroup / 2];

    void widen(const int8_t* codes) {
        for (int i = 0; i < kGroup / 2; i++)
            for (int odd = 0; odd < 2; odd++) widened[odd][i] = codes[2 * i + odd];
    }
    // The codes of the even or the odd ones of four inputs.
    Word pair(int quad, int odd) const { return word_at(widened[odd] + 2 * quad); }
};

struct RoundedBlock : WidenedCodes<kPairs> {
    int8_t codes[kGroup];
    int32_t sums[2];  // of the codes of each half
    float scale;
    float sum;  // of all 32, scaled

    // The codes of four inputs.
    Word quad(int quad) const { return word_at(codes + 4 * quad); }
};

inline int64_t groups_of(int64_t inputs) { return (inputs + kGroup - 1) / kGroup; }

// Rounds a block to codes of at most 127. The loops are plain, because the compiler vectorises them on every CPU.
template <class T> void round_block(const T* from, RoundedBlock& to) {
    float x[kGroup];
    for (int i = 0; i < kGroup; i++) x[i] = to_float(from[i]);
    // The largest magnitude, compared as bits: a NaN is larger than all numbers, so the block's scale becomes NaN too.
    int32_t most = 0;
    for (int i = 0; i < kGroup; i++) {
        int32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        most = std::max(most, bits & 0x7fffffff);
    }
    float largest;
    memcpy(&largest, &most, sizeof largest);
    const float inverse = largest > 1e-30f && largest <= FLT_MAX ? 127.0f / largest : 0.0f;
    for (int i = 0; i < kGroup; i++) {
        // Rounds to nearest even, because the last place of 1.5 * 2^23 is 1; the low bits are the code.
        const float shifted = x[i] * inverse + 12582912.0f;
        uint32_t bits;
        memcpy(&bits, &shifted, sizeof bits);
        to.codes[i] = (int8_t)(bits & 0xff);
    }
    for (int half = 0; half < 2; half++) {
        to.sums[half] = 0;
        for (int i = 0; i < kGroup / 2; i++) to.sums[half] += to.codes[half * kGroup / 2 + i];
    }
    to.widen(to.codes);
    to.scale = largest / 127.0f;  // infinite or NaN if one of the values is
    to.sum = to.scale * (float)(to.sums[0] + to.sums[1]);
}

// Rounds a row of k values. The last block is filled with zeros.
template <class T> void round_row(const T* row, int64_t k, RoundedBlock* to) {
    int64_t i = 0;
    for (; i + kGroup <= k; i += kGroup) round_block(row + i, *to++);
    if (i == k) return;
    T rest[kGroup] = {};
    std::copy(row + i, row + k, rest);
    round_block(rest, *to);
}

}  // namespace native
