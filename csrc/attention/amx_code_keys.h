// Scores of few rows against keys in codes, on AMX:
//
//     scores [16 keys, kFew rows] = keys [16 keys, head_dim]  x  queries [head_dim, kFew rows]
//
// Keys are a left operand as they lie (of four bits: once each has a byte). Queries are in 16-bit fixed point, high and low bytes apart,
// and the sums are exact. Where a block's channels have scales, queries are multiplied with them for each block, in integers:
//
//     a query      = m * 2^-f * u      m has 16 bits; f >= 0 belongs to the channel, u to the row: m is as large as it can be
//     a scale      = s * 2^e           s has 4 bits
//     their product = (m * s >> shift) * u * 2^t,   t the largest e - f of the block, shift what e - f is less than that
//
// so no product needs to be looked at to know that all fit, and the largest keep 13 bits and more. Zeros of channels are a sum of their
// own for each block, of BF16 products.
#pragma once

#include "attention/amx_codes.h"
#include "attention/tile.h"

namespace pagoda::PAGODA_ISA {
namespace {

constexpr int kFewRowBytes = kFew * 4;             // of a right operand, and of scores
constexpr int kFewOperand = kCodeDepth * kFew;     // bytes of a right operand of 64 channels
constexpr int kScoreRow = kStepKeys + kTileSide;   // keys are scored 16 at a time, the last ones maybe beyond the end

// What queries of a head become. `columns` of them are the head's, the others are zero: heads that share an operand's columns add up.
struct FewQueries {
    int16_t* numbers;  // m: [head_dim / 16, 2, 4 quads of channels, 2 rows, 4 channels]
    int16_t* shifts;   // f: [head_dim], plus kShiftBase
    uint8_t* fixed;    // m without scales: [head_dim / 64][high | low][16 quads, kFew rows, 4 channels]
    bf16* plain;       // as they came: [head_dim / 32][16 pairs, kFew rows, 2]
    float* units;      // [kFew] u
    static int64_t bytes(int64_t head_dim) { return head_dim * (3 * 2 * kFew + 2) + 64; }
    FewQueries(uint8_t* memory, int64_t head_dim)
        : numbers((int16_t*)memory),
          shifts(numbers + head_dim * kFew),
          fixed((uint8_t*)(shifts + head_dim)),
          plain((bf16*)(fixed + 2 * head_dim * kFew)),
          units((float*)(plain + head_dim * kFew)) {}
};

class CodeKeys {
public:
    static int64_t bytes(int64_t head_dim) {
        const int64_t of_head = head_dim * (2 * kFew + kTileSide * (1 + (int64_t)sizeof(bf16)));  // folded queries, codes and zeros
        return kTileRows / kFew * FewQueries::bytes(head_dim) + kFew * of_head + kTileSide * kFewRowBytes;
    }

    // `q` are the tile's queries as `load_queries` has them. Heads come in groups that share columns, `together` of them.
    CodeKeys(const AttentionArgs& a, const Tile& t, const Stretch& s, const float* q, int together, void* memory)
        : a_(a), t_(t), s_(s), head_dim_(a.pool.head_dim), rows_(t.row_end - t.row_begin), by_channel_(s.keys->format == kNibbles),
          queries_((uint8_t*)memory), folded_(queries_ + kTileRows / kFew * FewQueries::bytes(head_dim_)),
          codes_(folded_ + kFew * 2 * kFew * head_dim_),
          zeros_((bf16*)(codes_ + kFew * kTileSide * head_dim_)), zero_sums_((float(*)[kFew])(zeros_ + kFew * kTileSide * head_dim_)) {
        for (int h = 0; h < t.num_kv_heads; h++) prepare(h, h % together * rows_, q + h * rows_ * head_dim_);
    }

