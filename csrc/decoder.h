// All layers of a Llama-like decoder in BF16 as one call: what a step costs beyond reading its weights and KV is little.
#pragma once

#include <mutex>
#include <vector>

#include "ops.h"
#include "team.h"
#include "threads.h"

namespace pagoda {

// Matrices are contiguous; absent tensors are null.
struct LayerTensors {
    Matrix qkv, output, gate_up, down;
    const bf16 *qkv_bias, *output_bias, *gate_up_bias, *down_bias;
    const bf16 *input_norm, *q_norm, *k_norm, *mlp_norm;
    int group;       // which block table and slots
    int64_t window;  // INT64_MAX: none
};

// Sizes are such that tiles are full: inputs of matrices are multiples of 32, or 64 for codes, and outputs of 16.
struct DecoderTensors {
    Matrix embedding, lm_head;
    const bf16* final_norm;
    const float *cos, *sin;  // [max_pos, head_dim / 2 or more]
    int64_t rope_row_stride, max_pos;
    int64_t vocab, hidden, inter;
    int num_heads, num_kv_heads, head_dim;
    float eps, scale;
};

struct GroupTensors {
    const int32_t* block_table;
    int64_t block_table_stride, max_blocks;
    const int64_t* slots;
    const SharedPrefix* shared;
    int64_t num_shared;
};

struct StepTensors {
    const int64_t *token_ids, *positions, *logits_rows;
    const int32_t *query_start, *context_lens, *places;  // places: see AttentionArgs
    int64_t num_rows, num_requests, num_logits;
    std::vector<GroupTensors> groups;
    float* logits;  // [num_logits, vocab]
};

// A step in two calls, between which some of its rows may be dropped. The first ends in the middle of a layer, whose keys and values it
// writes for all rows; the second begins with that layer.
struct Cut {
    enum Part { kWhole, kBefore, kAfter };
    Part part;
    int64_t layer;
    float* lanes;         // the residual stream before the layer, [blocks, hidden, 16]: left by the first call, read by the second
    int64_t num_lanes;    // rows of it
    const int64_t* rows;  // [num_rows]: which of them the second call's rows are
};

class NativeDecoder {
public:
    NativeDecoder(const DecoderTensors& shape, std::vector<LayerTensors> layers);

    // Raises std::invalid_argument, before anything is written, for values outside their range. One call at a time.
    void forward(const StepTensors& step, const Cut& cut, const std::vector<Pool>& pools, int threads);

private:
    void check(const StepTensors& step, const Cut& cut, const std::vector<Pool>& pools) const;

    DecoderTensors shape_;
    std::vector<LayerTensors> layers_;
    std::mutex one_call_;
    Team team_;
    ThreadScratch scratch_;
};

}  // namespace pagoda
