// y = x W^T + bias for BF16 rows and a W of BF16, compact or not, or of INT8 codes. For few rows the time is that of reading W once, so W streams
// and x stays in cache.
//
// With AMX the tiles of amx_linear.h do it. Elsewhere, and for what does not fill tiles (a compact W always does), W and x are widened
// to float32 vectors.
#pragma once

#include "vec.h"
#if defined(__AMX_BF16__)
#include "linear/amx_linear.h"
#endif

namespace pagoda::PAGODA_ISA {
namespace {

constexpr int kOutsAtOnce = 4;

inline void put(const LinearArgs& a, int64_t row, int64_t out, float value) {
    if (a.weight.scales) value *= a.weight.scales[out];
    if (a.bias) value += scalar(((const bf16*)a.bias)[out]);
    bf16 lanes[kWidth];
    store(lanes, splat(value));
    ((bf16*)a.out)[row * a.num_out + out] = lanes[0];
}

template <int kRows, typename W>
PAGODA_INLINE void dot_step(Vec (&acc)[kRows][kOutsAtOnce], const bf16* x, int64_t stride, const W* const* w, int64_t i,
                            int64_t lanes) {
    Vec wide[kOutsAtOnce];
#pragma GCC unroll 4
    for (int o = 0; o < kOutsAtOnce; o++) wide[o] = load_lanes(w[o] + i, lanes);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++) {
        const Vec xr = load_lanes(x + r * stride + i, lanes);
#pragma GCC unroll 4
        for (int o = 0; o < kOutsAtOnce; o++) acc[r][o] += xr * wide[o];
    }
}

// kOutsAtOnce outputs of kRows rows.
template <int kRows, typename W>
inline void dot_block(const LinearArgs& a, int64_t row, int64_t out) {
    const bf16* x = (const bf16*)a.x + row * a.x_row_stride;
    const W* w[kOutsAtOnce];
    for (int o = 0; o < kOutsAtOnce; o++) {
        // Past the last output the last one is computed again, and not stored.
        w[o] = (const W*)a.weight.values + smaller(out + o, a.num_out - 1) * a.weight_row_stride;
    }
    Vec acc[kRows][kOutsAtOnce] = {};
    int64_t i = 0;
    for (; i + kWidth <= a.num_in; i += kWidth) dot_step<kRows>(acc, x, a.x_row_stride, w, i, kWidth);
    if (i < a.num_in) dot_step<kRows>(acc, x, a.x_row_stride, w, i, a.num_in - i);
    for (int r = 0; r < kRows; r++) {
        float sums[kOutsAtOnce];
        sum4(acc[r], sums);
        for (int o = 0; o < kOutsAtOnce && out + o < a.num_out; o++) put(a, row + r, out + o, sums[o]);
    }
}

template <typename W>
inline void linear_vectors(const LinearArgs& a, int64_t out_begin, int64_t out_end) {
    for (int64_t out = out_begin; out < out_end; out += kOutsAtOnce) {
        int64_t row = 0;
        for (; row + 4 <= a.rows; row += 4) dot_block<4, W>(a, row, out);
        if (a.rows & 2) {
            dot_block<2, W>(a, row, out);
            row += 2;
        }
        if (a.rows & 1) dot_block<1, W>(a, row, out);
    }
}

inline void linear_vectors(const LinearArgs& a, int64_t out_begin, int64_t out_end) {
    if (a.weight.scales) return linear_vectors<int8_t>(a, out_begin, out_end);
    linear_vectors<bf16>(a, out_begin, out_end);
}

#if defined(__AMX_BF16__)

constexpr int64_t kLongestCodeRow = 1 << 16;  // the sum of more products with a low byte might not fit 32 bits

inline bool fills_tiles(const LinearArgs& a) {
    if (a.num_out % kTileSide != 0) return false;
    return a.weight.scales ? a.num_in % kCodeDepth == 0 && a.num_in <= kLongestCodeRow : a.num_in % kTileDepth == 0;
}

inline int64_t padded_rows(const LinearArgs& a) { return (a.rows + kTileSide - 1) / kTileSide * kTileSide; }
inline float* units_of(const LinearArgs& a, const void* packed_x) {
    return (float*)((bf16*)packed_x + padded_rows(a) * a.num_in);
}

int64_t linear_scratch_bytes(const LinearArgs& a) {
    return fills_tiles(a) ? padded_rows(a) * (a.num_in * (int64_t)sizeof(bf16) + (int64_t)sizeof(float)) : 0;
}

void linear_pack(const LinearArgs& a, void* packed_x, int64_t block) {
    if (!fills_tiles(a)) return;
    const int64_t row = block * kTileSide;
    bf16* to = (bf16*)packed_x + row * a.num_in;
    pack_right_operand((const bf16*)a.x + row * a.x_row_stride, a.x_row_stride,
                       (int)smaller<int64_t>(kTileSide, a.rows - row), a.num_in, to);
    if (a.weight.scales) fix_block(to, a.num_in, units_of(a, packed_x) + row);
}

void linear(const LinearArgs& a, const void* packed_x, int64_t out_begin, int64_t out_end, void* expanded) {
    if (!fills_tiles(a)) return linear_vectors(a, out_begin, out_end);
    const TileLinearArgs tiles = {(const bf16*)packed_x, units_of(a, packed_x), a.weight, (const bf16*)a.bias, a.out,
                                  a.weight_row_stride, a.rows, a.num_in, a.num_out, Sink::kRows};
    const int64_t rows_at_once = rows_at_once_of(a.num_in);
    for (int64_t row = 0; row < a.rows; row += rows_at_once) {
        tile_linear<>(tiles, out_begin, out_end, row, smaller(row + rows_at_once, a.rows), expanded);
    }
}

#else

int64_t linear_scratch_bytes(const LinearArgs&) { return 0; }
void linear_pack(const LinearArgs&, void*, int64_t) {}
void linear(const LinearArgs& a, const void*, int64_t out_begin, int64_t out_end, void*) { linear_vectors(a, out_begin, out_end); }

#endif

}  // namespace
}  // namespace pagoda::PAGODA_ISA
