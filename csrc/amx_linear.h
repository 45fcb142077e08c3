// y = x W^T on AMX tiles for any number of rows. Rows of W as they lie in memory are the left operand, so that no copy of
// the weights is needed; x, packed once, is the right one:
//
//     W [16 outs, 32 ins] (read in place)  x  packed x [16 pairs of ins, 16 rows, 2]  ->  y^T [16 outs, 16 rows]
//
// A panel is two such tiles of outputs. It meets two blocks of rows at a time: four accumulators, so that each tile that
// is loaded is used twice, and a panel's W comes from the L1 cache for all rows but the first. INT8 codes of W meet one
// block of fixed x at a time, whose high and low bytes take the place of two blocks.
#pragma once

#include "amx.h"

namespace pagoda::PAGODA_ISA {
namespace {

inline Vec rounded(Vec x) {
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)), 16);
}

struct Panel {
    const char* w[2];  // the two tiles' first rows
    int64_t out[2];    // and outputs
    int64_t row_bytes;
    int tiles;
};

inline Panel panel_at(const TileLinearArgs& a, int64_t panel) {
    Panel p;
    if (a.sink == Sink::kSwiGlu) {
        p.out[0] = panel * kTileSide;
        p.out[1] = a.num_out + p.out[0];
        p.tiles = 2;
    } else {
        p.out[0] = 2 * panel * kTileSide;
        p.out[1] = p.out[0] + kTileSide;
        p.tiles = p.out[1] < a.num_out ? 2 : 1;
        if (p.tiles == 1) p.out[1] = p.out[0];
    }
    p.row_bytes = a.weight_row_stride * (int64_t)(a.weight.scales ? sizeof(int8_t) : sizeof(bf16));
    for (int i = 0; i < 2; i++) p.w[i] = (const char*)a.weight.values + p.out[i] * p.row_bytes;
    return p;
}

// y [2 blocks of rows][2 tiles][16 outs][16 rows]
template <int kBlocks>
inline void multiply(const TileLinearArgs& a, const Panel& p, const bf16* x, float (*y)[2][kTileSide][kTileSide]) {
    const bf16 *w0 = (const bf16*)p.w[0], *w1 = (const bf16*)p.w[1], *next = x + kTileSide * a.num_in;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < a.num_in; i += kTileDepth) {
        _tile_loadd(6, x + i * kTileSide, kTileRowBytes);
        _tile_loadd(4, w0 + i, p.row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, w1 + i, p.row_bytes);
        _tile_dpbf16ps(1, 5, 6);
        if (kBlocks == 2) {
            _tile_loadd(7, next + i * kTileSide, kTileRowBytes);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, y[0][0], kTileRowBytes);
    _tile_stored(1, y[0][1], kTileRowBytes);
    if (kBlocks == 2) {
        _tile_stored(2, y[1][0], kTileRowBytes);
        _tile_stored(3, y[1][1], kTileRowBytes);
    }
}

// The same with codes of W and one block of fixed x: y [2 tiles][16 outs][16 rows]
inline void multiply_codes(const TileLinearArgs& a, const Panel& p, const bf16* x, const float* x_units,
                           float (*y)[kTileSide][kTileSide]) {
    const int64_t stride = 2 * kTileRowBytes;  // of x, where high and low bytes alternate
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < a.num_in; i += kCodeDepth) {
        const char* quads = (const char*)(x + i * kTileSide);
        _tile_loadd(6, quads, stride);
        _tile_loadd(7, quads + kTileRowBytes, stride);
        _tile_loadd(4, p.w[0] + i, p.row_bytes);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        _tile_loadd(5, p.w[1] + i, p.row_bytes);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
    }
    alignas(64) int32_t high[2][kTileSide][kTileSide], low[2][kTileSide][kTileSide];
    _tile_stored(0, high[0], kTileRowBytes);
    _tile_stored(1, low[0], kTileRowBytes);
    _tile_stored(2, high[1], kTileRowBytes);
    _tile_stored(3, low[1], kTileRowBytes);
    const Vec low_unit = load(x_units), high_unit = low_unit * 256.0f;
    for (int tile = 0; tile < 2; tile++) {
        for (int o = 0; o < kTileSide; o++) {
            const Vec highs = (Vec)_mm512_cvtepi32_ps(_mm512_load_si512(high[tile][o]));
            const Vec lows = (Vec)_mm512_cvtepi32_ps(_mm512_load_si512(low[tile][o]));
            store(y[tile][o], (highs * high_unit + lows * low_unit) * a.weight.scales[p.out[tile] + o]);
        }
    }
}

