"""EngineStats: what an engine has and does, at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.engine.core import EngineCore
from pagoda.engine.pressure.report import PressureReport


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. `num_free_blocks + num_held_blocks + num_cached_blocks == num_blocks`.

    `num_leased_blocks` are under a lease, whether a request holds them too or not; `lease_limit_blocks` bounds them.
    `host_bytes` are held in host memory for what may be recalled, and `fetched_bytes` came from there so far.
    """

    num_blocks: int
    num_free_blocks: int
    num_held_blocks: int
    num_cached_blocks: int
    num_leased_blocks: int
    lease_limit_blocks: int
    num_leases: int
    num_leases_refused: int
    block_size: int
    num_running: int
    num_waiting: int
    pressure: PressureReport
    host_bytes: int = 0
    fetched_bytes: int = 0


def engine_stats(core: EngineCore) -> EngineStats:
    """A snapshot of now. For the engine's thread."""
    cache, sparsity = core.cache, core.sparsity
    recall = None if sparsity is None else sparsity.memory.recall
    return EngineStats(
        num_blocks=cache.num_blocks,
        num_free_blocks=cache.num_free_blocks,
        num_held_blocks=cache.num_held_blocks,
        num_cached_blocks=cache.num_cached_blocks,
        num_leased_blocks=cache.retention.num_blocks,
        lease_limit_blocks=cache.retention.limit_blocks,
        num_leases=len(cache.retention.leases),
        num_leases_refused=cache.retention.num_refused,
        block_size=cache.block_size,
        num_running=core.num_running,
        num_waiting=core.num_waiting,
        host_bytes=0 if recall is None else recall.host.num_held_bytes,
        fetched_bytes=0 if recall is None else recall.host.num_fetched_bytes,
        pressure=core.pressure.report,
    )
