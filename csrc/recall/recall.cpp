#include "recall/recall.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "isa.h"
#include "threads.h"

namespace pagoda {
namespace {

struct Swap {
    int64_t place, unit;
};

// What sketches are multiplied by, [group, width].
void sketch_queries(const RecallArgs& a, int64_t head, const float* queries, float* out) {
    const int64_t dim = a.pool.head_dim, width = a.sketches.width;
    for (int64_t j = 0; j < a.sketches.group; j++) {
        const float* query = queries + j * dim;
        float* to = out + j * width;
        if (!a.columns) {
            for (int64_t d = 0; d < dim; d++) {
                to[d] = std::max(query[d], 0.0f) * a.scale;
                to[dim + d] = std::min(query[d], 0.0f) * a.scale;
            }
            continue;
        }
        std::fill(to, to + width, 0.0f);
        for (int64_t d = 0; d < dim; d++) {
            const float value = query[d] * a.scale;
            const float* row = a.columns + (head * dim + d) * width;
            for (int64_t i = 0; i < width; i++) to[i] += value * row[i];
        }
    }
}

// The swaps after which the places have the best of what they have, and of what is within alpha and better by `stay`. Changes margins.
void choose(const RecallArgs& a, float* margins, const int64_t* resident, std::vector<Swap>& swaps) {
    constexpr float kNever = -std::numeric_limits<float>::infinity();
    thread_local std::vector<float> held;
    held.resize(a.places);
    swaps.clear();
    for (int64_t place = 0; place < a.places; place++) held[place] = margins[resident[place]];
    for (int64_t unit = 0; unit < a.sketches.num_units; unit++) margins[unit] = margins[unit] >= -a.alpha ? margins[unit] - a.stay : kNever;
    for (int64_t place = 0; place < a.places; place++) margins[resident[place]] = held[place];
    const float bar = isa().kth_largest(margins, padded_units(a.sketches.num_units), a.places);
    for (int64_t place = 0; place < a.places; place++) margins[resident[place]] = kNever;
    // Above the bar all come, below it all go. At the bar are equals: of these, those come or go that make the numbers even.
    int64_t above = 0, below = 0;
    for (int64_t unit = 0; unit < a.sketches.num_units; unit++) above += margins[unit] > bar;
    for (int64_t place = 0; place < a.places; place++) below += held[place] < bar;
    if (above == 0 && below == 0) return;
    int64_t come_at_bar = std::max<int64_t>(0, below - above), go_at_bar = std::max<int64_t>(0, above - below);
    for (int64_t unit = 0; unit < a.sketches.num_units; unit++) {
        if (margins[unit] > bar || (margins[unit] == bar && bar > kNever && come_at_bar-- > 0)) swaps.push_back({0, unit});
    }
    size_t next = 0;
    for (int64_t place = 0; place < a.places && next < swaps.size(); place++) {
        if (held[place] < bar || (held[place] == bar && go_at_bar-- > 0)) swaps[next++].place = place;
    }
    swaps.resize(next);
}

// Copies units, some of which lie anywhere in memory: each is asked for a few units before it is copied.
void copy_units(const RecallArgs& a, int64_t head, const std::vector<Swap>& swaps) {
    constexpr size_t kAhead = 8;
    constexpr int64_t kLine = 64;
    const int64_t bytes = bytes_of(a.pool.keys.format), row = a.pool.head_dim * bytes;
    const auto* from = static_cast<const char*>(a.entries) + head * a.entry_head_stride * bytes;
    const auto token = [&](const Swap& swap, int64_t i) { return from + a.slots[swap.unit * a.unit + i] * a.entry_stride * bytes; };
    const auto entry = [&](const PoolPart& part, int64_t index) {
        const int64_t block = a.table[index / a.pool.block_size], offset = index % a.pool.block_size;
        return static_cast<char*>(part.data) + (block * part.block_stride + head * part.head_stride + offset * part.slot_stride) * bytes;
    };
    for (size_t s = 0; s < swaps.size(); s++) {
        if (s + kAhead < swaps.size()) {
            const Swap& later = swaps[s + kAhead];
            const char* first = token(later, 0);
            char *keys = entry(a.pool.keys, later.place * a.unit), *values = entry(a.pool.values, later.place * a.unit);
            for (int64_t at = 0; at < 2 * row; at += kLine) __builtin_prefetch(first + at);
            for (int64_t at = 0; at < row; at += kLine) __builtin_prefetch(keys + at, 1), __builtin_prefetch(values + at, 1);
        }
        for (int64_t i = 0; i < a.unit; i++) {
            const char* source = token(swaps[s], i);
            std::memcpy(entry(a.pool.keys, swaps[s].place * a.unit + i), source, row);
            std::memcpy(entry(a.pool.values, swaps[s].place * a.unit + i), source + row, row);
        }
    }
}

}  // namespace

void check_recall(const RecallArgs& a) {
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

void recall_head(const RecallArgs& a, int64_t head, const float* queries) {
    thread_local ThreadScratch scratch;
    thread_local std::vector<Swap> swaps;
    const int64_t padded = padded_units(a.sketches.num_units), group = a.sketches.group;
    auto* margins = static_cast<float*>(scratch.at_least(((group + 1) * padded + group * a.sketches.width) * sizeof(float)));
    float *scores = margins + padded, *asked = scores + group * padded;
    sketch_queries(a, head, queries, asked);
    isa().sketch_margins[a.dtype](a.sketches, head, asked, scores, margins);
    int64_t* resident = a.resident + head * a.places;
    choose(a, margins, resident, swaps);
    copy_units(a, head, swaps);
    for (const Swap& swap : swaps) resident[swap.place] = swap.unit;
    a.fetched[head] += static_cast<int64_t>(swaps.size());
}

void recall_entries(const RecallArgs& a, const float* queries, int threads) {
    check_recall(a);
    const int64_t of_head = a.sketches.group * a.pool.head_dim;
    parallel_tasks(a.pool.num_kv_heads, threads, [&](int64_t head) { recall_head(a, head, queries + head * of_head); });
}

}  // namespace pagoda
