"""FrequencySketch: about how often each of many keys was used lately, in 256 KiB however many there are.

A count-min sketch whose counters are halved now and then, as in TinyLFU (Einziger, Friedman and Manes, 2017). It never
counts too little but for the halving; where keys collide it counts too much.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_ROWS = 4
_WIDTH = 1 << 16
_MOST = 255


class FrequencySketch:
    """Counts uses of keys: byte strings that are hashes themselves, of at least 16 bytes. Not thread-safe.

    Args:
        halve_after: uses after which all counts are halved, so that old ones fade.
    """

    def __init__(self, halve_after: int = 8 * _WIDTH) -> None:
        self._counts = np.zeros((_ROWS, _WIDTH), dtype=np.uint8)
        self._halve_after = halve_after
        self._num_added = 0

    def add(self, keys: Sequence[bytes]) -> npt.NDArray[np.uint8]:
        """Count one use of each, and return their counts."""
        places = self._places(keys)
        for row, at in zip(self._counts, places, strict=True):
            at = np.unique(at)
            row[at] += row[at] < _MOST
        counts = self._least(places)
        self._num_added += len(keys)
        if self._num_added >= self._halve_after:
            self._counts >>= 1
            self._num_added = 0
        return counts

    def count(self, keys: Sequence[bytes]) -> npt.NDArray[np.uint8]:
        """About how often each was used. Mutates nothing."""
        return self._least(self._places(keys))

    def _least(self, places: npt.NDArray[np.intp]) -> npt.NDArray[np.uint8]:
        counts: npt.NDArray[np.uint8] = self._counts[np.arange(_ROWS)[:, None], places].min(axis=0, initial=_MOST)
        return counts

    def _places(self, keys: Sequence[bytes]) -> npt.NDArray[np.intp]:
        """`[rows, keys]`: four 16-bit pieces of each key."""
        words = np.frombuffer(b"".join(key[: 2 * _ROWS] for key in keys), dtype=np.uint16)
        return words.reshape(len(keys), _ROWS).T.astype(np.intp)
