// BF16 matrices in 12 bits a value, with every bit kept. The idea is DFloat11's (arXiv:2504.11651); here all codes are of one length, so
// that vectors decode them faster than memory delivers them.
//
// Of a value's high byte (sign and upper seven bits of the exponent) trained weights use few: eight without the sign, which is 16
// neighbouring exponents, take in all but one value in some thousands. So each strip of 16 outputs has eight of its own, a value is its
// low byte and a code for its high byte, and the others are exceptions, listed with their places.
//
//     strip   tiles [16 outs, 32 ins], one after the other
//     tile    four groups, of four rows each
//     group   64 low bytes of rows 0 and 1; 64 of rows 2 and 3; 64 pairs of codes, the lower four bits for rows 0 and 1
//     64      eight values of the one row, eight of the other, and so on: interleaved with their high bytes, they are two whole rows
#pragma once

#include <cstdint>

namespace pagoda {

constexpr int64_t kStripRows = 16, kCompactDepth = 32;
constexpr int64_t kTileValues = kStripRows * kCompactDepth;
constexpr int64_t kCompactGroup = 192, kCompactTile = 4 * kCompactGroup;  // bytes
constexpr int kHighBytes = 16;                                         // eight, and the same with the sign

struct Exception {
    uint32_t at;  // in its strip: kTileValues * tile + kCompactDepth * row + column
    uint16_t bits;
    uint16_t unused;
};

// What a compact matrix has beside its strips.
struct Compact {
    const uint8_t* high_bytes;        // [strips, kHighBytes]; null: it is not compact
    const int64_t* first_exceptions;  // [strips + 1]
    const Exception* exceptions;      // in the order of their places
};

// The high bytes of each strip of a contiguous matrix, and where each strip's exceptions begin; all of [out] are written. Both
// sizes are whole tiles.
void plan_compact(const uint16_t* values, int64_t num_out, int64_t num_in, uint8_t* high_bytes, int64_t* first_exceptions, int threads);
// Then the strips and the exceptions themselves.
void compact(const uint16_t* values, int64_t num_out, int64_t num_in, const uint8_t* high_bytes, const int64_t* first_exceptions,
             uint8_t* strips, Exception* exceptions, int threads);

}  // namespace pagoda
