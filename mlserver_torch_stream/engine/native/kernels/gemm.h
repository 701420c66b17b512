// Activations times packed weights. A packed matrix [n, k] is a row of panels of 32 outputs, each [k words][32]: a
// vector load is one word of 16 outputs, and a panel is one contiguous stream.
// Knows nothing of layers; what becomes of the products is the caller's.
#pragma once
#include <vector>
#include "grouped.h"
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
    int64_t format;     // kPlain: of the model's type; else integers as in grouped.h

    // Panel p of integers.
    const uint8_t* panel(int64_t p) const {
        return reinterpret_cast<const uint8_t*>(panels) + p * groups_of(k) * grouped_format(format).block;
    }
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

// A thread's tiles. Which unit of the CPU computes them follows from the type and the words of a product alone, never
// from its rows: a row's sums are the same bits in any company.
template <class T> class Tiles {
  public:
    // The most rows of a tile.
    int rows(int64_t words) const { return by_unit(words) ? kUnitRows : kVectorRows; }

    // out[rows][32] = a[rows][words] x panel[words][32]
    void run(int rows, const Word* a, int64_t lda, const Word* panel, int64_t words, float* out, int64_t ldo,
             Fetch fetch) {
        run_part(rows, a, lda, panel, words, words, out, ldo, fetch, false);
    }

    // So many of a product's words, of `all` of them. `onto`: each sum goes on where it stopped, so that it is the same
    // bits as in one go. All parts but the last are of whole kUnitWords.
    void run_part(int rows, const Word* a, int64_t lda, const Word* panel, int64_t words, int64_t all, float* out,
                  int64_t ldo, Fetch fetch, bool onto) {
        if (by_unit(all)) {
            unit_.tile(rows, a, lda, panel, words, out, ldo, fetch, onto);
        } else {
            kVectorTiles<T>[rows](a, lda, panel, words, out, ldo, fetch, onto);
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

constexpr int64_t kBlockWords = 128;  // 16 KiB of a panel, which leave room for the rows in the first-level cache
constexpr int64_t kBlockRows = 256;   // whose sums, 32 KiB, stay in the second-level cache

// A member's room for a product.
struct alignas(64) ProductScratch {
    Word block[kBlockWords * kPanel];
    float sums[kBlockRows][kPanel];
    std::vector<RoundedBlock> rounded;
};

// A weight format is a class that knows how panels are stored: DensePanels. `block` returns the words from
// `first` on as the tiles read them, [count][32]; it may write them to the scratch, which has room for kBlockWords.
// kInPlace: it never does, so that one block may be a whole panel. `finish` turns 32 sums into products.

// Weights of the model's own type.
template <class T> class DensePanels {
  public:
    static constexpr bool kInPlace = true;
    explicit DensePanels(const Matrix& w) : panels_(w.panels), words_(w.k / per_word<T>) {}

    const Word* block(int64_t p, int64_t first, int64_t, Word*) const {
        return panels_ + (p * words_ + first) * kPanel;
    }
    void finish(int64_t, float*) const {}

  private:
    const Word* panels_;
    int64_t words_;
};

// sums[rows][32] = a[rows][words] x panel p.
template <class T, class Panels>
void multiply_panel(Tiles<T>& tiles, const Panels& panels, int64_t p, const T* a, int64_t lda, int64_t rows,
                    int64_t words, ProductScratch& scratch) {
    const Tiling tiling(rows, tiles.rows(words));
    const int64_t most = Panels::kInPlace ? words : kBlockWords;
    for (int64_t first = 0; first < words; first += most) {
        const int64_t count = std::min(most, words - first);
        const Word* block = panels.block(p, first, count, scratch.block);
        for (int64_t t = 0; t < tiling.count; t++) {
            const int64_t row = tiling.first(t);
            const Word* from = reinterpret_cast<const Word*>(a + row * lda) + first;
            const Fetch fetch = Panels::kInPlace ? fetch_for(block, words, t, tiling.count) : Fetch{block, 0};
            tiles.run_part((int)(tiling.first(t + 1) - row), from, lda / per_word<T>, block, count, words,
                           scratch.sums[row], kPanel, fetch, first != 0);
        }
    }
}

// done(row, panel, sums[32]) for every row of a [rows][k] and every panel of w.
template <class T, class Panels, class Done>
void multiply_as(Member& me, const T* a, int64_t lda, int64_t rows, const Matrix& w, const Panels& panels,
                 ProductScratch& scratch, Done&& done) {
    const int64_t words = w.k / per_word<T>, count = panels_of(w.n);
    const Tiling blocks(rows, kBlockRows);
    me.each(count, std::max<int64_t>(1, count / (8 * me.team)), [&](int64_t first, int64_t last) {
        Tiles<T> tiles;
        for (int64_t p = first; p < last; p++)
            for (int64_t b = 0; b < blocks.count; b++) {
                const int64_t row = blocks.first(b), stop = blocks.first(b + 1);
                multiply_panel(tiles, panels, p, a + row * lda, lda, stop - row, words, scratch);
                for (int64_t r = row; r < stop; r++) {
                    panels.finish(p, scratch.sums[r - row]);
                    done(r, p, scratch.sums[r - row]);
                }
            }
    });
}

// The rows of a product as int8. A few are rounded by each member for itself when its first piece begins, which takes
// less time than to wait for each other; many by all members together, into `shared`.
template <class T> class RoundedRows {
  public:
    RoundedRows(const T* a, int64_t lda, int64_t rows, int64_t k) : a_(a), lda_(lda), rows_(rows), k_(k) {}

    bool many() const { return rows_ > kFew; }
    int64_t stride() const { return groups_of(k_); }
    int64_t rows() const { return rows_; }
    void round(int64_t first, int64_t last, RoundedBlock* to) const {
        for (int64_t r = first; r < last; r++) round_row(a_ + r * lda_, k_, to + r * stride());
    }

  private:
    static constexpr int64_t kFew = 16;
    const T* a_;
    int64_t lda_, rows_, k_;
};

// sums[count][32] = rows[count] x panel.
inline void multiply_grouped_panel(const GroupedFormat& format, const RoundedBlock* rows, int64_t count,
                                   int64_t groups, const uint8_t* panel, float (*sums)[kPanel]) {
    const Tiling tiling(count, kGroupedRows);
    for (int64_t t = 0; t < tiling.count; t++) {
        const int64_t row = tiling.first(t), height = tiling.first(t + 1) - row;
        format.tiles[height](rows + row * groups, groups, panel, groups, sums[row], kPanel);
    }
}

// done(row, panel, sums[32]) of integers times integers.
template <class T, class Done>
void multiply_grouped(Member& me, const RoundedRows<T>& given, const Matrix& w, ProductScratch& scratch,
                      RoundedBlock* shared, Done&& done) {
    const int64_t groups = given.stride(), count = panels_of(w.n), rows = given.rows();
    if (given.many()) me.each(rows, 8, [&](int64_t first, int64_t last) { given.round(first, last, shared); });
    const GroupedFormat& format = grouped_format(w.format);
    const RoundedBlock* rounded = given.many() ? shared : nullptr;
    const Tiling blocks(rows, kBlockRows);
    me.each(count, std::max<int64_t>(1, count / (8 * me.team)), [&](int64_t first, int64_t last) {
        if (rounded == nullptr) {
            if ((int64_t)scratch.rounded.size() < rows * groups) scratch.rounded.resize(rows * groups);
            given.round(0, rows, scratch.rounded.data());
            rounded = scratch.rounded.data();
        }
        for (int64_t p = first; p < last; p++)
            for (int64_t b = 0; b < blocks.count; b++) {
                const int64_t row = blocks.first(b), stop = blocks.first(b + 1);
                multiply_grouped_panel(format, rounded + row * groups, stop - row, groups, w.panel(p), scratch.sums);
                for (int64_t r = row; r < stop; r++) done(r, p, scratch.sums[r - row]);
            }
    });
}

// The same in the format of w. `shared`: room for all rows as int8.
template <class T, class Done>
void multiply(Member& me, const T* a, int64_t lda, int64_t rows, const Matrix& w, ProductScratch& scratch,
              RoundedBlock* shared, Done&& done) {
    if (w.format == kPlain) return multiply_as(me, a, lda, rows, w, DensePanels<T>(w), scratch, done);
    multiply_grouped(me, RoundedRows<T>(a, lda, rows, w.k), w, scratch, shared, done);
}

// out[rows][whole panels] = a[rows][k] x w, by a team of its own.
template <class T> void multiply_rows(const Matrix& w, const T* a, int64_t rows, float* out, int threads) {
    const int64_t width = panels_of(w.n) * kPanel;
    std::vector<ProductScratch> scratch(threads);
    std::vector<RoundedBlock> shared(rows * groups_of(w.k));
    Team<int64_t> team(threads, [&](Member& me, const int64_t& count) {
        multiply(me, a, w.k, count, w, scratch[me.id], shared.data(), [&](int64_t row, int64_t p, float* sums) {
            std::copy(sums, sums + kPanel, out + row * width + p * kPanel);
        });
    });
    team.run(rows);
}

}  // namespace native
