"""Shapes, dtypes and strides, checked once for every backend. Values (block ids, slots) are checked by the backends."""

from __future__ import annotations

import torch

from pagoda.errors import KernelError
from pagoda.kernels.matrices import CompactMatrix, Int8Matrix, Matrix
from pagoda.kernels.types import FLOATS, KV_FORMATS, KVView, Staging


def check_norm(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> None:
    """`x` `[..., dim]` with a contiguous last dimension, `weight` `[dim]`, `residual` like `x`."""
    check_float("x", x)
    if x.dim() < 2 or x.dim() > 3 or weight.shape != x.shape[-1:]:
        raise KernelError(f"rms_norm needs x [rows, (heads,) dim] and weight [dim]; got {show(x)} and {show(weight)}")
    if weight.dtype != x.dtype:
        raise KernelError(f"x is {x.dtype} but weight is {weight.dtype}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise KernelError(f"residual must be like x; got {show(residual)} and {show(x)}")
    check_rows("weight", weight)
    check_rows("x", x)
    if residual is not None:
        check_rows("residual", residual)


def check_gate_up(gate_up: torch.Tensor) -> None:
    """`[rows, 2 * inter]`, the last dimension contiguous."""
    check_float("gate_up", gate_up)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise KernelError(f"a gated product needs [rows, 2 * inter]; got {show(gate_up)}")
    check_rows("gate_up", gate_up)


def check_values(values: torch.Tensor) -> None:
    """float32 `[rows, width]`, contiguous, with a column."""
    if values.dim() != 2 or values.shape[1] == 0 or values.dtype != torch.float32 or not values.is_contiguous():
        raise KernelError(f"argmax needs contiguous float32 [rows, width], width > 0; got {show(values)}")


def check_linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None) -> None:
    """`x` `[rows, in]`, `weight` `[out, in]`, `bias` `[out]`, of one dtype but for codes."""
    if isinstance(weight, Int8Matrix):
        _check_codes(weight)
        found, fits = show(weight.codes), x.dtype in FLOATS
    elif isinstance(weight, CompactMatrix):
        found, fits = f"{list(weight.shape)} compact", x.dtype == torch.bfloat16
    else:
        found, fits = show(weight), x.dtype == weight.dtype
    if x.dim() != 2 or len(weight.shape) != 2 or x.shape[1] != weight.shape[1] or not fits:
        raise KernelError(
            "linear needs x [rows, in] and weight [out, in] of one dtype, or int8, or compact with an x of bfloat16; "
            f"got {show(x)}, {found}"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype):
        raise KernelError(f"bias must be [{weight.shape[0]}] {x.dtype}; got {show(bias)}")


def check_write(view: KVView, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """`k`, `v` `[num_rows, num_kv_heads, head_dim]` of one dtype, `slot_mapping` int64 `[num_rows]`."""
    check_view(view)
    num_kv_heads, head_dim = view.keys.shape[1], view.head_dim
    for name, new in (("k", k), ("v", v)):
        check_float(name, new)
        if new.dim() != 3 or new.shape[1] != num_kv_heads or new.shape[2] != head_dim:
            raise KernelError(f"{name} must be [num_rows, {num_kv_heads}, {head_dim}]; got {show(new)}")
        check_rows(name, new)
    if k.shape[0] != v.shape[0] or k.dtype != v.dtype:
        raise KernelError(f"k is {show(k)} and v {show(v)}")
    check_staged_dtype(view, k.dtype)
    check_index("slot_mapping", slot_mapping, torch.int64, k.shape[0])


def check_rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> None:
    """`q` like `k` but for its heads; float32 tables `[max_pos, head_dim / 2]` or `[max_pos, head_dim]`."""
    if q.dim() != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2] or q.dtype != k.dtype:
        raise KernelError(f"q must be [{k.shape[0]}, num_heads, {k.shape[2]}] {k.dtype}; got {show(q)}")
    check_rows("q", q)
    head_dim = q.shape[2]
    if head_dim % 2 or cos.dim() != 2 or cos.shape[1] not in (head_dim // 2, head_dim) or cos.shape != sin.shape:
        raise KernelError(
            f"cos and sin must be [max_pos, {head_dim // 2}] or [max_pos, {head_dim}]; got {show(cos)}, {show(sin)}"
        )
    if cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise KernelError(f"cos and sin must be float32; got {cos.dtype} and {sin.dtype}")
    check_rows("cos", cos)
    check_rows("sin", sin)
    check_index("positions", positions, torch.int64, q.shape[0])


def check_turn(
    view: KVView, sources: torch.Tensor, targets: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """int64 `[rows]` slots, contiguous float32 `[rows, head_dim / 2]` angles, keys and values of one float dtype."""
    check_view(view)
    if not view.is_plain(view.keys.dtype):
        raise KernelError(f"only plain keys and values can be turned; these are {view.keys.dtype}, {view.values.dtype}")
    rows = sources.numel()
    check_index("sources", sources, torch.int64, rows)
    check_index("targets", targets, torch.int64, rows)
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (rows, view.head_dim // 2) or table.dtype != torch.float32 or not table.is_contiguous():
            raise KernelError(f"{name} must be a contiguous [{rows}, {view.head_dim // 2}] float32; got {show(table)}")


def check_attention(
    q: torch.Tensor,
    view: KVView,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    window: int | None,
    softcap: float | None,
    places: torch.Tensor | None,
) -> None:
    """The arguments of `paged_attention`."""
    check_view(view)
    num_kv_heads, head_dim = view.keys.shape[1], view.head_dim
    check_float("q", q)
    if q.dim() != 3 or q.shape[2] != head_dim or q.shape[1] % num_kv_heads:
        raise KernelError(f"q must be [num_rows, n * {num_kv_heads}, {head_dim}]; got {show(q)}")
    check_rows("q", q)
    check_staged_dtype(view, q.dtype)
    num_requests = context_lens.numel()
    check_index("context_lens", context_lens, torch.int32, num_requests)
    check_index("query_start", query_start, torch.int32, num_requests + 1)
    check_block_table(block_table, num_requests)
    check_places(places, q.shape[0])
    if window is not None and window < 1:
        raise KernelError(f"window must be at least 1; got {window}")
    if softcap is not None and softcap <= 0:
        raise KernelError(f"softcap must be positive; got {softcap}")


def check_view(view: KVView) -> None:
    """Keys and values of one shape, each of a known dtype with the scales that belong to it; see KVView."""
    keys, values, staging = view.keys, view.values, view.staging
    for name, codes in (("keys", keys), ("values", values)):
        if codes.dtype not in KV_FORMATS:
            raise KernelError(f"{name} are {codes.dtype}; known: {', '.join(map(str, KV_FORMATS))}")
        if codes.dim() != 4:
            raise KernelError(f"{name} must be [num_blocks, num_kv_heads, block_size, head_dim]; got {show(codes)}")
        check_rows(name, codes)
    num_blocks, num_kv_heads, block_size, width = values.shape
    head_dim = 2 * width if values.dtype == torch.uint8 else width
    if keys.shape[:3] != values.shape[:3] or view.head_dim != head_dim:
        raise KernelError(f"keys and values must be of one shape; got {show(keys)} and {show(values)}")
    if (staging is not None) != (keys.dtype == torch.uint8):
        raise KernelError("keys in four bits need staged blocks, and no others do")
    by_row, by_channel = (num_blocks, num_kv_heads, block_size), (num_blocks, num_kv_heads, head_dim)
    _check_scales("key", keys.dtype, view.key_scales, view.key_zeros, by_row if staging is None else by_channel)
    _check_scales("value", values.dtype, view.value_scales, view.value_zeros, by_row)
    if staging is not None:
        _check_staging(staging, view)


def _check_scales(
    name: str, dtype: torch.dtype, scales: torch.Tensor | None, zeros: torch.Tensor | None, shape: tuple[int, ...]
) -> None:
    wanted = {
        "scales": None if dtype in FLOATS else torch.uint8 if dtype == torch.uint8 else torch.bfloat16,
        "zeros": torch.bfloat16 if dtype == torch.uint8 else None,
    }
    for (what, kind), got in zip(wanted.items(), (scales, zeros), strict=True):
        if (None if got is None else got.dtype) != kind or (got is not None and got.shape != shape):
            needs = "none" if kind is None else f"{list(shape)} {str(kind).removeprefix('torch.')}"
            raise KernelError(f"{name}_{what} of {dtype} must be {needs}; got {'none' if got is None else show(got)}")
        if got is not None:
            check_rows(f"{name}_{what}", got)


def _check_staging(staging: Staging, view: KVView) -> None:
    num_blocks, num_kv_heads, block_size, _ = view.keys.shape
    check_index("slot_of", staging.slot_of, torch.int32, num_blocks)
    for name, part in (("staged keys", staging.keys), ("staged values", staging.values)):
        check_float(name, part)
        if part.shape[1:] != (num_kv_heads, block_size, view.head_dim) or part.dtype != staging.keys.dtype:
            raise KernelError(
                f"{name} must be [num_staged, {num_kv_heads}, {block_size}, {view.head_dim}]; got {show(part)}"
            )
        check_rows(name, part)
    check_index("row_of", staging.firsts.row_of, torch.int32, num_blocks)
    of_first = staging.firsts.keys.shape[0], num_kv_heads, 1, view.head_dim
    for name, part in (("first keys", staging.firsts.keys), ("first values", staging.firsts.values)):
        if part.shape != of_first or part.dtype != staging.keys.dtype:
            raise KernelError(f"{name} must be {list(of_first)} {staging.keys.dtype}; got {show(part)}")
        check_rows(name, part)


def check_staged_dtype(view: KVView, dtype: torch.dtype) -> None:
    """What is in full, of the dtype that is computed in, which kernels take it to be. The view must be checked."""
    if view.staging is not None and view.staging.keys.dtype != dtype:
        raise KernelError(f"staged blocks are {view.staging.keys.dtype}, and what is computed with them is {dtype}")


def check_step(
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    logits_rows: torch.Tensor,
) -> None:
    """Indices of a step: int64 per row and per wanted row, int32 per request."""
    num_rows, num_requests = token_ids.numel(), context_lens.numel()
    check_index("token_ids", token_ids, torch.int64, num_rows)
    check_index("positions", positions, torch.int64, num_rows)
    check_index("query_start", query_start, torch.int32, num_requests + 1)
    check_index("context_lens", context_lens, torch.int32, num_requests)
    check_index("logits_rows", logits_rows, torch.int64, logits_rows.numel())


def check_layer_step(
    context_lens: torch.Tensor | None, slots: torch.Tensor | None, num_rows: int, num_requests: int
) -> None:
    """int32 per request and int64 per row, if there are any."""
    if context_lens is not None:
        check_index("context_lens", context_lens, torch.int32, num_requests)
    if slots is not None:
        check_index("slots", slots, torch.int64, num_rows)


def check_places(places: torch.Tensor | None, num_rows: int) -> None:
    """int32 per row, if there are any."""
    if places is not None:
        check_index("places", places, torch.int32, num_rows)


def check_kept(rows: torch.Tensor, num_rows: int) -> None:
    """int64 per row that goes on."""
    check_index("rows", rows, torch.int64, num_rows)


def check_tables(block_table: torch.Tensor, slot_mapping: torch.Tensor, num_requests: int, num_rows: int) -> None:
    """One layer group's int32 `[num_requests, max_blocks]` and int64 `[num_rows]`."""
    check_block_table(block_table, num_requests)
    check_index("slot_mapping", slot_mapping, torch.int64, num_rows)


def check_block_table(block_table: torch.Tensor, num_requests: int) -> None:
    """int32 `[num_requests, max_blocks]`, each request's ids contiguous."""
    if block_table.dim() != 2 or block_table.shape[0] != num_requests or block_table.dtype != torch.int32:
        raise KernelError(f"block_table must be [{num_requests}, max_blocks] int32; got {show(block_table)}")
    check_rows("block_table", block_table)


def _check_codes(weight: Int8Matrix) -> None:
    codes, scales = weight.codes, weight.scales
    if codes.dtype != torch.int8 or not codes.is_contiguous():
        raise KernelError(f"codes must be contiguous int8; got {show(codes)}")
    if scales.dtype != torch.float32 or scales.shape != codes.shape[:1] or not scales.is_contiguous():
        raise KernelError(f"scales must be a contiguous float32 [{codes.shape[0]}]; got {show(scales)}")


def check_float(name: str, tensor: torch.Tensor) -> None:
    """Of a dtype that kernels compute in."""
    if tensor.dtype not in FLOATS:
        raise KernelError(f"{name} must be float32, bfloat16 or float16; got {tensor.dtype}")


def check_rows(name: str, tensor: torch.Tensor) -> None:
    """Its last dimension contiguous."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise KernelError(f"the last dimension of {name} must be contiguous; its strides are {tensor.stride()}")


def check_index(name: str, tensor: torch.Tensor, dtype: torch.dtype, length: int) -> None:
    """A contiguous `[length]`."""
    if tensor.dim() != 1 or tensor.shape[0] != length or tensor.dtype != dtype or not tensor.is_contiguous():
        raise KernelError(f"{name} must be a contiguous [{length}] {dtype}; got {show(tensor)}")


def show(tensor: torch.Tensor) -> str:
    """Shape and dtype, for messages."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
