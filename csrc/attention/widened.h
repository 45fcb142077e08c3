// Keys and values that are not stored as the arithmetic wants them, widened a tile at a time into the L1 cache.
#pragma once

#include "attention/coded.h"
#include "attention/floats.h"

namespace pagoda::PAGODA_ISA {
namespace {

template <typename T>
inline bool lies_as(const Stretch& s) {
    return s.keys->format == format_of<T> && s.values->format == format_of<T>;
}

// To [count, padded head_dim].
template <typename Code, typename Out>
inline void widen_rows(const uint8_t* const* rows, const float* scales, int count, int64_t head_dim, Out* to) {
    for (int j = 0; j < count; j++, to += padded(head_dim)) {
        const Code* row = (const Code*)rows[j];
        const float scale = scales ? scales[j] : 1.0f;
        for_each_vector(head_dim, [&](int64_t i, int64_t lanes) {
            const Vec v = load_lanes(row + i, lanes);
            if constexpr (sizeof(Code) == 1 && sizeof(Out) == sizeof(bf16)) {
                if (!scales && lanes == kWidth) return store_exact(to + i, v);  // a code of eight bits
            }
            store_lanes(to + i, v * scale, lanes);
        });
    }
}

template <typename Out>
inline void widen_nibble_rows(const uint8_t* const* rows, const float* scales, const float* zeros, int count, int64_t head_dim, Out* to) {
    const int64_t half = head_dim / 2;
    for (int j = 0; j < count; j++, to += padded(head_dim)) {
        const Vec scale = splat(scales[j]), zero = splat(zeros[j]);
        for_each_vector(half, [&](int64_t i, int64_t lanes) {
            const Bytes bytes = load_bytes(rows[j] + i, lanes);
            store_lanes(to + i, to_floats(bytes & 15) * scale + zero, lanes);
            store_lanes(to + half + i, to_floats(bytes >> 4) * scale + zero, lanes);
        });
    }
}

// Rows of one block, whose channels have scales.
template <typename Out>
inline void widen_nibble_channels(const uint8_t* const* rows, const ScaleCode* scales, const bf16* zeros, int count, int64_t head_dim,
                                  Out* to) {
    const int64_t half = head_dim / 2;
    for_each_vector(half, [&](int64_t i, int64_t lanes) {
        const Vec low_scale = load_lanes(scales + i, lanes), high_scale = load_lanes(scales + half + i, lanes);
        const Vec low_zero = load_lanes(zeros + i, lanes), high_zero = load_lanes(zeros + half + i, lanes);
        for (int j = 0; j < count; j++) {
            const Bytes bytes = load_bytes(rows[j] + i, lanes);
            Out* row = to + j * padded(head_dim) + i;
            store_lanes(row, to_floats(bytes & 15) * low_scale + low_zero, lanes);
            store_lanes(row + half, to_floats(bytes >> 4) * high_scale + high_zero, lanes);
        }
    });
}

// As float32 the entries are what the codes mean. As bf16, which holds a code of eight bits exactly, they are those codes, and
// scores and probabilities are multiplied with their scales; of codes of four bits they are the meaning, rounded.
template <typename Out>
class Widened {
public:
    using Element = Out;
    Widened(const AttentionArgs& a, const Tile& t, const Stretch& s, void* memory)
        : a_(a), t_(t), s_(s), stride_(padded(a.pool.head_dim)), keys_((Out*)memory), values_(keys_ + kTileKeys * stride_),
          key_scales_((float*)(values_ + kTileKeys * stride_)), value_scales_(key_scales_ + kTileKeys), zeros_(value_scales_ + kTileKeys),
          first_(s.of == Stretch::kEarlier ? first_row(a, t) : -1) {
        for (int j = 0; j < kTileKeys; j++) {
            entries_.keys[j] = keys_ + j * stride_;
            entries_.values[j] = values_ + j * stride_;
        }
        next_.find(a, t, s, t.kv_head, s.begin);
        lookahead().finish();
    }
    static int64_t bytes(int64_t head_dim) {
        return kTileKeys * (2 * padded(head_dim) * (int64_t)sizeof(Out) + 3 * (int64_t)sizeof(float));
    }

