// The largest of many values.
#pragma once

#include "vec.h"

namespace pagoda::PAGODA_ISA {
namespace {

// The index of the largest of n > 0 values, the first if several are; -1 if one of them is NaN, or the largest not finite.
inline int64_t argmax(const float* values, int64_t n) {
    constexpr int kSums = 4;  // one maximum would wait for itself
    const int64_t whole = n / (kSums * kWidth) * (kSums * kWidth);
    Vec tops[kSums];
    for (Vec& top : tops) top = splat(-INFINITY);
    IntVec not_numbers = {};
    auto meet = [&](int which, Vec v) {
        tops[which] = max(v, tops[which]);
        not_numbers |= v != v;
    };
    for (int64_t i = 0; i < whole; i += kSums * kWidth) {
        for (int s = 0; s < kSums; s++) meet(s, load(values + i + s * kWidth));
    }
    float lanes[kWidth], largest = -INFINITY;
    store(lanes, max(max(tops[0], tops[1]), max(tops[2], tops[3])));
    for (float lane : lanes) largest = larger(largest, lane);
    bool any = false;
    for (int i = 0; i < kWidth; i++) any |= not_numbers[i] != 0;
    for (int64_t i = whole; i < n; i++) {
        largest = larger(largest, values[i]);
        any |= values[i] != values[i];
    }
    if (any || !(largest > -INFINITY && largest < INFINITY)) return -1;
    int64_t i = 0;
    while (values[i] != largest) i++;
    return i;
}

}  // namespace
}  // namespace pagoda::PAGODA_ISA
