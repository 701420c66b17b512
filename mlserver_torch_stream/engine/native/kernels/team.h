// A few threads that work through one list of pieces after another, with a barrier behind each list.
// Knows nothing of what a piece is.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace native {

// A number that only grows, and on whose growth a thread can wait: it spins for some 20 us, then it sleeps. Spinning
// longer would burn a core that the thread waited for may need.
class Bell {
  public:
    uint32_t rung() const { return count_.load(std::memory_order_acquire); }

    void ring() {
        count_.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0) wake();
    }

    void await(uint32_t seen) {
        for (int i = 0; i < kSpins; i++) {
            if (rung() != seen) return;
            pause();
        }
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        while (count_.load(std::memory_order_seq_cst) == seen) sleep(seen);
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }

  private:
    static constexpr int kSpins = 1000;

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#else
        std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
    }
#if defined(__linux__)
    void sleep(uint32_t seen) { syscall(SYS_futex, &count_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &count_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
    void sleep(uint32_t) { std::this_thread::yield(); }
    void wake() {}
#endif

    std::atomic<uint32_t> count_{0};
    std::atomic<int> sleepers_{0};
};

class Team {
  public:
    explicit Team(int size) : size_(size) {
        for (int id = 1; id < size; id++) threads_.emplace_back([this, id] { serve(id); });
    }

    ~Team() {
        stopping_ = true;
        start_.ring();
        for (auto& thread : threads_) thread.join();
    }

    int size() const { return size_; }

    // Runs job(id) on every thread, the caller's being 0. All of them must make the same calls of `each`.
    void run(const std::function<void(int)>& job) {
        job_ = &job;
        start_.ring();
        job(0);
        barrier();  // nobody still reads job_
    }

    // body(first, last) over 0..total in pieces: whoever is free takes the next one, so that a thread which the
    // system has put aside holds up one piece and not its whole share.
    template <class Body> void each(int64_t total, int64_t piece, Body&& body) {
        for (;;) {
            const int64_t first = next_.fetch_add(piece, std::memory_order_relaxed);
            if (first >= total) break;
            body(first, std::min(first + piece, total));
        }
        barrier();
    }

  private:
    void barrier() {
        const uint32_t seen = passed_.rung();
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < size_) return passed_.await(seen);
        arrived_.store(0, std::memory_order_relaxed);
        next_.store(0, std::memory_order_relaxed);
        passed_.ring();
    }

    void serve(int id) {
        uint32_t seen = 0;
        for (;;) {
            start_.await(seen++);
            if (stopping_) return;
            (*job_)(id);
            barrier();
        }
    }

    const int size_;
    std::vector<std::thread> threads_;
    const std::function<void(int)>* job_ = nullptr;
    std::atomic<bool> stopping_{false};
    alignas(64) Bell start_;
    alignas(64) Bell passed_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int64_t> next_{0};
};

}  // namespace native
