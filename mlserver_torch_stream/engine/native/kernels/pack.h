// Converts rows of GGUF's blocks to the panels of groups that ``grouped.h`` describes, and rows of dense weights to the
// panels of words that ``gemm.h`` describes, without a copy in between.
// Knows nothing of files; ``packed_rows.py`` reads the same blocks with torch, as the reference.
#pragma once
#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>
#include "grouped.h"

namespace native {

enum BlockKind : int64_t { kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K };

struct BlockRow {  // mirrored field by field in library.py
    const uint8_t* blocks;  // null: the output pads a panel
    int64_t kind;           // not read if the panels are dense
};

struct PackCall {  // mirrored field by field in library.py
    const BlockRow* rows;  // [outputs], whole panels
    int64_t outputs;
    int64_t groups;  // of a row; in dense panels words of 32 bits
    int64_t format;
    uint8_t* panels;
};

// One group of 32 weights: codes with the offset of their kind; the scales of its halves.
struct UnpackedGroup {
    uint8_t codes[32];
    float scales[2];
    float minimum;
};

inline float half_at(const uint8_t* bytes) {
    uint16_t bits;
    memcpy(&bits, bytes, sizeof bits);
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    return widened_halves(H16{bits})[0];
#endif
}

using Bytes = uint8_t __attribute__((vector_size(16)));

inline Bytes same(int64_t byte) { return (uint8_t)byte - Bytes{}; }

inline Bytes bytes_at(const uint8_t* from) {
    Bytes bytes;
    memcpy(&bytes, from, sizeof bytes);
    return bytes;
}

inline void put(Bytes first, Bytes second, uint8_t (&codes)[32]) {
    memcpy(codes, &first, sizeof first);
    memcpy(codes + 16, &second, sizeof second);
}

inline void nibbles(const uint8_t* packed, uint8_t (&codes)[32]) {
    const Bytes both = bytes_at(packed);
    put(both & same(15), both >> same(4), codes);
}

// Adds bit i of four bytes to code i, as its fifth bit.
inline void fifth_bits(const uint8_t* packed, uint8_t (&codes)[32]) {
    constexpr uint64_t kEight = 0x0101010101010101;
    const Bytes bits = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const auto fifth = [&](int i) {
        const uint64_t spread[2] = {packed[i] * kEight, packed[i + 1] * kEight};
        return (Bytes)((bytes_at(reinterpret_cast<const uint8_t*>(spread)) & bits) != 0) & same(16);
    };
    put(bytes_at(codes) | fifth(0), bytes_at(codes + 16) | fifth(2), codes);
}

inline void add_to(uint8_t (&codes)[32], uint8_t more) {
    put(bytes_at(codes) + same(more), bytes_at(codes + 16) + same(more), codes);
}

// Reads the scale and the minimum, of six bits each, of group g in a block of eight groups.
inline void k_scales(const uint8_t* block, int64_t g, UnpackedGroup& to) {
    const uint8_t* packed = block + 4;
    const int64_t i = g % 4;
    const int scale = g < 4 ? packed[i] & 63 : (packed[8 + i] & 15) | (packed[i] >> 6 << 4);
    const int minimum = g < 4 ? packed[4 + i] & 63 : (packed[8 + i] >> 4) | (packed[4 + i] >> 6 << 4);
    to.scales[0] = to.scales[1] = half_at(block) * (float)scale;
    to.minimum = -half_at(block + 2) * (float)minimum;
}

inline void k_nibbles(const uint8_t* packed, int64_t g, uint8_t (&codes)[32]) {
    const uint8_t* bytes = packed + g / 2 * 32;
    const Bytes shift = same(g % 2 * 4);
    put(bytes_at(bytes) >> shift & same(15), bytes_at(bytes + 16) >> shift & same(15), codes);
}

constexpr int64_t kAhead = 512;  // how many bytes ahead a row is prefetched

// Unpacks group g of a row.
inline void unpack(const BlockRow& row, int64_t g, UnpackedGroup& to) {
    to.minimum = 0;
    const auto single = [&](int64_t bytes) {
        const uint8_t* block = row.blocks + g * bytes;
        __builtin_prefetch(block + kAhead);  // more rows are read than the hardware prefetches
        to.scales[0] = to.scales[1] = half_at(block);
        return block;
    };
    switch (row.kind) {
        case kQ4_0: nibbles(single(18) + 2, to.codes); break;
        case kQ4_1: {
            const uint8_t* block = single(20);
            to.minimum = half_at(block + 2);
            nibbles(block + 4, to.codes);
            break;
        }
        case kQ5_0: {
            const uint8_t* block = single(22);
            nibbles(block + 6, to.codes);
            fifth_bits(block + 2, to.codes);
            break;
        }
        case kQ5_1: {
            const uint8_t* block = single(24);
            to.minimum = half_at(block + 2);
            nibbles(block + 8, to.codes);
            fifth_bits(block + 4, to.codes);
            break;
        }
        case kQ8_0: {
            const uint8_t* block = single(34) + 2;
            put(bytes_at(block) ^ same(128), bytes_at(block + 16) ^ same(128), to.codes);
            break;
        }
        case kQ4_K: {
            const uint8_t* block = row.blocks + g / 8 * 144;
            __builtin_prefetch(block + kAhead + g % 8 * 32);
            k_scales(block, g % 8, to);
            k_nibbles(block + 16, g % 8, to.codes);
            break;
        }
        case kQ5_K: {
            const uint8_t* block = row.blocks + g / 8 * 176;
            __builtin_prefetch(block + kAhead + g % 8 * 32);
            k_scales(block, g % 8, to);
            k_nibbles(block + 48, g % 8, to.codes);
            const auto code = [&](int i) {
                const Bytes bit = bytes_at(block + 16 + i) >> same(g % 8) & same(1);
                return bytes_at(to.codes + i) | bit << same(4);
            };
            put(code(0), code(16), to.codes);
            break;
        }
        default: {  // kQ6_K
            const uint8_t* block = row.blocks + g / 8 * 210;
            __builtin_prefetch(block + kAhead + g % 8 * 32);
            const int64_t at = g % 8, half = at / 4, quarter = at % 4;
            const uint8_t* low = block + half * 64 + quarter % 2 * 32;
            const uint8_t* high = block + 128 + half * 32;
            const auto code = [&](int i) {
                const Bytes four = bytes_at(low + i) >> same(quarter / 2 * 4) & same(15);
                const Bytes two = bytes_at(high + i) >> same(2 * quarter) & same(3);
                return four | two << same(4);
            };
            put(code(0), code(16), to.codes);
            for (int s = 0; s < 2; s++) to.scales[s] = half_at(block + 208) * (float)(int8_t)block[192 + 2 * at + s];
        }
    }
}

// The code of a kind that stands for zero, before the minimum is added.
inline int kind_offset(int64_t kind) {
    switch (kind) {
        case kQ4_0: return 8;
        case kQ5_0: return 16;
        case kQ6_K: return 32;
        case kQ8_0: return 128;
        default: return 0;
    }
}

// Transposes words [4 * kBlocks outputs][8 quads] to [8 quads][4 * kBlocks outputs], a block of 4 by 4 at a time.
template <int kBlocks> void put_quads(const uint8_t (*codes)[32], uint8_t* to) {
    using Words = uint32_t __attribute__((vector_size(16)));
    for (int output = 0; output < 4 * kBlocks; output += 4)
        for (int q = 0; q < 8; q += 4) {
            Words row[4];
            for (int i = 0; i < 4; i++) memcpy(&row[i], codes[output + i] + 4 * q, sizeof row[i]);
            const Words first = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5);
            const Words second = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
            const Words third = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
            const Words fourth = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
            const Words column[4] = {__builtin_shufflevector(first, second, 0, 1, 4, 5),
                                     __builtin_shufflevector(first, second, 2, 3, 6, 7),
                                     __builtin_shufflevector(third, fourth, 0, 1, 4, 5),
                                     __builtin_shufflevector(third, fourth, 2, 3, 6, 7)};
            for (int i = 0; i < 4; i++)
                memcpy(to + 4 * (4 * kBlocks * (q + i) + output), &column[i], sizeof column[i]);
        }
}

