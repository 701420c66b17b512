// The operations on one head of one token: its norm, its rotation, and storing sums in the model's own type.
// Knows nothing of where heads come from or go to.
#pragma once
#include <cmath>
#include "simd.h"

namespace native {

constexpr int kMaxHead = 512;

// 1 / sqrt(mean(x^2) + eps); any count.
__attribute__((noinline)) inline float inverse_rms(const float* x, int64_t count, float eps) {
    F16 squares{};
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) squares += load_f(x + i) * load_f(x + i);
    float total = sum(squares);
    for (; i < count; i++) total += x[i] * x[i];
    return 1.0f / std::sqrt(total / (float)count + eps);
}

template <class T> void convert(const float* x, int count, T* to) {
    int i = 0;
    for (; i + 16 <= count; i += 16) store_as(to + i, load_f(x + i));
    for (; i < count; i++) assign(to + i, x[i]);
}

// Writes x * scale * weight as T, or x itself if weight is null; the first 2 * half lanes are rotated by cos and sin.
template <class T>
__attribute__((noinline)) void finish_head(const float* x, float scale, const float* weight, const float* cos, const float* sin, int half,
                 int head_dim, T* to) {
    float scaled[kMaxHead], turned[kMaxHead];
    if (weight != nullptr) {
        for (int i = 0; i < head_dim; i++) scaled[i] = x[i] * scale * weight[i];
        x = scaled;
    }
    for (int i = 0; i < half; i++) {
        turned[i] = x[i] * cos[i] - x[i + half] * sin[i];
        turned[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
    }
    for (int i = 2 * half; i < head_dim; i++) turned[i] = x[i];
    convert(turned, head_dim, to);
}

// Joins two rows of values to words of (first row, second row), with even and odd dimensions apart, so that a product
// with a pair of probabilities sums over keys without a shuffle. `emit` puts the dimensions back in order.
inline void pair_rows(U16 first, U16 second, U16& even, U16& odd) {
    even = (first & 0xffffu) | (second << 16);
    odd = (first >> 16) | (second & 0xffff0000u);
}

inline void store_part(Word* to, U16 v, int n) {
    if (n >= 16) {
        memcpy(to, &v, sizeof v);
    } else if (n > 0) {
        memcpy(to, &v, 4 * n);
    }
}

// Stores sums * scale as T. For bf16 each 32 sums are 16 even dimensions, followed by 16 odd ones.
inline void emit(const float* sums, float scale, int head_dim, float* to) {
    for (int i = 0; i < head_dim; i += 16)
        store_part(reinterpret_cast<Word*>(to + i), (U16)(load_f(sums + i) * scale), head_dim - i);
}
inline void emit(const float* sums, float scale, int head_dim, Bf16* to) {
    for (int i = 0; i < head_dim; i += 32) {
        const U16 even = rounded_bits(load_f(sums + i) * scale), odd = rounded_bits(load_f(sums + i + 16) * scale);
        store_part(reinterpret_cast<Word*>(to + i), (even >> 16) | (odd & 0xffff0000u), (head_dim - i) / 2);
    }
}

// Returns cap * tanh(x / cap), computed from e^(2x / cap); a cap of 0 means no cap.
inline F16 soft_cap(F16 x, float cap) {
    if (cap == 0) return x;
    const F16 limit = broadcast_f(20.0f);  // tanh is 1 in float32 from 9 on
    const F16 y = x * (2.0f / cap);
    const F16 e = exp(smaller(limit, y));
    return (e - 1.0f) / (e + 1.0f) * cap;
}

// Writes the unnormalised probabilities 2^(score * scale - most) to `to`, and returns their sum. `most` is at least the
// largest score * scale.
template <class T>
__attribute__((noinline)) float exponentials(const float* scores, int64_t count, float scale, float most, T* to) {
    F16 total{};
    for (int64_t i = 0; i < count; i += 16) {
        const F16 p = exp2(load_f(scores + i) * scale - most);
        total += p;
        store_as(to + i, p);
    }
    return sum(total);
}

// Scales and caps scores in place; count is a multiple of 16.
__attribute__((noinline)) inline void cap_scores(float* scores, int64_t count, float scale, float cap) {
    for (int64_t i = 0; i < count; i += 16) store(scores + i, soft_cap(load_f(scores + i) * scale, cap));
}

}  // namespace native
