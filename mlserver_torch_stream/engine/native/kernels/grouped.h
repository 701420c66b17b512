// Weights as small integers: for each output, groups of 32 neighbouring inputs, or halves of groups, have a scale and
// perhaps a minimum, as in GGUF's formats. They are multiplied as integers with rounded activations.
// Knows nothing of files; ``groups.py`` writes the panels.
#pragma once
#include "elements.h"
#include "integer_dot.h"
#include "rounded_row.h"

namespace native {

// A weight is scale * (code - kOffset) + minimum. A panel of 32 outputs is a row of blocks, one for each group of inputs.
// A block has codes, then scales [kScales][32] in fp16, then minima [32] in fp16. A quad is four inputs.
// A code of 8 bits is a byte: the codes are [8 quads][32 outputs][4 inputs].
// A code of 4 to 6 bits is stored in two places. Its four low bits are half of a byte in [8 quads][16 outputs][4 inputs]:
// the low half of the byte of output i belongs to output i, and the high half belongs to output 16 + i. After these bytes
// come the high bits of all codes, in bytes [16 outputs][4 inputs] repeated as often as needed. Such a byte is divided
// into kFields fields of kHigh bits. Its lowest field belongs to output i of a quad, the next field to output 16 + i of
// the same quad, and the fields after these two to the same outputs of the next quads.
template <int kBits, bool kHasMinimum, int kScalesPerGroup = 1> struct Codes {
    using Products = ByteProducts<kBits>;
    static constexpr bool kMinimum = kHasMinimum, kBytewise = kBits == 8;
    static constexpr int kScales = kScalesPerGroup;
    static constexpr int kOffset = kBits == 8 ? 128 : kMinimum ? 0 : 1 << (kBits - 1);
    static constexpr bool kSigned = kBytewise && !kUnsignedBytes;
    static constexpr int kLeft = kSigned ? 0 : kOffset;  // to be taken from the sums of products
    static constexpr int kHigh = kBytewise ? 0 : kBits - 4;  // bits of a code beyond its low four
    static constexpr int kFields = 8 / std::max(kHigh, 1);   // in a byte of high bits
    static constexpr int64_t kCodeBytes = kBits * 128, kHalves = 64, kLowBytes = 512;
    static constexpr int64_t kBlock = kCodeBytes + kHalves * (kScales + kMinimum);

    // Loads a part of quad q for kLanes outputs from `lane` on, and for as many from `lane` + 16 on.
    static void quad(const uint8_t* block, int q, int part, int lane, WordRegister (&w)[2]) {
        if constexpr (kBytewise) {
            const WordRegister turn = (kSigned ? 0x80808080u : 0) - WordRegister{};
            w[0] = Products::part(load_register(block + 128 * q + 4 * lane) ^ turn, part);
            w[1] = Products::part(load_register(block + 128 * q + 4 * lane + 64) ^ turn, part);
        } else {
            const WordRegister both = load_register(block + 64 * q + 4 * lane);
            w[0] = both & 0x0f0f0f0fu, w[1] = both >> 4 & 0x0f0f0f0fu;
            if constexpr (kHigh > 0) {
                const WordRegister high = load_register(block + kLowBytes + 64 * (2 * q / kFields) + 4 * lane);
                w[0] |= high_bits(high, 2 * q % kFields), w[1] |= high_bits(high, 2 * q % kFields + 1);
            }
        }
    }
    // Moves the high bits in a field to the place that they have in a code.
    static WordRegister high_bits(WordRegister high, int field) {
        const int from = field * kHigh, to = 4;
        return (from > to ? high >> (from - to) : high << (to - from)) & ((16u << kHigh) - 16u) * 0x01010101u;
    }
    // Loads kLanes of the scales, or of the minima that follow them.
    static FloatRegister halves(const uint8_t* block, int which, int lane) {
        return load_widened(block + kCodeBytes + kHalves * which + 2 * lane);
    }
    template <class Block> static WordRegister activations(const Block& x, int q, int part) {
        if constexpr (Products::kParts == 2) return x.pair(q, part) - WordRegister{};
        return x.quad(q) - WordRegister{};
    }
};

using Four = Codes<4, false>;
using FourMin = Codes<4, true>;
using Five = Codes<5, false>;
using FiveMin = Codes<5, true>;
using SixHalves = Codes<6, false, 2>;
using Eight = Codes<8, false>;
using EightMinHalves = Codes<8, true, 2>;  // holds weights of any other format

enum Format : int64_t { kPlain, kFour, kFourMin, kFive, kFiveMin, kSixHalves, kEight, kEightMinHalves };

constexpr int kGroupedRows = 6;  // 6 x 2 sums of bytes, 2 weights, 1 activation and 1 product fill 16 registers

// Adds the products of a group with two registers of outputs to `sums`. Integer sums are exact.
template <class C, int M>
[[gnu::always_inline]] inline void add_group(const RoundedBlock* rows, int64_t stride, const uint8_t* block, int lane, FloatRegister (&sums)[M][2]) {
    constexpr int kQuads = 8 / C::kScales;
#pragma GCC unroll 2
    for (int s = 0; s < C::kScales; s++) {
        IntRegister dots[M][2] = {};
#pragma GCC unroll 8
        for (int q = 0; q < kQuads; q++) {
#pragma GCC unroll 2
            for (int part = 0; part < C::Products::kParts; part++) {
                // Otherwise GCC keeps the activations of all quads for the next outputs, and has too few registers for
                // them.
                if (kLanes < 16) asm volatile("" ::: "memory");
                WordRegister w[2];
                C::quad(block, s * kQuads + q, part, lane, w);
#pragma GCC unroll 6
                for (int m = 0; m < M; m++) {
                    const WordRegister x = C::activations(rows[m * stride], s * kQuads + q, part);
                    dots[m][0] = C::Products::add(dots[m][0], w[0], x);
                    dots[m][1] = C::Products::add(dots[m][1], w[1], x);
                }
            }
        }
        const FloatRegister scales[2] = {C::halves(block, s, lane), C::halves(block, s, lane + 16)};
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
            const RoundedBlock& x = rows[m * stride];
            const int32_t left = C::kLeft * (C::kScales == 2 ? x.sums[s] : x.sums[0] + x.sums[1]);
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++)
                sums[m][v] += scales[v] * x.scale * floats(C::Products::total(dots[m][v]) - left);
        }
    }
    if constexpr (C::kMinimum) {
        const FloatRegister minima[2] = {C::halves(block, C::kScales, lane), C::halves(block, C::kScales, lane + 16)};
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
            sums[m][0] += minima[0] * rows[m * stride].sum;
            sums[m][1] += minima[1] * rows[m * stride].sum;
        }
    }
}