inline void add_bias(const TileLinearArgs& a, int64_t out, float (*y)[kTileSide]) {
    if (!a.bias) return;
    for (int o = 0; o < kTileSide; o++) {
        const uint32_t bits = (uint32_t)a.bias[out + o].bits << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        store(y[o], load(y[o]) + value);
    }
}

inline void put_rows(const TileLinearArgs& a, int64_t row, int64_t out, float (*y)[kTileSide]) {
    transpose(y);
    for (int64_t r = 0; r < smaller<int64_t>(kTileSide, a.rows - row); r++) {
        const int64_t to = (row + r) * a.num_out + out;
        if (a.sink == Sink::kFloatRows) {
            store((float*)a.out + to, load(y[r]));
        } else {
            _mm256_storeu_si256((__m256i*)((bf16*)a.out + to), (__m256i)_mm512_cvtneps_pbh((__m512)load(y[r])));
        }
    }
}

// Products are rounded to bf16 where a layer computed step by step would round them.
inline void put_gated(const TileLinearArgs& a, int64_t row, int64_t out, float (*y)[kTileSide][kTileSide]) {
    bf16* to = (bf16*)a.out + row * a.num_out + out * kTileSide;
    auto gated = [&](int o) {
        const Vec gate = rounded(load(y[0][o])), up = rounded(load(y[1][o]));
        return gate / (1.0f + exp(-gate)) * up;
    };
    for (int o = 0; o < kTileSide; o += 2) _mm512_storeu_si512(to + o * kTileSide, pack_pairs(gated(o), gated(o + 1)));
}

inline void put(const TileLinearArgs& a, const Panel& p, int64_t row, float (*y)[kTileSide][kTileSide]) {
    for (int tile = 0; tile < p.tiles; tile++) add_bias(a, p.out[tile], y[tile]);
    if (a.sink == Sink::kSwiGlu) return put_gated(a, row, p.out[0], y);
    for (int tile = 0; tile < p.tiles; tile++) {
        if (a.sink != Sink::kAddLanes) {
            put_rows(a, row, p.out[tile], y[tile]);
            continue;
        }
        float* to = (float*)a.out + row * a.num_out + p.out[tile] * kTileSide;
        for (int o = 0; o < kTileSide; o++, to += kTileSide) store(to, load(to) + load(y[tile][o]));
    }
}

// Brings W of the panel that comes next into the L2 cache, a share of it with each pair of blocks: products take longer than
// reading does, but a tile that is loaded from memory waits for each of its sixteen rows.
class Ahead {
public:
    Ahead(const TileLinearArgs& a, int64_t panel, int64_t pairs) {
        const int64_t outs = a.sink == Sink::kSwiGlu ? kTileSide : 2 * kTileSide;
        if (a.panels_ahead == 0 || (panel + a.panels_ahead) * outs >= a.num_out) return;
        const Panel p = panel_at(a, panel + a.panels_ahead);
        bytes_ = kTileSide * p.row_bytes;
        for (int i = 0; i < 2; i++) tile_[i] = p.w[i];
        share_ = (bytes_ / pairs + 63) / 64 * 64;
    }
    void take() {
        for (const int64_t end = smaller(at_ + share_, bytes_); at_ < end; at_ += 64) {
            __builtin_prefetch(tile_[0] + at_, 0, 2);
            __builtin_prefetch(tile_[1] + at_, 0, 2);
        }
    }

private:
    const char* tile_[2] = {};
    int64_t at_ = 0, bytes_ = 0, share_ = 0;
};

void tile_linear(const TileLinearArgs& a, int64_t panel, int64_t row_begin, int64_t row_end) {
    const TileConfig configured;
    const Panel p = panel_at(a, panel);
    Ahead ahead(a, panel, (row_end - row_begin + 2 * kTileSide - 1) / (2 * kTileSide));
    alignas(64) float y[2][2][kTileSide][kTileSide];
    for (int64_t row = row_begin; row < row_end; row += 2 * kTileSide) {
        const bf16 *x = a.packed_x + row * a.num_in, *next = x + kTileSide * a.num_in;
        const bool two = row + kTileSide < a.rows;
        ahead.take();
        if (a.weight.scales) {
            multiply_codes(a, p, x, a.x_units + row, y[0]);
            if (two) multiply_codes(a, p, next, a.x_units + row + kTileSide, y[1]);
        } else if (two) {
            multiply<2>(a, p, x, y);
        } else {
            multiply<1>(a, p, x, y);
        }
        put(a, p, row, y[0]);
        if (two) put(a, p, row + kTileSide, y[1]);
    }
}

}  // namespace
}  // namespace pagoda::PAGODA_ISA
