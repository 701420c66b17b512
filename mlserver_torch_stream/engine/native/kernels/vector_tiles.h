// Tiles of a product in vector registers: some rows times a panel of 32 outputs.
// The order of summation is the same for any number of rows: each sum adds one input after the other, from first to
// last. Knows nothing of matrices larger than a tile's.
#pragma once
#include <algorithm>
#include <array>
#include <utility>
#include "matrix_unit.h"

namespace native {

// The rows of a tile, and the registers of a panel that it multiplies at a time: their sums, as many weights as
// registers and one activation fill the CPU's registers, of which AVX-512 and NEON have 32 and others 16.
#if defined(__AVX512F__)
constexpr int kVectorRows = 12, kVectorColumns = 2;
#elif defined(__aarch64__)
constexpr int kVectorRows = 6, kVectorColumns = 4;
#else
constexpr int kVectorRows = 6, kVectorColumns = 2;
#endif
constexpr int kTileRows = std::max(kVectorRows, kUnitRows);
constexpr int kRowsFromFirst = 4;  // tiles of at most so many rows are faster with weights in the first-level cache

inline void store_words(Word* to, WordRegister v) { memcpy(to, &v, sizeof v); }

template <class T> FloatRegister multiply_add(FloatRegister sum, WordRegister w, WordRegister x) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, Bf16>)
        return (FloatRegister)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
#endif
    static_assert(std::is_same_v<T, Factor<T>>);
    return sum + (FloatRegister)w * (FloatRegister)x;
}

// The activations of a tile. It holds only every third row's address, because the CPU's addressing adds the stride, or
// twice the stride, itself.
template <class A, int M> class Rows {
  public:
    Rows(const A* a, int64_t lda) : lda_(lda) {
#pragma GCC unroll 8
        for (int i = 0; i < (M + 2) / 3; i++) start_[i] = a + 3 * i * lda;
    }

    // Returns word k of row m in all lanes.
    WordRegister words(int m, int64_t k) const {
        Word word;
        memcpy(&word, start_[m / 3] + m % 3 * lda_ + k * per_word<A>, sizeof word);
        return word - WordRegister{};
    }

  private:
    const A* start_[(M + 2) / 3];
    const int64_t lda_;
};

// Computes sums += a line of a panel, 32 words, x one word of each activation. S and A are the types of their elements.
// `keep`, unless null, receives the words as factors A, if they are of another type.
template <class S, class A> struct LineProduct;

template <class T> struct LineProduct<T, T> {
    template <bool kKeep, int M, int V>
    static void add(FloatRegister (&sums)[M][V], const Word* weights, const Rows<T, M>& rows, int64_t k, Word*) {
        WordRegister w[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) w[v] = load_register(weights + v * kLanes);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            const WordRegister x = rows.words(m, k);
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sums[m][v] = multiply_add<T>(sums[m][v], w[v], x);
        }
    }
};

template <> struct LineProduct<Bf16, float> {
    template <bool kKeep, int M, int V>
    static void add(FloatRegister (&sums)[M][V], const Word* weights, const Rows<float, M>& rows, int64_t k,
                    Word* keep) {
        WordRegister high = 0xffff0000u - WordRegister{};
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            // Otherwise GCC computes both halves at once and keeps the mask, which needs more than 16 registers.
            if (kLanes < 16) asm volatile("" : "+m"(high)::"memory");
            WordRegister part[V];
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) {
                part[v] = load_register(weights + v * kLanes);
                part[v] = half == 0 ? part[v] << 16 : part[v] & high;
                if constexpr (kKeep) store_words(keep + (2 * k + half) * kPanel + v * kLanes, part[v]);
            }
#pragma GCC unroll 16
            for (int m = 0; m < M; m++) {
                const WordRegister x = rows.words(m, 2 * k + half);
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) sums[m][v] = multiply_add<float>(sums[m][v], part[v], x);
            }
        }
    }
};

// Computes out[M][V registers] (+)= a[M][words] x panel[words][V registers of 32 words].
template <class S, class A, int M, int V, bool kKeep>
void tile_columns(const A* a, int64_t lda, const Word* panel, int64_t words, float* out, int64_t ldo, Fetch fetch,
                  bool onto, Word* keep) {
    FloatRegister sums[M][V] = {};
    if (onto)
#pragma GCC unroll 16
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) memcpy(&sums[m][v], out + m * ldo + v * kLanes, sizeof sums[m][v]);
    const Rows<A, M> rows(a, lda);
    for (int64_t k = 0; k < words; k++) {
        LineProduct<S, A>::template add<kKeep>(sums, panel + kPanel * k, rows, k, keep);
        if (M > kRowsFromFirst) {
            fetch.next_to_second();
        } else {
            fetch.next();
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) memcpy(out + m * ldo + v * kLanes, &sums[m][v], sizeof sums[m][v]);
}

// Computes out[M][32] (+)= a[M][words] x panel[words][32]. Few rows use the whole width of the panel at once.
template <class S, class A, bool kKeep, int M>
void vector_tile(const A* a, int64_t lda, const Word* panel, int64_t words, float* out, int64_t ldo, Fetch fetch,
                 bool onto, Word* keep) {
    constexpr int kColumns = kPanel / kLanes;
    constexpr int kAtOnce = M * kColumns <= kVectorRows * kVectorColumns ? kColumns : kVectorColumns;
    for (int v = 0; v < kColumns; v += kAtOnce)
        tile_columns<S, A, M, kAtOnce, kKeep>(a, lda, panel + v * kLanes, words, out + v * kLanes, ldo,
                                              v == 0 ? fetch : Fetch(panel, 0), onto, keep + v * kLanes);
}

template <class A>
using VectorTile = void (*)(const A*, int64_t, const Word*, int64_t, float*, int64_t, Fetch, bool, Word*);
template <class S, class A, bool kKeep, int... kHeights>
constexpr std::array<VectorTile<A>, sizeof...(kHeights) + 1> tiles_of(std::integer_sequence<int, kHeights...>) {
    return {nullptr, vector_tile<S, A, kKeep, kHeights + 1>...};
}
template <class S, class A, bool kKeep>
constexpr auto kVectorTiles = tiles_of<S, A, kKeep>(std::make_integer_sequence<int, kVectorRows>());

}  // namespace native
