// Attention over pages, of many tokens and of one: against plain loops in float64.
#pragma once
#include "expectations.h"

constexpr int64_t kContext = 300;

// A call of one sequence whose pages lie in reverse order, and what it must give.
template <class S> struct PagesCase {
    int64_t page_size, tokens, window, heads = 6, kv_heads = 2, key_dim, value_dim, pages = kContext / page_size + 1;
    std::vector<S> queries = random_values<S>(tokens * heads * key_dim, 3), out{};
    std::vector<S> keys = random_values<S>(pages * kv_heads * page_size * key_dim, 4);
    std::vector<S> values = random_values<S>(pages * kv_heads * page_size * value_dim, 5);

    const S* at(const std::vector<S>& pool, int64_t dim, int64_t position, int64_t head) const {
        const int64_t page = pages - 1 - position / page_size;
        return &pool[((page * kv_heads + head) * page_size + position % page_size) * dim];
    }

    void check(native::StoredType type, double tolerance) {
        out.resize(tokens * heads * value_dim);
        std::vector<int32_t> table(pages);
        for (int64_t i = 0; i < pages; i++) table[i] = (int32_t)(pages - 1 - i);
        const int32_t start = (int32_t)(kContext - tokens), ends[2] = {0, (int32_t)tokens};
        const float scale = 0.3f;
        const native::PagesCall call{queries.data(), out.data(), keys.data(), values.data(), table.data(), &start, ends,
                                     nullptr, heads * key_dim, key_dim, 1, pages, heads, kv_heads, page_size, key_dim,
                                     value_dim, window, 0, type, scale, 0};
        expect(native_attend_pages(&call, nullptr, 1) == 0, "status of an attention");
        for (int64_t t : {int64_t(0), tokens - 1})
            for (int64_t h = 0; h < heads; h++) compare(t, h, scale, tolerance);
    }

    void compare(int64_t t, int64_t h, float scale, double tolerance) const {
        const int64_t position = kContext - tokens + t, kv = h / (heads / kv_heads);
        const int64_t first = window == 0 ? 0 : std::max<int64_t>(0, position + 1 - window);
        std::vector<double> sums(value_dim);
        double total = 0;
        for (int64_t i = first; i <= position; i++) {
            double score = 0;
            for (int64_t d = 0; d < key_dim; d++)
                score += (double)as_float(queries[(t * heads + h) * key_dim + d]) * as_float(at(keys, key_dim, i, kv)[d]);
            const double chance = std::exp(score * scale);
            total += chance;
            for (int64_t d = 0; d < value_dim; d++) sums[d] += chance * as_float(at(values, value_dim, i, kv)[d]);
        }
        for (int64_t d = 0; d < value_dim; d++)
            expect(close_to(as_float(out[(t * heads + h) * value_dim + d]), sums[d] / total, tolerance), "attention", t,
                   h, d);
    }
};

template <class S> void check_pages(native::StoredType type, double tolerance) {
    for (int64_t page_size : {16, 7})
        for (int64_t tokens : {1, 3, 90})
            for (int64_t window : {0, 33})
                for (int64_t dim : {64, 20, 5})
                    PagesCase<S>{page_size, tokens, window, 6, 2, dim, dim + 2}.check(type, tolerance);
}

inline void check_attention() {
    check_pages<float>(native::kFp32, 1e-5);
    check_pages<native::Bf16>(native::kBf16, 2e-2);
    check_pages<native::Fp16>(native::kFp16, 2e-3);
    std::puts("attention is right");
}
