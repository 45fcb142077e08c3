#include "decoder.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "activations.h"
#include "attention_plan.h"
#include "isa.h"

namespace pagoda {
namespace {

constexpr int64_t kPhasesPerLayer = 19;
constexpr int64_t kOtherPhases = 6;

int64_t divided_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// Whole pairs of blocks.
int64_t rows_at_once_of(int64_t num_in) {
    return std::max<int64_t>(1, kCachedX / (2 * kBlock * num_in * static_cast<int64_t>(sizeof(bf16)))) * 2 * kBlock;
}

// Layers of one group, window and lengths attend to the same entries: they share a plan.
struct PlannedAttention {
    int group;
    int64_t window;
    const int32_t* context_lens;
    AttentionPlan plan;
};

// One layer's attention, and the tasks that find what of it others want to know.
struct LayerAttention {
    AttentionArgs args;
    size_t plan;
    std::vector<MassTile> mass;
};

void check_range(const char* name, const int64_t* index, int64_t count, int64_t bound) {
    for (int64_t i = 0; i < count; i++) {
        if (index[i] < 0 || index[i] >= bound) {
            throw std::invalid_argument(std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(index[i]) +
                                        ", outside 0.." + std::to_string(bound - 1));
        }
    }
}

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

// One thread's way through a step; `share` spreads a phase over all threads.
template <typename Share>
class Pass {
public:
    Pass(const DecoderTensors& shape, const StepTensors& step, const Activations& memory, int threads, Share& share)
        : s_(shape), step_(step), m_(memory), threads_(threads), share_(share), tiles_(*isa().tiles), rows_(step.num_rows), residual_(memory.residual) {}

    void begin(const Cut& cut) {
        if (cut.part == Cut::kBefore) residual_ = cut.lanes;
        if (cut.part == Cut::kAfter) return select(cut.lanes, cut.rows, rows_);
        const EmbedArgs args = {s_.embedding, step_.token_ids, residual_, rows_, s_.hidden};
        share_(blocks(rows_), [&](int64_t block) { tiles_.embed(args, block); });
    }

    // Fetches for the next layer what this layer's input foretells that it will ask for (InfiniGen, arXiv:2406.19707).
    void foretell(const LayerTensors& next, const Recalls& recalls) {
        const int64_t attended = int64_t{s_.num_heads} * s_.head_dim, count = recalls.rows.size();
        float* residual = std::exchange(residual_, m_.foretold);
        const int64_t rows = std::exchange(rows_, count);
        select(residual, recalls.rows.data(), count);
        norm(next.input_norm, next.qkv);
        linear(m_.packed, s_.hidden, next.qkv, next.qkv_bias, attended, Sink::kRows, m_.out);
        share_(blocks(count), [&](int64_t block) {
            norm_heads(next.q_norm, m_.out, attended, s_.num_heads, m_.normed_q, block * kBlock, std::min(block * kBlock + kBlock, count));
        });
        residual_ = residual;
        rows_ = rows;
        const bf16* q = next.q_norm ? m_.normed_q : m_.out;
        recall(recalls, [&](int64_t index, int64_t first_head, float* queries) {
            widen(q + index * attended + first_head * s_.head_dim, queries);
            rotate(queries, step_.positions[recalls.rows[index]]);
        });
    }

    // Fetches what a layer's own queries ask for.
    void recall(const Recalls& recalls, const AttentionArgs& args) {
        recall(recalls, [&](int64_t index, int64_t first_head, float* queries) {
            widen((const bf16*)args.q + recalls.rows[index] * args.q_row_stride + first_head * args.q_head_stride, queries);
        });
    }

    // Queries, keys and values; the latter two go to the pool.
    void project(const LayerTensors& layer, const Pool& pool, const int64_t* slots) {
        norm(layer.input_norm, layer.qkv);
        const int64_t heads = s_.num_heads + 2 * s_.num_kv_heads;
        linear(m_.packed, s_.hidden, layer.qkv, layer.qkv_bias, heads * s_.head_dim, Sink::kRows, m_.qkv);
        const RopeArgs rope = rope_args(layer, pool, slots);
        share_(blocks(rows_), [&](int64_t block) {
            const int64_t begin = block * kBlock, end = std::min(begin + kBlock, rows_);
            norm_heads(layer.q_norm, m_.qkv, qkv_stride(), s_.num_heads, m_.normed_q, begin, end);
            norm_heads(layer.k_norm, m_.qkv + s_.num_heads * s_.head_dim, qkv_stride(), s_.num_kv_heads, m_.normed_k, begin, end);
            isa().rope_write_kv[kBF16](rope, begin, end);
        });
        if (pool.staged.slot_of) {
            share_(blocks(rows_), [&](int64_t block) {
                isa().close_blocks[kBF16](rope.write, block * kBlock, std::min(block * kBlock + kBlock, rows_));
            });
        }
    }

