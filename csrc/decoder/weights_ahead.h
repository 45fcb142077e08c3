// The weights that a thread will read next, asked for while it waits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "prefetch.h"

namespace pagoda {

class WeightsAhead {
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
            prefetch_line<2>(first_ + at_);
            if (second_) prefetch_line<2>(second_ + at_);
        }
    }

private:
    static constexpr int64_t kLine = 64, kLines = 4, kMost = 512 << 10;  // well inside an L2 cache

    const char *first_ = nullptr, *second_ = nullptr;
    int64_t at_ = 0, end_ = 0;
};

}  // namespace pagoda
