// What a decoder does to rows between its matrices, sixteen rows at a time in the layouts of types.h.
#pragma once

#include "linear/amx_linear.h"

namespace pagoda::PAGODA_ISA {
namespace {

// The rows from `first` on, of a compact embedding.
inline void embed_compact(const EmbedArgs& a, int64_t first, float* to) {
    for (int i = 0; i < kTileSide; i++) {
        const int64_t token = first + i < a.rows ? a.token_ids[first + i] : 0;
        Strip strip(a.embedding, a.dim, token / kStripRows);
        for (int64_t d = 0; d < a.dim; d += kCompactDepth) {
            alignas(64) bf16 values[kCompactDepth];
            strip.expand_row((int)(token % kStripRows), values);
            for (int64_t column = 0; column < kCompactDepth; column++) {
                to[(d + column) * kTileSide + i] = first + i < a.rows ? scalar(values[column]) : 0;
            }
        }
    }
}

// dim is a multiple of 16; of 32 if the embedding is compact.
void tile_embed(const EmbedArgs& a, int64_t block) {
    const int64_t first = block * kTileSide;
    float* to = a.lanes + first * a.dim;
    if (a.embedding.is_compact()) return embed_compact(a, first, to);
    auto values = [&](int64_t token, int64_t d) {
        const int64_t at = token * a.dim + d;
        if (!a.embedding.scales) return load((const bf16*)a.embedding.values + at);
        return load((const int8_t*)a.embedding.values + at) * a.embedding.scales[token];
    };
    for (int64_t d = 0; d < a.dim; d += kTileSide) {
        __m512i r[kTileSide];
        for (int i = 0; i < kTileSide; i++) {
            r[i] = first + i < a.rows ? (__m512i)values(a.token_ids[first + i], d) : _mm512_setzero_si512();
        }
        transpose(r);
        for (int i = 0; i < kTileSide; i++) _mm512_storeu_si512(to + (d + i) * kTileSide, r[i]);
    }
}

void tile_norm(const LanesNormArgs& a, int64_t block) {
    const float* x = a.lanes + block * kTileSide * a.dim;
    bf16* to = a.packed + block * kTileSide * a.dim;
    Vec squares[4] = {};  // four sums: one would wait for itself
    for (int64_t d = 0; d < a.dim; d += 4) {
        for (int i = 0; i < 4; i++) {
            const Vec v = load(x + (d + i) * kTileSide);
            squares[i] += v * v;
        }
    }
    const Vec mean = (squares[0] + squares[1] + squares[2] + squares[3]) / (float)a.dim + a.eps;
    const Vec scale = 1.0f / (Vec)_mm512_sqrt_ps((__m512)mean);
    for (int64_t d = 0; d < a.dim; d += kTileSide) {
        alignas(64) float weight[kTileSide];
        store(weight, load(a.weight + d));
        for (int i = 0; i < kTileSide; i += 2) {
            const float* pair = x + (d + i) * kTileSide;
            _mm512_storeu_si512(to + (d + i) * kTileSide, pack_pairs(load(pair) * scale * weight[i],
                                                                     load(pair + kTileSide) * scale * weight[i + 1]));
        }
    }
}

void tile_pack(const PackArgs& a, int64_t block) {
    const int64_t first = block * kTileSide;
    for (int64_t d = 0; d < a.dim; d += kTileDepth) {
        __m512i r[kTileSide];
        for (int i = 0; i < kTileSide; i++) {
            const int64_t row = first + i;
            r[i] = row < a.rows ? _mm512_loadu_si512(a.from + (a.index ? a.index[row] : row) * a.dim + d) : _mm512_setzero_si512();
        }
        transpose(r);  // 32-bit lanes are pairs of values
        bf16* to = a.packed + first * a.dim + d * kTileSide;
        for (int pair = 0; pair < kTileSide; pair++) _mm512_storeu_si512(to + 2 * pair * kTileSide, r[pair]);
    }
}

void tile_fix(const FixArgs& a, int64_t block) {
    fix_block(a.packed + block * kTileSide * a.dim, a.dim, a.units + block * kTileSide);
}

void tile_select(const SelectLanesArgs& a, int64_t block) {
    const int64_t first = block * kTileSide;
    float* to = a.to + first * a.dim;
    for (int i = 0; i < kTileSide; i++) {
        if (first + i >= a.rows) {
            for (int64_t d = 0; d < a.dim; d++) to[d * kTileSide + i] = 0;
            continue;
        }
        const int64_t row = a.index[first + i];
        const float* from = a.from + row / kTileSide * kTileSide * a.dim + row % kTileSide;
        for (int64_t d = 0; d < a.dim; d++) to[d * kTileSide + i] = from[d * kTileSide];
    }
}

constexpr TileTable tile_table = {tile_embed, tile_norm, tile_pack, tile_fix, tile_select, tile_linear<>};

}  // namespace
}  // namespace pagoda::PAGODA_ISA