    // Scores [columns, kScoreRow] of the heads [head, head + heads) of the tile: those of a head's rows are next to each other.
    void score(int head, int heads, const Step& step, Ahead& ahead, float* scores) const {
        int in_zeros = 0;  // runs whose zeros are summed
        const Run* first = step.begin();
        for (const Run* run = step.begin(); run < step.end(); run++) {
            if (by_channel_ && run - first == in_zeros) {
                first = run;
                in_zeros = sum_zeros(head, heads, run, step.end());
            }
            float units[kFew];
            for (int h = 0; h < heads; h++) {
                const FewQueries q = queries(head + h);
                const ScaleCode* scales = number_at<ScaleCode>(s_.keys->scales, t_.kv_head + head + h, run->block, 0);
                const float unit = by_channel_ ? fold(q, scales, folded(h)) : 1.0f;
                for (int64_t r = 0; r < rows_; r++) units[h * rows_ + r] = unit * q.units[r];
            }
            for (int j = 0; j < run->n; j += kTileSide) {
                ahead.during(kScoreWork * heads);
                score_keys(head, heads, *run, j, units, by_channel_ ? zero_sums_[run - first] : nullptr, scores + run->first + j);
            }
        }
    }

private:
    static constexpr int kShiftBase = 40;
    static constexpr float kLeastQuery = 1e-30f;  // below that all scores are zero

    FewQueries queries(int head) const { return FewQueries(queries_ + head * FewQueries::bytes(head_dim_), head_dim_); }
    uint8_t* folded(int h) const { return folded_ + h * 2 * kFew * head_dim_; }

    void prepare(int head, int64_t column, const float* q) const {
        const FewQueries to = queries(head);
        float factors[kFew] = {};
        Vec spread[kMaxHeadDim / kTileSide] = {};  // of each channel, the largest number of all rows in units of u
        for (int64_t r = 0; r < rows_; r++) {
            Vec top = {}, nothing = {};
            for (int64_t d = 0; d < head_dim_; d += kTileSide) {
                top = max(top, magnitude(load(q + r * head_dim_ + d)));
                nothing += load(q + r * head_dim_ + d) * 0.0f;
            }
            const float largest = maximum(top);
            factors[r] = largest > kLeastQuery ? 32767.0f / largest : 0.0f;
            to.units[r] = largest / 32767.0f + sum(nothing);  // NaN, which scores inherit, if a number is not finite
            for (int64_t d = 0; d < head_dim_; d += kTileSide) {
                Vec& most = spread[d / kTileSide];
                most = max(most, magnitude(load(q + r * head_dim_ + d)) * factors[r]);
            }
        }
        memset(to.numbers, 0, head_dim_ * kFew * sizeof(int16_t));
        for (int64_t d = 0; d < head_dim_; d += kTileSide) {
            // Doublings that keep the number below 2^15.
            constexpr int kExponent15 = 127 + 14, kMostShift = 31;
            IntVec shift = kExponent15 - (IntVec)((BitVec)spread[d / kTileSide] >> 23);
            shift = by_channel_ ? (shift > kMostShift ? IntVec{} + kMostShift : shift < 0 ? IntVec{} : shift) : IntVec{};
            _mm256_storeu_si256((__m256i*)(to.shifts + d), _mm512_cvtepi32_epi16((__m512i)(shift + kShiftBase)));
            const Vec doubled = (Vec)((shift + 127) << 23);
            for (int64_t r = 0; r < rows_; r++) {
                const __m256i x = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32((__m512)(load(q + r * head_dim_ + d) * factors[r] * doubled)));
                alignas(32) int64_t quads[4];
                _mm256_store_si256((__m256i*)quads, x);
                const int64_t c = column + r;
                for (int i = 0; i < 4; i++) memcpy(to.numbers + d * kFew + ((c / 2 * 4 + i) * 2 + c % 2) * 4, quads + i, 8);
            }
        }
        if (!by_channel_) {
            for (int64_t d = 0; d < head_dim_; d += kTileSide) {
                split(_mm512_loadu_si512(to.numbers + d * kFew), _mm512_loadu_si512(to.numbers + d * kFew + 32), d, to.fixed);
            }
            return;
        }
        for (int64_t d = 0; d < head_dim_; d += kTileDepth) {
            __m512i r[kFew] = {};
            for (int64_t i = 0; i < rows_; i++) {
                const bf16* from = query_at<bf16>(a_, t_, t_.kv_head + head, t_.row_begin + i);
                r[column + i] = _mm512_permutexvar_epi32(square_order(), _mm512_loadu_si512(from + d));
            }
            transpose4(r);
            for (int i = 0; i < kFew; i++) _mm512_storeu_si512(to.plain + d * kFew + i * 32, r[i]);
        }
    }

