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

// As vec.h's, but into the L2 cache.
inline void prefetch_line(const char* p) {
    __builtin_prefetch(p, 0, 2);
    __asm__ volatile("");
}

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

// A product of activations with a matrix.
struct Product {
    const Matrix& weight;
    const bf16* bias;
    int64_t num_in, num_out;
    Sink sink;
};

// What a thread will read next, asked for while it waits for others.
class Ahead {
public:
    // From now on that are these bytes, of two places in turns.
    void begin(const char* first, const char* second, int64_t bytes) {
        first_ = first;
        second_ = second;
        at_ = 0;
        end_ = std::min(bytes, kMost);
    }

    void some() {
        for (int i = 0; i < kLines && at_ < end_; i++, at_ += kLine) {
            prefetch_line(first_ + at_);
            if (second_) prefetch_line(second_ + at_);
        }
    }

private:
    static constexpr int64_t kLine = 64, kLines = 4, kMost = 512 << 10;  // well inside an L2 cache

    const char *first_ = nullptr, *second_ = nullptr;
    int64_t at_ = 0, end_ = 0;
};

// One thread's way through a step.
class Pass {
public:
    // Between the calls of a cut step the residual stream is in blocks of 16 rows.
    Pass(const DecoderTensors& shape, const StepTensors& step, const Activations& memory, bool is_whole, Team::Member member)
        : s_(shape), step_(step), m_(memory), member_(member), tiles_(is_whole && step.num_rows == 1 ? *isa().row_tiles : *isa().tiles), rows_(step.num_rows), residual_(memory.residual) {}

    void begin(const Cut& cut, const LayerTensors& first) {
        will_multiply(qkv_of(first));
        if (cut.part == Cut::kBefore) residual_ = cut.lanes;
        if (cut.part == Cut::kAfter) return select(cut.lanes, cut.rows, rows_);
        const EmbedArgs args = {s_.embedding, step_.token_ids, residual_, rows_, s_.hidden};
        share(blocks(rows_), [&](int64_t block) { tiles_.embed(args, block); });
    }

