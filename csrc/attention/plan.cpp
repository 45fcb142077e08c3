#include "attention/plan.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "isa.h"
#include "threads.h"

namespace pagoda {
namespace {

constexpr int64_t kMinPartKeys = 256;   // of one KV head; shorter parts cost more to merge than they balance
constexpr int kMostHeads = 32;          // of a tile
constexpr int64_t kTasksPerThread = 3;  // no task is longer than this share of a thread's work
constexpr int64_t kTilesPerThread = 3;  // where there are rows for so many

// A tile's time in units of one key against up to 16 rows.
int64_t cost(const Tile& t) {
    return (t.key_end - t.key_begin) * ((t.row_end - t.row_begin + 15) / 16) * t.num_kv_heads;
}

// Of a tile with so many rows of each.
int heads_at_once(int64_t rows) {
    return rows == 0 || rows > kDecodeRows ? 1 : std::min(kMostHeads, kTileRows / static_cast<int>(rows));
}

// A tile, and where its request's rows are among those of the requests it shares blocks with.
struct Whole {
    Tile tile;
    const SharedPrefix* shared;  // null: none
    int64_t first_shared_row;
};

struct SharedTile {
    const SharedPrefix* shared;
    Tile tile;
    std::vector<Part> parts;
};

std::vector<SharedTile> shared_tiles(const AttentionArgs& args, const Batch& batch, int64_t rows_at_once) {
    const int64_t group = args.num_heads / args.pool.num_kv_heads;
    std::vector<SharedTile> result;
    for (int64_t s = 0; s < batch.num_shared; s++) {
        const SharedPrefix& shared = batch.shared[s];
        const int64_t token_row = batch.query_start[shared.first_request];
        const int64_t rows = (batch.query_start[shared.first_request + shared.num_requests] - token_row) * group;
        const int64_t keys = int64_t{shared.num_blocks} * args.pool.block_size;
        const int heads = heads_at_once(rows);
        for (int head = 0; head < args.pool.num_kv_heads; head += heads) {
            for (int64_t begin = 0; begin < rows; begin += rows_at_once) {
                // All rows come after all of these entries: no position is needed beyond that.
                const Tile tile = {.blocks = batch.block_table + shared.first_request * batch.block_table_stride,
                                   .request = shared.first_request,
                                   .first_token_row = token_row,
                                   .first_position = keys,
                                   .kv_head = head,
                                   .num_kv_heads = std::min(heads, args.pool.num_kv_heads - head),
                                   .row_begin = begin,
                                   .row_end = std::min(begin + rows_at_once, rows),
                                   .key_begin = 0,
                                   .key_end = keys,
                                   .partial_out = nullptr,
                                   .partial_lse = nullptr};
                result.push_back({&shared, tile, {}});
            }
        }
    }
    return result;
}

// Every row of the batch once per KV head, against all it sees that is not shared.
std::vector<Whole> own_tiles(const AttentionArgs& args, const Batch& batch, int64_t rows_at_once) {
    const int64_t group = args.num_heads / args.pool.num_kv_heads;
    std::vector<const SharedPrefix*> shared_by(batch.num_requests, nullptr);
    for (int64_t s = 0; s < batch.num_shared; s++) {
        std::fill_n(shared_by.begin() + batch.shared[s].first_request, batch.shared[s].num_requests, &batch.shared[s]);
    }
    std::vector<Whole> result;
    for (int64_t r = 0; r < batch.num_requests; r++) {
        const int64_t token_row = batch.query_start[r], query_len = batch.query_start[r + 1] - token_row;
        const SharedPrefix* shared = shared_by[r];
        const int64_t rows = query_len * group;
        for (const Tile& tile : request_tiles(args, batch, r, heads_at_once(rows), rows_at_once)) {
            Whole whole = {tile, shared, 0};
            if (shared) {
                whole.tile.key_begin = int64_t{shared->num_blocks} * args.pool.block_size;
                whole.first_shared_row = (token_row - batch.query_start[shared->first_request]) * group;
            }
            if (query_len > 0) result.push_back(whole);
        }
    }
    return result;
}

class Planner {
public:
    Planner(const AttentionArgs& args, const Batch& batch, int64_t rows_at_once, int threads)
        : head_dim_(args.pool.head_dim), shared_(shared_tiles(args, batch, rows_at_once)), own_(own_tiles(args, batch, rows_at_once)) {
        int64_t total = 0;
        for (const SharedTile& s : shared_) total += cost(s.tile);
        for (const Whole& o : own_) total += cost(o.tile);
        longest_ = threads == 1 ? std::max<int64_t>(1, total) : total / (threads * kTasksPerThread) + 1;
    }

