#include "recall.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <vector>

#include "isa.h"
#include "threads.h"

namespace pagoda {
namespace {

void check(const RecallArgs& a) {
    const auto outside = [](const auto* index, int64_t count, int64_t bound) {
        return std::any_of(index, index + count, [&](int64_t i) { return i < 0 || i >= bound; });
    };
    if (outside(a.resident, a.pool.num_kv_heads * a.places, a.sketches.num_units)) {
        throw std::invalid_argument("a resident unit is none of those that are scored");
    }
    if (outside(a.slots, a.sketches.num_units * a.unit, a.num_entries)) {
        throw std::invalid_argument("a slot is outside host memory");
    }
    const int64_t num_blocks = (a.places * a.unit + a.pool.block_size - 1) / a.pool.block_size;
    if (num_blocks > a.num_table_blocks || outside(a.table, num_blocks, a.pool.num_blocks)) {
        throw std::invalid_argument("the places are in blocks that the table or the pool does not have");
    }
}

struct Swap {
    int64_t place, unit;
};

// The swaps after which the places have the best of what they have and of what is within alpha.
void choose(const RecallArgs& a, const float* margins, const int64_t* resident, std::vector<Swap>& swaps) {
    thread_local std::vector<uint8_t> is_resident;
    thread_local std::vector<int64_t> absent;
    thread_local std::vector<float> contest;
    swaps.clear();
    is_resident.assign(a.sketches.num_units, 0);
    float worst = std::numeric_limits<float>::infinity();
    for (int64_t place = 0; place < a.places; place++) {
        is_resident[resident[place]] = 1;
        worst = std::min(worst, margins[resident[place]]);
    }
    absent.clear();
    contest.clear();
    for (int64_t unit = 0; unit < a.sketches.num_units; unit++) {
        if (margins[unit] > worst && margins[unit] >= -a.alpha && !is_resident[unit]) {
            absent.push_back(unit);
            contest.push_back(margins[unit]);
        }
    }
    if (absent.empty()) return;
    for (int64_t place = 0; place < a.places; place++) contest.push_back(margins[resident[place]]);
    std::nth_element(contest.begin(), contest.begin() + (a.places - 1), contest.end(), std::greater<float>());
    const float bar = contest[a.places - 1];
    // Above the bar all come, below it all go. At the bar are equals: of these, those come or go that make the numbers even.
    int64_t at_bar_come = 0;
    for (const int64_t unit : absent) at_bar_come -= margins[unit] > bar;
    for (int64_t place = 0; place < a.places; place++) at_bar_come += margins[resident[place]] < bar;
    int64_t at_bar_go = std::max<int64_t>(0, -at_bar_come);
    for (const int64_t unit : absent) {
        if (margins[unit] > bar || (margins[unit] == bar && at_bar_come-- > 0)) swaps.push_back({0, unit});
    }
    size_t next = 0;
    for (int64_t place = 0; place < a.places && next < swaps.size(); place++) {
        const float margin = margins[resident[place]];
        if (margin < bar || (margin == bar && at_bar_go-- > 0)) swaps[next++].place = place;
    }
}

void copy_unit(const RecallArgs& a, int64_t head, const Swap& swap) {
    const int64_t bytes = bytes_of(a.pool.keys.format), row = a.pool.head_dim * bytes;
    const auto* from = static_cast<const char*>(a.entries) + head * a.entry_head_stride * bytes;
    const auto write = [&](const PoolPart& part, int64_t entry, const char* values) {
        const int64_t block = a.table[entry / a.pool.block_size], offset = entry % a.pool.block_size;
        const int64_t at = block * part.block_stride + head * part.head_stride + offset * part.slot_stride;
        std::memcpy(static_cast<char*>(part.data) + at * bytes, values, row);
    };
    for (int64_t i = 0; i < a.unit; i++) {
        const char* token = from + a.slots[swap.unit * a.unit + i] * a.entry_stride * bytes;
        write(a.pool.keys, swap.place * a.unit + i, token);
        write(a.pool.values, swap.place * a.unit + i, token + row);
    }
}

}  // namespace

int64_t recall_entries(const RecallArgs& a, int threads) {
    check(a);
    const int64_t padded = padded_units(a.sketches.num_units);
    std::atomic<int64_t> copied{0};
    parallel_tasks(a.pool.num_kv_heads, threads, [&](int64_t head) {
        thread_local ThreadScratch scratch;
        thread_local std::vector<Swap> swaps;
        auto* margins = static_cast<float*>(scratch.at_least((a.sketches.group + 1) * padded * sizeof(float)));
        isa().sketch_margins[a.dtype](a.sketches, head, margins + padded, margins);
        int64_t* resident = a.resident + head * a.places;
        choose(a, margins, resident, swaps);
        for (const Swap& swap : swaps) {
            copy_unit(a, head, swap);
            resident[swap.place] = swap.unit;
        }
        copied += static_cast<int64_t>(swaps.size());
    });
    return copied;
}

}  // namespace pagoda
