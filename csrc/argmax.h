// The largest of many values.
#pragma once

#include "vec.h"

namespace pagoda::PAGODA_ISA {
namespace {

// The index of the largest of n > 0 values, the first if several are; -1 if one of them is NaN, or the largest not finite.
inline int64_t argmax(const float* values, int64_t n) {
    constexpr int64_t kStretch = 1024;
    float largest = -INFINITY;
    int64_t found = 0;  // where the stretch begins that has it
    IntVec not_numbers = {};
    for (int64_t begin = 0; begin < n; begin += kStretch) {
        const int64_t end = smaller(begin + kStretch, n);
        Vec tops[4];  // one maximum would wait for itself
        for (Vec& top : tops) top = splat(-INFINITY);
        auto meet = [&](Vec& top, Vec v) {
            top = max(v, top);
            not_numbers |= v != v;
        };
        int64_t i = begin;
        for (; i + 4 * kWidth <= end; i += 4 * kWidth) {
            for (int t = 0; t < 4; t++) meet(tops[t], load(values + i + t * kWidth));
        }
        for (; i < end; i++) meet(tops[0], splat(values[i]));
        float lanes[kWidth], top = -INFINITY;
        store(lanes, max(max(tops[0], tops[1]), max(tops[2], tops[3])));
        for (float lane : lanes) top = larger(top, lane);
        if (top > largest) {
            largest = top;
            found = begin;
        }
    }
    bool any = false;
    for (int i = 0; i < kWidth; i++) any |= not_numbers[i] != 0;
    if (any || !(largest > -INFINITY && largest < INFINITY)) return -1;
    while (values[found] != largest) found++;
    return found;
}

}  // namespace
}  // namespace pagoda::PAGODA_ISA
