#include "ops.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "isa.h"
#include "threads.h"

namespace pagoda {
namespace {

constexpr int64_t kGrainValues = 1 << 15;  // below this many values, waking a thread costs more than it saves

int64_t grain(int64_t values_per_row) { return std::max<int64_t>(1, kGrainValues / std::max<int64_t>(1, values_per_row)); }

}  // namespace

void check_range(const char* name, const int64_t* index, int64_t count, int64_t bound) {
    for (int64_t i = 0; i < count; i++) {
        if (index[i] < 0 || index[i] >= bound) {
            throw std::invalid_argument(std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(index[i]) +
                                        ", outside 0.." + std::to_string(bound - 1));
        }
    }
}

void rms_norm(DType dtype, const NormArgs& args, int64_t rows, int threads) {
    parallel_ranges(rows, grain(args.heads * args.dim), threads,
                    [&](int64_t begin, int64_t end) { isa().rms_norm[dtype](args, begin, end); });
}

void silu_mul(DType dtype, const GatedArgs& args, int64_t rows, int threads) {
    parallel_ranges(rows, grain(args.inter), threads,
                    [&](int64_t begin, int64_t end) { isa().silu_mul[dtype](args, begin, end); });
}

void gelu_mul(DType dtype, const GatedArgs& args, int64_t rows, int threads) {
    parallel_ranges(rows, grain(args.inter), threads,
                    [&](int64_t begin, int64_t end) { isa().gelu_mul[dtype](args, begin, end); });
}

void check_slots(const Pool& pool, const int64_t* slots, int64_t rows) {
    check_range("slot_mapping", slots, rows, pool.num_blocks * pool.block_size);
    for (int64_t i = 0; pool.staged.slot_of && i < rows; i++) {
        const int64_t block = slots[i] / pool.block_size;
        if (pool.staged.slot_of[block] < 0 || pool.staged.slot_of[block] >= pool.staged.num_slots) {
            throw std::invalid_argument("the staged copy of block " + std::to_string(block) + ", which is written to, is " +
                                        std::to_string(pool.staged.slot_of[block]) + ", outside 0.." +
                                        std::to_string(pool.staged.num_slots - 1));
        }
    }
}

namespace {

void close_blocks(DType dtype, const WriteArgs& args, int64_t rows, int threads) {
    const Pool& pool = args.pool;
    if (pool.staged.slot_of == nullptr) return;
    parallel_ranges(rows, grain(2 * pool.num_kv_heads * pool.head_dim), threads,
                    [&](int64_t begin, int64_t end) { isa().close_blocks[dtype](args, begin, end); });
}

}  // namespace

void write_kv(DType dtype, const WriteArgs& args, int64_t rows, int threads) {
    check_slots(args.pool, args.slots, rows);
    parallel_ranges(rows, grain(2 * args.pool.num_kv_heads * args.pool.head_dim), threads,
                    [&](int64_t begin, int64_t end) { isa().write_kv[dtype](args, begin, end); });
    close_blocks(dtype, args, rows, threads);
}

void rope_write_kv(DType dtype, const RopeArgs& args, int64_t rows, int threads) {
    const Pool& pool = args.write.pool;
    check_slots(pool, args.write.slots, rows);
    check_range("positions", args.positions, rows, args.max_pos);
    parallel_ranges(rows, grain((args.num_heads + 2 * pool.num_kv_heads) * pool.head_dim), threads,
                    [&](int64_t begin, int64_t end) { isa().rope_write_kv[dtype](args, begin, end); });
    close_blocks(dtype, args.write, rows, threads);
}

void turn_kv(DType dtype, const TurnArgs& args, int64_t rows, int threads) {
    check_range("sources", args.sources, rows, args.pool.num_blocks * args.pool.block_size);
    check_range("targets", args.targets, rows, args.pool.num_blocks * args.pool.block_size);
    parallel_ranges(rows, grain(2 * args.pool.num_kv_heads * args.pool.head_dim), threads,
                    [&](int64_t begin, int64_t end) { isa().turn_kv[dtype](args, begin, end); });
}

void linear(const LinearArgs& args, int threads) {
    // Ranges start at multiples of 32 outputs, as the tiles do; rows are packed 16 at a time.
    constexpr int64_t kOuts = 32, kRows = 16;
    thread_local ThreadScratch scratch;
    void* packed = scratch.at_least(isa().linear_scratch_bytes(args));
    parallel_ranges((args.rows + kRows - 1) / kRows, grain(kRows * args.num_in), threads, [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; block++) isa().linear_pack(args, packed, block);
    });
    parallel_ranges((args.num_out + kOuts - 1) / kOuts, grain(kOuts * args.num_in), threads, [&](int64_t begin, int64_t end) {
        thread_local ThreadScratch expanded;
        isa().linear(args, packed, begin * kOuts, std::min(end * kOuts, args.num_out),
                     expanded.at_least(expanded_bytes(args.weight, args.num_in, args.rows)));
    });
}

void argmax(const float* values, int64_t rows, int64_t width, int64_t* indices, int threads) {
    parallel_ranges(rows, grain(width), threads, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) indices[row] = isa().argmax(values + row * width, width);
    });
}

}  // namespace pagoda
