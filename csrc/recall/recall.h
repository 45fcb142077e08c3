// Recall: units of tokens that queries want and that are not in the pool are copied over those there that they want least.
//
//     resident[head]   | unit 7 | unit 0 | unit 31 | ...     which unit is in each place
//     table            place p has entries p * unit .. p * unit + unit - 1 of the request
//     entries          [heads, slots, key | value, head_dim] host memory; token t of the request is in slot slots[t]
#pragma once

#include "types.h"

namespace pagoda {

struct RecallArgs {
    DType dtype;  // of sketches
    SketchArgs sketches;
    // What a query is multiplied by before it meets a sketch, [heads, head_dim, width]; null: its positive and its negative part do.
    const float* columns;
    float scale;        // of scores
    int64_t* resident;  // [heads, places]; changed
    int64_t* fetched;   // [heads]: units that came are added
    int64_t places, unit;
    float alpha;  // units further below the best than this are left where they are
    float stay;   // so much worse may be what is in a place before it makes way
    const void* entries;
    int64_t entry_head_stride, entry_stride;
    int64_t num_entries;   // per head
    const int64_t* slots;  // [num_units * unit]
    Pool pool;             // of the dtype of entries
    const int32_t* table;
    int64_t num_table_blocks;
};

// Raises std::invalid_argument for ids out of range.
void check_recall(const RecallArgs& args);

// One KV head's share, after `check_recall`; `queries` [group, head_dim] are those of the query heads that read it.
void recall_head(const RecallArgs& args, int64_t head, const float* queries);

// All heads; `queries` [heads * group, head_dim]. Raises std::invalid_argument before anything is written.
void recall_entries(const RecallArgs& args, const float* queries, int threads);

}  // namespace pagoda