    AttentionPlan make() {
        for (SharedTile& s : shared_) s.parts = split(s.tile);
        for (const Whole& o : own_) add_own(o);
        std::stable_sort(plan_.tasks.begin(), plan_.tasks.end(),
                         [](const Tile& a, const Tile& b) { return cost(a) > cost(b); });
        return std::move(plan_);
    }

private:
    int64_t num_parts(const Tile& t) const {
        const int64_t keys = t.key_end - t.key_begin;
        const int64_t most = std::max<int64_t>(1, std::min(keys * t.num_kv_heads / kMinPartKeys, keys / kTileKeys));
        const bool many_rows = t.row_end - t.row_begin > kTileRows;  // merging them would cost more than it balances
        const int64_t longest = many_rows ? 2 * longest_ : longest_;
        return std::clamp<int64_t>((cost(t) + longest - 1) / longest, 1, most);
    }

    // Adds the tile's parts as tasks with a place of their own for what they compute.
    std::vector<Part> split(const Tile& t) {
        const int64_t rows = t.num_kv_heads * (t.row_end - t.row_begin), keys = t.key_end - t.key_begin, parts = num_parts(t);
        const int64_t floats = rows * (head_dim_ + 1);
        float* next = plan_.partials.emplace_back(std::make_unique_for_overwrite<float[]>(parts * floats)).get();
        std::vector<Part> result;
        auto begin_of = [&](int64_t part) {  // whole tiles, which are whole in their blocks too, where it is not the request's own end
            const int64_t at = t.key_begin + keys * part / parts;
            return part == 0 || part == parts ? at : at / kTileKeys * kTileKeys;
        };
        for (int64_t p = 0; p < parts; p++, next += floats) {
            Tile task = t;
            task.key_begin = begin_of(p);
            task.key_end = begin_of(p + 1);
            task.partial_out = next;
            task.partial_lse = next + rows * head_dim_;
            plan_.tasks.push_back(task);
            result.push_back({task.partial_out, task.partial_lse});
        }
        return result;
    }

    void add_own(const Whole& own) {
        const Tile& t = own.tile;
        if (!own.shared && num_parts(t) == 1) {
            plan_.tasks.push_back(t);
            return;
        }
        const std::vector<Part> parts = split(t);
        for (int h = 0; !own.shared && h < t.num_kv_heads; h++) add_merge(t, h, t.row_begin, t.row_end, parts, {}, 0);
        for (const SharedTile& s : shared_) {
            if (s.shared != own.shared) continue;
            // Rows of both, counted as the request counts its own.
            const int64_t rows = s.tile.row_end - s.tile.row_begin, first = s.tile.row_begin - own.first_shared_row;
            const int64_t begin = std::max(t.row_begin, first), end = std::min(t.row_end, first + rows);
            const int last_head = std::min(t.kv_head + t.num_kv_heads, s.tile.kv_head + s.tile.num_kv_heads);
            for (int head = std::max(t.kv_head, s.tile.kv_head); begin < end && head < last_head; head++) {
                add_merge(t, head - t.kv_head, begin, end, parts, s.parts, (head - s.tile.kv_head) * rows + begin - first);
            }
        }
    }

