// Tiles of a compact matrix (compact.h) become tiles of BF16 again, a few products before they are needed. One of 512 values takes 30 ns
// in cache, and 58 ns where it has to be read from memory.
#pragma once

#include "amx.h"

namespace pagoda::PAGODA_ISA {
namespace {

// Four rows of 32 values; which of them is wanted decides what the compiler keeps.
struct FourRows {
    __m512i row[4];
};

inline FourRows expand_group(const uint8_t* group, __m512i high_bytes) {
    const __m512i codes = _mm512_loadu_si512(group + 128), four_bits = _mm512_set1_epi8(0x0f);
    FourRows r;
    for (int pair = 0; pair < 2; pair++) {
        const __m512i code = _mm512_and_si512(pair ? _mm512_srli_epi16(codes, 4) : codes, four_bits);
        const __m512i low = _mm512_loadu_si512(group + 64 * pair), high = _mm512_shuffle_epi8(high_bytes, code);
        r.row[2 * pair] = _mm512_unpacklo_epi8(low, high);
        r.row[2 * pair + 1] = _mm512_unpackhi_epi8(low, high);
    }
    return r;
}

// The tiles of a strip, in their order.
class Strip {
public:
    Strip(const Matrix& weight, int64_t num_in, int64_t strip)
        : tile_((const uint8_t*)weight.values + strip * (num_in / kCompactDepth) * kCompactTile),
          high_bytes_(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(weight.compact.high_bytes + strip * kHighBytes)))),
          exception_(weight.compact.exceptions + weight.compact.first_exceptions[strip]),
          end_(weight.compact.exceptions + weight.compact.first_exceptions[strip + 1]) {}

    // The next tile, [16, 32]. Asks for the one after the next.
    void expand(bf16* to) {
        for (int64_t i = 0; i < kCompactTile; i += 64) prefetch_line(tile_ + 2 * kCompactTile + i);
        for (int g = 0; g < 4; g++) {
            const FourRows four = expand_group(tile_ + g * kCompactGroup, high_bytes_);
            for (int i = 0; i < 4; i++) _mm512_store_si512(to + (4 * g + i) * kCompactDepth, four.row[i]);
        }
        tile_ += kCompactTile;
        first_ += kTileValues;
        for (; exception_ < end_ && exception_->at < first_; exception_++) to[exception_->at % kTileValues].bits = exception_->bits;
    }

    // One row of the next tile.
    void expand_row(int row, bf16* to) {
        const FourRows four = expand_group(tile_ + row / 4 * kCompactGroup, high_bytes_);
        for (int i = 0; i < 4; i++) {
            if (i == row % 4) _mm512_store_si512(to, four.row[i]);
        }
        tile_ += kCompactTile;
        first_ += kTileValues;
        for (; exception_ < end_ && exception_->at < first_; exception_++) {
            if (exception_->at % kTileValues / kCompactDepth == row) to[exception_->at % kCompactDepth].bits = exception_->bits;
        }
    }

private:
    const uint8_t* tile_;
    int64_t first_ = 0;  // place of the next tile's first value
    __m512i high_bytes_;
    const Exception *exception_, *end_;
};

// The strips of a panel, tile by tile side by side.
class ExpandedPanel {
public:
    // `to` has room for the whole panel, or for kPairsAtHand pairs of tiles, which go round.
    ExpandedPanel(const Matrix& weight, int64_t num_in, const int64_t (&outs)[2], void* to, bool whole)
        : first_(weight, num_in, outs[0] / kStripRows),
          second_(weight, num_in, outs[1] / kStripRows),
          to_((bf16*)to),
          left_(num_in / kCompactDepth),
          mask_(whole ? -1 : kPairsAtHand - 1) {}

    const bf16* pair(int64_t index) const { return to_ + (index & mask_) * 2 * kTileValues; }

    void expand() {
        if (left_ == 0) return;
        left_--;
        bf16* to = to_ + (next_++ & mask_) * 2 * kTileValues;
        first_.expand(to);
        second_.expand(to + kTileValues);
        memory_is_written();
    }

private:
    Strip first_, second_;
    bf16* const to_;
    int64_t next_ = 0, left_;
    const int64_t mask_;
};

}  // namespace
}  // namespace pagoda::PAGODA_ISA