    // Fetches for the next layer what this layer's input foretells that it will ask for (InfiniGen, arXiv:2406.19707).
    void foretell(const LayerTensors& next, const Recalls& recalls) {
        const int64_t attended = int64_t{s_.num_heads} * s_.head_dim, count = recalls.rows.size();
        float* residual = std::exchange(residual_, m_.foretold);
        const int64_t rows = std::exchange(rows_, count);
        select(residual, recalls.rows.data(), count);
        norm(next.input_norm, next.qkv);
        const Product queries = {next.qkv, next.qkv_bias, s_.hidden, attended, Sink::kRows};
        linear(m_.packed, queries, m_.out, queries);
        share(blocks(count), [&](int64_t block) {
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
        linear(m_.packed, qkv_of(layer), m_.qkv, output_of(layer));
        const RopeArgs rope = rope_args(layer, pool, slots);
        share_ranges(rows_, [&](int64_t begin, int64_t end) {
            norm_heads(layer.q_norm, m_.qkv, qkv_stride(), s_.num_heads, m_.normed_q, begin, end);
            norm_heads(layer.k_norm, m_.qkv + s_.num_heads * s_.head_dim, qkv_stride(), s_.num_kv_heads, m_.normed_k, begin, end);
            isa().rope_write_kv[kBF16](rope, begin, end);
        });
        if (pool.staged.slot_of) {
            share(blocks(rows_), [&](int64_t block) {
                isa().close_blocks[kBF16](rope.write, block * kBlock, std::min(block * kBlock + kBlock, rows_));
            });
        }
    }

    void attention(const LayerAttention& layer, const AttentionPlan& plan) {
        share(plan.tasks.size(), [&](int64_t i) { attend(kBF16, layer.args, plan.tasks[i]); });
        share(plan.merges.size(), [&](int64_t i) { merge(kBF16, layer.args, plan, plan.merges[i]); });
        share(layer.mass.size(), [&](int64_t i) { find_mass(kBF16, layer.args, layer.mass[i]); });
    }

    // Nothing reads the other rows any more.
    void keep_logits_rows() {
        residual_ = m_.last_residual;
        rows_ = step_.num_logits;
        select(m_.residual, step_.logits_rows, rows_);
        index_ = step_.logits_rows;
    }

    // `next`: the layer after it, or null.
    void rest_of(const LayerTensors& layer, const LayerTensors* next) {
        const int64_t attended = int64_t{s_.num_heads} * s_.head_dim;
        const PackArgs pack = {m_.out, index_, m_.packed, rows_, attended};
        share(blocks(rows_), [&](int64_t block) {
            tiles_.pack(pack, block);
            fix(m_.packed, attended, layer.output, block);
        });
        const Product down = {layer.down, layer.down_bias, s_.inter, s_.hidden, Sink::kAddLanes};
        const Product gate_up = {layer.gate_up, layer.gate_up_bias, s_.hidden, s_.inter, Sink::kSwiGlu};
        linear(m_.packed, output_of(layer), residual_, gate_up);
        norm(layer.mlp_norm, layer.gate_up);
        linear(m_.packed, gate_up, m_.gated, down);
        if (layer.down.scales) share(blocks(rows_), [&](int64_t block) { fix(m_.gated, s_.inter, layer.down, block); });
        linear(m_.gated, down, residual_, next ? qkv_of(*next) : head());
    }

    void logits() {
        norm(s_.final_norm, s_.lm_head);
        linear(m_.packed, head(), step_.logits, head());
    }

private:
    // One task for each row and KV head; `asked(index, first_head, queries)` fills in the queries [group, head_dim] of recall `index`.
    template <typename Asked>
    void recall(const Recalls& recalls, Asked asked) {
        const int64_t heads = s_.num_kv_heads, group = s_.num_heads / heads;
        share(recalls.rows.size() * heads, [&](int64_t i) {
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
        share(blocks(rows), [&](int64_t block) { tiles_.select(args, block); });
    }

    void norm(const bf16* weight, const Matrix& next) {
        const LanesNormArgs args = {residual_, weight, m_.packed, s_.hidden, s_.eps};
        share(blocks(rows_), [&](int64_t block) {
            tiles_.norm(args, block);
            fix(m_.packed, s_.hidden, next, block);
        });
    }

    // Makes a packed block what `next` multiplies.
    void fix(bf16* packed, int64_t dim, const Matrix& next, int64_t block) {
        if (next.scales) tiles_.fix({packed, m_.units, dim}, block);
    }

    Product qkv_of(const LayerTensors& layer) const { return {layer.qkv, layer.qkv_bias, s_.hidden, qkv_stride(), Sink::kRows}; }
    Product output_of(const LayerTensors& layer) const {
        return {layer.output, layer.output_bias, int64_t{s_.num_heads} * s_.head_dim, s_.hidden, Sink::kAddLanes};
    }
    Product head() const { return {s_.lm_head, nullptr, s_.hidden, s_.vocab, Sink::kFloatRows}; }

    // Outputs that a thread takes at least: whole panels.
    int64_t outs_at_least(const Product& p) const {
        return panel_outs(p.sink) * std::min(panels_together(p.weight, p.num_in, rows_), divided_up(divided_up(p.num_out, panel_outs(p.sink)), member_.size()));
    }

    // `next`: what will be multiplied after it.
    void linear(const bf16* x, const Product& p, void* out, const Product& next) {
        const TileLinearArgs args = {x, m_.units, p.weight, p.bias, out, p.num_in, rows_, p.num_in, p.num_out, p.sink};
        const int64_t rows_at_once = rows_at_once_of(p.num_in), chunks = divided_up(rows_, rows_at_once);
        const int64_t outs = outs_at_least(p), groups = divided_up(p.num_out, outs);
        will_multiply(next);
        share_ranges(groups * chunks, [&](int64_t i, int64_t end) {
            thread_local ThreadScratch expanded;
            void* room = expanded.at_least(expanded_bytes(p.weight, p.num_in, rows_));
            for (int64_t last; i < end; i = last) {  // all groups of a chunk that are in a row
                last = std::min(end, (i / groups + 1) * groups);
                const int64_t first = i % groups * outs, begin = i / groups * rows_at_once;
                tiles_.linear(args, first, std::min(first + (last - i) * outs, p.num_out), begin, std::min(begin + rows_at_once, rows_), room);
            }
        });
    }

    void will_multiply(const Product& p) {
        const int64_t outs = outs_at_least(p), groups = divided_up(p.num_out, outs), me = member_.index();
        const int64_t first = member_.first_task(groups, me) * outs, end = std::min(member_.first_task(groups, me + 1) * outs, p.num_out);
        auto place = [&](int64_t out) { return static_cast<const char*>(p.weight.values) + out * row_bytes(p.weight, p.num_in); };
        ahead_.begin(place(first), p.sink == Sink::kSwiGlu ? place(p.num_out + first) : nullptr, (end - first) * row_bytes(p.weight, p.num_in));
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

    template <typename Tasks>
    void share_ranges(int64_t num_tasks, Tasks tasks) {
        member_.share(num_tasks, tasks, [&] { ahead_.some(); });
    }
    template <typename Task>
    void share(int64_t num_tasks, Task task) {
        share_ranges(num_tasks, [&](int64_t i, int64_t end) {
            for (; i < end; i++) task(i);
        });
    }

    int64_t qkv_stride() const { return int64_t{s_.num_heads + 2 * s_.num_kv_heads} * s_.head_dim; }

    const DecoderTensors& s_;
    const StepTensors& step_;
    const Activations& m_;
    Team::Member member_;
    Ahead ahead_;
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
    team_.run(threads, [&](Team::Member member) {
        Pass pass(shape_, step, memory, cut.part == Cut::kWhole, member);
        pass.begin(cut, layers_[first]);
        for (size_t i = first; i < layers_.size(); i++) {
            const bool foretells = i + 1 < layers_.size() && !step.layers[i + 1].foretold.rows.empty();
            if (foretells) pass.foretell(layers_[i + 1], step.layers[i + 1].foretold);
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
