// Attention of one new token of one row: the query heads of one group over that row's live keys and values.
// Reads each key and value once per few heads; knows nothing of other rows, so nobody pays for their length.
#pragma once
#include <limits>
#include <vector>
#include "heads.h"

namespace native {

template <class T> struct Live {  // [count][head_dim], contiguous
    const T* keys;
    const T* values;
    int64_t count;
};

// Fetches the next task's keys while this one computes, for the hardware's prefetching starts anew with each row and
// head: 32 rows of 160 tokens took 4.5 ms a step instead of 5.5. (Fetching the values too: 4.9.)
template <class T> class Ahead {
  public:
    Ahead(const Live<T>& next, int head_dim, int64_t calls)
        : keys_(reinterpret_cast<const char*>(next.keys)), bytes_(next.count * head_dim * (int64_t)sizeof(T)),
          each_((bytes_ / calls / 64 + 1) * 64) {}

    void fetch() {
        const int64_t stop = std::min(done_ + each_, bytes_);
        for (; done_ < stop; done_ += 64) __builtin_prefetch(keys_ + done_);
    }

  private:
    const char* keys_;
    int64_t bytes_, each_, done_ = 0;
};

struct AttentionShape {
    int group;  // query heads per key head
    int head_dim;
    float scale, cap;
};

template <class T> struct OneScratch {
    std::vector<float> scores;
    std::vector<T> chances;  // [group][padded count]
};

// V: vectors of 16 words that hold a head; the last may be partly filled.
template <class T, int V> class AttendOne {
  public:
    // q [group][V * 16 words], zero padded; out [group][head_dim].
    static void run(const Word* q, const Live<T>& live, const Live<T>& next, const AttentionShape& shape,
                    OneScratch<T>& scratch, T* out) {
        const int64_t padded = (live.count + 15) / 16 * 16;
        scratch.scores.resize(padded);
        scratch.chances.resize(padded * shape.group);
        float sums[64];
        Ahead<T> ahead(next, shape.head_dim, shape.group * (padded / 16));
        for (int first = 0; first < shape.group; first += 64) {
            const int heads = std::min(64, shape.group - first);
            for (int g = 0; g < heads; g++) {
                const Word* query = q + (first + g) * V * 16;
                T* to = &scratch.chances[padded * (first + g)];
                sums[g] = chances(query, live, shape, scratch.scores.data(), to, ahead);
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
    // Heads whose sums fit into registers together: with 64 bf16 dimensions four, of four vectors each.
    static constexpr int kHeads = V >= 8 ? 1 : V >= 4 ? 2 : 4;

    struct Filled {  // the lanes of each of a head's vectors
        explicit Filled(int words) {
            for (int v = 0; v < V; v++) of[v] = lanes(words - 16 * v);
        }
        Lanes of[V];
    };

    static float chances(const Word* q, const Live<T>& live, const AttentionShape& shape, float* scores, T* to,
                         Ahead<T>& ahead) {
        const Filled filled(shape.head_dim / per_word<T>);
        U16 query[V];
        for (int v = 0; v < V; v++) query[v] = load(q + 16 * v);
        for (int64_t first = 0; first < live.count; first += 16) {
            ahead.fetch();
            F16 x[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                const int64_t key = std::min(first + i, live.count - 1);
                const Word* k = reinterpret_cast<const Word*>(live.keys + key * shape.head_dim);
                x[i] = F16{};
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) x[i] = dot<T>(x[i], load_part(k + 16 * v, filled.of[v]), query[v]);
            }
            store(scores + first, native::sums(x));
        }
        const int64_t padded = (live.count + 15) / 16 * 16;
        const float most = scale_scores(scores, padded, shape.scale, shape.cap);
        for (int64_t i = live.count; i < padded; i++) scores[i] = -std::numeric_limits<float>::infinity();
        return exponentials(scores, padded, most, to);
    }

    static void mix_some(int heads, const T* p, int64_t lp, const Live<T>& live, int dim, const float* sums, T* out) {
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

    template <int H>
    static void mix(const T* p, int64_t lp, const Live<T>& live, int dim, const float* sums, T* out) {
        constexpr int kParts = per_word<T>;
        const Filled filled(dim / kParts);
        F16 acc[H][V][kParts] = {};
        for (int64_t key = 0; key < live.count; key += kParts) {
            const Word* first = reinterpret_cast<const Word*>(live.values + key * dim);
            const Word* second = reinterpret_cast<const Word*>(live.values + std::min(key + 1, live.count - 1) * dim);
            U16 weights[H];
#pragma GCC unroll 4
            for (int h = 0; h < H; h++) weights[h] = broadcast(word_at(p + h * lp + key));
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
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) {
            float ordered[V * kParts * 16];
#pragma GCC unroll 8
            for (int v = 0; v < V; v++)
#pragma GCC unroll 2
                for (int i = 0; i < kParts; i++) store(ordered + (v * kParts + i) * 16, acc[h][v][i]);
            emit(ordered, 1.0f / sums[h], dim, out + h * dim);
        }
    }
};

}  // namespace native
