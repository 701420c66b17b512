// Products of bytes, summed in the 32-bit lanes of a register: codes of weights times signed codes of activations. VNNI
// and Arm's dot product compute four of them in one instruction; without these AVX multiplies pairs in 16 bits.
// Knows nothing of panels or scales.
#pragma once
#include "simd.h"
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace native {

#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool kUnsignedBytes = false;  // Arm's instruction multiplies signed bytes
#else
constexpr bool kUnsignedBytes = true;  // weights of all 8 bits are unsigned
#endif

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
constexpr bool kPairs = true;  // no instruction multiplies four bytes and sums them in 32 bits
#else
constexpr bool kPairs = false;
#endif

#if defined(__AVX512BW__)
inline IntRegister multiply_bytes(WordRegister w, WordRegister x) {
    return (IntRegister)_mm512_maddubs_epi16((__m512i)w, (__m512i)x);
}
inline IntRegister multiply_halves(WordRegister w, WordRegister x) {
    return (IntRegister)_mm512_madd_epi16((__m512i)w, (__m512i)x);
}
#elif defined(__AVX2__)
inline IntRegister multiply_bytes(WordRegister w, WordRegister x) {
    return (IntRegister)_mm256_maddubs_epi16((__m256i)w, (__m256i)x);
}
inline IntRegister multiply_halves(WordRegister w, WordRegister x) {
    return (IntRegister)_mm256_madd_epi16((__m256i)w, (__m256i)x);
}
#endif

// Sums of products of kBits-bit codes with activations of at most 127, over a group of 32 inputs. Codes of less than
// eight bits are unsigned and, as bytes, positive.
//   kParts: the parts of a quad of inputs, each multiplied by a word of activations.
// part: one of these parts of a quad's bytes, in each lane.
// add: adds the products of one part.
//   total: the sum in each lane.
template <int kBits> struct ByteProducts {
    static constexpr int kParts = 1;
    static WordRegister part(WordRegister quads, int) { return quads; }
    static IntRegister add(IntRegister sum, WordRegister w, WordRegister x) {
#if defined(__AVX512VNNI__)
        return (IntRegister)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__)
        return (IntRegister)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#elif defined(__ARM_FEATURE_DOTPROD)
        return (IntRegister)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)x);
#else
        for (int byte = 0; byte < 4; byte++) {
            const IntRegister code = (IntRegister)(w << (24 - 8 * byte) >> 24);
            sum += code * ((IntRegister)(x << (24 - 8 * byte)) >> 24);
        }
        return sum;
#endif
    }
    static IntRegister total(IntRegister sum) { return sum; }
};

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
using HalfWords = uint16_t __attribute__((vector_size(kRegisterBytes)));

// Returns the sum unchanged, and keeps GCC from computing all products first, for which it has too few registers.
inline IntRegister in_order(IntRegister sum) {
    asm("" : "+v"(sum));
    return sum;
}

// A pair of products of codes below 64 is at most 2 * 63 * 127, which fits in 16 bits.
template <int> struct PairProducts {
    static constexpr int kParts = 1;
    static WordRegister part(WordRegister quads, int) { return quads; }
    static IntRegister add(IntRegister sum, WordRegister w, WordRegister x) {
        return in_order(sum + multiply_halves((WordRegister)multiply_bytes(w, x), 0x00010001u - WordRegister{}));
    }
    static IntRegister total(IntRegister sum) { return sum; }
};
template <> struct ByteProducts<5> : PairProducts<5> {};
template <> struct ByteProducts<6> : PairProducts<6> {};

// A pair of products is at most 2 * 15 * 127, and the eight pairs of a group fit in 16 bits, so they are summed there.
template <> struct ByteProducts<4> {
    static constexpr int kParts = 1;
    static WordRegister part(WordRegister quads, int) { return quads; }
    static IntRegister add(IntRegister sum, WordRegister w, WordRegister x) {
        return in_order((IntRegister)((HalfWords)sum + (HalfWords)multiply_bytes(w, x)));
    }
    static IntRegister total(IntRegister sum) { return multiply_halves((WordRegister)sum, 0x00010001u - WordRegister{}); }
};

// 2 * 255 * 127 does not fit in 16 bits, so the bytes are widened: first the even ones of a quad, then the odd ones.
template <> struct ByteProducts<8> {
    static constexpr int kParts = 2;
    static WordRegister part(WordRegister quads, int odd) {
        return odd ? (WordRegister)((HalfWords)quads >> 8) : quads & 0x00ff00ffu;
    }
    static IntRegister add(IntRegister sum, WordRegister w, WordRegister x) {
        return in_order(sum + multiply_halves(w, x));
    }
    static IntRegister total(IntRegister sum) { return sum; }
};
#endif

inline FloatRegister floats(IntRegister v) { return __builtin_convertvector(v, FloatRegister); }

}  // namespace native
