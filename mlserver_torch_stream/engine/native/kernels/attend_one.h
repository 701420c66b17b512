// Attention of one new token of one sequence: the query heads of one group over the keys and values that it sees.
// Reads each key and value once per few heads; knows nothing of other sequences, so nobody pays for their length.
#pragma once
#include <limits>
#include <vector>
#include "heads.h"
#include "pages.h"

namespace native {

// Fetches the next task's keys while this one computes, for the hardware's prefetching starts anew with each row and
// head, and with each page: 32 rows of 160 tokens took 4.5 ms a step instead of 5.5. (Fetching the values too: 4.9.)
template <class T> class Ahead {
  public:
    Ahead(const Live<T>& next, int64_t calls)
        : next_(next), position_(next.first),
          lines_((next.stop - next.first) * next.keys.row * (int64_t)sizeof(T) / calls / 64 + 1) {}

    void fetch() {
        for (int64_t i = 0; i < lines_ && (line_ < end_ || turn()); i++, line_ += 64) __builtin_prefetch(line_);
    }

  private:
    // To the next page; false behind the last one.
    bool turn() {
        if (position_ >= next_.stop) return false;
        const int64_t end = std::min(next_.stop, (position_ / next_.page_size + 1) * next_.page_size);
        line_ = reinterpret_cast<const char*>(next_.at(next_.keys, position_));
        end_ = line_ + (end - position_) * next_.keys.row * (int64_t)sizeof(T);
        position_ = end;
        return true;
    }

    const Live<T> next_;
    int64_t position_, lines_;
    const char *line_ = nullptr, *end_ = nullptr;
};

struct AttentionShape {
    int group;  // query heads per key head
    int head_dim;
    float scale, cap;
};

template <class T> struct OneScratch {
    std::vector<float> scores;
    std::vector<T> chances;  // [group][seen positions, padded to whole rows of 16]
    std::vector<T> keys, values;  // of a sequence whose pages are no multiple of 16

    // Takes all memory that an attention to so many positions needs.
    void reserve(int64_t positions, const AttentionShape& shape, int64_t page_size) {
        const int64_t padded = ceil_rows(positions) + kRows;  // the first of them may be in the middle of 16
        scores.reserve(padded);
        chances.reserve(padded * shape.group);
        if (page_size % kRows == 0) return;
        keys.reserve(padded * shape.head_dim);
        values.reserve(padded * shape.head_dim);
    }
};

// V: vectors of 16 words that hold a head; the last may be partly filled.
template <class T, int V> class AttendOne {
  public:
    // q [group][V * 16 words], zero padded; out [group][head_dim].
    template <class Out>
    static void run(const Word* q, const Live<T>& seen, const Live<T>& next, const AttentionShape& shape,
                    OneScratch<T>& scratch, Out* out) {
        const Live<T> live = seen.page_size % kRows == 0 ? seen : in_one_page(seen, scratch);
        const int64_t padded = ceil_rows(live.stop) - floor_rows(live.first);
        scratch.scores.resize(padded);
        scratch.chances.resize(padded * shape.group);
        float sums[64];
        Ahead<T> ahead(next, shape.group * (padded / kRows));
        for (int first = 0; first < shape.group; first += 64) {
            const int heads = std::min(64, shape.group - first);
            for (int g = 0; g < heads; g++) {
                const Word* query = q + (first + g) * V * 16;
                T* to = &scratch.chances[padded * (first + g)];
                sums[g] = chances(query, live, shape, scratch, to, ahead);
            }
            for (int g = 0; g < heads;) {
                const int count = std::min(kHeads, heads - g);
                const T* p = &scratch.chances[padded * (first + g)];
                mix_some(count, p, padded, live, shape.head_dim, sums + g, out + (first + g) * shape.head_dim);
                g += count;
            }
        }
    }

  private:
    // A copy of what is seen. Calls in the loops below would cost their sums the registers.
    static Live<T> in_one_page(const Live<T>& live, OneScratch<T>& scratch) {
        static const int32_t kFirst = 0;
        const int64_t base = floor_rows(live.first), size = ceil_rows(live.stop) - base;
        return {{copied(live, live.keys, base, size, scratch.keys), 0, live.keys.row},
                {copied(live, live.values, base, size, scratch.values), 0, live.values.row},
                &kFirst, size, live.first - base, live.stop - base};
    }
    static const T* copied(const Live<T>& live, const Column<T>& column, int64_t base, int64_t size,
                           std::vector<T>& to) {
        to.resize(size * column.row);
        for (int64_t i = live.first; i < live.stop; i++)
            memcpy(&to[(i - base) * column.row], live.at(column, i), column.row * sizeof(T));
        return to.data();
    }

    // Heads whose sums fit into registers together: with 64 bf16 dimensions four, of four vectors each.
    static constexpr int kHeads = V >= 8 ? 1 : V >= 4 ? 2 : 4;

    struct Filled {  // the lanes of each of a head's vectors
        explicit Filled(int words) {
            for (int v = 0; v < V; v++) of[v] = lanes(words - 16 * v);
        }
        Lanes of[V];
    };

    static float chances(const Word* q, const Live<T>& live, const AttentionShape& shape, OneScratch<T>& scratch, T* to,
                         Ahead<T>& ahead) {
        const Filled filled(shape.head_dim / per_word<T>);
        const int64_t base = floor_rows(live.first), padded = ceil_rows(live.stop) - base;
        float* scores = scratch.scores.data();
        U16 query[V];
        for (int v = 0; v < V; v++) query[v] = load(q + 16 * v);
        for (int64_t at = base; at < live.stop; at += kRows) {
            ahead.fetch();
            const T* rows = live.at(live.keys, at);
            const int64_t low = live.first - at, high = live.stop - 1 - at;
            const F16 found = low <= 0 && high >= kRows - 1
                                  ? sixteen<true>(rows, 0, 0, query, filled, shape.head_dim)
                                  : sixteen<false>(rows, low, high, query, filled, shape.head_dim);
            store(scores + at - base, found);
        }
        const float most = scale_scores(scores, padded, shape.scale, shape.cap);
        const float hidden = -std::numeric_limits<float>::infinity();
        std::fill(scores, scores + (live.first - base), hidden);
        std::fill(scores + (live.stop - base), scores + padded, hidden);
        return exponentials(scores, padded, most, to);
    }

    // A query times sixteen keys. Those that are not seen, before `low` or behind `high`, are not read.
    template <bool kWhole>
    static F16 sixteen(const T* rows, int64_t low, int64_t high, const U16 (&query)[V], const Filled& filled, int dim) {
        F16 x[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            const int64_t key = kWhole ? i : std::min(std::max<int64_t>(i, low), high);
            const Word* k = reinterpret_cast<const Word*>(rows + key * dim);
            x[i] = F16{};
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) x[i] = dot<T>(x[i], load_part(k + 16 * v, filled.of[v]), query[v]);
        }
        return native::sums(x);
    }

