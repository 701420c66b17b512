// Loads elements of a tensor as the words that products need. They are unchanged, or widened to float if the type has
// no product of its own (fp16) or its rows do not end with a whole word (bf16 of odd length).
// Knows nothing of heads or pages.
#pragma once
#include <algorithm>
#include "heads.h"

namespace native {

struct Fp16 {
    uint16_t bits;
};

inline H16 load_halves(const void* from, Lanes some) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    return (H16)_mm256_maskz_loadu_epi16(some, from);
#else
#if defined(__AVX512F__)
    const int count = __builtin_popcount(some);
#else
    const int count = some;
#endif
    H16 v{};
    if (count == 16) {
        memcpy(&v, from, sizeof v);
    } else {
        memcpy(&v, from, 2 * (size_t)count);
    }
    return v;
#endif
}

// Widens fp16 with integer operations only.
template <class Floats, class Words, class Halves> Floats widened_by_bits(Halves halves) {
    const Words bits = __builtin_convertvector(halves, Words);
    const Words magnitude = (bits & 0x7fffu) << 13;
    const Words finite = (Words)((Floats)magnitude * 0x1p112f);  // also of subnormal ones
    const Words special = (Words)(magnitude >= 0x0f800000u);
    return (Floats)((special & (magnitude | 0x7f800000u)) | (~special & finite) | (bits & 0x8000u) << 16);
}

inline F16 widened_halves(H16 halves) {
#if defined(__AVX512F__)
    return (F16)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__F16C__)
    __m128i half[2];
    memcpy(half, &halves, sizeof half);
    const __m256 wide[2] = {_mm256_cvtph_ps(half[0]), _mm256_cvtph_ps(half[1])};
    F16 x;
    memcpy(&x, wide, sizeof x);
    return x;
#else
    return widened_by_bits<F16, U16>(halves);
#endif
}

// A register of fp16.
inline FloatRegister load_widened(const void* from) {
    uint16_t halves __attribute__((vector_size(kRegisterBytes / 2)));
    memcpy(&halves, from, sizeof halves);
#if defined(__AVX512F__)
    return (FloatRegister)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__F16C__)
    return (FloatRegister)_mm256_cvtph_ps((__m128i)halves);
#else
    return widened_by_bits<FloatRegister, WordRegister>(halves);
#endif
}

// Rounds to nearest even; a NaN stays a NaN.
inline uint16_t round_fp16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    const uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
    uint32_t magnitude = u & 0x7fffffff;
    if (magnitude > 0x7f800000) return sign | 0x7e00;
    if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and more
    if (magnitude < 0x38800000) {                       // below 2^-14: 0.5 has the last place of a subnormal half
        float shifted;
        memcpy(&shifted, &magnitude, 4);
        shifted += 0.5f;
        memcpy(&u, &shifted, 4);
        return (uint16_t)(sign | (u - 0x3f000000));
    }
    magnitude += 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | ((magnitude - 0x38000000) >> 13));
}

inline H16 rounded_halves(F16 v) {
#if defined(__AVX512F__)
    return (H16)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
    __m256 wide[2];
    memcpy(wide, &v, sizeof wide);
    const __m128i half[2] = {_mm256_cvtps_ph(wide[0], _MM_FROUND_TO_NEAREST_INT),
                             _mm256_cvtps_ph(wide[1], _MM_FROUND_TO_NEAREST_INT)};
    H16 halves;
    memcpy(&halves, half, sizeof halves);
    return halves;
#else
    H16 halves;
    for (int i = 0; i < 16; i++) halves[i] = round_fp16(v[i]);
    return halves;
#endif
}

// S is the tensor's type, T that of the words. 16 words are 16 * per_word<T> elements.
template <class S, class T> struct Elements;

template <class T> struct Elements<T, T> {
    static U16 load(const T* from, Lanes some) { return load_part(reinterpret_cast<const Word*>(from), some); }
    // Stores sums * scale, in the order of `emit`.
    static void store(const float* sums, float scale, int count, T* to) { emit(sums, scale, count, to); }
};

template <> struct Elements<Fp16, float> {
    static U16 load(const Fp16* from, Lanes some) { return (U16)widened_halves(load_halves(from, some)); }
    static void store(const float* sums, float scale, int count, Fp16* to) {
        for (int i = 0; i < count; i += 16) {
            const H16 halves = rounded_halves(load_f(sums + i) * scale);
            memcpy(to + i, &halves, sizeof(Fp16) * (size_t)std::min(16, count - i));
        }
    }
};

template <> struct Elements<Bf16, float> {
    static U16 load(const Bf16* from, Lanes some) {
        return __builtin_convertvector(load_halves(from, some), U16) << 16;
    }
    static void store(const float* sums, float scale, int count, Bf16* to) {
        for (int i = 0; i < count; i++) to[i].bits = round_bf16(sums[i] * scale);
    }
};

}  // namespace native