// Computes out[M][32] = rows[M][blocks] x panel[blocks]. For every M the scaled sums are added in the order of the
// blocks, so a row's result is bitwise the same in any batch.
template <class C, int M>
__attribute__((noinline)) void grouped_tile(const RoundedBlock* rows, int64_t stride, const uint8_t* panel,
                                            int64_t blocks, float* out, int64_t ldo) {
    constexpr int kSets = 16 / kLanes;
    constexpr int64_t kAhead = kLanes == 8 ? 2048 : 4096;  // 1.04 times as fast on a Zen 3; other CPUs: not measured
    FloatRegister sums[kSets][M][2] = {};
    for (int64_t b = 0; b < blocks; b++, panel += C::kBlock) {
#pragma GCC unroll 19
        for (int64_t line = 0; line < C::kBlock; line += 64) prefetch_to_second(panel + kAhead + line);
        // Not unrolled: otherwise GCC keeps the sums of all sets in registers, and the sums of bytes in memory.
#pragma GCC unroll 1
        for (int set = 0; set < kSets; set++) add_group<C, M>(rows + b, stride, panel, set * kLanes, sums[set]);
    }
    for (int set = 0; set < kSets; set++)
        for (int m = 0; m < M; m++)
            for (int v = 0; v < 2; v++)
                memcpy(out + m * ldo + 16 * v + set * kLanes, &sums[set][m][v], sizeof sums[set][m][v]);
}

using GroupedTile = void (*)(const RoundedBlock*, int64_t, const uint8_t*, int64_t, float*, int64_t);
template <class C> constexpr GroupedTile kGroupedTiles[] = {
    nullptr, grouped_tile<C, 1>, grouped_tile<C, 2>, grouped_tile<C, 3>, grouped_tile<C, 4>, grouped_tile<C, 5>,
    grouped_tile<C, 6>,
};

// Returns the weight of one output of a panel for one input.
template <class C> float grouped_weight(const uint8_t* panel, int64_t output, int64_t input) {
    const uint8_t* block = panel + input / kGroup * C::kBlock;
    const int64_t i = input % kGroup, byte = i % 4, quad = i / 4;
    int code;
    if constexpr (C::kBytewise) {
        code = block[quad * 128 + output * 4 + byte];
    } else {
        const int64_t place = output % 16 * 4 + byte, half = output / 16;
        code = block[quad * 64 + place] >> (half * 4) & 15;
        if constexpr (C::kHigh > 0) {
            const int64_t field = 2 * quad + half;
            const int high = block[C::kLowBytes + field / C::kFields * 64 + place] >> (field % C::kFields * C::kHigh);
            code |= (high & ((1 << C::kHigh) - 1)) << 4;
        }
    }
    const auto half = [&](int64_t which) {
        uint16_t bits;
        memcpy(&bits, block + C::kCodeBytes + C::kHalves * which + 2 * output, sizeof bits);
        return widened_halves(H16{bits})[0];
    };
    const float weight = half(i * C::kScales / kGroup) * (float)(code - C::kOffset);
    return C::kMinimum ? weight + half(C::kScales) : weight;
}

// The functions for the panels of a format.
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
        case kFive: return kGroupedFormat<Five>;
        case kFiveMin: return kGroupedFormat<FiveMin>;
        case kSixHalves: return kGroupedFormat<SixHalves>;
        case kEight: return kGroupedFormat<Eight>;
        default: return kGroupedFormat<EightMinHalves>;
    }
}

}  // namespace native
