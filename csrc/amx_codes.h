// Where a step's entries in codes are, and asking for the next ones in time.
#pragma once

#include "amx.h"
#include "kv_coded.h"

namespace pagoda::PAGODA_ISA {
namespace {

constexpr int kFew = 4;         // rows that are computed together: of one KV head, or of several that have fewer
constexpr int kStepKeys = 128;  // entries scored before one softmax update
constexpr int kCodeKeys = 64;   // entries that one product of probabilities and values takes

inline bool in_codes(const PoolPart& part) { return part.format == kInt8 || part.format == kNibbles; }

// Entries [first, first + n) of a step, which are one after the other in a block.
struct Run {
    int64_t block, slot;
    int first, n;
};

// Up to kStepKeys entries of a stretch: maybe none.
class Step {
public:
    void start(const AttentionArgs& a, const Tile& t, const Stretch& s, int64_t at) {
        count = (int)larger<int64_t>(0, smaller<int64_t>(kStepKeys, s.end - at));
        num_runs_ = 0;
        for_each_run(a, t, s, at, count, [&](int64_t block, int64_t slot, int first, int n) { runs_[num_runs_++] = {block, slot, first, n}; });
    }
    const Run* begin() const { return runs_; }
    const Run* end() const { return runs_ + num_runs_; }

    int count = 0;

private:
    int num_runs_ = 0;
    Run runs_[kStepKeys];
};

inline const uint8_t* codes_at(const PoolPart& part, int head, const Run& run) {
    return (const uint8_t*)part.data + run.block * part.block_stride + head * part.head_stride + run.slot * part.slot_stride;
}

// Asks for a step's keys, or values, with what they come with, while something else is computed: a little at a time, so that neither waits
// for the other, and no sooner than needed, so that what was asked for is in the L1 cache still.
class Ahead {
public:
    // Of the KV heads [head, head + heads).
    Ahead(const PoolPart& part, int64_t by_channel, const Step& step, int head, int heads)
        : part_(part), by_channel_(by_channel), run_(step.begin()), end_(step.end()), head_(head), heads_(heads) {}

    // Those of entries before `entry` that were not asked for yet.
    void until(int entry) {
        while (run_ < end_ && run_->first + done_ < entry) {
            const int last = smaller(run_->n, entry - run_->first);
            for (int h = head_; h < head_ + heads_; h++) {
                if (done_ == 0) beside(h);
                prefetch_row(codes_at(part_, h, *run_) + done_ * part_.slot_stride, (last - done_) * part_.slot_stride);
            }
            done_ = last;
            if (last < run_->n) return;
            run_++;
            done_ = 0;
        }
    }

private:
    void beside(int head) const {
        const int64_t slot = by_channel_ ? 0 : run_->slot, n = by_channel_ ? by_channel_ : run_->n;
        if (part_.format == kInt8) {
            prefetch_row(number_at<bf16>(part_.scales, head, run_->block, slot), 2 * n);
        } else {
            prefetch_row(number_at<ScaleCode>(part_.scales, head, run_->block, slot), n);
            prefetch_row(number_at<bf16>(part_.zeros, head, run_->block, slot), 2 * n);
        }
    }

    const PoolPart& part_;
    const int64_t by_channel_;  // how many channels have a scale and a zero in each block; 0: entries have
    const Run *run_, *const end_;
    int done_ = 0;  // entries of that run
    const int head_, heads_;
};

inline Ahead keys_ahead(const AttentionArgs& a, const Stretch& s, const Step& step, int head, int heads) {
    return Ahead(*s.keys, s.keys->format == kNibbles ? a.pool.head_dim : 0, step, head, heads);
}
inline Ahead values_ahead(const Stretch& s, const Step& step, int head, int heads) { return Ahead(*s.values, 0, step, head, heads); }

}  // namespace
}  // namespace pagoda::PAGODA_ISA
