#include "decoder/decoder.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "decoder/pass.h"

namespace pagoda {
namespace {

constexpr int64_t kPhasesPerLayer = 19;
constexpr int64_t kOtherPhases = 6;

// Layers of one group, window and lengths attend to the same entries: they share a plan.
struct PlannedAttention {
    int group;
    int64_t window;
    const int32_t* context_lens;
    AttentionPlan plan;
};

Batch batch_of(const StepTensors& step, const LayerTensors& layer, const LayerStep& own) {
    const GroupTensors& group = step.groups[layer.group];
    const bool whole = layer.window == std::numeric_limits<int64_t>::max() && !own.context_lens;
    return {.num_rows = step.num_rows,
            .num_requests = step.num_requests,
            .block_table = group.block_table,
            .block_table_stride = group.block_table_stride,
            .max_blocks = group.max_blocks,
            .query_start = step.query_start,
            .context_lens = own.context_lens ? own.context_lens : step.context_lens,
            .mass = nullptr,
            .mass_stride = 0,
            .shared = group.shared,
            .num_shared = whole ? group.num_shared : 0};
}

}  // namespace

NativeDecoder::NativeDecoder(const DecoderTensors& shape, std::vector<LayerTensors> layers)
    : shape_(shape), layers_(std::move(layers)), team_(layers_.size() * kPhasesPerLayer + kOtherPhases) {}

const int64_t* NativeDecoder::slots_of(const StepTensors& step, size_t layer) const {
    const int64_t* own = step.layers[layer].slots;
    return own ? own : step.groups[layers_[layer].group].slots;
}

void NativeDecoder::check(const StepTensors& step, const Cut& cut, const std::vector<Pool>& pools) const {
    if (isa().tiles == nullptr) throw std::invalid_argument("this instruction set has no matrix tiles");
    if (pools.size() != layers_.size()) throw std::invalid_argument("one pool per layer is needed");
    check_range("token_ids", step.token_ids, step.num_rows, shape_.vocab);
    check_range("positions", step.positions, step.num_rows, shape_.max_pos);
    check_range("logits_rows", step.logits_rows, step.num_logits, step.num_rows);
    if (step.num_logits > step.num_rows) throw std::invalid_argument("a row has its logits once");
    if (cut.layer < 0 || cut.layer >= static_cast<int64_t>(layers_.size())) throw std::invalid_argument("there is no layer to cut at");
    if (cut.part == Cut::kAfter) check_range("rows", cut.rows, step.num_rows, cut.num_lanes);
    for (size_t i = 0; i < layers_.size(); i++) {
        const Pool& pool = pools[i];
        if (pool.num_kv_heads != shape_.num_kv_heads || pool.head_dim != shape_.head_dim ||
            pool.block_size != pools[0].block_size || pool.num_blocks != pools[0].num_blocks) {
            throw std::invalid_argument("the pool of layer " + std::to_string(i) + " has another shape");
        }
    }
    if (step.layers.size() != layers_.size()) throw std::invalid_argument("one step per layer is needed");
    // Layers of a group have the same slots; where blocks are staged, each has strips of its own.
    for (size_t i = 0; i < layers_.size(); i++) {
        const LayerStep& own = step.layers[i];
        const bool seen = i > 0 && layers_[i].group == layers_[i - 1].group && pools[i].staged.slot_of == pools[i - 1].staged.slot_of;
        if (!seen || own.slots) check_slots(pools[i], slots_of(step, i), step.num_rows);
        for (const Recalls* recalls : {&own.own, &own.foretold}) {
            check_range("rows that recall", recalls->rows.data(), recalls->rows.size(), step.num_rows);
            if (static_cast<int64_t>(recalls->rows.size()) > step.num_rows) throw std::invalid_argument("a row recalls once");
            for (const RecallArgs& args : recalls->args) {
                if (args.sketches.group != shape_.num_heads / shape_.num_kv_heads) throw std::invalid_argument("recall is for another number of heads");
                check_recall(args);
            }
        }
    }
    check_range("mass_of", step.mass_of.data(), step.mass_of.size(), step.num_requests);
}

void NativeDecoder::forward(const StepTensors& step, const Cut& cut, const std::vector<Pool>& pools, int threads) {
    const std::lock_guard one_call(one_call_);
    check(step, cut, pools);
    const bool qk_norm = layers_[0].q_norm != nullptr;
    int64_t foretold_rows = 0;
    for (const LayerStep& own : step.layers) foretold_rows = std::max<int64_t>(foretold_rows, own.foretold.rows.size());
    const Activations memory(scratch_, shape_, qk_norm, step.num_rows, step.num_logits, foretold_rows);
    std::vector<PlannedAttention> plans;
    std::vector<LayerAttention> attention;
    for (size_t i = 0; i < layers_.size(); i++) {
        const LayerTensors& layer = layers_[i];
        const LayerStep& own = step.layers[i];
        const int64_t q_width = int64_t{shape_.num_heads} * shape_.head_dim;
        const AttentionArgs args = {.q = layer.q_norm ? memory.normed_q : memory.qkv,
                                    .q_row_stride = layer.q_norm ? q_width : q_width + 2 * int64_t{shape_.num_kv_heads} * shape_.head_dim,
                                    .q_head_stride = shape_.head_dim,
                                    .num_heads = shape_.num_heads,
                                    .pool = pools[i],
                                    .scale = shape_.scale,
                                    .softcap = 0,
                                    .window = layer.window,
                                    .places = step.places,
                                    .out = memory.out,
                                    .lse = memory.lse};
        const auto same = std::find_if(plans.begin(), plans.end(), [&](const PlannedAttention& p) {
            return p.group == layer.group && p.window == layer.window && p.context_lens == own.context_lens;
        });
        attention.push_back({args, static_cast<size_t>(same - plans.begin()), {}});
        const Batch batch = batch_of(step, layer, own);
        if (same == plans.end() || pools[i].staged.slot_of) check_attention(args, batch);
        for (size_t m = 0; m < step.mass_of.size(); m++) {
            if (batch.context_lens[step.mass_of[m]] > step.mass_stride) throw std::invalid_argument("the mass has no room for a context");
            float* mass = own.mass + m * shape_.num_kv_heads * step.mass_stride;
            add_mass_tiles(args, batch, step.mass_of[m], mass, step.mass_stride, attention[i].mass);
        }
        if (same == plans.end()) plans.push_back({layer.group, layer.window, own.context_lens, plan_attention(kBF16, args, batch, threads)});
    }
    const size_t first = cut.part == Cut::kAfter ? cut.layer : 0, last = cut.part == Cut::kBefore ? cut.layer : layers_.size();
    team_.run(threads, [&](Team::Member member) {
        Pass pass(shape_, step, memory, cut.part == Cut::kWhole, member);
        pass.begin(cut, layers_[first]);
        for (size_t i = first; i < layers_.size(); i++) {
            const bool foretells = i + 1 < layers_.size() && !step.layers[i + 1].foretold.rows.empty();
            if (foretells) pass.foretell(layers_[i], layers_[i + 1], step.layers[i + 1].foretold);
            pass.project(layers_[i], pools[i], slots_of(step, i));
            if (i == last) return;
            if (!step.layers[i].own.rows.empty()) pass.recall(step.layers[i].own, attention[i].args);
            pass.attention(attention[i], plans[attention[i].plan].plan);
            if (i + 1 == layers_.size()) pass.keep_logits_rows();
            pass.rest_of(layers_[i], i + 1 < layers_.size() ? &layers_[i + 1] : nullptr);
        }
        pass.logits();
    });
}

}  // namespace pagoda
