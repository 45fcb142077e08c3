// paged_attention as Python calls it: plan, attend, merge, and the attention mass if it is wanted.
#include <algorithm>

#include "attention/plan.h"
#include "isa.h"
#include "threads.h"

namespace pagoda {
namespace {

void add_mass(DType dtype, const AttentionArgs& args, const Batch& batch, int threads) {
    std::vector<MassTile> tasks;
    for (int64_t r = 0; r < batch.num_requests; r++) {
        add_mass_tiles(args, batch, r, batch.mass + r * args.pool.num_kv_heads * batch.mass_stride, batch.mass_stride, tasks);
    }
    parallel_tasks(tasks.size(), threads, [&](int64_t i) { find_mass(dtype, args, tasks[i]); });
}

}  // namespace

void paged_attention(DType dtype, AttentionArgs args, const Batch& batch, int threads) {
    check_attention(args, batch);
    std::vector<float> own_lse;
    if (args.lse == nullptr) {
        own_lse.resize(batch.num_rows * args.num_heads);
        args.lse = own_lse.data();
    }
    const AttentionPlan plan = plan_attention(dtype, args, batch, threads);
    parallel_tasks(plan.tasks.size(), threads, [&](int64_t i) { attend(dtype, args, plan.tasks[i]); });
    constexpr int64_t kMergesAtOnce = 16;
    parallel_ranges(plan.merges.size(), kMergesAtOnce, threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) merge(dtype, args, plan, plan.merges[i]);
    });
    if (batch.mass != nullptr) add_mass(dtype, args, batch, threads);
}

}  // namespace pagoda