// Writes numbers in fp16. Returns the lanes that are not finite there.
inline H16 put_halves(const float (&numbers)[32], uint8_t* to) {
    const H16 first = rounded_halves(load_f(numbers)), second = rounded_halves(load_f(numbers + 16));
    memcpy(to, &first, sizeof first);
    memcpy(to + sizeof first, &second, sizeof second);
    return (H16)((first & 0x7c00) == 0x7c00) | (H16)((second & 0x7c00) == 0x7c00);
}

// Writes the high bits of a group's codes.
template <class C> void put_high_bits(const uint8_t (*codes)[32], uint8_t* to) {
    Word high[2 * C::kHigh][16] = {};
    for (int q = 0; q < 8; q++)
        for (int half = 0; half < 2; half++)
            for (int output = 0; output < 16; output++) {
                const Word bits = word_at(codes[16 * half + output] + 4 * q) >> 4 & 0x0f0f0f0fu;
                high[2 * q / C::kFields][output] |= bits << ((2 * q + half) % C::kFields * C::kHigh);
            }
    memcpy(to, high, sizeof high);
}

// Writes one panel. Returns false if a scale is not finite in fp16.
template <class C> bool pack_panel(const BlockRow* rows, int64_t groups, uint8_t* to) {
    H16 infinite{};
    for (int64_t g = 0; g < groups; g++, to += C::kBlock) {
        uint8_t codes[32][32];
        float numbers[C::kScales + 1][32];  // scales, then minima
        for (int64_t output = 0; output < 32; output++) {
            UnpackedGroup group;
            if (rows[output].blocks == nullptr) {
                group = {};
                memset(group.codes, C::kOffset, sizeof group.codes);
            } else {
                unpack(rows[output], g, group);
                const int more = C::kOffset - kind_offset(rows[output].kind);
                if (more > 0) add_to(group.codes, (uint8_t)more);
                // The offset is a power of two, so nothing is rounded.
                if (more < 0) group.minimum += (float)more * group.scales[0];
            }
            memcpy(codes[output], group.codes, 32);
            // Formats with two scales per group have one for each half: [scale][output].
            for (int s = 0; s < C::kScales; s++) numbers[s][output] = group.scales[s];
            numbers[C::kScales][output] = group.minimum + 0.0f;  // no negative zero
        }
        for (int which = 0; which < C::kScales + C::kMinimum; which++)
            infinite |= put_halves(numbers[which], to + C::kCodeBytes + C::kHalves * which);
        if constexpr (C::kBytewise) {
            put_quads<8>(codes, to);
        } else {
            if constexpr (C::kHigh > 0) put_high_bits<C>(codes, to + C::kLowBytes);
            const auto joined = [&](int output, int i) {
                return (bytes_at(codes[output] + i) & same(15)) | bytes_at(codes[16 + output] + i) << same(4);
            };
            for (int output = 0; output < 16; output++) put(joined(output, 0), joined(output, 16), codes[output]);
            put_quads<4>(codes, to);
        }
    }
    for (int lane = 0; lane < 16; lane++)
        if (infinite[lane]) return false;
    return true;
}

