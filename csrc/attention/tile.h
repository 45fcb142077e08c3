// One tile of attention with float32 vectors: any element type, any head_dim that is a multiple of 8.
//
//     keys (in the pool, found through pointers)          rows of the tile, widened to float32
//     k0 ───────  k1 ───────  k2 ───────  k3 ───────  x   q0 ─────── q1 ─────── q2 ───────  ->  scores [rows, kTileKeys]
//
// Softmax is computed online (Milakov and Gimelshein, arXiv:1805.02867; FlashAttention, arXiv:2205.14135): each row keeps
// the largest score so far, the sum of exponentials relative to it, and the output accumulated relative to it. Scores
// are in units of log2, so that one multiplication by `scale * log2(e)` serves the exponentials too.
#pragma once

#include "attention/widened.h"

namespace pagoda::PAGODA_ISA {
namespace {

constexpr float kLn2 = 0.693147181f;
constexpr int kRowsAtOnce = kWidth == 16 ? 4 : 2;  // accumulators must fit the registers: rows x 4 vectors

struct Scratch {
    float* q;       // [kTileRows, padded head_dim]
    float* acc;     // [kTileRows, padded head_dim]
    float* scores;  // [kTileRows, kTileKeys]
    float* top;     // [kTileRows] largest score so far
    float* sum;     // [kTileRows]
    void* widened;  // what Widened keeps, or the less that Int8InPlace does

    Scratch(float* q, float* acc, float* scores, float* top, float* sum, void* widened)
        : q(q), acc(acc), scores(scores), top(top), sum(sum), widened(widened) {}
    Scratch(void* memory, int64_t head_dim)
        : q((float*)memory),
          acc(q + kTileRows * padded(head_dim)),
          scores(acc + kTileRows * padded(head_dim)),
          top(scores + kTileRows * kTileKeys),
          sum(top + kTileRows),
          widened(sum + kTileRows) {}
    static int64_t bytes(int64_t head_dim) {
        return (2 * kTileRows * padded(head_dim) + kTileRows * (kTileKeys + 2)) * (int64_t)sizeof(float) +
               Widened<float>::bytes(head_dim);
    }
};

template <int kRows, typename T>
PAGODA_INLINE void score_step(Vec (&acc)[kRows][4], const float* q, int64_t stride, const T* const* keys, int64_t i,
                              int64_t lanes) {
    Vec k[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) k[j] = load_lanes(keys[j] + i, lanes);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
        const Vec qr = load(q + r * stride + i);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) acc[r][j] += qr * k[j];
    }
}

// Four entries against kRows rows.
template <int kRows, typename T>
inline void score_block(const float* q, int64_t head_dim, const T* const* keys, float* scores) {
    const int64_t stride = padded(head_dim);
    Vec acc[kRows][4] = {};
    int64_t i = 0;
    for (; i + kWidth <= head_dim; i += kWidth) score_step<kRows>(acc, q, stride, keys, i, kWidth);
    if (i < head_dim) score_step<kRows>(acc, q, stride, keys, i, head_dim - i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) sum4(acc[r], scores + r * kTileKeys);
}

// What is after the last of `count` is undefined then, up to the end of its vector.
inline void multiply(float* numbers, const float* by, int count) {
    for (int j = 0; j < count; j += kWidth) store(numbers + j, load(numbers + j) * load(by + j));
}

template <typename T, typename Source>
inline void score(const float* q, int64_t head_dim, const Entries<T>& entries, const Source& source, int64_t rows, Lookahead& ahead,
                  float* scores) {
    for (int j = 0; j < entries.count; j += 4) {
        ahead.part(4, 2 * kTileKeys);  // the other half while values are summed
        const T* const* keys = entries.keys + j;
        for (int64_t r = 0; r < rows; r += kRowsAtOnce) {
            const float* qr = q + r * padded(head_dim);
            float* to = scores + r * kTileKeys + j;
            switch (smaller<int64_t>(kRowsAtOnce, rows - r)) {
                case 1: score_block<1>(qr, head_dim, keys, to); break;
                case 2: score_block<2>(qr, head_dim, keys, to); break;
                case 3: score_block<3>(qr, head_dim, keys, to); break;
                default: score_block<4>(qr, head_dim, keys, to);
            }
        }
    }
    for (int64_t r = 0; source.key_scales() && r < rows; r++) multiply(scores + r * kTileKeys, source.key_scales(), entries.count);
}

