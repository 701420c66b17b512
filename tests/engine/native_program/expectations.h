// Random numbers that are the same everywhere, and the comparison with what a plain loop gives.
#pragma once
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>
#include "decoder.h"
#include "parallel_pages.h"

template <class T> float as_float(T x) { return native::to_float(x); }
inline float as_float(native::Fp16 x) { return native::widened_halves(native::H16{} + x.bits)[0]; }

inline native::Fp16 from_float(float x, native::Fp16) { return {native::round_fp16(x)}; }
template <class T> T from_float(float x, T) {
    T to;
    native::assign(&to, x);
    return to;
}

// Numbers of almost one size, which the type holds exactly.
template <class T> std::vector<T> random_values(size_t count, unsigned seed) {
    std::mt19937 generator(seed);
    std::vector<T> values(count);
    for (T& value : values) value = from_float((float)(int)(generator() % 2001 - 1000) / 1000.0f, T{});
    return values;
}

inline void expect(bool right, const char* what, int64_t a = 0, int64_t b = 0, int64_t c = 0) {
    if (right) return;
    std::printf("wrong: %s (%lld, %lld, %lld)\n", what, (long long)a, (long long)b, (long long)c);
    std::exit(1);
}

// A pool like OpenMP's whose threads begin and end with each call.
inline void crew(void (*work)(void*), void* data, unsigned threads, unsigned) {
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; i++) others.emplace_back(work, data);
    work(data);
    for (std::thread& each : others) each.join();
}

inline bool close_to(double found, double expected, double tolerance) {
    return std::abs(found - expected) <= tolerance * (1 + std::abs(expected));
}
