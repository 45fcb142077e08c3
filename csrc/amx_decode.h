// Decode attention on AMX over BF16 keys and values, or floats of eight bits that became BF16: up to sixteen rows of each KV head, the
// heads of a tile one after the other.
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

constexpr int kQuad = 4;  // rows that are a product's: columns of queries, and twice as many rows of probabilities, which are in two parts
constexpr int kQuadBytes = kQuad * 4;

// Registers: 0 and 1, for two quads of rows, are keys (2) times queries (3); 4 and 5 are probabilities (6) times values (7).
constexpr TileShapes decode_tiles() {
    TileShapes shapes;
    shapes.row_bytes[0] = shapes.row_bytes[1] = shapes.row_bytes[3] = kQuadBytes;
    shapes.rows[4] = shapes.rows[5] = shapes.rows[6] = 2 * kQuad;
    return shapes;
}
constexpr TileShapes kDecodeTiles = decode_tiles();

struct DecodeScratch {
    float* acc;     // [heads * rows, head_dim]
    float* top;     // [heads * rows]
    float* sum;     // [heads * rows]
    float* scores;  // [kDecodeRows, kTileKeys]
    bf16* queries;  // [heads][quads][head_dim / 2][kQuad][2]: a row may have a quad of its own
    bf16* p;        // [quads][2 of 32 keys][high | low][kQuad][32]
    bf16* values;   // [2 of 16 channels][kTileKeys / 2][16][2]
    bf16* keys;     // [16][head_dim], where they do not lie in one block
    void* widened;  // what Widened keeps

    DecodeScratch(void* memory, int64_t head_dim)
        : acc((float*)memory),
          top(acc + kTileRows * head_dim),
          sum(top + kTileRows),
          scores(sum + kTileRows),
          queries((bf16*)(scores + kDecodeRows * kTileKeys)),
          p(queries + 4 * kTileRows * head_dim),
          values(p + 4 * kDecodeRows * kTileDepth),
          keys(values + kTileKeys * kTileDepth),
          widened(keys + kTileSide * head_dim) {}
    static int64_t bytes(int64_t head_dim) {
        return Widened<bf16>::bytes(head_dim) + (kTileRows * (head_dim + 2) + kDecodeRows * kTileKeys) * (int64_t)sizeof(float) +
               ((4 * kTileRows + kTileSide) * head_dim + 4 * kDecodeRows * kTileDepth + kTileKeys * kTileDepth) * (int64_t)sizeof(bf16);
    }
};

inline int64_t quads_of(int64_t rows) { return (rows + kQuad - 1) / kQuad; }

// The query of a row as tiles take it: as it lies, or, where keys are mixed, mixed too and rounded again into `room`, [head_dim].
inline const bf16* tile_query(const AttentionArgs& a, const Tile& t, int kv_head, int64_t row, bf16* room) {
    const bf16* from = query_at<bf16>(a, t, kv_head, row);
    if (!scaled_by_row(a.pool.keys)) return from;
    const int64_t head_dim = a.pool.head_dim;
    const float unit = 1.0f / (float)mix_order(head_dim);
    alignas(64) float mixed[kMaxHeadDim];
    for (int64_t d = 0; d < head_dim; d += kWidth) store(mixed + d, load(from + d) * unit);
    mix(mixed, head_dim);
    for (int64_t d = 0; d < head_dim; d += kWidth) store(room + d, load(mixed + d));
    return room;
}

inline void pack_few_queries(const AttentionArgs& a, const Tile& t, bf16* to) {
    alignas(64) bf16 room[kMaxHeadDim];
    const int64_t head_dim = a.pool.head_dim, quads = quads_of(t.row_end - t.row_begin);
    memset(to, 0, t.num_kv_heads * quads * kQuad * head_dim * sizeof(bf16));
    for (int h = 0; h < t.num_kv_heads; h++, to += quads * kQuad * head_dim) {
        for (int64_t r = 0; r < t.row_end - t.row_begin; r++) {
            const bf16* from = tile_query(a, t, t.kv_head + h, t.row_begin + r, room);
            bf16* quad = to + r / kQuad * kQuad * head_dim + 2 * (r % kQuad);
            for (int64_t d = 0; d < head_dim; d += 2) memcpy(quad + d * kQuad, from + d, 2 * sizeof(bf16));
        }
    }
}

// [16 keys, 4 rows] -> a vector of keys for each row
inline void few_rows_of(const float* sums, Vec rows[kQuad]) {
    __m512i r[kQuad];
    for (int i = 0; i < kQuad; i++) r[i] = _mm512_loadu_si512(sums + i * kTileSide);
    transpose4(r);
    for (int i = 0; i < kQuad; i++) rows[i] = (Vec)_mm512_permutexvar_epi32(square_order(), r[i]);
}