// Queries are scaled when they are loaded, into log2 units at once unless a softcap has to see the plain scores.
inline float query_scale(const AttentionArgs& a) { return a.softcap > 0 ? a.scale : a.scale * kLog2E; }

inline void soft_cap(const AttentionArgs& a, float* scores, int count) {
    if (a.softcap <= 0) return;
    for (int j = 0; j < count; j += kWidth) {
        store(scores + j, tanh(load(scores + j) / a.softcap) * (a.softcap * kLog2E));
    }
}

// Everything outside [first, last) becomes -inf, up to the end of the last vector.
inline int mask(float* scores, Seen s, int count) {
    const int end = (count + kWidth - 1) / kWidth * kWidth;
    for (int j = 0; j < s.first; j++) scores[j] = -INFINITY;
    for (int j = s.last; j < end; j++) scores[j] = -INFINITY;
    return end;
}

// acc[rows, kVecs vectors] += probabilities[rows, count] x values
template <int kRows, int kVecs, typename T>
inline void accumulate_block(const float* p, const T* const* values, int count, int64_t offset, int64_t stride,
                             Lookahead& ahead, float* acc) {
    Vec sums[kRows][kVecs];
    for (int r = 0; r < kRows; r++) {
        for (int i = 0; i < kVecs; i++) sums[r][i] = load(acc + r * stride + i * kWidth);
    }
    for (int j = 0; j < count; j++) {
        if (j % 4 == 0) ahead.part(4 * kVecs * kWidth, 2 * kTileKeys * stride);
        Vec v[kVecs];
        for (int i = 0; i < kVecs; i++) v[i] = load(values[j] + offset + i * kWidth);
        for (int r = 0; r < kRows; r++) {
            for (int i = 0; i < kVecs; i++) sums[r][i] += p[r * kTileKeys + j] * v[i];
        }
    }
    for (int r = 0; r < kRows; r++) {
        for (int i = 0; i < kVecs; i++) store(acc + r * stride + i * kWidth, sums[r][i]);
    }
}

template <int kRows, typename T>
inline void accumulate_rows(const float* p, const Entries<T>& entries, int64_t head_dim, Lookahead& ahead, float* acc) {
    const int64_t stride = padded(head_dim);
    int64_t i = 0;
    for (; i + 4 * kWidth <= head_dim; i += 4 * kWidth) {
        accumulate_block<kRows, 4>(p, entries.values, entries.count, i, stride, ahead, acc + i);
    }
    for (; i + kWidth <= head_dim; i += kWidth) {
        accumulate_block<kRows, 1>(p, entries.values, entries.count, i, stride, ahead, acc + i);
    }
    if (i == head_dim) return;
    for (int r = 0; r < kRows; r++) {
        Vec total = load(acc + r * stride + i);
        for (int j = 0; j < entries.count; j++) {
            total += p[r * kTileKeys + j] * load_part(entries.values[j] + i, head_dim - i);
        }
        store(acc + r * stride + i, total);
    }
}

template <typename T>
inline void accumulate(const float* p, const Entries<T>& entries, int64_t head_dim, int64_t rows, Lookahead& ahead, float* acc) {
    for (int64_t r = 0; r < rows; r += kRowsAtOnce) {
        const float* pr = p + r * kTileKeys;
        float* to = acc + r * padded(head_dim);
        switch (smaller<int64_t>(kRowsAtOnce, rows - r)) {
            case 1: accumulate_rows<1>(pr, entries, head_dim, ahead, to); break;
            case 2: accumulate_rows<2>(pr, entries, head_dim, ahead, to); break;
            case 3: accumulate_rows<3>(pr, entries, head_dim, ahead, to); break;
            default: accumulate_rows<4>(pr, entries, head_dim, ahead, to);
        }
    }
}

