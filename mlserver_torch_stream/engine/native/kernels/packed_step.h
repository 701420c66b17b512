// The order of a step's work: the sequence of each packed token, the keys that are written before any token attends,
// and the pieces of the attention. One thread makes it for all threads.
//
// A token whose logits are wanted attends alone; the other tokens of a prompt attend in blocks. So neither the way of a
// token nor any bit of its logits depends on how a scheduler cuts prompts.
#pragma once
#include <algorithm>
#include <vector>
#include "model.h"

namespace native {

struct Block {  // neighbouring tokens of a prompt
    int64_t sequence, token, count;
};

struct Single {  // a token that attends alone; `written`: its queries are ready and its key is in its page
    int64_t sequence, token;
    bool written;
};

class PackedStep {
  public:
    std::vector<int64_t> positions;  // of each token
    std::vector<int64_t> owners;     // the sequence of each token
    std::vector<int64_t> early;      // tokens whose keys are written first
    std::vector<int64_t> wanted;     // tokens whose logits are wanted
    std::vector<Block> blocks;       // long ones first, so that no thread waits for one at the end
    std::vector<Single> singles;

    void read(const Step& step, int64_t block_size) {
        for (auto* list : {&positions, &owners, &early, &wanted}) list->clear();
        blocks.clear();
        singles.clear();
        for (int64_t s = 0, token = 0; s < step.sequences; token += step.counts[s++]) add(step, s, token, block_size);
        std::stable_sort(blocks.begin(), blocks.end(), [&](const Block& a, const Block& b) {
            return positions[a.token] + a.count > positions[b.token] + b.count;
        });
    }

  private:
    void add(const Step& step, int64_t s, int64_t first, int64_t block_size) {
        const int64_t count = step.counts[s], wants = step.wants[s], start = step.starts[s], end = first + count;
        // A token alone writes its key as it attends, unless another token of the step may read it: a later one of
        // its sequence, or one of a sequence that shares the page, which it then fills.
        const bool alone = count == 1 && wants == 1 && (start + 1) % step.page_size != 0;
        for (int64_t t = first; t < end; t++) {
            positions.push_back(start + t - first);
            owners.push_back(s);
            if (!alone) early.push_back(t);
            if (t < end - wants) continue;
            wanted.push_back(t);
            singles.push_back({s, t, !alone});
        }
        for (int64_t t = first; t < end - wants; t += block_size)
            blocks.push_back({s, t, std::min(block_size, end - wants - t)});
    }
};

}  // namespace native