    // Sixteen channels' numbers, of rows 0 and 1 and of rows 2 and 3, as bytes to where right operands have them.
    static void split(__m512i first, __m512i second, int64_t d, uint8_t* to) {
        to += d / kCodeDepth * 2 * kFewOperand + d % kCodeDepth * kFew;
        const __m512i low = _mm512_set1_epi16(0xff);
        _mm512_storeu_si512(to, _mm512_packs_epi16(_mm512_srai_epi16(first, 8), _mm512_srai_epi16(second, 8)));
        _mm512_storeu_si512(to + kFewOperand, _mm512_packus_epi16(_mm512_and_si512(first, low), _mm512_and_si512(second, low)));
    }

    // A head's queries times a block's scales, as right operands. Returns 2^t.
    float fold(const FewQueries& q, const ScaleCode* scales, uint8_t* to) const {
        const __m512i mantissa = _mm512_set1_epi16(7), hidden = _mm512_set1_epi16(8), one = _mm512_set1_epi16(1);
        __m512i numbers[8], less[8], least = _mm512_set1_epi16(0x7fff);
        const int parts = (int)head_dim_ / 32;
        for (int i = 0; i < parts; i++) {
            const __m512i code = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(scales + 32 * i)));
            const __m512i exponent = _mm512_max_epi16(_mm512_srli_epi16(code, 3), one);  // subnormal: no hidden bit, and that of 1
            less[i] = _mm512_sub_epi16(_mm512_loadu_si512(q.shifts + 32 * i), exponent);
            least = _mm512_min_epi16(least, less[i]);
            numbers[i] = _mm512_slli_epi16(_mm512_min_epi16(_mm512_or_si512(_mm512_and_si512(code, mantissa), hidden), code), 12);
        }
        const __m256i half = _mm256_min_epi16(_mm512_castsi512_si256(least), _mm512_extracti64x4_epi64(least, 1));
        const __m128i found = _mm_minpos_epu16(_mm_min_epi16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
        const __m512i base = _mm512_sub_epi16(_mm512_broadcastw_epi16(found), one);
        const __m512i first_quads = _mm512_set_epi64(3, 3, 2, 2, 1, 1, 0, 0), last_quads = _mm512_set_epi64(7, 7, 6, 6, 5, 5, 4, 4);
        for (int i = 0; i < parts; i++) {
            const __m512i scale = _mm512_srlv_epi16(numbers[i], _mm512_sub_epi16(less[i], base));
            for (int side = 0; side < 2; side++) {
                const int64_t d = 32 * i + 16 * side;
                const __m512i by = _mm512_permutexvar_epi64(side ? last_quads : first_quads, scale);
                const int16_t* from = q.numbers + d * kFew;
                split(_mm512_mulhrs_epi16(_mm512_loadu_si512(from), by), _mm512_mulhrs_epi16(_mm512_loadu_si512(from + 32), by), d, to);
            }
        }
        // A scale code means s * 2^(e - 18), and the numbers here are s * 2^(11 - shift), and 15 bits fell off.
        const uint32_t bits = (uint32_t)(127 + kShiftBase - 14 - (_mm_cvtsi128_si32(found) & 0xffff)) << 23;
        float unit;
        memcpy(&unit, &bits, sizeof unit);
        return unit;
    }

    // Products of queries and the zeros of up to 16 runs, to `zero_sums_`. Returns how many.
    int sum_zeros(int head, int heads, const Run* run, const Run* end) const {
        const int n = (int)smaller<int64_t>(kTileSide, end - run);
        for (int h = 0; h < heads; h++) {
            for (int i = 0; i < n; i++) {
                const bf16* from = number_at<bf16>(s_.keys->zeros, t_.kv_head + head + h, run[i].block, 0);
                bf16* to = zeros_ + (h * kTileSide + i) * head_dim_;
                for (int64_t d = 0; d < head_dim_; d += 32) _mm512_storeu_si512(to + d, _mm512_loadu_si512(from + d));
            }
        }
        memory_is_written();
        _tile_zero(0);
        for (int h = 0; h < heads; h++) {
            const FewQueries q = queries(head + h);
            for (int64_t d = 0; d < head_dim_; d += kTileDepth) {
                _tile_loadd(2, zeros_ + h * kTileSide * head_dim_ + d, head_dim_ * (int64_t)sizeof(bf16));
                _tile_loadd(3, q.plain + d * kFew, kFewRowBytes);
                _tile_dpbf16ps(0, 2, 3);
            }
        }
        _tile_stored(0, zero_sums_, kFewRowBytes);
        const Vec scale = splat(query_scale(a_));
        for (int i = 0; i < kFew; i++) store(zero_sums_[0] + i * kTileSide, load(zero_sums_[0] + i * kTileSide) * scale);
        return n;
    }

