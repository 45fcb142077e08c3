// Decode attention on AMX over codes: up to four rows of each KV head, the heads of a tile one after the other.
//
//     scores [16 keys, rows]  = keys [16 keys, head_dim]  x  queries         keys as they lie are a left operand
//     out    [rows, head_dim] = probabilities [rows, 64 keys]  x  values     four neighbours' bytes side by side are a right one
//
// Codes are multiplied as bytes and summed exactly: a row of queries, and one of probabilities, is in 16-bit fixed point, its unit
// fitted to its largest number, high and low bytes apart. Scales of tokens go into scores and probabilities; scales of channels into
// the queries, once for each block; zeros are one number more for each score, or for all channels.
#pragma once

#include "amx_attention.h"
#include "amx_codes.h"

namespace pagoda::PAGODA_ISA {
namespace {

constexpr int kFew = 4;                             // rows of a KV head; a query's right operand has as many columns
constexpr int kFewRowBytes = kFew * 4;
constexpr int kScoreRow = kTileKeys + kTileSide;    // keys are scored 16 at a time, the last ones maybe beyond the end

// Registers: 0 and 1 are sums of keys (2) times high (3) and low (4) bytes of queries; 7 is probabilities (5) times values (6).
constexpr TileShapes few_tiles() {
    TileShapes shapes;
    shapes.row_bytes[0] = shapes.row_bytes[1] = shapes.row_bytes[3] = shapes.row_bytes[4] = kFewRowBytes;
    shapes.rows[5] = shapes.rows[7] = 2 * kFew;
    return shapes;
}
constexpr TileShapes kFewTiles = few_tiles();

struct FewScratch {
    float* q;          // [heads * rows, head_dim] scaled
    float* acc;        // [heads * rows, head_dim]
    float* top;        // [heads * rows]
    float* sum;        // [heads * rows]
    float* scores;     // [kFew, kScoreRow]
    float* units;      // [heads, kFew] of fixed queries
    uint8_t* queries;  // [heads, head_dim / 64, high | low, 16, kFew, 4]
    uint8_t* p;        // [high | low, kFew, 64 keys]
    uint8_t* values;   // [4, 16, 64] of 64 channels
    void* source;

    FewScratch(void* memory, int64_t head_dim)
        : q((float*)memory),
          acc(q + kTileRows * head_dim),
          top(acc + kTileRows * head_dim),
          sum(top + kTileRows),
          scores(sum + kTileRows),
          units(scores + kFew * kScoreRow),
          queries((uint8_t*)(units + kTileRows)),
          p(queries + kTileRows / kFew * query_bytes(head_dim)),
          values(p + 2 * kFew * kTileRowBytes),
          source(values + 4 * kTileSide * kTileRowBytes) {}
    static int64_t query_bytes(int64_t head_dim) { return head_dim * 2 * kFew; }
    static int64_t bytes(int64_t head_dim) {
        return (2 * kTileRows * head_dim + 3 * kTileRows + kFew * kScoreRow) * (int64_t)sizeof(float) + kTileRows / kFew * query_bytes(head_dim) +
               (2 * kFew + 4 * kTileSide) * kTileRowBytes + larger(CodeRows::bytes(head_dim), Widened<float>::bytes(head_dim));
    }
};

inline __m512i square_order() { return _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0); }
// In each of the four 128-bit parts, a transpose of 4 x 4 lanes.
inline void transpose4(__m512i r[4]) {
    const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
    const __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
    r[0] = _mm512_unpacklo_epi64(a, c);
    r[1] = _mm512_unpackhi_epi64(a, c);
    r[2] = _mm512_unpacklo_epi64(b, d);
    r[3] = _mm512_unpackhi_epi64(b, d);
}
// [16 keys, 4 rows] -> a vector of keys for each row
inline void rows_of(const void* sums, __m512i r[4]) {
    for (int i = 0; i < 4; i++) r[i] = _mm512_loadu_si512((const char*)sums + i * 64);
    transpose4(r);
    for (int i = 0; i < 4; i++) r[i] = _mm512_permutexvar_epi32(square_order(), r[i]);
}
// 64 bytes of each row -> a right operand [16, 4 rows, 4 bytes]
inline void right_operand(__m512i r[4], uint8_t* to) {
    for (int i = 0; i < 4; i++) r[i] = _mm512_permutexvar_epi32(square_order(), r[i]);
    transpose4(r);
    for (int i = 0; i < 4; i++) _mm512_storeu_si512(to + i * 64, r[i]);
}

inline __m512i low_bytes(const __m512i x[4]) {
    __m512i all = _mm512_castsi128_si512(_mm512_cvtepi32_epi8(x[0]));
    all = _mm512_inserti32x4(all, _mm512_cvtepi32_epi8(x[1]), 1);
    all = _mm512_inserti32x4(all, _mm512_cvtepi32_epi8(x[2]), 2);
    return _mm512_inserti32x4(all, _mm512_cvtepi32_epi8(x[3]), 3);
}
inline __m512i high_bytes(__m512i x[4]) {
    for (int i = 0; i < 4; i++) x[i] = _mm512_srli_epi32(x[i], 8);
    return low_bytes(x);
}

// Keys and values in codes.
class CodeTiles {
public:
    CodeTiles(const AttentionArgs& a, const Tile& t, const Stretch& stretch, const FewScratch& s)
        : a_(a), t_(t), stretch_(stretch), s_(s), rows_(t.row_end - t.row_begin), head_dim_(a.pool.head_dim), codes_(a, t, stretch, s.source),
          by_channel_(stretch.keys->format == kNibbles) {
        for (int h = 0; !by_channel_ && h < t.num_kv_heads; h++) fix_queries(h, nullptr, nullptr, s.queries + h * s.query_bytes(head_dim_), s.units + h * kFew, nullptr);
    }

