// Attention over a ragged batch as tasks that are independent of one another, and the merges that follow them.
//
//     request, KV head   rows (position x head of the group)     KV entries
//     ┌────────────┐     ├─ tile 0 ─┼─ tile 1 ─┼─ ... ┤     x   0 ─────────── context_len      prefill: many tiles
//     └────────────┘     ├─ one tile ┤                     x   ├ part ┼ part ┼ part ┤          decode: few, so the
//                                                                                              context may be split
// Requests whose tables start with the same blocks attend to them together (a cascade, as in FlashInfer,
// arXiv:2501.01005): their rows are adjacent in q, so one tile takes them all and reads the shared entries once.
//
//     request 0  ┐                 ├ own part ┤
//     request 1  ├ shared blocks   ├ own ┤
//     request 2  ┘                 ├ own part of it ┤
//
// Whatever attends in parts is merged by the parts' log-sum-exps.
#pragma once

#include <memory>
#include <vector>

#include "ops.h"

namespace pagoda {

struct AttentionPlan {
    std::vector<Tile> tasks;  // the longest first, so that the last to finish are short
    std::vector<Merge> merges;
    std::vector<Part> parts;
    std::vector<std::unique_ptr<float[]>> partials;
};

// Raises std::invalid_argument for lengths, block ids and shared prefixes that do not fit the batch.
void check_attention(const AttentionArgs& args, const Batch& batch);

// Valid for all layers whose pools have the same shape and whose window is the same: of the pool, only sizes are used.
AttentionPlan plan_attention(DType dtype, const AttentionArgs& args, const Batch& batch, int threads);

// One request's rows, at most `rows_at_once` to a tile and `heads_at_once` KV heads by as many, against all they see.
std::vector<Tile> request_tiles(const AttentionArgs& args, const Batch& batch, int64_t request, int heads_at_once, int64_t rows_at_once);

// The tasks that add what attention a request's rows pay to `mass`, [num_kv_heads, stride], zeroed: once they have attended.
void add_mass_tiles(const AttentionArgs& args, const Batch& batch, int64_t request, float* mass, int64_t stride,
                    std::vector<MassTile>& tasks);

void attend(DType dtype, const AttentionArgs& args, const Tile& task);
void find_mass(DType dtype, const AttentionArgs& args, const MassTile& task);
void merge(DType dtype, const AttentionArgs& args, const AttentionPlan& plan, const Merge& rows);

}  // namespace pagoda