    // Sixteen keys of a run from `j` on, or what is left of it.
    void score_keys(int head, int heads, const Run& run, int j, const float* units, const float* zeros, float* scores) const {
        const int n = smaller(kTileSide, run.n - j);
        const Run at = {run.block, run.slot + j, 0, n};
        alignas(64) int32_t high[kTileSide][kFew], low[kTileSide][kFew];
        const uint8_t* keys[kFew];
        int64_t stride = head_dim_;
        for (int h = 0; h < heads; h++) {
            const uint8_t* from = codes_at(*s_.keys, t_.kv_head + head + h, at);
            uint8_t* to = codes_ + h * kTileSide * head_dim_;
            keys[h] = to;
            if (by_channel_) {
                for (int i = 0; i < n; i++) spread(from + i * s_.keys->slot_stride, to + i * head_dim_);
            } else if (n == kTileSide) {
                keys[h] = from;
                stride = s_.keys->slot_stride;
            } else {
                for (int i = 0; i < n; i++) memcpy(to + i * head_dim_, from + i * s_.keys->slot_stride, head_dim_);
            }
        }
        memory_is_written();
        _tile_zero(0);
        _tile_zero(1);
        for (int h = 0; h < heads; h++) {
            const uint8_t* q = by_channel_ ? folded(h) : queries(head + h).fixed;
            for (int64_t d = 0; d < head_dim_; d += kCodeDepth, q += 2 * kFewOperand) {
                _tile_loadd(2, keys[h] + d, stride);
                _tile_loadd(3, q, kFewRowBytes);
                _tile_dpbssd(0, 2, 3);
                _tile_loadd(3, q + kFewOperand, kFewRowBytes);
                _tile_dpbsud(1, 2, 3);
            }
        }
        _tile_stored(0, high, kFewRowBytes);
        _tile_stored(1, low, kFewRowBytes);
        __m512i sums[kFew];
        for (int i = 0; i < kFew; i++) {
            sums[i] = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(high[4 * i]), 8), _mm512_load_si512(low[4 * i]));
        }
        transpose4(sums);
        for (int h = 0; h < heads; h++) {
            Vec scale = splat(1.0f);
            if (!by_channel_) scale = load_lanes(number_at<bf16>(s_.keys->scales, t_.kv_head + head + h, at.block, at.slot), n);
            for (int64_t c = h * rows_; c < (h + 1) * rows_; c++) {
                const Vec products = (Vec)_mm512_cvtepi32_ps(_mm512_permutexvar_epi32(square_order(), sums[c])) * units[c];
                store(scores + c * kScoreRow, by_channel_ ? products + zeros[c] : products * scale);
            }
        }
    }

    // Codes of four bits become bytes: the first half of the channels is in the low ones.
    void spread(const uint8_t* from, uint8_t* to) const {
        const int64_t half = head_dim_ / 2;
        const __m512i low = _mm512_set1_epi8(15);
        if (half == 32) {
            const __m512i both = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)from)), by = _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0);
            _mm512_storeu_si512(to, _mm512_and_si512(_mm512_srlv_epi64(both, by), low));
            return;
        }
        for (int64_t i = 0; i < half; i += 32) {
            const __m256i both = _mm256_loadu_si256((const __m256i*)(from + i));
            _mm256_storeu_si256((__m256i*)(to + i), _mm256_and_si256(both, _mm512_castsi512_si256(low)));
            _mm256_storeu_si256((__m256i*)(to + half + i), _mm256_and_si256(_mm256_srli_epi16(both, 4), _mm512_castsi512_si256(low)));
        }
    }

    const AttentionArgs& a_;
    const Tile& t_;
    const Stretch& s_;
    const int64_t head_dim_, rows_;
    const bool by_channel_;
    uint8_t *const queries_, *const folded_, *const codes_;
    bf16* const zeros_;
    float (*const zero_sums_)[kFew];
};

}  // namespace
}  // namespace pagoda::PAGODA_ISA
