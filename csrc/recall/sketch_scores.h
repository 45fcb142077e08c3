// How well units of tokens score by their sketches, for one KV head.
//
//     sketches  [width, num_units]      a unit's numbers lie in a column, so a vector holds one number of many units
//     scores    [group, padded]         padded: num_units in whole tiles, the rest -infinity
#pragma once

#include "vec.h"

namespace pagoda::PAGODA_ISA {
namespace {

constexpr int kVectors = kWidth == 16 ? 4 : 2;  // at a time, so that sums stay in registers

// Scores of kQueries queries for the units of kVectors vectors, which may be more than there are.
template <int kQueries, bool kWhole, typename T>
PAGODA_INLINE void score_vectors(const SketchArgs& a, const T* sketches, const float* queries, int64_t first, float* scores) {
    const int64_t padded = padded_units(a.num_units), left = a.num_units - first;
    Vec sums[kQueries][kVectors] = {};
    for (int64_t i = 0; i < a.width; i++) {
        const T* row = sketches + i * a.row_stride + first;
        for (int v = 0; v < kVectors; v++) {
            const int64_t lanes = kWhole ? kWidth : smaller<int64_t>(left - v * kWidth, kWidth);
            if (lanes <= 0) break;
            const Vec known = load_lanes(row + v * kWidth, lanes);
            for (int j = 0; j < kQueries; j++) sums[j][v] += known * queries[j * a.width + i];
        }
    }
    for (int j = 0; j < kQueries; j++) {
        for (int v = 0; v < kVectors; v++) store(scores + j * padded + first + v * kWidth, sums[j][v]);
    }
}

template <int kQueries, typename T>
void score_all(const SketchArgs& a, const T* sketches, const float* queries, float* scores) {
    constexpr int64_t kStep = kVectors * kWidth;
    const int64_t padded = padded_units(a.num_units);
    int64_t first = 0;
    for (; first + kStep <= a.num_units; first += kStep) score_vectors<kQueries, true>(a, sketches, queries, first, scores);
    if (first < a.num_units) score_vectors<kQueries, false>(a, sketches, queries, first, scores);
    for (int j = 0; j < kQueries; j++) {
        for (int64_t i = a.num_units; i < padded; i++) scores[j * padded + i] = -INFINITY;
    }
}

// Fills `margins` [padded]: how far each unit is below the best one of the query that wants it most. `queries` [group, width] are
// those of the head, `scores` is scratch.
template <typename T>
void sketch_margins(const SketchArgs& a, int64_t head, const float* queries, float* scores, float* margins) {
    const T* sketches = (const T*)a.sketches + head * a.head_stride;
    const int64_t padded = padded_units(a.num_units);
    for (int64_t j = 0; j < a.group;) {
        const int64_t left = a.group - j;
        const float* some = queries + j * a.width;
        float* out = scores + j * padded;
        if (left >= 4) {
            score_all<4>(a, sketches, some, out);
        } else if (left == 3) {
            score_all<3>(a, sketches, some, out);
        } else if (left == 2) {
            score_all<2>(a, sketches, some, out);
        } else {
            score_all<1>(a, sketches, some, out);
        }
        j += smaller<int64_t>(left, 4);
    }
    for (int64_t j = 0; j < a.group; j++) {
        const float* of_query = scores + j * padded;
        Vec most = splat(-INFINITY);
        for (int64_t i = 0; i < padded; i += kWidth) most = max(most, load(of_query + i));
        const Vec best = splat(maximum(most));
        for (int64_t i = 0; i < padded; i += kWidth) {
            const Vec below = load(of_query + i) - best;
            store(margins + i, j == 0 ? below : max(load(margins + i), below));
        }
    }
}

// The k-th largest of n values, none of them above zero; n is whole tiles. Below zero a larger value has smaller bits, and how many
// values have bits up to some bound is counted faster, for each bit of the answer, than values could be put in order.
inline float kth_largest(const float* values, int64_t n, int64_t k) {
    constexpr int32_t kMagnitude = 0x7fffffff;
    int32_t bits = 0;  // the largest that fewer than k values are below
    for (int bit = 30; bit >= 0; bit--) {
        const int32_t bound = bits | (1 << bit);
        IntVec fewer = {};  // minus the number of those below the bound, lane by lane
        for (int64_t i = 0; i < n; i += kWidth) {
            IntVec v;
            memcpy(&v, values + i, sizeof v);
            fewer += (v & kMagnitude) < bound;
        }
        int64_t count = 0;
        for (int lane = 0; lane < kWidth; lane++) count -= fewer[lane];
        if (count < k) bits = bound;
    }
    const int32_t negative = bits | ~kMagnitude;
    float value;
    memcpy(&value, &negative, sizeof value);
    return value;
}

}  // namespace
}  // namespace pagoda::PAGODA_ISA
