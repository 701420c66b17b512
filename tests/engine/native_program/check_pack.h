// Blocks of GGUF become panels: within their memory, by any number of threads, and with the weights that they hold.
#pragma once
#include "expectations.h"
#include "pack.h"

inline const int64_t kBlockBytes[] = {18, 20, 22, 24, 34, 144, 176, 210};
inline const native::Format kFormats[] = {native::kFour,  native::kFourMin, native::kFive,    native::kFiveMin,
                                          native::kEight, native::kFourMin, native::kFiveMin, native::kSixHalves};

// Rows of random blocks, in memory that ends with them; every seventh output pads.
inline void check_packing(native::Format format, int64_t kind) {
    constexpr int64_t kOutputs = 96, kGroups = 16;
    const int64_t blocks = kind < native::kQ4_K ? kGroups : kGroups / 8, bytes = blocks * kBlockBytes[kind];
    std::mt19937 generator(8);
    std::vector<uint8_t> data((size_t)(kOutputs * bytes));
    for (uint8_t& byte : data) byte = (uint8_t)(generator() & 0xbf);  // halves that are finite
    std::vector<native::BlockRow> rows;
    for (int64_t output = 0; output < kOutputs; output++)
        rows.push_back({output % 7 == 6 ? nullptr : data.data() + output * bytes, kind});
    const native::GroupedFormat& of = native::grouped_format(format);
    std::vector<uint8_t> alone((size_t)(kOutputs / 32 * kGroups * of.block)), together(alone.size());
    native::pack({rows.data(), kOutputs, kGroups, format, alone.data()}, 1);
    native::pack({rows.data(), kOutputs, kGroups, format, together.data()}, 3);
    expect(alone == together, "panels that several threads packed", format, kind, 0);
    for (int64_t output = 0; output < kOutputs; output++)
        for (int64_t input = 0; input < 32 * kGroups; input += 5) {
            const uint8_t* panel = alone.data() + output / 32 * kGroups * of.block;
            const float found = of.weight(panel, output % 32, input);
            if (output % 7 == 6) {
                expect(found == 0, "a weight of padding", format, output, input);
            } else if (kind == native::kQ8_0) {
                const uint8_t* block = rows[(size_t)output].blocks + input / 32 * 34;
                native::Fp16 scale;
                memcpy(&scale, block, sizeof scale);
                const double weight = (double)as_float(scale) * (int8_t)block[2 + input % 32];
                expect(close_to(found, weight, 1e-6), "a weight of a block", format, output, input);
            }
        }
}

inline void check_pack() {
    for (int64_t kind = native::kQ4_0; kind <= native::kQ6_K; kind++)
        for (int64_t format = native::kFour; format <= native::kEightMinHalves; format++) {
            const native::Format own = kFormats[kind];
            const bool any = format == native::kEightMinHalves;  // holds weights of any kind
            if (format == own || any) check_packing((native::Format)format, kind);
        }
    std::puts("packed blocks are right");
}
