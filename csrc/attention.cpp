// Attention over a ragged batch: which tile does what, on which thread.
//
//     request, KV head   rows (position x head of the group)     KV entries
//     ┌────────────┐     ├─ tile 0 ─┼─ tile 1 ─┼─ ... ┤     x   0 ─────────── context_len      prefill: many tiles
//     └────────────┘     ├─ one tile ┤                     x   ├ part ┼ part ┼ part ┤          decode: few, so the
//                                                                                              context may be split
// A tile runs to its end on one thread. Parts of a split context are merged by their log-sum-exps.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa.h"
#include "ops.h"
#include "threads.h"

namespace pagoda {
namespace {

constexpr int64_t kMinPartKeys = 256;   // shorter parts cost more to merge than they balance
constexpr int64_t kTasksPerThread = 4;  // no task is longer than this share of a thread's work

struct Part {
    size_t first_task, num_tasks;  // the tasks that together are one tile
};

struct Plan {
    std::vector<Tile> tasks;
    std::vector<Part> split;  // tiles whose context was split
    std::vector<float> partial;
};

void check(const AttentionArgs& args, const Batch& batch) {
    const int64_t capacity = batch.max_blocks * args.pool.block_size;
    if (batch.query_start[0] != 0 || batch.query_start[batch.num_requests] != batch.num_rows) {
        throw std::invalid_argument("query_start must rise from 0 to num_rows = " + std::to_string(batch.num_rows));
    }
    for (int64_t r = 0; r < batch.num_requests; r++) {
        const int64_t query_len = int64_t{batch.query_start[r + 1]} - batch.query_start[r], len = batch.context_lens[r];
        if (query_len < 0) throw std::invalid_argument("query_start must not fall");
        if (len < query_len || len > capacity) {
            throw std::invalid_argument("request " + std::to_string(r) + ": context_len " + std::to_string(len) +
                                        " must be at least its " + std::to_string(query_len) + " rows and at most the " +
                                        std::to_string(capacity) + " entries of its block table");
        }
        if (query_len == 0) continue;
        const int64_t first = std::max<int64_t>(0, args.window > len ? 0 : len - query_len - args.window + 1);
        const int32_t* blocks = batch.block_table + r * batch.block_table_stride;
        for (int64_t b = first / args.pool.block_size; b * args.pool.block_size < len; b++) {
            if (blocks[b] < 0 || blocks[b] >= args.pool.num_blocks) {
                throw std::invalid_argument("block_table[" + std::to_string(r) + ", " + std::to_string(b) + "] is " +
                                            std::to_string(blocks[b]) + ", outside 0.." +
                                            std::to_string(args.pool.num_blocks - 1));
            }
        }
    }
}

// Whole tiles: every row of the batch once per KV head, against all it sees.
std::vector<Tile> tiles(const AttentionArgs& args, const Batch& batch) {
    const int64_t group = args.num_heads / args.pool.num_kv_heads;
    std::vector<Tile> result;
    for (int64_t r = 0; r < batch.num_requests; r++) {
        const int64_t token_row = batch.query_start[r], query_len = batch.query_start[r + 1] - token_row;
        const int64_t first_position = batch.context_lens[r] - query_len, rows = query_len * group;
        for (int head = 0; head < args.pool.num_kv_heads; head++) {
            for (int64_t begin = 0; begin < rows; begin += kTileRows) {
                const int64_t end = std::min(begin + kTileRows, rows);
                const int64_t first = first_position + begin / group, last = first_position + (end - 1) / group;
                result.push_back({.blocks = batch.block_table + r * batch.block_table_stride,
                                  .request = r,
                                  .first_token_row = token_row,
                                  .first_position = first_position,
                                  .kv_head = head,
                                  .row_begin = begin,
                                  .row_end = end,
                                  .key_begin = args.window > first ? 0 : first - args.window + 1,
                                  .key_end = last + 1,
                                  .partial_out = nullptr,
                                  .partial_lse = nullptr});
            }
        }
    }
    return result;
}

// A tile's time in units of one key against up to 16 rows.
int64_t cost(const Tile& t) { return (t.key_end - t.key_begin) * ((t.row_end - t.row_begin + 15) / 16); }

Plan make_plan(const AttentionArgs& args, const Batch& batch, int threads) {
    Plan plan;
    std::vector<Tile> whole = tiles(args, batch);
    int64_t total = 0;
    for (const Tile& t : whole) total += cost(t);
    const int64_t longest = threads == 1 ? total : total / (threads * kTasksPerThread) + 1;
    size_t partial_floats = 0;
    for (const Tile& t : whole) {
        const int64_t keys = t.key_end - t.key_begin;
        const int64_t parts = std::clamp<int64_t>((cost(t) + longest - 1) / longest, 1, std::max<int64_t>(1, keys / kMinPartKeys));
        if (parts > 1) {
            plan.split.push_back({plan.tasks.size(), static_cast<size_t>(parts)});
            partial_floats += parts * (t.row_end - t.row_begin) * (args.pool.head_dim + 1);
        }
        for (int64_t p = 0; p < parts; p++) {
            Tile task = t;
            task.key_begin = t.key_begin + keys * p / parts;
            task.key_end = t.key_begin + keys * (p + 1) / parts;
            plan.tasks.push_back(task);
        }
    }
    plan.partial.resize(partial_floats);
    float* next = plan.partial.data();
    for (const Part& part : plan.split) {
        for (size_t i = 0; i < part.num_tasks; i++) {
            Tile& t = plan.tasks[part.first_task + i];
            const int64_t rows = t.row_end - t.row_begin;
            t.partial_out = next;
            t.partial_lse = next + rows * args.pool.head_dim;
            next += rows * (args.pool.head_dim + 1);
        }
    }
    return plan;
}

void store_as(DType dtype, void* to, int64_t index, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (dtype == kF32) {
        static_cast<float*>(to)[index] = value;
    } else if (dtype == kBF16) {
        const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
        static_cast<uint16_t*>(to)[index] = static_cast<uint16_t>((value == value ? rounded : bits | 0x400000) >> 16);
    } else {
        const _Float16 half = static_cast<_Float16>(value);
        std::memcpy(static_cast<uint16_t*>(to) + index, &half, sizeof half);
    }
}

void merge(DType dtype, const AttentionArgs& args, const Tile* parts, size_t num_parts) {
    const int64_t group = args.num_heads / args.pool.num_kv_heads, head_dim = args.pool.head_dim;
    std::vector<float> weights(num_parts);
    for (int64_t r = 0; r < parts->row_end - parts->row_begin; r++) {
        float top = -std::numeric_limits<float>::infinity(), sum = 0;
        for (size_t p = 0; p < num_parts; p++) top = std::max(top, parts[p].partial_lse[r]);
        for (size_t p = 0; p < num_parts; p++) sum += weights[p] = std::exp(parts[p].partial_lse[r] - top);
        const int64_t row = parts->row_begin + r;
        const int64_t to = (parts->first_token_row + row / group) * args.num_heads + parts->kv_head * group + row % group;
        for (int64_t i = 0; i < head_dim; i++) {
            float value = 0;
            for (size_t p = 0; p < num_parts; p++) value += weights[p] * parts[p].partial_out[r * head_dim + i];
            store_as(dtype, args.out, to * head_dim + i, value / sum);
        }
        args.lse[to] = top + std::log(sum);
    }
}

void add_mass(DType dtype, const AttentionArgs& args, const Batch& batch, int threads) {
    constexpr int64_t kKeys = 8 * kTileKeys;
    const int64_t group = args.num_heads / args.pool.num_kv_heads;
    std::vector<MassTile> tasks;
    for (const Tile& t : tiles(args, batch)) {
        if (t.row_begin != 0) continue;  // one task has all rows, so that no two add to the same entry
        const int64_t query_len = batch.query_start[t.request + 1] - batch.query_start[t.request];
        float* mass = batch.mass + (t.request * args.pool.num_kv_heads + t.kv_head) * batch.mass_stride;
        for (int64_t begin = t.key_begin; begin < batch.context_lens[t.request]; begin += kKeys) {
            Tile task = t;
            task.row_end = query_len * group;
            task.key_begin = begin;
            task.key_end = std::min<int64_t>(begin + kKeys, batch.context_lens[t.request]);
            tasks.push_back({task, mass + begin});
        }
    }
    parallel_tasks(tasks.size(), threads, [&](int64_t i) {
        thread_local ThreadScratch scratch;
        isa().attention_mass[dtype](args, tasks[i], scratch.at_least(isa().attention_scratch_bytes(args.pool.head_dim)));
    });
}

}  // namespace

void paged_attention(DType dtype, AttentionArgs args, const Batch& batch, int threads) {
    check(args, batch);
    std::vector<float> own_lse;
    if (args.lse == nullptr) {
        own_lse.resize(batch.num_rows * args.num_heads);
        args.lse = own_lse.data();
    }
    const Plan plan = make_plan(args, batch, threads);
    // The longest first, so that the last to finish are short.
    std::vector<const Tile*> order;
    for (const Tile& t : plan.tasks) order.push_back(&t);
    std::stable_sort(order.begin(), order.end(), [](const Tile* a, const Tile* b) { return cost(*a) > cost(*b); });
    parallel_tasks(order.size(), threads, [&](int64_t i) {
        thread_local ThreadScratch scratch;
        isa().attention[dtype](args, *order[i], scratch.at_least(isa().attention_scratch_bytes(args.pool.head_dim)));
    });
    for (const Part& part : plan.split) merge(dtype, args, &plan.tasks[part.first_task], part.num_tasks);
    if (batch.mass != nullptr) add_mass(dtype, args, batch, threads);
}

}  // namespace pagoda
