// Intel AMX in the few shapes used here. A tile register is 16 rows of 64 bytes.
//
//     left  [16, 32] bf16, row-major: rows of a matrix as it lies in memory
//     right [16 pairs, 16 columns, 2] bf16: element (2p, c) and (2p + 1, c) side by side
//     accumulator [16, 16] float32 += left x right
#pragma once

#include "vec.h"

namespace pagoda::PAGODA_ISA {
namespace {

constexpr int kTileSide = 16;       // rows, and float32 columns
constexpr int kTileDepth = 32;      // bf16 columns of a left operand
constexpr int kTileRowBytes = 64;

// All eight tile registers at full size while this object lives.
class TileConfig {
public:
    TileConfig() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int i = 0; i < 8; i++) {
            config.row_bytes[i] = kTileRowBytes;
            config.rows[i] = kTileSide;
        }
        _tile_loadconfig(&config);
    }
    ~TileConfig() { _tile_release(); }
    TileConfig(const TileConfig&) = delete;
    TileConfig& operator=(const TileConfig&) = delete;
};

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

inline void transpose(float m[kTileSide][kTileSide]) {
    __m512i r[kTileSide];
    for (int i = 0; i < kTileSide; i++) r[i] = _mm512_loadu_si512(m[i]);
    transpose(r);
    for (int i = 0; i < kTileSide; i++) _mm512_storeu_si512(m[i], r[i]);
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

}  // namespace
}  // namespace pagoda::PAGODA_ISA
