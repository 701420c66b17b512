// Which rows of a layer go to which experts. A slot is a row at one of its experts; the slots of an expert follow each
// other, in the order of the rows.
// Knows nothing of weights.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace native {

class Routing {
  public:
    // `width`: of a row of logits.
    Routing(int64_t experts, int64_t used, int64_t width)
        : experts_(experts), used_(used), width_(width), starts_(experts + 1), costs_(experts + 1), next_(experts) {}

    void reserve(int64_t rows) {
        const auto slots = (size_t)(rows * used_);
        if (chosen_.size() >= slots) return;
        logits_.resize((size_t)(rows * width_));
        shares_.resize(slots);
        for (auto* list : {&slots_, &rows_, &chosen_}) list->resize(slots);  // the last one says that all have room
    }

    // The row's products with the router.
    float* logits(int64_t row) { return &logits_[row * width_]; }

    // Chooses the experts with a row's largest logits, the first of equal ones, from the largest on. Their shares are
    // their probabilities among all experts or, normalised, among the chosen ones.
    void choose(int64_t row, bool normalised) {
        const float* logits = &logits_[row * width_];
        int64_t* chosen = &chosen_[row * used_];
        for (int64_t expert = 0; expert < experts_; expert++) {
            if (expert >= used_ && !(logits[expert] > logits[chosen[used_ - 1]])) continue;
            int64_t i = std::min(expert, used_ - 1);
            for (; i > 0 && logits[expert] > logits[chosen[i - 1]]; i--) chosen[i] = chosen[i - 1];
            chosen[i] = expert;
        }
        float* shares = &shares_[row * used_];
        const float largest = logits[chosen[0]];
        float total = 0;
        for (int64_t i = 0; i < used_; i++) total += shares[i] = std::exp(logits[chosen[i]] - largest);
        if (!normalised) {
            total = 0;
            for (int64_t expert = 0; expert < experts_; expert++) total += std::exp(logits[expert] - largest);
        }
        for (int64_t i = 0; i < used_; i++) shares[i] /= total;
    }

    // Gives the choices of all rows their slots.
    void assign(int64_t rows) {
        std::fill(starts_.begin(), starts_.end(), 0);
        for (int64_t i = 0; i < rows * used_; i++) starts_[chosen_[i] + 1]++;
        for (int64_t expert = 0; expert < experts_; expert++) {
            const int64_t count = starts_[expert + 1];
            costs_[expert + 1] = costs_[expert] + (count == 0 ? 0 : kPanelCost + count);
            next_[expert] = starts_[expert];
            starts_[expert + 1] += starts_[expert];
        }
        for (int64_t i = 0; i < rows * used_; i++) {
            slots_[i] = next_[chosen_[i]]++;
            rows_[slots_[i]] = i / used_;
        }
    }

    int64_t row(int64_t slot) const { return rows_[slot]; }
    int64_t slot(int64_t row, int64_t choice) const { return slots_[row * used_ + choice]; }
    float share(int64_t row, int64_t choice) const { return shares_[row * used_ + choice]; }
    int64_t first(int64_t expert) const { return starts_[expert]; }  // slot
    int64_t count(int64_t expert) const { return starts_[expert + 1] - starts_[expert]; }

    // Runs body(expert, first panel, last panel) for part first..last of `total` equal parts of a product, in which
    // each expert with rows has `panels` panels. The number of parts may not depend on the choices, since all threads
    // must come to the same lists of pieces.
    template <class Body>
    void share_out(int64_t first, int64_t last, int64_t total, int64_t panels, Body&& body) const {
        const int64_t all = costs_.back() * panels, from = all * first / total, to = all * last / total;
        for (int64_t expert = 0; expert < experts_; expert++) {
            const int64_t start = costs_[expert] * panels, cost = costs_[expert + 1] - costs_[expert];
            if (cost == 0 || start >= to || start + cost * panels <= from) continue;
            // A panel belongs to the part in which it begins.
            const auto begun = [&](int64_t place) {
                return std::clamp<int64_t>((place - start + cost - 1) / cost, 0, panels);
            };
            if (begun(from) < begun(to)) body(expert, begun(from), begun(to));
        }
    }

  private:
    static constexpr int64_t kPanelCost = 32;  // reading a panel takes about as long as multiplying so many rows by it

    const int64_t experts_, used_, width_;
    std::vector<float> logits_, shares_;          // [rows][width], [rows][used]
    std::vector<int64_t> chosen_, slots_, rows_;  // [rows][used], [rows][used], [slots]
    std::vector<int64_t> starts_, costs_, next_;  // [experts]: the first slot; the costs before it; the next free slot
};

}  // namespace native
