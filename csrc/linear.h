// y = x W^T + bias for a few BF16 rows: the time is that of reading W once, so W streams and x stays in cache.
//
// With AMX the tiles of amx_linear.h do it. Elsewhere, and for what does not fill tiles, W and x are widened to float32
// vectors.
#pragma once

#include "vec.h"
#if defined(__AMX_BF16__)
#include "amx_linear.h"
#endif

namespace pagoda::PAGODA_ISA {
namespace {

constexpr int kOutsAtOnce = 4;

inline float scalar(bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline void put(const LinearArgs& a, int64_t row, int64_t out, float value) {
    if (a.bias) value += scalar(((const bf16*)a.bias)[out]);
    bf16 lanes[kWidth];
    store(lanes, splat(value));
    ((bf16*)a.out)[row * a.num_out + out] = lanes[0];
}

template <int kRows>
PAGODA_INLINE void dot_step(Vec (&acc)[kRows][kOutsAtOnce], const bf16* x, int64_t stride, const bf16* const* w, int64_t i,
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
template <int kRows>
inline void dot_block(const LinearArgs& a, int64_t row, int64_t out) {
    const bf16* x = (const bf16*)a.x + row * a.x_row_stride;
    const bf16* w[kOutsAtOnce];
    for (int o = 0; o < kOutsAtOnce; o++) {
        // Past the last output the last one is computed again, and not stored.
        w[o] = (const bf16*)a.weight + smaller(out + o, a.num_out - 1) * a.weight_row_stride;
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

inline void linear_vectors(const LinearArgs& a, int64_t out_begin, int64_t out_end) {
    for (int64_t out = out_begin; out < out_end; out += kOutsAtOnce) {
        int64_t row = 0;
        for (; row + 4 <= a.rows; row += 4) dot_block<4>(a, row, out);
        if (a.rows & 2) {
            dot_block<2>(a, row, out);
            row += 2;
        }
        if (a.rows & 1) dot_block<1>(a, row, out);
    }
}

#if defined(__AMX_BF16__)

inline bool fills_tiles(const LinearArgs& a) {
    return a.num_in % kTileDepth == 0 && a.num_out % kTileSide == 0;
}

int64_t linear_scratch_bytes(const LinearArgs& a) {
    return fills_tiles(a) ? (a.rows + kTileSide - 1) / kTileSide * kTileSide * a.num_in * (int64_t)sizeof(bf16) : 0;
}

void linear_pack(const LinearArgs& a, void* packed_x) {
    if (!fills_tiles(a)) return;
    for (int64_t row = 0; row < a.rows; row += kTileSide) {
        pack_right_operand((const bf16*)a.x + row * a.x_row_stride, a.x_row_stride,
                           (int)smaller<int64_t>(kTileSide, a.rows - row), a.num_in,
                           (bf16*)packed_x + row * a.num_in);
    }
}

void linear(const LinearArgs& a, const void* packed_x, int64_t out_begin, int64_t out_end) {
    if (fills_tiles(a)) {
        const TileLinearArgs tiles = {(const bf16*)packed_x, (const bf16*)a.weight, (const bf16*)a.bias, a.out, a.weight_row_stride,
                                      a.rows, a.num_in, a.num_out, Sink::kRows, 0};
        for (int64_t out = out_begin; out < out_end; out += 2 * kTileSide) tile_linear(tiles, out / (2 * kTileSide), 0, a.rows);
    } else {
        linear_vectors(a, out_begin, out_end);
    }
}

#else

int64_t linear_scratch_bytes(const LinearArgs&) { return 0; }
void linear_pack(const LinearArgs&, void*) {}
void linear(const LinearArgs& a, const void*, int64_t out_begin, int64_t out_end) {
    linear_vectors(a, out_begin, out_end);
}

#endif

}  // namespace
}  // namespace pagoda::PAGODA_ISA
