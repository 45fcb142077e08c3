"""Recall in plain torch: which units of tokens come into a request's places, and over which of those there.

resident[head]   | unit 7 | unit 0 | unit 31 | ...     which unit is in each place
table            place p has entries p * unit .. p * unit + unit - 1 of the request
entries          [heads, slots, key | value, head_dim]; token t of the request is in slot slots[t]
"""

from __future__ import annotations

import torch

from pagoda.errors import KernelError
from pagoda.kernels.types import KVView


def margins(queries: torch.Tensor, sketches: torch.Tensor) -> torch.Tensor:
    """How far each unit's score is below the best one of the query that wants it most; 0 is the best.

    Args:
        queries: sketches of one row's queries, float32 `[num_kv_heads, group, width]`.
        sketches: of units, `[num_kv_heads, width, units]`.

    Returns:
        float32 `[num_kv_heads, units]`.
    """
    scores = queries @ sketches.float()
    return (scores - scores.amax(-1, keepdim=True)).amax(1)


def swaps(
    margin: torch.Tensor, resident: torch.Tensor, alpha: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which units come, and over which resident ones: for each KV head, the best absent ones over the worst there.

    Args:
        margin: `[num_kv_heads, units]`.
        resident: the unit in each place, int64 `[num_kv_heads, places]`.
        alpha: what is further below the best than this stays where it is.

    Returns:
        KV heads, places and units, int64, one of each for every unit that comes.
    """
    absent = margin.scatter(1, resident, -torch.inf)
    most = min(int((absent >= -alpha).sum(1).max()), resident.shape[1], margin.shape[1] - resident.shape[1])
    best, units = absent.topk(most, dim=1)
    worst, places = margin.gather(1, resident).topk(most, dim=1, largest=False)
    heads, rank = ((best >= -alpha) & (best > worst)).nonzero(as_tuple=True)
    return heads, places[heads, rank], units[heads, rank]


def recall_entries(
    queries: torch.Tensor,
    sketches: torch.Tensor,
    resident: torch.Tensor,
    entries: torch.Tensor,
    slots: torch.Tensor,
    view: KVView,
    table: torch.Tensor,
    *,
    unit: int,
    alpha: float,
) -> int:
    """See `dispatch.recall_entries`."""
    block_size = view.keys.shape[2]
    used = table[: -(-resident.shape[1] * unit // block_size)].long()
    _check_ids("resident", resident, sketches.shape[2])
    _check_ids("slots", slots, entries.shape[1])
    _check_ids("table", used, view.keys.shape[0])
    if used.numel() * block_size < resident.shape[1] * unit:
        raise KernelError("the table has fewer blocks than the places need")
    heads, places, units = swaps(margins(queries, sketches), resident, alpha)
    offsets = torch.arange(unit, device=units.device)
    tokens = (units[:, None] * unit + offsets).flatten()
    at = (places[:, None] * unit + offsets).flatten()
    of_head = heads.repeat_interleave(unit)
    rows = entries[of_head.to(entries.device), slots[tokens.to(slots.device)]]
    blocks, within = used[at // block_size], at % block_size
    view.keys[blocks, of_head, within] = rows[:, 0].to(view.keys)
    view.values[blocks, of_head, within] = rows[:, 1].to(view.values)
    resident[heads, places] = units
    return int(units.numel())


def _check_ids(name: str, ids: torch.Tensor, bound: int) -> None:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < bound:
        raise KernelError(f"{name} must be in [0, {bound})")
