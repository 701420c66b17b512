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
        return {reinterpret_cast<const native::Word*>(bytes_.data()), n_, k_, nullptr, format_};
    }

    double at(int64_t output, int64_t input) const {
        const int64_t group = output / native::kPanel * native::groups_of(k_) + input / 32, lane = output % 32;
        const uint8_t* from = &bytes_[(size_t)(group * block())];
        const int64_t quad = input % 32 / 4, byte = input % 4;
        const int code = eight() ? from[quad * 128 + lane * 4 + byte]
                                 : from[quad * 64 + lane % 16 * 4 + byte] >> (lane < 16 ? 0 : 4) & 15;
        const int offset = eight() ? 128 : minimum() ? 0 : 8;
        const auto half = [&](int64_t row) {
            native::Fp16 bits;
            memcpy(&bits, from + codes() + 64 * row + 2 * lane, sizeof bits);
            return (double)as_float(bits);
        };
        return half(scales() == 2 ? input % 32 / 16 : 0) * (code - offset) + (minimum() ? half(scales()) : 0.0);
    }

  private:
    bool eight() const { return format_ >= native::kEight; }
    bool minimum() const { return format_ % 2 == 0; }
    int64_t scales() const { return format_ >= native::kEightHalves ? 2 : 1; }
    int64_t codes() const { return eight() ? 1024 : 512; }
    int64_t block() const { return codes() + 64 * (scales() + minimum()); }

    native::Format format_;
    int64_t n_, k_;
    std::vector<uint8_t> bytes_;
};
