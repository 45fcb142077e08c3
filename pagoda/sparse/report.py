"""SparseReport: what a policy did to a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class SparseReport:
    """What sparsity did to a request so far.

    Attributes:
        policy: its name.
        num_compactions: how often entries were dropped, or moved to another memory.
        num_kept_tokens: entries in the device pool now, of the layer that has most.
        num_dropped_tokens: tokens that this layer has none of.
        num_blocks: blocks of the pool that the request held after the last compaction.
        num_returned_blocks: blocks that all compactions together gave back to the pool.
        returned_bytes: the bytes of those.
        host_bytes: bytes of host memory that hold what may be recalled.
        sketch_bytes: bytes on the device, outside the pool, that tell what of it matters.
        fetched_bytes: bytes that came from host memory.
        under_pressure: whether the server's want of room had the request compressed, as it was allowed to.
    """

    policy: str
    num_compactions: int
    num_kept_tokens: int
    num_dropped_tokens: int
    num_blocks: int
    num_returned_blocks: int
    returned_bytes: int
    host_bytes: int = 0
    sketch_bytes: int = 0
    fetched_bytes: int = 0
    under_pressure: bool = False


def total(reports: Sequence[SparseReport]) -> SparseReport | None:
    """What one policy did to all samples of a request: the sum of all but the tokens, of which the most counts."""
    if len(reports) < 2:
        return reports[0] if reports else None
    fields = [asdict(each) for each in reports]
    policy = fields[0].pop("policy")
    most = ("num_kept_tokens", "num_dropped_tokens", "under_pressure")
    merged = {name: (max if name in most else sum)(each[name] for each in fields) for name in fields[0]}
    return SparseReport(policy, **merged)
