// One tile of BF16 attention on AMX. Scores are computed transposed, so that vector lanes are query rows throughout and
// no sum or maximum ever crosses lanes:
//
//     S^T [keys, rows] = K   [keys, head_dim]  x  Q^T  right operand, packed once per tile
//     P^T [keys, rows] = 2^(S^T - top)             rounded to BF16 pairs of keys: already a right operand
//     O^T [head_dim, rows] += V^T [head_dim, keys]  x  P^T
//
// K is a left operand as it lies in the pool, V after a transpose that all rows of the tile share.
#pragma once

#include "amx.h"
#include "attention_tile.h"

namespace pagoda::PAGODA_ISA {
namespace {

constexpr int kMinAmxRows = 5;  // fewer rows waste the columns of a tile; float32 vectors are faster then

struct AmxScratch {
    bf16* q;        // [kTileRows / 16][head_dim / 2][16 rows][2]
    bf16* k;        // [kTileKeys][head_dim]
    bf16* vt;       // [kTileKeys / 32][head_dim][32 keys]
    bf16* p;        // [kTileKeys / 2][16 rows][2]
    float* scores;  // [kTileKeys][16 rows]
    float* acc;     // [kTileRows / 16][head_dim][16 rows]
    float* top;     // [kTileRows]
    float* sum;     // [kTileRows]
    void* widened;  // what Widened keeps

    AmxScratch(void* memory, int64_t head_dim)
        : q((bf16*)memory),
          k(q + kTileRows * head_dim),
          vt(k + kTileKeys * head_dim),
          p(vt + kTileKeys * head_dim),
          scores((float*)(p + kTileKeys * kTileSide)),
          acc(scores + kTileKeys * kTileSide),
          top(acc + kTileRows * head_dim),
          sum(top + kTileRows),
          widened(sum + kTileRows) {}
    static int64_t bytes(int64_t head_dim) {
        return Widened<bf16>::bytes(head_dim) + (kTileRows + 2 * kTileKeys) * head_dim * (int64_t)sizeof(bf16) + kTileKeys * kTileSide * (int64_t)sizeof(bf16) +
               (kTileKeys * kTileSide + kTileRows * (head_dim + 2)) * (int64_t)sizeof(float);
    }
};

int64_t amx_scratch_bytes(int64_t head_dim) { return larger(Scratch::bytes(head_dim), AmxScratch::bytes(head_dim)); }

inline void pack_queries(const AttentionArgs& a, const Tile& t, bf16* to) {
    const int64_t group = a.num_heads / a.pool.num_kv_heads, head_dim = a.pool.head_dim;
    const float unit = 1.0f / (float)mix_order(head_dim);
    alignas(64) bf16 rows[kTileSide * 256];
    for (int64_t begin = t.row_begin; begin < t.row_end; begin += kTileSide) {
        const int count = (int)smaller<int64_t>(kTileSide, t.row_end - begin);
        for (int r = 0; r < count; r++) {
            const int64_t row = begin + r;
            const bf16* from = (const bf16*)a.q + (t.first_token_row + row / group) * a.q_row_stride +
                               (t.kv_head * group + row % group) * a.q_head_stride;
            if (!scaled_by_row(a.pool.keys)) {
                memcpy(rows + r * head_dim, from, head_dim * sizeof(bf16));
                continue;
            }
            alignas(64) float mixed[256];
            for (int64_t i = 0; i < head_dim; i += kWidth) store(mixed + i, load(from + i) * unit);
            mix(mixed, head_dim);
            for (int64_t i = 0; i < head_dim; i += kWidth) store(rows + r * head_dim + i, load(mixed + i));
        }
        pack_right_operand(rows, head_dim, count, head_dim, to);
        to += kTileSide * head_dim;
    }
}

// Entries past `count` become zero, up to a whole tile of 32 keys: a NaN in a slot nobody wrote would spread.
template <typename Source>
inline void pack_keys(const Entries<bf16>& entries, const Source& source, int count, int64_t head_dim, bf16* to) {
    for (int turn = 0; turn < turns(count); turn++) {
        source.prefetch_next(turn);
        for (int j = turn; j < count; j += turns(count)) memcpy(to + j * head_dim, entries.keys[j], head_dim * sizeof(bf16));
    }
    const int end = (count + kTileSide - 1) / kTileSide * kTileSide;
    memset(to + count * head_dim, 0, (end - count) * head_dim * sizeof(bf16));
}

inline void pack_values(const Entries<bf16>& entries, int count, int64_t head_dim, bf16* to) {
    for (int j = 0; j < count; j += kTileDepth) {
        for (int64_t d = 0; d < head_dim; d += kTileSide) {
            __m512i r[kTileSide];
            for (int pair = 0; pair < kTileSide; pair++) {
                const int k = j + 2 * pair;
                const __m512i even = k < count ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(entries.values[k] + d)))
                                               : _mm512_setzero_si512();
                const __m512i odd = k + 1 < count ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(entries.values[k + 1] + d)))
                                                  : _mm512_setzero_si512();
                r[pair] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
            }
            transpose(r);
            for (int i = 0; i < kTileSide; i++) {
                _mm512_storeu_si512(to + j * head_dim + (d + i) * kTileDepth, r[i]);
            }
        }
    }
}

