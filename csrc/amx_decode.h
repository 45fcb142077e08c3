// Decode attention on AMX over BF16 keys and values: up to four rows of each KV head, the heads of a tile one after the other.
//
//     scores [16 keys, rows]  = keys [16 keys, head_dim]  x  queries         keys as they lie are a left operand
//     out    [rows, head_dim] = probabilities [rows, 64 keys]  x  values     two neighbours' values side by side are a right one
//
// Reading is what takes time here: the next entries are asked for evenly, between what is computed with these.
#pragma once

#include "amx.h"
#include "attention_tile.h"

namespace pagoda::PAGODA_ISA {
namespace {

constexpr int kDecodeRows = 4;  // of a KV head; a query's right operand has as many columns
constexpr int kDecodeRowBytes = kDecodeRows * 4;

// Registers: 0 is keys (1) times queries (2); 3 is probabilities (4, 5), in two BF16 parts that make 16 bits, times values (6, 7).
constexpr TileShapes decode_tiles() {
    TileShapes shapes;
    shapes.row_bytes[0] = shapes.row_bytes[2] = kDecodeRowBytes;
    shapes.rows[3] = shapes.rows[4] = shapes.rows[5] = 2 * kDecodeRows;
    return shapes;
}
constexpr TileShapes kDecodeTiles = decode_tiles();

struct DecodeScratch {
    float* acc;     // [heads * rows, head_dim]
    float* top;     // [heads * rows]
    float* sum;     // [heads * rows]
    float* scores;  // [kDecodeRows, kTileKeys]
    bf16* queries;  // [heads][head_dim / 2][kDecodeRows][2]
    bf16* p;        // [2 of 32 keys][high | low][kDecodeRows][32]
    bf16* values;   // [2 of 16 channels][kTileKeys / 2][16][2]
    bf16* keys;     // [16][head_dim], where they do not lie in one block

