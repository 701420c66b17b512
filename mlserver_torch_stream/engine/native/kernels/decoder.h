// A decoder of the Llama layout: one call takes all rows through all layers.
// Knows nothing of families: a norm, a bias or a scale is there or it is not.
#pragma once
#include "attend_many.h"
#include "model.h"

namespace native {

template <class T> class Decoder {
  public:
    Decoder(const Shape& shape, const Weights& weights, int threads)
        : shape_(shape), weights_(weights), layers_(weights.layers, weights.layers + shape.layers), scratch_(threads),
          team_(threads, [this](Member& me, const Step& step) { forward(me, step); }) {
        attention_ = {(int)(shape.heads / shape.kv_heads), (int)shape.head_dim, shape.attention_scale,
                      shape.attention_cap};
        hidden_ = padded(shape.hidden);
        attended_ = padded(shape.heads * shape.head_dim);
        qkv_ = padded((shape.heads + 2 * shape.kv_heads) * shape.head_dim);
        inner_ = padded(shape.inner);
        vectors_ = (int)((shape.head_dim / per_word<T> + 15) / 16);
        if (weights.head.scales == nullptr) return;
        const int64_t longest = std::max({shape.hidden, shape.inner, shape.heads * shape.head_dim});
        for (Scratch& scratch : scratch_) scratch.panel.resize(longest / per_word<T> * 2);
    }

    void run(const Step& step) {
        step_ = &step;
        tokens_ = step.rows * step.queries;
        reserve();
        team_.run(step);
    }

  private:
    struct alignas(64) Line {
        Word words[16];
    };
    struct Scratch {
        OneScratch<T> one;
        AttendMany<T> many;
        std::vector<Word> queries;
        std::vector<Line> panel;  // of int8 weights, as bf16
    };

    Word* panel(Member& me) { return reinterpret_cast<Word*>(scratch_[me.id].panel.data()); }
    static int64_t padded(int64_t n) { return panels_of(n) * kPanel; }

    void reserve() {
        grow(stream_, tokens_ * hidden_);
        grow(branch_, tokens_ * hidden_);
        grow(normed_, tokens_ * hidden_);
        grow(projected_, tokens_ * qkv_);
        grow(queries_, tokens_ * attended_);
        grow(mixed_, tokens_ * attended_);
        grow(gated_, tokens_ * inner_);
    }
    template <class V> static void grow(std::vector<V>& buffer, int64_t size) {
        if ((int64_t)buffer.size() < size) buffer.resize(size);
    }

    // A late thread may be here with the step before: what it does up to a list's pieces depends on its own copy.
    void forward(Member& me, const Step& step) {
        const auto* slabs = static_cast<const Slab<T>*>(step.slabs);
        const int64_t tokens = step.rows * step.queries;
        me.each(tokens, 1, [&](int64_t first, int64_t last) {
            for (int64_t t = first; t < last; t++) embed(t);
        });
        for (int64_t i = 0; i < shape_.layers; i++) {
            const Layer& layer = layers_[i];
            prepare(me, tokens, layer.norms.before_attention);
            multiply(me, normed_.data(), hidden_, tokens, layer.qkv, panel(me), [&](int64_t row, int64_t p, float* c) {
                put(&projected_[row * qkv_ + p * kPanel], c, layer.qkv.bias, p);
            });
            attend(me, step, layer, slabs + i);
            add(me, tokens, mixed_.data(), attended_, layer.out, layer.norms.after_attention);
            prepare(me, tokens, layer.norms.before_mlp);
            const Matrix& gate_up = layer.gate_up;
            multiply(me, normed_.data(), hidden_, tokens, gate_up, panel(me), [&](int64_t row, int64_t p, float* c) {
                gate(&gated_[row * inner_ + p * kPanel / 2], c, gate_up.bias, p);
            });
            add(me, tokens, gated_.data(), inner_, layer.down, layer.norms.after_mlp);
        }
        if (step.logits != nullptr) head(me, step);
    }

    void embed(int64_t t) {
        const int64_t id = step_->tokens[t];
        const T* row = static_cast<const T*>(weights_.embedding);
        float* to = &stream_[t * hidden_];
        for (int64_t i = 0; i < shape_.hidden; i++) {
            const float x = row != nullptr ? to_float(row[id * shape_.hidden + i]) : head_weight(id, i);
            to[i] = x * shape_.embedding_scale;
        }
        std::fill(to + shape_.hidden, to + hidden_, 0.0f);
    }
    float head_weight(int64_t output, int64_t input) const {
        const Matrix& head = weights_.head;
        const int64_t panel = output / kPanel;
        if (head.scales != nullptr)
            return narrow_weight(head.narrow_panel(panel), output % kPanel, input) * head.scales[output];
        const int64_t line = (panel * head.k + input) / per_word<T>;
        const Word* word = head.panels + line * kPanel + output % kPanel;
        T x;
        memcpy(&x, reinterpret_cast<const T*>(word) + input % per_word<T>, sizeof x);
        return to_float(x);
    }

    // The stream, normed where there is a norm, as the next product's input.
    void prepare(Member& me, int64_t tokens, const float* norm) {
        me.each(tokens, 1, [&](int64_t first, int64_t last) {
            for (int64_t t = first; t < last; t++) norm_row(&stream_[t * hidden_], norm, &normed_[t * hidden_]);
        });
    }
    void norm_row(const float* x, const float* norm, T* to) {
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

    void gate(T* to, const float* c, const float* bias, int64_t panel) {
        F16 gates = load_f(c), ups = load_f(c + 16);
        if (bias != nullptr) {
            gates += load_f(bias + panel * kPanel);
            ups += load_f(bias + panel * kPanel + 16);
        }
        // gelu_tanh(x) = x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3))
        const F16 slope = shape_.activation == kSilu ? gates
                                                     : 1.5957691216f * (gates + 0.044715f * gates * gates * gates);
        store_as(to, gates / (1.0f + exp(-slope)) * ups);
    }

    // A product onto the stream; a norm behind it sees whole rows first.
    void add(Member& me, int64_t tokens, const T* a, int64_t lda, const Matrix& w, const float* norm) {
        if (norm == nullptr) {
            multiply(me, a, lda, tokens, w, panel(me), [&](int64_t row, int64_t p, float* c) {
                put(c, c, w.bias, p);
                onto(&stream_[row * hidden_ + p * kPanel], c, kPanel);
            });
            return;
        }
        multiply(me, a, lda, tokens, w, panel(me), [&](int64_t row, int64_t p, float* c) {
            put(&branch_[row * hidden_ + p * kPanel], c, w.bias, p);
        });
        me.each(tokens, 1, [&](int64_t first, int64_t last) {
            for (int64_t t = first; t < last; t++) {
                float* x = &branch_[t * hidden_];
                const float scale = inverse_rms(x, shape_.hidden, shape_.eps);
                for (int64_t i = 0; i < hidden_; i += 16) store(x + i, load_f(x + i) * scale * load_f(norm + i));
                onto(&stream_[t * hidden_], x, hidden_);
            }
        });
    }
    void onto(float* to, const float* x, int64_t count) {
        for (int64_t i = 0; i < count; i += 16) store(to + i, load_f(to + i) + load_f(x + i) * shape_.residual_scale);
    }

    // `slabs`: of this layer, the first cache's; the other caches' lie `layers` apart.
    void attend(Member& me, const Step& step, const Layer& layer, const Slab<T>* slabs) {
        const int64_t kv = shape_.kv_heads, tokens = step.rows * step.queries;
        Scratch& scratch = scratch_[me.id];
        if (step.queries == 1) {
            const int64_t tasks = tokens * kv, piece = std::max<int64_t>(1, tasks / (4 * me.team));
            me.each(tasks, piece, [&](int64_t first, int64_t last) {
                for (int64_t i = first; i < last; i++) attend_one(layer, slabs, scratch, i, i + 1 < last);
            });
            return;
        }
        me.each(tokens, 1, [&](int64_t first, int64_t last) {
            for (int64_t t = first; t < last; t++)
                for (int64_t h = 0; h < kv; h++) finish(layer, slabs, t, h, &queries_[t * attended_] + own(h), 0);
        });
        const int64_t blocks = (step.queries + kQueries - 1) / kQueries, pairs = step.rows * kv;
        me.each(pairs * blocks, 1, [&](int64_t first, int64_t last) {
            // The last blocks see the most keys: they go first, so that nobody waits for a long one at the end.
            for (int64_t i = first; i < last; i++)
                attend_many(slabs, scratch, i % pairs, blocks - 1 - i / pairs);
        });
    }

    int64_t own(int64_t kv_head) const { return kv_head * attention_.group * shape_.head_dim; }

    // Norms and rotates the group's queries (to `queries`, apart by `stride` elements, 0: by a head) and its key, and
    // puts key and value into the slab.
    void finish(const Layer& layer, const Slab<T>* slabs, int64_t t, int64_t kv_head, T* queries, int64_t stride) {
        const int dim = (int)shape_.head_dim, group = attention_.group;
        const int half = layer.rotates ? (int)shape_.rotated_half : 0;
        const int64_t row = t / step_->queries, query = t % step_->queries;
        const int64_t position = step_->lengths[row] + query;
        const float* all = &projected_[t * qkv_];
        const float* keys = all + shape_.heads * dim;
        const float *cos = step_->cos + position * half, *sin = step_->sin + position * half;
        for (int g = 0; g < group; g++) {
            const int64_t head = kv_head * group + g;
            T* to = queries + g * (stride == 0 ? dim : stride);
            finish_head(all + head * dim, scale_of(all, head, shape_.heads), norm_of(layer.norms.query, head), cos, sin,
                        half, dim, to);
        }
        const Slab<T>& slab = holding(slabs, row);
        const int64_t at = first_column(slab, row, kv_head) + slab.start + query;
        finish_head(keys + kv_head * dim, scale_of(keys, kv_head, shape_.kv_heads), norm_of(layer.norms.key, kv_head),
                    cos, sin, half, dim, slab.keys + at * dim);
        convert(keys + (shape_.kv_heads + kv_head) * dim, dim, slab.values + at * dim);
    }
    float scale_of(const float* all, int64_t head, int64_t heads) const {
        if (shape_.qk_norm == kPerHead) return inverse_rms(all + head * shape_.head_dim, shape_.head_dim, shape_.eps);
        if (shape_.qk_norm == kWhole) return inverse_rms(all, heads * shape_.head_dim, shape_.eps);
        return 1.0f;
    }
    const float* norm_of(const float* norm, int64_t head) const {
        return norm == nullptr ? nullptr : norm + (shape_.qk_norm == kWhole ? head * shape_.head_dim : 0);
    }

    const Slab<T>& holding(const Slab<T>* slabs, int64_t row) const {
        return slabs[step_->places[2 * row] * shape_.layers];
    }
    int64_t first_column(const Slab<T>& slab, int64_t row, int64_t kv_head) const {
        return (step_->places[2 * row + 1] * shape_.kv_heads + kv_head) * slab.capacity;
    }

    // Keys and values of a row and head, from the oldest that its first new token sees.
    Live<T> live(const Slab<T>* slabs, int64_t row, int64_t kv_head, int64_t stop) const {
        const Slab<T>& slab = holding(slabs, row);
        int64_t seen = step_->lengths[row];
        if (slab.window != 0) seen = std::min(seen, slab.window - 1);
        const int64_t first = first_column(slab, row, kv_head) + slab.start - seen;
        return {slab.keys + first * shape_.head_dim, slab.values + first * shape_.head_dim, seen + stop};
    }

    // Task i is a row and a key head; `more`: the next one will be this thread's too.
    void attend_one(const Layer& layer, const Slab<T>* slabs, Scratch& scratch, int64_t i, bool more) {
        const int64_t kv = shape_.kv_heads, row = i / kv, kv_head = i % kv;
        const int64_t stride = vectors() * 16;
        scratch.queries.assign(attention_.group * stride, 0);
        finish(layer, slabs, row, kv_head, reinterpret_cast<T*>(scratch.queries.data()), stride * per_word<T>);
        const Live<T> seen = live(slabs, row, kv_head, 1);
        const Live<T> next = more ? live(slabs, (i + 1) / kv, (i + 1) % kv, 0) : Live<T>{nullptr, nullptr, 0};
        T* out = &mixed_[row * attended_] + own(kv_head);
        const Word* q = scratch.queries.data();
        switch (vectors()) {
            case 1: return AttendOne<T, 1>::run(q, seen, next, attention_, scratch.one, out);
            case 2: return AttendOne<T, 2>::run(q, seen, next, attention_, scratch.one, out);
            case 4: return AttendOne<T, 4>::run(q, seen, next, attention_, scratch.one, out);
            case 8: return AttendOne<T, 8>::run(q, seen, next, attention_, scratch.one, out);
            default: return AttendOne<T, 32>::run(q, seen, next, attention_, scratch.one, out);
        }
    }
    int64_t vectors() const { return vectors_ <= 2 ? vectors_ : vectors_ <= 4 ? 4 : vectors_ <= 8 ? 8 : 32; }

    void attend_many(const Slab<T>* slabs, Scratch& scratch, int64_t pair, int64_t block) {
        const int64_t row = pair / shape_.kv_heads, kv_head = pair % shape_.kv_heads, first = block * kQueries;
        const int64_t at = (row * step_->queries + first) * attended_ + own(kv_head);
        const Live<T> seen = live(slabs, row, kv_head, step_->queries);
        const int64_t count = std::min<int64_t>(kQueries, step_->queries - first);
        const int64_t first_key = seen.count - step_->queries + first;
        scratch.many.run({&queries_[at], &mixed_[at], attended_, count, first_key, holding(slabs, row).window, seen}, attention_);
    }

    void head(Member& me, const Step& step) {
        const int64_t rows = step.rows, width = padded(shape_.vocab);
        me.each(rows, 1, [&](int64_t first, int64_t last) {
            for (int64_t r = first; r < last; r++)
                norm_row(&stream_[((r + 1) * step_->queries - 1) * hidden_], weights_.last_norm, &normed_[r * hidden_]);
        });
        multiply(me, normed_.data(), hidden_, rows, weights_.head, panel(me), [&](int64_t row, int64_t p, float* c) {
            put(c, c, weights_.head.bias, p);
            for (int i = 0; i < kPanel; i += 16)
                store(step_->logits + row * width + p * kPanel + i,
                      soft_cap(load_f(c + i) * shape_.logit_scale, shape_.logit_cap));
        });
    }

    const Shape shape_;
    const Weights weights_;
    const std::vector<Layer> layers_;
    std::vector<Scratch> scratch_;
    AttentionShape attention_;
    int64_t hidden_, attended_, qkv_, inner_;  // widths in whole panels
    int vectors_;
    const Step* step_ = nullptr;
    int64_t tokens_ = 0;
    std::vector<float> stream_, branch_, projected_;
    std::vector<T> normed_, queries_, mixed_, gated_;
    Team<Step> team_;  // last: its threads use all of the above
};

}  // namespace native