// How keys lie: `slots` of them `slot_bytes` apart, and the first one that is meant is in slot `first`.
struct KeyRuns {
    int64_t first, slots, slot_bytes;
};

// Scores of a head's rows against up to kTileKeys entries, in units of log2 or what a softcap takes.
inline void score_few(const AttentionArgs& a, const Entries<bf16>& entries, const KeyRuns& runs, const bf16* queries, int64_t quads, Lookahead& ahead,
                      const DecodeScratch& s) {
    const int64_t head_dim = a.pool.head_dim;
    alignas(64) float sums[kDecodeRows / kQuad][kTileKeys][kQuad];
    for (int j = 0; j < kTileKeys; j += kTileSide) {
        const bf16* keys = entries.keys[j];
        int64_t stride = runs.slot_bytes;
        if (j + kTileSide > entries.count || (runs.first + j) % runs.slots + kTileSide > runs.slots) {
            for (int i = j; i < smaller(j + kTileSide, entries.count); i++) memcpy(s.keys + (i - j) * head_dim, entries.keys[i], head_dim * sizeof(bf16));
            keys = s.keys;
            stride = head_dim * sizeof(bf16);
            memory_is_written();
        }
        for (int64_t quad = 0; quad < quads; quad += 2) {
            const bf16 *q = queries + quad * kQuad * head_dim, *next_q = q + kQuad * head_dim;
            const bool two = quad + 1 < quads;
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t d = 0; d < head_dim; d += kTileDepth) {
                ahead.some();
                _tile_loadd(2, keys + d, stride);
                _tile_loadd(3, q + d * kQuad, kQuadBytes);
                _tile_dpbf16ps(0, 2, 3);
                if (!two) continue;
                _tile_loadd(3, next_q + d * kQuad, kQuadBytes);
                _tile_dpbf16ps(1, 2, 3);
            }
            _tile_stored(0, sums[quad][j], kQuadBytes);
            if (two) _tile_stored(1, sums[quad + 1][j], kQuadBytes);
        }
    }
    memory_is_written();
    const float unit = query_scale(a);
    for (int64_t quad = 0; quad < quads; quad++) {
        for (int j = 0; j < kTileKeys; j += kTileSide) {
            Vec rows[kQuad];
            few_rows_of(sums[quad][j], rows);
            for (int r = 0; r < kQuad; r++) store(s.scores + (quad * kQuad + r) * kTileKeys + j, rows[r] * unit);
        }
    }
}

