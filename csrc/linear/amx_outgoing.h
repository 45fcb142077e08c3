// Where the products of a panel go once they are complete: to rows, to the residual stream, or gated to the next product.
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
template <bool kCodes, int kLanes>
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

// The same of one row alone. Its products are vectors with outputs as lanes, so they leave at once.
template <bool kCodes>
class Outgoing<kCodes, 1> {
public:
    explicit Outgoing(const TileLinearArgs& a) : a_(a) {}

    void some() { finish(); }
    void finish() {
        if (!is_held_) return;
        is_held_ = false;
        if (a_.sink == Sink::kSwiGlu) {
            const Vec gate = rounded(value(0)), up = rounded(value(1));
            return put((bf16*)a_.out, 0, gate / (1.0f + exp(-gate)) * up);
        }
        for (int tile = 0; tile < p_.tiles; tile++) {
            switch (a_.sink) {
                case Sink::kAddLanes: put((float*)a_.out, tile, outputs((const float*)a_.out, tile) + value(tile)); break;
                case Sink::kFloatRows: put((float*)a_.out, tile, value(tile)); break;
                default: put((bf16*)a_.out, tile, value(tile));
            }
        }
    }
    void take(const Panel& panel, int64_t, int) {
        finish();
        p_ = panel;
        _tile_stored(0, tile_[0], sizeof(float));
        _tile_stored(1, tile_[1], sizeof(float));
        if (kCodes) {
            _tile_stored(2, tile_[2], sizeof(float));
            _tile_stored(3, tile_[3], sizeof(float));
        }
        is_held_ = true;
    }

private:
    Vec value(int tile) const {
        Vec y = load(tile_[kCodes ? 2 * tile : tile]);
        if (kCodes) {
            const float unit = a_.x_units[0];
            const Vec highs = (Vec)_mm512_cvtepi32_ps((__m512i)y);
            const Vec lows = (Vec)_mm512_cvtepi32_ps(_mm512_load_si512(tile_[2 * tile + 1]));
            y = (highs * (unit * 256.0f) + lows * unit) * outputs(a_.weight.scales, tile);
        }
        return a_.bias ? y + outputs(a_.bias, tile) : y;
    }

    // What there is for each output of a tile.
    template <typename T>
    Vec outputs(const T* from, int tile) const {
        from += p_.out[tile];
        if (p_.apart == 1) return load(from);
        alignas(64) T apart[kTileSide];
        for (int o = 0; o < kTileSide; o++) apart[o] = from[o * p_.apart];
        return load(apart);
    }

    template <typename T>
    void put(T* to, int tile, Vec y) const {
        to += p_.out[tile];
        alignas(64) T apart[kTileSide];
        narrow(p_.apart == 1 ? to : apart, y);
        if (p_.apart == 1) return;
        for (int o = 0; o < kTileSide; o++) to[o * p_.apart] = apart[o];
    }
    static void narrow(float* to, Vec y) { store(to, y); }
    static void narrow(bf16* to, Vec y) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)y)); }

    const TileLinearArgs& a_;
    Panel p_;
    alignas(64) float tile_[4][kTileSide];
    bool is_held_ = false;
};

}  // namespace
}  // namespace pagoda::PAGODA_ISA
