// One thread's way through a step of the decoder: what is done to rows, phase by phase (team.h).
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "decoder/activations.h"
#include "attention/plan.h"
#include "isa.h"
#include "decoder/weights_ahead.h"

namespace pagoda {

inline int64_t divided_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// One layer's attention, and the tasks that find what of it others want to know.
struct LayerAttention {
    AttentionArgs args;
    size_t plan;
    std::vector<MassTile> mass;
};

// A product of activations with a matrix.
struct Product {
    const Matrix& weight;
    const bf16* bias;
    int64_t num_in, num_out;
    Sink sink;
};

class Pass {
public:
    // Between the calls of a cut step the residual stream is in blocks of 16 rows.
    Pass(const DecoderTensors& shape, const StepTensors& step, const Activations& memory, bool is_whole, Team::Member member)
        : s_(shape),
          step_(step),
          m_(memory),
          member_(member),
          tiles_(is_whole && step.num_rows == 1 ? *isa().row_tiles : *isa().tiles),
          rows_(step.num_rows),
          residual_(memory.residual) {}

    void begin(const Cut& cut, const LayerTensors& first) {
        will_multiply(qkv_of(first));
        if (cut.part == Cut::kBefore) residual_ = cut.lanes;
        if (cut.part == Cut::kAfter) return select(cut.lanes, cut.rows, rows_);
        const EmbedArgs args = {s_.embedding, step_.token_ids, residual_, rows_, s_.hidden};
        share(blocks(rows_), [&](int64_t block) { tiles_.embed(args, block); });
    }

    // Fetches for the next layer what the input of `layer` foretells that it will ask for (InfiniGen, arXiv:2406.19707).
    void foretell(const LayerTensors& layer, const LayerTensors& next, const Recalls& recalls) {
        const int64_t attended = int64_t{s_.num_heads} * s_.head_dim, count = recalls.rows.size();
        float* residual = std::exchange(residual_, m_.foretold);
        const int64_t rows = std::exchange(rows_, count);
        select(residual, recalls.rows.data(), count);
        norm(next.input_norm, next.qkv);
        const Product queries = {next.qkv, next.qkv_bias, s_.hidden, attended, Sink::kRows};
        linear(m_.packed, queries, m_.out, qkv_of(layer));
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
        const int64_t panels = divided_up(p.num_out, panel_outs(p.sink)), together = panels_together(p.weight, p.num_in, rows_);
        const int64_t parts = divided_up(divided_up(panels, together), member_.size()) * member_.size();  // as many for each thread
        return std::max<int64_t>(1, panels / parts) * panel_outs(p.sink);
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
                tiles_.linear(args, first, std::min(first + (last - i) * outs, p.num_out), begin, std::min(begin + rows_at_once, rows_),
                              room);
            }
        });
    }

    // Reading ahead is for few rows: of many, a thread may have another part of them for its own.
    void will_multiply(const Product& p) {
        if (rows_ > rows_at_once_of(p.num_in)) return ahead_.begin(nullptr, nullptr, 0);
        const int64_t outs = outs_at_least(p), groups = divided_up(p.num_out, outs), me = member_.index();
        const int64_t first = member_.first_task(groups, me) * outs, end = std::min(member_.first_task(groups, me + 1) * outs, p.num_out);
        const int64_t bytes = row_bytes(p.weight, p.num_in);
        auto place = [&](int64_t out) { return static_cast<const char*>(p.weight.values) + out * bytes; };
        ahead_.begin(place(first), p.sink == Sink::kSwiGlu ? place(p.num_out + first) : nullptr, (end - first) * bytes);
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

    // tasks(begin, end), which take as long as they are many.
    template <typename Tasks>
    void share_ranges(int64_t num_tasks, Tasks tasks) {
        member_.share(num_tasks, true, tasks, [&] { ahead_.some(); });
    }
    template <typename Task>
    void share(int64_t num_tasks, Task task) {
        member_.share(num_tasks, false, [&](int64_t i, int64_t) { task(i); }, [&] { ahead_.some(); });
    }

    int64_t qkv_stride() const { return int64_t{s_.num_heads + 2 * s_.num_kv_heads} * s_.head_dim; }

    const DecoderTensors& s_;
    const StepTensors& step_;
    const Activations& m_;
    Team::Member member_;
    WeightsAhead ahead_;
    const TileTable& tiles_;
    int64_t rows_;
    float* residual_;
    const int64_t* index_ = nullptr;
};

}  // namespace pagoda
