// Attention of packed queries over pages, for any model: a task is some queries of one sequence with the query heads of
// one key head, which meet the sequence's keys block by block with a running softmax. Few rows (decoding) read keys
// and values where they lie; many rows (a chunk of a prompt) pack them for the tiles of gemm.h.
// A task knows nothing of other sequences. Blocks of keys begin at multiples of their size, so a row's sums follow from
// its position and from how the task reads keys alone: they are the same bits in any company.
#pragma once
#include <limits>
#include <utility>
#include <vector>
#include "elements.h"
#include "gemm.h"
#include "pages.h"

namespace native {

constexpr int kQueries = 64;  // of one head in a task, so that packing keys is 7 % of the work
constexpr int kKeys = 256;  // packed keys (32 KiB of 64 bf16 dimensions) stay in the first-level cache with the tiles

constexpr int kFewRows = 12;  // for which packing takes longer than it saves

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

// Fetches keys or values that are read soon while others are computed, for the hardware's prefetching starts anew with
// each page and head: 32 rows of 1,500 tokens take half of the time.
template <class S> class Ahead {
  public:
    // `column` of the positions of `live`, in so many calls of `fetch`.
    Ahead(const Live<S>& live, const Column<S>& column, int64_t calls)
        : live_(live), column_(column), position_(live.first),
          lines_((live.stop - live.first) * column.row * (int64_t)sizeof(S) / calls / 64 + 1) {}

    void fetch() {
        for (int64_t i = 0; i < lines_ && (line_ < end_ || turn()); i++, line_ += 64) __builtin_prefetch(line_);
    }

  private:
    // To the next page; false behind the last one.
    bool turn() {
        if (position_ >= live_.stop) return false;
        const int64_t end = std::min(live_.stop, (position_ / live_.page_size + 1) * live_.page_size);
        line_ = reinterpret_cast<const char*>(live_.at(column_, position_));
        end_ = line_ + (end - position_) * column_.row * (int64_t)sizeof(S);
        position_ = end;
        return true;
    }

    const Live<S> live_;
    const Column<S> column_;
    int64_t position_, lines_;
    const char *line_ = nullptr, *end_ = nullptr;
};

// S: the type of keys and values; Q: that of queries and outputs.
template <class S, class Q> struct AttendTask {
    const Q* queries;  // of the first token and the group's first head, by the strides below
    Q* out;                // of the same
    int64_t token_stride, head_stride, out_token_stride, out_head_stride;  // in elements
    int64_t group, count;  // query heads, and tokens
    int64_t position;      // of the first token
    int64_t key_dim, value_dim;
    Sight sight;
    Live<S> live;          // what some of the tokens see
    const float* sinks;    // of the group's heads: a score beside those of the keys; null: none
    float scale, cap;
};

// T: the type of what is multiplied.
template <class S, class Q, class T> class AttendPages {
  public:
    // Takes all memory that tasks of so many rows need.
    void reserve(int64_t rows, int64_t key_dim, int64_t value_dim) {
        set_sizes(rows, key_dim, value_dim);
        keys_.resize((size_t)kKeys * words_);
        values_.resize((size_t)kKeyWords * width_);
    }

    // `in_place`: reads keys and values where they lie.
    // `next`: what the thread reads after this task.
    void run(const AttendTask<S, Q>& task, bool in_place, const Live<S>& next = {}) {
        begin(task);
        Tiles<T> tiles;
        const Tiling tiling(rows_, in_place ? kVectorRows : tiles.rows(words_ * per_word<T>));
        const int64_t stop = task.live.stop;
        for (int64_t key = task.live.first / kPanel * kPanel; key < stop; key = (key / kKeys + 1) * kKeys) {
            const int64_t count = std::min((key / kKeys + 1) * kKeys, stop) - key;
            point_at(key, count);
            if (!in_place) pack_keys(count), pack_values(count);
            for (int64_t t = 0; t < tiling.count; t++) {
                const int64_t row = tiling.first(t), rows = tiling.first(t + 1) - row;
                if (in_place) {
                    const Live<S> after = key + count < stop ? block(task.live, key + count) : block(next, next.first);
                    read_in_place(row, rows, key, count, after);
                } else {
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

    // The positions from `first` on of its block of keys.
    static Live<S> block(Live<S> live, int64_t first) {
        live.first = first;
        live.stop = std::min(live.stop, first / kKeys * kKeys + kKeys);
        return live;
    }

    void begin(const AttendTask<S, Q>& task) {
        task_ = task;
        set_sizes(task.group * task.count, task.key_dim, task.value_dim);
        for (int64_t row = 0; row < rows_; row++) begin_row(row);
    }

    void set_sizes(int64_t rows, int64_t key_dim, int64_t value_dim) {
        rows_ = rows;
        key_vectors_ = (int)((key_dim + kStep - 1) / kStep);
        value_vectors_ = (int)((value_dim + kStep - 1) / kStep);
        words_ = key_vectors_ * 16;
        width_ = panels_of(value_dim) * kPanel;
        sums_.assign(rows_ * width_, 0.0f);
        most_.resize(rows_);
        total_.resize(rows_);
        queries_.resize(rows_ * words_);
    }

    // Rows are [query heads of the group][queries]. A sink is a score that has been seen before all keys.
    void begin_row(int64_t row) {
        const float sink = task_.sinks == nullptr ? kHidden : task_.sinks[head_of(row)];
        most_[row] = std::max(-1e30f, sink);
        total_[row] = std::exp(sink - most_[row]);
        const Q* from = task_.queries + token_of(row) * task_.token_stride + head_of(row) * task_.head_stride;
        for (int v = 0; v < key_vectors_; v++) {
            const U16 words = Elements<Q, T>::load(from + v * kStep, some_of(task_.key_dim, v));
            memcpy(&queries_[row * words_ + 16 * v], &words, sizeof words);
        }
    }

    int64_t head_of(int64_t row) const { return row / task_.count; }
    int64_t token_of(int64_t row) const { return row % task_.count; }
    int64_t position_of(int64_t row) const { return task_.position + row % task_.count; }

    // The lanes that vector v of a row of so many elements fills.
    static Lanes some_of(int64_t dim, int v) { return lanes((int)((dim + per_word<T> - 1) / per_word<T>) - 16 * v); }

    // Where the keys and values of positions first to first + count - 1 lie. In place of those that nobody sees, and up
    // to a whole panel, the nearest one that is seen.
    void point_at(int64_t first, int64_t count) {
        const Live<S>& live = task_.live;
        const int64_t hidden = std::max<int64_t>(0, live.first - first);
        for (int64_t i = hidden; i < count;) {
            const S *key = live.at(live.keys, first + i), *value = live.at(live.values, first + i);
            const int64_t stop = std::min(count, i + live.page_size - (first + i) % live.page_size);
            for (; i < stop; i++, key += live.keys.row, value += live.values.row) {
                keys_at_[i] = key;
                values_at_[i] = value;
            }
        }
        std::fill(keys_at_, keys_at_ + hidden, keys_at_[hidden]);
        std::fill(values_at_, values_at_ + hidden, values_at_[hidden]);
        for (int64_t i = count; i % kPanel != 0; i++) {
            keys_at_[i] = keys_at_[count - 1];
            values_at_[i] = values_at_[count - 1];
        }
    }

    // To panels of 32 keys, [words][32]; zeros behind the last key.
    void pack_keys(int64_t count) {
        keys_.resize((size_t)kKeys * words_);
        for (int64_t key = 0; key < panels_of(count) * kPanel; key += 16)
            for (int v = 0; v < key_vectors_; v++) {
                const Lanes some = some_of(task_.key_dim, v);
                U16 x[16];
                for (int i = 0; i < 16; i++)
                    x[i] = key + i < count ? Load::load(keys_at_[key + i] + v * kStep, some) : U16{};
                transpose(x);
                Word* to = &keys_[key / kPanel * kPanel * words_ + v * 16 * kPanel + key % kPanel];
                for (int i = 0; i < 16; i++) memcpy(to + i * kPanel, &x[i], sizeof x[i]);
            }
    }

    // Words of one key, or of two, in panels of 32 dimensions, [kKeyWords][32].
    void pack_values(int64_t count) {
        values_.resize((size_t)kKeyWords * width_);
        for (int64_t k = 0; k < panels_of(count) * kPanel / per_word<T>; k++)
            for (int panel = 0; panel < width_ / kPanel; panel++) {
                U16 part[2];
                for (int i = 0; i < 2; i++) {
                    const int64_t key = per_word<T> == 2 ? 2 * k + i : k;
                    const int v = per_word<T> == 2 ? panel : 2 * panel + i;
                    const Lanes some = some_of(task_.value_dim, v);
                    part[i] = key < count ? Load::load(values_at_[key] + v * kStep, some) : U16{};
                }
                if (per_word<T> == 2) pair_rows(part[0], part[1], part[0], part[1]);
                memcpy(&values_[(panel * kKeyWords + k) * kPanel], part, sizeof part);
            }
    }

    // A tile of rows meets the packed keys.
    void read_packed(Tiles<T>& tiles, int64_t row, int64_t rows, int64_t key, int64_t count) {
        const auto [from, stop] = seen_by(row, rows);
        if (from >= key + count || stop <= key) return;
        const int64_t panels = panels_of(std::min(stop - key, count));
        const T* q = reinterpret_cast<const T*>(&queries_[row * words_]);
        const int64_t dim = words_ * per_word<T>;
        for (int64_t p = 0; p < panels; p++)
            tiles.run((int)rows, q, dim, &keys_[p * kPanel * words_], dim, scores_[0] + p * kPanel, kKeys);
        soften(row, rows, key, panels * kPanel);
        for (int panel = 0; panel < width_ / kPanel; panel++) {
            alignas(64) float fresh[kTileRows][kPanel];
            tiles.run((int)rows, chances_[0], kKeys, &values_[panel * kKeyWords * kPanel], panels * kPanel, fresh[0],
                      kPanel);
            for (int64_t r = 0; r < rows; r++)
                for (int i = 0; i < kPanel; i += 16) {
                    float* to = &sums_[(row + r) * width_ + panel * kPanel + i];
                    store(to, load_f(to) * fading_[r] + load_f(fresh[r] + i));
                }
        }
    }

    // The keys that some of these rows see: from the first number to before the second.
    std::pair<int64_t, int64_t> seen_by(int64_t row, int64_t rows) const {
        int64_t oldest = position_of(row), newest = oldest;
        for (int64_t r = row + 1; r < row + rows; r++) {
            oldest = std::min(oldest, position_of(r));
            newest = std::max(newest, position_of(r));
        }
        return {task_.sight.oldest(oldest), newest + 1};
    }

    // `after`: the keys that are read after this block.
    void read_in_place(int64_t row, int64_t rows, int64_t key, int64_t count, const Live<S>& after) {
        const int64_t padded = (count + 15) / 16 * 16;
        const Live<S> here = block(task_.live, std::max(key, task_.live.first));
        Ahead<S> keys(after, after.keys, rows * padded / 16), values(here, here.values, rows * padded / 16);
        for (int64_t r = 0; r < rows; r++)
            multiply_keys(&queries_[(row + r) * words_], padded, scores_[r], keys, values);
        soften(row, rows, key, padded);
        for (int64_t r = 0; r < rows;) {
            const int64_t left = rows - r;
            if (left >= 4) {
                mix<4>(row, r, count), r += 4;
            } else if (left >= 2) {
                mix<2>(row, r, count), r += 2;
            } else {
                mix<1>(row, r, count), r += 1;
            }
        }
    }

    void multiply_keys(const Word* query, int64_t padded, float* scores, Ahead<S>& keys, Ahead<S>& values) const {
        for (int64_t key = 0; key < padded; key += 16) {
            keys.fetch();
            values.fetch();
            const S* const* at = keys_at_ + key;
            F16 x[16] = {};
            for (int v = 0; v < key_vectors_; v++) {
                const U16 part = load(query + 16 * v);
                const Lanes some = some_of(task_.key_dim, v);
#pragma GCC unroll 16
                for (int i = 0; i < 16; i++) x[i] = dot<T>(x[i], Load::load(at[i] + v * kStep, some), part);
            }
            store(scores + key, native::sums(x));
        }
    }

    // H rows take the values of the block, as many vectors at a time as there are registers for their sums.
    template <int H> void mix(int64_t row, int64_t r, int64_t count) {
        constexpr int kMost = 16 / (H * per_word<T>);
        for (int v = 0; v < value_vectors_;) {
            const int left = value_vectors_ - v;
            if (left >= kMost) {
                mix_vectors<H, kMost>(row, r, v, count), v += kMost;
            } else if (left >= 2 && kMost > 2) {
                mix_vectors<H, 2>(row, r, v, count), v += 2;
            } else {
                mix_vectors<H, 1>(row, r, v, count), v += 1;
            }
        }
    }

    template <int H, int V> void mix_vectors(int64_t row, int64_t r, int first, int64_t count) {
        constexpr int kParts = per_word<T>;
        Lanes some[V];
        for (int v = 0; v < V; v++) some[v] = some_of(task_.value_dim, first + v);
        F16 acc[H][V][kParts] = {};
        for (int64_t key = 0; key < count; key += kParts) {
            const S *even = values_at_[key] + first * kStep, *odd = values_at_[key + kParts - 1] + first * kStep;
            const bool paired = key + 1 < count;  // else there is no second key, whose value could be infinite
            U16 weights[H];
#pragma GCC unroll 4
            for (int h = 0; h < H; h++) weights[h] = broadcast(word_at(chances_[r + h] + key));
#pragma GCC unroll 16
            for (int v = 0; v < V; v++) {
                U16 part[2] = {Load::load(even + v * kStep, some[v])};
                if (kParts == 2)
                    pair_rows(part[0], paired ? Load::load(odd + v * kStep, some[v]) : U16{}, part[0], part[1]);
#pragma GCC unroll 4
                for (int h = 0; h < H; h++)
#pragma GCC unroll 2
                    for (int i = 0; i < kParts; i++) acc[h][v][i] = dot<T>(acc[h][v][i], part[i], weights[h]);
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < H; h++)
#pragma GCC unroll 16
            for (int v = 0; v < V; v++)
#pragma GCC unroll 2
                for (int i = 0; i < kParts; i++) {
                    float* to = &sums_[(row + r + h) * width_ + ((first + v) * kParts + i) * 16];
                    store(to, load_f(to) * fading_[r + h] + acc[h][v][i]);
                }
    }

    static Word word_at(const T* from) {
        Word word;
        memcpy(&word, from, sizeof word);
        return word;
    }

    // Scores of a tile to probabilities, and the factors by which the sums so far shrink.
    void soften(int64_t row, int64_t rows, int64_t key, int64_t width) {
        for (int64_t r = 0; r < rows; r++) fading_[r] = soften_row(row + r, key, width, scores_[r], chances_[r]);
    }

    float soften_row(int64_t row, int64_t key, int64_t width, float* scores, T* chances) {
        const int64_t position = position_of(row);
        const int64_t first = std::clamp<int64_t>(task_.sight.oldest(position) - key, 0, width);
        const int64_t stop = std::clamp<int64_t>(position + 1 - key, 0, width);
        scale_scores(scores, width, task_.scale, task_.cap);
        for (int64_t i = 0; i < first; i++) scores[i] = kHidden;
        for (int64_t i = stop; i < width; i++) scores[i] = kHidden;
        F16 peak = broadcast_f(most_[row]);
        for (int64_t i = 0; i < width; i += 16) peak = larger(load_f(scores + i), peak);
        const float highest = max(peak), fading = std::exp(most_[row] - highest);
        most_[row] = highest;
        total_[row] = total_[row] * fading + exponentials(scores, width, highest, chances);
        return fading;
    }

    void finish() {
        for (int64_t row = 0; row < rows_; row++)
            Elements<Q, T>::store(&sums_[row * width_], 1.0f / total_[row], (int)task_.value_dim,
                                  task_.out + token_of(row) * task_.out_token_stride +
                                      head_of(row) * task_.out_head_stride);
    }

    static constexpr float kHidden = -std::numeric_limits<float>::infinity();

    AttendTask<S, Q> task_{};
    int64_t rows_ = 0, words_ = 0, width_ = 0;
    int key_vectors_ = 0, value_vectors_ = 0;
    std::vector<float> sums_, most_, total_;
    std::vector<Word> queries_, keys_, values_;
    const S *keys_at_[kKeys], *values_at_[kKeys];
    float fading_[kTileRows];
    alignas(64) float scores_[kTileRows][kKeys];
    alignas(64) T chances_[kTileRows][kKeys];
};

}  // namespace native
