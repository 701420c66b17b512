// Computes on sixteen lanes at a time, in GCC's vector types, which the compiler maps to whatever the CPU has. Only the
// bf16 dot product has an instruction of its own (AVX512-BF16, 64 flops); without it two FMAs do the same. Loops that
// must keep many sums in registers use vectors of one register each, because GCC keeps longer ones in memory.
// Knows nothing of matrices or models.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace native {

using F16 = float __attribute__((vector_size(64)));
using U16 = uint32_t __attribute__((vector_size(64)));
using I16 = int32_t __attribute__((vector_size(64)));
using H16 = uint16_t __attribute__((vector_size(32)));

// A register of the CPU's.
#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif
constexpr int kLanes = kRegisterBytes / 4;
using FloatRegister = float __attribute__((vector_size(kRegisterBytes)));
using WordRegister = uint32_t __attribute__((vector_size(kRegisterBytes)));
using IntRegister = int32_t __attribute__((vector_size(kRegisterBytes)));
template <class V> using Mask = decltype(V{} > V{});  // a vector's lanes as integers: all bits set, or none

// A word is 32 bits: one float, or two neighbouring bf16. All weights and activations are read in words.
using Word = uint32_t;
struct Bf16 {
    uint16_t bits;
};
template <class T> constexpr int per_word = 4 / sizeof(T);
inline Word word_at(const void* from) {
    Word word;
    memcpy(&word, from, sizeof word);
    return word;
}

// The type as which elements are multiplied: bf16 is multiplied as float if the CPU has no instruction for it.
#if defined(__AVX512BF16__)
constexpr bool kMultipliesBf16 = true;
#else
constexpr bool kMultipliesBf16 = false;
#endif
template <class T> using Factor = std::conditional_t<kMultipliesBf16, T, float>;

inline U16 load(const void* from) {
    U16 v;
    memcpy(&v, from, sizeof v);
    return v;
}
inline F16 load_f(const float* from) {
    F16 v;
    memcpy(&v, from, sizeof v);
    return v;
}
inline void store(float* to, F16 v) { memcpy(to, &v, sizeof v); }
template <class V> V loaded(const void* from) {
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}
inline WordRegister load_register(const void* from) { return loaded<WordRegister>(from); }

// Prefetches a line into the second-level cache. A prefetch into the first-level cache would occupy one of the few
// buffers for that cache's misses until memory answers.
inline void prefetch_to_second(const void* line) { __builtin_prefetch(line, 0, 2); }

// Loads the first words of 16, followed by zeros; memory after these words is not read. Call `lanes` outside of loops.
#if defined(__AVX512F__)
using Lanes = __mmask16;
inline Lanes lanes(int n) { return (Lanes)((1u << (n < 0 ? 0 : n > 16 ? 16 : n)) - 1); }
inline U16 load_part(const Word* from, Lanes some) { return (U16)_mm512_maskz_loadu_epi32(some, from); }
#else
using Lanes = int;
inline Lanes lanes(int n) { return n < 0 ? 0 : n > 16 ? 16 : n; }
inline U16 load_part(const Word* from, Lanes some) {
    U16 v{};
    if (some == 16) return load(from);
    memcpy(&v, from, 4 * some);
    return v;
}
#endif

inline U16 broadcast(Word x) { return x - U16{}; }
inline F16 broadcast_f(float x) { return x - F16{}; }
template <class V> V select(Mask<V> mask, V yes, V no) { return mask ? yes : no; }
template <class V> V larger(V a, V b) { return a > b ? a : b; }  // b where one of them is a NaN, as in the next one
template <class V> V smaller(V a, V b) { return a < b ? a : b; }

// Returns acc plus the product of two words: one multiplication for floats, two for a pair of bf16.
template <class T> inline F16 dot(F16 acc, U16 w, U16 a);
template <> inline F16 dot<float>(F16 acc, U16 w, U16 a) { return acc + (F16)w * (F16)a; }
template <> inline F16 dot<Bf16>(F16 acc, U16 w, U16 a) {
#if defined(__AVX512BF16__)
    return (F16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)a);
#else
    const U16 high = broadcast(0xffff0000u);
    acc += (F16)(w << 16) * (F16)(a << 16);
    return acc + (F16)(w & high) * (F16)(a & high);
#endif
}

