// Keys and values in codes as AMX multiplies them: bytes.
#pragma once

#include "amx.h"
#include "kv_coded.h"

namespace pagoda::PAGODA_ISA {
namespace {

inline bool in_codes(const PoolPart& part) { return part.format == kInt8 || part.format == kNibbles; }

// A head's entries as codes of a byte each, INT8 or of four bits, next to each other: [kTileKeys, head_dim], and what they mean.
class CodeRows {
public:
    CodeRows(const AttentionArgs& a, const Tile& t, const Stretch& s, void* memory)
        : keys((int8_t*)memory), values(keys + kTileKeys * a.pool.head_dim), key_scales((float*)(values + kTileKeys * a.pool.head_dim)),
          value_scales(key_scales + kTileKeys), value_zeros(value_scales + kTileKeys), a_(a), t_(t), s_(s), next_(a, t, s, t.kv_head, s.begin) {}
    static int64_t bytes(int64_t head_dim) { return kTileKeys * (2 * head_dim + 3 * (int64_t)sizeof(float)); }

    // The entries from `begin` on; the next call must be for what `then` says. Returns their number.
    int fetch(int head, int64_t begin, int then_head, int64_t then_begin) {
        const Entries<uint8_t> now = next_;
        next_ = Entries<uint8_t>(a_, t_, s_, then_head, then_begin);
        for_each_run(a_, t_, s_, then_begin, next_.count, [&](int64_t block, int64_t slot, int, int n) {
            prefetch_beside(*s_.keys, then_head, block, slot, n);
            prefetch_beside(*s_.values, then_head, block, slot, n);
        });
        copy(*s_.keys, now.keys, now.count, keys);
        copy(*s_.values, now.values, now.count, values);
        next_keys_ = 0;
        if (s_.keys->format == kInt8) gather<bf16>(a_, t_, s_, s_.keys->scales, head, begin, now.count, key_scales);
        memset(value_scales, 0, 2 * kTileKeys * sizeof(float));
        if (s_.values->format == kInt8) {
            gather<bf16>(a_, t_, s_, s_.values->scales, head, begin, now.count, value_scales);
        } else {
            gather<ScaleCode>(a_, t_, s_, s_.values->scales, head, begin, now.count, value_scales);
            gather<bf16>(a_, t_, s_, s_.values->zeros, head, begin, now.count, value_zeros);
        }
        return now.count;
    }

    // Asks for the next entries' keys, a quarter of them in each of four calls; and for their values, in each of 16 turns. Between
    // them is arithmetic, so that neither waits for the other.
    void prefetch_keys() {
        for (const int end = next_keys_ + kTileKeys / 16; next_keys_ < end; next_keys_++) prefetch(next_, next_keys_, row_bytes(*s_.keys), 0);
    }
    void prefetch_values(int turn) const { prefetch(next_, turn, 0, row_bytes(*s_.values)); }

    int8_t *const keys, *const values;
    float *const key_scales, *const value_scales, *const value_zeros;

private:
    int64_t row_bytes(const PoolPart& part) const { return part.format == kNibbles ? a_.pool.head_dim / 2 : a_.pool.head_dim; }

    void prefetch_beside(const PoolPart& part, int head, int64_t block, int64_t slot, int n) const {
        if (part.format == kInt8) {
            prefetch_row(number_at<bf16>(part.scales, head, block, slot), 2 * n);
        } else if (&part == s_.keys) {
            prefetch_row(number_at<ScaleCode>(part.scales, head, block, 0), a_.pool.head_dim);
            prefetch_row(number_at<bf16>(part.zeros, head, block, 0), 2 * a_.pool.head_dim);
        } else {
            prefetch_row(number_at<ScaleCode>(part.scales, head, block, slot), n);
            prefetch_row(number_at<bf16>(part.zeros, head, block, slot), 2 * n);
        }
    }

    // In the order of prefetching, so that the hardware sees the same pages again.
    void copy(const PoolPart& part, const uint8_t* const* rows, int count, int8_t* to) const {
        const int64_t head_dim = a_.pool.head_dim;
        for (int turn = 0; turn < turns(count); turn++) {
            for (int j = turn; j < count; j += turns(count)) {
                int8_t* row = to + j * head_dim;
                if (part.format == kNibbles) {
                    spread(rows[j], head_dim / 2, (uint8_t*)row);
                } else {
                    for (int64_t i = 0; i < head_dim; i += 64) _mm512_storeu_si512(row + i, _mm512_loadu_si512(rows[j] + i));
                }
            }
        }
    }
    static void spread(const uint8_t* from, int64_t half, uint8_t* to) {
        const __m256i low = _mm256_set1_epi8(15);
        for (int64_t i = 0; i < half; i += 32) {
            const __m256i both = _mm256_loadu_si256((const __m256i*)(from + i));
            _mm256_storeu_si256((__m256i*)(to + i), _mm256_and_si256(both, low));
            _mm256_storeu_si256((__m256i*)(to + half + i), _mm256_and_si256(_mm256_srli_epi16(both, 4), low));
        }
    }

    const AttentionArgs& a_;
    const Tile& t_;
    const Stretch& s_;
    Entries<uint8_t> next_;
    int next_keys_ = 0;
};

}  // namespace
}  // namespace pagoda::PAGODA_ISA
