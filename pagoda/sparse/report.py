"""SparseReport: what a policy did to a request."""

from __future__ import annotations

from dataclasses import dataclass


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
