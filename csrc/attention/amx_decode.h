// Decode attention on AMX over BF16 keys and values, or floats of eight bits that became BF16: up to sixteen rows of each KV head, the
// heads of a tile one after the other.
//
//     scores [16 keys, rows]  = keys [16 keys, head_dim]  x  queries           keys as they lie are a left operand
//     even [rows, 16 channels] += probabilities [rows, 16 keys x (p, 0)]  x  values    values as they lie are a right one whose depth is
//     odd  [rows, 16 channels] += probabilities [rows, 16 keys x (0, p)]  x  values    keys x two channels: a zero leaves one of them out
//
// So nothing is turned, and nothing copied but where sixteen entries do not lie one after the other. Reading is what takes time here: the next entries are asked for evenly, between what is computed with
// these.
#pragma once

#include "amx.h"
#include "attention/tile.h"

namespace pagoda::PAGODA_ISA {
namespace {

constexpr int kQuad = 4;  // rows that are columns of a product with queries
constexpr int kQuadBytes = kQuad * 4;
constexpr int64_t kBand = kQuad, kWideBand = 2 * kQuad;  // rows, a band, whose probabilities are a product's: twice as many, as they are in two parts

// Registers: 0 and 1, for two quads of rows, are keys (2) times queries (3); 4 and 5, for even and odd channels, are probabilities (6 and 7)
// times values (2).
constexpr TileShapes decode_tiles(int64_t band) {
    TileShapes shapes;
    shapes.row_bytes[0] = shapes.row_bytes[1] = shapes.row_bytes[3] = kQuadBytes;
    shapes.rows[4] = shapes.rows[5] = shapes.rows[6] = shapes.rows[7] = (uint8_t)(2 * band);
    return shapes;
}
constexpr TileShapes kBandTiles = decode_tiles(kBand), kWideBandTiles = decode_tiles(kWideBand);

inline int64_t band_of(int64_t rows) { return rows > kBand ? kWideBand : kBand; }

struct DecodeScratch {
    float* acc;     // [heads * rows, head_dim]
    float* top;     // [heads * rows]
    float* sum;     // [heads * rows]
    float* scores;  // [kDecodeRows, kTileKeys]
    bf16* queries;  // [heads][quads][head_dim / 2][kQuad][2]: a row may have a quad of its own
    uint32_t* p;    // [bands][4 of 16 keys][even | odd channels][high | low][band][16]: a BF16 in one half of each
    bf16* room;     // [kTileKeys][head_dim], for keys or values that do not lie in one block
    void* widened;  // what Widened keeps

