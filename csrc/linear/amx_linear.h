// y = x W^T on AMX tiles for any number of rows. Rows of W as they lie in memory are the left operand, so that no copy of
// the weights is needed; x, packed once, is the right one:
//
//     W [16 outs, 32 ins] (read in place)  x  packed x [16 pairs of ins, 16 rows, 2]  ->  y^T [16 outs, 16 rows]
//
// A panel is two such tiles of outputs. It meets two blocks of rows at a time: four accumulators, so that each tile that
// is loaded is used twice, and a panel's W comes from the L1 cache for all rows but the first. INT8 codes of W meet one
// block of fixed x at a time, whose high and low bytes take the place of two blocks. A compact W is expanded into the cache while
// the first rows meet it.
#pragma once

#include "linear/amx_expand.h"
#include "linear/amx_outgoing.h"

namespace pagoda::PAGODA_ISA {
namespace {

// Asks for what comes `ahead` inputs after `i`, unless the rows of W end before.
inline void prefetch(const TileLinearArgs& a, const Panel& p, int64_t i, int64_t ahead) {
    if (i + ahead >= a.num_in) return;
    for (int o = 0; o < kTileSide; o++) {
        for (const char* w : p.w) prefetch_line(w + o * p.step + (i + ahead) * (int64_t)sizeof(bf16));
    }
}

// W of a panel as it lies.
struct InPlacePanel {
    const TileLinearArgs& a;
    const Panel& p;
    // Where W comes from memory and two blocks are much to multiply it with, the processor does not look far enough ahead.
    const bool from_memory;

    int64_t step() const { return p.step; }
    void before(int64_t i) const {
        if (from_memory) prefetch(a, p, i, 4 * kTileDepth);
    }
    const void* tile(int which, int64_t i) const { return p.w[which] + i * (int64_t)sizeof(bf16); }
};

// W of a compact panel, `kAhead` products before it is needed, or once it is expanded.
template <bool kExpands>
struct CompactPanel {
    static constexpr int kAhead = 1;
    ExpandedPanel& expanded;

    int64_t step() const { return kTileRowBytes; }
    void before(int64_t i) const {
        if (!kExpands) return;
        if (i == 0) {
            for (int pair = 0; pair < kAhead; pair++) expanded.expand();
        }
        expanded.expand();
    }
    const void* tile(int which, int64_t i) const { return expanded.pair(i / kTileDepth) + which * kTileValues; }
};

constexpr int64_t kPairBytes = 4;  // of a row, in packed x

// Tiles 4 and 5 hold W; the others hold x and products, which have a column for each row of a block.
template <int kLanes>
constexpr TileShapes kProductTiles = [] {
    TileShapes shapes;
    for (int i = 0; i < 8; i++) {
        if (i != 4 && i != 5) shapes.row_bytes[i] = kLanes * kPairBytes;
    }
    return shapes;
}();

template <int kBlocks, int kLanes, typename W>
inline void multiply_blocks(const TileLinearArgs& a, const Panel& p, const W& w, int64_t row, Outgoing<false, kLanes>& outgoing) {
    constexpr int64_t kStep = kLanes * kPairBytes;
    const bf16 *x = a.packed_x + row * a.num_in, *next = x + kTileSide * a.num_in;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < a.num_in; i += kTileDepth) {
        w.before(i);
        _tile_loadd(6, x + i * kLanes, kStep);
        _tile_loadd(4, w.tile(0, i), w.step());
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, w.tile(1, i), w.step());
        _tile_dpbf16ps(1, 5, 6);
        if (kBlocks == 2) {
            _tile_loadd(7, next + i * kLanes, kStep);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        outgoing.some();
    }
    outgoing.take(p, row, kBlocks);
}

// One or two blocks of rows.
template <int kLanes, typename W>
inline void multiply(const TileLinearArgs& a, const Panel& p, const W& w, int64_t row, Outgoing<false, kLanes>& outgoing) {
    if (kLanes == kTileSide && row + kTileSide < a.rows) return multiply_blocks<2>(a, p, w, row, outgoing);
    multiply_blocks<1>(a, p, w, row, outgoing);
}

template <int kLanes>
inline void multiply_compact(const TileLinearArgs& a, const Panel& p, int64_t row_begin, int64_t row_end, void* expanded,
                             Outgoing<false, kLanes>& outgoing) {
    ExpandedPanel panel(a.weight, a.num_in, p.out, expanded, row_end - row_begin > 2 * kTileSide);
    multiply(a, p, CompactPanel<true>{panel}, row_begin, outgoing);
    for (int64_t row = row_begin + 2 * kTileSide; row < row_end; row += 2 * kTileSide) {
        multiply(a, p, CompactPanel<false>{panel}, row, outgoing);
    }
}

template <int kLanes>
inline void multiply_in_place(const TileLinearArgs& a, const Panel& p, int64_t row_begin, int64_t row_end,
                              Outgoing<false, kLanes>& outgoing) {
    const bool from_memory = a.rows > kTileSide && a.rows <= 2 * kTileSide;
    for (int64_t row = row_begin; row < row_end; row += 2 * kTileSide) multiply(a, p, InPlacePanel{a, p, from_memory}, row, outgoing);
}

// The same with codes of W and one block of fixed x.
template <int kLanes>
inline void multiply_codes(const TileLinearArgs& a, const Panel& p, int64_t row, Outgoing<true, kLanes>& outgoing) {
    constexpr int64_t kQuads = kLanes * 4, stride = 2 * kQuads;  // of x, where high and low bytes alternate
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < a.num_in; i += kCodeDepth) {
        const char* quads = (const char*)(a.packed_x + row * a.num_in + i * kLanes);
        _tile_loadd(6, quads, stride);
        _tile_loadd(7, quads + kQuads, stride);
        _tile_loadd(4, p.w[0] + i, p.step);
        _tile_dpbssd(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        _tile_loadd(5, p.w[1] + i, p.step);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
        outgoing.some();
    }
    outgoing.take(p, row, 1);
}

template <bool kCodes, int kLanes>
inline void tile_linear_of(const TileLinearArgs& a, int64_t out_begin, int64_t out_end, int64_t row_begin, int64_t row_end,
                           void* expanded) {
    const TileConfig configured(kProductTiles<kLanes>);
    Outgoing<kCodes, kLanes> outgoing(a);
    const int64_t outs = panel_outs(a.sink), panels = (out_end - out_begin + outs - 1) / outs;
    for (int64_t i = 0; i < panels; i++) {
        const Panel p = panel_at(a, i, out_begin, out_end);
        if constexpr (kCodes) {
            for (int64_t row = row_begin; row < row_end; row += kTileSide) multiply_codes(a, p, row, outgoing);
        } else if (a.weight.is_compact()) {
            multiply_compact(a, p, row_begin, row_end, expanded, outgoing);
        } else {
            multiply_in_place(a, p, row_begin, row_end, outgoing);
        }
    }
    outgoing.finish();
}

// kLanes: of a block of rows.
template <int kLanes = kTileSide>
void tile_linear(const TileLinearArgs& a, int64_t out_begin, int64_t out_end, int64_t row_begin, int64_t row_end, void* expanded) {
    if (a.weight.scales) return tile_linear_of<true, kLanes>(a, out_begin, out_end, row_begin, row_end, expanded);
    tile_linear_of<false, kLanes>(a, out_begin, out_end, row_begin, row_end, expanded);
}

}  // namespace
}  // namespace pagoda::PAGODA_ISA
