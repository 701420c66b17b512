// Attention of packed queries over pages, for any model. A task is some queries of one sequence with all query heads of
// one key head. It goes through the sequence's keys block by block, with a running softmax. Few rows (decoding) read
// keys and values in place; many rows (a chunk of a prompt) pack them for the tiles of gemm.h.
// A task knows nothing of other sequences. Blocks of keys begin at multiples of their size, so a row's sums depend only
// on its position and on how the task reads keys, and are bitwise the same in any batch.
#pragma once
#include <limits>
#include <utility>
#include <vector>
#include "elements.h"
#include "gemm.h"
#include "key_block.h"

namespace native {

constexpr int kQueries = 64;  // queries of one head in a task; so packing keys is 7 % of the work

constexpr int kFewRows = 12;  // rows for which packing takes longer than it saves

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

// S is the type of keys and values, Q that of queries and outputs.
template <class S, class Q> struct AttendTask {
    const Q* queries;  // of the first token and the group's first head, by the strides below
    Q* out;                // of the same
    int64_t token_stride, head_stride, out_token_stride, out_head_stride;  // in elements
    int64_t group, count;  // query heads, and tokens
    int64_t position;      // of the first token
    int64_t key_dim, value_dim;
    Sight sight;
    Live<S> live;          // the keys that at least one of the tokens sees
    const float* sinks;    // an additional score in the softmax for each head of the group; null: none
    float scale, cap;
};

// T is the type of the factors of a product.
template <class S, class Q, class T> class AttendPages {
  public:
    // Allocates all memory that tasks of this many rows need.
    void reserve(int64_t rows, int64_t key_dim, int64_t value_dim) {
        set_sizes(rows, key_dim, value_dim);
        keys_.resize((size_t)kKeys * words_);
        values_.resize((size_t)kKeyWords * width_);
    }

    // `in_place` means that keys and values are read where they are, without packing.
    // `next` are the keys and values that the thread reads after this task.
    void run(const AttendTask<S, Q>& task, bool in_place, const Live<S>& next = {}) {
        begin(task);
        Tiles<T> tiles;
        const Tiling tiling(rows_, in_place ? kVectorRows : tiles.rows(words_ * per_word<T>));
        const int64_t stop = task.live.stop;
        for (int64_t key = task.live.first / kPanel * kPanel; key < stop; key = (key / kKeys + 1) * kKeys) {
            const int64_t count = std::min((key / kKeys + 1) * kKeys, stop) - key;
            keys_here_.point_at(task.live, key, count);
            if (!in_place) pack_keys(count), pack_values(count);
            const Live<S> after = key + count < stop ? block(task.live, key + count) : block(next, next.first);
            Ahead<S> keys(after, after.keys, tiling.count), values(after, after.values, tiling.count);
            for (int64_t t = 0; t < tiling.count; t++) {
                const int64_t row = tiling.first(t), rows = tiling.first(t + 1) - row;
                if (in_place) {
                    read_in_place(row, rows, key, count, after);
                } else {
                    keys.fetch(), values.fetch();
                    read_packed(tiles, row, rows, key, count);
                }
            }
        }
        finish();
    }

  private:
    static constexpr int kStep = 16 * per_word<T>;  // elements of a vector of words
    static constexpr int kKeyWords = kKeys / per_word<T>;
    using Load = Elements<S, T>;

    // The part of `live` from `first` to the end of the block of keys.
    static Live<S> block(Live<S> live, int64_t first) {
        live.first = first;
        live.stop = std::min(live.stop, first / kKeys * kKeys + kKeys);
        return live;
    }

    void begin(const AttendTask<S, Q>& task) {
        task_ = task;
        task_.scale *= kLog2e, task_.cap *= kLog2e;  // so e^score is exp2 of the result
        set_sizes(task.group * task.count, task.key_dim, task.value_dim);
        for (int64_t head = 0, row = 0; head < task.group; head++)
            for (int64_t token = 0; token < task.count; token++) begin_row(row++, head, token);
    }

    void set_sizes(int64_t rows, int64_t key_dim, int64_t value_dim) {
        rows_ = rows;
        key_vectors_ = vectors_of<T>(key_dim);
        value_vectors_ = vectors_of<T>(value_dim);
        words_ = key_vectors_ * 16;
        width_ = panels_of(value_dim) * kPanel;
        sums_.assign(rows_ * width_, 0.0f);
        positions_.resize(rows_);
        most_.resize(rows_);
        total_.resize(rows_);
        queries_.resize(rows_ * words_);
    }

    // Rows are [query heads of the group][queries]. A head's sink is the first score of the row, before the scores of the
    // keys.
    __attribute__((noinline)) void begin_row(int64_t row, int64_t head, int64_t token) {
        positions_[row] = task_.position + token;
        most_[row] = -1e30f, total_[row] = 0.0f;
        if (task_.sinks != nullptr) {
            const float sink = task_.sinks[head] * kLog2e;
            most_[row] = std::max(most_[row], sink);
            total_[row] = std::exp2(sink - most_[row]);
        }
        const Q* from = task_.queries + token * task_.token_stride + head * task_.head_stride;
        for (int v = 0; v < key_vectors_; v++) {
            const U16 words = Elements<Q, T>::load(from + v * kStep, some_of<T>(task_.key_dim, v));
            memcpy(&queries_[row * words_ + 16 * v], &words, sizeof words);
        }
    }

    // Packs panels of 32 keys, [words][32], with zeros after the last key.
    __attribute__((noinline)) void pack_keys(int64_t count) {
        keys_.resize((size_t)kKeys * words_);
        for (int64_t key = 0; key < panels_of(count) * kPanel; key += 16)
            for (int v = 0; v < key_vectors_; v++) {
                const Lanes some = some_of<T>(task_.key_dim, v);
                U16 x[16];
                for (int i = 0; i < 16; i++)
                    x[i] = key + i < count ? Load::load(keys_here_.key(key + i) + v * kStep, some) : U16{};
                transpose(x);
                Word* to = &keys_[key / kPanel * kPanel * words_ + v * 16 * kPanel + key % kPanel];
                for (int i = 0; i < 16; i++) memcpy(to + i * kPanel, &x[i], sizeof x[i]);
            }
    }

    // Packs values in panels of 32 dimensions, [kKeyWords][32]. A word has the values of one key or of two keys.
    __attribute__((noinline)) void pack_values(int64_t count) {
        values_.resize((size_t)kKeyWords * width_);
        for (int64_t k = 0; k < panels_of(count) * kPanel / per_word<T>; k++)
            for (int panel = 0; panel < width_ / kPanel; panel++) {
                U16 part[2];
                for (int i = 0; i < 2; i++) {
                    const int64_t key = per_word<T> == 2 ? 2 * k + i : k;
                    const int v = per_word<T> == 2 ? panel : 2 * panel + i;
                    const Lanes some = some_of<T>(task_.value_dim, v);
                    part[i] = key < count ? Load::load(keys_here_.value(key) + v * kStep, some) : U16{};
                }
                if (per_word<T> == 2) pair_rows(part[0], part[1], part[0], part[1]);
                memcpy(&values_[(panel * kKeyWords + k) * kPanel], part, sizeof part);
            }
    }

    // Computes the attention of a tile of rows to the packed keys.
    __attribute__((noinline)) void read_packed(Tiles<T>& tiles, int64_t row, int64_t rows, int64_t key, int64_t count) {
        const auto [from, stop] = seen_by(row, rows);
        if (from >= key + count || stop <= key) return;
        const int64_t panels = panels_of(std::min(stop - key, count));
        const T* q = reinterpret_cast<const T*>(&queries_[row * words_]);
        const int64_t dim = words_ * per_word<T>;
        for (int64_t p = 0; p < panels; p++)
            tiles.run((int)rows, q, dim, &keys_[p * kPanel * words_], dim, scores_[0] + p * kPanel, kKeys);
        softmax(row, rows, key, panels * kPanel);
        for (int panel = 0; panel < width_ / kPanel; panel++) {
            alignas(64) float fresh[kTileRows][kPanel];
            tiles.run((int)rows, probabilities_[0], kKeys, &values_[panel * kKeyWords * kPanel], panels * kPanel,
                      fresh[0], kPanel);
            for (int64_t r = 0; r < rows; r++)
                for (int i = 0; i < kPanel; i += 16) {
                    float* to = &sums_[(row + r) * width_ + panel * kPanel + i];
                    store(to, load_f(to) * rescale_[r] + load_f(fresh[r] + i));
                }
        }
    }

    // The keys that at least one of these rows sees, as the first key and the one after the last.
    std::pair<int64_t, int64_t> seen_by(int64_t row, int64_t rows) const {
        const auto [oldest, newest] = std::minmax_element(&positions_[row], &positions_[row] + rows);
        return {task_.sight.oldest(*oldest), *newest + 1};
    }

    // `after` are the keys that are read after this block.
    void read_in_place(int64_t row, int64_t rows, int64_t key, int64_t count, const Live<S>& after) {
        const int64_t padded = (count + 15) / 16 * 16;
        const Live<S> here = block(task_.live, std::max(key, task_.live.first));
        Ahead<S> keys(after, after.keys, rows * padded / 16), values(here, here.values, rows * padded / 16);
        for (int64_t r = 0; r < rows; r++)
            keys_here_.multiply(&queries_[(row + r) * words_], task_.key_dim, padded, scores_[r], keys, values);
        softmax(row, rows, key, padded);
        keys_here_.mix(rows, probabilities_, rescale_, task_.value_dim, count, &sums_[row * width_], width_);
    }

    // Turns the scores of a tile into probabilities, and sets the factors by which earlier sums are multiplied.
    void softmax(int64_t row, int64_t rows, int64_t key, int64_t width) {
        for (int64_t r = 0; r < rows; r++)
            rescale_[r] = softmax_row(row + r, key, width, scores_[r], probabilities_[r]);
    }

    __attribute__((noinline)) float softmax_row(int64_t row, int64_t key, int64_t width, float* scores,
                                                T* probabilities) {
        const int64_t position = positions_[row];
        const int64_t first = std::clamp<int64_t>(task_.sight.oldest(position) - key, 0, width);
        const int64_t stop = std::clamp<int64_t>(position + 1 - key, 0, width);
        const float scale = task_.cap == 0 ? task_.scale : 1.0f;  // of the scores where the softmax reads them
        if (task_.cap != 0) cap_scores(scores, width, task_.scale, task_.cap);
        for (int64_t i = 0; i < first; i++) scores[i] = kHidden;
        for (int64_t i = stop; i < width; i++) scores[i] = kHidden;
        F16 peak = load_f(scores);
        for (int64_t i = 16; i < width; i += 16) peak = larger(load_f(scores + i), peak);
        const float highest = std::max(max(peak) * scale, most_[row]), rescale = std::exp2(most_[row] - highest);
        most_[row] = highest;
        total_[row] = total_[row] * rescale + exponentials(scores, width, scale, highest, probabilities);
        return rescale;
    }

    void finish() {
        for (int64_t head = 0, row = 0; head < task_.group; head++)
            for (int64_t token = 0; token < task_.count; token++, row++)
                Elements<Q, T>::store(&sums_[row * width_], 1.0f / total_[row], (int)task_.value_dim,
                                      task_.out + token * task_.out_token_stride + head * task_.out_head_stride);
    }

    static constexpr float kHidden = -std::numeric_limits<float>::infinity();

    AttendTask<S, Q> task_{};
    int64_t rows_ = 0, words_ = 0, width_ = 0;
    int key_vectors_ = 0, value_vectors_ = 0;
    std::vector<int64_t> positions_;  // of each row's token
    std::vector<float> sums_, most_, total_;
    std::vector<Word> queries_, keys_, values_;
    KeyBlock<S, T> keys_here_;
    float rescale_[kTileRows];
    alignas(64) float scores_[kTileRows][kKeys];
    alignas(64) T probabilities_[kTileRows][kKeys];
};

}  // namespace native
