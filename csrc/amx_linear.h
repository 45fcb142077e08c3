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

#include "amx_expand.h"

namespace pagoda::PAGODA_ISA {
namespace {

inline Vec rounded(Vec x) {
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)), 16);
}

struct Panel {
    const char* w[2];  // the two tiles' first rows
    int64_t out[2];    // and outputs
    int64_t apart;     // from one output of a tile to the next
    int64_t step;      // and from its row, in bytes
    int tiles;
};

// Panel `index` of those that take the outputs [begin, end) between them. Where the sink does not want neighbours, whole panels are one
// output apart: a page then has one row of each tile, and the hardware reads it ahead as panel follows panel.
//
//     outputs   0 1 2 3   4 5 6 7   8 9 ..      rows of W, four to a page
//     panels    0 1 2 3   0 1 2 3   0 1 ..
inline Panel panel_at(const TileLinearArgs& a, int64_t index, int64_t begin, int64_t end) {
    const bool gated = a.sink == Sink::kSwiGlu;
    const int64_t outs = panel_outs(a.sink), whole = (end - begin) / outs;
    const bool apart = index < whole && !a.weight.is_compact() && (gated || a.sink == Sink::kAddLanes);
    Panel p;
    p.apart = apart ? whole : 1;
    p.tiles = gated || index < whole ? 2 : 1;
    p.out[0] = begin + index * (apart ? 1 : outs);
    p.out[1] = gated ? a.num_out + p.out[0] : p.tiles == 2 ? p.out[0] + p.apart * kTileSide : p.out[0];
    const int64_t row_bytes = a.weight_row_stride * (int64_t)(a.weight.scales ? sizeof(int8_t) : sizeof(bf16));
    p.step = p.apart * row_bytes;
    for (int i = 0; i < 2; i++) p.w[i] = (const char*)a.weight.values + p.out[i] * row_bytes;
    return p;
}

// Brings the products of one turn to where they go, a piece with each step of the next turn, of this panel or the one after it: vectors
// are busy with what leaves for about as long as tiles are with a product of 576 values, and both work at once if their instructions
// are near each other.
template <bool kCodes>
class Outgoing {
public:
    explicit Outgoing(const TileLinearArgs& a)
        : a_(a), share_((int)(1 + 2 * kPieces * (kCodes ? kCodeDepth : kTileDepth) / a.num_in)) {}

    void some() {
        for (int i = 0; i < share_ && next_ < end_; i++) put(next_++);
    }
    void finish() {
        while (next_ < end_) put(next_++);
    }
    // Takes the four accumulators, which are of the rows from `row` on: BF16 [blocks][2 tiles], codes of one block [2 tiles][high, low].
    void take(const Panel& panel, int64_t row, int blocks) {
        finish();
        p_ = panel;
        _tile_stored(0, tile_[0], kTileRowBytes);
        _tile_stored(1, tile_[1], kTileRowBytes);
        if (kCodes || blocks == 2) {
            _tile_stored(2, tile_[2], kTileRowBytes);
            _tile_stored(3, tile_[3], kTileRowBytes);
        }
        row_ = row;
        next_ = 0;
        end_ = blocks * kPieces;
    }

private:
    static constexpr int kPieces = 8;  // of a block: two outputs of each tile, or once in four a whole tile

    Vec value(int block, int tile, int o) const {
        const int64_t out = p_.out[tile] + o * p_.apart;
        Vec y = load(tile_[kCodes ? 2 * tile : 2 * block + tile][o]);
        if (kCodes) {
            const Vec unit = load(a_.x_units + row_);
            const Vec highs = (Vec)_mm512_cvtepi32_ps((__m512i)y);
            const Vec lows = (Vec)_mm512_cvtepi32_ps(_mm512_load_si512(tile_[2 * tile + 1][o]));
            y = (highs * (unit * 256.0f) + lows * unit) * a_.weight.scales[out];
        }
        return a_.bias ? y + scalar(a_.bias[out]) : y;
    }

    void put(int piece) {
        const int block = piece / kPieces, part = piece % kPieces;
        const int64_t row = row_ + block * kTileSide;
        switch (a_.sink) {
            case Sink::kSwiGlu: return put_gated(block, row, 2 * part);
            case Sink::kAddLanes: return add_lanes(block, row, 2 * part);
            default:
                if (part % 4 == 0 && part / 4 < p_.tiles) put_rows(block, row, part / 4);
        }
    }

    // Products are rounded to bf16 where a layer computed step by step would round them.
    void put_gated(int block, int64_t row, int o) {
        auto gated = [&](int i) {
            const Vec gate = rounded(value(block, 0, i)), up = rounded(value(block, 1, i));
            return gate / (1.0f + exp(-gate)) * up;
        };
        bf16* to = (bf16*)a_.out + row * a_.num_out;
        const int64_t out = p_.out[0] + o * p_.apart;
        if (p_.apart == 1) return _mm512_storeu_si512(to + out * kTileSide, pack_pairs(gated(o), gated(o + 1)));
        for (int i = 0; i < 2; i++) {  // half of a pair each; another panel has its other half
            const Vec value = gated(o + i);
            const int64_t at = out + i * p_.apart;
            _mm512_mask_storeu_epi16(to + at / 2 * 2 * kTileSide, at % 2 ? 0xaaaaaaaa : 0x55555555, pack_pairs(value, value));
        }
    }

