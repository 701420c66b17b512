// Draws the token of a row of logits: temperature, then top-k, top-p and min-p, as in engine/sampling/candidates.py.
// Sums and logarithms are not bitwise the same as there. So if rounding could change a row's token, the row stays
// undecided, and so does a row that needs more than its 1,024 largest logits; candidates.py draws those rows.
// Knows nothing of models or threads; allocates no memory.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include "gumbel.h"

namespace native {

struct DrawnRow {  // mirrored field by field in native_draw.py
    int64_t index;                                // of its logits
    uint64_t noise_key;
    int64_t top_k;                                // 0: off
    double temperature, top_p, min_p, typical_p;  // doubles say which filters are off, as in candidates.py
};

struct DrawCall {  // mirrored field by field in library.py
    const float* logits;
    int64_t stride, vocab, count;  // from row to row of the logits; logits of a row; drawn rows
    const DrawnRow* rows;          // [count]
    int64_t* chosen;               // [count]: ids, or kUndecided
};

constexpr int64_t kUndecided = -2;  // as in candidates.py
constexpr int64_t kTail = -3;       // the token is one beyond the candidates
constexpr int64_t kWider = -4;      // the filters keep more than the candidates

constexpr int64_t kWidths[] = {128, 1024};  // how many logits are candidates, as in candidates.py
constexpr int64_t kMostWidth = 1024;
constexpr uint64_t kTailCounter = uint64_t(1) << 62;

// Rounding changes a score by less than kScoreMargin, and sums of weights and log(min-p) relatively by less than
// kMargin.
constexpr float kScoreMargin = 1e-4f, kMargin = 1e-5f;

// The two largest scores of each lane.
struct TwoLargest {
    FloatRegister first = FloatRegister{} - INFINITY, second = first;
    IntRegister ids{};

    void take(FloatRegister score, IntRegister id) {
        const IntRegister better = score > first;
        second = larger(second, select(better, first, score));
        first = select(better, score, first);
        ids = (better & id) | (~better & ids);
    }
};

// Finds the id of the largest score, unless rounding could make another score the largest.
class Winner {
  public:
    explicit Winner(const TwoLargest& found) {
        for (int lane = 0; lane < kLanes; lane++) {
            take(found.first[lane], found.ids[lane]);
            second_ = std::max(second_, found.second[lane]);
        }
    }
    void take(float score, int64_t id) {
        second_ = std::max(second_, std::min(first_, score));
        if (score > first_) first_ = score, id_ = id;
    }
    int64_t id() const { return first_ - second_ > kScoreMargin ? id_ : kUndecided; }

  private:
    int64_t id_ = kUndecided;
    float first_ = -INFINITY, second_ = -INFINITY;
};

// The smallest scaled logit that the filters keep. However sums are rounded, tokens with at least `certain` are kept,
// and tokens below `possible` are not.
struct Floor {
    float certain = -INFINITY, possible = -INFINITY;

    void raise(float to_certain, float to_possible) {
        certain = std::max(certain, to_certain);
        possible = std::max(possible, to_possible);
    }
};

class RowDraw {
  public:
    RowDraw(const DrawCall& call, const DrawnRow& row)
        : row_(row), temperature_((float)row.temperature), top_p_((float)row.top_p), min_p_((float)row.min_p),
          logits_(call.logits + row.index * call.stride), vocab_(call.vocab), whole_(vocab_ / kLanes * kLanes) {
        std::fill(rest_, rest_ + kLanes, -INFINITY);
        std::copy(logits_ + whole_, logits_ + vocab_, rest_);
    }

    int64_t run() {
        if (row_.typical_p < 1.0 || !std::isfinite(temperature_) || !std::isfinite(1.0f / temperature_))
            return kUndecided;
        for (int64_t width : kWidths) {
            if (row_.top_k >= width) continue;
            if (width >= vocab_ || !find(width)) return kUndecided;
            const int64_t id = unfiltered() ? among_all(width) : among_kept(width);
            if (id != kWider) return id;
        }
        return kUndecided;
    }

  private:
    struct Candidate {
        float logit;
        int32_t id;
        bool operator>(const Candidate& other) const { return logit > other.logit; }
    };

