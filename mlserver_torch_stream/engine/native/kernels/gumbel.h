// Gumbel noise as a hash of a key and a counter: what engine/sampling/noise.py computes, but for rounding.
// Knows nothing of rows or tokens.
#pragma once
#include "simd.h"

namespace native {

using U64x16 = uint64_t __attribute__((vector_size(128)));
using I64x16 = int64_t __attribute__((vector_size(128)));

inline F16 gumbel(uint64_t key, U64x16 counters) {
    U64x16 bits = (counters + 1) * 0x9E3779B97F4A7C15u + key;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    bits ^= bits >> 31;
    F16 uniform = __builtin_convertvector((I64x16)(bits >> 1), F16) * 0x1p-63f;
    uniform = smaller(larger(uniform, broadcast_f(0x1p-63f)), broadcast_f(1.0f - 0x1p-24f));
    const F16 rest = 1.0f - uniform, rounded_off = (1.0f - rest) - uniform;
    return -log(rounded_off / -rest - log(rest));  // of -log(1 - uniform), also where rest is 1
}

}  // namespace native
