// Gumbel noise as a hash of a key and a counter: the same as in engine/sampling/row_sampler.py, except for rounding.
// Knows nothing of rows or tokens.
#pragma once
#include <utility>
#include "simd.h"

namespace native {

using Counters = uint64_t __attribute__((vector_size(kRegisterBytes)));  // of half a register of noise
using HalfRegister = float __attribute__((vector_size(kRegisterBytes / 2)));

// Uniform in (0, 1).
inline HalfRegister hashed(uint64_t key, Counters counters) {
    using Signed = int64_t __attribute__((vector_size(kRegisterBytes)));
    Counters bits = (counters + 1) * 0x9E3779B97F4A7C15u + key;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    bits ^= bits >> 31;
    return __builtin_convertvector((Signed)(bits >> 1), HalfRegister) * 0x1p-63f;
}
template <size_t... I> FloatRegister joined(HalfRegister a, HalfRegister b, std::index_sequence<I...>) {
    return __builtin_shufflevector(a, b, I...);
}

inline FloatRegister gumbel(uint64_t key, Counters low, Counters high) {
    FloatRegister uniform = joined(hashed(key, low), hashed(key, high), std::make_index_sequence<kLanes>());
    uniform = smaller(larger(uniform, FloatRegister{} + 0x1p-63f), FloatRegister{} + (1.0f - 0x1p-24f));
    const FloatRegister rest = 1.0f - uniform, rounded_off = (1.0f - rest) - uniform;
    return -log(rounded_off / -rest - log(rest));  // of -log(1 - uniform), also where rest is 1
}

}  // namespace native
