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
from pagoda.kernels.matrices import CompactMatrix, Int8Matrix, Matrix
from pagoda.kernels.quantized import decode_nibbles, decode_rows, encode_nibbles, encode_rows, mix, unmix
from pagoda.kernels.recall import recall_entries as recall_entries
from pagoda.kernels.types import AttentionOutput, FirstTokens, KVView, SharedPrefix, Staging


def argmax(values: torch.Tensor) -> torch.Tensor:
    """See `dispatch.argmax`."""
    largest, indices = values.amax(dim=-1), values.argmax(dim=-1)
    return torch.where(largest.isfinite(), indices, -1)


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


def linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """See `dispatch.linear`."""
    if isinstance(weight, Int8Matrix):
        product = F.linear(x.float(), weight.codes.float()) * weight.scales
        return (product if bias is None else product + bias.float()).to(x.dtype)
    return F.linear(x, weight.expand() if isinstance(weight, CompactMatrix) else weight, bias)


def write_kv(view: KVView, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """See `dispatch.write_kv`."""
    num_blocks, _, block_size, _ = view.keys.shape
    _check_range("slot_mapping", slot_mapping, num_blocks * block_size)
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    if view.staging is None:
        _write_rows(view.keys, view.key_scales, view.key_zeros, mix(k) if view.keys_are_mixed else k, blocks, offsets)
        _write_rows(view.values, view.value_scales, view.value_zeros, v, blocks, offsets)
        return
    staged = _staged(view.staging, blocks)
    view.staging.keys[staged, :, offsets] = k
    view.staging.values[staged, :, offsets] = v
    is_last = offsets == block_size - 1
    if is_last.any():
        _close_blocks(view, view.staging, blocks[is_last], staged[is_last])


def _write_rows(
    codes: torch.Tensor,
    scales: torch.Tensor | None,
    zeros: torch.Tensor | None,
    x: torch.Tensor,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Keys or values of tokens `[num_rows, num_kv_heads, head_dim]`, each quantized by itself if at all."""
    if scales is None:
        codes[blocks, :, offsets] = x.to(codes.dtype)
        return
    if zeros is None:
        new, new_scales = encode_rows(x, codes.dtype)
    else:
        new, new_scales, zeros[blocks, :, offsets] = encode_nibbles(x, dim=-1)
    codes.view(torch.uint8)[blocks, :, offsets] = new.view(torch.uint8)  # torch indexes no float8
    scales[blocks, :, offsets] = new_scales


def _close_blocks(view: KVView, staging: Staging, blocks: torch.Tensor, staged: torch.Tensor) -> None:
    """Quantize blocks that are full now: what other blocks' rows read of them."""
    assert view.key_scales is not None, "only keys with scales are staged"
    assert view.key_zeros is not None, "and with zeros"
    keys, values = staging.keys[staged], staging.values[staged]
    begins = staging.firsts.row_of[blocks] >= 0
    keys[begins, :, 0] = keys[begins, :, min(1, keys.shape[2] - 1)]
    view.keys[blocks], view.key_scales[blocks], view.key_zeros[blocks] = encode_nibbles(keys, dim=-2)
    rows = values.transpose(1, 2).flatten(0, 1)
    size = values.shape[2]
    offsets = torch.arange(size, device=blocks.device).repeat(len(blocks))
    _write_rows(view.values, view.value_scales, view.value_zeros, rows, blocks.repeat_interleave(size), offsets)


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


def turn_kv(view: KVView, sources: torch.Tensor, targets: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """See `dispatch.turn_kv`."""
    num_blocks, _, size, _ = view.keys.shape
    _check_range("sources", sources, num_blocks * size)
    _check_range("targets", targets, num_blocks * size)
    keys, values = (part[sources // size, :, sources % size] for part in (view.keys, view.values))
    write_kv(view, _rotate(keys, cos[:, None], sin[:, None]), values, targets)


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
    places: torch.Tensor | None = None,
) -> AttentionOutput:
    """See `dispatch.paged_attention`."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = view.keys.shape[1], view.keys.shape[2]
    group = num_heads // num_kv_heads
    starts, lens = query_start.tolist(), context_lens.tolist()
    _check_lengths(num_rows, starts, lens, block_table.shape[1] * block_size)
    if places is None:
        counts = query_start.diff()
        rows = torch.arange(num_rows, device=q.device)
        places = rows + (context_lens - query_start[1:]).repeat_interleave(counts)
    _check_places(places.tolist(), starts, lens)
    _check_shared(shared_prefixes, starts, lens, places.tolist(), block_table, block_size, window)

    out = torch.empty(num_rows, num_heads, head_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_rows, num_heads, device=q.device) if need_lse else None
    mass = torch.zeros(len(lens), num_kv_heads, max(lens, default=0), device=q.device) if need_mass else None
    for request, context_len in enumerate(lens):
        begin, end = starts[request], starts[request + 1]
        query_len = end - begin
        if query_len == 0:
            continue
        # positions of the rows, and the first KV entry that any of them sees
        last_seen = places[begin:end, None]
        first_place = int(last_seen[0])
        first = 0 if window is None else max(0, first_place - window + 1)
        seen = torch.arange(first, context_len, device=q.device)[None, :]
        visible = seen <= last_seen
        if window is not None:
            visible &= seen > last_seen - window

        keys, values = _gather(view, block_table[request], first, context_len)
        if view.staging is not None and first == 0:
            _put_first(view.staging.firsts, block_table[request, 0], keys, values)
        queries = q[begin:end].float().view(query_len, num_kv_heads, group, head_dim)
        scores = torch.einsum("qkgd,kjd->kgqj", queries, keys)
        # Where blocks are quantized when they are full, rows read their own block as it was.
        is_own = seen // block_size == last_seen // block_size
        if view.staging is not None:
            own_keys, own_values = _gather_staged(view, block_table[request], first, context_len, first_place)
            scores = torch.where(is_own, torch.einsum("qkgd,kjd->kgqj", queries, own_keys), scores)
        scores = scores * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible, -torch.inf)
        probabilities = scores.softmax(-1)
        if view.staging is None:
            attended = _weighted(probabilities, values, visible)
        else:
            attended = _weighted(probabilities.masked_fill(is_own, 0), values, visible & ~is_own)
            attended += _weighted(probabilities.masked_fill(~is_own, 0), own_values, visible & is_own)
        out[begin:end] = attended.flatten(1, 2).to(q.dtype)
        if lse is not None:
            lse[begin:end] = scores.logsumexp(-1).flatten(0, 1).T
        if mass is not None:
            mass[request, :, first:context_len] = probabilities.sum((1, 2))
    return AttentionOutput(out, lse, mass)


def _weighted(probabilities: torch.Tensor, values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Values by their probabilities; what is not finite reaches only the rows that see it, for 0 times NaN is NaN."""
    finite = values.isfinite()
    attended = torch.einsum("kgqj,kjd->qkgd", probabilities, values.where(finite, 0))
    if not finite.all():
        reached = torch.einsum("qj,kjd->qkd", visible.float(), (~finite).float())[:, :, None] > 0
        attended.masked_fill_(reached, torch.nan)
    return attended


def _gather(view: KVView, blocks: torch.Tensor, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `first..last-1` of a request, float32 `[num_kv_heads, last - first, head_dim]` each.

    Of staged blocks that are not full the pool has nothing: zeros stand for them.
    """
    num_blocks, _num_kv_heads, block_size, _ = view.keys.shape
    first_block = first // block_size
    end_block = -(-last // block_size) if view.staging is None else last // block_size
    ids = blocks[first_block:end_block].long()
    _check_range("block_table", ids, num_blocks)
    found = []
    for codes, scales, zeros, dim in (
        (view.keys, view.key_scales, view.key_zeros, -2 if view.staging is not None else -1),
        (view.values, view.value_scales, view.value_zeros, -1),
    ):
        of_blocks = codes.view(torch.uint8)[ids].view(codes.dtype) if codes.itemsize == 1 else codes[ids]
        if scales is None:
            entries = of_blocks.float()
        elif zeros is None:
            entries = decode_rows(of_blocks, scales[ids])
            entries = unmix(entries) if codes is view.keys else entries
        else:
            entries = decode_nibbles(of_blocks, scales[ids], zeros[ids], dim)
        entries = entries.transpose(0, 1).flatten(1, 2)
        missing = last - first_block * block_size - entries.shape[1]
        if missing > 0:
            entries = F.pad(entries, (0, 0, 0, missing))
        found.append(entries[:, first - first_block * block_size : last - first_block * block_size])
    return found[0], found[1]


def _gather_staged(
    view: KVView, blocks: torch.Tensor, first: int, last: int, first_place: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_gather`, in full, of the blocks from that of entry `first_place` on; zeros for those before."""
    assert view.staging is not None, "asked only of staged blocks"
    block_size = view.keys.shape[2]
    own_block = first_place // block_size
    ids = blocks[own_block : -(-last // block_size)].long()
    _check_range("block_table", ids, view.keys.shape[0])
    staged = _staged(view.staging, ids)
    own = own_block * block_size
    found = []
    for part in (view.staging.keys, view.staging.values):
        entries = part[staged].transpose(0, 1).flatten(1, 2)[:, : last - own].float()
        found.append(entries[:, first - own :] if first > own else F.pad(entries, (0, 0, own - first, 0)))
    return found[0], found[1]


def _put_first(firsts: FirstTokens, block: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """The first token of a sequence that begins with `block` as it is in full, over what its codes mean."""
    row = int(firsts.row_of[block])
    if row >= firsts.keys.shape[0]:
        raise KernelError(f"the first token of a request is {row}, outside 0..{firsts.keys.shape[0] - 1}")
    if row >= 0:
        keys[:, 0], values[:, 0] = firsts.keys[row, :, 0].float(), firsts.values[row, :, 0].float()


def _staged(staging: Staging, blocks: torch.Tensor) -> torch.Tensor:
    staged = staging.slot_of[blocks].long()
    _check_range("the staged copy of a block", staged, staging.keys.shape[0])
    return staged


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


def _check_places(places: list[int], starts: list[int], lens: list[int]) -> None:
    for request, context_len in enumerate(lens):
        of_request = [-1, *places[starts[request] : starts[request + 1]], context_len]
        if any(a >= b for a, b in pairwise(of_request)):
            raise KernelError(f"the places of request {request} must rise below its context_len {context_len}")


def _check_shared(
    shared_prefixes: Sequence[SharedPrefix],
    starts: list[int],
    lens: list[int],
    places: list[int],
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
            first_row, end = starts[request], starts[request + 1]
            if (places[first_row] if first_row < end else lens[request]) < num_blocks * block_size:
                raise KernelError(f"a shared prefix reaches into the new rows of request {request}")
            if not torch.equal(block_table[request, :num_blocks], block_table[first, :num_blocks]):
                raise KernelError(f"the table of request {request} starts with other blocks than request {first}'s")