// Scores of one row become exponentials relative to its largest score; what was accumulated is rescaled to match.
inline void softmax_step(float* scores, int count, float& top, float& total, float* acc, int64_t head_dim) {
    Vec best = load(scores);
    for (int j = kWidth; j < count; j += kWidth) best = max(best, load(scores + j));
    const float new_top = larger(top, maximum(best));
    if (new_top == -INFINITY) {  // this row sees none of these keys, nor any before
        for (int j = 0; j < count; j += kWidth) store(scores + j, Vec{});
        return;
    }
    if (new_top > top) {
        const float rescale = exp2f(top - new_top);
        total *= rescale;
        for (int64_t i = 0; i < padded(head_dim); i += kWidth) store(acc + i, load(acc + i) * rescale);
        top = new_top;
    }
    Vec sums = {};
    for (int j = 0; j < count; j += kWidth) {
        const Vec p = exp2(load(scores + j) - new_top);
        store(scores + j, p);
        sums += p;
    }
    total += sum(sums);
}

// The query of a row of a KV head, which has as many for each token as there are heads for it.
template <typename T>
inline const T* query_at(const AttentionArgs& a, const Tile& t, int kv_head, int64_t row) {
    const int64_t group = a.num_heads / a.pool.num_kv_heads;
    return (const T*)a.q + (t.first_token_row + row / group) * a.q_row_stride + (kv_head * group + row % group) * a.q_head_stride;
}

template <typename T>
inline void load_queries(const AttentionArgs& a, const Tile& t, int kv_head, int64_t row_begin, int64_t rows, float* q) {
    const int64_t head_dim = a.pool.head_dim;
    const bool mixed = scaled_by_row(a.pool.keys);  // then queries are too: their products with keys stay what they were
    const float scale = query_scale(a) / (float)(mixed ? mix_order(head_dim) : 1);
    for (int64_t r = 0; r < rows; r++) {
        const T* from = query_at<T>(a, t, kv_head, row_begin + r);
        for_each_vector(head_dim, [&](int64_t i, int64_t lanes) {
            store(q + r * padded(head_dim) + i, load_lanes(from + i, lanes) * scale);
        });
        if (mixed) mix(q + r * padded(head_dim), head_dim);
    }
}

// Where row `r` of the tile's head `h` goes: the caller's output, or a part of a split context.
template <typename T>
inline void finish_row(const AttentionArgs& a, const Tile& t, int h, int64_t r, const float* acc, float top, float total) {
    const int64_t head_dim = a.pool.head_dim;
    const float inverse = total > 0 ? 1.0f / total : 0.0f;
    const float lse = total > 0 ? top * kLn2 + logf(total) : -INFINITY;
    if (t.partial_out) {
        const int64_t to = h * (t.row_end - t.row_begin) + r;
        for (int64_t i = 0; i < head_dim; i++) t.partial_out[to * head_dim + i] = acc[i] * inverse;
        t.partial_lse[to] = lse;
        return;
    }
    const int64_t to = output_of(a, t.first_token_row, t.kv_head + h, t.row_begin + r);
    T* out = (T*)a.out + to * head_dim;
    for_each_vector(head_dim, [&](int64_t i, int64_t lanes) { store_lanes(out + i, load(acc + i) * inverse, lanes); });
    a.lse[to] = lse;
}

// All rows before they have seen anything, and after they have seen all; `acc` is [rows, padded head_dim].
inline void start_rows(int64_t rows, int64_t head_dim, float* acc, float* top, float* sum) {
    memset(acc, 0, rows * padded(head_dim) * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        top[r] = -INFINITY;
        sum[r] = 0;
    }
}
template <typename T>
inline void finish_rows(const AttentionArgs& a, const Tile& t, const float* acc, const float* top, const float* sum) {
    const int64_t rows = t.row_end - t.row_begin, stride = padded(a.pool.head_dim);
    for (int64_t r = 0; r < t.num_kv_heads * rows; r++) finish_row<T>(a, t, (int)(r / rows), r % rows, acc + r * stride, top[r], sum[r]);
}