    DecodeScratch(void* memory, int64_t head_dim)
        : acc((float*)memory),
          top(acc + kTileRows * head_dim),
          sum(top + kTileRows),
          scores(sum + kTileRows),
          queries((bf16*)(scores + kDecodeRows * kTileKeys)),
          p(queries + kTileRows * head_dim),
          values(p + 4 * kDecodeRows * kTileDepth),
          keys(values + kTileKeys * kTileDepth) {}
    static int64_t bytes(int64_t head_dim) {
        return (kTileRows * (head_dim + 2) + kDecodeRows * kTileKeys) * (int64_t)sizeof(float) +
               ((kTileRows + kTileSide) * head_dim + 4 * kDecodeRows * kTileDepth + kTileKeys * kTileDepth) * (int64_t)sizeof(bf16);
    }
};

inline void pack_few_queries(const AttentionArgs& a, const Tile& t, bf16* to) {
    const int64_t group = a.num_heads / a.pool.num_kv_heads, head_dim = a.pool.head_dim;
    memset(to, 0, t.num_kv_heads * kDecodeRows * head_dim * sizeof(bf16));
    for (int h = 0; h < t.num_kv_heads; h++, to += kDecodeRows * head_dim) {
        for (int64_t row = t.row_begin; row < t.row_end; row++) {
            const bf16* from = (const bf16*)a.q + (t.first_token_row + row / group) * a.q_row_stride +
                               ((t.kv_head + h) * group + row % group) * a.q_head_stride;
            for (int64_t d = 0; d < head_dim; d += 2) memcpy(to + d * kDecodeRows + 2 * (row - t.row_begin), from + d, 2 * sizeof(bf16));
        }
    }
}

// [16 keys, 4 rows] -> a vector of keys for each row
inline void few_rows_of(const float* sums, Vec rows[kDecodeRows]) {
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    __m512i r[4];
    for (int i = 0; i < 4; i++) r[i] = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(sums + i * 16));
    const __m512i a = _mm512_shuffle_i32x4(r[0], r[1], 0x44), b = _mm512_shuffle_i32x4(r[0], r[1], 0xee);
    const __m512i c = _mm512_shuffle_i32x4(r[2], r[3], 0x44), d = _mm512_shuffle_i32x4(r[2], r[3], 0xee);
    rows[0] = (Vec)_mm512_shuffle_i32x4(a, c, 0x88);
    rows[1] = (Vec)_mm512_shuffle_i32x4(a, c, 0xdd);
    rows[2] = (Vec)_mm512_shuffle_i32x4(b, d, 0x88);
    rows[3] = (Vec)_mm512_shuffle_i32x4(b, d, 0xdd);
}

// Scores of a head's rows against up to kTileKeys entries from `begin` on, in units of log2 or what a softcap takes.
inline void score_few(const AttentionArgs& a, const Entries<bf16>& entries, int64_t begin, const bf16* queries, Lookahead& ahead, const DecodeScratch& s) {
    const int64_t head_dim = a.pool.head_dim, slots = a.pool.block_size, slot_bytes = a.pool.keys.slot_stride * (int64_t)sizeof(bf16);
    alignas(64) float sums[kTileKeys * kDecodeRows];
    const float unit = query_scale(a);
    for (int j = 0; j < kTileKeys; j += kTileSide) {
        const bf16* keys = entries.keys[j];
        int64_t stride = slot_bytes;
        if (j + kTileSide > entries.count || (begin + j) % slots + kTileSide > slots) {
            for (int i = 0; i < kTileSide; i++) {
                if (j + i < entries.count) memcpy(s.keys + i * head_dim, entries.keys[j + i], head_dim * sizeof(bf16));
            }
            keys = s.keys;
            stride = head_dim * sizeof(bf16);
        }
        memory_is_written();
        _tile_zero(0);
        for (int64_t d = 0; d < head_dim; d += kTileDepth) {
            ahead.some();
            _tile_loadd(1, keys + d, stride);
            _tile_loadd(2, queries + d * kDecodeRows, kDecodeRowBytes);
            _tile_dpbf16ps(0, 1, 2);
        }
        _tile_stored(0, sums + j * kDecodeRows, kDecodeRowBytes);
    }
    memory_is_written();
    for (int j = 0; j < kTileKeys; j += kTileSide) {
        Vec rows[kDecodeRows];
        few_rows_of(sums + j * kDecodeRows, rows);
        for (int r = 0; r < kDecodeRows; r++) store(s.scores + r * kTileKeys + j, rows[r] * unit);
    }
}

// Scores, probabilities by now, in two parts.
inline void split_probabilities(int64_t rows, const float* scores, bf16* p) {
    for (int64_t r = 0; r < rows; r++) {
        for (int half = 0; half < 2; half++) {
            const Vec x = load(scores + r * kTileKeys + half * kTileDepth), y = load(scores + r * kTileKeys + half * kTileDepth + kTileSide);
            bf16 *high = p + (half * 2 * kDecodeRows + r) * kTileDepth, *low = high + kDecodeRows * kTileDepth;
            _mm512_storeu_si512(high, (__m512i)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x));
            const Vec left_x = x - load(high), left_y = y - load(high + kTileSide);
            _mm512_storeu_si512(low, (__m512i)_mm512_cvtne2ps_pbh((__m512)left_y, (__m512)left_x));
        }
    }
}

