// Attention of many new tokens of one sequence, as in a prefill: blocks of queries against blocks of keys, both products
// through the tiles of gemm.h, with a running softmax. Causal, and within a window or chunk where a layer has one.
// Blocks of keys begin at multiples of their size, so that a query's sums are the same however a prompt is cut.
#pragma once
#include "attend_one.h"
#include "elements.h"
#include "gemm.h"

namespace native {

constexpr int kQueries = 64;  // of one head in a task, so that packing keys is 7 % of the work
constexpr int kKeys = 256;    // packed keys (32 KiB of 64 bf16 dimensions) stay in the first-level cache with the tiles

inline void transpose(U16 (&x)[16]) {
    for (int round = 0; round < 4; round++) {
        U16 y[16];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            y[2 * i] = low_halves(x[i], x[i + 8]);
            y[2 * i + 1] = high_halves(x[i], x[i + 8]);
        }
        memcpy(x, y, sizeof y);
    }
}

// S: the type of keys and values; A: that of queries and of what is multiplied.
template <class S, class A> class AttendMany {
  public:
    // q: [queries][stride], this group's heads first, of the tokens at `position` and after.
    struct Task {
        const A* q;
        A* out;
        int64_t stride;
        int64_t queries;
        int64_t position;
        Sight sight;
        Live<S> live;
    };

    // Takes all memory that a task needs.
    void reserve(const AttentionShape& shape) { begin(shape); }

    void run(const Task& task, const AttentionShape& shape) {
        begin(shape);
        Tiles<A> tiles;
        const int64_t stop = task.position + task.queries;
        for (int64_t key = oldest(task, 0) / kKeys * kKeys; key < stop; key += kKeys) {
            pack(task, key, std::min<int64_t>(kKeys, stop - key));
            for (int g = 0; g < shape.group; g++) {
                const Tiling tiling(task.queries, tiles.rows(shape.head_dim));
                for (int64_t t = 0; t < tiling.count; t++)
                    advance(tiles, task, shape, g, tiling.first(t), tiling.first(t + 1), key);
            }
        }
        for (int g = 0; g < shape.group; g++)
            for (int64_t i = 0; i < task.queries; i++)
                emit(sums(g, i), 1.0f / total_[g * kQueries + i], shape.head_dim,
                     task.out + i * task.stride + g * shape.head_dim);
    }

  private:
    static constexpr int kKeyWords = kKeys / per_word<A>;

    static int64_t oldest(const Task& task, int64_t query) { return task.sight.oldest(task.position + query); }

    float* sums(int g, int64_t query) { return &sums_[(g * kQueries + query) * width_]; }

    void begin(const AttentionShape& shape) {
        dim_ = shape.head_dim;
        words_ = dim_ / per_word<A>;
        width_ = (shape.head_dim + kPanel - 1) / kPanel * kPanel;
        const size_t rows = (size_t)shape.group * kQueries;
        sums_.assign(rows * width_, 0.0f);
        most_.assign(rows, -1e30f);
        total_.assign(rows, 0.0f);
        keys_.resize((size_t)kKeys * words_);
        values_.resize((size_t)kKeyWords * width_);
        rows_.resize((size_t)kRows * shape.head_dim);
    }

    // Keys and values of the positions first..first + count - 1, zeros where none is seen.
    void pack(const Task& task, int64_t first, int64_t count) {
        const int64_t from = std::max<int64_t>(0, oldest(task, 0) - first);
        const int64_t end = (count + kPanel - 1) / kPanel * kPanel;
        for (int64_t key = from / kPanel * kPanel; key < end; key += kRows) {
            const int low = (int)std::min<int64_t>(kRows, std::max<int64_t>(0, from - key));
            const int high = (int)std::min<int64_t>(kRows, std::max<int64_t>(low, count - key));
            const S* rows = low < high ? task.live.rows(task.live.keys, first + key, rows_.data()) : nullptr;
            pack_keys(rows, key, low, high);
            rows = low < high ? task.live.rows(task.live.values, first + key, rows_.data()) : nullptr;
            for (int k = 0; k < kRows; k += per_word<A>) pack_values(rows, (key + k) / per_word<A>, k, low, high);
        }
    }

    // Sixteen rows from `key` on, of which low..high - 1 are seen, to panels of 32 keys, [words][32].
    void pack_keys(const S* rows, int64_t key, int low, int high) {
        for (int word = 0; word < words_; word += 16) {
            U16 x[16];
            const int n = std::min(16, words_ - word);
            const Lanes some = lanes(n);
            for (int i = 0; i < 16; i++)
                x[i] = low <= i && i < high ? Load::load(rows + i * dim_ + word * per_word<A>, some) : U16{};
            transpose(x);
            Word* to = &keys_[key / kPanel * kPanel * words_ + word * kPanel + key % kPanel];
            for (int i = 0; i < n; i++) memcpy(to + i * kPanel, &x[i], sizeof x[i]);
        }
    }

    // Row `row` of sixteen (or it and the next) to word k of every panel of 32 dimensions, [kKeyWords][32].
    void pack_values(const S* rows, int64_t k, int row, int low, int high) {
        constexpr int kWordsAPanel = kPanel / per_word<A>;
        for (int panel = 0; panel < width_ / kPanel; panel++) {
            const int word = panel * kWordsAPanel;
            U16 part[2];
            for (int i = 0; i < 2; i++) {
                const int at = row + (per_word<A> == 2 ? i : 0), from = word + (per_word<A> == 2 ? 0 : 16 * i);
                const Lanes some = lanes(words_ - from);
                part[i] = low <= at && at < high ? Load::load(rows + at * dim_ + from * per_word<A>, some) : U16{};
            }
            if (per_word<A> == 2) pair_rows(part[0], part[1], part[0], part[1]);
            memcpy(&values_[(panel * kKeyWords + k) * kPanel], part, sizeof part);
        }
    }

    // A tile of queries of head g meets the packed keys.
    void advance(Tiles<A>& tiles, const Task& task, const AttentionShape& shape, int g, int64_t query, int64_t stop,
                 int64_t key) {
        const int64_t newest = task.position + stop - key;  // keys of this block that the last query sees
        if (newest <= 0 || oldest(task, query) >= key + kKeys) return;
        const int64_t begin = std::max<int64_t>(0, oldest(task, query) - key) / kPanel * kPanel;
        const int64_t end = panels_of(std::min<int64_t>(newest, kKeys)) * kPanel;
        const int rows = (int)(stop - query);
        const A* q = task.q + query * task.stride + g * dim_;
        for (int64_t i = begin; i < end; i += kPanel)
            tiles.run(rows, q, task.stride, &keys_[i * words_], dim_, scores_[0] + i, kKeys);
        float fading[kTileRows];
        for (int r = 0; r < rows; r++) fading[r] = soften(task, shape, g, query + r, key, begin, end, r);
        for (int panel = 0; panel < width_ / kPanel; panel++) {
            alignas(64) float fresh[kTileRows][kPanel];
            const Word* values = &values_[(panel * kKeyWords + begin / per_word<A>) * kPanel];
            tiles.run(rows, chances_[0] + begin, kKeys, values, end - begin, fresh[0], kPanel);
            for (int r = 0; r < rows; r++) {
                float* to = sums(g, query + r) + panel * kPanel;
                store(to, load_f(to) * fading[r] + load_f(fresh[r]));
                store(to + 16, load_f(to + 16) * fading[r] + load_f(fresh[r] + 16));
            }
        }
    }

    // Keys begin..end - 1 of the block: row r of the scores to probabilities. Returns the factor by which the sums so far
    // shrink.
    float soften(const Task& task, const AttentionShape& shape, int g, int64_t query, int64_t key, int64_t begin,
                 int64_t end, int r) {
        const int64_t first = std::min(end, std::max(begin, oldest(task, query) - key));
        const int64_t stop = std::min(end, std::max(begin, task.position + query + 1 - key));
        const float hidden = -std::numeric_limits<float>::infinity();
        float* scores = scores_[r];
        scale_scores(scores + begin, end - begin, shape.scale, shape.cap);
        std::fill(scores + begin, scores + first, hidden);
        std::fill(scores + stop, scores + end, hidden);
        float& most = most_[g * kQueries + query];
        float& total = total_[g * kQueries + query];
        F16 peak = broadcast_f(most);
        for (int64_t i = begin; i < end; i += 16) peak = larger(load_f(scores + i), peak);
        const float highest = max(peak);
        const float fading = std::exp(most - highest);
        most = highest;
        total = total * fading + exponentials(scores + begin, end - begin, highest, chances_[r] + begin);
        return fading;
    }

    using Load = Elements<S, A>;

    int dim_ = 0, words_ = 0, width_ = 0;
    std::vector<float> sums_, most_, total_;
    std::vector<Word> keys_, values_;
    std::vector<S> rows_;  // room for 16 keys or values
    alignas(64) float scores_[kTileRows][kKeys];
    alignas(64) A chances_[kTileRows][kKeys];
};

}  // namespace native
