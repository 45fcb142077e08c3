// What amx_rows.h does, for a step of one row: a block of a single row is a plain vector, packed or not.
//
// Every value is the one that the row has among others, to the last bit.
#pragma once

#include "linear/amx_linear.h"

namespace pagoda::PAGODA_ISA {
namespace {

void row_embed(const EmbedArgs& a, int64_t) {
    const int64_t token = a.token_ids[0];
    if (a.embedding.is_compact()) {
        Strip strip(a.embedding, a.dim, token / kStripRows);
        for (int64_t d = 0; d < a.dim; d += kCompactDepth) {
            alignas(64) bf16 values[kCompactDepth];
            strip.expand_row((int)(token % kStripRows), values);
            for (int64_t i = 0; i < kCompactDepth; i += kWidth) store(a.lanes + d + i, load(values + i));
        }
        return;
    }
    for (int64_t d = 0; d < a.dim; d += kWidth) {
        const int64_t at = token * a.dim + d;
        store(a.lanes + d, a.embedding.scales ? load((const int8_t*)a.embedding.values + at) * a.embedding.scales[token]
                                              : load((const bf16*)a.embedding.values + at));
    }
}

void row_norm(const LanesNormArgs& a, int64_t) {
    __m128 squares = _mm_setzero_ps();  // four sums, each in the order that tile_norm has
    for (int64_t d = 0; d < a.dim; d += 4) {
        const __m128 v = _mm_loadu_ps(a.lanes + d);
        squares = _mm_fmadd_ps(v, v, squares);
    }
    float sums[4];
    _mm_storeu_ps(sums, squares);
    const Vec mean = splat(sums[0] + sums[1] + sums[2] + sums[3]) / (float)a.dim + a.eps;
    const Vec scale = 1.0f / (Vec)_mm512_sqrt_ps((__m512)mean);
    for (int64_t d = 0; d < a.dim; d += kWidth) {
        const Vec y = load(a.lanes + d) * scale * load(a.weight + d);
        _mm256_storeu_si256((__m256i*)(a.packed + d), (__m256i)_mm512_cvtneps_pbh((__m512)y));
    }
}

void row_pack(const PackArgs& a, int64_t) {
    memcpy(a.packed, a.from + (a.index ? a.index[0] : 0) * a.dim, (size_t)a.dim * sizeof(bf16));
}

void row_fix(const FixArgs& a, int64_t) {
    __m512i largest = _mm512_setzero_si512();
    for (int64_t d = 0; d < a.dim; d += kTileDepth) largest = _mm512_max_epu16(largest, magnitude(_mm512_loadu_si512(a.packed + d)));
    alignas(64) uint16_t found[kTileDepth];
    _mm512_store_si512(found, largest);
    uint16_t top = 0;
    for (uint16_t each : found) top = larger(top, each);
    const FixedUnit unit(_mm512_set1_epi32(top << 16));
    a.units[0] = _mm512_cvtss_f32(unit.value);
    for (int64_t d = 0; d < a.dim; d += kWidth) {
        const __m512i fixed = unit.fixed((__m512i)load(a.packed + d));
        const __m128i highs = _mm512_cvtepi32_epi8(_mm512_srli_epi32(fixed, 8)), lows = _mm512_cvtepi32_epi8(fixed);
        __m128i* to = (__m128i*)(a.packed + d);
        _mm_storeu_si128(to, _mm_unpacklo_epi32(highs, lows));
        _mm_storeu_si128(to + 1, _mm_unpackhi_epi32(highs, lows));
    }
}

void row_select(const SelectLanesArgs& a, int64_t) {
    memcpy(a.to, a.from + a.index[0] * a.dim, (size_t)a.dim * sizeof(float));
}

constexpr TileTable row_table = {row_embed, row_norm, row_pack, row_fix, row_select, tile_linear<1>};

}  // namespace
}  // namespace pagoda::PAGODA_ISA
