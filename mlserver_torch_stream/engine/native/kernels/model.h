// What Python hands over: a model's shape and weights once, a step's rows and slabs every time. Plain C, and mirrored
// field by field in library.py.
#pragma once
#include "gemm.h"

namespace native {

enum QkNorm { kNoQkNorm, kPerHead, kWhole };
enum Activation { kSilu, kGeluTanh };

struct Shape {
    int64_t hidden, inner, vocab, layers;
    int64_t heads, kv_heads, head_dim, rotated_half;  // rotated_half: rotated dimensions / 2
    int64_t qk_norm, activation;
    float eps, attention_scale, attention_cap;
    float embedding_scale, residual_scale, logit_scale, logit_cap;
};

struct Norms {  // weights in float32, padded to whole panels; null: no such norm
    const float *before_attention, *after_attention, *before_mlp, *after_mlp, *query, *key;
};

struct Layer {
    Matrix qkv, out, gate_up, down;  // gate_up: panels of 16 gates and their 16 ups
    Norms norms;
    int64_t rotates;  // 0: this layer has no positions
};

struct Weights {
    const Layer* layers;
    const void* embedding;  // [vocab][hidden] in the model's type, or null: the head's weights
    Matrix head;
    const float* last_norm;
};

template <class T> struct Slab {  // [rows][kv_heads][capacity][head_dim]
    T *keys, *values;
    int64_t capacity;
    int64_t start;   // where the first new token goes
    int64_t window;  // 0: none
};

struct Step {
    int64_t rows, queries;
    const int64_t* tokens;   // [rows][queries]
    const int64_t* lengths;  // [rows]: tokens of the row before these
    const int64_t* places;   // [rows][2]: the cache that the row is in, and which of its rows it is
    const void* slabs;       // [caches][layers]
    const float *cos, *sin;  // [positions][rotated_half]
    float* logits;           // [rows][whole panels of the vocabulary], of each row's last token; null: not wanted
};

}  // namespace native
