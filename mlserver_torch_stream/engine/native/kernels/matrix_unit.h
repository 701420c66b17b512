// The CPU's matrix unit (Intel AMX): one instruction multiplies sixteen rows of bf16 by sixteen outputs, from the same
// panels that the vector tiles read. It is not used if it was not compiled in or Linux does not permit it.
// Knows nothing of matrices larger than a tile's.
#pragma once
#include "simd.h"
#if defined(__AMX_BF16__) && defined(__linux__)
#define NATIVE_MATRIX_UNIT 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace native {

constexpr int kPanel = 32;  // outputs that a tile computes at once

// Cache lines to prefetch while a tile computes: with each word of the panel the next two, `stride` bytes after the
// previous two. So memory is read during the computation, and in one stream that crosses pages, which the hardware's
// prefetching does not do.
struct Fetch {
    const char* start;
    int64_t stride;  // 128: each line once; less if a tile has more words than the stream has lines

    Fetch(const void* start, int64_t stride) : start(static_cast<const char*>(start)), stride(stride) {}

    void next() {
        __builtin_prefetch(start), __builtin_prefetch(start + 64);
        start += stride;
    }
    void next_to_second() {
        prefetch_to_second(start), prefetch_to_second(start + 64);
        start += stride;
    }
};

#if defined(NATIVE_MATRIX_UNIT)

constexpr int kUnitRows = 32;   // of a tile: two registers of 16
constexpr int kUnitWords = 16;  // of a row in one register

// Asks for the unit: Linux saves the 8 KiB of tile registers per thread only for processes that have asked.
inline bool lent_matrix_unit() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool lent = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return lent;
}

// A thread's use of the unit, from the first tile to the object's end. After its release, thread switches cost no more.
class MatrixUnit {
  public:
    MatrixUnit() = default;
    MatrixUnit(const MatrixUnit&) = delete;
    ~MatrixUnit() {
        if (rows_ != 0) _tile_release();
    }

    // Computes out[rows][32] (+)= a[rows][words] x panel[words][32], for up to 32 rows and words a multiple of 16.
    void tile(int rows, const Word* a, int64_t lda, const Word* panel, int64_t words, float* out, int64_t ldo,
              Fetch fetch, bool onto) {
        shape(rows);
        if (rows <= 16) {
            product<false>(a, lda, panel, words, out, ldo, fetch, onto);
        } else {
            product<true>(a, lda, panel, words, out, ldo, fetch, onto);
        }
    }

  private:
    // Registers 0 to 3 hold sums, for two halves of the rows and two halves of a panel; 4 and 5 rows; 6 and 7 the
    // panel.
    template <bool kBoth>
    static void product(const Word* a, int64_t lda, const Word* panel, int64_t words, float* out, int64_t ldo,
                        Fetch fetch, bool onto) {
        constexpr int64_t kPanelBytes = 32 * sizeof(Word);
        const int64_t row_bytes = lda * (int64_t)sizeof(Word), out_bytes = ldo * (int64_t)sizeof(float);
        // GCC's intrinsics do not say that they read memory, so all earlier writes must be done here.
        __asm__ volatile("" ::: "memory");
        if (onto) {
            _tile_loadd(0, out, out_bytes);
            _tile_loadd(1, out + 16, out_bytes);
            if (kBoth) {
                _tile_loadd(2, out + 16 * ldo, out_bytes);
                _tile_loadd(3, out + 16 * ldo + 16, out_bytes);
            }
        } else {
            _tile_zero(0);
            _tile_zero(1);
            if (kBoth) {
                _tile_zero(2);
                _tile_zero(3);
            }
        }
        for (int64_t k = 0; k < words; k += kUnitWords) {
#pragma GCC unroll 16
            for (int i = 0; i < kUnitWords; i++) fetch.next();
            _tile_loadd(6, panel + 32 * k, kPanelBytes);
            _tile_loadd(4, a + k, row_bytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, panel + 32 * k + 16, kPanelBytes);
            _tile_dpbf16ps(1, 4, 7);
            if (kBoth) {
                _tile_loadd(5, a + 16 * lda + k, row_bytes);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, out, out_bytes);
        _tile_stored(1, out + 16, out_bytes);
        if (kBoth) {
            _tile_stored(2, out + 16 * ldo, out_bytes);
            _tile_stored(3, out + 16 * ldo + 16, out_bytes);
        }
    }

    void shape(int rows) {
        if (rows == rows_) return;
        rows_ = rows;
        const uint8_t first = (uint8_t)(rows < 16 ? rows : 16), second = (uint8_t)(rows <= 16 ? 1 : rows - 16);
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {};
        } config;
        const uint8_t of_each[8] = {first, first, second, second, first, second, 16, 16};
        memcpy(config.rows, of_each, sizeof of_each);
        _tile_loadconfig(&config);
    }

    int rows_ = 0;
};

#else

constexpr int kUnitRows = 0, kUnitWords = 1;
inline bool lent_matrix_unit() { return false; }
class MatrixUnit {
  public:
    void tile(int, const Word*, int64_t, const Word*, int64_t, float*, int64_t, Fetch, bool) {}
};

#endif

}  // namespace native
