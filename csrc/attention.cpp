// paged_attention as Python calls it: plan, attend, merge, and the attention mass if it is wanted.
#include <algorithm>

#include "attention_plan.h"
#include "isa.h"
#include "threads.h"

namespace pagoda {
namespace {

void add_mass(DType dtype, const AttentionArgs& args, const Batch& batch, int threads) {
    constexpr int64_t kKeys = 8 * kTileKeys;
    const int64_t group = args.num_heads / args.pool.num_kv_heads;
    std::vector<MassTile> tasks;
    for (int64_t r = 0; r < batch.num_requests; r++) {
        for (const Tile& t : request_tiles(args, batch, r, 1)) {
            if (t.row_begin != 0) continue;  // one task has all rows, so that no two add to the same entry
            float* mass = batch.mass + (r * args.pool.num_kv_heads + t.kv_head) * batch.mass_stride;
            for (int64_t begin = t.key_begin; begin < batch.context_lens[r]; begin += kKeys) {
                Tile task = t;
                task.row_end = (batch.query_start[r + 1] - batch.query_start[r]) * group;
                task.key_begin = begin;
                task.key_end = std::min<int64_t>(begin + kKeys, batch.context_lens[r]);
                tasks.push_back({task, mass + begin});
            }
        }
    }
    parallel_tasks(tasks.size(), threads, [&](int64_t i) {
        thread_local ThreadScratch scratch;
        isa().attention_mass[dtype](args, tasks[i], scratch.at_least(isa().attention_scratch_bytes(args.pool.head_dim)));
    });
}

}  // namespace

void paged_attention(DType dtype, AttentionArgs args, const Batch& batch, int threads) {
    check_attention(args, batch);
    std::vector<float> own_lse;
    if (args.lse == nullptr) {
        own_lse.resize(batch.num_rows * args.num_heads);
        args.lse = own_lse.data();
    }
    const AttentionPlan plan = plan_attention(args, batch, threads);
    parallel_tasks(plan.tasks.size(), threads, [&](int64_t i) { attend(dtype, args, plan.tasks[i]); });
    constexpr int64_t kMergesAtOnce = 16;
    parallel_ranges(plan.merges.size(), kMergesAtOnce, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) merge(dtype, args, plan, plan.merges[i]);
    });
    if (batch.mass != nullptr) add_mass(dtype, args, batch, threads);
}

}  // namespace pagoda
