// All layers of a Llama-like decoder in BF16 as one call: what a step costs beyond reading its weights and KV is little.
#pragma once

#include <mutex>
#include <vector>

#include "ops.h"
#include "recall/recall.h"
#include "decoder/team.h"
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

// Rows that recall in a layer, and what they recall.
struct Recalls {
    std::vector<int64_t> rows;
    std::vector<RecallArgs> args;
};

// What one layer does otherwise than the step says.
struct LayerStep {
    const int32_t* context_lens = nullptr;  // null: the step's
    const int64_t* slots = nullptr;         // null: its group's
    float* mass = nullptr;                  // [mass_of, num_kv_heads, mass_stride], zeroed: the attention that entries are paid
    Recalls own, foretold;                  // by the layer's own queries; by those that the layer before foretells
};

struct StepTensors {
    const int64_t *token_ids, *positions, *logits_rows;
    const int32_t *query_start, *context_lens, *places;  // places: see AttentionArgs
    int64_t num_rows, num_requests, num_logits;
    std::vector<GroupTensors> groups;
    std::vector<LayerStep> layers;
    std::vector<int64_t> mass_of;  // requests whose attention mass is asked for
    int64_t mass_stride;
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
    const int64_t* slots_of(const StepTensors& step, size_t layer) const;
    void check(const StepTensors& step, const Cut& cut, const std::vector<Pool>& pools) const;

    DecoderTensors shape_;
    std::vector<LayerTensors> layers_;
    std::mutex one_call_;
    Team team_;
    ThreadScratch scratch_;
};

}  // namespace pagoda
