// Intel AMX in the few shapes used here. A tile register is 16 rows of 64 bytes.
//
//     left  [16, 32] bf16, row-major: rows of a matrix as it lies in memory
//     right [16 pairs, 16 columns, 2] bf16: element (2p, c) and (2p + 1, c) side by side
//     accumulator [16, 16] float32 += left x right
//
// and for bytes: left [16, 64], right [16 quads, 16 columns, 4], accumulator [16, 16] int32.
#pragma once

#include "vec.h"

namespace pagoda::PAGODA_ISA {
namespace {

constexpr int kTileSide = 16;       // rows, and float32 columns
constexpr int kTileDepth = 32;      // bf16 columns of a left operand
constexpr int kCodeDepth = 64;      // int8 columns of a left operand
constexpr int kTileRowBytes = 64;

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
    constexpr TileShapes() {
        for (int i = 0; i < 8; i++) {
            row_bytes[i] = kTileRowBytes;
            rows[i] = kTileSide;
        }
    }
};
// In memory from the start: GCC 12 believes that `_tile_loadconfig` reads eight bytes, and may store the others later.
constexpr TileShapes kFullTiles;

// Tile registers have these shapes while this object lives.
class TileConfig {
public:
    explicit TileConfig(const TileShapes& shapes = kFullTiles) { _tile_loadconfig(&shapes); }
    ~TileConfig() { _tile_release(); }
    TileConfig(const TileConfig&) = delete;
    TileConfig& operator=(const TileConfig&) = delete;
};

// Before tiles are loaded from what was just written: GCC 12 does not know that `_tile_loadd` reads memory.
inline void memory_is_written() { __asm__ volatile("" ::: "memory"); }

// In-place transpose of 16 x 16 32-bit lanes.
inline void transpose(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 16; i += 8) {
        for (int j = 0; j < 4; j++) {
            t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
        }
    }
    for (int j = 0; j < 8; j++) {
        r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
        r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
    }
}

// Lane 4a + b is taken from 4b + a.
inline __m512i square_order() { return _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0); }
// In each of the four 128-bit parts, a transpose of 4 x 4 lanes.
inline void transpose4(__m512i r[4]) {
    const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
    const __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
    r[0] = _mm512_unpacklo_epi64(a, c);
    r[1] = _mm512_unpackhi_epi64(a, c);
    r[2] = _mm512_unpacklo_epi64(b, d);
    r[3] = _mm512_unpackhi_epi64(b, d);
}

// In each of the four 128-bit parts, a transpose of 8 x 8 lanes of 16 bits.
inline void transpose8(__m512i r[8]) {
    __m512i t[8];
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_unpacklo_epi16(r[2 * i], r[2 * i + 1]);
        t[i + 4] = _mm512_unpackhi_epi16(r[2 * i], r[2 * i + 1]);
    }
    transpose4(t);
    transpose4(t + 4);
    for (int i = 0; i < 8; i++) r[i] = t[i];
}

// Lanes of `even` and `odd` side by side as bf16.
inline __m512i pack_pairs(Vec even, Vec odd) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                           20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
}

// `rows` <= 16 rows of `depth` values (a multiple of 32) become right operands, one tile after the other; the columns of
// missing rows are zero.
inline void pack_right_operand(const bf16* from, int64_t row_stride, int rows, int64_t depth, bf16* to) {
    for (int64_t i = 0; i < depth; i += kTileDepth) {
        __m512i r[kTileSide];
        for (int row = 0; row < kTileSide; row++) {
            r[row] = row < rows ? _mm512_loadu_si512(from + row * row_stride + i) : _mm512_setzero_si512();
        }
        transpose(r);  // 32-bit lanes are pairs of values
        for (int pair = 0; pair < kTileSide; pair++) _mm512_storeu_si512(to + (i + 2 * pair) * kTileSide, r[pair]);
    }
}

inline __m512i magnitude(__m512i values) { return _mm512_and_si512(values, _mm512_set1_epi16(0x7fff)); }

// What rows become fixed with, as types.h has it; a lane for each. With a unit that is a power of two, a bf16 value of at least 1/128 of
// the row's largest is exact, as it has 8 significant bits, and a smaller one is off by half a unit at most: 2^-15 of the largest.
// A row that is not finite gets a unit of NaN, which its products inherit.
struct FixedUnit {
    __m512 value, inverse;

    // Of the largest magnitudes: bf16 in the upper halves, and the lower ones do not matter.
    explicit FixedUnit(__m512i largest) {
        constexpr int kNotFinite = 255, kSmallest = 15, kTop = 14;  // exponents as they are stored, and bits below the top one
        const __m512i found = _mm512_srli_epi32(largest, 23);
        const __m512i exponent = _mm512_max_epi32(found, _mm512_set1_epi32(kSmallest));
        const __m512i unit = _mm512_slli_epi32(_mm512_sub_epi32(exponent, _mm512_set1_epi32(kTop)), 23);
        inverse = (__m512)_mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(2 * 127 + kTop), exponent), 23);
        value = (__m512)_mm512_mask_set1_epi32(unit, _mm512_cmpeq_epi32_mask(found, _mm512_set1_epi32(kNotFinite)), 0x7fc00000);
    }
    __m512i fixed(__m512i bits) const { return _mm512_cvtps_epi32(_mm512_mul_ps((__m512)bits, inverse)); }
};

// A packed block of 16 rows becomes fixed.
inline void fix_block(bf16* packed, int64_t dim, float* units) {
    const __m512i high_half = _mm512_set1_epi32((int)0xffff0000);
    __m512i largest = _mm512_setzero_si512();
    for (int64_t d = 0; d < dim; d += 2) largest = _mm512_max_epu16(largest, magnitude(_mm512_loadu_si512(packed + d * kTileSide)));
    const FixedUnit unit(_mm512_max_epu16(largest, _mm512_slli_epi32(largest, 16)));  // of both values of a pair
    _mm512_storeu_ps(units, unit.value);
    auto both = [&](__m512i first, __m512i second) {  // 16 bits each
        return _mm512_or_si512(_mm512_andnot_si512(high_half, first), _mm512_slli_epi32(second, 16));
    };
    const __m512i low_bytes = _mm512_set1_epi16(0x00ff);
    for (int64_t d = 0; d < dim; d += 4) {
        __m512i* quad = (__m512i*)(packed + d * kTileSide);
        const __m512i first = _mm512_loadu_si512(quad), second = _mm512_loadu_si512(quad + 1);
        const __m512i even = both(unit.fixed(_mm512_slli_epi32(first, 16)), unit.fixed(_mm512_slli_epi32(second, 16)));
        const __m512i odd = both(unit.fixed(_mm512_and_si512(first, high_half)), unit.fixed(_mm512_and_si512(second, high_half)));
        _mm512_storeu_si512(quad, _mm512_or_si512(_mm512_srli_epi16(even, 8), _mm512_andnot_si512(low_bytes, odd)));
        _mm512_storeu_si512(quad + 1, _mm512_or_si512(_mm512_and_si512(even, low_bytes), _mm512_slli_epi16(odd, 8)));
    }
}

}  // namespace
}  // namespace pagoda::PAGODA_ISA
