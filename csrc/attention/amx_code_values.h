// Probabilities of few rows times values in codes, on AMX:
//
//     out [high | low rows, 16 channels] = probabilities [high | low of kFew rows, 64 keys]  x  values [16 quads of keys, 16 channels, 4]
//
// Probabilities, times the scales of their entries, are in 16-bit fixed point: what is 1 at most needs no search for a unit. Values are
// laid out as a right operand 32 channels at a time. Of codes of four bits that is a byte as it lies, which is low + 16 * high, and the
// byte without its low half, so that both come out of sums that are exact. Zeros become one number for all channels.
#pragma once

#include "attention/amx_codes.h"
#include "attention/tile.h"

namespace pagoda::PAGODA_ISA {
namespace {

constexpr int kFewWeights = 2 * kFew * kCodeKeys;  // bytes of a left operand of probabilities

// Of a row: what has been accumulated is multiplied with `keep`, and integers are with `unit` before they are added.
struct FewTotals {
    float keep[kFew], unit[kFew];
};

class CodeValues {
public:
    static int64_t bytes() {
        return kStepKeys / kCodeKeys * kFewWeights + 2 * kTileSide * kTileRowBytes + 2 * kFew * kStepKeys * (int64_t)sizeof(float) +
               (kStepKeys + kTileSide) * (int64_t)sizeof(uint8_t*);
    }

    CodeValues(const AttentionArgs& a, const Tile& t, const Stretch& s, void* memory)
        : a_(a), t_(t), s_(s), head_dim_(a.pool.head_dim), rows_(t.row_end - t.row_begin), nibbles_(s.values->format == kNibbles),
          weights_((uint8_t*)memory), operands_(weights_ + kStepKeys / kCodeKeys * kFewWeights),
          scales_((float*)(operands_ + 2 * kTileSide * kTileRowBytes)), zeros_(scales_ + kFew * kStepKeys),
          entries_((const uint8_t**)(zeros_ + kFew * kStepKeys)) {
        memset(weights_, 0, kStepKeys / kCodeKeys * kFewWeights);
    }

    // The scales and zeros of a step's entries, of the heads [head, head + heads) of the tile.
    void start(int head, int heads, const Step& step) {
        for (int h = 0; h < heads; h++) {
            float *scales = scales_ + h * kStepKeys, *zeros = zeros_ + h * kStepKeys;
            const int kv_head = t_.kv_head + head + h;
            if (nibbles_) {
                gather<ScaleCode>(step, s_.values->scales, kv_head, scales);
                gather<bf16>(step, s_.values->zeros, kv_head, zeros);
            } else {
                gather<bf16>(step, s_.values->scales, kv_head, scales);
            }
            const int end = (step.count + kCodeKeys - 1) / kCodeKeys * kCodeKeys;
            for (int j = step.count; j < end; j++) scales[j] = zeros[j] = 0.0f;
            Vec top = {}, nothing = {};
            for (int j = 0; j < end; j += kTileSide) {
                top = max(top, load(scales + j));
                nothing += load(scales + j) * 0.0f;
            }
            const float largest = maximum(top), inverse = largest > 0 ? kMost / largest : 0.0f;
            for (int j = 0; j < end; j += kTileSide) store(scales + j, load(scales + j) * inverse);
            units_[h] = largest / kMost + sum(nothing);
        }
    }

    // Weights of a step's first entry, of so many heads that were started, are zero.
    void leave_out_first(int heads) {
        for (int h = 0; h < heads; h++) scales_[h * kStepKeys] = zeros_[h * kStepKeys] = 0.0f;
    }

