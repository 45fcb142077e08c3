// Kernels that touch each value once or twice: norms, SwiGLU, rotary embedding, writing KV.
#pragma once

#include "kv_codes.h"

namespace pagoda::PAGODA_ISA {
namespace {

template <typename T>
void rms_norm(const NormArgs& a, int64_t row_begin, int64_t row_end) {
    const T* weight = (const T*)a.weight;
    for (int64_t row = row_begin; row < row_end; row++) {
        for (int64_t head = 0; head < a.heads; head++) {
            const T* x = (const T*)a.x + row * a.x_row_stride + head * a.x_head_stride;
            T* out = (T*)a.out + (row * a.heads + head) * a.dim;
            if (a.residual) {
                const T* residual = (const T*)a.residual + row * a.residual_row_stride;
                T* total = (T*)a.new_residual + row * a.dim;
                for_each_vector(a.dim, [&](int64_t i, int64_t lanes) {
                    store_lanes(total + i, load_lanes(x + i, lanes) + load_lanes(residual + i, lanes), lanes);
                });
                x = total;
            }
            Vec squares = {};
            for_each_vector(a.dim, [&](int64_t i, int64_t lanes) {
                const Vec v = load_lanes(x + i, lanes);
                squares += v * v;
            });
            const float scale = 1.0f / sqrtf(sum(squares) / (float)a.dim + a.eps);
            for_each_vector(a.dim, [&](int64_t i, int64_t lanes) {
                store_lanes(out + i, load_lanes(x + i, lanes) * scale * load_lanes(weight + i, lanes), lanes);
            });
        }
    }
}

// g * sigmoid(slope(g)) * up: with slope(g) = g it is SiLU, and GELU's tanh form is a sigmoid of twice tanh's argument.
template <typename T, typename Slope>
void gated_product(const GatedArgs& a, int64_t row_begin, int64_t row_end, Slope slope) {
    for (int64_t row = row_begin; row < row_end; row++) {
        const T* gate = (const T*)a.gate_up + row * a.row_stride;
        const T* up = gate + a.inter;
        T* out = (T*)a.out + row * a.inter;
        for_each_vector(a.inter, [&](int64_t i, int64_t lanes) {
            const Vec g = load_lanes(gate + i, lanes);
            store_lanes(out + i, g / (1.0f + exp(-slope(g))) * load_lanes(up + i, lanes), lanes);
        });
    }
}

template <typename T>
void silu_mul(const GatedArgs& a, int64_t row_begin, int64_t row_end) {
    gated_product<T>(a, row_begin, row_end, [](Vec g) { return g; });
}

template <typename T>
void gelu_mul(const GatedArgs& a, int64_t row_begin, int64_t row_end) {
    constexpr float kTwiceRoot2OverPi = 1.5957691216f;
    gated_product<T>(a, row_begin, row_end, [](Vec g) { return kTwiceRoot2OverPi * (g + 0.044715f * g * g * g); });
}

inline int64_t index_of(const Beside& beside, int64_t block, int head) {
    return block * beside.block_stride + head * beside.head_stride;
}

inline char* place_of(const PoolPart& part, int64_t block, int64_t slot, int head) {
    return (char*)part.data + (block * part.block_stride + head * part.head_stride + slot * part.slot_stride) * bytes_of(part.format);
}

template <typename T, typename To>
inline void convert(const T* from, int64_t n, To* to) {
    for_each_vector(n, [&](int64_t i, int64_t lanes) { store_lanes(to + i, load_lanes(from + i, lanes), lanes); });
}

// Stores one head of a token as the part keeps it.
template <typename T>
inline void put_entry(const PoolPart& part, int64_t head_dim, int64_t block, int64_t slot, int head, const T* from) {
    char* to = place_of(part, block, slot, head);
    if (part.format == format_of<T>) {
        memcpy(to, from, head_dim * sizeof(T));
        return;
    }
    const int64_t scale = index_of(part.scales, block, head) + slot;
    switch (part.format) {
        case kF32: return convert(from, head_dim, (float*)to);
        case kBF16: return convert(from, head_dim, (bf16*)to);
        case kF16: return convert(from, head_dim, (f16*)to);
        case kInt8: return encode_row(from, head_dim, (int8_t*)to, (bf16*)part.scales.data + scale);
        case kE4M3: return encode_row(from, head_dim, (e4m3*)to, (bf16*)part.scales.data + scale);
        case kE5M2: return encode_row(from, head_dim, (e5m2*)to, (bf16*)part.scales.data + scale);
        case kNibbles:
            return encode_nibble_row(from, head_dim, (uint8_t*)to, (ScaleCode*)part.scales.data + scale,
                                     (bf16*)part.zeros.data + index_of(part.zeros, block, head) + slot);
    }
}

// The same of a key.
template <typename T>
inline void put_key(const PoolPart& part, int64_t head_dim, int64_t block, int64_t slot, int head, const T* from) {
    if (!scaled_by_row(part)) return put_entry(part, head_dim, block, slot, head, from);
    alignas(64) float mixed[kMaxHeadDim];
    for_each_vector(head_dim, [&](int64_t i, int64_t lanes) { store(mixed + i, load_lanes(from + i, lanes)); });
    mix(mixed, head_dim);
    put_entry(part, head_dim, block, slot, head, mixed);
}

// The parts that rows are written to, and where a row's block is in them.
struct Target {
    const PoolPart &keys, &values;
    const int32_t* slot_of;
    int64_t block_size;

