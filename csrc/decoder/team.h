// A sequence of phases that threads go through together, inside one parallel region.
//
//     phase 0  |task task|task task|      tasks that are alike have owners, neighbours the same one; who has none left takes
//     phase 1  |task|                     others' last ones. Unlike tasks are taken in order by whoever is free
//     phase 2  |task task|task task|      a phase ends when its tasks are done, not when all threads have arrived
//
// Who waits has time for something else, such as asking for what it will read next: that is why tasks have owners. On a machine that is
// busy with something else a barrier would wait for the thread that got no processor; here the others do its tasks, and when it comes
// back, it runs through the phases that are over.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif
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

        // The first of `num_tasks` tasks that are member `index`'s own; of a single one that is member 0.
        int64_t first_task(int64_t num_tasks, int64_t index) const { return (num_tasks * index + size_ - 1) / size_; }

        // Calls tasks(begin, end) for parts of [0, num_tasks) that are together all of it; for one at a time, unless they are alike.
        // Every member calls this with the same numbers in the same order. No task may throw. `meanwhile()` is called again and again
        // by who waits, and should take less than a microsecond.
        template <typename Tasks, typename Meanwhile>
        void share(int64_t num_tasks, bool alike, Tasks tasks, Meanwhile meanwhile) {
            Count* const begun = phase_;
            std::atomic<int64_t>& done = phase_[stride_ - 1].value;
            phase_ += stride_;
            auto is_over = [&] { return done.load(std::memory_order_acquire) >= num_tasks; };
            auto run = [&](int64_t begin, int64_t end) {
                tasks(begin, end);
                done.fetch_add(end - begin, std::memory_order_acq_rel);
            };
            if (!alike) {
                for (int64_t i; !is_over() && (i = begun[0].value.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) run(i, i + 1);
            }
            for (int64_t i = 0; alike && i < size_ && !is_over(); i++) {
                const int64_t owner = (index_ + i) % size_, first = first_task(num_tasks, owner), end = first_task(num_tasks, owner + 1);
                if (first == end) continue;
                for (Range r; !(r = take(begun[owner].value, end - first, i == 0)).is_empty();) run(first + r.begin, first + r.end);
            }
            constexpr int kSpins = 1000;  // some fifty microseconds; then whoever holds the last task may need this processor
            for (int spins = 0; !is_over(); spins++) {
                if (spins < kSpins) {
                    meanwhile();
#if defined(__x86_64__)
                    _mm_pause();
#elif defined(__aarch64__)
                    __asm__ volatile("yield");
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
        Member(Count* first, int64_t stride, int64_t index, int64_t size) : phase_(first), stride_(stride), index_(index), size_(size) {}

        struct Range {
            int64_t begin, end;
            bool is_empty() const { return begin >= end; }
        };

        // Some of what is left of `count` tasks: a third from the front for their owner, so that the parts become small; for others the
        // last one.
        static Range take(std::atomic<int64_t>& begun, int64_t count, bool owns) {
            constexpr int64_t kFront = int64_t{1} << 32;  // tasks begun from the front, and below from the back
            for (int64_t seen = begun.load(std::memory_order_relaxed);;) {
                const int64_t front = seen / kFront, back = seen % kFront, left = count - front - back;
                if (left <= 0) return {0, 0};
                const int64_t some = owns ? (left + 2) / 3 : 1;
                if (!begun.compare_exchange_weak(seen, seen + (owns ? some * kFront : some), std::memory_order_relaxed)) continue;
                return owns ? Range{front, front + some} : Range{count - back - 1, count - back};
            }
        }

        Count* phase_;
        const int64_t stride_, index_, size_;
    };

    // body(member) on each of so many threads, or on as many as there are.
    template <typename Body>
    void run(int threads, Body body) {
        const int64_t stride = threads + 1, num_counts = static_cast<int64_t>(max_phases_) * stride;
        if (stride != stride_) {
            for (std::vector<Count>& counts : counts_) counts = std::vector<Count>(num_counts);
            stride_ = stride;
        }
        std::swap(counts_[0], counts_[1]);
        auto one = [&](int64_t index, int64_t size) {
            // Each for itself zeroes what the next run will count with: from another core that would take much longer.
            for (int64_t column = index; column < stride; column += size) {
                for (int64_t i = column; i < num_counts; i += stride) counts_[1][i].value.store(0, std::memory_order_relaxed);
            }
            body(Member(counts_[0].data(), stride, index, size));
        };
#if defined(_OPENMP)
        if (threads > 1) {
#pragma omp parallel num_threads(threads)
            one(omp_get_thread_num(), omp_get_num_threads());
            return;
        }
#endif
        one(0, 1);
    }

private:
    const size_t max_phases_;
    int64_t stride_ = 0;
    std::vector<Count> counts_[2];  // of this run and the next; of a phase: each member's tasks that were begun, then all that are done
};

}  // namespace pagoda