    void add_lanes(int block, int64_t row, int o) {
        for (int tile = 0; tile < p_.tiles; tile++) {
            for (int i = o; i < o + 2; i++) {
                float* to = (float*)a_.out + row * a_.num_out + (p_.out[tile] + i * p_.apart) * kTileSide;
                store(to, load(to) + value(block, tile, i));
            }
        }
    }

    void put_rows(int block, int64_t row, int tile) {
        __m512i r[kTileSide];
        for (int o = 0; o < kTileSide; o++) r[o] = (__m512i)value(block, tile, o);
        transpose(r);
        const int count = (int)smaller<int64_t>(kTileSide, a_.rows - row);
        for (int i = 0; i < count; i++) {
            const int64_t to = (row + i) * a_.num_out + p_.out[tile];
            if (a_.sink == Sink::kFloatRows) {
                _mm512_storeu_si512((float*)a_.out + to, r[i]);
            } else {
                _mm256_storeu_si256((__m256i*)((bf16*)a_.out + to), (__m256i)_mm512_cvtneps_pbh((__m512)r[i]));
            }
        }
    }

    const TileLinearArgs& a_;
    Panel p_;
    const int share_;  // pieces that leave with a step
    alignas(64) float tile_[4][kTileSide][kTileSide];
    int64_t row_ = 0;
    int next_ = 0, end_ = 0;
};

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

template <int kBlocks, typename W>
inline void multiply(const TileLinearArgs& a, const Panel& p, const W& w, int64_t row, Outgoing<false>& outgoing) {
    const bf16 *x = a.packed_x + row * a.num_in, *next = x + kTileSide * a.num_in;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < a.num_in; i += kTileDepth) {
        w.before(i);
        _tile_loadd(6, x + i * kTileSide, kTileRowBytes);
        _tile_loadd(4, w.tile(0, i), w.step());
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, w.tile(1, i), w.step());
        _tile_dpbf16ps(1, 5, 6);
        if (kBlocks == 2) {
            _tile_loadd(7, next + i * kTileSide, kTileRowBytes);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        outgoing.some();
    }
    outgoing.take(p, row, kBlocks);
}

// One or two blocks of rows.
template <typename W>
inline void multiply(const TileLinearArgs& a, const Panel& p, const W& w, int64_t row, Outgoing<false>& outgoing) {
    if (row + kTileSide < a.rows) return multiply<2>(a, p, w, row, outgoing);
    multiply<1>(a, p, w, row, outgoing);
}

inline void multiply_compact(const TileLinearArgs& a, const Panel& p, int64_t row_begin, int64_t row_end, void* expanded,
                             Outgoing<false>& outgoing) {
    ExpandedPanel panel(a.weight, a.num_in, p.out, expanded, row_end - row_begin > 2 * kTileSide);
    multiply(a, p, CompactPanel<true>{panel}, row_begin, outgoing);
    for (int64_t row = row_begin + 2 * kTileSide; row < row_end; row += 2 * kTileSide) {
        multiply(a, p, CompactPanel<false>{panel}, row, outgoing);
    }
}

inline void multiply_in_place(const TileLinearArgs& a, const Panel& p, int64_t row_begin, int64_t row_end, Outgoing<false>& outgoing) {
    const bool from_memory = a.rows > kTileSide && a.rows <= 2 * kTileSide;
    for (int64_t row = row_begin; row < row_end; row += 2 * kTileSide) multiply(a, p, InPlacePanel{a, p, from_memory}, row, outgoing);
}

// The same with codes of W and one block of fixed x.
inline void multiply_codes(const TileLinearArgs& a, const Panel& p, int64_t row, Outgoing<true>& outgoing) {
    const int64_t stride = 2 * kTileRowBytes;  // of x, where high and low bytes alternate
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < a.num_in; i += kCodeDepth) {
        const char* quads = (const char*)(a.packed_x + row * a.num_in + i * kTileSide);
        _tile_loadd(6, quads, stride);
        _tile_loadd(7, quads + kTileRowBytes, stride);
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

template <bool kCodes>
inline void tile_linear_of(const TileLinearArgs& a, int64_t out_begin, int64_t out_end, int64_t row_begin, int64_t row_end,
                           void* expanded) {
    const TileConfig configured;
    Outgoing<kCodes> outgoing(a);
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

void tile_linear(const TileLinearArgs& a, int64_t out_begin, int64_t out_end, int64_t row_begin, int64_t row_end, void* expanded) {
    if (a.weight.scales) return tile_linear_of<true>(a, out_begin, out_end, row_begin, row_end, expanded);
    tile_linear_of<false>(a, out_begin, out_end, row_begin, row_end, expanded);
}

}  // namespace
}  // namespace pagoda::PAGODA_ISA