    template <class Out>
    static void mix_some(int heads, const T* p, int64_t lp, const Live<T>& live, int dim, const float* sums,
                         Out* out) {
        if (heads == 4) return mix<std::min(4, kHeads)>(p, lp, live, dim, sums, out);
        if (heads == 3) return mix<std::min(3, kHeads)>(p, lp, live, dim, sums, out);
        if (heads == 2) return mix<std::min(2, kHeads)>(p, lp, live, dim, sums, out);
        mix<1>(p, lp, live, dim, sums, out);
    }

    static Word word_at(const T* from) {
        Word word;
        memcpy(&word, from, sizeof word);
        return word;
    }

    template <int H, class Out>
    static void mix(const T* p, int64_t lp, const Live<T>& live, int dim, const float* sums, Out* out) {
        constexpr int kParts = per_word<T>;
        const Filled filled(dim / kParts);
        const int64_t base = floor_rows(live.first);
        F16 acc[H][V][kParts] = {};
        for (int64_t at = base; at < live.stop; at += kRows) {
            const T* rows = live.at(live.values, at);
            const int64_t low = std::max<int64_t>(0, live.first - at), high = std::min<int64_t>(kRows, live.stop - at) - 1;
            for (int64_t key = low / kParts * kParts; key <= high; key += kParts) {
                const Word* first = reinterpret_cast<const Word*>(rows + std::max(key, low) * dim);
                const Word* second = reinterpret_cast<const Word*>(rows + std::min(key + 1, high) * dim);
                U16 weights[H];
#pragma GCC unroll 4
                for (int h = 0; h < H; h++) weights[h] = broadcast(word_at(p + h * lp + at - base + key));
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) {
                    U16 part[2] = {load_part(first + 16 * v, filled.of[v])};
                    if (kParts == 2) pair_rows(part[0], load_part(second + 16 * v, filled.of[v]), part[0], part[1]);
#pragma GCC unroll 4
                    for (int h = 0; h < H; h++)
#pragma GCC unroll 2
                        for (int i = 0; i < kParts; i++) acc[h][v][i] = dot<T>(acc[h][v][i], part[i], weights[h]);
                }
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) {
            float ordered[V * kParts * 16];
#pragma GCC unroll 8
            for (int v = 0; v < V; v++)
#pragma GCC unroll 2
                for (int i = 0; i < kParts; i++) store(ordered + (v * kParts + i) * 16, acc[h][v][i]);
            if constexpr (std::is_same_v<Out, T>) {
                emit(ordered, 1.0f / sums[h], dim, out + h * dim);
            } else {
                emit_floats<T>(ordered, 1.0f / sums[h], dim, out + h * dim);
            }
        }
    }
};

}  // namespace native
