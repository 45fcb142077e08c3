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

import numpy as np
import numpy.typing as npt

from pagoda.kv.tiers.records import ByteArray

Granules = npt.NDArray[np.int64]
PageLock = Callable[[ByteArray], Callable[[], None]]
"""Locks memory for device copies, and returns what unlocks it."""


class Arena:
    """`num_granules` granules of `granule_bytes` each, page-aligned.

    `store` and `load` copy without the interpreter lock; granules of one record belong to one caller at a time.
    """

    def __init__(self, num_granules: int, granule_bytes: int, page_lock: PageLock | None = None) -> None:
        self.granule_bytes = granule_bytes
        mapping = mmap.mmap(-1, num_granules * granule_bytes)  # page-aligned; unmapped with its last view
        self._rows = np.frombuffer(mapping, dtype=np.uint8).reshape(num_granules, granule_bytes)
        self._rows[:, :: mmap.PAGESIZE] = 0
        self._unlock = page_lock(self._rows) if page_lock is not None else None
        self._free = np.arange(num_granules - 1, -1, -1, dtype=np.int64)
        self._num_free = num_granules

    def granules_for(self, num_bytes: int) -> int:
        """How many granules `num_bytes` take; an empty payload takes one."""
        return max(1, -(-num_bytes // self.granule_bytes))

    def take(self, count: int) -> Granules:
        """Take `count` free granules, which the caller knows to exist."""
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count][::-1].copy()

    def give(self, granules: Granules) -> None:
        """Give granules back, to be taken again first and in the same order."""
        self._free[self._num_free : self._num_free + granules.size] = granules[::-1]
        self._num_free += granules.size

    def store(self, granules: Granules, data: ByteArray) -> None:
        """Copy `data` into `granules`."""
        piece = self._piece(granules, data.size)
        if piece is not None:
            np.copyto(piece, data)
            return
        whole = data.size // self.granule_bytes
        split = whole * self.granule_bytes
        self._rows[granules[:whole]] = data[:split].reshape(whole, -1)
        if split < data.size:
            self._rows[granules[whole], : data.size - split] = data[split:]

    def load(self, granules: Granules, out: ByteArray) -> None:
        """Copy the front of `granules` into all of `out`."""
        piece = self._piece(granules, out.size)
        if piece is not None:
            np.copyto(out, piece)
            return
        whole = out.size // self.granule_bytes
        split = whole * self.granule_bytes
        np.take(self._rows, granules[:whole], axis=0, out=out[:split].reshape(whole, self.granule_bytes), mode="clip")
        if split < out.size:
            np.copyto(out[split:], self._rows[granules[whole], : out.size - split])

    def close(self) -> None:
        """Unlock and drop the memory; nobody may be copying."""
        if self._unlock is not None:
            self._unlock()
        del self._rows

    def _piece(self, granules: Granules, num_bytes: int) -> ByteArray | None:
        """The first `num_bytes` of `granules` as one array, if they lie in one piece."""
        if granules[-1] - granules[0] != granules.size - 1 or (granules.size > 2 and np.any(np.diff(granules) != 1)):
            return None
        start = int(granules[0]) * self.granule_bytes
        return self._rows.reshape(-1)[start : start + num_bytes]
