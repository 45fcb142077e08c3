"""The oracle: every kernel in plain torch with float32 arithmetic. Slow and obvious; runs on any device.

Arguments have passed `checks`; values are checked here, because torch would wrap negative ids around.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F

from pagoda.errors import KernelError
from pagoda.kernels.types import AttentionOutput, KVView, SharedPrefix


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `dispatch.rms_norm`."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `dispatch.add_rms_norm`."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, eps), total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `dispatch.silu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `dispatch.gelu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    # The same as (1 + tanh(x)) / 2, which loses what is left of 1 - 1 where the gate is negative.
    opening = torch.sigmoid(2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
    return (gate * opening * up).to(gate_up.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `dispatch.linear`."""
    return F.linear(x, weight, bias)


def write_kv(view: KVView, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """See `dispatch.write_kv`."""
    num_blocks, _, block_size, _ = view.keys.shape
    _check_range("slot_mapping", slot_mapping, num_blocks * block_size)
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    view.keys[blocks, :, offsets] = k
    view.values[blocks, :, offsets] = v


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
    _check_range("positions", positions, cos.shape[0])
    half = q.shape[-1] // 2
    row_cos, row_sin = cos[positions, None, :half], sin[positions, None, :half]
    write_kv(view, _rotate(k, row_cos, row_sin), v, slot_mapping)
    return q.copy_(_rotate(q, row_cos, row_sin))


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


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
) -> AttentionOutput:
    """See `dispatch.paged_attention`."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = view.keys.shape[1]
    group = num_heads // num_kv_heads
    starts, lens = query_start.tolist(), context_lens.tolist()
    _check_lengths(num_rows, starts, lens, block_table.shape[1] * view.keys.shape[2])
    _check_shared(shared_prefixes, starts, lens, block_table, view.keys.shape[2], window)

    out = torch.empty(num_rows, num_heads, head_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_rows, num_heads, device=q.device) if need_lse else None
    mass = torch.zeros(len(lens), num_kv_heads, max(lens, default=0), device=q.device) if need_mass else None
    for request, context_len in enumerate(lens):
        begin, end = starts[request], starts[request + 1]
        query_len = end - begin
        if query_len == 0:
            continue
        # positions of the rows, and the first KV entry that any of them sees
        last_seen = torch.arange(context_len - query_len, context_len, device=q.device)[:, None]
        first = 0 if window is None else max(0, context_len - query_len - window + 1)
        seen = torch.arange(first, context_len, device=q.device)[None, :]
        visible = seen <= last_seen
        if window is not None:
            visible &= seen > last_seen - window

        keys = _gather(view.keys, block_table[request], first, context_len)
        values = _gather(view.values, block_table[request], first, context_len)
        queries = q[begin:end].float().view(query_len, num_kv_heads, group, head_dim)
        scores = torch.einsum("qkgd,kjd->kgqj", queries, keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible, -torch.inf)
        probabilities = scores.softmax(-1)
        out[begin:end] = torch.einsum("kgqj,kjd->qkgd", probabilities, values).flatten(1, 2).to(q.dtype)
        if lse is not None:
            lse[begin:end] = scores.logsumexp(-1).flatten(0, 1).T
        if mass is not None:
            mass[request, :, first:context_len] = probabilities.sum((1, 2))
    return AttentionOutput(out, lse, mass)


def _gather(pool: torch.Tensor, blocks: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """KV entries `first..last-1` of a request, float32 `[num_kv_heads, last - first, head_dim]`."""
    block_size = pool.shape[2]
    first_block = first // block_size
    ids = blocks[first_block : -(-last // block_size)].long()
    _check_range("block_table", ids, pool.shape[0])
    entries = pool[ids].transpose(0, 1).flatten(1, 2)
    return entries[:, first - first_block * block_size : last - first_block * block_size].float()


def _check_range(name: str, index: torch.Tensor, bound: int) -> None:
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= bound):
        raise KernelError(f"{name} has values outside 0..{bound - 1}")


def _check_lengths(num_rows: int, starts: list[int], lens: list[int], capacity: int) -> None:
    if starts[0] != 0 or starts[-1] != num_rows or any(a > b for a, b in pairwise(starts)):
        raise KernelError(f"query_start must rise from 0 to num_rows = {num_rows}; got {starts}")
    for request, context_len in enumerate(lens):
        query_len = starts[request + 1] - starts[request]
        if not query_len <= context_len <= capacity:
            raise KernelError(
                f"request {request}: context_len {context_len} must be at least its {query_len} rows and at most "
                f"the {capacity} entries of its block table"
            )


def _check_shared(
    shared_prefixes: Sequence[SharedPrefix],
    starts: list[int],
    lens: list[int],
    block_table: torch.Tensor,
    block_size: int,
    window: int | None,
) -> None:
    """Reading entries once or many times gives the same, so that checking is all there is to do with them here."""
    if shared_prefixes and window is not None:
        raise KernelError("a shared prefix cannot be combined with a window")
    free_from = 0
    for first, count, num_blocks in shared_prefixes:
        if first < free_from or count < 1 or num_blocks < 1 or first + count > len(lens):
            raise KernelError(
                f"shared prefix {(first, count, num_blocks)} must name blocks, and requests of the batch in order"
            )
        free_from = first + count
        for request in range(first, free_from):
            if lens[request] - (starts[request + 1] - starts[request]) < num_blocks * block_size:
                raise KernelError(f"a shared prefix reaches into the new rows of request {request}")
            if not torch.equal(block_table[request, :num_blocks], block_table[first, :num_blocks]):
                raise KernelError(f"the table of request {request} starts with other blocks than request {first}'s")
