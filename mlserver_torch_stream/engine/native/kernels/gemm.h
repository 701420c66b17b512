// Activations times packed weights. A packed matrix [n, k] is a row of panels of 32 outputs, each [k words][32]: a
// vector load is one word of 16 outputs, and a panel is one contiguous stream.
// Knows nothing of layers; what becomes of the products is the caller's.
#pragma once
#include "matrix_unit.h"
#include "team.h"
#include "widen.h"

namespace native {

constexpr int kPanel = 32;
constexpr int kVectorRows = 12;  // 12 x 2 accumulators, 2 weights and 1 activation fill 27 of 32 registers
constexpr int kTileRows = std::max(kVectorRows, kUnitRows);

struct Matrix {
    const Word* panels;
    int64_t n, k;  // outputs, inputs
    const float* bias;  // padded to whole panels, or null
    const float* scales;  // as many; null: the weights are of the model's type, else int8 as in widen.h

    const int8_t* narrow_panel(int64_t p) const { return reinterpret_cast<const int8_t*>(panels) + p * k * 32; }
};

inline int64_t panels_of(int64_t n) { return (n + kPanel - 1) / kPanel; }

// out[M][32] (+)= a[M][words] x panel[words][32]
template <class T, int M>
void vector_tile(const Word* a, int64_t lda, const Word* panel, int64_t words, float* out, int64_t ldo, Fetch fetch,
                 bool onto) {
    // One order of summation for every M: a row's logits are the same bits in any company. (Few rows leave few sums in
    // flight, but even M = 1 takes 108 GB/s from the cache, twice what memory gives a core.)
    F16 sums[M][2] = {};
    if (onto)
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) sums[m][0] = load_f(out + m * ldo), sums[m][1] = load_f(out + m * ldo + 16);
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

template <class T>
using VectorTile = void (*)(const Word*, int64_t, const Word*, int64_t, float*, int64_t, Fetch, bool);
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
        some(rows, a, lda, panel, words, words, out, ldo, fetch, false);
    }

    // The same of an int8 panel, unscaled. Each sum goes on where it stopped, so it is the same bits as in one go.
    void run_narrow(int rows, const Word* a, int64_t lda, const int8_t* panel, int64_t words, float* out, int64_t ldo) {
        alignas(64) Word wide[kBlockWords * kPanel];
        for (int64_t k = 0; k < words; k += kBlockWords) {
            const int64_t count = std::min(kBlockWords, words - k);
            widen_panel(panel + k * kNarrowWord, count, wide);
            some(rows, a + k, lda, wide, count, words, out, ldo, {wide, 0}, k != 0);
        }
    }

  private:
    static constexpr int64_t kBlockWords = 128;  // 16 KiB, which leave room for the rows in the first-level cache

    // A part of the words, of `all` of them.
    void some(int rows, const Word* a, int64_t lda, const Word* panel, int64_t words, int64_t all, float* out,
              int64_t ldo, Fetch fetch, bool onto) {
        if (by_unit(all)) {
            unit_.tile(rows, a, lda, panel, words, out, ldo, fetch, onto);
        } else {
            kVectorTiles<T>[rows](a, lda, panel, words, out, ldo, fetch, onto);
        }
    }

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

inline void scale_sums(float* sums, const float* scales) {
    store(sums, load_f(sums) * load_f(scales));
    store(sums + 16, load_f(sums + 16) * load_f(scales + 16));
}

// Panel p as the tiles read it; an int8 one by way of the scratch, which holds one panel.
inline const Word* readable_panel(const Matrix& w, int64_t p, int64_t words, Word* scratch) {
    if (w.scales == nullptr) return w.panels + p * kPanel * words;
    widen_panel(w.narrow_panel(p), words, scratch);
    return scratch;
}

// done(row, panel, sums[32]) for every row of a [rows][k] and every panel of w. An int8 panel is widened by the block
// where one tile reads it (decoding one row took 14.8 ms of CPU instead of 18.9), for more tiles once and as a whole.
template <class T, class Done>
void multiply(Member& me, const T* a, int64_t lda, int64_t rows, const Matrix& w, Word* scratch, Done&& done) {
    const int64_t words = w.k / per_word<T>, panels = panels_of(w.n);
    const int64_t piece = std::max<int64_t>(1, panels / (8 * me.team));
    me.each(panels, piece, [&](int64_t first, int64_t last) {
        alignas(64) float sums[kTileRows][kPanel];
        Tiles<T> tiles;
        const Tiling tiling(rows, tiles.rows(words));
        const bool narrow = w.scales != nullptr, in_blocks = narrow && tiling.count == 1;
        for (int64_t p = first; p < last; p++) {
            const Word* panel = in_blocks ? nullptr : readable_panel(w, p, words, scratch);
            for (int64_t t = 0; t < tiling.count; t++) {
                const int64_t row = tiling.first(t), stop = tiling.first(t + 1);
                const Word* from = reinterpret_cast<const Word*>(a + row * lda);
                if (in_blocks) {
                    tiles.run_narrow((int)rows, from, lda / per_word<T>, w.narrow_panel(p), words, sums[0], kPanel);
                } else {
                    tiles.run((int)(stop - row), from, lda / per_word<T>, panel, words, sums[0], kPanel,
                              narrow ? Fetch{panel, 0} : fetch_for(panel, words, t, tiling.count));
                }
                for (int64_t r = row; r < stop; r++) {
                    if (narrow) scale_sums(sums[r - row], w.scales + p * kPanel);
                    done(r, p, sums[r - row]);
                }
            }
        }
    });
}

}  // namespace native
