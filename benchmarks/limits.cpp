// What this machine can do at most: how fast threads read memory, and how much each unit computes out of registers.
// limits.py compiles this with the options of a variant of the kernels, and calls it from as many threads as they have.
#include <cstddef>
#include <cstdint>
#include "vector_tiles.h"

using namespace native;

namespace {

constexpr int kSums = kVectorRows * kVectorColumns;  // so many in flight hide how long one operation takes

// The compiler must not know what is in a register: it would compute equal sums once.
#if defined(__x86_64__)
#define UNKNOWN(v) asm volatile("" : "+v"(v))
#else
#define UNKNOWN(v) asm volatile("" : "+w"(v))
#endif

// step(sum, a, b) for each of kSums sums, in so many rounds.
template <class V, class Step> [[gnu::always_inline]] inline void compute(int64_t rounds, V a, V b, Step step) {
    V sums[kSums] = {};
    for (V& sum : sums) UNKNOWN(sum);
    for (int64_t i = 0; i < rounds; i++) {
        UNKNOWN(a);
#pragma GCC unroll 32
        for (int j = 0; j < kSums; j++) sums[j] = step(sums[j], a, b);
    }
    V total{};
    for (const V& sum : sums) total += sum;
    volatile auto kept = total[0];
    (void)kept;
}

}  // namespace

#if defined(__AVX512F__)
using Bytes = int32_t __attribute__((vector_size(64)));
#define TARGET_INT8 __attribute__((target("avx512vnni")))
inline bool has_int8() { return __builtin_cpu_supports("avx512vnni"); }
#elif defined(__AVX2__)
using Bytes = int32_t __attribute__((vector_size(32)));
#define TARGET_INT8 __attribute__((target("avxvnni")))
inline bool has_int8() {  // GCC 12 does not know the name: CPUID 7.1, bit 4 of EAX
    uint32_t a = 7, b, c = 1, d;
    asm("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return a >> 4 & 1;
}
#endif

// Each returns how many operations it has done: a multiplication and an addition are two. 0: there is no such unit.
extern "C" {

int64_t limit_fp32(int64_t rounds) {
    compute(rounds, FloatRegister{} + 1.0f, FloatRegister{} + 0.5f,
            [](FloatRegister sum, FloatRegister a, FloatRegister b) { return sum + a * b; });
    return rounds * kSums * kLanes * 2;
}

int64_t limit_bf16(int64_t rounds) {
#if defined(__AVX512BF16__)
    const FloatRegister ones = (FloatRegister)(WordRegister{} + 0x3f803f80u);
    compute(rounds, ones, ones, [](FloatRegister sum, FloatRegister a, FloatRegister b) {
        return (FloatRegister)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    });
    return rounds * kSums * kLanes * 4;
#else
    (void)rounds;
    return 0;
#endif
}

#if defined(TARGET_INT8)
TARGET_INT8 int64_t limit_int8(int64_t rounds) {
    if (!has_int8()) return 0;
    Bytes a = Bytes{} + 0x01010101, b = a, sums[kSums] = {};
    for (Bytes& sum : sums) UNKNOWN(sum);
    for (int64_t i = 0; i < rounds; i++) {
        UNKNOWN(a);
#pragma GCC unroll 32
        for (int j = 0; j < kSums; j++) {
#if defined(__AVX512F__)
            sums[j] = (Bytes)_mm512_dpbusd_epi32((__m512i)sums[j], (__m512i)a, (__m512i)b);
#else
            sums[j] = (Bytes)_mm256_dpbusd_avx_epi32((__m256i)sums[j], (__m256i)a, (__m256i)b);
#endif
        }
    }
    Bytes total{};
    for (const Bytes& sum : sums) total += sum;
    volatile int32_t kept = total[0];
    (void)kept;
    return rounds * kSums * (int64_t)sizeof(Bytes) * 2;
}
#else
int64_t limit_int8(int64_t) { return 0; }
#endif

// The matrix unit, on operands in the first-level cache.
int64_t limit_matrix(int64_t rounds) {
    if (!lent_matrix_unit()) return 0;
    constexpr int kWords = 128;
    alignas(64) static thread_local Word rows[32 * kWords], panel[kWords * kPanel];
    alignas(64) float out[32 * kPanel];
    MatrixUnit unit;
    for (int64_t i = 0; i < rounds; i++) unit.tile(32, rows, kWords, panel, kWords, out, kPanel, {panel, 0}, false);
    return rounds * 32 * kPanel * kWords * 4;
}

// Reads bytes, a multiple of 256, and returns something of each.
uint32_t limit_read(const char* from, int64_t bytes) {
    U16 all{};
    for (int64_t i = 0; i < bytes; i += 256) {
        for (int64_t line = 0; line < 256; line += 64) {
            __builtin_prefetch(from + i + line + 4096);
            all ^= load(from + i + line);
        }
    }
    uint32_t total = 0;
    for (int i = 0; i < 16; i++) total ^= all[i];
    return total;
}

}  // extern "C"