    void attention(const LayerAttention& layer, const AttentionPlan& plan) {
        share_(plan.tasks.size(), [&](int64_t i) { attend(kBF16, layer.args, plan.tasks[i]); });
        share_(plan.merges.size(), [&](int64_t i) { merge(kBF16, layer.args, plan, plan.merges[i]); });
        share_(layer.mass.size(), [&](int64_t i) { find_mass(kBF16, layer.args, layer.mass[i]); });
    }

    // Nothing reads the other rows any more.
    void keep_logits_rows() {
        residual_ = m_.last_residual;
        rows_ = step_.num_logits;
        select(m_.residual, step_.logits_rows, rows_);
        index_ = step_.logits_rows;
    }

    void rest_of(const LayerTensors& layer) {
        const int64_t attended = int64_t{s_.num_heads} * s_.head_dim;
        const PackArgs pack = {m_.out, index_, m_.packed, rows_, attended};
        share_(blocks(rows_), [&](int64_t block) {
            tiles_.pack(pack, block);
            fix(m_.packed, attended, layer.output, block);
        });
        linear(m_.packed, attended, layer.output, layer.output_bias, s_.hidden, Sink::kAddLanes, residual_);
        norm(layer.mlp_norm, layer.gate_up);
        linear(m_.packed, s_.hidden, layer.gate_up, layer.gate_up_bias, s_.inter, Sink::kSwiGlu, m_.gated);
        if (layer.down.scales) share_(blocks(rows_), [&](int64_t block) { fix(m_.gated, s_.inter, layer.down, block); });
        linear(m_.gated, s_.inter, layer.down, layer.down_bias, s_.hidden, Sink::kAddLanes, residual_);
    }

    void logits() {
        norm(s_.final_norm, s_.lm_head);
        linear(m_.packed, s_.hidden, s_.lm_head, nullptr, s_.vocab, Sink::kFloatRows, step_.logits);
    }

private:
    // One task for each row and KV head; `asked(index, first_head, queries)` fills in the queries [group, head_dim] of recall `index`.
    template <typename Asked>
    void recall(const Recalls& recalls, Asked asked) {
        const int64_t heads = s_.num_kv_heads, group = s_.num_heads / heads;
        share_(recalls.rows.size() * heads, [&](int64_t i) {
            thread_local std::vector<float> queries;
            queries.resize(group * s_.head_dim);
            asked(i / heads, i % heads * group, queries.data());
            recall_head(recalls.args[i / heads], i % heads, queries.data());
        });
    }

    void widen(const bf16* from, float* queries) const {
        for (int64_t i = 0; i < int64_t{s_.num_heads / s_.num_kv_heads} * s_.head_dim; i++) {
            const uint32_t bits = uint32_t{from[i].bits} << 16;
            std::memcpy(queries + i, &bits, sizeof bits);
        }
    }

    void rotate(float* queries, int64_t position) const {
        const float *cos = s_.cos + position * s_.rope_row_stride, *sin = s_.sin + position * s_.rope_row_stride;
        const int64_t half = s_.head_dim / 2;
        for (int head = 0; head < s_.num_heads / s_.num_kv_heads; head++) {
            float *first = queries + head * s_.head_dim, *second = first + half;
            for (int64_t i = 0; i < half; i++) {
                const float x = first[i], y = second[i];
                first[i] = x * cos[i] - y * sin[i];
                second[i] = y * cos[i] + x * sin[i];
            }
        }
    }

    void select(const float* from, const int64_t* index, int64_t rows) {
        const SelectLanesArgs args = {from, index, residual_, rows, s_.hidden};
        share_(blocks(rows), [&](int64_t block) { tiles_.select(args, block); });
    }

    void norm(const bf16* weight, const Matrix& next) {
        const LanesNormArgs args = {residual_, weight, m_.packed, s_.hidden, s_.eps};
        share_(blocks(rows_), [&](int64_t block) {
            tiles_.norm(args, block);
            fix(m_.packed, s_.hidden, next, block);
        });
    }

