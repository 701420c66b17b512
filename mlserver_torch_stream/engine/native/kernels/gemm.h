// Activations times packed weights. A packed matrix [n, k] is a row of panels of 32 outputs, each [k words][32]: a
// vector load is one word of 16 outputs, and a panel is one contiguous stream.
// Knows nothing of layers; what becomes of the products is the caller's.
#pragma once
#include "matrix_unit.h"
#include "team.h"

namespace native {

constexpr int kPanel = 32;
constexpr int kVectorRows = 12;  // 12 x 2 accumulators, 2 weights and 1 activation fill 27 of 32 registers
constexpr int kTileRows = std::max(kVectorRows, kUnitRows);

struct Matrix {
    const Word* panels;
    int64_t n, k;  // outputs, inputs
    const float* bias;  // padded to whole panels, or null
};

inline int64_t panels_of(int64_t n) { return (n + kPanel - 1) / kPanel; }

// out[M][32] = a[M][words] x panel[words][32]
template <class T, int M>
void vector_tile(const Word* a, int64_t lda, const Word* panel, int64_t words, float* out, int64_t ldo, Fetch fetch) {
    // One order of summation for every M: a row's logits are the same bits in any company. (Few rows leave few sums in
    // flight, but even M = 1 takes 108 GB/s from the cache, twice what memory gives a core.)
    F16 sums[M][2] = {};
    for (int64_t k = 0; k < words; k++) {
        fetch.word(k);
        const U16 w0 = load(panel + kPanel * k), w1 = load(panel + kPanel * k + 16);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
            const U16 x = broadcast(a[m * lda + k]);
            sums[m][0] = dot<T>(sums[m][0], w0, x);
            sums[m][1] = dot<T>(sums[m][1], w1, x);
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) store(out + m * ldo, sums[m][0]), store(out + m * ldo + 16, sums[m][1]);
}

template <class T> using VectorTile = void (*)(const Word*, int64_t, const Word*, int64_t, float*, int64_t, Fetch);
template <class T> constexpr VectorTile<T> kVectorTiles[kVectorRows + 1] = {
    nullptr,           vector_tile<T, 1>, vector_tile<T, 2>,  vector_tile<T, 3>,  vector_tile<T, 4>,
    vector_tile<T, 5>, vector_tile<T, 6>, vector_tile<T, 7>,  vector_tile<T, 8>,
    vector_tile<T, 9>, vector_tile<T, 10>, vector_tile<T, 11>, vector_tile<T, 12>};

// A thread's tiles. Which unit of the CPU computes them follows from the type and the words alone, never from the rows:
// a row's sums are the same bits in any company.
template <class T> class Tiles {
  public:
    // The most rows of a tile.
    int rows(int64_t words) const { return by_unit(words) ? kUnitRows : kVectorRows; }

    // out[rows][32] = a[rows][words] x panel[words][32]
    void run(int rows, const Word* a, int64_t lda, const Word* panel, int64_t words, float* out, int64_t ldo,
             Fetch fetch) {
        if (by_unit(words)) {
            unit_.tile(rows, a, lda, panel, words, out, ldo, fetch);
        } else {
            kVectorTiles<T>[rows](a, lda, panel, words, out, ldo, fetch);
        }
    }

  private:
    bool by_unit(int64_t words) const { return unit_is_there_ && words % kUnitWords == 0; }

    const bool unit_is_there_ = per_word<T> == 2 && lent_matrix_unit();
    MatrixUnit unit_;
};

// The rows of a batch in tiles of almost equal height: 16 are 8 + 8, not 12 + 4.
struct Tiling {
    Tiling(int64_t rows, int highest) : rows(rows), count((rows + highest - 1) / highest) {}
    int64_t first(int64_t i) const { return i * rows / count; }
    int64_t rows, count;
};

// One tile a panel: 4 KiB ahead in the same stream. Several: each of the first two fetches half of the next panel.
inline Fetch fetch_for(const Word* panel, int64_t words, int64_t tile, int64_t tiles) {
    if (tiles == 1) return {panel + 1024, kPanel};
    if (tile > 1) return {panel, 0};
    return {panel + (kPanel + tile * kPanel / 2) * words, kPanel / 2};
}

// done(row, panel, sums[32]) for every row of a [rows][k] and every panel of w.
template <class T, class Done>
void multiply(Member& me, const T* a, int64_t lda, int64_t rows, const Matrix& w, Done&& done) {
    const int64_t words = w.k / per_word<T>, panels = panels_of(w.n);
    const int64_t piece = std::max<int64_t>(1, panels / (8 * me.team));
    me.each(panels, piece, [&](int64_t first, int64_t last) {
        alignas(64) float sums[kTileRows][kPanel];
        Tiles<T> tiles;
        const Tiling tiling(rows, tiles.rows(words));
        for (int64_t p = first; p < last; p++)
            for (int64_t t = 0; t < tiling.count; t++) {
                const int64_t row = tiling.first(t), stop = tiling.first(t + 1);
                const Word* panel = w.panels + p * kPanel * words;
                tiles.run((int)(stop - row), reinterpret_cast<const Word*>(a + row * lda), lda / per_word<T>, panel,
                          words, sums[0], kPanel, fetch_for(panel, words, t, tiling.count));
                for (int64_t r = row; r < stop; r++) done(r, p, sums[r - row]);
            }
    });
}

}  // namespace native