// Joins 16 lanes to one number, halving them each time.
template <class Join> float joined(F16 v, Join join) {
    float eight __attribute__((vector_size(32))), four __attribute__((vector_size(16)));
    decltype(eight) eights[2];
    decltype(four) fours[2];
    memcpy(eights, &v, sizeof v);
    eight = join(eights[0], eights[1]);
    memcpy(fours, &eight, sizeof eight);
    four = join(fours[0], fours[1]);
    return join(join(four[0], four[2]), join(four[1], four[3]));
}
inline float sum(F16 v) {
    return joined(v, [](auto a, auto b) { return a + b; });
}
inline float max(F16 v) {
    return joined(v, [](auto a, auto b) { return a > b ? a : b; });
}

// Whether any lane of a mask is set.
inline bool any(IntRegister mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX__)
    return _mm256_testz_si256((__m256i)mask, (__m256i)mask) == 0;
#else
    int64_t halves[2];
    memcpy(halves, &mask, sizeof mask);
    return (halves[0] | halves[1]) != 0;
#endif
}

// To nearest even; a NaN stays one.
inline uint16_t round_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if (x != x) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
inline U16 rounded_bits(F16 x) {  // bf16 in the upper half of each lane
    U16 u = (U16)x;
    U16 even = u + 0x7fff + ((u >> 16) & 1);
    I16 nan = x != x;
    return ((U16)nan & (u | 0x400000)) | (~(U16)nan & even);
}

inline void store_as(float* to, F16 v) { store(to, v); }
inline void store_as(Bf16* to, F16 v) {
#if defined(__AVX512BF16__)
    H16 h = (H16)_mm512_cvtneps_pbh((__m512)v);
#else
    H16 h = __builtin_convertvector(rounded_bits(v) >> 16, H16);
#endif
    memcpy(to, &h, sizeof h);
}
inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) {
    uint32_t u = (uint32_t)x.bits << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
inline void assign(float* to, float x) { *to = x; }
inline void assign(Bf16* to, float x) { to->bits = round_bf16(x); }

// 2^x with a relative error under 2e-7; 0 below -126. x is at most 127.5.
template <class V> V exp2(V x) {
    const V shifted = x + 12583039.0f;  // 1.5 * 2^23 + 127: the low bits are x as an integer, and an exponent's bias
    const V r = x - (shifted - 12583039.0f);
    V p = 1.326472731e-3f * r + 9.671512991e-3f;
    p = p * r + 5.550733581e-2f;
    p = p * r + 2.402224243e-1f;
    p = p * r + 6.931470037e-1f;
    p = p * r + 1.0f;
    return select<V>(x < -126.0f, V{}, p * (V)((Mask<V>)shifted << 23));
}
constexpr float kLog2e = 1.44269504f;
// e^x with a relative error of 6e-7 for |x| < 10 and up to 4e-6 near 88; e^88 above 88.
template <class V> V exp(V x) { return exp2<V>(smaller<V>(88.0f - V{}, x) * kLog2e); }

// The natural logarithm of normal numbers above 0, with a relative error under 2e-7.
template <class V> V log(V x) {
    const Mask<V> exponent = ((Mask<V>)x - 0x3f3504f3) >> 23;  // x / 2^exponent is from sqrt(1/2) to sqrt(2)
    const V r = (V)((Mask<V>)x - (exponent << 23)) - 1.0f, e = __builtin_convertvector(exponent, V), square = r * r;
    V p = 6.746454653e-2f * r - 1.167563065e-1f;
    p = p * r + 1.188823605e-1f;
    p = p * r - 1.240559602e-1f;
    p = p * r + 1.42195425e-1f;
    p = p * r - 1.666799521e-1f;
    p = p * r + 2.000211919e-1f;
    p = p * r - 2.500000962e-1f;
    p = p * r + 3.333331259e-1f;
    return r + (p * r * square - 0.5f * square - 2.12194440e-4f * e) + 0.693359375f * e;
}

// Returns a0 b0 a1 b1 … from the lower eight lanes; `high_halves` does so from the upper eight.
template <class V> V low_halves(V a, V b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
template <class V> V high_halves(V a, V b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

// Step of summing each of 16 vectors into one lane: 15 such steps replace 16 horizontal sums of 8 operations each.
inline F16 interleave_add(F16 a, F16 b) {
    return low_halves(a, b) + high_halves(a, b);
}
inline F16 sums(F16 (&x)[16]) {
    for (int half = 8; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) x[i] = interleave_add(x[i], x[i + half]);
    return x[0];
}

}  // namespace native
