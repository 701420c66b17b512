// Multiplies activations [rows, inputs] by a packed weight matrix [outputs, inputs]. The matrix is packed in panels of
// 32 outputs, one after the other. A panel is [inputs / per_word][32 outputs] words of 32 bits: a float, or two
// neighbouring inputs in bf16. So one AVX-512 load reads the same inputs of 16 outputs, and a panel is read from its
// first byte to its last.
// Knows nothing of layers: the caller passes the function that uses the products.
#pragma once
#include <memory>
#include <vector>
#include "grouped.h"
#include "matrix_unit.h"
#include "spread.h"
#include "team.h"
#include "vector_tiles.h"

namespace native {

// Neighbouring panels in one format.
struct Run {
    const void* panels;
    int64_t n;       // outputs
    int64_t format;  // kPlain: of the model's type; else integers as in grouped.h
};

constexpr int kRuns = 3;  // queries, keys and values can differ

inline int64_t panels_of(int64_t n) { return (n + kPanel - 1) / kPanel; }

// A panel of integers.
struct GroupedPanel {
    const uint8_t* blocks;
    const GroupedFormat& format;
};

struct Matrix {
    int64_t n, k;       // outputs, inputs
    const float* bias;  // padded to whole panels, or null
    Run runs[kRuns];    // all runs but the last have whole panels; a matrix of the model's type has one run

    bool plain() const { return runs[0].format == kPlain; }
    const Word* words() const { return static_cast<const Word*>(runs[0].panels); }
    GroupedPanel panel(int64_t p) const {
        const Run* run = runs;
        for (; p >= panels_of(run->n); run++) p -= panels_of(run->n);
        const GroupedFormat& format = grouped_format(run->format);
        return {static_cast<const uint8_t*>(run->panels) + p * groups_of(k) * format.block, format};
    }
};

// A thread's tiles of factors A. Which unit of the CPU computes them depends only on A and the inputs of a product,
// never on its rows, so a row's sums are bitwise the same in any batch.
template <class A> class Tiles {
  public:
    // The maximum number of rows of a tile.
    int rows(int64_t inputs) const { return by_unit(inputs) ? kUnitRows : kVectorRows; }

    // out[rows][32] = a[rows][inputs] x panel, which is [inputs / per_word<A>][32] words.
    void run(int rows, const A* a, int64_t lda, const Word* panel, int64_t inputs, float* out, int64_t ldo) {
        run_part<A>(rows, a, lda, panel, inputs, inputs, out, ldo, Fetch(panel, 0), false);
    }

    // Multiplies some of the `all` inputs of a product, from a panel of words of S. With `onto` each sum continues
    // where it stopped, so that it is bitwise the same as in one go. All parts but the last are multiples of
    // kUnitWords. `keep`, unless null, receives the panel as words of A.
    template <class S>
    void run_part(int rows, const A* a, int64_t lda, const Word* panel, int64_t inputs, int64_t all, float* out,
                  int64_t ldo, Fetch fetch, bool onto, Word* keep = nullptr) {
        const int64_t words = inputs / per_word<S>;
        if constexpr (std::is_same_v<A, Bf16>) {
            if (by_unit(all)) {
                const Word* from = reinterpret_cast<const Word*>(a);
                return unit_.tile(rows, from, lda / 2, panel, words, out, ldo, fetch, onto);
            }
        }
        if constexpr (!std::is_same_v<S, A>) {
            if (keep != nullptr)
                return kVectorTiles<S, A, true>[rows](a, lda, panel, words, out, ldo, fetch, onto, keep);
        }
        kVectorTiles<S, A, false>[rows](a, lda, panel, words, out, ldo, fetch, onto, nullptr);
    }

  private:
    bool by_unit(int64_t inputs) const { return unit_is_there_ && inputs / 2 % kUnitWords == 0; }

    const bool unit_is_there_ = std::is_same_v<A, Bf16> && lent_matrix_unit();
    MatrixUnit unit_;
};

// Divides the rows of a batch into tiles of almost equal height: 16 into 8 + 8, not 12 + 4.
struct Tiling {
    Tiling(int64_t rows, int highest) : rows(rows), count((rows + highest - 1) / highest) {}
    int64_t first(int64_t i) const { return i * rows / count; }
    int64_t rows, count;
};

constexpr int64_t kBlockWords = 384;  // of a panel, 48 KiB, which stay in the second-level cache with the sums and rows
constexpr int64_t kBlockRows = 256;   // whose sums take 32 KiB

// How far ahead a single tile prefetches its panel. On a Zen 3, 1.5 KiB instead of 4 KiB make tiles of 1 to 4 rows read
// bf16 1.1 times as fast, and tiles of 6 rows 0.98 times. Other CPUs of 8 lanes were not measured.
constexpr int64_t kWordsAhead = 1024, kWordsAheadOfFew = kLanes == 8 ? 384 : 1024;

// The number of inputs in each block of a product: equal parts, multiples of kUnitWords and at most kBlockWords.
template <class A> int64_t block_inputs(int64_t inputs) {
    constexpr int64_t kUnit = 16 * per_word<A>, kMost = kBlockWords * per_word<A>;
    const int64_t count = (inputs + kMost - 1) / kMost;
    return (inputs + count * kUnit - 1) / (count * kUnit) * kUnit;
}

// A team member's buffers for a product.
struct alignas(64) ProductScratch {
    Word block[kBlockWords * kPanel];
    float sums[kBlockRows][kPanel];
    std::vector<RoundedBlock> rounded;  // few rows, as integers
};

// What is done with the products of some rows and a panel: a function of (row, panel, sums[32]). It refers to the
// caller's function and must not outlive it. So a product is compiled only once for all functions. `adds_to`, unless
// null, are the rows [stride] to which the function adds the sums; they are prefetched while the sums are computed.
class Done {
  public:
    template <class F> Done(const F& function, const std::vector<float>* adds_to = nullptr, int64_t stride = 0)
        : adds_to_(adds_to), stride_(stride), function_(&function),
          call_([](const void* function, int64_t first, int64_t rows, int64_t p, float* sums) {
              for (int64_t r = 0; r < rows; r++)
                  (*static_cast<const F*>(function))(first + r, p, sums + r * kPanel);
          }) {}

