// Plain data shared by the Python binding, the planner and the kernels of every instruction set.
//
//   module.cpp ──> ops.cpp, attention/, recall/, decoder/       check values, split the work over threads: portable code, in *.cpp
//                        │  IsaTable: one function per kernel and element type
//                        ▼
//   isa.cpp, compiled once per instruction set: elementwise.h, and what its includes say of attention/, linear/, decoder/ and recall/
//
// The files that isa.cpp includes must not instantiate templates of the standard library: the linker would keep one
// copy for all instruction sets, and it might be the one that this CPU cannot run.
#pragma once

#include <cstdint>

#include "linear/compact.h"

namespace pagoda {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

// Index of an element type in IsaTable's arrays; the values are what Python passes.
enum DType : int { kF32 = 0, kBF16 = 1, kF16 = 2, kNumDTypes = 3 };

// Strides count elements everywhere.

// [out, in], rows one after the other: BF16, or INT8 codes of which output `o`'s are in units of `scales[o]`. Or BF16 made compact (compact.h).
struct Matrix {
    const void* values;
    const float* scales;  // null: BF16
    Compact compact;

    constexpr bool is_compact() const { return compact.high_bytes != nullptr; }
};

// How keys or values are stored: as a DType, or as codes (KVView in pagoda/kernels/types.py). The values are what Python passes.
enum KVFormat : int { kInt8 = kNumDTypes, kE4M3, kE5M2, kNibbles };

constexpr int64_t bytes_of(int format) { return format == kF32 ? 4 : format < kNumDTypes ? 2 : 1; }

// What codes come with: [num_blocks, num_kv_heads, block_size or head_dim], the last dimension contiguous.
struct Beside {
    void* data;
    int64_t block_stride, head_stride;
};

constexpr int kMaxHeadDim = 256;  // of attention, and of what is stored as codes

// One layer's keys or values: [num_blocks, num_kv_heads, block_size, head_dim], the last dimension contiguous; half as long with two
// codes to a byte.
struct PoolPart {
    void* data;
    int64_t block_stride, head_stride, slot_stride;
    int format;
    Beside scales, zeros;
};

// The first tokens of sequences in full, each a block of one slot: they are no part of what the blocks they are in are quantized to.
struct Firsts {
    PoolPart keys, values;
    int64_t num_rows;
    const int32_t* row_of;  // [num_blocks], which of them a block begins with; -1: it begins no sequence
};

// Full copies of blocks that are quantized when they are full; where a block's is, is in `slot_of`.
struct Staged {
    PoolPart keys, values;
    int64_t num_slots;
    const int32_t* slot_of;  // [num_blocks]; null: no block is staged
    Firsts firsts;           // where blocks are staged
};

struct Pool {
    PoolPart keys, values;
    int64_t num_blocks;
    int num_kv_heads, block_size, head_dim;
    Staged staged;
};

struct NormArgs {
    const void* x;  // [rows, heads, dim]
    int64_t x_row_stride, x_head_stride;
    const void* residual;  // null: plain norm. Else [rows, 1, dim], added to x
    int64_t residual_row_stride;
    const void* weight;
    void* out;           // contiguous
    void* new_residual;  // contiguous
    int64_t heads, dim;
    float eps;
};

struct GatedArgs {
    const void* gate_up;  // [rows, 2 * inter]
    int64_t row_stride;
    void* out;  // contiguous [rows, inter]
    int64_t inter;
};

struct WriteArgs {
    const void* k;  // [rows, num_kv_heads, head_dim]
    const void* v;
    int64_t k_row_stride, k_head_stride, v_row_stride, v_head_stride;
    const int64_t* slots;
    Pool pool;
};

struct RopeArgs {
    void* q;  // [rows, num_heads, head_dim], rotated in place
    int64_t q_row_stride, q_head_stride;
    int num_heads;
    const float* cos;  // [max_pos, >= head_dim / 2]
    const float* sin;
    int64_t cos_row_stride, sin_row_stride, max_pos;
    const int64_t* positions;
    WriteArgs write;
};

// Entries that are copied within a pool of plain keys and values, the keys turned on by an angle of their own.
struct TurnArgs {
    Pool pool;
    const int64_t *sources, *targets;  // slots, none of which is in both
    const float *cos, *sin;            // [rows, head_dim / 2]
};

struct LinearArgs {
    const void* x;     // [rows, in]
    Matrix weight;     // its rows may have gaps
    const void* bias;  // [out] or null
    void* out;         // contiguous [rows, out]
    int64_t x_row_stride, weight_row_stride;
    int64_t rows, num_in, num_out;
};

struct AttentionArgs {
    const void* q;  // [rows, num_heads, head_dim]
    int64_t q_row_stride, q_head_stride;
    int num_heads;
    Pool pool;
    float scale;
    float softcap;   // 0: none
    int64_t window;  // INT64_MAX: none
    const int32_t* places;  // [rows]: the KV index of each, rising within a request; null: a request's rows are its last entries
    void* out;       // contiguous [rows, num_heads, head_dim]
    float* lse;      // [rows, num_heads]
};

constexpr int kTileRows = 128;   // most query rows of a tile on vectors, and of several KV heads together
constexpr int kDecodeRows = 16;  // most query rows of a KV head for which a tile has several heads: reading counts, not arithmetic
constexpr int kTileKeys = 64;    // KV entries scored before one softmax update

// The work of one task: some query rows of one request, those of one KV head or of several, against some of its KV entries.
//
//     rows of a request and KV head, numbered position-major:   row = position * group + head_in_group
//     so the heads of a group, which share every key, sit next to each other and one read of a key serves all.
//
// KV heads lie next to each other in a block, so few rows of several heads read memory in longer runs than one head's.
struct Tile {
    const int32_t* blocks;    // the request's row of the block table
    int64_t request;
    int64_t first_token_row;  // the request's first row in q
    int64_t first_position;   // KV index of that row; of those after it too, unless they have places
    int kv_head, num_kv_heads;
    int64_t row_begin, row_end;  // of each KV head
    int64_t key_begin, key_end;
    // Where a split context leaves its part: [heads, rows, head_dim] normalised, and [heads, rows]. Null: write out and lse.
    float* partial_out;
    float* partial_lse;
};

// A part of some rows' attention: [rows, head_dim] normalised, and [rows].
struct Part {
    const float *out, *lse;
};

// Rows of a KV head, counted as a tile's, whose attention is in parts.
struct Merge {
    int64_t first_token_row;
    int kv_head;
    int64_t row_begin, row_end;
    int64_t first_part, num_parts;
};

// KV entries of [key_begin, key_end), summed over all rows of a request and KV head.
struct MassTile {
    Tile tile;   // all rows, some keys
    float* mass;  // at key_begin
};

// What is known of units of tokens that are not in the pool, against queries: see sketch_scores.h.
struct SketchArgs {
    const void* sketches;  // [heads, width, num_units], the last dimension contiguous
    int64_t head_stride, row_stride;
    int64_t group, width, num_units;
};

constexpr int64_t kScoreTile = 64;  // units; a multiple of every vector's width
constexpr int64_t padded_units(int64_t n) { return (n + kScoreTile - 1) / kScoreTile * kScoreTile; }

// What follows is BF16 on matrix tiles. Sixteen rows make a block, and activations lie as the tiles want them:
//
//     packed  bf16  [blocks, dim / 2, 16 rows, 2]    what is about to be multiplied by a matrix
//     lanes   float [blocks, dim, 16 rows]           the residual stream: one vector holds one value of all rows
//
// so that a product, which comes out of the tiles with rows as lanes, needs no transposing on its way to the next one.
//
// One row alone makes a block of its own, where all of these are plain vectors.
//
// INT8 codes are multiplied by what is packed once it was made fixed, in place: each row in 16-bit fixed point, its unit a power of
// two that lets the largest value just fit. High and low bytes are multiplied apart, and the sums are exact:
//
//     fixed   bytes [blocks, dim / 4, high | low, 16 rows, 4]    and float units [blocks, 16 rows]

enum class Sink : int {
    kRows,       // bf16 [rows, num_out]
    kFloatRows,  // float [rows, num_out]
    kAddLanes,   // added to lanes [blocks, num_out, 16]
    kSwiGlu,     // the weight is gate over up, [2 * num_out, num_in]; silu(gate) * up goes to packed [blocks, num_out / 2, 16, 2]
};

// Rows whose x stays in a core's cache while panels of a matrix pass: whole pairs of blocks.
constexpr int64_t rows_at_once_of(int64_t num_in) {
    constexpr int64_t kCachedX = 1 << 20, kPair = 2 * kStripRows;  // bytes; rows
    const int64_t pairs = kCachedX / (kPair * num_in * static_cast<int64_t>(sizeof(bf16)));
    return (pairs > 1 ? pairs : 1) * kPair;
}

// Outputs of a panel, which is what meets the rows at a time: two tiles of them, or one of gate and one of up.
constexpr int64_t panel_outs(Sink sink) { return sink == Sink::kSwiGlu ? 16 : 32; }

// Bytes from one output of a matrix to the next, of a compact one on average.
constexpr int64_t row_bytes(const Matrix& weight, int64_t num_in) {
    if (weight.is_compact()) return num_in / kCompactDepth * kCompactTile / kStripRows;
    return num_in * static_cast<int64_t>(weight.scales ? sizeof(int8_t) : sizeof(bf16));
}

// Panels that a task should take together: as many as a page has rows of W, where reading W is what counts (see panel_at).
constexpr int64_t panels_together(const Matrix& weight, int64_t num_in, int64_t rows) {
    constexpr int64_t kPage = 4096, kFewRows = 32, kMost = 8;
    const int64_t bytes = row_bytes(weight, num_in), together = (kPage + bytes - 1) / bytes;
    return rows > kFewRows || weight.is_compact() ? 1 : together < kMost ? together : kMost;
}

// Memory that a task needs to expand a panel: whole if other rows meet it again, else what the next few products need.
constexpr int64_t kTilePair = 2 * kTileValues * 2, kPairsAtHand = 2;
constexpr int64_t expanded_bytes(const Matrix& weight, int64_t num_in, int64_t rows) {
    return !weight.is_compact() ? 0 : kTilePair * (rows > 2 * kStripRows ? num_in / kCompactDepth : kPairsAtHand);
}

struct TileLinearArgs {
    const bf16* packed_x;
    const float* x_units;  // of fixed rows; not read with a BF16 weight
    Matrix weight;
    const bf16* bias;  // or null
    void* out;
    int64_t weight_row_stride;
    int64_t rows, num_in, num_out;
    Sink sink;
};

struct FixArgs {
    bf16* packed;
    float* units;
    int64_t dim;
};

struct EmbedArgs {
    Matrix embedding;  // [vocab, dim]
    const int64_t* token_ids;
    float* lanes;
    int64_t rows, dim;
};

struct LanesNormArgs {
    const float* lanes;
    const bf16* weight;
    bf16* packed;
    int64_t dim;
    float eps;
};

// Some rows, in the order of `index` (null: as they are), become packed.
struct PackArgs {
    const bf16* from;  // [.., dim]
    const int64_t* index;
    bf16* packed;
    int64_t rows, dim;
};

struct SelectLanesArgs {
    const float* from;
    const int64_t* index;
    float* to;
    int64_t rows, dim;
};

struct TileTable {
    void (*embed)(const EmbedArgs&, int64_t block);
    void (*norm)(const LanesNormArgs&, int64_t block);
    void (*pack)(const PackArgs&, int64_t block);
    void (*fix)(const FixArgs&, int64_t block);
    void (*select)(const SelectLanesArgs&, int64_t block);
    // Outputs [out_begin, out_end), whole panels but at the end of the matrix, of the rows [row_begin, row_end), whole pairs of blocks.
    void (*linear)(const TileLinearArgs&, int64_t out_begin, int64_t out_end, int64_t row_begin, int64_t row_end, void* expanded);
};

struct IsaTable {
    const char* name;
    void (*rms_norm[kNumDTypes])(const NormArgs&, int64_t row_begin, int64_t row_end);
    void (*silu_mul[kNumDTypes])(const GatedArgs&, int64_t row_begin, int64_t row_end);
    void (*gelu_mul[kNumDTypes])(const GatedArgs&, int64_t row_begin, int64_t row_end);
    void (*write_kv[kNumDTypes])(const WriteArgs&, int64_t row_begin, int64_t row_end);
    void (*rope_write_kv[kNumDTypes])(const RopeArgs&, int64_t row_begin, int64_t row_end);
    void (*turn_kv[kNumDTypes])(const TurnArgs&, int64_t row_begin, int64_t row_end);
    // Once all rows are written, where blocks are staged.
    void (*close_blocks[kNumDTypes])(const WriteArgs&, int64_t row_begin, int64_t row_end);
    int64_t attention_rows[kNumDTypes];  // most query rows of a tile
    int64_t (*attention_scratch_bytes)(int64_t head_dim);
    void (*attention[kNumDTypes])(const AttentionArgs&, const Tile&, void* scratch);
    void (*merge_parts[kNumDTypes])(const AttentionArgs&, const Merge&, const Part* parts);
    void (*attention_mass[kNumDTypes])(const AttentionArgs&, const MassTile&, void* scratch);
    void (*sketch_margins[kNumDTypes])(const SketchArgs&, int64_t head, const float* queries, float* scores, float* margins);
    float (*kth_largest)(const float* values, int64_t n, int64_t k);
    int64_t (*argmax)(const float* values, int64_t n);
    // Outputs [out_begin, out_end) of all rows; x and out are BF16. `packed_x` is what linear_pack wrote for each block of 16 rows.
    int64_t (*linear_scratch_bytes)(const LinearArgs&);
    void (*linear_pack)(const LinearArgs&, void* packed_x, int64_t block);
    void (*linear)(const LinearArgs&, const void* packed_x, int64_t out_begin, int64_t out_end, void* expanded);
    const TileTable *tiles, *row_tiles;  // blocks of 16 rows, and of one; null: this instruction set has no matrix tiles
};

}  // namespace pagoda