    explicit Target(const Pool& pool)
        : keys(pool.staged.slot_of ? pool.staged.keys : pool.keys),
          values(pool.staged.slot_of ? pool.staged.values : pool.values),
          slot_of(pool.staged.slot_of),
          block_size(pool.block_size) {}
    int64_t block(int64_t slot) const {
        const int64_t id = slot / block_size;
        return slot_of ? slot_of[id] : id;
    }
};

template <typename T>
void write_kv(const WriteArgs& a, int64_t row_begin, int64_t row_end) {
    const Target to(a.pool);
    const int64_t head_dim = a.pool.head_dim;
    for (int64_t row = row_begin; row < row_end; row++) {
        const int64_t block = to.block(a.slots[row]), slot = a.slots[row] % to.block_size;
        for (int head = 0; head < a.pool.num_kv_heads; head++) {
            put_key(to.keys, head_dim, block, slot, head, (const T*)a.k + row * a.k_row_stride + head * a.k_head_stride);
            put_entry(to.values, head_dim, block, slot, head, (const T*)a.v + row * a.v_row_stride + head * a.v_head_stride);
        }
    }
}

// Quantizes the staged blocks whose last slot is among the rows.
template <typename T>
void close_blocks(const WriteArgs& a, int64_t row_begin, int64_t row_end) {
    const Pool& pool = a.pool;
    const Staged& staged = pool.staged;
    const Beside &scales = pool.keys.scales, &zeros = pool.keys.zeros;
    for (int64_t row = row_begin; row < row_end; row++) {
        if (a.slots[row] % pool.block_size != pool.block_size - 1) continue;
        const int64_t block = a.slots[row] / pool.block_size, at = staged.slot_of[block];
        const int first = staged.firsts.row_of[block] >= 0 && pool.block_size > 1;  // a first token would stretch all scales of its block
        for (int head = 0; head < pool.num_kv_heads; head++) {
            const T* k = (const T*)staged.keys.data + at * staged.keys.block_stride + head * staged.keys.head_stride;
            const T* v = (const T*)staged.values.data + at * staged.values.block_stride + head * staged.values.head_stride;
            encode_nibble_channels(k, staged.keys.slot_stride, first, pool.block_size, pool.head_dim,
                                   (uint8_t*)pool.keys.data + block * pool.keys.block_stride + head * pool.keys.head_stride,
                                   pool.keys.slot_stride, (ScaleCode*)scales.data + index_of(scales, block, head),
                                   (bf16*)zeros.data + index_of(zeros, block, head));
            for (int slot = 0; slot < pool.block_size; slot++) {
                put_entry(pool.values, pool.head_dim, block, slot, head, v + slot * staged.values.slot_stride);
            }
        }
    }
}

// `to` may be `from`.
template <typename T>
inline void rotate(const T* from, T* to, const float* cos, const float* sin, int64_t half) {
    for_each_vector(half, [&](int64_t i, int64_t lanes) {
        const Vec c = load_lanes(cos + i, lanes), s = load_lanes(sin + i, lanes);
        const Vec first = load_lanes(from + i, lanes), second = load_lanes(from + half + i, lanes);
        store_lanes(to + i, first * c - second * s, lanes);
        store_lanes(to + half + i, second * c + first * s, lanes);
    });
}

template <typename T>
void rope_write_kv(const RopeArgs& a, int64_t row_begin, int64_t row_end) {
    const WriteArgs& w = a.write;
    const Target to(w.pool);
    const int64_t head_dim = w.pool.head_dim, half = head_dim / 2;
    alignas(64) T rotated[kMaxHeadDim];
    for (int64_t row = row_begin; row < row_end; row++) {
        const float* cos = a.cos + a.positions[row] * a.cos_row_stride;
        const float* sin = a.sin + a.positions[row] * a.sin_row_stride;
        for (int head = 0; head < a.num_heads; head++) {
            T* q = (T*)a.q + row * a.q_row_stride + head * a.q_head_stride;
            rotate(q, q, cos, sin, half);
        }
        const int64_t block = to.block(w.slots[row]), slot = w.slots[row] % to.block_size;
        for (int head = 0; head < w.pool.num_kv_heads; head++) {
            const T* k = (const T*)w.k + row * w.k_row_stride + head * w.k_head_stride;
            if (to.keys.format == format_of<T>) {
                rotate(k, (T*)place_of(to.keys, block, slot, head), cos, sin, half);
            } else {
                rotate(k, rotated, cos, sin, half);
                put_key(to.keys, head_dim, block, slot, head, rotated);
            }
            put_entry(to.values, head_dim, block, slot, head, (const T*)w.v + row * w.v_row_stride + head * w.v_head_stride);
        }
    }
}

// T is what the pool holds.
template <typename T>
void turn_kv(const TurnArgs& a, int64_t row_begin, int64_t row_end) {
    const Pool& pool = a.pool;
    const int64_t size = pool.block_size, half = pool.head_dim / 2;
    for (int64_t row = row_begin; row < row_end; row++) {
        const int64_t source = a.sources[row], target = a.targets[row];
        auto from = [&](const PoolPart& part, int head) { return (const T*)place_of(part, source / size, source % size, head); };
        auto to = [&](const PoolPart& part, int head) { return (T*)place_of(part, target / size, target % size, head); };
        for (int head = 0; head < pool.num_kv_heads; head++) {
            rotate(from(pool.keys, head), to(pool.keys, head), a.cos + row * half, a.sin + row * half, half);
            memcpy(to(pool.values, head), from(pool.values, head), pool.head_dim * sizeof(T));
        }
    }
}

}  // namespace
}  // namespace pagoda::PAGODA_ISA
