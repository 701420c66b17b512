// 2^x and e^x: their accuracy, and the ends of their ranges.
#pragma once
#include "expectations.h"

inline void check_exp2_at(float x, double tolerance) {
    const double exact = std::exp2((double)x);
    const float found = native::exp2(native::broadcast_f(x))[0];
    expect(std::abs(found - exact) <= tolerance * exact, "2^x, x in thousandths", (int64_t)(x * 1000));
}

inline void check_exp_at(float x, double tolerance) {
    const double exact = std::exp((double)x);
    const float found = native::exp(native::broadcast_f(x))[0];
    expect(std::abs(found - exact) <= tolerance * exact, "e^x, x in thousandths", (int64_t)(x * 1000));
}

inline void check_exp2() {
    for (int i = -126000; i <= 127500; i += 7) check_exp2_at((float)i / 1000.0f, 2e-7);
    for (float x : {-126.0f, -0.5f, 0.0f, 0.5f, 127.5f}) check_exp2_at(x, 2e-7);
    for (float x : {-127.0f, -INFINITY}) expect(native::exp2(native::broadcast_f(x))[0] == 0, "2^x far below 0");
    expect(std::isnan(native::exp2(native::broadcast_f(NAN))[0]), "2^NaN");
    for (int i = -87000; i <= 88000; i += 7) check_exp_at((float)i / 1000.0f, std::abs(i) < 10000 ? 6e-7 : 4e-6);
    std::puts("powers are right");
}