    void operator()(int64_t first, int64_t rows, int64_t p, float* sums) const {
        call_(function_, first, rows, p, sums);
    }

    void fetch(int64_t first, int64_t rows, int64_t p) const {
        if (adds_to_ == nullptr) return;
        for (int64_t r = first; r < first + rows; r++)
            for (int i = 0; i < kPanel; i += 16) __builtin_prefetch(adds_to_->data() + r * stride_ + p * kPanel + i, 1);
    }

  private:
    const std::vector<float>* adds_to_;
    int64_t stride_;
    const void* function_;
    void (*call_)(const void*, int64_t, int64_t, int64_t, float*);
};

// A thread's part of the product of rows a [inputs], with factors A, and a matrix whose words are of type T.
template <class A, class T> class Product {
  public:
    Product(const A* a, int64_t lda, const Matrix& w, ProductScratch& scratch, const Done& done)
        : a_(a), lda_(lda), inputs_(w.k), panels_(w.words()), scratch_(scratch), done_(done) {}

    // Multiplies up to kBlockRows rows by panel p. A single tile reads the panel as a stream. Several tiles go through
    // it in blocks: the first tile widens a block for all of them, if T has to be widened, and the first two tiles
    // prefetch the next block.
    void run(int64_t p, int64_t first, int64_t rows) {
        const Tiling tiling(rows, tiles_.rows(inputs_));
        if (tiling.count == 1) {
            done_.fetch(first, rows, p);
            const Word* panel = words_of(p, 0);
            const int64_t ahead = rows > kRowsFromFirst ? kWordsAhead : kWordsAheadOfFew;
            tile<T>(first, rows, panel, 0, inputs_, scratch_.sums[0], {panel + ahead, 128});
            return done_(first, rows, p, scratch_.sums[0]);
        }
        const int64_t most = block_inputs<A>(inputs_);
        for (int64_t input = 0; input < inputs_; input += most) {
            const int64_t count = std::min(most, inputs_ - input);
            for (int64_t t = 0; t < tiling.count; t++) {
                const int64_t row = tiling.first(t), height = tiling.first(t + 1) - row;
                float* sums = scratch_.sums[most < inputs_ ? row : 0];
                if (input + count == inputs_) done_.fetch(first + row, height, p);
                tile_of_block(p, t, first + row, height, input, count, sums);
                if (input + count == inputs_) done_(first + row, height, p, sums);
            }
        }
    }

  private:
    // The words of panel p from an input on.
    const Word* words_of(int64_t p, int64_t input) const {
        return panels_ + (p * inputs_ + input) * kPanel / per_word<T>;
    }

    void tile_of_block(int64_t p, int64_t t, int64_t row, int64_t rows, int64_t input, int64_t count, float* sums) {
        const Word *panel = words_of(p, input), *next = words_of(p, input + count);
        const int64_t half = (next - panel) / 2, words = count / per_word<A>;
        const Fetch fetch = t < 2 ? Fetch(next + t * half, half * (int64_t)sizeof(Word) / words) : Fetch(panel, 0);
        if constexpr (std::is_same_v<T, A>) {
            tile<A>(row, rows, panel, input, count, sums, fetch);
        } else if (t == 0) {
            tile<T>(row, rows, panel, input, count, sums, {next, 64}, scratch_.block);
        } else {
            tile<A>(row, rows, scratch_.block, input, count, sums, fetch);
        }
    }

    template <class S>
    void tile(int64_t row, int64_t rows, const Word* panel, int64_t input, int64_t count, float* sums, Fetch fetch,
              Word* keep = nullptr) {
        tiles_.template run_part<S>((int)rows, a_ + row * lda_ + input, lda_, panel, count, inputs_, sums, kPanel,
                                    fetch, input != 0, keep);
    }

    const A* const a_;
    const int64_t lda_, inputs_;
    const Word* const panels_;
    ProductScratch& scratch_;
    const Done& done_;
    Tiles<A> tiles_;
};

// Computes the products of all rows of a [rows][k] with some panels of w, whose words are of type T.
template <class T, class A>
void multiply_dense_panels(const A* a, int64_t lda, int64_t rows, const Matrix& w, int64_t first, int64_t last,
                           ProductScratch& scratch, const Done& done) {
    const Tiling blocks(rows, kBlockRows);
    Product<A, T> product(a, lda, w, scratch, done);
    for (int64_t p = first; p < last; p++)
        for (int64_t b = 0; b < blocks.count; b++)
            product.run(p, blocks.first(b), blocks.first(b + 1) - blocks.first(b));
}

template <class T, class A>
void multiply_dense(Member& me, const std::vector<A>& a, int64_t lda, int64_t rows, const Matrix& w,
                    ProductScratch& scratch, const Done& done) {
    me.each(panels_of(w.n), [&](int64_t first, int64_t last) {
        multiply_dense_panels<T>(a.data(), lda, rows, w, first, last, scratch, done);
    });
}

constexpr int64_t kFew = 16;

// Rounds some rows of a product to int8. `to` has room for all rows.
template <class T>
__attribute__((noinline)) void round_rows(const T* a, int64_t lda, int64_t k, int64_t first, int64_t last,
                                          RoundedBlock* to) {
    for (int64_t r = first; r < last; r++) round_row(a + r * lda, k, to + r * groups_of(k));
}

// Computes sums[count][32] = rows[count] x panel.
inline void multiply_grouped_panel(const GroupedPanel& panel, const RoundedBlock* rows, int64_t count, int64_t groups,
                                   float (*sums)[kPanel]) {
    const Tiling tiling(count, kGroupedRows);
    for (int64_t t = 0; t < tiling.count; t++) {
        const int64_t row = tiling.first(t), height = tiling.first(t + 1) - row;
        panel.format.tiles[height](rows + row * groups, groups, panel.blocks, groups, sums[row], kPanel);
    }
}

// Computes the products of rounded rows with some panels of integers.
inline void multiply_grouped_panels(const RoundedBlock* rounded, int64_t rows, const Matrix& w, int64_t first,
                                    int64_t last, ProductScratch& scratch, const Done& done) {
    const int64_t groups = groups_of(w.k);
    const Tiling blocks(rows, kBlockRows);
    for (int64_t p = first; p < last; p++)
        for (int64_t b = 0; b < blocks.count; b++) {
            const int64_t row = blocks.first(b), stop = blocks.first(b + 1);
            multiply_grouped_panel(w.panel(p), rounded + row * groups, stop - row, groups, scratch.sums);
            done(row, stop - row, p, scratch.sums[0]);
        }
}

// Multiplies integers by integers. Few rows are rounded by each member for itself when its first piece begins, which
// takes less time than waiting for each other; many rows are rounded by all members together, into `shared`.
template <class T>
void multiply_grouped(Member& me, const std::vector<T>& a, int64_t lda, int64_t rows, const Matrix& w,
                      ProductScratch& scratch, std::vector<RoundedBlock>& shared, const Done& done) {
    const bool many = rows > kFew;
    if (many)
        me.each(rows, 8, [&](int64_t first, int64_t last) {
            round_rows(a.data(), lda, w.k, first, last, shared.data());
        });
    bool rounded = many;
    me.each(panels_of(w.n), [&](int64_t first, int64_t last) {
        RoundedBlock* const to = many ? shared.data() : scratch.rounded.data();
        if (!rounded) round_rows(a.data(), lda, w.k, 0, rows, to);
        rounded = true;
        multiply_grouped_panels(to, rows, w, first, last, scratch, done);
    });
}

// The same for any format of w, in a model of type T. `shared` has room for all rows as int8, the scratch for kFew
// rows. A member that is late may come here while both vectors grow for the next step, so only pieces read them.
template <class T>
void multiply(Member& me, const std::vector<Factor<T>>& a, int64_t lda, int64_t rows, const Matrix& w,
              ProductScratch& scratch, std::vector<RoundedBlock>& shared, const Done& done) {
    if (w.plain()) return multiply_dense<T>(me, a, lda, rows, w, scratch, done);
    multiply_grouped(me, a, lda, rows, w, scratch, shared, done);
}

// Adds the bias, if there is one, to the sums of a row and panel p, and stores them in the row's `outputs` elements.
template <class Out> void put_sums(Out* row, int64_t outputs, int64_t p, const float* bias, float* sums) {
    const int64_t first = p * kPanel;
    if (bias != nullptr)
        for (int i = 0; i < kPanel; i += 16) store(sums + i, load_f(sums + i) + load_f(bias + first + i));
    if (outputs - first < kPanel) {  // the last panel, which is padded
        for (int64_t i = first; i < outputs; i++) assign(row + i, sums[i - first]);
        return;
    }
    for (int i = 0; i < kPanel; i += 16) store_as(row + first + i, load_f(sums + i));
}

// Computes the products of some rows with some panels of w. The rows are in `a`, or if w is of integers in `rounded`.
template <class T>
void multiply_panels(const Factor<T>* a, int64_t lda, const RoundedBlock* rounded, int64_t rows, const Matrix& w,
                     int64_t first, int64_t last, ProductScratch& scratch, const Done& done) {
    if (w.plain()) return multiply_dense_panels<T>(a, lda, rows, w, first, last, scratch, done);
    multiply_grouped_panels(rounded, rows, w, first, last, scratch, done);
}

constexpr int64_t kTeamWork = 1 << 18;  // multiplications that are worth starting a team, which takes microseconds

// Computes out[rows][w.n] = a[rows][w.k] x w + bias, on `threads` threads of the pool, or on the caller's if there is
// no pool or little work. The words of a matrix that is not of integers are of type T.
template <class T, class Out>
void multiply_rows(const Matrix& w, const T* a, int64_t rows, Out* out, Parallel parallel, int threads) {
    if (rows * w.n * w.k < kTeamWork) parallel = nullptr;
    const Factor<T>* factors;
    std::unique_ptr<float[]> wide;
    if constexpr (std::is_same_v<T, Factor<T>>) {
        factors = a;
    } else {
        wide.reset(new float[rows * w.k]);
        float* const to = wide.get();
        spread(parallel, threads, rows, [&w, a, to](int64_t row) {
            for (int64_t i = row * w.k; i < (row + 1) * w.k; i++) to[i] = to_float(a[i]);
        });
        factors = to;
    }
    std::vector<RoundedBlock> rounded(w.plain() ? 0 : rows * groups_of(w.k));
    if (!w.plain())
        spread(parallel, threads, rows, [&](int64_t row) {
            round_rows(factors, w.k, w.k, row, row + 1, rounded.data());
        });
    const auto put = [&](int64_t row, int64_t p, float* sums) { put_sums(out + row * w.n, w.n, p, w.bias, sums); };
    const Done done(put);
    const Pieces pieces(panels_of(w.n), parallel == nullptr ? 1 : threads);
    spread(parallel, threads, pieces.count(), [&](int64_t i) {
        static thread_local std::unique_ptr<ProductScratch> scratch;  // its memory stays warm from layer to layer
        if (scratch == nullptr) scratch = std::make_unique<ProductScratch>();
        pieces.run(i, [&](int64_t first, int64_t last) {
            multiply_panels<T>(factors, w.k, rounded.data(), rows, w, first, last, *scratch, done);
        });
    });
}

}  // namespace native