    // Valid until the next call, which must be for what `then` says.
    const Entries<Out>& at(int head, int64_t begin, int then_head, int64_t then_begin) {
        const int count = entries_.count = next_.count;
        if (s_.keys->format == kNibbles) {
            for_each_run(a_, t_, s_, begin, count, [&](int64_t block, int64_t, int j, int n) {
                const Beside &scales = s_.keys->scales, &zeros = s_.keys->zeros;
                widen_nibble_channels(next_.keys + j, number_at<ScaleCode>(scales, head, block, 0), number_at<bf16>(zeros, head, block, 0), n,
                                      a_.pool.head_dim, keys_ + j * stride_);
            });
        } else {
            widen(*s_.keys, next_.keys, head, begin, key_scales_, keys_);
        }
        widen(*s_.values, next_.values, head, begin, value_scales_, values_);
        if (begin == 0 && first_ >= 0) put_first(head);
        for (int j = count; j % 4; j++) {
            memset(keys_ + j * stride_, 0, stride_ * sizeof(Out));
            memset(values_ + j * stride_, 0, stride_ * sizeof(Out));
        }
        next_.find(a_, t_, s_, then_head, then_begin);
        return entries_;
    }

    Lookahead lookahead() const { return Lookahead(next_, row_bytes(*s_.keys), row_bytes(*s_.values)); }
    Lookahead key_lookahead() const { return Lookahead(next_, row_bytes(*s_.keys), 0); }
    const float* key_scales() const { return scaled_apart(*s_.keys) ? key_scales_ : nullptr; }
    const float* value_scales() const { return scaled_apart(*s_.values) ? value_scales_ : nullptr; }

private:
    static bool is_plain(const PoolPart& part) { return part.format < kInt8; }
    static bool scaled_apart(const PoolPart& part) { return sizeof(Out) == sizeof(bf16) && scaled_by_row(part); }
    int64_t row_bytes(const PoolPart& part) const {
        return part.format == kNibbles ? a_.pool.head_dim / 2 : a_.pool.head_dim * bytes_of(part.format);
    }

    // Entries with a scale each, or none.
    void widen(const PoolPart& part, const uint8_t* const* rows, int head, int64_t begin, float* scales, Out* to) {
        const int count = entries_.count;
        const int64_t head_dim = a_.pool.head_dim;
        if (part.format == kNibbles) {
            gather<ScaleCode>(a_, t_, s_, part.scales, head, begin, count, scales);
            gather<bf16>(a_, t_, s_, part.zeros, head, begin, count, zeros_);
            return widen_nibble_rows(rows, scales, zeros_, count, head_dim, to);
        }
        if (!is_plain(part)) gather<bf16>(a_, t_, s_, part.scales, head, begin, count, scales);
        widen(part.format, rows, is_plain(part) || scaled_apart(part) ? nullptr : scales, count, to);
    }
    void widen(int format, const uint8_t* const* rows, const float* folded, int count, Out* to) {
        const int64_t head_dim = a_.pool.head_dim;
#if defined(__AVX512VBMI__)
        if constexpr (sizeof(Out) == sizeof(bf16)) {
            if (format == kE4M3 && head_dim % 64 == 0) return widen_floats<e4m3>(rows, count, head_dim, to);
            if (format == kE5M2 && head_dim % 64 == 0) return widen_floats<e5m2>(rows, count, head_dim, to);
        }
#endif
        switch (format) {
            case kF32: return widen_rows<float>(rows, nullptr, count, head_dim, to);
            case kBF16: return widen_rows<bf16>(rows, nullptr, count, head_dim, to);
            case kF16: return widen_rows<f16>(rows, nullptr, count, head_dim, to);
            case kInt8: return widen_rows<int8_t>(rows, folded, count, head_dim, to);
            case kE4M3: return widen_rows<e4m3>(rows, folded, count, head_dim, to);
            case kE5M2: return widen_rows<e5m2>(rows, folded, count, head_dim, to);
        }
    }

    // The sequence's first token in full, over what its codes mean.
    void put_first(int head) {
        const Firsts& firsts = a_.pool.staged.firsts;
        const Place key(firsts.keys, head), value(firsts.values, head);
        const uint8_t* rows[] = {(const uint8_t*)key.data + first_ * key.block_bytes, (const uint8_t*)value.data + first_ * value.block_bytes};
        widen(firsts.keys.format, rows, nullptr, 1, keys_);
        widen(firsts.values.format, rows + 1, nullptr, 1, values_);
        value_scales_[0] = 1.0f;  // read only where codes have one each
    }

    const AttentionArgs& a_;
    const Tile& t_;
    const Stretch& s_;
    const int64_t stride_;
    Out *keys_, *values_;
    float *key_scales_, *value_scales_, *zeros_;
    const int32_t first_;
    Entries<Out> entries_;
    Entries<uint8_t> next_;
};

}  // namespace
}  // namespace pagoda::PAGODA_ISA