    // Makes a packed block what `next` multiplies.
    void fix(bf16* packed, int64_t dim, const Matrix& next, int64_t block) {
        if (next.scales) tiles_.fix({packed, m_.units, dim}, block);
    }

    void linear(const bf16* x, int64_t num_in, const Matrix& weight, const bf16* bias, int64_t num_out, Sink sink, void* out) {
        const TileLinearArgs args = {x, m_.units, weight, bias, out, num_in, rows_, num_in, num_out, sink};
        const int64_t rows_at_once = rows_at_once_of(num_in), chunks = divided_up(rows_, rows_at_once);
        const int64_t panels = divided_up(num_out, panel_outs(sink));
        // As many tasks for each thread, if possible.
        const int64_t tasks = divided_up(divided_up(panels, panels_together(weight, num_in, rows_)), threads_) * threads_;
        const int64_t outs = std::max<int64_t>(1, panels / tasks) * panel_outs(sink), groups = divided_up(num_out, outs);
        share_(groups * chunks, [&](int64_t i) {
            thread_local ThreadScratch expanded;
            const int64_t out = i % groups * outs, begin = i / groups * rows_at_once;
            tiles_.linear(args, out, std::min(out + outs, num_out), begin, std::min(begin + rows_at_once, rows_),
                          expanded.at_least(expanded_bytes(weight, num_in, rows_)));
        });
    }

    void norm_heads(const bf16* weight, const bf16* x, int64_t stride, int64_t heads, bf16* out, int64_t begin, int64_t end) {
        if (!weight) return;
        const NormArgs args = {.x = x,
                               .x_row_stride = stride,
                               .x_head_stride = s_.head_dim,
                               .residual = nullptr,
                               .residual_row_stride = 0,
                               .weight = weight,
                               .out = out,
                               .new_residual = nullptr,
                               .heads = heads,
                               .dim = s_.head_dim,
                               .eps = s_.eps};
        isa().rms_norm[kBF16](args, begin, end);
    }

    RopeArgs rope_args(const LayerTensors& layer, const Pool& pool, const int64_t* slots) const {
        const int64_t stride = qkv_stride(), q_width = int64_t{s_.num_heads} * s_.head_dim, k_width = int64_t{s_.num_kv_heads} * s_.head_dim;
        return {.q = layer.q_norm ? m_.normed_q : m_.qkv,
                .q_row_stride = layer.q_norm ? q_width : stride,
                .q_head_stride = s_.head_dim,
                .num_heads = s_.num_heads,
                .cos = s_.cos,
                .sin = s_.sin,
                .cos_row_stride = s_.rope_row_stride,
                .sin_row_stride = s_.rope_row_stride,
                .max_pos = s_.max_pos,
                .positions = step_.positions,
                .write = {.k = layer.k_norm ? m_.normed_k : m_.qkv + q_width,
                          .v = m_.qkv + q_width + k_width,
                          .k_row_stride = layer.k_norm ? k_width : stride,
                          .k_head_stride = s_.head_dim,
                          .v_row_stride = stride,
                          .v_head_stride = s_.head_dim,
                          .slots = slots,
                          .pool = pool}};
    }

    int64_t qkv_stride() const { return int64_t{s_.num_heads + 2 * s_.num_kv_heads} * s_.head_dim; }

    const DecoderTensors& s_;
    const StepTensors& step_;
    const Activations& m_;
    const int threads_;
    Share& share_;
    const TileTable& tiles_;
    int64_t rows_;
    float* residual_;
    const int64_t* index_ = nullptr;
};

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
    team_.run(threads, [&](auto share) {
        Pass pass(shape_, step, memory, threads, share);
        pass.begin(cut);
        for (size_t i = first; i < layers_.size(); i++) {
            const bool foretells = i + 1 < layers_.size() && !step.layers[i + 1].foretold.rows.empty();
            if (foretells) pass.foretell(layers_[i + 1], step.layers[i + 1].foretold);
            pass.project(layers_[i], pools[i], slots_of(step, i));
            if (i == last) return;
            if (!step.layers[i].own.rows.empty()) pass.recall(step.layers[i].own, attention[i].args);
            pass.attention(attention[i], plans[attention[i].plan].plan);
            if (i + 1 == layers_.size()) pass.keep_logits_rows();
            pass.rest_of(layers_[i]);
        }
        pass.logits();
    });
}

}  // namespace pagoda