    // Scores [count] of column `c`, in log2 relative to `top`, become weights. Adds exponentials to `sums`, and times zeros to `zero_sums`.
    // Returns the unit of what `accumulate` will sum.
    float weigh(int c, int count, float top, const float* scores, Ahead& ahead, Vec& sums, Vec& zero_sums) {
        const int h = c / (int)rows_;
        const float *scales = scales_ + h * kStepKeys, *zeros = zeros_ + h * kStepKeys;
        Vec total = {}, of_zeros = {};
        for (int j = 0; j < count; j += kCodeKeys) {
            ahead.during(kWeighWork);
            __m512i x[4];
            for (int i = 0; i < 4; i++) {
                const int at = j + i * kTileSide;
                const Vec p = exp2(load(scores + at) - top);
                total += p;
                if (nibbles_) of_zeros += p * load(zeros + at);
                x[i] = _mm512_cvtps_epi32((__m512)(p * load(scales + at)));
            }
            // In the order of `row_of_quad`.
            const __m512i first = _mm512_packus_epi32(x[0], x[1]), last = _mm512_packus_epi32(x[2], x[3]), low = _mm512_set1_epi16(0xff);
            uint8_t* to = weights_ + j / kCodeKeys * kFewWeights + c * kCodeKeys;
            _mm512_storeu_si512(to, _mm512_packus_epi16(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(last, 8)));
            _mm512_storeu_si512(to + kFew * kCodeKeys, _mm512_packus_epi16(_mm512_and_si512(first, low), _mm512_and_si512(last, low)));
        }
        sums = total;
        zero_sums = of_zeros;
        return units_[h];
    }

    // Adds weights x values of head `h` of those that were started to its rows of `acc` [rows, head_dim].
    void accumulate(int head, int h, const Step& step, Ahead& ahead, const FewTotals& totals, float* acc) {
        list(t_.kv_head + head + h, step);
        const int64_t channels = nibbles_ ? kTileSide : 2 * kTileSide;  // bytes of 32 channels
        for (int64_t d = 0; d < head_dim_; d += 2 * kTileSide) {
            alignas(64) int32_t out[2][2 * kFew][kTileSide];
            _tile_zero(6);
            _tile_zero(7);
            const int64_t offset = d / (2 * kTileSide) * channels;
            for (int j = 0; j < step.count; j += kCodeKeys) {
                if (nibbles_) {
                    lay_nibbles(j, step.count, offset, ahead);
                } else {
                    lay_bytes(j, step.count, offset, ahead);
                }
                memory_is_written();
                _tile_loadd(4, weights_ + j / kCodeKeys * kFewWeights, kCodeKeys);
                _tile_loadd(5, operands_, kTileRowBytes);
                if (nibbles_) {
                    _tile_dpbuud(6, 4, 5);
                    _tile_loadd(5, operands_ + kTileSide * kTileRowBytes, kTileRowBytes);
                    _tile_dpbuud(7, 4, 5);
                } else {
                    _tile_dpbusd(6, 4, 5);
                    _tile_loadd(5, operands_ + kTileSide * kTileRowBytes, kTileRowBytes);
                    _tile_dpbusd(7, 4, 5);
                }
            }
            _tile_stored(6, out[0], kTileRowBytes);
            _tile_stored(7, out[1], kTileRowBytes);
            const int64_t first = nibbles_ ? d / 2 : d, second = nibbles_ ? (head_dim_ + d) / 2 : d + kTileSide;
            for (int64_t r = 0; r < rows_; r++) {
                const int64_t c = h * rows_ + r;
                __m512i x[2];
                for (int i = 0; i < 2; i++) {
                    x[i] = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(out[i][c]), 8), _mm512_load_si512(out[i][kFew + c]));
                }
                if (nibbles_) {
                    x[0] = _mm512_sub_epi32(x[0], x[1]);
                    x[1] = _mm512_srli_epi32(x[1], 4);
                }
                float* to = acc + r * head_dim_;
                store(to + first, load(to + first) * totals.keep[c] + (Vec)_mm512_cvtepi32_ps(x[0]) * totals.unit[c]);
                store(to + second, load(to + second) * totals.keep[c] + (Vec)_mm512_cvtepi32_ps(x[1]) * totals.unit[c]);
            }
        }
    }

private:
    static constexpr float kMost = 65535.0f;

    template <typename Number>
    static void gather(const Step& step, const Beside& from, int kv_head, float* to) {
        for (const Run& run : step) {
            const Number* numbers = number_at<Number>(from, kv_head, run.block, run.slot);
            for_each_vector(run.n, [&](int64_t i, int64_t lanes) { store_lanes(to + run.first + i, load_lanes(numbers + i, lanes), lanes); });
        }
    }

