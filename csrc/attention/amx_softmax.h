// What happens to a block's scores between the two products of attention. A block is 16 query rows, which are a vector's lanes;
// its scores against kTileKeys entries are S^T [kTileKeys, 16].
#pragma once

#include "amx.h"
#include "attention/entries.h"

namespace pagoda::PAGODA_ISA {
namespace {

// The KV entries, counted from a stretch's begin, that the rows of a block see: first <= j < last. Both rise from row to row.
struct BlockSeen {
    const int32_t *first, *last;  // [16]
    bool none_of(int begin, int end) const { return last[kTileSide - 1] <= begin || first[0] >= end; }
    bool all_of(int begin, int end) const { return last[0] >= end && first[kTileSide - 1] <= begin; }
};

// Scores as they come out of the product become what the exponentials need: -inf where a row does not see an entry, or there is none;
// where they are capped, units of log2.
class Scores {
public:
    explicit Scores(const AttentionArgs& a) : a_(a), rewritten_(a.softcap > 0 || a.scale <= 0) {}

    // What brings them to units of log2 after that.
    float unit() const { return rewritten_ ? 1.0f : a_.scale * kLog2E; }

    // Those of `count` entries from `begin` on.
    void prepare(const BlockSeen& seen, int begin, int count, const float* key_scales, float* scores) const {
        if (count == kTileKeys && !key_scales && !rewritten_ && seen.all_of(begin, begin + count)) return;
        const Vec nothing = splat(-INFINITY);
        IntVec first, last;
        memcpy(&first, seen.first, sizeof first);
        memcpy(&last, seen.last, sizeof last);
        for (int j = 0; j < count; j++) {
            Vec s = load(scores + j * kTileSide);
            if (key_scales) s *= key_scales[j];
            if (rewritten_) s = a_.softcap > 0 ? tanh(s * (a_.scale / a_.softcap)) * (a_.softcap * kLog2E) : s * (a_.scale * kLog2E);
            store(scores + j * kTileSide, select((first <= begin + j) & (last > begin + j), s, nothing));
        }
        for (int j = count; j < kTileKeys; j++) store(scores + j * kTileSide, nothing);
    }

private:
    const AttentionArgs& a_;
    const bool rewritten_;
};

inline Vec largest(const float* scores) {
    Vec most[4];
    for (int i = 0; i < 4; i++) most[i] = load(scores + i * kTileSide);
    for (int j = 4; j < kTileKeys; j += 4) {
        for (int i = 0; i < 4; i++) most[i] = max(most[i], load(scores + (j + i) * kTileSide));
    }
    return max(max(most[0], most[1]), max(most[2], most[3]));
}

// What exponentials of a block are relative to: its rows' largest scores, but not the latest. While a score is at most 2^kSlack times
// that large, nothing is rescaled (as in FlashAttention-4); bf16 is as exact for exponentials above 1 as below.
inline Vec raised_top(Vec highest, float* top, float* sum, float* acc, int64_t head_dim) {
    constexpr float kSlack = 8.0f;
    const Vec old_top = load(top), nothing = splat(-INFINITY);
    const IntVec higher = highest > old_top + kSlack;
    // A row that has seen no entry yet keeps -inf; zero in its place makes its exponentials zero instead of NaN.
    auto base = [&](Vec t) { return select(t == nothing, Vec{}, t); };
    if (!_mm512_movepi32_mask((__m512i)higher)) return base(old_top);
    const Vec new_top = select(higher, highest, old_top), rescale = select(higher, exp2(old_top - base(new_top)), splat(1.0f));
    store(top, new_top);
    store(sum, load(sum) * rescale);
    for (int64_t d = 0; d < head_dim; d++) store(acc + d * kTileSide, load(acc + d * kTileSide) * rescale);
    return base(new_top);
}

// Scores become P^T as a right operand, eight entries with each call of some(): between tile instructions, so that vectors and tiles work
// at once. Probabilities are multiplied with `value_scales`, unless that is null, after they were summed.
class Exponentials {
public:
    static constexpr int kSteps = kTileKeys / 8;  // calls of some(): each asks for `1 / shares` of what is ahead

    Exponentials(const float* scores, float unit, Vec base, const float* value_scales, int count, Lookahead& ahead, int64_t shares, bf16* p)
        : scores_(scores), value_scales_(value_scales), count_(count), unit_(splat(unit)), base_(base), ahead_(ahead), shares_(shares), p_(p) {}

    PAGODA_INLINE void some() {
        if (next_ == kTileKeys) return;
        if (!ahead_.done()) look(ahead_, shares_);
        Vec x[kAtOnce], y[kAtOnce];
        each([&](int i) { x[i] = load(scores_ + (next_ + i) * kTileSide) * unit_ - base_; });
        power(x, y);
        total_ += ((y[0] + y[1]) + (y[2] + y[3])) + ((y[4] + y[5]) + (y[6] + y[7]));
        if (value_scales_) each([&](int i) { y[i] *= value_scales_[smaller(next_ + i, count_ - 1)]; });
        for (int i = 0; i < kAtOnce; i += 2) _mm512_storeu_si512(p_ + (next_ + i) * kTileSide, pack_pairs(y[i], y[i + 1]));
        next_ += kAtOnce;
    }
    // The rest; adds all to `sum`.
    PAGODA_INLINE void finish(float* sum) {
        while (next_ < kTileKeys) some();
        store(sum, load(sum) + total_);
    }

private:
    static constexpr int kAtOnce = kTileKeys / kSteps;  // each an instruction behind the other, so that none waits for itself

    // Not inline, and not of `this`: what is around needs the registers.
    static __attribute__((noinline)) void look(Lookahead& ahead, int64_t shares) { ahead.part(1, shares); }

    template <typename Body>
    static PAGODA_INLINE void each(Body body) {
#pragma GCC unroll 8
        for (int i = 0; i < kAtOnce; i++) body(i);
    }

    // y = 2^x, relative error below 3e-6: for bf16 a polynomial of one degree less than exp2's is as good.
    static PAGODA_INLINE void power(const Vec* x, Vec* y) {
        Vec f[kAtOnce];
        each([&](int i) { f[i] = (Vec)_mm512_reduce_ps((__m512)x[i], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); });
        each([&](int i) { y[i] = f[i] * 1.353416755e-2f + 5.201146386e-2f; });
        each([&](int i) { y[i] = y[i] * f[i] + 2.414427529e-1f; });
        each([&](int i) { y[i] = y[i] * f[i] + 6.930038359e-1f; });
        each([&](int i) { y[i] = y[i] * f[i] + 1.000002593f; });
        each([&](int i) { y[i] = (Vec)_mm512_scalef_ps((__m512)y[i], (__m512)x[i]); });
    }

    const float *scores_, *value_scales_;
    const int count_;
    Vec unit_, base_, total_ = {};
    Lookahead& ahead_;
    const int64_t shares_;
    bf16* p_;
    int next_ = 0;
};

}  // namespace
}  // namespace pagoda::PAGODA_ISA