// scores [kTileKeys, 16] = K x Q^T for the keys of up to four tiles
inline void amx_scores(const bf16* k, const bf16* q, int key_tiles, int64_t head_dim, float* scores) {
    const int64_t stride = head_dim * sizeof(bf16);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < head_dim; d += kTileDepth) {
        _tile_loadd(4, q + d * kTileSide, kTileRowBytes);
        _tile_loadd(5, k + d, stride);
        _tile_dpbf16ps(0, 5, 4);
        if (key_tiles > 1) {
            _tile_loadd(6, k + 16 * head_dim + d, stride);
            _tile_dpbf16ps(1, 6, 4);
        }
        if (key_tiles > 2) {
            _tile_loadd(5, k + 32 * head_dim + d, stride);
            _tile_dpbf16ps(2, 5, 4);
        }
        if (key_tiles > 3) {
            _tile_loadd(6, k + 48 * head_dim + d, stride);
            _tile_dpbf16ps(3, 6, 4);
        }
    }
    _tile_stored(0, scores, kTileRowBytes);
    _tile_stored(1, scores + 256, kTileRowBytes);
    _tile_stored(2, scores + 512, kTileRowBytes);
    _tile_stored(3, scores + 768, kTileRowBytes);
}

// acc [head_dim, 16] += V^T x P^T over 32 or 64 keys
inline void amx_accumulate(const bf16* vt, const bf16* p, int key_tiles, int64_t head_dim, float* acc) {
    _tile_loadd(4, p, kTileRowBytes);
    if (key_tiles > 1) _tile_loadd(5, p + kTileDepth * kTileSide, kTileRowBytes);
    for (int64_t d = 0; d < head_dim; d += 2 * kTileSide) {
        float* to = acc + d * kTileSide;
        _tile_loadd(0, to, kTileRowBytes);
        _tile_loadd(1, to + 256, kTileRowBytes);
        _tile_loadd(6, vt + d * kTileDepth, kTileRowBytes);
        _tile_dpbf16ps(0, 6, 4);
        _tile_loadd(7, vt + (d + kTileSide) * kTileDepth, kTileRowBytes);
        _tile_dpbf16ps(1, 7, 4);
        if (key_tiles > 1) {
            const bf16* next = vt + kTileDepth * head_dim;
            _tile_loadd(6, next + d * kTileDepth, kTileRowBytes);
            _tile_dpbf16ps(0, 6, 5);
            _tile_loadd(7, next + (d + kTileSide) * kTileDepth, kTileRowBytes);
            _tile_dpbf16ps(1, 7, 5);
        }
        _tile_stored(0, to, kTileRowBytes);
        _tile_stored(1, to + 256, kTileRowBytes);
    }
}

// First and last KV index that each of 16 rows sees, counted from `begin`.
struct SeenLanes {
    bool all;  // every row sees every one of the keys; then the rest is not set
    IntVec first, last;
};
inline SeenLanes seen_lanes(const AttentionArgs& a, const Tile& t, const Stretch& s, int64_t row, int64_t begin, int64_t end) {
    const int64_t last_row = smaller(row + kTileSide, t.row_end) - 1;
    SeenLanes lanes;
    // What the first and the last row see, all rows between them see.
    lanes.all = seen(a, t, s, row, begin, end).last == end - begin && seen(a, t, s, last_row, begin, end).first == 0;
    if (lanes.all) return lanes;
    for (int i = 0; i < kTileSide; i++) {
        const Seen visible = seen(a, t, s, smaller(row + i, last_row), begin, end);
        lanes.first[i] = visible.first;
        lanes.last[i] = visible.last;
    }
    return lanes;
}

