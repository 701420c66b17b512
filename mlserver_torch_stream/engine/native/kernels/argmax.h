// The id of a row's first largest logit, found while its logits are in registers.
// Knows nothing of products or threads: each thread adds logits in ascending order of their ids.
#pragma once
#include <cmath>
#include "simd.h"

namespace native {

constexpr int64_t kNotFinite = -1;  // in place of an id: the row holds a NaN, or its largest logit is infinite

// The largest logit of a row that one thread has seen, for each lane. The first of equal logits is kept; a NaN stays.
struct ArgMax {
    F16 logits = broadcast_f(-INFINITY);
    I16 ids{};

    // Adds the logits of 16 ids from `first` on. Ids from `vocab` on are padding.
    void take(F16 x, int64_t first, int64_t vocab) {
        const I16 id = I16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + (int32_t)first;
        const I16 better = ((x > logits) | (x != x)) & (id < (int32_t)vocab);
        logits = select(better, x, logits);
        ids = (better & id) | (~better & ids);
    }
};

// Returns the id for a row from the results of `count` threads, which are `stride` apart.
inline int64_t argmax(const ArgMax* results, int64_t count, int64_t stride) {
    float most = -INFINITY;
    int64_t best = 0;
    for (int64_t i = 0; i < count; i++)
        for (int lane = 0; lane < 16; lane++) {
            const float x = results[i * stride].logits[lane];
            const int64_t id = results[i * stride].ids[lane];
            if (x != x) return kNotFinite;
            if (x > most || (x == most && id < best)) most = x, best = id;
        }
    return std::isfinite(most) ? best : kNotFinite;
}

}  // namespace native
