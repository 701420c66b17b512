// Weights as small integers: groups of 32 neighbouring inputs, or halves of them, with a scale for each output and
// perhaps a minimum, as in GGUF's formats. They are multiplied as integers with rounded activations.
// Knows nothing of files; ``groups.py`` lays the panels out.
#pragma once
#include "elements.h"
#include "integer_dot.h"
#include "rounded_row.h"

namespace native {

// A weight is scale * (code - kOffset) + minimum. A panel of 32 outputs is a row of blocks, one for each group: its
// codes, [8 quads of inputs][32 outputs][4 inputs] in bytes; of 4 bits, one byte holds a code of output i and, above
// it, that of output 16 + i. Then scales [kScales][32] and minima [32] in fp16.
template <int kBits, bool kHasMinimum, int kScalesPerGroup = 1> struct Codes {
    static constexpr bool kMinimum = kHasMinimum, kBytewise = kBits == 8;
    static constexpr int kScales = kScalesPerGroup;
    static constexpr int kOffset = kBits == 8 ? 128 : kMinimum ? 0 : 8;
    static constexpr bool kSigned = kBytewise && !kUnsignedBytes;
    static constexpr int kLeft = kSigned ? 0 : kOffset;  // to be taken from the sums of products
    static constexpr int64_t kCodeBytes = kBits * 128, kHalves = 64;
    static constexpr int64_t kBlock = kCodeBytes + kHalves * (kScales + kMinimum);

    static void quad(const uint8_t* block, int q, U16& w0, U16& w1) {
        if constexpr (kBytewise) {
            const U16 turn = broadcast(kSigned ? 0x80808080u : 0);
            w0 = load(block + 128 * q) ^ turn, w1 = load(block + 128 * q + 64) ^ turn;
        } else {
            const U16 both = load(block + 64 * q), low = broadcast(0x0f0f0f0fu);
            w0 = both & low, w1 = both >> 4 & low;
        }
    }
    static F16 halves(const uint8_t* block, int which, int half) {
        H16 h;
        memcpy(&h, block + kCodeBytes + kHalves * which + 32 * half, sizeof h);
        return widened_halves(h);
    }
};

using Four = Codes<4, false>;
using FourMin = Codes<4, true>;
using Eight = Codes<8, false>;
using EightMin = Codes<8, true>;
using EightHalves = Codes<8, false, 2>;
using EightMinHalves = Codes<8, true, 2>;

enum Format : int64_t { kPlain, kFour, kFourMin, kEight, kEightMin, kEightHalves, kEightMinHalves };

#if defined(__AVX512F__)
constexpr int kGroupedRows = 6;  // 6 x 4 accumulators, 2 weights and 1 activation fill 27 of 32 registers
#else
constexpr int kGroupedRows = 2;
#endif

// out[M][32] = rows[M][blocks] x panel[blocks]. Integers are exact, and the order of the scaled sums is that of the
// blocks for every M: a row's bits are the same in any company.
template <class C, int M>
__attribute__((noinline)) void grouped_tile(const RoundedBlock* rows, int64_t stride, const uint8_t* panel,
                                            int64_t blocks, float* out, int64_t ldo) {
    constexpr int kQuads = 8 / C::kScales;
    constexpr int64_t kAhead = 4096;
    F16 sums[M][2] = {};
    for (int64_t b = 0; b < blocks; b++, panel += C::kBlock) {
#pragma GCC unroll 18
        for (int64_t line = 0; line < C::kBlock; line += 64) __builtin_prefetch(panel + kAhead + line);
#pragma GCC unroll 2
        for (int s = 0; s < C::kScales; s++) {
            I16 dots[M][2];
#pragma GCC unroll 6
            for (int m = 0; m < M; m++) {
                const RoundedBlock& x = rows[m * stride + b];
                const int32_t sum = C::kScales == 2 ? x.sums[s] : x.sums[0] + x.sums[1];
                dots[m][0] = dots[m][1] = integers(-C::kLeft * sum);
            }
#pragma GCC unroll 8
            for (int q = 0; q < kQuads; q++) {
                U16 w0, w1;
                C::quad(panel, s * kQuads + q, w0, w1);
#pragma GCC unroll 6
                for (int m = 0; m < M; m++) {
                    Word four;
                    memcpy(&four, rows[m * stride + b].codes + 4 * (s * kQuads + q), sizeof four);
                    const U16 x = broadcast(four);
                    dots[m][0] = dot_bytes<C::kSigned>(dots[m][0], w0, x);
                    dots[m][1] = dot_bytes<C::kSigned>(dots[m][1], w1, x);
                }
            }
            const F16 s0 = C::halves(panel, s, 0), s1 = C::halves(panel, s, 1);
#pragma GCC unroll 6
            for (int m = 0; m < M; m++) {
                const float scale = rows[m * stride + b].scale;
                sums[m][0] += s0 * scale * floats(dots[m][0]);
                sums[m][1] += s1 * scale * floats(dots[m][1]);
            }
        }
        if constexpr (C::kMinimum) {
            const F16 m0 = C::halves(panel, C::kScales, 0), m1 = C::halves(panel, C::kScales, 1);
#pragma GCC unroll 6
            for (int m = 0; m < M; m++) {
                const float sum = rows[m * stride + b].sum;
                sums[m][0] += m0 * sum;
                sums[m][1] += m1 * sum;
            }
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) store(out + m * ldo, sums[m][0]), store(out + m * ldo + 16, sums[m][1]);
}

using GroupedTile = void (*)(const RoundedBlock*, int64_t, const uint8_t*, int64_t, float*, int64_t);
template <class C> constexpr GroupedTile kGroupedTiles[] = {
    nullptr, grouped_tile<C, 1>, grouped_tile<C, 2>,
#if defined(__AVX512F__)
    grouped_tile<C, 3>, grouped_tile<C, 4>, grouped_tile<C, 5>, grouped_tile<C, 6>,
#endif
};

// The weight of one output (of a panel) and one input.
template <class C> float grouped_weight(const uint8_t* panel, int64_t output, int64_t input) {
    const uint8_t* block = panel + input / kGroup * C::kBlock;
    const int64_t i = input % kGroup, byte = i % 4, quad = i / 4;
    int code;
    if constexpr (C::kBytewise) {
        code = block[quad * 128 + output * 4 + byte];
    } else {
        code = block[quad * 64 + output % 16 * 4 + byte] >> (output / 16 * 4) & 15;
    }
    const auto half = [&](int64_t which) {
        uint16_t bits;
        memcpy(&bits, block + C::kCodeBytes + C::kHalves * which + 2 * output, sizeof bits);
        return widened_halves(H16{bits})[0];
    };
    const float weight = half(i * C::kScales / kGroup) * (float)(code - C::kOffset);
    return C::kMinimum ? weight + half(C::kScales) : weight;
}

// What is to be done with the panels of a format.
struct GroupedFormat {
    int64_t block;  // bytes
    const GroupedTile* tiles;  // by their rows
    float (*weight)(const uint8_t* panel, int64_t output, int64_t input);
};
template <class C>
constexpr GroupedFormat kGroupedFormat = {C::kBlock, kGroupedTiles<C>, grouped_weight<C>};

inline const GroupedFormat& grouped_format(int64_t format) {
    switch (format) {
        case kFour: return kGroupedFormat<Four>;
        case kFourMin: return kGroupedFormat<FourMin>;
        case kEight: return kGroupedFormat<Eight>;
        case kEightMin: return kGroupedFormat<EightMin>;
        case kEightHalves: return kGroupedFormat<EightHalves>;
        default: return kGroupedFormat<EightMinHalves>;
    }
}

}  // namespace native
