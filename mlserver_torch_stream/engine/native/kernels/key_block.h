// A block of keys and values in their pages: the products of keys with queries, and of values with probabilities.
// Knows nothing of softmax, nor of which keys a query sees.
#pragma once
#include "elements.h"
#include "matrix_unit.h"
#include "pages.h"

namespace native {

constexpr int kKeys = 256;  // packed keys (32 KiB of 64 bf16 dimensions) stay in the first-level cache with the tiles

// Prefetches keys or values while earlier ones are computed, because the hardware's prefetching starts anew with each
// page and head. With it, 32 rows of 1,500 tokens take half the time.
template <class S> class Ahead {
  public:
    // Prefetches `column` for the positions of `live`, spread over `calls` calls of `fetch`.
    Ahead(const Live<S>& live, const Column<S>& column, int64_t calls)
        : live_(live), column_(column), position_(live.first),
          lines_((live.stop - live.first) * column.row * (int64_t)sizeof(S) / calls / 64 + 1) {}

    void fetch() {
        for (int64_t i = 0; i < lines_ && (line_ < end_ || turn()); i++, line_ += 64) prefetch_to_second(line_);
    }

  private:
    // Goes to the next page; false after the last one.
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

// The lanes that vector v of a row of `dim` elements fills.
template <class T> Lanes some_of(int64_t dim, int v) {
    return lanes((int)((dim + per_word<T> - 1) / per_word<T>) - 16 * v);
}
// The vectors of a row.
template <class T> int vectors_of(int64_t dim) { return (int)((dim + 16 * per_word<T> - 1) / (16 * per_word<T>)); }

// S is the type of keys and values, T that of the factors of a product.
template <class S, class T> class KeyBlock {
  public:
    // Records where the keys and values of the positions first to first + count - 1 are. For positions that no query
    // sees, and for those after the last that fill its panel, it records the nearest position that is seen.
    void point_at(const Live<S>& live, int64_t first, int64_t count) {
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

    const S* key(int64_t i) const { return keys_at_[i]; }
    const S* value(int64_t i) const { return values_at_[i]; }

    // Computes scores[padded] = query x keys.
    __attribute__((noinline)) void multiply(const Word* query, int64_t dim, int64_t padded, float* scores,
                                            Ahead<S>& keys, Ahead<S>& values) const {
        const int vectors = vectors_of<T>(dim);
        for (int64_t key = 0; key < padded; key += 16) {
            keys.fetch();
            values.fetch();
            const S* const* at = keys_at_ + key;
            F16 x[16] = {};
            for (int v = 0; v < vectors; v++) {
                const U16 part = load(query + 16 * v);
                const Lanes some = some_of<T>(dim, v);
#pragma GCC unroll 16
                for (int i = 0; i < 16; i++) x[i] = dot<T>(x[i], Load::load(at[i] + v * kStep, some), part);
            }
            store(scores + key, native::sums(x));
        }
    }

    // Computes sums[rows][width] = sums * rescale[rows] + probabilities[rows][count] x values.
    void mix(int64_t rows, const T (*probabilities)[kKeys], const float* rescale, int64_t dim, int64_t count,
             float* sums, int64_t width) const {
        for (int64_t r = 0; r < rows;) {
            const Mixture mixture{probabilities + r, rescale + r, dim, count, sums + r * width, width};
            if (rows - r >= 4) {
                mix_rows<4>(mixture), r += 4;
            } else if (rows - r >= 2) {
                mix_rows<2>(mixture), r += 2;
            } else {
                mix_rows<1>(mixture), r += 1;
            }
        }
    }

  private:
    static constexpr int kStep = 16 * per_word<T>;  // elements of a vector of words
    using Load = Elements<S, T>;

    struct Mixture {  // the arguments of mix, from one row on
        const T (*probabilities)[kKeys];
        const float* rescale;
        int64_t dim, count;
        float* sums;
        int64_t width;
    };

    // Adds the block's values to the sums of H rows, as many vectors at a time as there are registers for the sums.
    template <int H> void mix_rows(const Mixture& to) const {
        constexpr int kMost = 16 / (H * per_word<T>);
        for (int v = 0, left = vectors_of<T>(to.dim); left > 0; left = vectors_of<T>(to.dim) - v) {
            if (left >= kMost) {
                mix_vectors<H, kMost>(to, v), v += kMost;
            } else if (left >= 2 && kMost > 2) {
                mix_vectors<H, 2>(to, v), v += 2;
            } else {
                mix_vectors<H, 1>(to, v), v += 1;
            }
        }
    }

    template <int H, int V> __attribute__((noinline)) void mix_vectors(const Mixture& to, int first) const {
        constexpr int kParts = per_word<T>;
        Lanes some[V];
        for (int v = 0; v < V; v++) some[v] = some_of<T>(to.dim, first + v);
        F16 acc[H][V][kParts] = {};
        for (int64_t key = 0; key < to.count; key += kParts) {
            const S *even = values_at_[key] + first * kStep, *odd = values_at_[key + kParts - 1] + first * kStep;
            const bool paired = key + 1 < to.count;  // otherwise there is no second key: memory there may hold infinity
            U16 weights[H];
#pragma GCC unroll 4
            for (int h = 0; h < H; h++) weights[h] = broadcast(word_at(to.probabilities[h] + key));
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
                    float* sum = to.sums + h * to.width + ((first + v) * kParts + i) * 16;
                    store(sum, load_f(sum) * to.rescale[h] + acc[h][v][i]);
                }
    }

    const S *keys_at_[kKeys], *values_at_[kKeys];
};

}  // namespace native
