// The first largest logit of a row: of equal ones the lowest id, none of a row with a NaN or an infinity, never padding.
#pragma once
#include "expectations.h"

inline int64_t plain_argmax(const float* logits, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 0; i < count; i++) {
        if (std::isnan(logits[i])) return native::kNotFinite;
        if (logits[i] > logits[best]) best = i;
    }
    return std::isfinite(logits[best]) ? best : native::kNotFinite;
}

// The logits in pieces of 16, which several threads take in turn.
inline int64_t found_argmax(const std::vector<float>& logits, int64_t vocab, int64_t threads) {
    std::vector<native::ArgMax> found(threads);
    for (int64_t i = 0; i < (int64_t)logits.size(); i += 16)
        found[i / 16 * 5 % 7 % threads].take(native::load_f(&logits[i]), i, vocab);
    return native::argmax(found.data(), threads, 1);
}

inline void check_argmax() {
    const float specials[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 7.0f};
    std::mt19937 random(1);
    for (int64_t trial = 0; trial < 4000; trial++) {
        const int64_t vocab = 1 + random() % 130, padded = (vocab + 31) / 32 * 32;
        std::vector<float> logits(padded, trial % 2 == 0 ? 50.0f : NAN);
        for (int64_t i = 0; i < vocab; i++) logits[i] = trial % 3 == 0 ? -INFINITY : (float)(random() % 9) - 8.0f;
        for (int64_t n = random() % 4; n > 0; n--) logits[random() % vocab] = specials[random() % 6];
        for (int64_t threads : {1, 3})
            expect(found_argmax(logits, vocab, threads) == plain_argmax(logits.data(), vocab), "argmax", trial, threads);
    }
    std::puts("the largest logits are right");
}
