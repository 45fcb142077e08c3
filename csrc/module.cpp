// Python bindings. Tensors arrive as addresses and strides, which pagoda/kernels/native.py has checked: a DLPack
// exchange costs two microseconds a tensor, and a decode step passes a thousand of them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <limits>

#include "decoder/decoder.h"
#include "isa.h"
#include "ops.h"
#include "recall/recall.h"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace pagoda {
namespace {

template <typename T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// (address, stride, stride, ...)
using Rows = std::tuple<uintptr_t, int64_t>;
using Heads = std::tuple<uintptr_t, int64_t, int64_t>;
// keys or values: (address, block stride, head stride, slot stride, format), scales and zeros
using Part = std::tuple<uintptr_t, int64_t, int64_t, int64_t, int, Heads, Heads>;
// keys and values, how many, and which of them is a block's: of blocks that are being filled, and of first tokens
using CopiesAt = std::tuple<Part, Part, int64_t, uintptr_t>;
// keys and values, (num_blocks, num_kv_heads, block_size, head_dim), and what is kept in full of them
using PoolAt = std::tuple<Part, Part, std::tuple<int64_t, int, int, int>, CopiesAt, CopiesAt>;

Beside beside(const Heads& h) { return {at<void>(std::get<0>(h)), std::get<1>(h), std::get<2>(h)}; }

PoolPart part(const Part& p) {
    const auto& [address, block, head, slot, format, scales, zeros] = p;
    return {at<void>(address), block, head, slot, format, beside(scales), beside(zeros)};
}

Pool pool(const PoolAt& p) {
    const auto& [keys, values, shape, staged, firsts] = p;
    const auto& [num_blocks, num_kv_heads, block_size, head_dim] = shape;
    const auto& [staged_keys, staged_values, num_staged, slot_of] = staged;
    const auto& [first_keys, first_values, num_firsts, row_of] = firsts;
    return {part(keys),
            part(values),
            num_blocks,
            num_kv_heads,
            block_size,
            head_dim,
            {part(staged_keys),
             part(staged_values),
             num_staged,
             at<const int32_t>(slot_of),
             {part(first_keys), part(first_values), num_firsts, at<const int32_t>(row_of)}}};
}

WriteArgs write_args(const Heads& k, const Heads& v, uintptr_t slots, const Pool& pool) {
    return {.k = at<void>(std::get<0>(k)),
            .v = at<void>(std::get<0>(v)),
            .k_row_stride = std::get<1>(k),
            .k_head_stride = std::get<2>(k),
            .v_row_stride = std::get<1>(v),
            .v_head_stride = std::get<2>(v),
            .slots = at<int64_t>(slots),
            .pool = pool};
}

// addresses of the values; of the scales of codes; of the high bytes, the first exceptions and the exceptions of a compact matrix
using MatrixAt = std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t>;
// Matrices and vectors in the order of LayerTensors, then group and window (0: none).
using Layer = std::tuple<std::vector<MatrixAt>, std::vector<uintptr_t>, int, int64_t>;
// block table, its row stride, max_blocks, slots, shared prefixes, how many
using Group = std::tuple<uintptr_t, int64_t, int64_t, uintptr_t, uintptr_t, int64_t>;

// part, layer, lanes, how many, rows
using CutAt = std::tuple<int, int64_t, uintptr_t, int64_t, uintptr_t>;

// queries' dtype and sketches' shape aside, in the order of RecallArgs: see recall_at in pagoda/kernels/native.py
using RecallAt = std::tuple<int, Heads, std::tuple<int64_t, int64_t, int64_t>, uintptr_t, float, std::tuple<uintptr_t, uintptr_t>,
                            std::tuple<int64_t, int64_t, float, float>, Heads, int64_t, uintptr_t, std::tuple<uintptr_t, int64_t>>;

RecallArgs recall_args(const RecallAt& r, const Pool& pool) {
    const auto& [dtype, sketches, shape, columns, scale, changed, wanted, entries, num_entries, slots, table] = r;
    const auto& [group, width, num_units] = shape;
    return {.dtype = DType(dtype),
            .sketches = {.sketches = at<void>(std::get<0>(sketches)),
                         .head_stride = std::get<1>(sketches),
                         .row_stride = std::get<2>(sketches),
                         .group = group,
                         .width = width,
                         .num_units = num_units},
            .columns = at<const float>(columns),
            .scale = scale,
            .resident = at<int64_t>(std::get<0>(changed)),
            .fetched = at<int64_t>(std::get<1>(changed)),
            .places = std::get<0>(wanted),
            .unit = std::get<1>(wanted),
            .alpha = std::get<2>(wanted),
            .stay = std::get<3>(wanted),
            .entries = at<void>(std::get<0>(entries)),
            .entry_head_stride = std::get<1>(entries),
            .entry_stride = std::get<2>(entries),
            .num_entries = num_entries,
            .slots = at<const int64_t>(slots),
            .pool = pool,
            .table = at<const int32_t>(std::get<0>(table)),
            .num_table_blocks = std::get<1>(table)};
}

// rows that recall: row, what
using RecallsAt = std::vector<std::tuple<int64_t, RecallAt>>;
// context_lens, slots, mass, by own queries, foretold
using LayerStepAt = std::tuple<uintptr_t, uintptr_t, uintptr_t, RecallsAt, RecallsAt>;
// layers, or none where all do as the step says; requests whose mass is wanted; its stride
using SteeringAt = std::tuple<std::vector<LayerStepAt>, std::vector<int64_t>, int64_t>;

Recalls recalls(const RecallsAt& given, const Pool& pool) {
    Recalls result;
    for (const auto& [row, what] : given) {
        result.rows.push_back(row);
        result.args.push_back(recall_args(what, pool));
    }
    return result;
}

LayerStep layer_step(const LayerStepAt& step, const Pool& pool) {
    const auto& [context_lens, slots, mass, own, foretold] = step;
    return {at<const int32_t>(context_lens), at<const int64_t>(slots), at<float>(mass), recalls(own, pool), recalls(foretold, pool)};
}

int64_t window_or_none(int64_t window) { return window > 0 ? window : std::numeric_limits<int64_t>::max(); }

Matrix matrix(const MatrixAt& m) {
    const auto& [values, scales, high_bytes, first_exceptions, exceptions] = m;
    return {at<const void>(values), at<const float>(scales),
            {at<const uint8_t>(high_bytes), at<const int64_t>(first_exceptions), at<const Exception>(exceptions)}};
}

LayerTensors layer_tensors(const Layer& layer) {
    const auto& [matrices, vectors, group, window] = layer;
    const auto m = [&](size_t i) { return matrix(matrices.at(i)); };
    const auto v = [&](size_t i) { return at<const bf16>(vectors.at(i)); };
    return {m(0), m(1), m(2), m(3), v(0), v(1), v(2), v(3), v(4), v(5), v(6), v(7), group, window_or_none(window)};
}

}  // namespace
}  // namespace pagoda