// Scores, probabilities by now, in two parts.
inline void split_probabilities(int64_t rows, const float* scores, bf16* to) {
    for (int64_t r = 0; r < rows; r++) {
        bf16* p = to + r / kQuad * 4 * kQuad * kTileDepth;
        for (int half = 0; half < 2; half++) {
            const Vec x = load(scores + r * kTileKeys + half * kTileDepth), y = load(scores + r * kTileKeys + half * kTileDepth + kTileSide);
            bf16 *high = p + (half * 2 * kQuad + r % kQuad) * kTileDepth, *low = high + kQuad * kTileDepth;
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
    const bf16* padded[kTileKeys];
    for (int j = 0; entries.count < kTileKeys && j < kTileKeys; j++) padded[j] = j < entries.count ? entries.values[j] : zeros;
    const bf16* const* values_of = entries.count < kTileKeys ? padded : entries.values;
    split_probabilities(rows, s.scores, s.p);
    const int64_t quads = quads_of(rows);
    for (int64_t d = 0; d < head_dim; d += kTileDepth) {
        constexpr int kPairs = kTileKeys / 2;
        for (int pair = 0; pair < kPairs; pair++) {
            if (pair % 3 == 0) ahead.some();
            const __m512i even = _mm512_loadu_si512(values_of[2 * pair] + d), odd = _mm512_loadu_si512(values_of[2 * pair + 1] + d);
            bf16* to = s.values + pair * kTileDepth;
            _mm512_storeu_si512(to, _mm512_unpacklo_epi16(even, odd));
            _mm512_storeu_si512(to + kPairs * kTileDepth, _mm512_unpackhi_epi16(even, odd));
        }
        alignas(64) float out[kDecodeRows / kQuad][2][2 * kQuad][kTileSide];
        memory_is_written();
        for (int64_t quad = 0; quad < quads; quad += 2) {
            constexpr int kPart = 2 * kQuad * kTileDepth;
            const bool two = quad + 1 < quads;
            for (int i = 0; i < 2; i++) {
                _tile_zero(4);
                _tile_zero(5);
                for (int half = 0; half < 2; half++) {
                    const bf16* p = s.p + (2 * quad + half) * kPart;
                    _tile_loadd(7, s.values + (2 * i + half) * kTileSide * kTileDepth, kTileRowBytes);
                    _tile_loadd(6, p, kTileRowBytes);
                    _tile_dpbf16ps(4, 6, 7);
                    if (!two) continue;
                    _tile_loadd(6, p + 2 * kPart, kTileRowBytes);
                    _tile_dpbf16ps(5, 6, 7);
                }
                _tile_stored(4, out[quad][i], kTileRowBytes);
                if (two) _tile_stored(5, out[quad + 1][i], kTileRowBytes);
            }
        }
        memory_is_written();
        for (int64_t r = 0; r < rows; r++) {
            auto& o = out[r / kQuad];
            const int64_t i = r % kQuad;
            const __m512 x = (__m512)(load(o[0][i]) + load(o[0][kQuad + i])), y = (__m512)(load(o[1][i]) + load(o[1][kQuad + i]));
            float* to = acc + r * head_dim + d;
            store(to, load(to) + (Vec)_mm512_permutex2var_ps(x, first, y));
            store(to + kTileSide, load(to + kTileSide) + (Vec)_mm512_permutex2var_ps(x, second, y));
        }
    }
    ahead.finish();
}

// One stretch's part in what `s` accumulates.
template <typename Source>
inline void decode_stretch(const AttentionArgs& a, const Tile& t, const Stretch& stretch, const DecodeScratch& s) {
    const int64_t head_dim = a.pool.head_dim, rows = t.row_end - t.row_begin, quads = quads_of(rows), bytes = sizeof(bf16);
    Source source(a, t, stretch, s.widened);
    for (int64_t begin = stretch.begin; begin < stretch.end; begin += kTileKeys) {
        const int64_t end = smaller(begin + kTileKeys, stretch.end);
        Seen by[kDecodeRows];
        for (int64_t r = 0; r < rows; r++) by[r] = seen(a, t, stretch, t.row_begin + r, begin, end);
        for (int h = 0; h < t.num_kv_heads; h++) {
            const bool last = h + 1 == t.num_kv_heads;
            const Entries<bf16>& entries = source.at(t.kv_head + h, begin, t.kv_head + (last ? 0 : h + 1), last ? end : begin);
            Lookahead ahead = source.lookahead();
            const KeyRuns runs = lies_as<bf16>(stretch) ? KeyRuns{begin % a.pool.block_size, a.pool.block_size, stretch.keys->slot_stride * bytes}
                                                        : KeyRuns{0, kTileKeys, padded(head_dim) * bytes};
            score_few(a, entries, runs, s.queries + h * quads * kQuad * head_dim, quads, ahead, s);
            float* acc = s.acc + h * rows * head_dim;
            for (int64_t r = 0; r < rows; r++) {
                float* scores = s.scores + r * kTileKeys;
                ahead.some();
                if (source.key_scales()) multiply(scores, source.key_scales(), entries.count);
                soft_cap(a, scores, kTileKeys);
                mask(scores, by[r], kTileKeys);
                softmax_step(scores, kTileKeys, s.top[h * rows + r], s.sum[h * rows + r], acc + r * head_dim, head_dim);
                if (!source.value_scales()) continue;
                multiply(scores, source.value_scales(), entries.count);
                for (int j = entries.count; j % kWidth; j++) scores[j] = 0.0f;
            }
            accumulate_few(entries, head_dim, rows, ahead, s, acc);
        }
    }
}

inline bool eight_bit_float(const PoolPart& part) { return part.format == kE4M3 || part.format == kE5M2; }

// One row of BF16 is as fast with float32 vectors: there is no second one to share what was made of its values.
inline bool suits_decode(const AttentionArgs& a, const Tile& t) {
    const int64_t rows = t.row_end - t.row_begin;
    const bool plain = a.pool.keys.format == kBF16 && a.pool.values.format == kBF16 && !a.pool.staged.slot_of && rows > 1;
    const bool floats = eight_bit_float(a.pool.keys) && eight_bit_float(a.pool.values);
    return (plain || floats) && rows <= kDecodeRows && a.pool.head_dim % kTileDepth == 0;
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
        with_tile_source(stretch, [&]<typename Source>() { decode_stretch<Source>(a, t, stretch, s); });
    }
    for (int64_t r = 0; r < all_rows; r++) {
        finish_row<bf16>(a, t, (int)(r / rows), r % rows, s.acc + r * head_dim, s.top[r], s.sum[r]);
    }
}

}  // namespace
}  // namespace pagoda::PAGODA_ISA