    void fetch(int h, int64_t begin, int then_h, int64_t then_begin) {
        begin_ = begin;
        count_ = codes_.fetch(t_.kv_head + h, begin, t_.kv_head + then_h, then_begin);
    }

    void score(int h) {
        if (!by_channel_) {
            score_run(0, count_, s_.queries + h * s_.query_bytes(head_dim_), s_.units + h * kFew, nullptr);
            for (int64_t r = 0; r < rows_; r++) multiply(s_.scores + r * kScoreRow, codes_.key_scales, count_);
            return;
        }
        for_each_run(a_, t_, stretch_, begin_, count_, [&](int64_t block, int64_t, int j, int n) {
            float units[kFew], zeros[kFew];
            const int head = t_.kv_head + h;
            fix_queries(h, number_at<ScaleCode>(stretch_.keys->scales, head, block, 0), number_at<bf16>(stretch_.keys->zeros, head, block, 0),
                        s_.queries, units, zeros);
            score_run(j, n, s_.queries, units, zeros);
        });
    }

    void accumulate(float* acc) const {
        float units[kFew];
        for (int64_t r = 0; r < rows_; r++) units[r] = fix_probabilities(r, acc + r * head_dim_);
        for (int64_t d = 0; d < head_dim_; d += kCodeDepth) {
            alignas(64) int32_t out[4][2 * kFew][kTileSide];
            interleave(d);
            memory_is_written();
            _tile_loadd(5, s_.p, kTileRowBytes);
            for (int i = 0; i < 4; i++) {
                _tile_zero(7);
                _tile_loadd(6, s_.values + i * kTileSide * kTileRowBytes, kTileRowBytes);
                _tile_dpbusd(7, 5, 6);
                _tile_stored(7, out[i], kTileRowBytes);
            }
            for (int64_t r = 0; r < rows_; r++) {
                __m512i x[4];
                for (int i = 0; i < 4; i++) {
                    x[i] = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(out[i][r]), 8), _mm512_load_si512(out[i][kFew + r]));
                }
                const __m512i even = _mm512_shuffle_i32x4(x[0], x[1], 0x88), odd = _mm512_shuffle_i32x4(x[0], x[1], 0xdd);
                const __m512i even2 = _mm512_shuffle_i32x4(x[2], x[3], 0x88), odd2 = _mm512_shuffle_i32x4(x[2], x[3], 0xdd);
                const __m512i ordered[4] = {_mm512_shuffle_i32x4(even, even2, 0x88), _mm512_shuffle_i32x4(odd, odd2, 0x88),
                                            _mm512_shuffle_i32x4(even, even2, 0xdd), _mm512_shuffle_i32x4(odd, odd2, 0xdd)};
                for (int i = 0; i < 4; i++) {
                    float* to = acc + r * head_dim_ + d + i * kTileSide;
                    store(to, load(to) + (Vec)_mm512_cvtepi32_ps(ordered[i]) * units[r]);
                }
            }
        }
    }