    void add_merge(const Tile& t, int head, int64_t begin, int64_t end, const std::vector<Part>& own,
                   const std::vector<Part>& shared, int64_t shared_row) {
        const int64_t first = std::ssize(plan_.parts);
        auto add = [&](const Part& p, int64_t row) { plan_.parts.push_back({p.out + row * head_dim_, p.lse + row}); };
        for (const Part& p : own) add(p, head * (t.row_end - t.row_begin) + begin - t.row_begin);
        for (const Part& p : shared) add(p, shared_row);
        plan_.merges.push_back({t.first_token_row, t.kv_head + head, begin, end, first, std::ssize(plan_.parts) - first});
    }

    int64_t head_dim_;
    int64_t longest_;
    std::vector<SharedTile> shared_;
    std::vector<Whole> own_;
    AttentionPlan plan_;
};

// KV index of a request's first row; its length if it has no rows.
int64_t first_place(const AttentionArgs& args, const Batch& batch, int64_t request) {
    const int64_t begin = batch.query_start[request], query_len = batch.query_start[request + 1] - begin;
    return args.places && query_len > 0 ? args.places[begin] : batch.context_lens[request] - query_len;
}

void check_places(const AttentionArgs& args, const Batch& batch, int64_t request) {
    int64_t before = -1;
    for (int64_t row = batch.query_start[request]; args.places && row < batch.query_start[request + 1]; row++) {
        if (args.places[row] <= before || args.places[row] >= batch.context_lens[request]) {
            throw std::invalid_argument("places[" + std::to_string(row) + "] is " + std::to_string(args.places[row]) +
                                        ": the places of request " + std::to_string(request) + " must rise below its context_len " +
                                        std::to_string(batch.context_lens[request]));
        }
        before = args.places[row];
    }
}

void check_shared(const AttentionArgs& args, const Batch& batch) {
    int64_t free_from = 0;
    for (int64_t s = 0; s < batch.num_shared; s++) {
        const SharedPrefix& shared = batch.shared[s];
        const std::string name = "shared prefix " + std::to_string(s);
        if (shared.first_request < free_from || shared.num_requests < 1 || shared.num_blocks < 1 ||
            int64_t{shared.first_request} + shared.num_requests > batch.num_requests) {
            throw std::invalid_argument(name + " must name requests of the batch, after those of the one before it, and blocks");
        }
        free_from = shared.first_request + shared.num_requests;
        const int64_t keys = int64_t{shared.num_blocks} * args.pool.block_size;
        const int32_t* first = batch.block_table + shared.first_request * batch.block_table_stride;
        for (int64_t r = shared.first_request; r < free_from; r++) {
            if (first_place(args, batch, r) < keys) {
                throw std::invalid_argument(name + " reaches into the new rows of request " + std::to_string(r));
            }
            if (std::memcmp(first, batch.block_table + r * batch.block_table_stride, shared.num_blocks * sizeof(int32_t)) != 0) {
                throw std::invalid_argument(name + ": the table of request " + std::to_string(r) + " starts with other blocks");
            }
        }
    }
    if (batch.num_shared > 0 && args.window != std::numeric_limits<int64_t>::max()) {
        throw std::invalid_argument("a shared prefix cannot be combined with a window");
    }
}

}  // namespace

std::vector<Tile> request_tiles(const AttentionArgs& args, const Batch& batch, int64_t request, int heads_at_once, int64_t rows_at_once) {
    const int64_t group = args.num_heads / args.pool.num_kv_heads;
    const int64_t token_row = batch.query_start[request], query_len = batch.query_start[request + 1] - token_row;
    const int64_t first_position = first_place(args, batch, request), rows = query_len * group;
    auto place = [&](int64_t row) { return args.places ? args.places[token_row + row / group] : first_position + row / group; };
    std::vector<Tile> result;
    for (int head = 0; head < args.pool.num_kv_heads; head += heads_at_once) {
        for (int64_t begin = 0; begin < rows; begin += rows_at_once) {
            const int64_t end = std::min(begin + rows_at_once, rows);
            const int64_t first = place(begin), last = place(end - 1);
            result.push_back({.blocks = batch.block_table + request * batch.block_table_stride,
                              .request = request,
                              .first_token_row = token_row,
                              .first_position = first_position,
                              .kv_head = head,
                              .num_kv_heads = std::min(heads_at_once, args.pool.num_kv_heads - head),
                              .row_begin = begin,
                              .row_end = end,
                              .key_begin = args.window > first ? 0 : first - args.window + 1,
                              .key_end = last + 1,
                              .partial_out = nullptr,
                              .partial_lse = nullptr});
        }
    }
    return result;
}

void check_attention(const AttentionArgs& args, const Batch& batch) {
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
        check_places(args, batch, r);
        const int64_t begins = first_place(args, batch, r), first = args.window > begins ? 0 : begins - args.window + 1;
        const int32_t* blocks = batch.block_table + r * batch.block_table_stride;
        for (int64_t b = first / args.pool.block_size; b * args.pool.block_size < len; b++) {
            if (blocks[b] < 0 || blocks[b] >= args.pool.num_blocks) {
                throw std::invalid_argument("block_table[" + std::to_string(r) + ", " + std::to_string(b) + "] is " +
                                            std::to_string(blocks[b]) + ", outside 0.." +
                                            std::to_string(args.pool.num_blocks - 1));
            }
            const Staged& staged = args.pool.staged;
            const bool own = (b + 1) * args.pool.block_size > begins;
            if (staged.slot_of && own && (staged.slot_of[blocks[b]] < 0 || staged.slot_of[blocks[b]] >= staged.num_slots)) {
                throw std::invalid_argument("block_table[" + std::to_string(r) + ", " + std::to_string(b) +
                                            "]: the block has rows and no staged copy");
            }
        }
        const Firsts& firsts = args.pool.staged.firsts;
        if (args.pool.staged.slot_of && first == 0 && firsts.row_of[blocks[0]] >= firsts.num_rows) {
            throw std::invalid_argument("the first token of request " + std::to_string(r) + " is " +
                                        std::to_string(firsts.row_of[blocks[0]]) + ", outside 0.." + std::to_string(firsts.num_rows - 1));
        }
    }
    check_shared(args, batch);
}

