// Random weights in groups of integers, laid out as grouped.h says, and what each of them is. In every third block all
// codes are at the end of their range.
#pragma once
#include "expectations.h"

class GroupedWeights {
  public:
    GroupedWeights(native::Format format, int64_t n, int64_t k, unsigned seed)
        : format_(format), n_(n), k_(k), bytes_(native::panels_of(n) * native::groups_of(k) * block()) {
        std::mt19937 generator(seed);
        for (uint8_t& byte : bytes_) byte = (uint8_t)generator();
        for (size_t first = 0; first < bytes_.size(); first += (size_t)block()) {
            for (int64_t i = codes(); i < block(); i += 2) {
                const native::Fp16 half = from_float((float)(int)(generator() % 201 - 100) / 512.0f, native::Fp16{});
                memcpy(&bytes_[first + (size_t)i], &half, sizeof half);
            }
            if (first / (size_t)block() % 3 == 0) memset(&bytes_[first], 0xff, (size_t)codes());
        }
    }

    native::Matrix matrix() const {
        return {n_, k_, nullptr, {run()}};
    }
    native::Run run() const { return {bytes_.data(), n_, format_}; }

    double at(int64_t output, int64_t input) const {
        const int64_t group = output / native::kPanel * native::groups_of(k_) + input / 32, lane = output % 32;
        const uint8_t* from = &bytes_[(size_t)(group * block())];
        const int64_t quad = input % 32 / 4, byte = input % 4;
        const int64_t place = lane % 16 * 4 + byte, upper = lane / 16;
        int code = bits() == 8 ? from[quad * 128 + lane * 4 + byte] : from[quad * 64 + place] >> (4 * upper) & 15;
        if (bits() == 5) code += (from[512 + quad / 4 * 64 + place] >> (quad % 4 * 2 + upper) & 1) * 16;
        if (bits() == 6) code += (from[512 + quad / 2 * 64 + place] >> (quad % 2 * 4 + 2 * upper) & 3) * 16;
        const int offset = bits() == 8 ? 128 : minimum() ? 0 : 1 << (bits() - 1);
        const auto half = [&](int64_t row) {
            native::Fp16 bits;
            memcpy(&bits, from + codes() + 64 * row + 2 * lane, sizeof bits);
            return (double)as_float(bits);
        };
        return half(scales() == 2 ? input % 32 / 16 : 0) * (code - offset) + (minimum() ? half(scales()) : 0.0);
    }

  private:
    int bits() const {
        return format_ <= native::kFourMin ? 4 : format_ <= native::kFiveMin ? 5 : format_ == native::kSixHalves ? 6 : 8;
    }
    bool minimum() const {
        return format_ == native::kFourMin || format_ == native::kFiveMin || format_ == native::kEightMinHalves;
    }
    int64_t scales() const { return format_ == native::kSixHalves || format_ == native::kEightMinHalves ? 2 : 1; }
    int64_t codes() const { return 128 * bits(); }
    int64_t block() const { return codes() + 64 * (scales() + minimum()); }

    native::Format format_;
    int64_t n_, k_;
    std::vector<uint8_t> bytes_;
};