private:
    // Of queries up to `largest` in 16 bits: off by at most 2^-15 of the largest.
    float unit_of(float largest) const {
        constexpr uint32_t kExponent = 0x7f800000, kTop = 14u << 23;  // bits below the top one, as an exponent
        const float scale = fabsf(query_scale(a_)), plain = scale > 0 ? largest / scale : 0.0f;
        uint32_t bits;
        memcpy(&bits, &plain, sizeof bits);
        bits &= kExponent;
        if (bits <= kTop) return 0.0f;  // so small that all scores are zero
        bits -= kTop;
        float power;
        memcpy(&power, &bits, sizeof power);
        return power * scale;
    }

    // A head's queries, times the scales of a block's channels, in fixed point; and times their zeros, summed.
    void fix_queries(int h, const ScaleCode* scales, const bf16* zeros, uint8_t* to, float* units, float* sums) const {
        float inverses[kFew];
        alignas(64) float q[kFew][256];
        for (int64_t r = 0; r < rows_; r++) {
            const float* row = s_.q + (h * rows_ + r) * head_dim_;
            Vec top = {}, nothing = {}, sum = {};
            for (int64_t d = 0; d < head_dim_; d += kTileSide) {
                Vec v = load(row + d);
                if (scales) {
                    sum += v * load(zeros + d);
                    v *= load(scales + d);
                }
                store(q[r] + d, v);
                nothing += v * 0.0f;
                top = max(top, magnitude(v));
            }
            const float largest = maximum(top);
            const float unit = unit_of(largest);
            units[r] = unit + PAGODA_ISA::sum(nothing);  // NaN, which scores inherit, if a number is not finite
            inverses[r] = unit > 0 ? 1.0f / unit : 0.0f;
            if (sums) sums[r] = PAGODA_ISA::sum(sum);
        }
        for (int64_t d = 0; d < head_dim_; d += kCodeDepth, to += 2 * kFew * kCodeDepth) {
            __m512i high[kFew] = {}, low[kFew] = {};
            for (int64_t r = 0; r < rows_; r++) {
                __m512i x[4];
                for (int i = 0; i < 4; i++) x[i] = _mm512_cvtps_epi32((__m512)min(load(q[r] + d + i * kTileSide) * inverses[r], splat(32767.0f)));
                low[r] = low_bytes(x);
                high[r] = high_bytes(x);
            }
            right_operand(high, to);
            right_operand(low, to + kFew * kCodeDepth);
        }
    }

    void score_run(int begin, int n, const uint8_t* queries, const float* units, const float* zeros) {
        for (int j = begin; j < begin + n; j += kTileSide) {
            alignas(64) int32_t high[kTileSide][kFew], low[kTileSide][kFew];
            codes_.prefetch_keys();
            memory_is_written();
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t d = 0; d < head_dim_; d += kCodeDepth) {
                const uint8_t* operand = queries + d * 2 * kFew;
                _tile_loadd(2, codes_.keys + j * head_dim_ + d, head_dim_);
                _tile_loadd(3, operand, kFewRowBytes);
                _tile_loadd(4, operand + kFew * kCodeDepth, kFewRowBytes);
                _tile_dpbssd(0, 2, 3);
                _tile_dpbsud(1, 2, 4);
            }
            _tile_stored(0, high, kFewRowBytes);
            _tile_stored(1, low, kFewRowBytes);
            __m512i h[4], l[4];
            rows_of(high, h);
            rows_of(low, l);
            for (int64_t r = 0; r < rows_; r++) {
                const Vec sums = (Vec)_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(h[r], 8), l[r])) * units[r];
                store(s_.scores + r * kScoreRow + j, zeros ? sums + zeros[r] : sums);
            }
        }
    }

    // Returns the unit of row `r`; the zeros' part goes to `acc` at once.
    float fix_probabilities(int64_t r, float* acc) const {
        constexpr float kLargest = 65535.0f;
        const float* p = s_.scores + r * kScoreRow;
        Vec weights[4], top = {}, nothing = {}, zeros = {};
        for (int i = 0; i < 4; i++) {
            const Vec v = load(p + i * kTileSide);
            weights[i] = v * load(codes_.value_scales + i * kTileSide);
            nothing += weights[i] * 0.0f;
            top = max(top, weights[i]);
            zeros += v * load(codes_.value_zeros + i * kTileSide);
        }
        if (stretch_.values->format == kNibbles) {
            const float all = sum(zeros);
            for (int64_t d = 0; d < head_dim_; d += kTileSide) store(acc + d, load(acc + d) + all);
        }
        const float largest = maximum(top), inverse = largest > 0 ? kLargest / largest : 0.0f;
        __m512i x[4];
        for (int i = 0; i < 4; i++) x[i] = _mm512_cvtps_epi32((__m512)(weights[i] * inverse));
        _mm512_storeu_si512(s_.p + (kFew + r) * kTileRowBytes, low_bytes(x));
        _mm512_storeu_si512(s_.p + r * kTileRowBytes, high_bytes(x));
        return largest / kLargest + sum(nothing);
    }

    // 64 channels from `d` on: four neighbouring keys' codes side by side, in tiles of 4 channels of each 16.
    void interleave(int64_t d) const {
        for (int quad = 0; quad < kTileKeys / 4; quad++) {
            if (d == 0) codes_.prefetch_values(quad);
            const int8_t* from = codes_.values + 4 * quad * head_dim_ + d;
            const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + head_dim_);
            const __m512i c = _mm512_loadu_si512(from + 2 * head_dim_), e = _mm512_loadu_si512(from + 3 * head_dim_);
            const __m512i ab = _mm512_unpacklo_epi8(a, b), ab2 = _mm512_unpackhi_epi8(a, b);
            const __m512i ce = _mm512_unpacklo_epi8(c, e), ce2 = _mm512_unpackhi_epi8(c, e);
            uint8_t* to = s_.values + quad * kTileRowBytes;
            _mm512_storeu_si512(to, _mm512_unpacklo_epi16(ab, ce));
            _mm512_storeu_si512(to + kTileSide * kTileRowBytes, _mm512_unpackhi_epi16(ab, ce));
            _mm512_storeu_si512(to + 2 * kTileSide * kTileRowBytes, _mm512_unpacklo_epi16(ab2, ce2));
            _mm512_storeu_si512(to + 3 * kTileSide * kTileRowBytes, _mm512_unpackhi_epi16(ab2, ce2));
        }
    }

    const AttentionArgs& a_;
    const Tile& t_;
    const Stretch& stretch_;
    const FewScratch& s_;
    const int64_t rows_, head_dim_;
    CodeRows codes_;
    const bool by_channel_;
    int64_t begin_ = 0;
    int count_ = 0;
};