    // Where the entries' values are; those after the last, up to a multiple of four, are the last again.
    void list(int kv_head, const Step& step) {
        const int64_t stride = s_.values->slot_stride;
        const __m512i eight = _mm512_set1_epi64(8 * stride);
        const __m512i first = _mm512_set_epi64(7 * stride, 6 * stride, 5 * stride, 4 * stride, 3 * stride, 2 * stride, stride, 0);
        for (const Run& run : step) {
            __m512i at = _mm512_add_epi64(_mm512_set1_epi64((int64_t)codes_at(*s_.values, kv_head, run)), first);
            for (int j = 0; j < run.n; j += 8, at = _mm512_add_epi64(at, eight)) _mm512_storeu_si512(entries_ + run.first + j, at);
        }
        for (int j = step.count; j % 4; j++) entries_[j] = entries_[step.count - 1];
    }

    // The row of a right operand that has the quad of keys `q`.
    static int row_of_quad(int q) { return q % 4 * 4 + q / 4; }

    // Calls body(quad, entries) for the quads of the keys from `j` on.
    template <typename Body>
    PAGODA_INLINE void each_quad(int j, int count, Ahead& ahead, Body body) const {
        for (int q = 0; q < kCodeKeys / 4 && j + 4 * q < count; q++) {
            if (q % 2 == 0) ahead.during(kLayWork);
            body(operands_ + row_of_quad(q) * kTileRowBytes, entries_ + j + 4 * q);
        }
    }

    void lay_nibbles(int j, int count, int64_t offset, Ahead& ahead) const {
        alignas(64) static const uint8_t kOrder[64] = {
            0, 16, 32, 48, 1, 17, 33, 49, 2,  18, 34, 50, 3,  19, 35, 51, 4,  20, 36, 52, 5,  21, 37, 53, 6,  22, 38, 54, 7,  23, 39, 55,
            8, 24, 40, 56, 9, 25, 41, 57, 10, 26, 42, 58, 11, 27, 43, 59, 12, 28, 44, 60, 13, 29, 45, 61, 14, 30, 46, 62, 15, 31, 47, 63};
        const __m512i order = _mm512_load_si512(kOrder), high = _mm512_set1_epi8((char)0xf0);
        each_quad(j, count, ahead, [&](uint8_t* to, const uint8_t* const* entries) __attribute__((always_inline)) {
            auto part = [&](int i) { return _mm_loadu_si128((const __m128i*)(entries[i] + offset)); };
            __m512i x = _mm512_castsi128_si512(part(0));
            x = _mm512_inserti32x4(x, part(1), 1);
            x = _mm512_inserti32x4(x, part(2), 2);
            x = _mm512_inserti32x4(x, part(3), 3);
            x = _mm512_permutexvar_epi8(order, x);
            _mm512_store_si512(to, x);
            _mm512_store_si512(to + kTileSide * kTileRowBytes, _mm512_and_si512(x, high));
        });
    }

    void lay_bytes(int j, int count, int64_t offset, Ahead& ahead) const {
        alignas(64) static const uint8_t kOrder[64] = {
            0, 32, 1, 33, 2,  34, 3,  35, 16, 48, 17, 49, 18, 50, 19, 51, 4,  36, 5,  37, 6,  38, 7,  39, 20, 52, 21, 53, 22, 54, 23, 55,
            8, 40, 9, 41, 10, 42, 11, 43, 24, 56, 25, 57, 26, 58, 27, 59, 12, 44, 13, 45, 14, 46, 15, 47, 28, 60, 29, 61, 30, 62, 31, 63};
        const __m512i order = _mm512_load_si512(kOrder);
        each_quad(j, count, ahead, [&](uint8_t* to, const uint8_t* const* entries) __attribute__((always_inline)) {
            auto part = [&](int i) { return _mm256_loadu_si256((const __m256i*)(entries[i] + offset)); };
            const __m512i a = _mm512_permutexvar_epi8(order, _mm512_inserti64x4(_mm512_castsi256_si512(part(0)), part(1), 1));
            const __m512i b = _mm512_permutexvar_epi8(order, _mm512_inserti64x4(_mm512_castsi256_si512(part(2)), part(3), 1));
            _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
            _mm512_store_si512(to + kTileSide * kTileRowBytes, _mm512_unpackhi_epi16(a, b));
        });
    }

    const AttentionArgs& a_;
    const Tile& t_;
    const Stretch& s_;
    const int64_t head_dim_, rows_;
    const bool nibbles_;
    uint8_t *const weights_, *const operands_;
    float *const scales_, *const zeros_;
    const uint8_t** const entries_;
    float units_[kFew];
};

}  // namespace
}  // namespace pagoda::PAGODA_ISA