template <class C> bool pack_panel_of(const PackCall& call, int64_t panel) {
    return pack_panel<C>(call.rows + 32 * panel, call.groups, call.panels + panel * call.groups * C::kBlock);
}

// Dense panels, [words][32].
inline void pack_words(const PackCall& call, int64_t panel) {
    constexpr int64_t kTile = 16;  // words that a row has in a line of the cache
    const BlockRow* rows = call.rows + 32 * panel;
    uint8_t* to = call.panels + 32 * panel * call.groups * sizeof(Word);
    for (int64_t first = 0; first < call.groups; first += kTile) {
        const int64_t count = std::min(kTile, call.groups - first);
        Word tile[kTile][32] = {};
        for (int output = 0; output < 32; output++) {
            if (rows[output].blocks == nullptr) continue;
            const uint8_t* from = rows[output].blocks + first * sizeof(Word);
            __builtin_prefetch(from + kAhead);
            for (int64_t i = 0; i < count; i++) memcpy(&tile[i][output], from + i * sizeof(Word), sizeof(Word));
        }
        memcpy(to + 32 * first * sizeof(Word), tile, 32 * count * sizeof(Word));
    }
}

// Calls work(i) for each i below `count`, on `threads` threads.
template <class Work> void on_threads(int64_t count, int threads, const Work& work) {
    std::atomic<int64_t> next{0};
    const auto serve = [&] {
        for (int64_t i; (i = next.fetch_add(1)) < count;) work(i);
    };
    std::vector<std::thread> others;
    others.reserve((size_t)threads);
    try {
        for (int i = 1; i < threads; i++) others.emplace_back(serve);
    } catch (const std::exception&) {  // fewer threads do the work as well
    }
    serve();
    for (std::thread& other : others) other.join();
}