// One stretch's part in what `s` accumulates.
inline void attend_few(const AttentionArgs& a, const Tile& t, const Stretch& stretch, const FewScratch& s) {
    const int64_t head_dim = a.pool.head_dim, rows = t.row_end - t.row_begin;
    CodeTiles tiles(a, t, stretch, s);
    for (int64_t begin = stretch.begin; begin < stretch.end; begin += kTileKeys) {
        const int64_t end = smaller(begin + kTileKeys, stretch.end);
        for (int h = 0; h < t.num_kv_heads; h++) {
            const bool last = h + 1 == t.num_kv_heads;
            tiles.fetch(h, begin, last ? 0 : h + 1, last ? end : begin);
            tiles.score(h);
            float* acc = s.acc + h * rows * head_dim;
            for (int64_t r = 0; r < rows; r++) {
                float* scores = s.scores + r * kScoreRow;
                soft_cap(a, scores, kTileKeys);
                mask(scores, seen(a, t, stretch, t.row_begin + r, begin, end), kTileKeys);
                softmax_step(scores, kTileKeys, s.top[h * rows + r], s.sum[h * rows + r], acc + r * head_dim, head_dim);
            }
            tiles.accumulate(acc);
        }
    }
}

inline void few_rows_attention(const AttentionArgs& a, const Tile& t, void* memory) {
    const int64_t head_dim = a.pool.head_dim, rows = t.row_end - t.row_begin, all_rows = t.num_kv_heads * rows;
    const FewScratch s(memory, head_dim);
    const TileConfig configured(kFewTiles);
    for (int h = 0; h < t.num_kv_heads; h++) load_queries<bf16>(a, t, t.kv_head + h, t.row_begin, rows, s.q + h * rows * head_dim);
    memset(s.p, 0, 2 * kFew * kTileRowBytes);
    memset(s.acc, 0, all_rows * head_dim * sizeof(float));
    for (int64_t r = 0; r < all_rows; r++) {
        s.top[r] = -INFINITY;
        s.sum[r] = 0;
    }
    for (const Stretch& stretch : stretches(a, t)) {
        if (in_codes(*stretch.keys) && in_codes(*stretch.values)) {
            attend_few(a, t, stretch, s);
        } else {
            const Scratch plain(s.q, s.acc, s.scores, s.top, s.sum, s.source);
            with_source<bf16>(stretch, [&]<typename Source>() { attend<Source>(a, t, stretch, plain); });
        }
    }
    for (int64_t r = 0; r < all_rows; r++) {
        finish_row<bf16>(a, t, (int)(r / rows), r % rows, s.acc + r * head_dim, s.top[r], s.sum[r]);
    }
}

int64_t tile_scratch_bytes(int64_t head_dim) { return larger(amx_scratch_bytes(head_dim), FewScratch::bytes(head_dim)); }

// One row of INT8 is faster with float32 vectors: there is no second one to share what was made of its values.
void attention_on_tiles(const AttentionArgs& a, const Tile& t, void* memory) {
    const int64_t rows = t.row_end - t.row_begin;
    const bool codes = in_codes(a.pool.keys) && in_codes(a.pool.values) && a.pool.head_dim % kCodeDepth == 0;
    const bool few = rows <= kFew && (rows > 1 || a.pool.values.format == kNibbles);
    return codes && few ? few_rows_attention(a, t, memory) : amx_attention(a, t, memory);
}

}  // namespace
}  // namespace pagoda::PAGODA_ISA
