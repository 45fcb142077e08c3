// BF16 attention on AMX tiles. Scores are computed transposed, so that vector lanes are query rows throughout and no sum or maximum
// ever crosses lanes:
//
//     S^T [keys, rows] = K   [keys, head_dim]  x  Q^T  right operand, packed once per tile
//     P^T [keys, rows] = 2^(S^T - top)             rounded to BF16 pairs of keys: already a right operand
//     O^T [head_dim, rows] += V^T [head_dim, keys]  x  P^T
//
// K is a left operand as it lies in the pool, V after a transpose that all rows of the tile share: so a tile has many rows, and sixteen
// of them, a block, meet kTileKeys entries at a time. What one block does between its products, the tiles' instructions for its
// neighbours run beside:
//
//     tiles    S b | S c,   O a | S d,   O b |   ..
//     vectors      | exp(S b)   | exp(S c)   |
#pragma once

#include "attention/amx_decode.h"
#include "attention/amx_softmax.h"

namespace pagoda::PAGODA_ISA {
namespace {

constexpr int kMinAmxRows = 5;  // fewer rows waste the columns of a tile; float32 vectors are faster then

constexpr int kAmxRows = 768;   // most rows of a tile: they share what is read and packed of K and V
constexpr int kBlockScores = kTileKeys * kTileSide;

struct AmxScratch {
    bf16* q;        // [kAmxRows / 16][head_dim / 2][16 rows][2]
    bf16* room;     // [kTileKeys][head_dim]: see Sixteens
    bf16* vt;       // [kTileKeys / 32][head_dim][32 keys]
    bf16* p;        // [2 blocks][kTileKeys / 2][16 rows][2]
    float* scores;  // [2 blocks][kTileKeys][16 rows]
    float* acc;     // [kAmxRows / 16][head_dim][16 rows]
    float* top;     // [kAmxRows]
    float* sum;     // [kAmxRows]
    int32_t* first;  // [kAmxRows], and last: see BlockSeen
    int32_t* last;
    void* widened;  // what Widened keeps

