"""Recall: which units of tokens come into a request's places, and over which of those there; its reference in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagoda.errors import KernelError
from pagoda.kernels.checks import check_float, check_index, check_rows, check_view, show
from pagoda.kernels.types import KVView


@dataclass(frozen=True, slots=True)
class Recall:
    """What of one request's KV in host memory may come into its places in one layer of the pool; owns nothing.

        resident[head]   | unit 7 | unit 0 | unit 31 | ...     which unit (run of `unit` tokens) is in each place
        table            place p has entries p * unit .. p * unit + unit - 1 of the request

    A unit's score is its sketch times a query times `columns`, or, where there are none, times the query's positive
    part and its negative part, one after the other: the width is then twice a head's.

    Attributes:
        sketches: `[num_kv_heads, width, units]`.
        columns: float32 `[num_kv_heads, head_dim, width]`, or None.
        scale: multiplies scores.
        resident: int64 `[num_kv_heads, places]`, all different. Recalling changes it.
        fetched: int64 `[num_kv_heads]`: recalling adds the units that came.
        entries: `[num_kv_heads, num_slots, 2, head_dim]`, keys and values in host memory.
        slots: int64 `[units * unit]`, where in `entries` each token is.
        view: the layer, not quantized. Recalling changes the blocks of the places.
        table: int32, the request's block ids.
        unit: tokens that come together.
        alpha: how far below the best score of a query a unit still comes; infinity: any distance.
        stay: how much better than what it replaces a unit must score.

    Raises:
        KernelError: wrong shapes, dtypes or strides.
    """

    sketches: torch.Tensor
    columns: torch.Tensor | None
    scale: float
    resident: torch.Tensor
    fetched: torch.Tensor
    entries: torch.Tensor
    slots: torch.Tensor
    view: KVView
    table: torch.Tensor
    unit: int
    alpha: float
    stay: float

    def __post_init__(self) -> None:
        sketches, columns, resident, entries = self.sketches, self.columns, self.resident, self.entries
        check_view(self.view)
        num_kv_heads, head_dim = self.view.keys.shape[1], self.view.head_dim
        check_float("sketches", sketches)
        if sketches.dim() != 3 or sketches.shape[0] != num_kv_heads:
            raise KernelError(f"sketches must be [{num_kv_heads}, width, units]; got {show(sketches)}")
        check_rows("sketches", sketches)
        _, width, num_units = sketches.shape
        if columns is None and width != 2 * head_dim:
            raise KernelError(f"sketches of bounds must be {2 * head_dim} wide; got {show(sketches)}")
        asked = (num_kv_heads, head_dim, width)
        if columns is not None and (columns.shape != asked or not _is_plain(columns, torch.float32)):
            raise KernelError(f"columns must be a contiguous float32 {list(asked)}; got {show(columns)}")
        if resident.dim() != 2 or resident.shape[0] != num_kv_heads or not _is_plain(resident, torch.int64):
            raise KernelError(f"resident must be a contiguous int64 [{num_kv_heads}, places]; got {show(resident)}")
        if not 0 < resident.shape[1] <= num_units or self.unit < 1 or self.view.is_quantized:
            raise KernelError("recall needs a place, a unit for each place, tokens in units, and views in full")
        if entries.dim() != 4 or (entries.shape[0], *entries.shape[2:]) != (num_kv_heads, 2, head_dim):
            raise KernelError(f"entries must be [{num_kv_heads}, slots, 2, {head_dim}]; got {show(entries)}")
        if not entries[0, 0].is_contiguous():
            raise KernelError("the key and the value of an entry must lie side by side")
        check_index("fetched", self.fetched, torch.int64, num_kv_heads)
        check_index("slots", self.slots, torch.int64, num_units * self.unit)
        check_index("table", self.table, torch.int32, self.table.numel())

    def check_queries(self, queries: torch.Tensor) -> None:
        """`queries` `[n * num_kv_heads, head_dim]`."""
        check_float("queries", queries)
        num_kv_heads, head_dim = self.view.keys.shape[1], self.view.head_dim
        if queries.dim() != 2 or queries.shape[1] != head_dim or queries.shape[0] % num_kv_heads:
            raise KernelError(f"queries must be [n * {num_kv_heads}, {head_dim}]; got {show(queries)}")

    @property
    def only_copies(self) -> bool:
        """Whether entries are stored in the pool as they are in host memory."""
        return self.view.is_plain(self.entries.dtype)


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
    margin: torch.Tensor, resident: torch.Tensor, alpha: float, stay: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which units come, and over which resident ones: for each KV head, the best absent ones over the worst there.

    Args:
        margin: `[num_kv_heads, units]`.
        resident: the unit in each place, int64 `[num_kv_heads, places]`.
        alpha: what is further below the best than this stays where it is.
        stay: what is in a place stays there for what is not better by more than this.

    Returns:
        KV heads, places and units, int64, one of each for every unit that comes.
    """
    absent = margin.scatter(1, resident, -torch.inf)
    most = min(int((absent >= -alpha).sum(1).max()), resident.shape[1], margin.shape[1] - resident.shape[1])
    best, units = absent.topk(most, dim=1)
    worst, places = margin.gather(1, resident).topk(most, dim=1, largest=False)
    heads, rank = ((best >= -alpha) & (best - stay > worst)).nonzero(as_tuple=True)
    return heads, places[heads, rank], units[heads, rank]


def sketched(queries: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    """What sketches are multiplied by: `[num_kv_heads, group, width]` of queries `[num_kv_heads, group, head_dim]`."""
    if columns is None:
        return torch.cat([queries.clamp_min(0), queries.clamp_max(0)], dim=-1)
    return queries @ columns


def recall_entries(queries: torch.Tensor, recall: Recall) -> None:
    """See `dispatch.recall_entries`."""
    view, unit, resident = recall.view, recall.unit, recall.resident
    block_size = view.keys.shape[2]
    used = recall.table[: -(-resident.shape[1] * unit // block_size)].long()
    _check_ids("resident", resident, recall.sketches.shape[2])
    _check_ids("slots", recall.slots, recall.entries.shape[1])
    _check_ids("table", used, view.keys.shape[0])
    if used.numel() * block_size < resident.shape[1] * unit:
        raise KernelError("the table has fewer blocks than the places need")
    grouped = queries.float().view(resident.shape[0], -1, queries.shape[-1]) * recall.scale
    heads, places, units = swaps(
        margins(sketched(grouped, recall.columns), recall.sketches), resident, recall.alpha, recall.stay
    )
    offsets = torch.arange(unit, device=units.device)
    tokens = (units[:, None] * unit + offsets).flatten()
    at = (places[:, None] * unit + offsets).flatten()
    of_head = heads.repeat_interleave(unit)
    rows = recall.entries[of_head.to(recall.entries.device), recall.slots[tokens.to(recall.slots.device)]]
    blocks, within = used[at // block_size], at % block_size
    view.keys[blocks, of_head, within] = rows[:, 0].to(view.keys)
    view.values[blocks, of_head, within] = rows[:, 1].to(view.values)
    resident[heads, places] = units
    recall.fetched.add_(heads.bincount(minlength=len(resident)))


def _is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.is_contiguous()


def _check_ids(name: str, ids: torch.Tensor, bound: int) -> None:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < bound:
        raise KernelError(f"{name} must be in [0, {bound})")
