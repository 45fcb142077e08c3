"""The C++ kernels (csrc/): addresses and strides of tensors that `checks` has passed, zero-copy, without the GIL.

Threads are torch's number of threads. `PAGODA_ISA` (portable, avx2, avx512, amx) forces an instruction set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import torch

import pagoda._native as _native
from pagoda.errors import ConfigError, KernelError
from pagoda.kernels import reference
from pagoda.kernels.matrices import CompactMatrix, Int8Matrix, Matrix, matrix_at
from pagoda.kernels.recall import Recall
from pagoda.kernels.types import AttentionOutput, KVView, SharedPrefix

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FORMATS = {**_DTYPES, torch.int8: 3, torch.float8_e4m3fn: 4, torch.float8_e5m2: 5, torch.uint8: 6}
_MAX_HEAD_DIM = 256
# Most rows of `linear` that the native kernel takes: more, and torch is as fast or faster (benchmarks/kernels.py).
_MAX_LINEAR_ROWS = {"amx": 128, "avx512": 2, "avx2": 1, "portable": 0}
# The same for int8 codes, which torch would have to widen first.
_MAX_CODE_ROWS = {"amx": 1 << 30, "avx512": 64, "avx2": 32, "portable": 4}

if "PAGODA_ISA" in os.environ:
    try:
        _native.use_isa(os.environ["PAGODA_ISA"])
    except KernelError as error:
        raise ConfigError(f"PAGODA_ISA: {error}") from error


def argmax(values: torch.Tensor) -> torch.Tensor:
    """See `dispatch.argmax`."""
    rows, width = values.shape
    indices = torch.empty(rows, dtype=torch.int64)
    _native.argmax(values.data_ptr(), rows, width, indices.data_ptr(), torch.get_num_threads())
    return indices


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `dispatch.rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype)
    rows, heads = x.shape[0], x.shape[1] if x.dim() == 3 else 1
    _native.rms_norm(
        _DTYPES[x.dtype],
        (x.data_ptr(), x.stride(0), x.stride(-2)),
        (0, 0),
        weight.data_ptr(),
        out.data_ptr(),
        0,
        rows,
        heads,
        x.shape[-1],
        eps,
        torch.get_num_threads(),
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `dispatch.add_rms_norm`."""
    out, total = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    _native.rms_norm(
        _DTYPES[x.dtype],
        (x.data_ptr(), x.stride(0), 0),
        (residual.data_ptr(), residual.stride(0)),
        weight.data_ptr(),
        out.data_ptr(),
        total.data_ptr(),
        x.shape[0],
        1,
        x.shape[1],
        eps,
        torch.get_num_threads(),
    )
    return out, total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `dispatch.silu_mul`."""
    return _gated_product(_native.silu_mul, gate_up)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `dispatch.gelu_mul`."""
    return _gated_product(_native.gelu_mul, gate_up)


def _gated_product(product: Callable[..., None], gate_up: torch.Tensor) -> torch.Tensor:
    rows, inter = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, inter, dtype=gate_up.dtype)
    product(
        _DTYPES[gate_up.dtype],
        (gate_up.data_ptr(), gate_up.stride(0)),
        out.data_ptr(),
        rows,
        inter,
        torch.get_num_threads(),
    )
    return out


def linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """See `dispatch.linear`."""
    if (
        x.shape[0] > _most_rows(weight)
        or x.dtype != torch.bfloat16
        or x.stride(1) != 1
        or (isinstance(weight, torch.Tensor) and weight.stride(1) != 1)
        or (bias is not None and bias.stride(0) != 1)
    ):
        return reference.linear(x, weight, bias)
    return linear_few_rows(x, weight, bias)


def _most_rows(weight: Matrix) -> int:
    """Rows up to which the kernels here are faster than torch, which has to widen or expand what is no tensor."""
    if isinstance(weight, CompactMatrix):
        return sys.maxsize if _native.isa() == "amx" else -1
    return (_MAX_CODE_ROWS if isinstance(weight, Int8Matrix) else _MAX_LINEAR_ROWS)[_native.isa()]


