// Weights to factors on their way to the tiles, into a scratch that stays in the caches: int8 to bf16 or floats, bf16 to
// floats. Nothing is rounded here, for every int8 is a bf16; the scale of an output multiplies its sum, in float32.
// Knows nothing of rows: what the tiles read, and so the order of summation, is the same for any number of them.
#pragma once
#include "simd.h"

namespace native {

// A panel of int8 is [k / 2][2 halves of the outputs][2 neighbouring inputs][16 outputs]: 64 bytes for the 32 words
// of bf16 that they become.
constexpr int64_t kNarrowWord = 64;

inline F16 widened(const int8_t* from) {
#if defined(__AVX512F__)
    return (F16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
    F16 v;
    for (int i = 0; i < 16; i += 8) {
        const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i));
        const __m256 part = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
        memcpy(reinterpret_cast<float*>(&v) + i, &part, sizeof part);
    }
    return v;
#else
    float v[16];
    for (int i = 0; i < 16; i++) v[i] = from[i];
    return load_f(v);
#endif
}

inline U16 word_of(F16 first, F16 second) { return ((U16)first >> 16) | (U16)second; }

// Words of int8 as words of factors A.
template <class A> void widen_panel(const int8_t* panel, int64_t words, Word* to) {
    constexpr int64_t kAhead = 4096;
    for (int64_t k = 0; k < words; k++) {
        const int8_t* from = panel + k * kNarrowWord;
        __builtin_prefetch(from + kAhead);
        const F16 low[2] = {widened(from), widened(from + 16)}, high[2] = {widened(from + 32), widened(from + 48)};
        if constexpr (per_word<A> == 2) {
            const U16 words_of[2] = {word_of(low[0], low[1]), word_of(high[0], high[1])};
            memcpy(to + k * 32, words_of, sizeof words_of);
        } else {
            const F16 inputs[4] = {low[0], high[0], low[1], high[1]};
            memcpy(to + k * 64, inputs, sizeof inputs);
        }
    }
}

// Words of two bf16 as two words of floats.
inline void widen_words(const Word* from, int64_t words, Word* to) {
    for (int64_t k = 0; k < words; k++)
        for (int i = 0; i < 32; i += kLanes) {
            WordRegister pair;
            memcpy(&pair, from + k * 32 + i, sizeof pair);
            const WordRegister first = pair << 16, second = pair & 0xffff0000u;
            memcpy(to + k * 64 + i, &first, sizeof first);
            memcpy(to + k * 64 + 32 + i, &second, sizeof second);
        }
}

// The weight of one output (of a panel) and one input, unscaled.
inline float narrow_weight(const int8_t* panel, int64_t output, int64_t input) {
    return panel[input / 2 * kNarrowWord + output / 16 * 32 + input % 2 * 16 + output % 16];
}

}  // namespace native
