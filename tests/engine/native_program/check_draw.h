// Draws of tokens: those of a plain draw in double, or undecided where that one is a close call; without any memory.
#pragma once
#include <algorithm>
#include "check_decoder.h"

inline double plain_gumbel(uint64_t key, uint64_t counter) {
    uint64_t bits = (counter + 1) * 0x9E3779B97F4A7C15u + key;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    bits ^= bits >> 31;
    const float uniform = (float)(int64_t)(bits >> 1) * 0x1p-63f;
    return -std::log(-std::log1p(-(double)std::min(std::max(uniform, 0x1p-63f), 1.0f - 0x1p-24f)));
}

inline void check_gumbel() {
    for (uint64_t key = 1; key < 4000000000u; key = key * 3 + 1) {
        native::Counters counters{};
        for (uint64_t i = 0; i < 3000; i++) {
            counters[0] = i * i * 77;
            const double exact = plain_gumbel(key * key, counters[0]);
            const auto found = native::gumbel(key * key, counters, counters);
            expect(close_to(found[0], exact, 2e-6), "Gumbel noise", key, i);
            expect(close_to(found[native::kLanes / 2], exact, 2e-6), "Gumbel noise of the upper half", key, i);
        }
    }
}

// The token of a row, as candidates.py describes it, of any width that is enough.
class PlainDraw {
  public:
    PlainDraw(const float* logits, int64_t vocab, const native::DrawnRow& row) : row_(row), logits_(logits) {
        for (int64_t i = 0; i < vocab; i++) order_.push_back(i);
        std::stable_sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
    }

    int64_t token() const {
        const bool unfiltered = row_.top_k == 0 && row_.top_p >= 1 && row_.min_p <= 0;
        if (!unfiltered) return largest(lowest_kept(), INFINITY);
        const float last = logits_[order_[127]];
        double beyond = 0, best = -INFINITY;
        for (int64_t id : order_) {
            if (logits_[id] > last) best = std::max(best, score(id));
            else beyond += std::exp(scaled(id));
        }
        if (std::log(beyond) + plain_gumbel(row_.noise_key, uint64_t(1) << 62) > best) return largest(-INFINITY, last);
        return largest(std::nextafter(last, INFINITY), INFINITY);
    }

  private:
    double scaled(int64_t id) const {
        return logits_[id] == logits_[order_[0]] ? 0 : ((double)logits_[id] - logits_[order_[0]]) / row_.temperature;
    }
    double score(int64_t id) const { return scaled(id) + plain_gumbel(row_.noise_key, id); }

    // Of the tokens with logits from `least` to `most`.
    int64_t largest(float least, float most) const {
        int64_t best = -1;
        for (int64_t id : order_)
            if (logits_[id] >= least && logits_[id] <= most && (best < 0 || score(id) > score(best))) best = id;
        return best;
    }

    float lowest_kept() const {
        float least = row_.top_k > 0 ? logits_[order_[row_.top_k - 1]] : -INFINITY;
        double total = 0, before = 0;
        for (int64_t id : order_)
            if (logits_[id] >= least) total += std::exp(scaled(id));
        float nucleus = -INFINITY, likely = -INFINITY;
        for (int64_t id : order_) {
            if (logits_[id] < least || !(before < row_.top_p * total || before == 0)) break;
            nucleus = logits_[id];
            before += std::exp(scaled(id));
        }
        for (int64_t id : order_)
            if (scaled(id) >= std::log((double)row_.min_p)) likely = logits_[id];
        return std::max({least, row_.top_p < 1 ? nucleus : -INFINITY, row_.min_p > 0 ? likely : -INFINITY});
    }

    const native::DrawnRow row_;
    const float* logits_;
    std::vector<int64_t> order_;
};

// Logits of a row: many ties, few finite ones, or all different.
inline void fill_row(float* logits, int64_t vocab, int64_t kind, std::mt19937& random) {
    for (int64_t i = 0; i < vocab; i++) {
        const float x = (float)(random() % 2000001) / 1e6f;
        logits[i] = kind == 1 ? (float)(int)(x * 20) / 2 : x * x * x * 2;
        if (kind == 2 && random() % 8 > 0) logits[i] = -INFINITY;
    }
}

