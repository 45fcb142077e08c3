"""How long blocks live, lie idle and wait to be hit again: the figures from which a pool or a tier is sized.

    commit ───── hit ───── hit ───────── evict
      │           ├─ gap ───┤              │
      │           │         └──── idle ────┤
      └───────────┴──── lifetime ──────────┘

One block id in 16 is followed, the same ones for ever, so that a commit, a hit or an eviction costs microseconds
however many blocks it has. vLLM samples its KV cache residency metrics the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagoda.kv.allocator import BlockIds

SAMPLED = 16
BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0, float("inf"))
_ENDS = np.array(BUCKETS_S[:-1])


@dataclass(frozen=True, slots=True)
class AgeHistogram:
    """Seconds of sampled blocks: upper ends of buckets with the count in each, and the sum."""

    name: str
    buckets: tuple[tuple[float, int], ...]
    sum_s: float


class _Seconds:
    def __init__(self) -> None:
        self.counts = np.zeros(len(BUCKETS_S), dtype=np.int64)
        self.sum_s = 0.0

    def add(self, seconds: npt.NDArray[np.float64]) -> None:
        self.counts += np.bincount(np.searchsorted(_ENDS, seconds), minlength=len(BUCKETS_S))
        self.sum_s += float(seconds.sum())


class BlockAges:
    """The times of sampled blocks of the tree. The engine's thread alone writes it; any may read `histograms`.

    Args:
        num_blocks: block ids are below this.
        clock: seconds that never go back.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._born: npt.NDArray[np.float64] = np.zeros(num_blocks)
        self._used: npt.NDArray[np.float64] = np.zeros(num_blocks)
        self._seconds = {name: _Seconds() for name in ("lifetime", "idle_before_evict", "reuse_gap")}

    def on_commit(self, ids: BlockIds) -> None:
        """Blocks entered the tree."""
        sampled = ids[ids % SAMPLED == 0]
        if sampled.size:
            self._born[sampled] = self._used[sampled] = self._clock()

    def on_hit(self, ids: BlockIds) -> None:
        """A request hit blocks of the tree."""
        sampled = ids[ids % SAMPLED == 0]
        if sampled.size:
            now = self._clock()
            self._seconds["reuse_gap"].add(now - self._used[sampled])
            self._used[sampled] = now

    def on_evict(self, ids: BlockIds) -> None:
        """Blocks left the tree to make room."""
        sampled = ids[ids % SAMPLED == 0]
        if sampled.size:
            now = self._clock()
            self._seconds["lifetime"].add(now - self._born[sampled])
            self._seconds["idle_before_evict"].add(now - self._used[sampled])

    def histograms(self) -> tuple[AgeHistogram, ...]:
        """All of them now."""
        return tuple(
            AgeHistogram(name, tuple(zip(BUCKETS_S, each.counts.tolist(), strict=True)), each.sum_s)
            for name, each in self._seconds.items()
        )
