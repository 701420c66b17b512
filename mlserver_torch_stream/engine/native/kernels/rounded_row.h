// Activations as int8, each block of 32 with a scale of its own: what integer products read.
// Knows nothing of weights. A row's codes depend on the row alone.
#pragma once
#include <algorithm>
#include "simd.h"

namespace native {

constexpr int kGroup = 32;  // neighbouring inputs

struct RoundedBlock {
    int8_t codes[kGroup];
    int32_t sums[2];  // of the codes of each half
    float scale;
    float sum;  // of all 32, scaled
};

inline int64_t groups_of(int64_t inputs) { return (inputs + kGroup - 1) / kGroup; }

inline F16 load_values(const float* from) { return load_f(from); }
inline F16 load_values(const Bf16* from) {
    H16 h;
    memcpy(&h, from, sizeof h);
    return (F16)(__builtin_convertvector(h, U16) << 16);
}

// The largest magnitude, by its bits: a NaN is larger than all numbers, so that the block's scale is NaN too.
inline float largest_of(F16 x, F16 y) {
    const I16 a = (I16)x & 0x7fffffff, b = (I16)y & 0x7fffffff;
    const I16 both = a > b ? a : b;
    int32_t most = both[0];
    for (int i = 1; i < 16; i++) most = both[i] > most ? both[i] : most;
    float largest;
    memcpy(&largest, &most, sizeof largest);
    return largest;
}

// The codes are at most 127, so that a product of a pair fits 16 bits.
inline void round_block(F16 x, F16 y, RoundedBlock& to) {
    const float largest = largest_of(x, y);
    const float inverse = largest > 1e-30f && largest < 1e38f ? 127.0f / largest : 0.0f;
    // To nearest even, as the sum's last place is 1 there.
    const F16 magic = broadcast_f(12582912.0f);  // 1.5 * 2^23
    const I16 low = (I16)(x * inverse + magic) - (I16)magic, high = (I16)(y * inverse + magic) - (I16)magic;
    using Bytes = int8_t __attribute__((vector_size(16)));
    const Bytes first = __builtin_convertvector(low, Bytes), second = __builtin_convertvector(high, Bytes);
    memcpy(to.codes, &first, 16), memcpy(to.codes + 16, &second, 16);
    int32_t sums[2] = {};
    for (int i = 0; i < 16; i++) sums[0] += low[i], sums[1] += high[i];
    to.sums[0] = sums[0], to.sums[1] = sums[1];
    to.scale = largest / 127.0f;  // infinite or NaN if a value is
    to.sum = to.scale * (float)(sums[0] + sums[1]);
}

// A row of k values; what is missing of the last block is zero.
template <class T> void round_row(const T* row, int64_t k, RoundedBlock* to) {
    int64_t i = 0;
    for (; i + kGroup <= k; i += kGroup) round_block(load_values(row + i), load_values(row + i + 16), *to++);
    if (i == k) return;
    T rest[kGroup] = {};
    std::copy(row + i, row + k, rest);
    round_block(load_values(rest), load_values(rest + 16), *to);
}

}  // namespace native
