// A sequence of phases that threads go through together, inside one parallel region.
//
//     phase 0  |task task|task task|      each thread begins with tasks of its own, which are neighbours; who has none left takes
//     phase 1  |task|                     others' last ones
//     phase 2  |task task|task task|      a phase ends when its tasks are done, not when all threads have arrived
//
// Who waits has time for something else, such as asking for what it will read next: that is why tasks have owners. On a machine that is
// busy with something else a barrier would wait for the thread that got no processor; here the others do its tasks, and when it comes
// back, it runs through the phases that are over.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pagoda {

class Team {
    struct alignas(128) Count {  // two lines: the hardware fetches them in pairs
        std::atomic<int64_t> value{0};
    };

public:
    explicit Team(size_t max_phases) : max_phases_(max_phases) {}

    // One thread's place in a run.
    class Member {
    public:
        int64_t index() const { return index_; }
        int64_t size() const { return size_; }

        // The first of `num_tasks` tasks that are member `index`'s own.
        int64_t first_task(int64_t num_tasks, int64_t index) const { return num_tasks * index / size_; }

        // Calls tasks(begin, end) for parts of [0, num_tasks) that are together all of it; for one at a time, unless they take alike long.
        // Every member calls this with the same numbers in the same order. No task may throw. `meanwhile()` is called again and again
        // by who waits, and should take less than a microsecond.
        template <typename Tasks, typename Meanwhile>
        void share(int64_t num_tasks, bool alike, Tasks tasks, Meanwhile meanwhile) {
            Count* const begun = phase_;
            std::atomic<int64_t>& done = phase_[size_].value;
            phase_ += size_ + 1;
            auto is_over = [&] { return done.load(std::memory_order_acquire) >= num_tasks; };
            auto do_tasks_of = [&](int64_t owner) {
                const int64_t first = first_task(num_tasks, owner), end = first_task(num_tasks, owner + 1);
                for (Range r; !(r = take(begun[owner].value, end - first, owner == index_, alike)).is_empty();) {
                    tasks(first + r.begin, first + r.end);
                    done.fetch_add(r.end - r.begin, std::memory_order_acq_rel);
                }
            };
            for (int64_t i = 0; i < size_ && !is_over(); i++) do_tasks_of((index_ + i) % size_);
            constexpr int kSpins = 4000;  // some tens of microseconds; then whoever holds the last task may need this processor
            for (int spins = 0; !is_over(); spins++) {
                if (spins < kSpins) {
                    meanwhile();
#if defined(__x86_64__)
                    _mm_pause();
#endif
                } else {
#if defined(__linux__)
                    sched_yield();
#endif
                }
            }
        }

    private:
        friend Team;
        Member(Count* first, int64_t index, int64_t size) : phase_(first), index_(index), size_(size) {}

        struct Range {
            int64_t begin, end;
            bool is_empty() const { return begin >= end; }
        };

        // Some of what is left of `count` tasks: from the front for their owner, who takes a third of them if they are alike, so that
        // the parts become small; for others the last one.
        static Range take(std::atomic<int64_t>& begun, int64_t count, bool owns, bool alike) {
            constexpr int64_t kFront = int64_t{1} << 32;  // tasks begun from the front, and below from the back
            for (int64_t seen = begun.load(std::memory_order_relaxed);;) {
                const int64_t front = seen / kFront, back = seen % kFront, left = count - front - back;
                if (left <= 0) return {0, 0};
                const int64_t some = owns && alike ? (left + 2) / 3 : 1;
                if (!begun.compare_exchange_weak(seen, seen + (owns ? some * kFront : some), std::memory_order_relaxed)) continue;
                return owns ? Range{front, front + some} : Range{count - back - 1, count - back};
            }
        }

        Count* phase_;
        const int64_t index_, size_;
    };

    // member(m): see Member::share.
    template <typename Body>
    void run(int threads, Body body) {
        const size_t num_counts = max_phases_ * (threads + 1);
        if (counts_.size() < num_counts) counts_ = std::vector<Count>(num_counts);
        for (Count& count : counts_) count.value.store(0, std::memory_order_relaxed);
        std::atomic<int64_t> arrived{0};
        // Not OpenMP's numbers: it may give fewer threads than it was asked for.
        auto one = [&] { body(Member(counts_.data(), arrived.fetch_add(1), threads)); };
        if (threads <= 1) return one();
#pragma omp parallel num_threads(threads)
        one();
    }

private:
    const size_t max_phases_;
    std::vector<Count> counts_;  // of a phase: each member's tasks that were begun (see take), then all tasks that are done
};

}  // namespace pagoda