    bool unfiltered() const { return row_.top_k == 0 && row_.top_p >= 1.0 && row_.min_p <= 0.0; }
    float scaled(float logit) const { return (logit - top_) / temperature_; }
    float weight(float logit) const { return exp(FloatRegister{} + scaled(logit))[0]; }

    // Calls body(logits, first id) for one vector of ids at a time. Ids from vocab_ on have the logit -inf.
    template <class Body> void each(int64_t first, int64_t last, Body&& body) const {
        for (int64_t id = first; id < std::min(last, whole_); id += kLanes)
            body(loaded<FloatRegister>(logits_ + id), id);
        if (last > whole_) body(loaded<FloatRegister>(rest_), whole_);
    }

    // Finds the candidates, which include the `width` largest logits, and the weight of all other tokens. Returns false
    // if a logit is NaN, the largest logit is infinite, or there are too many candidates.
    bool find(int64_t width) {
        const float least = threshold(width), inverse = 1.0f / temperature_;
        const bool sums = row_.top_k == 0 && (top_p_ < 1.0f || unfiltered());
        held_ = 0;
        others_ = 0.0;
        for (int64_t first = 0; first < vocab_ && std::isfinite(top_); first += kBlock) {
            FloatRegister sum{};
            each(first, std::min(first + kBlock, vocab_), [&](FloatRegister x, int64_t id) {
                const IntRegister candidate = x >= least;
                if (any(candidate)) hold(x, id, least);
                if (sums) sum += select(candidate, FloatRegister{}, exp((x - top_) * inverse));
            });
            for (int lane = 0; lane < kLanes; lane++) others_ += sum[lane];
            if (held_ > kMostHeld - kBlock) return false;
        }
        return std::isfinite(top_);
    }

    // Returns a finite lower bound of the `width` largest finite logits: the row is divided into 2 to 4 times as many
    // parts, and `width` of the parts' largest logits reach the bound. Also finds the largest logit of all, or NaN.
    float threshold(int64_t width) {
        const int64_t parts = (vocab_ + 4 * width - 1) / (4 * width) * kLanes;  // as many parts, one in each lane
        float largest[4 * kMostWidth];
        int64_t count = 0;
        IntRegister nan{};
        for (int64_t first = 0; first < vocab_; first += parts, count += kLanes) {
            FloatRegister most = FloatRegister{} - INFINITY;
            each(first, std::min(first + parts, vocab_), [&](FloatRegister x, int64_t) {
                most = larger(x, most);
                nan |= x != x;
            });
            memcpy(largest + count, &most, sizeof most);
        }
        top_ = any(nan) ? NAN : *std::max_element(largest, largest + count);
        std::nth_element(largest, largest + width - 1, largest + count, std::greater<float>());
        return std::max(largest[width - 1], std::numeric_limits<float>::lowest());
    }

    void hold(FloatRegister x, int64_t id, float least) {
        for (int lane = 0; lane < kLanes; lane++) {
            candidates_[held_] = {x[lane], (int32_t)(id + lane)};
            held_ += x[lane] >= least;
        }
    }

    // Moves the `width` largest candidates to the front, and returns the smallest of them; -inf if there are fewer.
    float put_first(int64_t width) {
        if (held_ < width) return -INFINITY;
        std::nth_element(candidates_, candidates_ + width - 1, candidates_ + held_, std::greater<Candidate>());
        return candidates_[width - 1].logit;
    }

    // Returns the winner among the candidates for which `kept` is true.
    template <class Kept> Winner best(Kept&& kept) const {
        TwoLargest found;
        for (int64_t first = 0; first < held_; first += kLanes) {
            float scores[kLanes];
            int32_t ids[kLanes];
            uint64_t counters[kLanes];
            for (int64_t lane = 0; lane < kLanes; lane++) {
                const Candidate& candidate = candidates_[std::min(first + lane, held_ - 1)];
                ids[lane] = candidate.id, counters[lane] = candidate.id;
                scores[lane] = first + lane < held_ && kept(candidate.logit) ? scaled(candidate.logit) : -INFINITY;
            }
            const auto low = loaded<Counters>(counters), high = loaded<Counters>(counters + kLanes / 2);
            found.take(loaded<FloatRegister>(scores) + gumbel(row_.noise_key, low, high), loaded<IntRegister>(ids));
        }
        return Winner(found);
    }

