// Runs pieces of work on the threads of another library's pool (OpenMP's): a pool of our own would compete for the
// cores with that pool's threads, which spin between a model's operators.
// Knows nothing of the work in a piece.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>

namespace native {

// GOMP_parallel: runs the function on `threads` threads at once, including the caller's. Null means that there is no
// pool.
using Parallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

// Runs body(i) for 0 <= i < count on all threads of the pool. Throws the error of the first body that fails.
template <class Body> void spread(Parallel parallel, int threads, int64_t count, Body&& body) {
    struct Shared {
        Body& body;
        const int64_t count;
        std::atomic<int64_t> next{0};
        std::atomic<bool> failed{false};
        std::exception_ptr error;
    } shared{body, count, {}, {}, {}};
    const auto work = [](void* data) {
        auto& shared = *static_cast<Shared*>(data);
        try {
            for (int64_t i; (i = shared.next.fetch_add(1)) < shared.count;) shared.body(i);
        } catch (...) {  // no exception may leave a thread of the pool
            shared.next = shared.count;
            if (!shared.failed.exchange(true)) shared.error = std::current_exception();
        }
    };
    if (parallel == nullptr || threads < 2 || count < 2) {
        work(&shared);
    } else {
        parallel(work, &shared, (unsigned)threads, 0);  // all threads: libgomp ends those that a team leaves out
    }
    if (shared.error) std::rethrow_exception(shared.error);
}

}  // namespace native
