// The order of a step's work: the row of each packed token, the keys that are written before any token attends, and the
// pieces of the attention. One thread computes it for all threads.
//
// The tokens whose logits are wanted have the first rows, because after the last layer's keys and values no other row
// is computed. Such a token attends alone; the other tokens of a prompt attend in blocks. So neither the way in which a
// token attends nor any bit of its logits depends on how a scheduler cuts prompts into chunks.
#pragma once
#include <algorithm>
#include <vector>
#include "model.h"

namespace native {

struct Block {  // consecutive tokens of a prompt, in consecutive rows
    int64_t sequence, row, count;
};

struct Single {  // a token that attends alone; `written`: its queries are ready, its key is in its page
    int64_t sequence, row;
    bool written;
};

class PackedStep {
  public:
    std::vector<int64_t> ids, positions, owners;  // of each row's token; `owners`: its sequence
    std::vector<int64_t> early;   // rows whose keys are written first
    std::vector<Block> blocks;    // long ones first, so that no thread waits for one at the end
    std::vector<Single> singles;  // of the first rows

    void read(const Step& step, int64_t block_size) {
        for (auto* list : {&ids, &positions, &owners}) list->resize(step.tokens);
        early.clear(), blocks.clear(), singles.clear();
        token_ = wanted_ = 0, other_ = step.wanted;
        for (int64_t s = 0; s < step.sequences; s++) add(step, s, block_size);
        std::stable_sort(blocks.begin(), blocks.end(), [&](const Block& a, const Block& b) {
            return positions[a.row] + a.count > positions[b.row] + b.count;
        });
    }

  private:
    void add(const Step& step, int64_t s, int64_t block_size) {
        const int64_t count = step.counts[s], others = count - step.wants[s], start = step.starts[s];
        // A token that attends alone writes its key when it attends, unless another token of the step may read the key:
        // a later one of its sequence, or one of a sequence that shares the page, which can be only if the token fills
        // the page.
        const bool alone = count == 1 && others == 0 && (start + 1) % step.page_size != 0;
        for (int64_t t = 0; t < others; t += block_size)
            blocks.push_back({s, other_ + t, std::min(block_size, others - t)});
        for (int64_t t = 0; t < count; t++) {
            const int64_t row = t < others ? other_++ : wanted_++;
            ids[row] = step.ids[token_++];
            positions[row] = start + t;
            owners[row] = s;
            if (!alone) early.push_back(row);
            if (t >= others) singles.push_back({s, row, !alone});
        }
    }

    int64_t token_, wanted_, other_;  // the next token, and the next rows for wanted and for other tokens
};

}  // namespace native
