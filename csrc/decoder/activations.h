// The memory of one step of the decoder.
#pragma once

#include <algorithm>

#include "decoder/decoder.h"

namespace pagoda {

constexpr int64_t kBlock = 16;  // rows of a block

inline int64_t blocks(int64_t rows) { return (rows + kBlock - 1) / kBlock; }
inline int64_t padded(int64_t rows) { return blocks(rows) * kBlock; }

// Where a step keeps its activations, one after the other in one allocation.
class Activations {
public:
    Activations(ThreadScratch& scratch, const DecoderTensors& s, bool qk_norm, int64_t rows, int64_t num_logits, int64_t foretold_rows) {
        const int64_t attended = int64_t{s.num_heads} * s.head_dim, kv = int64_t{s.num_kv_heads} * s.head_dim;
        const int64_t all = padded(rows), few = padded(num_logits);
        for (int pass = 0; pass < 2; pass++) {  // sizes first
            char* base = pass ? static_cast<char*>(scratch.at_least(used_)) : nullptr;
            used_ = 0;
            residual = take<float>(base, all * s.hidden);
            last_residual = take<float>(base, few * s.hidden);
            foretold = take<float>(base, padded(foretold_rows) * s.hidden);
            lse = take<float>(base, rows * s.num_heads);
            units = take<float>(base, std::max(all, few));
            packed = take<bf16>(base, all * std::max(s.hidden, attended));
            gated = take<bf16>(base, all * s.inter);
            qkv = take<bf16>(base, rows * (attended + 2 * kv));
            normed_q = qk_norm ? take<bf16>(base, rows * attended) : nullptr;
            normed_k = qk_norm ? take<bf16>(base, rows * kv) : nullptr;
            out = take<bf16>(base, rows * attended);
        }
    }
    float *residual, *last_residual, *foretold, *lse, *units;
    bf16 *packed, *gated, *qkv, *normed_q, *normed_k, *out;

private:
    template <typename T>
    T* take(char* base, int64_t count) {
        const int64_t at = used_;
        used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return reinterpret_cast<T*>(base + at);
    }
    int64_t used_ = 0;
};

}  // namespace pagoda
