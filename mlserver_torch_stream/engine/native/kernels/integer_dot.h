// Four products of bytes, summed into each of sixteen 32-bit lanes: unsigned codes of weights times signed codes of
// activations. One instruction with VNNI; without it two steps of 16 bits, which never saturate here.
// Knows nothing of panels or scales.
#pragma once
#include "simd.h"
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace native {

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr bool kUnsignedBytes = true;  // weights of all 8 bits may be unsigned
#else
constexpr bool kUnsignedBytes = false;  // they are signed, as 255 * 127 + 255 * 127 does not fit 16 bits
#endif

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
struct Halves {
    __m256i low, high;
};
inline Halves halves(U16 v) {
    Halves h;
    memcpy(&h, &v, sizeof h);
    return h;
}
inline I16 whole(__m256i low, __m256i high) {
    const Halves h{low, high};
    I16 v;
    memcpy(&v, &h, sizeof v);
    return v;
}
// |w| is at most 128 and |a| at most 127: a pair is at most 32512.
template <bool kSigned> __m256i pairs(__m256i acc, __m256i w, __m256i a) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(acc, w, a);
#else
    const __m256i pair = kSigned ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w))
                                 : _mm256_maddubs_epi16(w, a);
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pair, _mm256_set1_epi16(1)));
#endif
}
#endif

// kSigned: the bytes of w are signed, else unsigned; if not kUnsignedBytes, unsigned ones are below 16.
template <bool kSigned> inline I16 dot_bytes(I16 acc, U16 w, U16 a) {
#if defined(__AVX512VNNI__)
    return (I16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, (__m512i)a);
#elif defined(__AVX512BW__)
    const __m512i x = (__m512i)a, y = (__m512i)w;
    const __m512i turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(y), _mm512_setzero_si512(), x);
    const __m512i pair = kSigned ? _mm512_maddubs_epi16(_mm512_abs_epi8(y), turned) : _mm512_maddubs_epi16(y, x);
    return (I16)_mm512_add_epi32((__m512i)acc, _mm512_madd_epi16(pair, _mm512_set1_epi16(1)));
#elif defined(__AVX2__)
    const Halves s = halves((U16)acc), x = halves(a), y = halves(w);
    return whole(pairs<kSigned>(s.low, y.low, x.low), pairs<kSigned>(s.high, y.high, x.high));
#elif defined(__ARM_FEATURE_DOTPROD)
    int32x4_t s[4];
    int8x16_t x[4], y[4];  // unsigned ones are below 16, and so the same signed
    memcpy(s, &acc, sizeof s), memcpy(x, &a, sizeof x), memcpy(y, &w, sizeof y);
    for (int i = 0; i < 4; i++) s[i] = vdotq_s32(s[i], y[i], x[i]);
    memcpy(&acc, s, sizeof s);
    return acc;
#else
    for (int byte = 0; byte < 4; byte++) {
        const U16 raised = w << (24 - 8 * byte);
        const I16 y = kSigned ? (I16)raised >> 24 : (I16)(raised >> 24);
        acc += y * ((I16)(a << (24 - 8 * byte)) >> 24);
    }
    return acc;
#endif
}

inline F16 floats(I16 v) { return __builtin_convertvector(v, F16); }
inline I16 integers(int32_t x) { return x - I16{}; }

}  // namespace native
