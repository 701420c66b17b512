// Products of any number of rows, by any number of threads: right, and each row with the bits that it has alone.
#pragma once
#include "grouped_weights.h"

// [outputs][inputs] as panels of words, in memory that ends with them.
template <class T> std::vector<T> packed(const std::vector<T>& weights, int64_t n, int64_t k) {
    constexpr int kGroup = native::per_word<T>;
    std::vector<T> panels(native::panels_of(n) * native::kPanel * k, T{});
    for (int64_t output = 0; output < n; output++)
        for (int64_t input = 0; input < k; input++) {
            const int64_t line = output / native::kPanel * (k / kGroup) + input / kGroup;
            panels[(line * native::kPanel + output % native::kPanel) * kGroup + input % kGroup] =
                weights[output * k + input];
        }
    return panels;
}

template <class T, class Out = float>
std::vector<Out> product(const native::Matrix& w, const std::vector<T>& a, int64_t rows, int threads) {
    std::vector<Out> out(rows * w.n);
    native::multiply_rows<T>(w, a.data(), rows, out.data(), crew, threads);
    return out;
}

// Some rows, by another number of threads, get the bits that they have among all.
template <class T>
void check_company(const native::Matrix& w, const std::vector<T>& all, const std::vector<float>& whole) {
    for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 16, 17, 24, 25, 32, 33, 64, 257}) {
        const std::vector<T> some(all.begin(), all.begin() + rows * w.k);
        const std::vector<float> found = product<T>(w, some, rows, rows % 3 + 1);
        expect(std::equal(found.begin(), found.end(), whole.begin()), "bits of a row in another company", w.n, w.k, rows);
    }
}

template <class T> void check_product(int64_t n, int64_t k) {
    constexpr int64_t kMost = 300;
    const std::vector<T> weights = random_values<T>(n * k, 1), panels = packed(weights, n, k);
    std::vector<float> bias = random_values<float>(n, 5);
    bias.resize(native::panels_of(n) * native::kPanel);
    const native::Matrix w{n, k, bias.data(), {{panels.data(), n, native::kPlain}}};
    const std::vector<T> all = random_values<T>(kMost * k, 2);
    const std::vector<float> whole = product<T>(w, all, kMost, 3);
    for (int64_t row : {int64_t(0), kMost / 2, kMost - 1})
        for (int64_t output = 0; output < n; output++) {
            double sum = bias[output];
            for (int64_t i = 0; i < k; i++) sum += (double)as_float(weights[output * k + i]) * as_float(all[row * k + i]);
            expect(close_to(whole[row * n + output], sum, 1e-5 * std::sqrt((double)k)), "product", n, k, output);
        }
    const std::vector<T> stored = product<T, T>(w, all, kMost, 2);
    for (size_t i = 0; i < stored.size(); i++)
        expect(close_to(as_float(stored[i]), whole[i], 1.0 / 128), "stored product", n, k, (int64_t)i);
    check_company<T>(w, all, whole);
}

// Activations that are the same as int8: whole numbers, of each group the first at the end of the range. Of every other
// row all are: the largest sums there are.
template <class T> void check_grouped(native::Format format, int64_t n, int64_t k) {
    constexpr int64_t kMost = 300;
    const GroupedWeights weights(format, n, k, 6);
    const native::Matrix w = weights.matrix();
    std::mt19937 generator(7);
    std::vector<T> all(kMost * k);
    for (int64_t i = 0; i < kMost * k; i++) {
        const float most = i / k % 4 == 3 ? -127.0f : 127.0f;
        native::assign(&all[i], i % k % 32 == 0 || i / k % 2 == 1 ? most : (float)(int)(generator() % 255) - 127.0f);
    }
    const std::vector<float> whole = product<T>(w, all, kMost, 3);
    for (int64_t row : {int64_t(0), int64_t(1), kMost / 2, kMost - 1})
        for (int64_t output = 0; output < n; output++) {
            double sum = 0, size = 0;
            for (int64_t i = 0; i < k; i++) {
                const double part = weights.at(output, i) * as_float(all[row * k + i]);
                sum += part, size += std::abs(part);
            }
            expect(std::abs(whole[row * n + output] - sum) <= 1e-5 * size, "product of integers", format, k, output);
        }
    for (int64_t output = 0; output < n; output += 3)
        for (int64_t i = 0; i < k; i += 5) {
            const native::GroupedPanel panel = w.panel(output / native::kPanel);
            const float weight = panel.format.weight(panel.blocks, output % native::kPanel, i);
            expect(close_to(weight, weights.at(output, i), 1e-6), "weight of a group", format, output, i);
        }
    check_company<T>(w, all, whole);
}

// Runs of other formats change nothing in a run.
inline void check_runs() {
    constexpr int64_t kInputs = 96, kRows = 20;
    const GroupedWeights parts[] = {{native::kFourMin, 64, kInputs, 1}, {native::kSixHalves, 32, kInputs, 2},
                                    {native::kEight, 38, kInputs, 3}};
    const native::Matrix w{134, kInputs, nullptr, {parts[0].run(), parts[1].run(), parts[2].run()}};
    const std::vector<float> a = random_values<float>(kRows * kInputs, 4), all = product<float>(w, a, kRows, 3);
    int64_t first = 0;
    for (const GroupedWeights& part : parts) {
        const int64_t own = part.run().n;
        const std::vector<float> alone = product<float>(part.matrix(), a, kRows, 2);
        for (int64_t row = 0; row < kRows; row++)
            expect(std::equal(&alone[row * own], &alone[row * own] + own, &all[row * w.n + first]), "a run", row);
        first += own;
    }
}

inline void check_products() {
    check_runs();
    for (int64_t format = native::kFour; format <= native::kEightMinHalves; format++)
        for (int64_t k : {2, 60, 320}) {
            check_grouped<float>((native::Format)format, 70, k);
            check_grouped<native::Bf16>((native::Format)format, 33, k);
        }
    for (int64_t n : {1, 32, 70})
        for (int64_t k : {2, 30, 64, 576, 1602}) {
            check_product<float>(n, k);
            check_product<native::Bf16>(n, k);
        }
    std::puts("products are right");
}