inline native::DrawnRow random_row(int64_t index, int64_t vocab, std::mt19937& random) {
    const float temperatures[] = {1.0f, 0.5f, 2.0f, 1e-3f}, shares[] = {1.0f, 0.9f, 0.3f, 0.0f};
    const float ratios[] = {0.0f, 0.0f, 0.05f, 1.0f};
    const int64_t counts[] = {0, 0, 1, 20, 127, 128, 500};
    const uint64_t key = (uint64_t)random() << 32 | random();
    const int64_t top_k = counts[random() % 7];
    return {index, key, top_k < vocab ? top_k : 0, temperatures[random() % 4], shares[random() % 4], ratios[random() % 4], 1};
}

inline void check_draws(TinyModel<float>& model) {
    constexpr int64_t kRows = 24;
    std::mt19937 random(3);
    int64_t undecided = 0, trials = 0;
    for (int64_t vocab : {129, 1000, 1030, 1500, 3001}) {
        const int64_t stride = vocab + 3;
        for (int64_t trial = 0; trial < 8; trial++) {
            std::vector<float> logits(kRows * stride, NAN);  // no draw reads what is between rows
            std::vector<native::DrawnRow> rows;
            for (int64_t i = 0; i < kRows; i++) {
                fill_row(&logits[i * stride], vocab, i % 3, random);
                rows.push_back(random_row(kRows - 1 - i, vocab, random));
            }
            std::vector<int64_t> chosen(kRows, 0);
            const native::DrawCall call{logits.data(), stride, vocab, kRows, rows.data(), chosen.data()};
            model.draw(call);
            for (int64_t i = 0; i < kRows; i++, trials++) {
                undecided += chosen[i] == native::kUndecided;
                const int64_t plain = PlainDraw(&logits[rows[i].index * stride], vocab, rows[i]).token();
                expect(chosen[i] == native::kUndecided || chosen[i] == plain, "a draw", vocab, chosen[i], plain);
            }
        }
    }
    expect(undecided < trials / 2, "undecided draws", undecided, trials);
}

inline void check_undecided(TinyModel<float>& model) {
    const native::DrawnRow plain{0, 5, 0, 1, 1, 0, 1};
    const auto drawn = [&](std::vector<float> logits, native::DrawnRow row) {
        int64_t chosen = 0;
        model.draw({logits.data(), 0, (int64_t)logits.size(), 1, &row, &chosen});
        return chosen;
    };
    std::vector<float> logits(300, 0.0f);
    logits[7] = 30.0f;
    expect(drawn(logits, plain) == 7, "the largest logit by far");
    for (float bad : {NAN, INFINITY}) {
        logits[299] = bad;
        expect(drawn(logits, plain) == native::kUndecided, "no draw from a bad logit");
    }
    expect(drawn(std::vector<float>(300, -INFINITY), plain) == native::kUndecided, "no draw without a finite logit");
    expect(drawn(std::vector<float>(128, 0.0f), plain) == native::kUndecided, "no draw from few tokens");
    expect(drawn(std::vector<float>(9000, 0.0f), plain) == native::kUndecided, "no draw among too many candidates");
    logits[299] = 0.0f;
    native::DrawnRow typical = plain, cold = plain, close = plain;
    typical.typical_p = 0.5f, cold.temperature = 1e-42f, close.top_k = 2;
    expect(drawn(logits, typical) == native::kUndecided, "no draw with typical-p");
    expect(drawn(logits, cold) == native::kUndecided, "no draw where 1 / temperature is infinite");
    std::fill(logits.begin(), logits.end(), -50.0f);
    logits[3] = 1.0f, logits[200] = 1.0f + (float)(plain_gumbel(5, 3) - plain_gumbel(5, 200));
    expect(drawn(logits, close) == native::kUndecided, "no draw that rounding decides");
}

inline void check_draw() {
    check_gumbel();
    for (int threads : {1, 3}) {
        TinyModel<float> model({native::kPlain}, threads, 16);
        check_draws(model);
        check_undecided(model);
    }
    std::puts("draws are right");
}
