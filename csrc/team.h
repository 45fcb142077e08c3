// A sequence of phases that threads go through together, inside one parallel region.
//
//     phase 0  |task|task|task|task|      whoever is free takes the next task;
//     phase 1  |task|                     a phase ends when its tasks are done, not when all threads have arrived
//     phase 2  |task|task|...
//
// On a machine that is busy with something else a barrier waits for the thread that got no processor; here the others
// take its tasks, and when it comes back it runs through the phases that are over.
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
public:
    explicit Team(size_t max_phases) : phases_(max_phases) {}

    // member(share): every thread calls `share(num_tasks, task)` with the same numbers in the same order. No task may throw.
    template <typename Body>
    void run(int threads, Body member) {
        for (Phase& phase : phases_) {
            phase.next.store(0, std::memory_order_relaxed);
            phase.done.store(0, std::memory_order_relaxed);
        }
        auto one = [&] {
            Phase* phase = phases_.data();
            member([&](int64_t num_tasks, auto task) { share(*phase++, num_tasks, task); });
        };
        if (threads <= 1) return one();
#pragma omp parallel num_threads(threads)
        one();
    }

private:
    struct alignas(128) Phase {  // two lines: the hardware fetches them in pairs
        std::atomic<int64_t> next{0}, done{0};
    };

    template <typename Task>
    static void share(Phase& phase, int64_t num_tasks, Task& task) {
        int64_t mine = 0;
        for (int64_t i; (i = phase.next.fetch_add(1, std::memory_order_relaxed)) < num_tasks; mine++) task(i);
        if (mine > 0) phase.done.fetch_add(mine, std::memory_order_acq_rel);
        constexpr int kSpins = 4000;  // some tens of microseconds; then whoever holds the last task may need this processor
        for (int spins = 0; phase.done.load(std::memory_order_acquire) < num_tasks; spins++) {
            if (spins < kSpins) {
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

    std::vector<Phase> phases_;
};

}  // namespace pagoda