// Packs on `threads` threads. Throws if a scale is not finite in fp16.
inline void pack(const PackCall& call, int threads) {
    const auto work = [&](int64_t panel) {
        switch (call.format) {
            case kPlain: return pack_words(call, panel), true;
            case kFour: return pack_panel_of<Four>(call, panel);
            case kFourMin: return pack_panel_of<FourMin>(call, panel);
            case kFive: return pack_panel_of<Five>(call, panel);
            case kFiveMin: return pack_panel_of<FiveMin>(call, panel);
            case kSixHalves: return pack_panel_of<SixHalves>(call, panel);
            case kEight: return pack_panel_of<Eight>(call, panel);
            default: return pack_panel_of<EightMinHalves>(call, panel);
        }
    };
    std::atomic<bool> finite{true};
    on_threads(call.outputs / 32, threads, [&](int64_t panel) {
        if (!work(panel)) finite = false;
    });
    if (!finite) throw std::runtime_error("weights that are not finite, or larger than float16 holds");
}

// Returns a digest of bytes, which finds damage but not forgery: each word is mixed in as XXH64 does it.
inline uint64_t digest(const uint8_t* bytes, int64_t count, int threads) {
    constexpr uint64_t kFirst = 0x9E3779B185EBCA87, kSecond = 0xC2B2AE3D27D4EB4F;
    constexpr int64_t kPart = 1 << 22, kLanes = 4, kStride = kLanes * sizeof(uint64_t);
    const auto mix = [](uint64_t sum, uint64_t word) {
        sum += word * kSecond;
        return (sum << 31 | sum >> 33) * kFirst;
    };
    std::vector<uint64_t> parts((count + kPart - 1) / kPart);
    on_threads((int64_t)parts.size(), threads, [&](int64_t part) {
        uint64_t sums[kLanes] = {}, words[kLanes];
        const int64_t end = std::min(count, (part + 1) * kPart);
        for (int64_t at = part * kPart; at < end; at += kStride) {
            if (end - at < kStride) memset(words, 0, sizeof words);
            memcpy(words, bytes + at, std::min(kStride, end - at));
            for (int i = 0; i < kLanes; i++) sums[i] = mix(sums[i], words[i]);
        }
        for (uint64_t sum : sums) parts[part] = mix(parts[part], sum);
    });
    uint64_t all = (uint64_t)count;
    for (uint64_t part : parts) all = mix(all, part);
    return all;
}

}  // namespace native