// Scores of 16 rows -> P^T as a right operand; returns what the accumulated output must be multiplied by. Plain scores
// are scaled on the way into the exponential; those that are capped or masked are rewritten before. Probabilities are multiplied
// with `value_scales` after they were summed.
inline Vec amx_softmax(const AttentionArgs& a, float* scores, int count, const SeenLanes& seen, const float* value_scales, float* top,
                       float* sum, bf16* p) {
    const Vec nothing = splat(-INFINITY);
    const bool plain = seen.all && a.softcap <= 0 && a.scale > 0;
    const float unit = plain ? a.scale * kLog2E : 1.0f;
    const Vec old_top = load(top);
    Vec highest[2] = {nothing, nothing};
    for (int j = 0; j < count; j++) {
        Vec s = load(scores + j * kTileSide);
        if (!plain) {
            s = a.softcap > 0 ? tanh(s * (a.scale / a.softcap)) * (a.softcap * kLog2E) : s * (a.scale * kLog2E);
            if (!seen.all) s = select((seen.first <= j) & (seen.last > j), s, nothing);
            store(scores + j * kTileSide, s);
        }
        highest[j % 2] = max(highest[j % 2], s);
    }
    const Vec new_top = max(old_top, max(highest[0], highest[1]) * unit);
    // A row that has seen no key yet keeps -inf; zero in its place makes its exponentials zero instead of NaN.
    const Vec base = select(new_top == nothing, Vec{}, new_top);
    const Vec rescale = exp2(old_top - base);
    Vec total = load(sum) * rescale;
    const int end = (count + kTileDepth - 1) / kTileDepth * kTileDepth;
    for (int j = 0; j < end; j += 2) {
        Vec even = j < count ? exp2(load(scores + j * kTileSide) * unit - base) : Vec{};
        Vec odd = j + 1 < count ? exp2(load(scores + (j + 1) * kTileSide) * unit - base) : Vec{};
        total += even + odd;
        if (value_scales && j < count) {
            even *= value_scales[j];
            odd *= value_scales[smaller(j + 1, count - 1)];
        }
        _mm512_storeu_si512(p + j * kTileSide, pack_pairs(even, odd));
    }
    store(top, new_top);
    store(sum, total);
    return rescale;
}

// One stretch's part in what `s` accumulates.
template <typename Source>
inline void amx_attend(const AttentionArgs& a, const Tile& t, const Stretch& stretch, const AmxScratch& s) {
    const int64_t head_dim = a.pool.head_dim, rows = t.row_end - t.row_begin;
    Source source(a, t, stretch, s.widened);
    for (int64_t begin = stretch.begin; begin < stretch.end; begin += kTileKeys) {
        const int64_t end = smaller(begin + kTileKeys, stretch.end);
        const int count = (int)(end - begin);
        const Entries<bf16>& entries = source.at(t.kv_head, begin, t.kv_head, end);
        pack_keys(entries, source, count, head_dim, s.k);
        pack_values(entries, count, head_dim, s.vt);
        const float *key_scales = source.key_scales(), *value_scales = source.value_scales();
        for (int64_t r = 0; r < rows; r += kTileSide) {
            const SeenLanes lanes = seen_lanes(a, t, stretch, t.row_begin + r, begin, end);
            amx_scores(s.k, s.q + r * head_dim, (count + kTileSide - 1) / kTileSide, head_dim, s.scores);
            for (int j = 0; key_scales && j < count; j++) {
                store(s.scores + j * kTileSide, load(s.scores + j * kTileSide) * key_scales[j]);
            }
            const Vec rescale = amx_softmax(a, s.scores, count, lanes, value_scales, s.top + r, s.sum + r, s.p);
            float* acc = s.acc + r * head_dim;
            if (_mm512_cmpneq_ps_mask((__m512)rescale, (__m512)splat(1.0f))) {
                for (int64_t d = 0; d < head_dim; d++) store(acc + d * kTileSide, load(acc + d * kTileSide) * rescale);
            }
            amx_accumulate(s.vt, s.p, (count + kTileDepth - 1) / kTileDepth, head_dim, acc);
        }
    }
}

void amx_attention(const AttentionArgs& a, const Tile& t, void* memory) {
    const int64_t head_dim = a.pool.head_dim, rows = t.row_end - t.row_begin;
    if (t.num_kv_heads > 1 || rows < kMinAmxRows || head_dim % kTileDepth != 0) return attention<bf16>(a, t, memory);
    const AmxScratch s(memory, head_dim);
    const TileConfig configured;
    const int64_t padded_rows = (rows + kTileSide - 1) / kTileSide * kTileSide;
    pack_queries(a, t, s.q);
    memset(s.acc, 0, padded_rows * head_dim * sizeof(float));
    for (int64_t r = 0; r < padded_rows; r++) {
        s.top[r] = -INFINITY;
        s.sum[r] = 0;
    }
    for (const Stretch& stretch : stretches(a, t)) {
        if (lies_as<bf16>(stretch)) {
            amx_attend<InPlace<bf16>>(a, t, stretch, s);
        } else {
            amx_attend<Widened<bf16>>(a, t, stretch, s);
        }
    }
    for (int64_t r = 0; r < rows; r += kTileSide) {
        float* acc = s.acc + r * head_dim;
        alignas(64) float row[kTileSide][256];
        for (int64_t d = 0; d < head_dim; d += kTileSide) {
            __m512i lanes[kTileSide];
            for (int i = 0; i < kTileSide; i++) lanes[i] = _mm512_loadu_si512(acc + (d + i) * kTileSide);
            transpose(lanes);
            for (int i = 0; i < kTileSide; i++) _mm512_storeu_si512(row[i] + d, lanes[i]);
        }
        for (int64_t i = 0; i < smaller<int64_t>(kTileSide, rows - r); i++) {
            finish_row<bf16>(a, t, 0, r + i, row[i], s.top[r + i], s.sum[r + i]);
        }
    }
}

}  // namespace
}  // namespace pagoda::PAGODA_ISA
