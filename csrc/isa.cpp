// Compiled once per instruction set, with PAGODA_ISA naming it and the compiler flags that allow it.
#include "argmax.h"
#include "attention/merge.h"
#include "attention/tile.h"
#include "elementwise.h"
#include "linear/linear.h"
#include "recall/sketch_scores.h"
#if defined(__AMX_BF16__)
#include "attention/amx_few_rows.h"
#include "decoder/amx_one_row.h"
#include "decoder/amx_rows.h"
#endif

#define PAGODA_STRING(x) PAGODA_STRING_(x)
#define PAGODA_STRING_(x) #x

namespace pagoda::PAGODA_ISA {

extern const IsaTable table;
const IsaTable table = {
    .name = PAGODA_STRING(PAGODA_ISA),
    .rms_norm = {rms_norm<float>, rms_norm<bf16>, rms_norm<f16>},
    .silu_mul = {silu_mul<float>, silu_mul<bf16>, silu_mul<f16>},
    .gelu_mul = {gelu_mul<float>, gelu_mul<bf16>, gelu_mul<f16>},
    .write_kv = {write_kv<float>, write_kv<bf16>, write_kv<f16>},
    .rope_write_kv = {rope_write_kv<float>, rope_write_kv<bf16>, rope_write_kv<f16>},
    .turn_kv = {turn_kv<float>, turn_kv<bf16>, turn_kv<f16>},
    .close_blocks = {close_blocks<float>, close_blocks<bf16>, close_blocks<f16>},
#if defined(__AMX_BF16__)
    .attention_rows = {kTileRows, kAmxRows, kTileRows},
    .attention_scratch_bytes = tile_scratch_bytes,
    .attention = {attention<float>, attention_on_tiles, attention<f16>},
#else
    .attention_rows = {kTileRows, kTileRows, kTileRows},
    .attention_scratch_bytes = Scratch::bytes,
    .attention = {attention<float>, attention<bf16>, attention<f16>},
#endif
    .merge_parts = {merge_parts<float>, merge_parts<bf16>, merge_parts<f16>},
    .attention_mass = {attention_mass<float>, attention_mass<bf16>, attention_mass<f16>},
    .sketch_margins = {sketch_margins<float>, sketch_margins<bf16>, sketch_margins<f16>},
    .kth_largest = kth_largest,
    .argmax = argmax,
    .linear_scratch_bytes = linear_scratch_bytes,
    .linear_pack = linear_pack,
    .linear = linear,
#if defined(__AMX_BF16__)
    .tiles = &tile_table,
    .row_tiles = &row_table,
#else
    .tiles = nullptr,
    .row_tiles = nullptr,
#endif
};

}  // namespace pagoda::PAGODA_ISA
