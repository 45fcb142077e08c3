"""Arena: one allocation of host memory, touched once, cut into granules.

    memory   | g0 | g1 | g2 | g3 | g4 | g5 | ...          a record takes any granules, listed in its order
    free     stack of granule numbers, last freed first

Fresh pages cost ten times a copy into used ones, so the arena is made once and its granules go round. Any granules do
for a record, hence no size classes and no fragmentation: what is free is usable. Records of like size come to lie in
one piece, since the stack hands back whole what was freed whole, and one piece is copied at the speed of memcpy.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagoda.kv.tiers.records import ByteArray
from pagoda.memory import host_memory

Granules = npt.NDArray[np.int64]
PageLock = Callable[[ByteArray], Callable[[], None]]
"""Locks memory for device copies, and returns what unlocks it."""


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """Granules that belong together; `piece` is their memory if they lie in one piece, in order."""

    granules: Granules
    piece: ByteArray | None


class Arena:
    """`num_granules` granules of `granule_bytes` each, page-aligned.

    `store` and `load` copy without the interpreter lock; granules of one record belong to one caller at a time.
    """

    def __init__(self, num_granules: int, granule_bytes: int, page_lock: PageLock | None = None) -> None:
        self.granule_bytes = granule_bytes
        self._rows = host_memory(num_granules * granule_bytes).reshape(num_granules, granule_bytes)
        self._rows[:, :: mmap.PAGESIZE] = 0
        self._unlock = page_lock(self._rows) if page_lock is not None else None
        self._free = np.arange(num_granules - 1, -1, -1, dtype=np.int64)
        self._num_free = num_granules

    def granules_for(self, num_bytes: int) -> int:
        """How many granules `num_bytes` take; an empty payload takes one."""
        return max(1, -(-num_bytes // self.granule_bytes))

    def take(self, count: int) -> Extent:
        """Take `count` free granules, which the caller knows to exist."""
        self._num_free -= count
        return self.extent(self._free[self._num_free : self._num_free + count][::-1].copy())

    def give(self, extent: Extent) -> None:
        """Give granules back, to be taken again first and in the same order."""
        granules = extent.granules
        self._free[self._num_free : self._num_free + granules.size] = granules[::-1]
        self._num_free += granules.size

    def extent(self, granules: Granules) -> Extent:
        """Describe `granules`."""
        if (np.diff(granules) != 1).any():
            return Extent(granules, None)
        start = int(granules[0])
        return Extent(granules, self._rows[start : start + granules.size].reshape(-1))

    def store(self, extent: Extent, data: ByteArray) -> None:
        """Copy `data` into the front of `extent`."""
        if extent.piece is not None:
            np.copyto(extent.piece[: data.size], data)
            return
        granules, whole = extent.granules, data.size // self.granule_bytes
        split = whole * self.granule_bytes
        self._rows[granules[:whole]] = data[:split].reshape(whole, self.granule_bytes)
        if split < data.size:
            self._rows[granules[whole], : data.size - split] = data[split:]

    def load(self, extent: Extent, out: ByteArray) -> None:
        """Copy the front of `extent` into all of `out`."""
        if extent.piece is not None:
            np.copyto(out, extent.piece[: out.size])
            return
        granules, whole = extent.granules, out.size // self.granule_bytes
        split = whole * self.granule_bytes
        np.take(self._rows, granules[:whole], axis=0, out=out[:split].reshape(whole, self.granule_bytes), mode="clip")
        if split < out.size:
            np.copyto(out[split:], self._rows[granules[whole], : out.size - split])

    def close(self) -> None:
        """Unlock and drop the memory; nobody may be copying."""
        if self._unlock is not None:
            self._unlock()
        del self._rows
