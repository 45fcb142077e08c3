// Kernels that touch each value once or twice: norms, SwiGLU, rotary embedding, writing KV.
#pragma once

#include "vec.h"

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

// Where the pool keeps a slot's entry of one head.
template <typename T>
inline T* entry(const Pool& pool, const PoolPart& part, int64_t slot, int64_t head) {
    return (T*)part.data + slot / pool.block_size * part.block_stride + head * part.head_stride +
           slot % pool.block_size * part.slot_stride;
}

template <typename T>
void write_kv(const WriteArgs& a, int64_t row_begin, int64_t row_end) {
    const int64_t bytes = a.pool.head_dim * sizeof(T);
    for (int64_t row = row_begin; row < row_end; row++) {
        for (int head = 0; head < a.pool.num_kv_heads; head++) {
            memcpy(entry<T>(a.pool, a.pool.keys, a.slots[row], head),
                   (const T*)a.k + row * a.k_row_stride + head * a.k_head_stride, bytes);
            memcpy(entry<T>(a.pool, a.pool.values, a.slots[row], head),
                   (const T*)a.v + row * a.v_row_stride + head * a.v_head_stride, bytes);
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
    const int64_t head_dim = w.pool.head_dim, half = head_dim / 2;
    for (int64_t row = row_begin; row < row_end; row++) {
        const float* cos = a.cos + a.positions[row] * a.cos_row_stride;
        const float* sin = a.sin + a.positions[row] * a.sin_row_stride;
        for (int head = 0; head < a.num_heads; head++) {
            T* q = (T*)a.q + row * a.q_row_stride + head * a.q_head_stride;
            rotate(q, q, cos, sin, half);
        }
        for (int head = 0; head < w.pool.num_kv_heads; head++) {
            const T* k = (const T*)w.k + row * w.k_row_stride + head * w.k_head_stride;
            rotate(k, entry<T>(w.pool, w.pool.keys, w.slots[row], head), cos, sin, half);
            memcpy(entry<T>(w.pool, w.pool.values, w.slots[row], head),
                   (const T*)w.v + row * w.v_row_stride + head * w.v_head_stride, head_dim * sizeof(T));
        }
    }
}

}  // namespace
}  // namespace pagoda::PAGODA_ISA
