// Decode attention on AMX over codes: up to four rows of each KV head, kStepKeys entries of one head, or of several that have four rows
// together, after the other.
//
//     scores (amx_code_keys.h)  ->  softmax  ->  weights, times values (amx_code_values.h)
#pragma once

#include "attention/amx_many_rows.h"
#include "attention/amx_code_keys.h"
#include "attention/amx_code_values.h"

namespace pagoda::PAGODA_ISA {
namespace {

// Registers: 0 and 1 are sums of keys (2) times high and low bytes of queries (3); 6 and 7 of weights (4) times values (5).
constexpr TileShapes few_tiles() {
    TileShapes shapes;
    shapes.row_bytes[0] = shapes.row_bytes[1] = shapes.row_bytes[3] = kFewRowBytes;
    shapes.rows[4] = shapes.rows[6] = shapes.rows[7] = 2 * kFew;
    return shapes;
}
constexpr TileShapes kFewTiles = few_tiles();

struct FewScratch {
    uint8_t* keys;     // what CodeKeys and CodeValues keep
    uint8_t* values;
    float* q;          // [heads * rows, head_dim] scaled
    float* acc;        // [heads * rows, head_dim]
    float* sums;       // [heads * rows, 16] of exponentials, and of these times zeros
    float* zero_sums;
    float* scores;     // [kFew, kScoreRow]
    float* top;        // [heads * rows]
    float* sum;        // [heads * rows]
    void* source;

    static int64_t key_bytes(int64_t head_dim) { return whole(CodeKeys::bytes(head_dim)); }
    static int64_t value_bytes() { return whole(CodeValues::bytes()); }
    FewScratch(void* memory, int64_t head_dim)
        : keys((uint8_t*)memory),
          values(keys + key_bytes(head_dim)),
          q((float*)(values + value_bytes())),
          acc(q + kTileRows * head_dim),
          sums(acc + kTileRows * head_dim),
          zero_sums(sums + kTileRows * kTileSide),
          scores(zero_sums + kTileRows * kTileSide),
          top(scores + kFew * kScoreRow),
          sum(top + kTileRows),
          source(sum + kTileRows) {}
    static int64_t bytes(int64_t head_dim) {
        return key_bytes(head_dim) + value_bytes() + (2 * kTileRows * (head_dim + kTileSide + 1) + kFew * kScoreRow) * (int64_t)sizeof(float) +
               Widened<float>::bytes(head_dim);
    }

private:
    static int64_t whole(int64_t bytes) { return (bytes + 63) / 64 * 64; }
};

// The sequence's first token where it is in full: its scores and values take the place of what its codes mean.
class FirstEntry {
public:
    FirstEntry(const AttentionArgs& a, const Tile& t) : firsts_(a.pool.staged.firsts), head_dim_(a.pool.head_dim), row_(first_row(a, t)) {}

    bool is_in(int64_t begin) const { return begin == 0 && row_ >= 0; }
    float score(const float* q, int kv_head) const {
        const bf16* key = place(firsts_.keys, kv_head);
        Vec products = {};
        for (int64_t d = 0; d < head_dim_; d += kWidth) products += load(q + d) * load(key + d);
        return sum(products);
    }
    // Of a row that does not see it the score is -inf.
    void add(float score, float top, int kv_head, float* acc) const {
        if (score == -INFINITY) return;
        const bf16* value = place(firsts_.values, kv_head);
        const Vec p = splat(exp2f(score - top));
        for (int64_t d = 0; d < head_dim_; d += kWidth) store(acc + d, load(acc + d) + p * load(value + d));
    }

private:
    const bf16* place(const PoolPart& part, int kv_head) const {
        return (const bf16*)part.data + row_ * part.block_stride + kv_head * part.head_stride;
    }