NB_MODULE(_native, m) {
    using namespace pagoda;
    m.doc() = "C++ kernels; call them through pagoda.kernels.";

    // std::invalid_argument is how the kernels refuse values; Python callers know it as KernelError.
    nb::register_exception_translator(
        [](const std::exception_ptr& p, void*) {
            try {
                std::rethrow_exception(p);
            } catch (const std::invalid_argument& error) {
                PyErr_SetString(nb::module_::import_("pagoda.errors").attr("KernelError").ptr(), error.what());
            }
        },
        nullptr);

    const auto release = nb::call_guard<nb::gil_scoped_release>();

    m.def("available_isas", &available_isas);
    m.def("use_isa", &use_isa);
    m.def("isa", [] { return std::string(isa().name); });

    m.def(
        "rms_norm",
        [](int dtype, Heads x, Rows residual, uintptr_t weight, uintptr_t out, uintptr_t new_residual, int64_t rows,
           int64_t heads, int64_t dim, float eps, int threads) {
            rms_norm(DType(dtype),
                     {.x = at<void>(std::get<0>(x)),
                      .x_row_stride = std::get<1>(x),
                      .x_head_stride = std::get<2>(x),
                      .residual = at<void>(std::get<0>(residual)),
                      .residual_row_stride = std::get<1>(residual),
                      .weight = at<void>(weight),
                      .out = at<void>(out),
                      .new_residual = at<void>(new_residual),
                      .heads = heads,
                      .dim = dim,
                      .eps = eps},
                     rows, threads);
        },
        release);

    m.def(
        "silu_mul",
        [](int dtype, Rows gate_up, uintptr_t out, int64_t rows, int64_t inter, int threads) {
            silu_mul(DType(dtype), {at<void>(std::get<0>(gate_up)), std::get<1>(gate_up), at<void>(out), inter}, rows,
                     threads);
        },
        release);

    m.def(
        "gelu_mul",
        [](int dtype, Rows gate_up, uintptr_t out, int64_t rows, int64_t inter, int threads) {
            gelu_mul(DType(dtype), {at<void>(std::get<0>(gate_up)), std::get<1>(gate_up), at<void>(out), inter}, rows,
                     threads);
        },
        release);

    m.def(
        "write_kv",
        [](int dtype, Heads k, Heads v, uintptr_t slots, const PoolAt& view, int64_t rows, int threads) {
            write_kv(DType(dtype), write_args(k, v, slots, pool(view)), rows, threads);
        },
        release);

    m.def(
        "rope_write_kv",
        [](int dtype, Heads q, int num_heads, Heads k, Heads v, Rows cos, Rows sin, int64_t max_pos, uintptr_t positions,
           uintptr_t slots, const PoolAt& view, int64_t rows, int threads) {
            rope_write_kv(DType(dtype),
                          {.q = at<void>(std::get<0>(q)),
                           .q_row_stride = std::get<1>(q),
                           .q_head_stride = std::get<2>(q),
                           .num_heads = num_heads,
                           .cos = at<float>(std::get<0>(cos)),
                           .sin = at<float>(std::get<0>(sin)),
                           .cos_row_stride = std::get<1>(cos),
                           .sin_row_stride = std::get<1>(sin),
                           .max_pos = max_pos,
                           .positions = at<int64_t>(positions),
                           .write = write_args(k, v, slots, pool(view))},
                          rows, threads);
        },
        release);

    m.def(
        "turn_kv",
        [](int dtype, const PoolAt& view, uintptr_t sources, uintptr_t targets, uintptr_t cos, uintptr_t sin, int64_t rows,
           int threads) {
            turn_kv(DType(dtype),
                    {pool(view), at<const int64_t>(sources), at<const int64_t>(targets), at<const float>(cos), at<const float>(sin)},
                    rows, threads);
        },
        release);

    m.def(
        "argmax",
        [](uintptr_t values, int64_t rows, int64_t width, uintptr_t indices, int threads) {
            argmax(at<const float>(values), rows, width, at<int64_t>(indices), threads);
        },
        release);
    m.def(
        "linear",
        [](Rows x, MatrixAt weight, int64_t weight_row_stride, uintptr_t bias, uintptr_t out, int64_t rows, int64_t num_in,
           int64_t num_out, int threads) {
            linear({.x = at<void>(std::get<0>(x)),
                    .weight = matrix(weight),
                    .bias = at<void>(bias),
                    .out = at<void>(out),
                    .x_row_stride = std::get<1>(x),
                    .weight_row_stride = weight_row_stride,
                    .rows = rows,
                    .num_in = num_in,
                    .num_out = num_out},
                   threads);
        },
        release);

    m.def(
        "plan_compact",
        [](uintptr_t values, int64_t num_out, int64_t num_in, uintptr_t high_bytes, uintptr_t first_exceptions, int threads) {
            plan_compact(at<const uint16_t>(values), num_out, num_in, at<uint8_t>(high_bytes), at<int64_t>(first_exceptions), threads);
        },
        release);

    m.def(
        "compact",
        [](uintptr_t values, int64_t num_out, int64_t num_in, const MatrixAt& to, int threads) {
            const auto& [strips, scales, high_bytes, first_exceptions, exceptions] = to;
            compact(at<const uint16_t>(values), num_out, num_in, at<const uint8_t>(high_bytes), at<const int64_t>(first_exceptions),
                    at<uint8_t>(strips), at<Exception>(exceptions), threads);
        },
        release);

    m.def(
        "paged_attention",
        [](int dtype, Heads q, int64_t num_rows, int num_heads, const PoolAt& view, Rows block_table,
           int64_t max_blocks, uintptr_t query_start, uintptr_t context_lens, int64_t num_requests, float scale,
           float softcap, int64_t window, uintptr_t out, uintptr_t lse, Rows mass, int threads, uintptr_t shared,
           int64_t num_shared, uintptr_t places) {
            const AttentionArgs args = {
                .q = at<void>(std::get<0>(q)),
                .q_row_stride = std::get<1>(q),
                .q_head_stride = std::get<2>(q),
                .num_heads = num_heads,
                .pool = pool(view),
                .scale = scale,
                .softcap = softcap,
                .window = window_or_none(window),
                .places = at<const int32_t>(places),
                .out = at<void>(out),
                .lse = at<float>(lse)};
            const Batch batch = {
                .num_rows = num_rows,
                .num_requests = num_requests,
                .block_table = at<int32_t>(std::get<0>(block_table)),
                .block_table_stride = std::get<1>(block_table),
                .max_blocks = max_blocks,
                .query_start = at<int32_t>(query_start),
                .context_lens = at<int32_t>(context_lens),
                .mass = at<float>(std::get<0>(mass)),
                .mass_stride = std::get<1>(mass),
                .shared = at<SharedPrefix>(shared),
                .num_shared = num_shared};
            paged_attention(DType(dtype), args, batch, threads);
        },
        "dtype"_a, "q"_a, "num_rows"_a, "num_heads"_a, "view"_a, "block_table"_a, "max_blocks"_a,
        "query_start"_a, "context_lens"_a, "num_requests"_a, "scale"_a, "softcap"_a, "window"_a, "out"_a, "lse"_a, "mass"_a,
        "threads"_a, "shared"_a = 0, "num_shared"_a = 0, "places"_a = 0, release);

    m.def(
        "recall_entries",
        [](uintptr_t queries, const RecallAt& recall, const PoolAt& view, int threads) {
            recall_entries(recall_args(recall, pool(view)), at<const float>(queries), threads);
        },
        release);

    nb::class_<NativeDecoder>(m, "Decoder")
        .def("__init__",
             [](NativeDecoder* self, MatrixAt embedding, MatrixAt lm_head, uintptr_t final_norm, uintptr_t cos, uintptr_t sin,
                int64_t rope_row_stride, int64_t max_pos, int64_t vocab, int64_t hidden, int64_t inter, int num_heads,
                int num_kv_heads, int head_dim, float eps, float scale, const std::vector<Layer>& layers) {
                 std::vector<LayerTensors> tensors;
                 for (const Layer& layer : layers) tensors.push_back(layer_tensors(layer));
                 const DecoderTensors shape = {.embedding = matrix(embedding),
                                               .lm_head = matrix(lm_head),
                                               .final_norm = at<const bf16>(final_norm),
                                               .cos = at<const float>(cos),
                                               .sin = at<const float>(sin),
                                               .rope_row_stride = rope_row_stride,
                                               .max_pos = max_pos,
                                               .vocab = vocab,
                                               .hidden = hidden,
                                               .inter = inter,
                                               .num_heads = num_heads,
                                               .num_kv_heads = num_kv_heads,
                                               .head_dim = head_dim,
                                               .eps = eps,
                                               .scale = scale};
                 new (self) NativeDecoder(shape, std::move(tensors));
             })
        .def(
            "forward",
            [](NativeDecoder& self, uintptr_t token_ids, uintptr_t positions, uintptr_t logits_rows, uintptr_t query_start,
               uintptr_t context_lens, uintptr_t places, int64_t num_rows, int64_t num_requests, int64_t num_logits,
               const std::vector<Group>& groups, const std::vector<PoolAt>& views, uintptr_t logits, const CutAt& cut,
               const SteeringAt& steering, int threads) {
                StepTensors step = {.token_ids = at<const int64_t>(token_ids),
                                    .positions = at<const int64_t>(positions),
                                    .logits_rows = at<const int64_t>(logits_rows),
                                    .query_start = at<const int32_t>(query_start),
                                    .context_lens = at<const int32_t>(context_lens),
                                    .places = at<const int32_t>(places),
                                    .num_rows = num_rows,
                                    .num_requests = num_requests,
                                    .num_logits = num_logits,
                                    .groups = {},
                                    .layers = {},
                                    .mass_of = std::get<1>(steering),
                                    .mass_stride = std::get<2>(steering),
                                    .logits = at<float>(logits)};
                for (const auto& [table, stride, max_blocks, slots, shared, num_shared] : groups) {
                    step.groups.push_back({at<const int32_t>(table), stride, max_blocks, at<const int64_t>(slots),
                                           at<const SharedPrefix>(shared), num_shared});
                }
                std::vector<Pool> pools;
                for (const PoolAt& view : views) pools.push_back(pool(view));
                const auto& layers = std::get<0>(steering);
                step.layers.resize(pools.size());
                for (size_t i = 0; i < layers.size() && i < pools.size(); i++) step.layers[i] = layer_step(layers[i], pools[i]);
                const auto& [part, layer, lanes, num_lanes, rows] = cut;
                self.forward(step, {Cut::Part(part), layer, at<float>(lanes), num_lanes, at<const int64_t>(rows)}, pools, threads);
            },
            release);
}