    AmxScratch(void* memory, int64_t head_dim)
        : q((bf16*)memory),
          room(q + kAmxRows * head_dim),
          vt(room + kTileKeys * head_dim),
          p(vt + kTileKeys * head_dim),
          scores((float*)(p + 2 * kBlockScores)),
          acc(scores + 2 * kBlockScores),
          top(acc + kAmxRows * head_dim),
          sum(top + kAmxRows),
          first((int32_t*)(sum + kAmxRows)),
          last(first + kAmxRows),
          widened(last + kAmxRows) {}
    static int64_t bytes(int64_t head_dim) {
        return Widened<bf16>::bytes(head_dim) + ((kAmxRows + 2 * kTileKeys) * head_dim + 2 * kBlockScores) * (int64_t)sizeof(bf16) +
               (2 * kBlockScores + kAmxRows * (head_dim + 4)) * (int64_t)sizeof(float);
    }
    BlockSeen seen(int block) const { return {first + block * kTileSide, last + block * kTileSide}; }
    bf16* p_of(int block) const { return p + block % 2 * kBlockScores; }
    float* scores_of(int block) const { return scores + block % 2 * kBlockScores; }
};

int64_t amx_scratch_bytes(int64_t head_dim) {
    return larger(larger(Scratch::bytes(head_dim), AmxScratch::bytes(head_dim)), DecodeScratch::bytes(head_dim));
}

inline void pack_queries(const AttentionArgs& a, const Tile& t, bf16* to) {
    const int64_t head_dim = a.pool.head_dim;
    alignas(64) bf16 rows[kTileSide * kMaxHeadDim];
    for (int64_t begin = t.row_begin; begin < t.row_end; begin += kTileSide) {
        const int count = (int)smaller<int64_t>(kTileSide, t.row_end - begin);
        for (int r = 0; r < count; r++) {
            bf16* row = rows + r * head_dim;
            const bf16* from = tile_query(a, t, t.kv_head, begin + r, row);
            if (from != row) memcpy(row, from, head_dim * sizeof(bf16));
        }
        pack_right_operand(rows, head_dim, count, head_dim, to);
        to += kTileSide * head_dim;
    }
}

// Entries past `count` become zero: a NaN in a slot nobody wrote would spread, though its probability is zero.
inline void pack_values(const Entries<bf16>& entries, int count, int64_t head_dim, bf16* to) {
    alignas(64) static const bf16 zeros[kMaxHeadDim] = {};
    constexpr int kPart = 8;  // values of a 128-bit part: a vector has those of four entries
    for (int j = 0; j < kTileKeys; j += kTileDepth, to += kTileDepth * head_dim) {
        const bf16* rows[kTileDepth];
        for (int k = 0; k < kTileDepth; k++) rows[k] = j + k < count ? entries.values[j + k] : zeros;
        for (int64_t d = 0; d < head_dim; d += kPart) {
            auto part = [&](int k) { return _mm_loadu_si128((const __m128i*)(rows[k] + d)); };
            __m512i r[kPart];
            for (int k = 0; k < kPart; k++) {
                r[k] = _mm512_castsi128_si512(part(k));
                r[k] = _mm512_inserti32x4(r[k], part(k + kPart), 1);
                r[k] = _mm512_inserti32x4(r[k], part(k + 2 * kPart), 2);
                r[k] = _mm512_inserti32x4(r[k], part(k + 3 * kPart), 3);
            }
            transpose8(r);
            for (int i = 0; i < kPart; i++) _mm512_storeu_si512(to + (d + i) * kTileDepth, r[i]);
        }
    }
}

// scores [kTileKeys, 16] = K x Q^T; `beside` gets some() as often as kSteps says for each 32 channels.
template <int kSteps, typename Beside>
PAGODA_INLINE void amx_scores(const Sixteens& k, const bf16* q, int64_t head_dim, float* scores, Beside& beside) {
    memory_is_written();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < head_dim; d += kTileDepth) {
        _tile_loadd(4, q + d * kTileSide, kTileRowBytes);
        _tile_loadd(5, k.data[0] + d, k.stride[0]);
        _tile_dpbf16ps(0, 5, 4);
        _tile_loadd(6, k.data[1] + d, k.stride[1]);
        _tile_dpbf16ps(1, 6, 4);
        beside.some();
        _tile_loadd(5, k.data[2] + d, k.stride[2]);
        _tile_dpbf16ps(2, 5, 4);
        _tile_loadd(6, k.data[3] + d, k.stride[3]);
        _tile_dpbf16ps(3, 6, 4);
        if (kSteps > 1) beside.some();
    }
    _tile_stored(0, scores, kTileRowBytes);
    _tile_stored(1, scores + 256, kTileRowBytes);
    _tile_stored(2, scores + 512, kTileRowBytes);
    _tile_stored(3, scores + 768, kTileRowBytes);
}

// acc [head_dim, 16] += V^T x P^T
template <int kSteps, typename Beside>
PAGODA_INLINE void amx_accumulate(const bf16* vt, const bf16* p, int64_t head_dim, float* acc, Beside& beside) {
    const bf16* next = vt + kTileDepth * head_dim;
    memory_is_written();
    _tile_loadd(4, p, kTileRowBytes);
    _tile_loadd(5, p + kTileDepth * kTileSide, kTileRowBytes);
    for (int64_t d = 0; d < head_dim; d += 2 * kTileSide) {
        float* to = acc + d * kTileSide;
        _tile_loadd(0, to, kTileRowBytes);
        _tile_loadd(6, vt + d * kTileDepth, kTileRowBytes);
        _tile_dpbf16ps(0, 6, 4);
        _tile_loadd(1, to + 256, kTileRowBytes);
        _tile_loadd(7, vt + (d + kTileSide) * kTileDepth, kTileRowBytes);
        _tile_dpbf16ps(1, 7, 4);
        beside.some();
        _tile_loadd(6, next + d * kTileDepth, kTileRowBytes);
        _tile_dpbf16ps(0, 6, 5);
        _tile_loadd(7, next + (d + kTileSide) * kTileDepth, kTileRowBytes);
        _tile_dpbf16ps(1, 7, 5);
        if (kSteps > 1) beside.some();
        _tile_stored(0, to, kTileRowBytes);
        _tile_stored(1, to + 256, kTileRowBytes);
    }
}

struct Nothing {
    void some() {}
};

// One stretch's part in what `s` accumulates.
template <typename Source, int kSteps>
inline void amx_attend(const AttentionArgs& a, const Tile& t, const Stretch& stretch, const AmxScratch& s) {
    const int64_t head_dim = a.pool.head_dim, rows = t.row_end - t.row_begin;
    const int blocks = (int)((rows + kTileSide - 1) / kTileSide);
    for (int64_t r = 0; r < blocks * kTileSide; r++) {
        const Seen visible = seen(a, t, stretch, t.row_begin + smaller(r, rows - 1), stretch.begin, stretch.end);
        s.first[r] = visible.first;
        s.last[r] = visible.last;
    }
    const Lying lying(a, stretch);
    const Scores scores(a);
    Source source(a, t, stretch, s.widened);
    for (int64_t at = stretch.begin, end; at < stretch.end; at = end) {
        end = tile_end(at, stretch.end);
        const int begin = (int)(at - stretch.begin), count = (int)(end - at);
        const Entries<bf16>& entries = source.at(t.kv_head, at, t.kv_head, end);
        int first = 0, last = blocks;  // those that see any of the entries
        while (first < last && s.seen(first).none_of(begin, begin + count)) first++;
        while (first < last && s.seen(last - 1).none_of(begin, begin + count)) last--;
        if (first == last) continue;
        Lookahead ahead = source.lookahead();
        const Sixteens keys(entries.keys, count, at % lying.slots, lying.slots, lying.key_bytes, head_dim, s.room);
        pack_values(entries, count, head_dim, s.vt);

        Nothing nothing;
        Vec highest;
        auto score = [&](int block, auto& beside) __attribute__((always_inline)) {
            amx_scores<kSteps>(keys, s.q + block * kTileSide * head_dim, head_dim, s.scores_of(block), beside);
        };
        auto prepare = [&](int block) {
            scores.prepare(s.seen(block), begin, count, source.key_scales(), s.scores_of(block));
            highest = largest(s.scores_of(block)) * scores.unit();
        };
        auto accumulate = [&](int block, auto& beside) __attribute__((always_inline)) {
            amx_accumulate<kSteps>(s.vt, s.p_of(block), head_dim, s.acc + block * kTileSide * head_dim, beside);
        };
        const int64_t shares = (last - first) * Exponentials::kSteps;
        score(first, nothing);
        prepare(first);
        for (int block = first; block < last; block++) {
            float *top = s.top + block * kTileSide, *sum = s.sum + block * kTileSide;
            const Vec base = raised_top(highest, top, sum, s.acc + block * kTileSide * head_dim, head_dim);
            Exponentials exponentials(s.scores_of(block), scores.unit(), base, source.value_scales(), count, ahead, shares, s.p_of(block));
            if (block + 1 < last) score(block + 1, exponentials);
            if (block > first) accumulate(block - 1, exponentials);
            exponentials.finish(sum);
            if (block + 1 < last) prepare(block + 1);
        }
        accumulate(last - 1, nothing);
    }
}

// With more channels there are more tile instructions, and fewer exponentials beside each.
template <typename Source>
inline void amx_attend(const AttentionArgs& a, const Tile& t, const Stretch& stretch, const AmxScratch& s) {
    if (a.pool.head_dim < 128) return amx_attend<Source, 2>(a, t, stretch, s);
    amx_attend<Source, 1>(a, t, stretch, s);
}

// What a part of `t` computes: rows from `first_row` on of the head `h`, both counted within the tile.
inline Tile part_of(const AttentionArgs& a, const Tile& t, int h, int64_t first_row, int64_t rows) {
    Tile part = t;
    part.kv_head += h;
    part.num_kv_heads = 1;
    part.row_begin += first_row;
    part.row_end = smaller(part.row_begin + rows, t.row_end);
    if (t.partial_out) {
        const int64_t skipped = h * (t.row_end - t.row_begin) + first_row;
        part.partial_out += skipped * a.pool.head_dim;
        part.partial_lse += skipped;
    }
    return part;
}

void amx_attention(const AttentionArgs& a, const Tile& t, void* memory) {
    const int64_t head_dim = a.pool.head_dim, rows = t.row_end - t.row_begin;
    if (suits_decode(a, t)) return decode_attention(a, t, memory);
    if (rows < kMinAmxRows || head_dim % kTileDepth != 0) {
        if (rows * t.num_kv_heads <= kTileRows) return attention<bf16>(a, t, memory);
        for (int64_t row = 0; row < rows; row += kTileRows) attention<bf16>(a, part_of(a, t, 0, row, kTileRows), memory);
        return;
    }
    if (t.num_kv_heads > 1) {
        for (int h = 0; h < t.num_kv_heads; h++) amx_attention(a, part_of(a, t, h, 0, rows), memory);
        return;
    }
    const AmxScratch s(memory, head_dim);
    const TileConfig configured;
    const int64_t padded_rows = (rows + kTileSide - 1) / kTileSide * kTileSide;
    pack_queries(a, t, s.q);
    start_rows(padded_rows, head_dim, s.acc, s.top, s.sum);
    for (const Stretch& stretch : stretches(a, t)) {
        with_tile_source(stretch, [&]<typename Source>() { amx_attend<Source>(a, t, stretch, s); });
    }
    for (int64_t r = 0; r < rows; r += kTileSide) {
        float* acc = s.acc + r * head_dim;
        alignas(64) float row[kTileSide][kMaxHeadDim];
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