def linear_few_rows(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """The native kernel of `linear`, for any number of BF16 rows with contiguous last dimensions."""
    rows, num_in, num_out = x.shape[0], x.shape[1], weight.shape[0]
    out = torch.empty(rows, num_out, dtype=x.dtype)
    _native.linear(
        (x.data_ptr(), x.stride(0)),
        matrix_at(weight),
        weight.stride(0) if isinstance(weight, torch.Tensor) else num_in,
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        num_in,
        num_out,
        torch.get_num_threads(),
    )
    return out


def write_kv(view: KVView, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """See `dispatch.write_kv`."""
    if view.is_quantized and not _takes_head_dim(view):
        return reference.write_kv(view, k, v, slot_mapping)
    _native.write_kv(
        _DTYPES[k.dtype],
        _heads(k),
        _heads(v),
        slot_mapping.data_ptr(),
        pool_at(view),
        k.shape[0],
        torch.get_num_threads(),
    )


def rope_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    view: KVView,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """See `dispatch.rope_write_kv`."""
    if not view.is_plain(k.dtype) and not _takes_head_dim(view):
        return reference.rope_write_kv(q, k, v, cos, sin, positions, view, slot_mapping)
    _native.rope_write_kv(
        _DTYPES[q.dtype],
        _heads(q),
        q.shape[1],
        _heads(k),
        _heads(v),
        (cos.data_ptr(), cos.stride(0)),
        (sin.data_ptr(), sin.stride(0)),
        cos.shape[0],
        positions.data_ptr(),
        slot_mapping.data_ptr(),
        pool_at(view),
        q.shape[0],
        torch.get_num_threads(),
    )
    return q


def turn_kv(view: KVView, sources: torch.Tensor, targets: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """See `dispatch.turn_kv`."""
    _native.turn_kv(
        _DTYPES[view.keys.dtype],
        pool_at(view),
        sources.data_ptr(),
        targets.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        sources.shape[0],
        torch.get_num_threads(),
    )


def paged_attention(
    q: torch.Tensor,
    view: KVView,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    need_lse: bool,
    need_mass: bool,
    shared_prefixes: Sequence[SharedPrefix],
    places: torch.Tensor | None = None,
) -> AttentionOutput:
    """See `dispatch.paged_attention`. Head sizes that the vectors do not take go to the reference."""
    num_rows, num_heads, _ = q.shape
    if not _takes_head_dim(view):
        return reference.paged_attention(
            q,
            view,
            block_table,
            query_start,
            context_lens,
            scale=scale,
            window=window,
            softcap=softcap,
            need_lse=need_lse,
            need_mass=need_mass,
            shared_prefixes=shared_prefixes,
            places=places,
        )
    num_requests = context_lens.shape[0]
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(num_rows, num_heads) if need_lse else None
    mass = None
    if need_mass:
        longest = int(context_lens.max()) if num_requests else 0
        mass = torch.zeros(num_requests, view.keys.shape[1], longest)
    shared = torch.tensor(shared_prefixes, dtype=torch.int32)
    _native.paged_attention(
        _DTYPES[q.dtype],
        _heads(q),
        num_rows,
        num_heads,
        pool_at(view),
        (block_table.data_ptr(), block_table.stride(0)),
        block_table.shape[1],
        query_start.data_ptr(),
        context_lens.data_ptr(),
        num_requests,
        scale,
        softcap or 0.0,
        window or 0,
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        (0, 0) if mass is None else (mass.data_ptr(), mass.shape[2]),
        torch.get_num_threads(),
        shared.data_ptr(),
        len(shared),
        0 if places is None else places.data_ptr(),
    )
    return AttentionOutput(out, lse, mass)


def recall_entries(queries: torch.Tensor, recall: Recall) -> None:
    """See `dispatch.recall_entries`. Where copying converts, the reference does it."""
    if not recall.only_copies:
        return reference.recall_entries(queries, recall)
    wide = queries.float().contiguous()
    _native.recall_entries(
        wide.data_ptr(), recall_at(recall, len(queries)), pool_at(recall.view), torch.get_num_threads()
    )


def recall_at(recall: Recall, num_heads: int) -> tuple[object, ...]:
    """What is recalled, as the extension takes it; the view goes apart."""
    sketches, resident = recall.sketches, recall.resident
    num_kv_heads, width, num_units = sketches.shape
    return (
        _DTYPES[sketches.dtype],
        _heads(sketches),
        (num_heads // num_kv_heads, width, num_units),
        0 if recall.columns is None else recall.columns.data_ptr(),
        recall.scale,
        (resident.data_ptr(), recall.fetched.data_ptr()),
        (resident.shape[1], recall.unit, recall.alpha, recall.stay),
        _heads(recall.entries),
        recall.entries.shape[1],
        recall.slots.data_ptr(),
        (recall.table.data_ptr(), recall.table.numel()),
    )


def _heads(x: torch.Tensor) -> tuple[int, int, int]:
    stride = x.stride()
    return x.data_ptr(), stride[0], stride[1]


def pool_at(view: KVView) -> tuple[object, ...]:
    """A view as the extension takes it."""
    staging = view.staging
    if staging is None:
        staged = firsts = _NO_COPIES
    else:
        staged = _copies(staging.keys, staging.values, staging.slot_of)
        firsts = _copies(staging.firsts.keys, staging.firsts.values, staging.firsts.row_of)
    return (
        _part(view.keys, view.key_scales, view.key_zeros),
        _part(view.values, view.value_scales, view.value_zeros),
        (*view.keys.shape[:3], view.head_dim),
        staged,
        firsts,
    )


def _takes_head_dim(view: KVView) -> bool:
    return view.head_dim % 8 == 0 and view.head_dim <= _MAX_HEAD_DIM


_Part = tuple[int, int, int, int, int, tuple[int, int, int], tuple[int, int, int]]
_NOTHING = (0, 0, 0)
_NO_PART: _Part = (0, 0, 0, 0, 0, _NOTHING, _NOTHING)
_Copies = tuple[_Part, _Part, int, int]
_NO_COPIES: _Copies = (_NO_PART, _NO_PART, 0, 0)


def _copies(keys: torch.Tensor, values: torch.Tensor, which: torch.Tensor) -> _Copies:
    return _part(keys, None, None), _part(values, None, None), keys.shape[0], which.data_ptr()


def _part(codes: torch.Tensor, scales: torch.Tensor | None, zeros: torch.Tensor | None) -> _Part:
    stride = codes.stride()
    scales_at = _NOTHING if scales is None else _heads(scales)
    zeros_at = _NOTHING if zeros is None else _heads(zeros)
    return codes.data_ptr(), stride[0], stride[1], stride[2], _FORMATS[codes.dtype], scales_at, zeros_at