    // Chooses among all tokens; those no larger than the last candidate compete as one.
    int64_t among_all(int64_t width) {
        const float last = put_first(width);
        for (int64_t i = 0; i < held_; i++)
            if (candidates_[i].logit <= last) others_ += weight(candidates_[i].logit);
        Winner winner = best([&](float logit) { return logit > last; });
        winner.take((float)std::log(others_) + gumbel(row_.noise_key, Counters{} + kTailCounter, Counters{})[0], kTail);
        return winner.id() == kTail ? in_tail(last) : winner.id();
    }

    int64_t in_tail(float last) const {
        TwoLargest found;
        IntRegister ids;
        for (int lane = 0; lane < kLanes; lane++) ids[lane] = lane;
        Counters low, high;
        for (int lane = 0; lane < kLanes / 2; lane++) low[lane] = lane, high[lane] = lane + kLanes / 2;
        each(0, vocab_, [&](FloatRegister x, int64_t) {
            const FloatRegister score = (x - last) / temperature_ + gumbel(row_.noise_key, low, high);
            found.take(select(x > last, FloatRegister{} - INFINITY, score), ids);
            ids += kLanes, low += kLanes, high += kLanes;
        });
        return Winner(found).id();
    }

    int64_t among_kept(int64_t width) {
        const float last = put_first(width);
        const Floor floor = smallest_kept(std::min(width, held_));
        if (last > -INFINITY && scaled(last) >= floor.possible) return kWider;
        const int64_t id = best([&](float logit) { return scaled(logit) >= floor.possible; }).id();
        return id >= 0 && scaled(logits_[id]) >= floor.certain ? id : kUndecided;
    }

    Floor smallest_kept(int64_t count) {
        std::sort(candidates_, candidates_ + count, std::greater<Candidate>());
        Floor floor;
        if (row_.top_k > 0 && row_.top_k <= count) {
            const float kth = scaled(candidates_[row_.top_k - 1].logit);
            floor.raise(kth, kth);
        }
        if (top_p_ < 1.0f) raise_to_nucleus(floor, row_.top_k > 0 ? count : held_, count);
        if (min_p_ > 0.0f) {
            const float least = std::log(min_p_), margin = kMargin * (1.0f - least);
            floor.raise(std::min(least + margin, 0.0f), least - margin);
        }
        return floor;
    }

    // Keeps as many of the first `count` candidates as reach the share top_p of the total weight, which is that of the
    // first `all` candidates, which top-k keeps, plus that of the other tokens.
    void raise_to_nucleus(Floor& floor, int64_t all, int64_t count) const {
        const float kth = floor.certain;
        const auto kept_weight = [&](int64_t i) {
            const float logit = candidates_[i].logit;
            return scaled(logit) >= kth ? (double)weight(logit) : 0.0;
        };
        double total = others_, before = 0.0;
        for (int64_t i = 0; i < all; i++) total += kept_weight(i);
        int64_t certain = 0, possible = 0;
        for (int64_t i = 0; i < count && before < (top_p_ + kMargin) * total; i++) {
            possible = i;
            const double own = kept_weight(i);
            if (before < (top_p_ - kMargin) * total && own > 0.0) certain = i;
            before += own;
        }
        floor.raise(scaled(candidates_[certain].logit), scaled(candidates_[possible].logit));
    }

    static constexpr int64_t kBlock = 1024;  // ids whose weights are summed in float
    static constexpr int64_t kMostHeld = 4096;

    const DrawnRow row_;
    const float temperature_, top_p_, min_p_;  // rounded to float, as torch does
    const float* const logits_;
    const int64_t vocab_, whole_;  // whole_: the number of ids in whole vectors
    float rest_[kLanes];           // the logits of the others, then -inf
    float top_ = 0.0f;             // the largest logit
    double others_ = 0.0;          // the total weight of the tokens that are not candidates
    int64_t held_ = 0;
    Candidate candidates_[kMostHeld];
};

}  // namespace native
