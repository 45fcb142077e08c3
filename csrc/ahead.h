// What a thread will read next, asked for while it waits.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pagoda {

class Ahead {
public:
    // From now on that are these bytes, of two places in turns.
    void begin(const char* first, const char* second, int64_t bytes) {
        first_ = first;
        second_ = second;
        at_ = 0;
        end_ = std::min(bytes, second ? kMost / 2 : kMost);
    }

    void some() {
        for (int i = 0; i < kLines && at_ < end_; i++, at_ += kLine) {
            prefetch_line(first_ + at_);
            if (second_) prefetch_line(second_ + at_);
        }
    }

private:
    // Into the L2 cache; the statement of assembly is what vec.h says.
    static void prefetch_line(const char* p) {
        __builtin_prefetch(p, 0, 2);
        __asm__ volatile("");
    }

    static constexpr int64_t kLine = 64, kLines = 4, kMost = 512 << 10;  // well inside an L2 cache

    const char *first_ = nullptr, *second_ = nullptr;
    int64_t at_ = 0, end_ = 0;
};

}  // namespace pagoda