    DecodeScratch(void* memory, int64_t head_dim)
        : acc((float*)memory),
          top(acc + kTileRows * head_dim),
          sum(top + kTileRows),
          scores(sum + kTileRows),
          queries((bf16*)(scores + kDecodeRows * kTileKeys)),
          p((uint32_t*)(queries + 4 * kTileRows * head_dim)),
          room((bf16*)(p + 4 * kDecodeRows * kTileKeys)),
          widened(room + kTileKeys * head_dim) {}
    static int64_t bytes(int64_t head_dim) {
        return Widened<bf16>::bytes(head_dim) + (kTileRows * (head_dim + 2) + 5 * kDecodeRows * kTileKeys) * (int64_t)sizeof(float) +
               (4 * kTileRows + kTileKeys) * head_dim * (int64_t)sizeof(bf16);
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

// Where the keys, or values, of up to kTileKeys entries are for tiles, sixteen by sixteen: as they lie, or, where sixteen do not lie one
// after the other, in `room`, [kTileKeys][head_dim], the last of those that have some filled up with zeros.
struct Sixteens {
    const bf16* data[kTileKeys / kTileSide];
    int64_t stride[kTileKeys / kTileSide];

    // Slots are `slot_bytes` apart, `slots` of them in a block, and the first entry is in slot `first`.
    Sixteens(const bf16* const* rows, int count, int64_t first, int64_t slots, int64_t slot_bytes, int64_t head_dim, bf16* room) {
        const int64_t bytes = head_dim * sizeof(bf16);
        for (int j = 0; j < kTileKeys; j += kTileSide, room += kTileSide * head_dim) {
            const bool as_they_lie = j + kTileSide <= count && (first + j) % slots + kTileSide <= slots;
            data[j / kTileSide] = as_they_lie ? rows[j] : room;
            stride[j / kTileSide] = as_they_lie ? slot_bytes : bytes;
            for (int i = 0; i < kTileSide && j < count && !as_they_lie; i++) {
                if (j + i < count) {
                    memcpy(room + i * head_dim, rows[j + i], bytes);
                } else {
                    memset(room + i * head_dim, 0, bytes);  // a NaN in a slot nobody wrote would spread, though its probability is zero
                }
            }
        }
        memory_is_written();
    }
};

// How a stretch's entries lie: in blocks, or, where they are widened first, one after the other.
struct Lying {
    int64_t slots, key_bytes, value_bytes;
    Lying(const AttentionArgs& a, const Stretch& stretch) : Lying(lies_as<bf16>(stretch), a, stretch) {}

private:
    Lying(bool in_place, const AttentionArgs& a, const Stretch& stretch)
        : slots(in_place ? a.pool.block_size : int64_t{1} << 62),
          key_bytes((in_place ? stretch.keys->slot_stride : padded(a.pool.head_dim)) * (int64_t)sizeof(bf16)),
          value_bytes((in_place ? stretch.values->slot_stride : padded(a.pool.head_dim)) * (int64_t)sizeof(bf16)) {}
};

// Scores of a head's rows against up to kTileKeys entries, in units of log2 or what a softcap takes.
inline void score_few(const AttentionArgs& a, const Sixteens& keys, int count, const bf16* queries, int64_t quads, Lookahead& ahead, const DecodeScratch& s) {
    const int64_t head_dim = a.pool.head_dim;
    alignas(64) float sums[kDecodeRows / kQuad][kTileKeys][kQuad];
    for (int j = 0; j < count; j += kTileSide) {
        for (int64_t quad = 0; quad < quads; quad += 2) {
            const bf16 *q = queries + quad * kQuad * head_dim, *next_q = q + kQuad * head_dim;
            const bool two = quad + 1 < quads;
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t d = 0; d < head_dim; d += kTileDepth) {
                ahead.some();
                ahead.some();
                _tile_loadd(2, keys.data[j / kTileSide] + d, keys.stride[j / kTileSide]);
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
        for (int j = 0; j < count; j += kTileSide) {
            Vec rows[kQuad];
            few_rows_of(sums[quad][j], rows);
            for (int r = 0; r < kQuad; r++) store(s.scores + (quad * kQuad + r) * kTileKeys + j, rows[r] * unit);
        }
    }
}

// Scores, probabilities by now, in two parts, for even channels and for odd ones.
inline void split_probabilities(int64_t rows, const float* scores, uint32_t* to) {
    // To the nearest BF16, in the upper half.
    auto rounded = [](Vec x) { return _mm512_and_si512(_mm512_add_epi32((__m512i)x, _mm512_set1_epi32(0x8000)), _mm512_set1_epi32((int)0xffff0000)); };
    const int64_t band = band_of(rows), part = band * kTileSide;
    for (int64_t r = 0; r < rows; r++) {
        uint32_t* p = to + r / band * (4 * kTileKeys * band) + r % band * kTileSide;
        for (int j = 0; j < kTileKeys; j += kTileSide, p += 4 * part) {
            const Vec x = load(scores + r * kTileKeys + j);
            const __m512i high = rounded(x), low = rounded(x - (Vec)high);
            _mm512_storeu_si512(p, _mm512_srli_epi32(high, 16));
            _mm512_storeu_si512(p + part, _mm512_srli_epi32(low, 16));
            _mm512_storeu_si512(p + 2 * part, high);
            _mm512_storeu_si512(p + 3 * part, low);
        }
    }
}

// acc [rows, head_dim] += probabilities x values
inline void accumulate_few(const Sixteens& values, int count, int64_t head_dim, int64_t rows, Lookahead& ahead, const DecodeScratch& s, float* acc) {
    const __m512i first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i second = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
    const int64_t band = band_of(rows), part = 2 * band * kTileSide;
    split_probabilities(rows, s.scores, s.p);
    memory_is_written();
    for (int64_t d = 0; d < head_dim; d += kTileDepth) {
        const uint32_t* p = s.p;
        for (int64_t begin = 0; begin < rows; begin += band) {
            alignas(64) float even[2 * kWideBand][kTileSide], odd[2 * kWideBand][kTileSide];
            _tile_zero(4);
            _tile_zero(5);
            for (int j = 0; j < kTileKeys; j += kTileSide, p += 2 * part) {
                if (begin == 0) {
                    ahead.some();
                    ahead.some();
                }
                if (j >= count) continue;
                _tile_loadd(2, values.data[j / kTileSide] + d, values.stride[j / kTileSide]);
                _tile_loadd(6, p, kTileRowBytes);
                _tile_dpbf16ps(4, 6, 2);
                _tile_loadd(7, p + part, kTileRowBytes);
                _tile_dpbf16ps(5, 7, 2);
            }
            _tile_stored(4, even, kTileRowBytes);
            _tile_stored(5, odd, kTileRowBytes);
            memory_is_written();
            float* to = acc + begin * head_dim + d;
            for (int64_t r = 0; r < smaller(band, rows - begin); r++, to += head_dim) {
                const __m512 x = (__m512)(load(even[r]) + load(even[band + r])), y = (__m512)(load(odd[r]) + load(odd[band + r]));
                store(to, load(to) + (Vec)_mm512_permutex2var_ps(x, first, y));
                store(to + kTileSide, load(to + kTileSide) + (Vec)_mm512_permutex2var_ps(x, second, y));
            }
        }
    }
    ahead.finish();
}

// One stretch's part in what `s` accumulates.
template <typename Source>
inline void decode_stretch(const AttentionArgs& a, const Tile& t, const Stretch& stretch, const DecodeScratch& s) {
    const int64_t head_dim = a.pool.head_dim, rows = t.row_end - t.row_begin, quads = quads_of(rows);
    const Lying lying(a, stretch);
    Source source(a, t, stretch, s.widened);
    for (int64_t begin = stretch.begin, end; begin < stretch.end; begin = end) {
        end = tile_end(begin, stretch.end);
        Seen by[kDecodeRows];
        for (int64_t r = 0; r < rows; r++) by[r] = seen(a, t, stretch, t.row_begin + r, begin, end);
        for (int h = 0; h < t.num_kv_heads; h++) {
            const bool last = h + 1 == t.num_kv_heads;
            const Entries<bf16>& entries = source.at(t.kv_head + h, begin, t.kv_head + (last ? 0 : h + 1), last ? end : begin);
            Lookahead ahead = source.lookahead();
            const int count = entries.count;
            const Sixteens keys(entries.keys, count, begin % lying.slots, lying.slots, lying.key_bytes, head_dim, s.room);
            score_few(a, keys, count, s.queries + h * quads * kQuad * head_dim, quads, ahead, s);
            float* acc = s.acc + h * rows * head_dim;
            for (int64_t r = 0; r < rows; r++) {
                float* scores = s.scores + r * kTileKeys;
                ahead.some();
                if (source.key_scales()) multiply(scores, source.key_scales(), count);
                soft_cap(a, scores, count);
                mask(scores, by[r], kTileKeys);
                softmax_step(scores, kTileKeys, s.top[h * rows + r], s.sum[h * rows + r], acc + r * head_dim, head_dim);
                if (!source.value_scales()) continue;
                multiply(scores, source.value_scales(), count);
                for (int j = count; j % kWidth; j++) scores[j] = 0.0f;
            }
            const Sixteens values(entries.values, count, begin % lying.slots, lying.slots, lying.value_bytes, head_dim, s.room);
            accumulate_few(values, count, head_dim, rows, ahead, s, acc);
        }
    }
}

inline bool eight_bit_float(const PoolPart& part) { return part.format == kE4M3 || part.format == kE5M2; }

// One row of BF16 is faster on tiles in the cache, and slower where it is read from memory: left to float32 vectors.
inline bool suits_decode(const AttentionArgs& a, const Tile& t) {
    const int64_t rows = t.row_end - t.row_begin;
    const bool plain = a.pool.keys.format == kBF16 && a.pool.values.format == kBF16 && !a.pool.staged.slot_of && rows > 1;
    const bool floats = eight_bit_float(a.pool.keys) && eight_bit_float(a.pool.values);
    return (plain || floats) && rows <= kDecodeRows && a.pool.head_dim % kTileDepth == 0;
}

inline void decode_attention(const AttentionArgs& a, const Tile& t, void* memory) {
    const int64_t head_dim = a.pool.head_dim, rows = t.row_end - t.row_begin;
    const DecodeScratch s(memory, head_dim);
    const TileConfig configured(rows > kBand ? kWideBandTiles : kBandTiles);
    pack_few_queries(a, t, s.queries);
    start_rows(t.num_kv_heads * rows, head_dim, s.acc, s.top, s.sum);
    for (const Stretch& stretch : stretches(a, t)) {
        with_tile_source(stretch, [&]<typename Source>() { decode_stretch<Source>(a, t, stretch, s); });
    }
    finish_rows<bf16>(a, t, s.acc, s.top, s.sum);
}

}  // namespace
}  // namespace pagoda::PAGODA_ISA