    const Firsts& firsts_;
    const int64_t head_dim_;
    const int32_t row_;
};

// One stretch's part in what `s` accumulates.
inline void attend_few(const AttentionArgs& a, const Tile& t, const Stretch& stretch, const FewScratch& s) {
    if (stretch.begin >= stretch.end) return;
    const int64_t head_dim = a.pool.head_dim, rows = t.row_end - t.row_begin, all_rows = t.num_kv_heads * rows;
    const int together = kFew / (int)rows;
    Step steps[2];
    steps[0].start(a, t, stretch, stretch.begin);
    Ahead(a, stretch, steps[0], t.kv_head, smaller(together, t.num_kv_heads), 1).finish();
    const CodeKeys keys(a, t, stretch, s.q, together, s.keys);
    CodeValues values(a, t, stretch, s.values);
    const FirstEntry first(a, t);
    memset(s.sums, 0, 2 * kTileRows * kTileSide * sizeof(float));
    for (int64_t r = 0; r < all_rows; r++) s.sums[r * kTileSide] = s.sum[r];
    int now = 0;
    for (int64_t begin = stretch.begin; begin < stretch.end; begin += kStepKeys, now = 1 - now) {
        const Step &step = steps[now], &next = steps[1 - now];
        steps[1 - now].start(a, t, stretch, begin + kStepKeys);
        const int end = (step.count + kCodeKeys - 1) / kCodeKeys * kCodeKeys;
        for (int head = 0; head < t.num_kv_heads; head += together) {
            const int heads = smaller(together, t.num_kv_heads - head), after = head + heads;
            const bool last = after == t.num_kv_heads;
            const int then = last ? 0 : after;
            const int64_t work = heads * ((step.count + kTileSide - 1) / kTileSide * kScoreWork + end / kCodeKeys * rows * kWeighWork +
                                          (step.count + 7) / 8 * (head_dim / 32) * kLayWork);
            Ahead ahead(a, stretch, last ? next : step, t.kv_head + then, smaller(together, t.num_kv_heads - then), work);
            keys.score(head, heads, step, ahead, s.scores);
            values.start(head, heads, step);
            if (first.is_in(begin)) {
                for (int c = 0; c < heads * rows; c++) {
                    s.scores[c * kScoreRow] = first.score(s.q + (head * rows + c) * head_dim, t.kv_head + head + c / (int)rows);
                }
                values.leave_out_first(heads);
            }
            FewTotals totals;
            for (int c = 0; c < heads * rows; c++) {
                float* scores = s.scores + c * kScoreRow;
                const int64_t row = head * rows + c;
                soft_cap(a, scores, end);
                const Seen visible = seen(a, t, stretch, t.row_begin + c % rows, begin, begin + step.count);
                mask(scores, visible, end);
                Vec best = load(scores);
                for (int j = kTileSide; j < end; j += kTileSide) best = max(best, load(scores + j));
                const float highest = maximum(best), top = larger(s.top[row], highest);
                const float keep = top > s.top[row] ? exp2f(s.top[row] - top) : 1.0f, part = top > highest ? exp2f(highest - top) : 1.0f;
                s.top[row] = top;
                Vec sums, zero_sums;
                const float unit = values.weigh(c, end, highest == -INFINITY ? 0.0f : highest, scores, ahead, sums, zero_sums);
                float *total = s.sums + row * kTileSide, *zeros = s.zero_sums + row * kTileSide;
                store(total, load(total) * keep + sums * part);
                store(zeros, load(zeros) * keep + zero_sums * part);
                totals.keep[c] = keep;
                totals.unit[c] = unit * part + (is_finite(sums * 0.0f) ? 0.0f : NAN);
            }
            for (int h = 0; h < heads; h++) values.accumulate(head, h, step, ahead, totals, s.acc + (head + h) * rows * head_dim);
            for (int c = 0; first.is_in(begin) && c < heads * rows; c++) {
                const int64_t row = head * rows + c;
                first.add(s.scores[c * kScoreRow], s.top[row], t.kv_head + head + c / (int)rows, s.acc + row * head_dim);
            }
            ahead.finish();
        }
    }
    for (int64_t r = 0; r < all_rows; r++) {
        s.sum[r] = sum(load(s.sums + r * kTileSide));
        const float zeros = sum(load(s.zero_sums + r * kTileSide));
        for (int64_t d = 0; d < head_dim; d += kTileSide) store(s.acc + r * head_dim + d, load(s.acc + r * head_dim + d) + zeros);
    }
}

inline void few_rows_attention(const AttentionArgs& a, const Tile& t, void* memory) {
    const int64_t head_dim = a.pool.head_dim, rows = t.row_end - t.row_begin;
    const FewScratch s(memory, head_dim);
    const TileConfig configured(kFewTiles);
    for (int h = 0; h < t.num_kv_heads; h++) load_queries<bf16>(a, t, t.kv_head + h, t.row_begin, rows, s.q + h * rows * head_dim);
    start_rows(t.num_kv_heads * rows, head_dim, s.acc, s.top, s.sum);
    for (const Stretch& stretch : stretches(a, t)) {
        if (in_codes(*stretch.keys) && in_codes(*stretch.values)) {
            attend_few(a, t, stretch, s);
        } else {
            const Scratch plain(s.q, s.acc, s.scores, s.top, s.sum, s.source);
            with_source<bf16>(stretch, [&]<typename Source>() { attend<Source>(a, t, stretch, plain); });
        }
    }
    finish_rows<bf16>(a, t, s.acc, s.top, s.sum);
}

int64_t tile_scratch_bytes(int64_t head_dim) { return larger(amx_scratch_bytes(head_dim), FewScratch::bytes(head_dim)); }

// One row of INT8 is faster with float32 vectors: there is no second one to share what was made of its entries.
void attention_on_tiles(const AttentionArgs& a, const Tile& t, void* memory) {
    const int64_t rows = t.row_end - t.row_begin;
    const bool codes = in_codes(a.pool.keys) && in_codes(a.pool.values) && a.pool.head_dim % kCodeDepth == 0;
    const bool few = rows <= kFew && (rows > 1 || a.pool.keys.format == kNibbles || a.pool.values.format == kNibbles);
    return codes && few ? few_rows_attention(a, t, memory) : amx_attention(a, t, memory);
}

}  // namespace
}  // namespace pagoda::PAGODA_ISA
