// Where a step's entries in codes are, and asking for the next ones in time.
#pragma once

#include "amx.h"
#include "attention/coded.h"

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

// Asks for a step's keys and values, with what they come with, while something else is computed: evenly, so that neither waits for the
// other, and two lines of each of several blocks in turn, since the hardware reads ahead a little in each page it sees.
class Ahead {
public:
    // Of the KV heads [head, head + heads); `work` is the sum of all numbers that `during` will be called with.
    Ahead(const AttentionArgs& a, const Stretch& s, const Step& step, int head, int heads, int64_t work) : work_(work) {
        const int64_t channels = s.keys->format == kNibbles ? a.pool.head_dim : 0;
        for (int h = head; h < head + heads; h++) {
            for (const Run* run = step.begin(); run < step.end(); run += kTogether) {
                const Run* const end = smaller(run + kTogether, step.end());
                for (const Run* r = run; r < end; r++) {
                    add_beside(*s.keys, h, *r, channels);
                    add_beside(*s.values, h, *r, 0);
                }
                const int64_t most = run->n * larger(s.keys->slot_stride, s.values->slot_stride);
                for (int64_t at = 0; at < most; at += kPair) {
                    for (const Run* r = run; r < end; r++) {
                        add_rows(*s.keys, h, *r, at);
                        add_rows(*s.values, h, *r, at);
                    }
                }
            }
        }
        next_ = pairs_;
    }

    PAGODA_INLINE void during(int64_t work) {
        for (owed_ += work * (end_ - pairs_); owed_ >= work_ && next_ < end_; owed_ -= work_) ask();
    }
    void finish() {
        while (next_ < end_) ask();
    }

private:
    static constexpr int kTogether = 4;
    static constexpr int64_t kLine = 64, kPair = 2 * kLine, kMost = 2048;

    PAGODA_INLINE void ask() {
        prefetch_line(*next_);
        prefetch_line(*next_++ + kLine);
    }
    // What does not fit is not asked for: that costs time, and nothing else.
    void add(const void* at, int64_t bytes) {
        for (int64_t i = 0; i < bytes && end_ < pairs_ + kMost; i += kPair) *end_++ = (const char*)at + i;
    }
    void add_rows(const PoolPart& part, int head, const Run& run, int64_t at) {
        if (at < run.n * part.slot_stride) add(codes_at(part, head, run) + at, kPair);
    }
    // Scales and zeros: those of `channels`, or one for each entry.
    void add_beside(const PoolPart& part, int head, const Run& run, int64_t channels) {
        const int64_t slot = channels ? 0 : run.slot, n = channels ? channels : run.n;
        if (part.format == kInt8) return add(number_at<bf16>(part.scales, head, run.block, slot), 2 * n);
        add(number_at<ScaleCode>(part.scales, head, run.block, slot), n);
        add(number_at<bf16>(part.zeros, head, run.block, slot), 2 * n);
    }

    const int64_t work_;
    int64_t owed_ = 0;  // shares of calls, in units of 1 / work
    const char *pairs_[kMost], **next_, **end_ = pairs_;
};

// What is computed between the calls of `Ahead::during`, as long as it roughly takes: sixteen keys of a head, a row's weights for 64, and
// two quads of keys, 32 channels of their values.
constexpr int64_t kScoreWork = 8, kWeighWork = 4, kLayWork = 1;

}  // namespace
}  // namespace pagoda::PAGODA_ISA