// acc [rows, head_dim] += probabilities x values
inline void accumulate_few(const Entries<bf16>& entries, int64_t head_dim, int64_t rows, Lookahead& ahead, const DecodeScratch& s, float* acc) {
    // Interleaving leaves four channels of each eight in one tile, and four in the other.
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
    alignas(64) static const bf16 zeros[256] = {};  // a NaN in a slot nobody wrote would spread, though its probability is zero
    auto row = [&](int j) { return j < entries.count ? entries.values[j] : zeros; };
    split_probabilities(rows, s.scores, s.p);
    for (int64_t d = 0; d < head_dim; d += kTileDepth) {
        constexpr int kPairs = kTileKeys / 2;
        for (int pair = 0; pair < kPairs; pair++) {
            if (pair % 3 == 0) ahead.some();
            const __m512i even = _mm512_loadu_si512(row(2 * pair) + d), odd = _mm512_loadu_si512(row(2 * pair + 1) + d);
            bf16* to = s.values + pair * kTileDepth;
            _mm512_storeu_si512(to, _mm512_unpacklo_epi16(even, odd));
            _mm512_storeu_si512(to + kPairs * kTileDepth, _mm512_unpackhi_epi16(even, odd));
        }
        alignas(64) float out[2][2 * kDecodeRows][kTileSide];
        memory_is_written();
        _tile_loadd(4, s.p, kTileRowBytes);
        _tile_loadd(5, s.p + 2 * kDecodeRows * kTileDepth, kTileRowBytes);
        for (int i = 0; i < 2; i++) {
            const bf16* values = s.values + i * kPairs * kTileDepth;
            _tile_zero(3);
            _tile_loadd(6, values, kTileRowBytes);
            _tile_dpbf16ps(3, 4, 6);
            _tile_loadd(7, values + kTileSide * kTileDepth, kTileRowBytes);
            _tile_dpbf16ps(3, 5, 7);
            _tile_stored(3, out[i], kTileRowBytes);
        }
        memory_is_written();
        for (int64_t r = 0; r < rows; r++) {
            const __m512 x = (__m512)(load(out[0][r]) + load(out[0][kDecodeRows + r])), y = (__m512)(load(out[1][r]) + load(out[1][kDecodeRows + r]));
            float* to = acc + r * head_dim + d;
            store(to, load(to) + (Vec)_mm512_permutex2var_ps(x, first, y));
            store(to + kTileSide, load(to + kTileSide) + (Vec)_mm512_permutex2var_ps(x, second, y));
        }
    }
    ahead.finish();
}

inline bool suits_decode(const AttentionArgs& a, const Tile& t) {
    const bool plain = a.pool.keys.format == kBF16 && a.pool.values.format == kBF16 && !a.pool.staged.slot_of;
    return plain && t.row_end - t.row_begin <= kDecodeRows && a.pool.head_dim % kTileDepth == 0;
}

inline void decode_attention(const AttentionArgs& a, const Tile& t, void* memory) {
    const int64_t head_dim = a.pool.head_dim, rows = t.row_end - t.row_begin, all_rows = t.num_kv_heads * rows;
    const DecodeScratch s(memory, head_dim);
    const TileConfig configured(kDecodeTiles);
    pack_few_queries(a, t, s.queries);
    memset(s.p, 0, 4 * kDecodeRows * kTileDepth * sizeof(bf16));
    memset(s.keys, 0, kTileSide * head_dim * sizeof(bf16));
    memset(s.acc, 0, all_rows * head_dim * sizeof(float));
    for (int64_t r = 0; r < all_rows; r++) {
        s.top[r] = -INFINITY;
        s.sum[r] = 0;
    }
    for (const Stretch& stretch : stretches(a, t)) {
        InPlace<bf16> source(a, t, stretch, nullptr);
        for (int64_t begin = stretch.begin; begin < stretch.end; begin += kTileKeys) {
            const int64_t end = smaller(begin + kTileKeys, stretch.end);
            for (int h = 0; h < t.num_kv_heads; h++) {
                const bool last = h + 1 == t.num_kv_heads;
                const Entries<bf16>& entries = source.at(t.kv_head + h, begin, t.kv_head + (last ? 0 : h + 1), last ? end : begin);
                Lookahead ahead = source.lookahead();
                score_few(a, entries, begin, s.queries + h * kDecodeRows * head_dim, ahead, s);
                float* acc = s.acc + h * rows * head_dim;
                for (int64_t r = 0; r < rows; r++) {
                    float* scores = s.scores + r * kTileKeys;
                    ahead.some();
                    soft_cap(a, scores, kTileKeys);
                    mask(scores, seen(a, t, stretch, t.row_begin + r, begin, end), kTileKeys);
                    softmax_step(scores, kTileKeys, s.top[h * rows + r], s.sum[h * rows + r], acc + r * head_dim, head_dim);
                }
                accumulate_few(entries, head_dim, rows, ahead, s, acc);
            }
        }
    }
    for (int64_t r = 0; r < all_rows; r++) {
        finish_row<bf16>(a, t, (int)(r / rows), r % rows, s.acc + r * head_dim, s.top[r], s.sum[r]);
    }
}

}  // namespace
}  // namespace pagoda::PAGODA_ISA
