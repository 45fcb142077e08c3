// Work over threads. GCC's OpenMP runtime is the one torch brings, so both share one set of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace pagoda {

// body(begin, end) over [0, n) in equal ranges, none below `grain` unless there is only one.
template <typename Body>
void parallel_ranges(int64_t n, int64_t grain, int threads, Body body) {
    const int64_t most = (n + grain - 1) / grain;
    const int64_t ranges = most < threads ? most : threads;
    if (ranges <= 1) {
        if (n > 0) body(int64_t{0}, n);
        return;
    }
#pragma omp parallel for num_threads(ranges) schedule(static, 1)
    for (int64_t i = 0; i < ranges; i++) body(n * i / ranges, n * (i + 1) / ranges);
}

// body(i) for each of n tasks, taken in order by whichever thread is free.
template <typename Body>
void parallel_tasks(int64_t n, int threads, Body body) {
    if (n <= 1 || threads <= 1) {
        for (int64_t i = 0; i < n; i++) body(i);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t i = 0; i < n; i++) body(i);
}

// Memory aligned to 64 bytes that one thread keeps from call to call: fresh pages would cost more than the kernels. Much of it lies in
// huge pages, where the system gives them.
class ThreadScratch {
public:
    void* at_least(int64_t bytes) {
        if (bytes > size_) {
            ::free(memory_);
            size_ = 0;
            constexpr int64_t kLine = 64, kHugePage = 2 << 20;
            const int64_t unit = bytes < kHugePage ? kLine : kHugePage, whole = (bytes + unit - 1) / unit * unit;
            memory_ = std::aligned_alloc(static_cast<size_t>(unit), static_cast<size_t>(whole));
            if (memory_ == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
            if (unit == kHugePage) madvise(memory_, static_cast<size_t>(whole), MADV_HUGEPAGE);
#endif
            size_ = whole;
        }
        return memory_;
    }
    ThreadScratch() = default;
    ThreadScratch(const ThreadScratch&) = delete;
    ThreadScratch& operator=(const ThreadScratch&) = delete;
    ~ThreadScratch() { ::free(memory_); }

private:
    void* memory_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace pagoda
