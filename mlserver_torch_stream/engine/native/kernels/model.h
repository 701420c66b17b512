// The structures that Python passes: a model's shape and weights once, and the tokens and block tables of each step.
// They are plain C, and library.py mirrors them field by field.
#pragma once
#include "gemm.h"

namespace native {

enum QkNorm { kNoQkNorm, kPerHead, kWhole };
enum Activation { kSilu, kGeluTanh, kClampedSwiglu };

struct Shape {
    int64_t hidden, vocab, layers;
    int64_t experts, experts_used, experts_normalised;  // of each layer with a router; normalised: shares sum to 1
    int64_t heads, kv_heads, head_dim, rotated_half, ropes;  // rotated_half: rotated dimensions / 2
    int64_t qk_norm, activation;
    float eps, attention_scale, attention_cap;
    float embedding_scale, residual_scale, logit_scale, logit_cap;
    float swiglu_alpha, swiglu_limit;  // of kClampedSwiglu
};

struct Norms {  // weights in float32, padded to whole panels; null: no such norm
    const float *before_attention, *after_attention, *before_mlp, *after_mlp, *query, *key;
};

struct Layer {
    Matrix qkv, out;
    Matrix gate_up, down;  // of all experts, each in whole panels. gate_up: panels of 16 gates and their 16 ups
    Matrix router;         // n is 0: the layer has one expert, which computes all rows
    Norms norms;
    int64_t rope;        // 1 for the first one; 0: this layer has no positions
    const float* sinks;  // [heads]: an additional score in the softmax; null: none
};

struct Weights {
    const Layer* layers;
    const void* embedding;  // [table.n][hidden] in the model's type, or null: the weights of `table`
    Matrix head, table;
    const float* last_norm;
};

struct Pages {  // of a layer, [pages][kv_heads][page_size][head_dim] in the model's type
    void *keys, *values;
    int64_t stride;  // from a page to the next one, in elements
    int64_t group;   // of layers with the same block tables
    int64_t window;  // 0: none
};

// The new tokens of several sequences, one sequence after the other.
struct Step {
    int64_t sequences, tokens, wanted;  // wanted: rows of logits
    const int64_t* ids;                 // [tokens]
    const int64_t* starts;              // [sequences]: tokens in the cache before these
    const int64_t* counts;              // [sequences]: new tokens
    const int64_t* wants;               // [sequences]: how many last tokens need logits
    const int32_t* const* tables;       // [groups][table_stride]: one table per sequence
    int64_t table_stride;
    const Pages* pages;  // [layers]
    int64_t page_size;
    const float *cos, *sin;  // [positions][ropes][rotated_half]
    float* logits;           // [wanted][whole panels of the vocabulary]
    int64_t* argmax;         // [wanted]: the id of each row's first largest logit, or kNotFinite
};

}  // namespace native
