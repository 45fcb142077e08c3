// Every kernel as Python calls it: values are checked, work is spread over threads, the instruction set is the chosen one.
// All raise std::invalid_argument before anything is written.
#pragma once

#include "types.h"

namespace pagoda {

// Raises unless all of `index` is within 0..bound - 1.
void check_range(const char* name, const int64_t* index, int64_t count, int64_t bound);
// Slots of rows that are about to be written, and the staged copies of their blocks.
void check_slots(const Pool& pool, const int64_t* slots, int64_t rows);

void rms_norm(DType dtype, const NormArgs& args, int64_t rows, int threads);
void silu_mul(DType dtype, const GatedArgs& args, int64_t rows, int threads);
void gelu_mul(DType dtype, const GatedArgs& args, int64_t rows, int threads);
void write_kv(DType dtype, const WriteArgs& args, int64_t rows, int threads);
void rope_write_kv(DType dtype, const RopeArgs& args, int64_t rows, int threads);
void turn_kv(DType dtype, const TurnArgs& args, int64_t rows, int threads);
void linear(const LinearArgs& args, int threads);
// The index of the largest value of each row of contiguous `values` [rows, width]; -1 for a row with a NaN, or whose largest is infinite.
void argmax(const float* values, int64_t rows, int64_t width, int64_t* indices, int threads);

// Adjacent requests whose block tables start with the same blocks, all of whose rows come after those.
struct SharedPrefix {
    int32_t first_request, num_requests, num_blocks;
};

struct Batch {
    int64_t num_rows, num_requests;
    const int32_t* block_table;  // [num_requests, max_blocks]
    int64_t block_table_stride, max_blocks;
    const int32_t* query_start;   // [num_requests + 1]
    const int32_t* context_lens;  // [num_requests]
    float* mass;                  // null, or zeroed [num_requests, num_kv_heads, mass_stride]
    int64_t mass_stride;
    const SharedPrefix* shared;  // in order, no request in two of them
    int64_t num_shared;
};

// `args.lse` may be null if nobody wants it.
void paged_attention(DType dtype, AttentionArgs args, const Batch& batch, int threads);

}  // namespace pagoda
