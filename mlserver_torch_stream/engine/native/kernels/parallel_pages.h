// Attends a batch to pages, and writes to pages, on the threads of another library's pool.
#pragma once
#include <memory>
#include "attend_pages.h"
#include "spread.h"

namespace native {

struct PagesCall {  // mirrored field by field in library.py
    const void* queries;     // [tokens][heads][key_dim], by the strides below
    void* out;               // [tokens][heads][value_dim]
    const void *keys, *values;  // [pages][kv_heads][page_size][key_dim or value_dim]
    const int32_t* tables;   // [sequences][table_width]
    const int32_t* starts;   // [sequences]: tokens in the pages before the step's
    const int32_t* ends;     // [sequences + 1]: where a sequence's queries begin among the packed ones
    const float* sinks;      // [heads]: an additional score in the softmax; null: none
    int64_t token_stride, head_stride;  // of queries, in elements
    int64_t sequences, table_width, heads, kv_heads, page_size, key_dim, value_dim;
    int64_t window, chunk;   // 0: none
    int64_t type;            // StoredType
    float scale, cap;
};

enum StoredType { kFp32, kBf16, kFp16 };

struct PagesTask {
    int64_t sequence, kv_head, first, count;  // queries first to first + count - 1 of the sequence
};

template <class S> AttendTask<S, S> task_of(const PagesCall& call, const PagesTask& task) {
    const int64_t group = call.heads / call.kv_heads, head = task.kv_head * group;
    const int64_t token = call.ends[task.sequence] + task.first, position = call.starts[task.sequence] + task.first;
    const Sight sight{call.window, call.chunk};
    const auto column = [&](const void* pages, int64_t dim) {
        const int64_t size = call.page_size * dim;
        return Column<S>{static_cast<const S*>(pages) + task.kv_head * size, call.kv_heads * size, dim};
    };
    return {static_cast<const S*>(call.queries) + token * call.token_stride + head * call.head_stride,
            static_cast<S*>(call.out) + (token * call.heads + head) * call.value_dim,
            call.token_stride, call.head_stride, call.heads * call.value_dim, call.value_dim,
            group, task.count, position, call.key_dim, call.value_dim, sight,
            {column(call.keys, call.key_dim), column(call.values, call.value_dim),
             call.tables + task.sequence * call.table_width, call.page_size, sight.oldest(position),
             position + task.count},
            call.sinks == nullptr ? nullptr : call.sinks + head, call.scale, call.cap};
}

// The number of queries of a task: with all query heads of a group, enough rows for whole tiles, whose sums stay
// cached.
inline int64_t queries_of_task(int64_t group) { return std::clamp<int64_t>(512 / group, 1, kQueries); }

// Long tasks come first, so that no thread waits for one at the end: chunks of prompts, beginning with their last
// queries, and then single tokens.
inline std::vector<PagesTask> tasks_of(const PagesCall& call) {
    std::vector<PagesTask> tasks;
    const int64_t most = queries_of_task(call.heads / call.kv_heads);
    for (const bool chunks : {true, false})
        for (int64_t s = 0; s < call.sequences; s++) {
            const int64_t count = call.ends[s + 1] - call.ends[s];
            if ((count > 1) != chunks) continue;
            for (int64_t first = (count - 1) / most * most; first >= 0; first -= most)
                for (int64_t h = 0; h < call.kv_heads; h++)
                    tasks.push_back({s, h, first, std::min(most, count - first)});
        }
    return tasks;
}

// Whether the work is worth starting a team, which takes some microseconds.
inline bool worth_a_team(const PagesCall& call) {
    int64_t scores = 0;
    for (int64_t s = 0; s < call.sequences; s++) {
        const int64_t count = call.ends[s + 1] - call.ends[s];
        scores += count * (call.starts[s] + count);
    }
    return scores * call.heads * (call.key_dim + call.value_dim) > (int64_t)1 << 18;
}

template <class S, class T> void attend_pages(const PagesCall& call, Parallel parallel, int threads) {
    const std::vector<PagesTask> tasks = tasks_of(call);
    spread(worth_a_team(call) ? parallel : nullptr, threads, (int64_t)tasks.size(), [&](int64_t i) {
        static thread_local std::unique_ptr<AttendPages<S, S, T>> worker;  // its memory stays warm from layer to layer
        if (worker == nullptr) worker = std::make_unique<AttendPages<S, S, T>>();
        const AttendTask<S, S> task = task_of<S>(call, tasks[i]);
        worker->run(task, task.group * task.count < kFewRows);
    });
}

inline void attend_pages(const PagesCall& call, Parallel parallel, int threads) {
    if (call.type == kFp32) {
        attend_pages<float, float>(call, parallel, threads);
    } else if (call.type == kFp16) {
        attend_pages<Fp16, float>(call, parallel, threads);
    } else if (call.key_dim % 2 != 0 || call.value_dim % 2 != 0) {
        attend_pages<Bf16, float>(call, parallel, threads);
    } else {
        attend_pages<Bf16, Factor<Bf16>>(call, parallel, threads);
    }
}

struct WriteCall {  // mirrored field by field in library.py; strides and sizes in bytes
    const char *keys, *values;  // [tokens][kv_heads]
    char *key_pages, *value_pages;  // [pages][kv_heads][page_size]
    const int64_t* slots;       // [tokens]: page * page_size + offset
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
    int64_t tokens, kv_heads, page_size, key_bytes, value_bytes;
};

inline void write_pages(const WriteCall& call, Parallel parallel, int threads) {
    constexpr int64_t kTokens = 64, kBytes = 1 << 20;  // per task; bytes from which a team is worth it
    const int64_t bytes = call.tokens * call.kv_heads * (call.key_bytes + call.value_bytes);
    spread(bytes < kBytes ? nullptr : parallel, threads, (call.tokens + kTokens - 1) / kTokens, [&](int64_t i) {
        for (int64_t t = i * kTokens; t < std::min(call.tokens, (i + 1) * kTokens); t++)
            for (int64_t h = 0; h < call.kv_heads; h++) {
                const int64_t page = call.slots[t] / call.page_size, offset = call.slots[t] % call.page_size;
                const int64_t at = (page * call.kv_heads + h) * call.page_size + offset;
                const char* key = call.keys + t * call.key_token_stride + h * call.key_head_stride;
                const char* value = call.values + t * call.value_token_stride + h * call.value_head_stride;
                memcpy(call.key_pages + at * call.key_bytes, key, (size_t)call.key_bytes);
                memcpy(call.value_pages + at * call.value_bytes, value, (size_t)call.value_bytes);
            }
    });
}

}  // namespace native
