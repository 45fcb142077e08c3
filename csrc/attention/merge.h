// Attention in parts becomes one: each part counts by its log-sum-exp.
#pragma once

#include "attention/entries.h"

namespace pagoda::PAGODA_ISA {
namespace {

template <typename T>
void merge_parts(const AttentionArgs& a, const Merge& m, const Part* parts) {
    const int64_t head_dim = a.pool.head_dim;
    for (int64_t r = 0; r < m.row_end - m.row_begin; r++) {
        float top = -INFINITY, total = 0;
        for (int64_t p = 0; p < m.num_parts; p++) top = larger(top, parts[p].lse[r]);
        alignas(64) float merged[kMaxHeadDim] = {};
        for (int64_t first = 0; first < m.num_parts; first += kWidth) {
            const int64_t count = smaller<int64_t>(kWidth, m.num_parts - first);
            float weights[kWidth];
            for (int p = 0; p < kWidth; p++) weights[p] = p < count ? parts[first + p].lse[r] : -INFINITY;
            store(weights, exp(load(weights) - top));
            for (int64_t p = 0; p < count; p++) {
                const float* out = parts[first + p].out + r * head_dim;
                for_each_vector(head_dim, [&](int64_t i, int64_t lanes) {
                    store(merged + i, load(merged + i) + load_lanes(out + i, lanes) * weights[p]);
                });
            }
            total += sum(load(weights));
        }
        const int64_t to = output_of(a, m.first_token_row, m.kv_head, m.row_begin + r);
        T* out = (T*)a.out + to * head_dim;
        for_each_vector(head_dim, [&](int64_t i, int64_t lanes) { store_lanes(out + i, load(merged + i) / total, lanes); });
        a.lse[to] = top + logf(total);
    }
}

}  // namespace
}  // namespace pagoda::PAGODA_ISA
