// The experts of each row, and the parts of a product over all experts: against plain loops.
#pragma once
#include <algorithm>
#include "expectations.h"

inline void check_choice(native::Routing& routing, const float* logits, int64_t row, int64_t experts, int64_t used) {
    std::vector<int64_t> order(experts);
    for (int64_t i = 0; i < experts; i++) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
    double total = 0;
    for (int64_t i = 0; i < used; i++) total += std::exp((double)logits[order[i]] - logits[order[0]]);
    for (int64_t i = 0; i < used; i++) {
        const int64_t slot = routing.slot(row, i), first = routing.first(order[i]);
        expect(routing.row(slot) == row, "the row of a slot", row, i, slot);
        expect(slot >= first && slot < first + routing.count(order[i]), "the expert of a slot", row, i, slot);
        const double share = std::exp((double)logits[order[i]] - logits[order[0]]) / total;
        expect(close_to(routing.share(row, i), share, 1e-6), "the share of an expert", row, i);
    }
}

// Each panel of each expert with rows is in one part, and no part has much more than its share of the work.
inline void check_parts(const native::Routing& routing, int64_t rows, int64_t experts, int64_t parts, int64_t panels) {
    std::vector<int64_t> seen(experts * panels), work(parts);
    int64_t all = 0, most = 0;
    for (int64_t part = 0; part < parts; part++)
        routing.share_out(part, part + 1, parts, panels, [&](int64_t expert, int64_t first, int64_t last) {
            for (int64_t p = first; p < last; p++) seen[expert * panels + p]++;
            work[part] += (last - first) * (32 + routing.count(expert));
            most = std::max(most, 32 + routing.count(expert));
        });
    for (int64_t i = 0; i < experts * panels; i++)
        expect(seen[i] == (routing.count(i / panels) > 0), "how often a panel is computed", rows, i, parts);
    for (int64_t part : work) all += part;
    for (int64_t part : work) expect(part <= all / parts + most + 1, "the work of a part", rows, part, parts);
}

inline void check_routing() {
    std::mt19937 random(1);
    for (int64_t experts : {1, 5, 128})
        for (int64_t used : {1, 2, 8}) {
            if (used > experts) continue;
            const int64_t width = (experts + 31) / 32 * 32;
            native::Routing routing(experts, used, width);
            for (int64_t rows : {1, 3, 40, 300}) {
                routing.reserve(rows);
                std::vector<std::vector<float>> logits(rows, std::vector<float>(width, 99.0f));  // more than any expert's
                for (int64_t row = 0; row < rows; row++) {
                    for (int64_t i = 0; i < experts; i++)
                        logits[row][i] = (float)(random() % 19) / 4 + (rows == 40 && i == experts / 2 ? 9.0f : 0.0f);
                    std::copy(logits[row].begin(), logits[row].end(), routing.logits(row));
                    routing.choose(row, true);
                }
                routing.assign(rows);
                for (int64_t row = 0; row < rows; row++) check_choice(routing, logits[row].data(), row, experts, used);
                for (int64_t parts : {1, 2, 7, 1000})
                    for (int64_t panels : {1, 6, 48}) check_parts(routing, rows, experts, parts, panels);
            }
        }
    std::puts("experts are right");
}
