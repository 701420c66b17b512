// A few threads that work through one list of pieces after another; a list begins when the previous one is done. No
// thread waits for a thread without a piece, so one that the system does not run only fails to help.
// Knows nothing of the work in a piece.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace native {

// A counter on which a thread can wait: the thread spins for some 20 us and then sleeps. Spinning longer could take the
// core from the thread that it waits for.
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

// All threads run the same function on the same job, so they come to the same lists in the same order.
class Lists {
  public:
    uint32_t current() const { return (uint32_t)(ticket_.load(std::memory_order_acquire) >> 32); }

    // Runs body(piece) for pieces of list `list`; returns when all of them are done, by any thread.
    template <class Body> void work(uint32_t list, uint32_t pieces, Body&& body) {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while ((uint32_t)(ticket >> 32) == list && (uint32_t)ticket < pieces) {
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
            body((uint32_t)ticket);
            if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == pieces) return open(list + 1);
            ticket = ticket_.load(std::memory_order_acquire);
        }
        for (uint32_t seen = opened_.rung(); current() == list; seen = opened_.rung()) opened_.await(seen);
    }

  private:
    void open(uint32_t list) {
        done_.store(0, std::memory_order_relaxed);
        ticket_.store((uint64_t)list << 32, std::memory_order_seq_cst);
        opened_.ring();
    }

    alignas(64) std::atomic<uint64_t> ticket_{0};  // the current list, and its next piece
    alignas(64) std::atomic<uint32_t> done_{0};
    alignas(64) Bell opened_;
};

// Divides 0..total into pieces for a team. The first `team` pieces are three quarters of the work, the next `team`
// pieces three quarters of the rest, and so on: in a long piece of a matrix a thread fetches each panel while it
// computes the panel before, and short pieces let all threads end together.
class Pieces {
  public:
    Pieces(int64_t total, int64_t team) : total_(total), team_(team) {
        for (int64_t left = total; left > 0; left -= team * length(left)) count_ += std::min(team, left);
    }

    int64_t count() const { return count_; }

    // Runs body(first, last) for piece i.
    template <class Body> void run(int64_t i, Body&& body) const {
        int64_t first = 0;
        for (; i >= team_; i -= team_) first += team_ * length(total_ - first);
        const int64_t count = length(total_ - first);
        body(first + i * count, first + (i + 1) * count);
    }

  private:
    int64_t length(int64_t left) const { return std::max<int64_t>(1, left * 3 / (4 * team_)); }

    const int64_t total_, team_;
    int64_t count_ = 0;
};

// One thread's place in the sequence of lists.
class Member {
  public:
    Member(Lists& lists, int id, int team, uint32_t list) : id(id), team(team), lists_(lists), list_(list) {}

    // Runs body(first, last) over 0..total, and returns when all of it is done.
    template <class Body> void each(int64_t total, Body&& body) {
        const Pieces pieces(total, team);
        if (pieces.count() == 0) return;
        lists_.work(list_++, (uint32_t)pieces.count(), [&](int64_t i) { pieces.run(i, body); });
    }
    template <class Body> void each(int64_t total, int64_t piece, Body&& body) {
        const auto pieces = (uint32_t)((total + piece - 1) / piece);
        if (pieces == 0) return;
        lists_.work(list_++, pieces, [&](uint32_t i) { body(i * piece, std::min((i + 1) * piece, total)); });
    }

    const int id, team;

  private:
    Lists& lists_;
    uint32_t list_;
};

// A member that is late for a job finds its lists done, goes through them and then takes the newest job. So a job is
// copied, and the copy alone must determine which lists it has.
template <class Job> class Team {
  public:
    using Work = std::function<void(Member&, const Job&)>;

    Team(int size, Work work) : size_(size), work_(std::move(work)) {
        try {
            for (int id = 1; id < size; id++) threads_.emplace_back([this, id] { serve(id); });
        } catch (...) {  // the system has no more threads; those that run must not outlive the team
            stop();
            throw;
        }
    }

    ~Team() { stop(); }

    // The caller is member 0. Returns when all lists of the job are done.
    void run(const Job& job) {
        Member me(lists_, 0, size_, lists_.current());
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = job;
            first_list_ = lists_.current();
        }
        start_.ring();
        work_(me, job);
    }

  private:
    void stop() {
        stopping_ = true;
        start_.ring();
        for (auto& thread : threads_) thread.join();
    }

    void serve(int id) {
        for (uint32_t seen = 0; !stopping_;) {
            start_.await(seen);
            seen = start_.rung();
            std::unique_lock<std::mutex> lock(mutex_);
            const Job job = job_;
            Member me(lists_, id, size_, first_list_);
            lock.unlock();
            if (!stopping_) work_(me, job);
        }
    }

    const int size_;
    const Work work_;
    std::atomic<bool> stopping_{false};
    Lists lists_;
    alignas(64) Bell start_;
    std::mutex mutex_;
    Job job_{};
    uint32_t first_list_ = 0;
    std::vector<std::thread> threads_;
};

}  // namespace native
