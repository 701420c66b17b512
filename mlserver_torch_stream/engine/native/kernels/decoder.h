// A decoder of the Llama layout: one call computes all layers for all tokens of a step.
// Knows nothing of model families: a norm, a bias or a scale is either there or not.
#pragma once
#include <stdexcept>
#include <string>
#include "argmax.h"
#include "attend_pages.h"
#include "draw.h"
#include "packed_step.h"
#include "routing.h"

namespace native {

// A decoder of any type.
struct AnyDecoder {
    virtual ~AnyDecoder() = default;
    virtual void run(const Step& step) = 0;
    virtual void draw(const DrawCall& call) = 0;
};

template <class T> class Decoder final : public AnyDecoder {
  public:
    Decoder(const Shape& shape, const Weights& weights, int threads)
        : shape_(shape), weights_(weights), layers_(weights.layers, weights.layers + shape.layers), scratch_(threads),
          routing_(shape.experts, shape.experts_used, padded(shape.experts)),
          team_(threads, [this](Member& me, const Job& job) { forward(me, job); }) {
        group_ = shape.heads / shape.kv_heads;
        hidden_ = padded(shape.hidden);
        attended_ = padded(shape.heads * shape.head_dim);
        qkv_ = padded((shape.heads + 2 * shape.kv_heads) * shape.head_dim);
        int64_t longest = std::max(shape.hidden, shape.heads * shape.head_dim);
        for (const Layer& layer : layers_) {
            longest = std::max(longest, layer.down.k);
            gated_width_ = std::max(gated_width_, (layer.router.n > 0 ? shape.experts_used : 1) * padded(layer.down.k));
        }
        groups_ = groups_of(longest);
        for (Scratch& scratch : scratch_) scratch.product.rounded.resize(kFew * groups_);
        for (Scratch& scratch : scratch_)
            scratch.attention.reserve(group_ * kQueries, shape.head_dim, shape.head_dim);
    }

    void run(const Step& step) override {
        for (int64_t i = 0; i < step.tokens; i++)  // a tokenizer can have ids without an embedding
            if (step.ids[i] < 0 || step.ids[i] >= weights_.table.n)
                throw std::out_of_range("the embedding has no token " + std::to_string(step.ids[i]));
        packed_.read(step, kQueries);
        reserve(step);
        step_ = step;
        team_.run({step.tokens, step.wanted, (int64_t)packed_.early.size(), (int64_t)packed_.blocks.size(),
                   (int64_t)packed_.singles.size(), 0});
        const auto team = (int64_t)scratch_.size();
        for (int64_t r = 0; r < step.wanted; r++) step.argmax[r] = argmax(&found_[r], team, step.wanted);
    }

    void draw(const DrawCall& call) override {
        draw_ = call;
        Job job{};
        job.drawn = call.count;
        team_.run(job);
    }

  private:
    using A = Factor<T>;  // the type of activations

    // The lengths of a step's lists of pieces. Everything else of a step is in the decoder, where a late thread reads
    // nothing.
    struct Job {
        int64_t tokens, wanted, early, blocks, singles, drawn;
    };
    struct Scratch {
        AttendPages<T, A, A> attention;
        ProductScratch product;
    };

    static int64_t padded(int64_t n) { return panels_of(n) * kPanel; }

    // Allocates all memory that a step needs, so that no thread runs out of memory in the middle of the step.
    void reserve(const Step& step) {
        const int64_t tokens = step.tokens;
        grow(stream_, tokens * hidden_);
        grow(branch_, tokens * hidden_);
        grow(normed_, tokens * hidden_);
        grow(projected_, tokens * qkv_);
        grow(queries_, tokens * attended_);
        grow(mixed_, tokens * attended_);
        grow(gated_, tokens * gated_width_);
        const int64_t slots = tokens * shape_.experts_used;
        grow(gathered_, slots * hidden_);
        grow(parts_, slots * hidden_);
        grow(rounded_, std::max(tokens, slots) * groups_);
        routing_.reserve(tokens);
        found_.assign(scratch_.size() * step.wanted, ArgMax{});
    }
    template <class V> static void grow(std::vector<V>& buffer, int64_t size) {
        if ((int64_t)buffer.size() < size) buffer.resize(size);
    }

    // A late thread may be here with the previous job. Outside of the pieces it reads only its own copy of the job.
    void forward(Member& me, const Job& job) {
        if (job.drawn > 0) return draw_rows(me, job.drawn);
        me.each(job.tokens, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; row++) embed(row);
        });
        for (int64_t i = 0; i < shape_.layers; i++) {
            const Layer& layer = layers_[i];
            prepare(me, job.tokens, layer.norms.before_attention);
            product(me, normed_, hidden_, job.tokens, layer.qkv, [&](int64_t row, int64_t p, float* c) {
                put(&projected_[row * qkv_ + p * kPanel], c, layer.qkv.bias, p);
            });
            const bool last = i + 1 == shape_.layers;
            const int64_t rows = last ? job.wanted : job.tokens;
            attend(me, job, i, last ? 0 : job.blocks);
            if (rows == 0) return;
            add(me, rows, mixed_, attended_, layer.out, layer.norms.after_attention);
            prepare(me, rows, layer.norms.before_mlp);
            if (layer.router.n > 0) {
                add_experts(me, rows, layer);
                continue;
            }
            const Matrix& gate_up = layer.gate_up;
            const int64_t inner = padded(layer.down.k);
            product(me, normed_, hidden_, rows, gate_up, [&](int64_t row, int64_t p, float* c) {
                gate(&gated_[row * inner + p * kPanel / 2], c, gate_up.bias, p);
            });
            add(me, rows, gated_, inner, layer.down, layer.norms.after_mlp);
        }
        head(me, job.wanted);
    }

    // Adds to the residual stream what the chosen experts of each row compute. A row's sum is in the order of its
    // choice, so it is bitwise the same in any batch.
    void add_experts(Member& me, int64_t rows, const Layer& layer) {
        const Matrix &gate_up = layer.gate_up, &down = layer.down;
        const int64_t used = shape_.experts_used, slots = rows * used, inner = padded(down.k);
        product(me, normed_, hidden_, rows, layer.router, [&](int64_t row, int64_t p, float* c) {
            put(routing_.logits(row) + p * kPanel, c, layer.router.bias, p);
        });
        me.each(rows, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; row++) routing_.choose(row, shape_.experts_normalised != 0);
        });
        me.each(1, [&](int64_t, int64_t) { routing_.assign(rows); });
        me.each(slots, [&](int64_t first, int64_t last) {
            for (int64_t slot = first; slot < last; slot++) gather(slot, gate_up);
        });
        expert_product(me, rows, gathered_, hidden_, gate_up, [&](int64_t slot, int64_t p, float* c, const float* bias) {
            gate(&gated_[slot * inner + p * kPanel / 2], c, bias, p);
        });
        if (!down.plain())
            me.each(slots, [&](int64_t first, int64_t last) {
                for (int64_t slot = first; slot < last; slot++)
                    round_row(&gated_[slot * inner], down.k, &rounded_[slot * groups_of(down.k)]);
            });
        expert_product(me, rows, gated_, inner, down, [&](int64_t slot, int64_t p, float* c, const float* bias) {
            put(&parts_[slot * hidden_ + p * kPanel], c, bias, p);
        });
        me.each(rows, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; row++) {
                sum_parts(row);
                join(row, layer.norms.after_mlp);
            }
        });
    }

    // Copies a slot's row to the rows of its expert, as int8 if the experts are of integers.
    __attribute__((noinline)) void gather(int64_t slot, const Matrix& w) {
        const A* row = &normed_[routing_.row(slot) * hidden_];
        if (w.plain()) {
            std::copy(row, row + hidden_, &gathered_[slot * hidden_]);
        } else {
            round_row(row, w.k, &rounded_[slot * groups_of(w.k)]);
        }
    }

    // Calls done(slot, panel, sums, bias) for each slot and each panel of its expert in w. The bias is the expert's.
    template <class F>
    void expert_product(Member& me, int64_t rows, const std::vector<A>& a, int64_t lda, const Matrix& w, const F& done) {
        const int64_t panels = panels_of(w.n) / shape_.experts;
        const int64_t total = std::min(rows * shape_.experts_used, shape_.experts) * panels;
        me.each(total, [&](int64_t first, int64_t last) {
            routing_.share_out(first, last, total, panels, [&](int64_t expert, int64_t from, int64_t to) {
                const int64_t slot = routing_.first(expert), before = expert * panels;
                const float* bias = w.bias == nullptr ? nullptr : w.bias + before * kPanel;
                multiply_panels<T>(a.data() + slot * lda, lda, rounded_.data() + slot * groups_of(w.k),
                                   routing_.count(expert), w, before + from, before + to, scratch_[me.id].product,
                                   [&](int64_t row, int64_t p, float* c) { done(slot + row, p - before, c, bias); });
            });
        });
    }

    __attribute__((noinline)) void sum_parts(int64_t row) {
        for (int64_t i = 0; i < hidden_; i += 16) {
            F16 total{};
            for (int64_t choice = 0; choice < shape_.experts_used; choice++)
                total += load_f(&parts_[routing_.slot(row, choice) * hidden_ + i]) * routing_.share(row, choice);
            store(&branch_[row * hidden_ + i], total);
        }
    }

    void draw_rows(Member& me, int64_t rows) {
        me.each(rows, 1, [&](int64_t row, int64_t) { draw_.chosen[row] = RowDraw(draw_, draw_.rows[row]).run(); });
    }

    // Calls done(row, panel, sums) for each row of a and each panel of w.
    void product(Member& me, const std::vector<A>& a, int64_t lda, int64_t rows, const Matrix& w, const Done& done) {
        multiply<T>(me, a, lda, rows, w, scratch_[me.id].product, rounded_, done);
    }

    // Like some functions below, not inlined: so it is compiled only once, and a call costs little compared with a row.
    __attribute__((noinline)) void embed(int64_t row) {
        const int64_t id = packed_.ids[row];
        const T* table = static_cast<const T*>(weights_.embedding);
        float* to = &stream_[row * hidden_];
        for (int64_t i = 0; i < shape_.hidden; i++) {
            const float x = table != nullptr ? to_float(table[id * shape_.hidden + i]) : table_weight(id, i);
            to[i] = x * shape_.embedding_scale;
        }
        std::fill(to + shape_.hidden, to + hidden_, 0.0f);
    }
    float table_weight(int64_t output, int64_t input) const {
        const Matrix& table = weights_.table;
        const int64_t p = output / kPanel;
        if (!table.plain()) {
            const GroupedPanel panel = table.panel(p);
            return panel.format.weight(panel.blocks, output % kPanel, input);
        }
        const int64_t line = (p * table.k + input) / per_word<T>;
        const Word* word = table.words() + line * kPanel + output % kPanel;
        T x;
        memcpy(&x, reinterpret_cast<const T*>(word) + input % per_word<T>, sizeof x);
        return to_float(x);
    }

    // Writes the residual stream, normalised if there is a norm, as the next product's input.
    void prepare(Member& me, int64_t rows, const float* norm) {
        me.each(rows, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; row++)
                norm_row(&stream_[row * hidden_], norm, &normed_[row * hidden_]);
        });
    }
    __attribute__((noinline)) void norm_row(const float* x, const float* norm, A* to) {
        const float scale = norm == nullptr ? 1.0f : inverse_rms(x, shape_.hidden, shape_.eps);
        for (int64_t i = 0; i < hidden_; i += 16)
            store_as(to + i, norm == nullptr ? load_f(x + i) : load_f(x + i) * scale * load_f(norm + i));
    }

    static void put(float* to, const float* c, const float* bias, int64_t panel) {
        for (int i = 0; i < kPanel; i += 16) {
            const F16 sum = load_f(c + i);
            store(to + i, bias == nullptr ? sum : sum + load_f(bias + panel * kPanel + i));
        }
    }

    void gate(A* to, const float* c, const float* bias, int64_t panel) {
        F16 gates = load_f(c), ups = load_f(c + 16);
        if (bias != nullptr) {
            gates += load_f(bias + panel * kPanel);
            ups += load_f(bias + panel * kPanel + 16);
        }
        F16 slope = gates;
        if (shape_.activation == kGeluTanh) {  // x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))
            slope = 1.5957691216f * (gates + 0.044715f * gates * gates * gates);
        } else if (shape_.activation == kClampedSwiglu) {
            const F16 limit = broadcast_f(shape_.swiglu_limit);
            gates = smaller(limit, gates);
            ups = larger(-limit, smaller(limit, ups)) + 1.0f;
            slope = gates * shape_.swiglu_alpha;
        }
        store_as(to, gates / (1.0f + exp(-slope)) * ups);
    }

    // Adds a product to the residual stream. A norm after the product needs whole rows, which are computed first.
    void add(Member& me, int64_t rows, const std::vector<A>& a, int64_t lda, const Matrix& w, const float* norm) {
        if (norm == nullptr) {
            const auto to_stream = [&](int64_t row, int64_t p, float* c) {
                put(c, c, w.bias, p);
                onto(&stream_[row * hidden_ + p * kPanel], c, kPanel);
            };
            return product(me, a, lda, rows, w, {to_stream, &stream_, hidden_});
        }
        product(me, a, lda, rows, w, [&](int64_t row, int64_t p, float* c) {
            put(&branch_[row * hidden_ + p * kPanel], c, w.bias, p);
        });
        me.each(rows, [&](int64_t first, int64_t last) {
            for (int64_t row = first; row < last; row++) join(row, norm);
        });
    }
    // Adds a row of the branch to the residual stream, normalised if there is a norm.
    __attribute__((noinline)) void join(int64_t row, const float* norm) {
        float* x = &branch_[row * hidden_];
        if (norm != nullptr) {
            const float scale = inverse_rms(x, shape_.hidden, shape_.eps);
            for (int64_t i = 0; i < hidden_; i += 16) store(x + i, load_f(x + i) * scale * load_f(norm + i));
        }
        onto(&stream_[row * hidden_], x, hidden_);
    }
    void onto(float* to, const float* x, int64_t count) {
        for (int64_t i = 0; i < count; i += 16) store(to + i, load_f(to + i) + load_f(x + i) * shape_.residual_scale);
    }

    void attend(Member& me, const Job& job, int64_t layer, int64_t blocks) {
        const int64_t kv = shape_.kv_heads, singles = job.singles * kv;
        me.each(job.early, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++)
                for (int64_t h = 0; h < kv; h++) finish(layer, packed_.early[i], h);
        });
        blocks *= kv;
        const int64_t piece = std::max<int64_t>(1, singles / (4 * me.team));
        me.each(blocks + (singles + piece - 1) / piece, 1, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; i++) {
                if (i < blocks) {
                    attend_block(layer, scratch_[me.id], i);
                } else {
                    const int64_t from = (i - blocks) * piece, stop = std::min(from + piece, singles);
                    for (int64_t j = from; j < stop; j++) attend_single(layer, scratch_[me.id], j, j + 1 < stop);
                }
            }
        });
    }

    // Normalises and rotates the queries and the key of a group, and writes the key and the value to their page.
    __attribute__((noinline)) void finish(int64_t layer, int64_t row, int64_t kv_head) {
        const Layer& weights = layers_[layer];
        const int dim = (int)shape_.head_dim;
        const int half = weights.rope ? (int)shape_.rotated_half : 0;
        const int64_t position = packed_.positions[row];
        const float* all = &projected_[row * qkv_];
        const float* keys = all + shape_.heads * dim;
        const int64_t angle = (position * shape_.ropes + weights.rope - 1) * half;
        const float *cos = step_.cos + angle, *sin = step_.sin + angle;
        for (int64_t head = kv_head * group_; head < (kv_head + 1) * group_; head++)
            finish_head(all + head * dim, scale_of(all, head, shape_.heads), norm_of(weights.norms.query, head), cos,
                        sin, half, dim, &queries_[row * attended_ + head * dim]);
        const Live<T> live = seen(layer, packed_.owners[row], kv_head, position, 1);
        finish_head(keys + kv_head * dim, scale_of(keys, kv_head, shape_.kv_heads),
                    norm_of(weights.norms.key, kv_head), cos, sin, half, dim,
                    const_cast<T*>(live.at(live.keys, position)));
        convert(keys + (shape_.kv_heads + kv_head) * dim, dim, const_cast<T*>(live.at(live.values, position)));
    }
    float scale_of(const float* all, int64_t head, int64_t heads) const {
        if (shape_.qk_norm == kPerHead) return inverse_rms(all + head * shape_.head_dim, shape_.head_dim, shape_.eps);
        if (shape_.qk_norm == kWhole) return inverse_rms(all, heads * shape_.head_dim, shape_.eps);
        return 1.0f;
    }
    const float* norm_of(const float* norm, int64_t head) const {
        return norm == nullptr ? nullptr : norm + (shape_.qk_norm == kWhole ? head * shape_.head_dim : 0);
    }

    Sight sight(int64_t layer) const { return {step_.pages[layer].window, 0}; }

    // The cached keys and values, of a sequence and a key head, to which the tokens `position` to `position + count - 1`
    // attend: from the oldest key in the window of the first token to the key of the last token.
    Live<T> seen(int64_t layer, int64_t sequence, int64_t kv_head, int64_t position, int64_t count) const {
        const Pages& pages = step_.pages[layer];
        const int64_t head = step_.page_size * shape_.head_dim;
        return {{static_cast<const T*>(pages.keys) + kv_head * head, pages.stride, shape_.head_dim},
                {static_cast<const T*>(pages.values) + kv_head * head, pages.stride, shape_.head_dim},
                step_.tables[pages.group * step_.table_stride + sequence],
                step_.page_size,
                sight(layer).oldest(position),
                position + count};
    }

    // Task i is a token that attends alone, with one key head. `more` means that this thread also runs the next task.
    __attribute__((noinline)) void attend_single(int64_t layer, Scratch& scratch, int64_t i, bool more) {
        const int64_t kv_head = i % shape_.kv_heads;
        const Single& single = packed_.singles[i / shape_.kv_heads];
        if (!single.written) finish(layer, single.row, kv_head);
        const Live<T> next = more ? seen_by(layer, i + 1) : Live<T>{};
        scratch.attention.run(task(layer, single.sequence, kv_head, single.row, 1), group_ < kFewRows, next);
    }

    Live<T> seen_by(int64_t layer, int64_t i) const {
        const Single& single = packed_.singles[i / shape_.kv_heads];
        return seen(layer, single.sequence, i % shape_.kv_heads, packed_.positions[single.row], 1);
    }

    // Task i is a block of a prompt's tokens, with one key head. All blocks pack keys, so rows do not depend on block
    // sizes.
    __attribute__((noinline)) void attend_block(int64_t layer, Scratch& scratch, int64_t i) {
        const Block& block = packed_.blocks[i / shape_.kv_heads];
        scratch.attention.run(task(layer, block.sequence, i % shape_.kv_heads, block.row, block.count), false);
    }

    AttendTask<T, A> task(int64_t layer, int64_t sequence, int64_t kv_head, int64_t row, int64_t count) {
        const int64_t dim = shape_.head_dim, first = row * attended_ + kv_head * group_ * dim;
        const int64_t position = packed_.positions[row];
        const float* sinks = layers_[layer].sinks;
        return {&queries_[first], &mixed_[first], attended_, dim, attended_, dim, group_, count, position, dim, dim,
                sight(layer), seen(layer, sequence, kv_head, position, count),
                sinks == nullptr ? nullptr : sinks + kv_head * group_, shape_.attention_scale, shape_.attention_cap};
    }

    void head(Member& me, int64_t rows) {
        const int64_t width = padded(shape_.vocab);
        prepare(me, rows, weights_.last_norm);
        product(me, normed_, hidden_, rows, weights_.head, [&](int64_t row, int64_t p, float* c) {
            put(c, c, weights_.head.bias, p);
            ArgMax found = found_[me.id * rows + row];
            for (int i = 0; i < kPanel; i += 16) {
                const F16 x = soft_cap(load_f(c + i) * shape_.logit_scale, shape_.logit_cap);
                store(step_.logits + row * width + p * kPanel + i, x);
                found.take(x, p * kPanel + i, shape_.vocab);
            }
            found_[me.id * rows + row] = found;
        });
    }

    const Shape shape_;
    const Weights weights_;
    const std::vector<Layer> layers_;
    std::vector<Scratch> scratch_;
    int64_t group_;  // query heads of a key head
    int64_t hidden_, attended_, qkv_;  // widths in whole panels
    int64_t gated_width_ = 0;          // of all of a token's rows between gate_up and down
    int64_t groups_;                   // of the longest row
    Step step_{};
    DrawCall draw_{};
    PackedStep packed_;
    std::vector<float> stream_, branch_, projected_;
    std::vector<A> normed_, queries_, mixed_, gated_;
    Routing routing_;
    std::vector<A> gathered_;            // [slots]: the rows of each expert
    std::vector<float> parts_;           // [slots]: what the experts compute
    std::vector<RoundedBlock> rounded_;  // many rows of a product's input
    std::vector<ArgMax> found_;          // [threads][wanted]
    Team<Job> team_;  // last: its threads use all of the above
};

}  // namespace native
