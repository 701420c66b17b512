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
    static void run(const Word* q, const Live<T>& live, const AttentionShape& shape, OneScratch<T>& scratch, T* out) {
        const int64_t padded = (live.count + 15) / 16 * 16;
        scratch.scores.resize(padded);
        scratch.chances.resize(padded * shape.group);
        float sums[64];
        for (int first = 0; first < shape.group; first += 64) {
            const int heads = std::min(64, shape.group - first);
            for (int g = 0; g < heads; g++) {
                const Word* query = q + (first + g) * V * 16;
                sums[g] = chances(query, live, shape, scratch.scores.data(), &scratch.chances[padded * (first + g)]);
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

    static int filled(int words, int v) { return std::max(0, std::min(16, words - 16 * v)); }

    static float chances(const Word* q, const Live<T>& live, const AttentionShape& shape, float* scores, T* to) {
        const int words = shape.head_dim / per_word<T>;
        U16 query[V];
        for (int v = 0; v < V; v++) query[v] = load(q + 16 * v);
        for (int64_t first = 0; first < live.count; first += 16) {
            F16 x[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                const int64_t key = std::min(first + i, live.count - 1);
                const Word* k = reinterpret_cast<const Word*>(live.keys + key * shape.head_dim);
                x[i] = F16{};
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) x[i] = dot<T>(x[i], load_part(k + 16 * v, filled(words, v)), query[v]);
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

    template <int H>
    static void mix(const T* p, int64_t lp, const Live<T>& live, int dim, const float* sums, T* out) {
        constexpr int kParts = per_word<T>;
        const int words = dim / kParts;
        F16 acc[H][V][kParts] = {};
        for (int64_t key = 0; key < live.count; key += kParts) {
            const Word* first = reinterpret_cast<const Word*>(live.values + key * dim);
            const Word* second = reinterpret_cast<const Word*>(live.values + std::min(key + 1, live.count - 1) * dim);
            Word weights[H];
            for (int h = 0; h < H; h++) memcpy(weights + h, p + h * lp + key, 4);
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) {
                U16 part[2] = {load_part(first + 16 * v, filled(words, v))};
                if (kParts == 2) pair_rows(part[0], load_part(second + 16 * v, filled(words, v)), part[0], part[1]);
#pragma GCC unroll 4
                for (int h = 0; h < H; h++)
#pragma GCC unroll 2
                    for (int i = 0; i < kParts; i++) acc[h][v][i] = dot<T>(acc[h][v][i], part[i], broadcast(weights[h]));
            }
        }
        for (int h = 0; h < H; h++) {
            float ordered[V * kParts * 16];
            memcpy(ordered, acc[h], sizeof ordered);
            emit(ordered, 1.0f / sums[h], dim, out + h * dim);
        }
    }
};

}  // namespace native