AttentionPlan plan_attention(DType dtype, const AttentionArgs& args, const Batch& batch, int threads) {
    // The more rows a tile has, the fewer read and pack the same entries; but threads need tiles to share.
    const int64_t share = batch.num_rows * args.num_heads / (threads * kTilesPerThread);
    const int64_t rows_at_once = std::clamp<int64_t>(share / kTileRows * kTileRows, kTileRows, isa().attention_rows[dtype]);
    return Planner(args, batch, rows_at_once, threads).make();
}

void add_mass_tiles(const AttentionArgs& args, const Batch& batch, int64_t request, float* mass, int64_t stride,
                    std::vector<MassTile>& tasks) {
    constexpr int64_t kKeys = 8 * kTileKeys;
    const int64_t group = args.num_heads / args.pool.num_kv_heads;
    for (const Tile& t : request_tiles(args, batch, request, 1, kTileRows)) {
        if (t.row_begin != 0) continue;  // one task has all rows, so that no two add to the same entry
        for (int64_t begin = t.key_begin; begin < batch.context_lens[request]; begin += kKeys) {
            Tile task = t;
            task.row_end = (batch.query_start[request + 1] - batch.query_start[request]) * group;
            task.key_begin = begin;
            task.key_end = std::min<int64_t>(begin + kKeys, batch.context_lens[request]);
            tasks.push_back({task, mass + t.kv_head * stride + begin});
        }
    }
}

void attend(DType dtype, const AttentionArgs& args, const Tile& task) {
    thread_local ThreadScratch scratch;
    isa().attention[dtype](args, task, scratch.at_least(isa().attention_scratch_bytes(args.pool.head_dim)));
}

void find_mass(DType dtype, const AttentionArgs& args, const MassTile& task) {
    thread_local ThreadScratch scratch;
    isa().attention_mass[dtype](args, task, scratch.at_least(isa().attention_scratch_bytes(args.pool.head_dim)));
}

void merge(DType dtype, const AttentionArgs& args, const AttentionPlan& plan, const Merge& m) {
    isa().merge_parts[dtype](args, m, plan.parts.data() + m.first_part);
}

}  // namespace pagoda
