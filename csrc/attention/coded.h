// What entries in codes come with; and those in INT8, met as they lie.
#pragma once

#include "attention/entries.h"

namespace pagoda::PAGODA_ISA {
namespace {

// Calls body(block, slot, first, n) for each run of `count` entries from `begin` on that are in one block.
template <typename Body>
inline void for_each_run(const AttentionArgs& a, const Tile& t, const Stretch& s, int64_t begin, int count, Body body) {
    const int64_t block_size = a.pool.block_size;
    for (int j = 0; j < count;) {
        const int32_t id = t.blocks[(begin + j) / block_size];
        const int64_t slot = (begin + j) % block_size;
        const int n = (int)smaller<int64_t>(block_size - slot, count - j);
        body((int64_t)(s.slot_of ? s.slot_of[id] : id), slot, j, n);
        j += n;
    }
}

template <typename Number>
inline const Number* number_at(const Beside& from, int head, int64_t block, int64_t slot) {
    return (const Number*)from.data + block * from.block_stride + head * from.head_stride + slot;
}

// A number for each of a head's entries: its scale, or its zero.
template <typename Number>
inline void gather(const AttentionArgs& a, const Tile& t, const Stretch& s, const Beside& from, int head, int64_t begin, int count,
                   float* to) {
    for_each_run(a, t, s, begin, count, [&](int64_t block, int64_t slot, int j, int n) {
        const Number* numbers = number_at<Number>(from, head, block, slot);
        for_each_vector(n, [&](int64_t i, int64_t lanes) { store_lanes(to + j + i, load_lanes(numbers + i, lanes), lanes); });
    });
}

// Scores, and probabilities, are multiplied with the entries' scales. (FP8's codes take longer to widen than that saves.)
class Int8InPlace : public InPlace<int8_t> {
public:
    Int8InPlace(const AttentionArgs& a, const Tile& t, const Stretch& s, void* memory)
        : InPlace(a, t, s, memory), key_scales_((float*)memory), value_scales_(key_scales_ + kTileKeys) {}

    const Entries<int8_t>& at(int head, int64_t begin, int then_head, int64_t then_begin) {
        const Entries<int8_t>& entries = InPlace::at(head, begin, then_head, then_begin);
        gather<bf16>(a_, t_, s_, s_.keys->scales, head, begin, entries.count, key_scales_);
        gather<bf16>(a_, t_, s_, s_.values->scales, head, begin, entries.count, value_scales_);
        for_each_run(a_, t_, s_, then_begin, entries_[next_].count, [&](int64_t block, int64_t slot, int, int) {
            prefetch_line(number_at<bf16>(s_.keys->scales, then_head, block, slot));
            prefetch_line(number_at<bf16>(s_.values->scales, then_head, block, slot));
        });
        return entries;
    }
    const float* key_scales() const { return key_scales_; }
    const float* value_scales() const { return value_scales_; }

private:
    float *key_scales_, *value_scales_;
};

}  // namespace
}  // namespace pagoda::PAGODA_ISA