// One stretch's part in what `s` accumulates.
template <typename Source>
inline void attend(const AttentionArgs& a, const Tile& t, const Stretch& stretch, const Scratch& s) {
    const int64_t head_dim = a.pool.head_dim, rows = t.row_end - t.row_begin;
    Source source(a, t, stretch, s.widened);
    for (int64_t begin = stretch.begin, end; begin < stretch.end; begin = end) {
        end = tile_end(begin, stretch.end);
        for (int h = 0; h < t.num_kv_heads; h++) {
            const bool last = h + 1 == t.num_kv_heads;
            const auto& entries = source.at(t.kv_head + h, begin, t.kv_head + (last ? 0 : h + 1), last ? end : begin);
            float* acc = s.acc + h * rows * padded(head_dim);
            Lookahead ahead = source.lookahead();
            score(s.q + h * rows * padded(head_dim), head_dim, entries, source, rows, ahead, s.scores);
            for (int64_t r = 0; r < rows; r++) {
                float* scores = s.scores + r * kTileKeys;
                soft_cap(a, scores, entries.count);
                const int count = mask(scores, seen(a, t, stretch, t.row_begin + r, begin, end), entries.count);
                softmax_step(scores, count, s.top[h * rows + r], s.sum[h * rows + r], acc + r * padded(head_dim), head_dim);
                if (source.value_scales()) multiply(scores, source.value_scales(), entries.count);
            }
            accumulate(s.scores, entries, head_dim, rows, ahead, acc);
            ahead.finish();
        }
    }
}

// Calls body<Source>() with how a stretch is best read by rows of T.
template <typename T, typename Body>
inline void with_source(const Stretch& s, Body body) {
    if (lies_as<T>(s)) return body.template operator()<InPlace<T>>();
    if (lies_as<int8_t>(s)) return body.template operator()<Int8InPlace>();
    return body.template operator()<Widened<float>>();
}

// The same for matrix tiles, which take BF16 alone.
template <typename Body>
inline void with_tile_source(const Stretch& s, Body body) {
    if (lies_as<bf16>(s)) return body.template operator()<InPlace<bf16>>();
    return body.template operator()<Widened<bf16>>();
}

template <typename T>
void attention(const AttentionArgs& a, const Tile& t, void* memory) {
    const int64_t head_dim = a.pool.head_dim, rows = t.row_end - t.row_begin;
    const Scratch s(memory, head_dim);
    for (int h = 0; h < t.num_kv_heads; h++) {
        load_queries<T>(a, t, t.kv_head + h, t.row_begin, rows, s.q + h * rows * padded(head_dim));
    }
    start_rows(t.num_kv_heads * rows, head_dim, s.acc, s.top, s.sum);
    for (const Stretch& stretch : stretches(a, t)) {
        with_source<T>(stretch, [&]<typename Source>() { attend<Source>(a, t, stretch, s); });
    }
    finish_rows<T>(a, t, s.acc, s.top, s.sum);
}

template <typename T, typename Source>
inline void add_mass(const AttentionArgs& a, const MassTile& m, const Stretch& stretch, const Scratch& s, int64_t row, int64_t rows) {
    const Tile& t = m.tile;
    Source source(a, t, stretch, s.widened);
    for (int64_t begin = stretch.begin, end; begin < stretch.end; begin = end) {
        end = tile_end(begin, stretch.end);
        const auto& entries = source.at(t.kv_head, begin, t.kv_head, end);
        Lookahead ahead = source.key_lookahead();
        score(s.q, a.pool.head_dim, entries, source, rows, ahead, s.scores);
        ahead.finish();
        float* mass = m.mass + (begin - t.key_begin);
        for (int64_t r = 0; r < rows; r++) {
            float* scores = s.scores + r * kTileKeys;
            soft_cap(a, scores, entries.count);
            const Seen visible = seen(a, t, stretch, row + r, begin, end);
            if (visible.first >= visible.last) continue;
            mask(scores, visible, entries.count);
            const float lse = a.lse[output_of(a, t.first_token_row, t.kv_head, row + r)] * kLog2E;
            for_each_vector(end - begin, [&](int64_t j, int64_t lanes) {
                store_lanes(mass + j, load_lanes(mass + j, lanes) + exp2(load(scores + j) - lse), lanes);
            });
        }
    }
}

// A second pass over the keys, once the denominators are known; `a.lse` holds them.
template <typename T>
void attention_mass(const AttentionArgs& a, const MassTile& m, void* memory) {
    const Tile& t = m.tile;
    const Scratch s(memory, a.pool.head_dim);
    for (int64_t row = t.row_begin; row < t.row_end; row += kTileRows) {
        const int64_t rows = smaller<int64_t>(kTileRows, t.row_end - row);
        load_queries<T>(a, t, t.kv_head, row, rows, s.q);
        for (const Stretch& stretch : stretches(a, t)) {
            with_source<T>(stretch, [&]<typename Source>() { add_mass<T, Source>(a, m, stretch, s, row, rows); });
        }
    }
}

}  // namespace
}  // namespace pagoda::PAGODA_ISA
