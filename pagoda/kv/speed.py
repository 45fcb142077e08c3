"""Speed: what a call to a tier takes, learned from the calls that were made."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

_SMOOTHING = 0.3
_FORGET_S = 30.0
_SAME_SIZE = 0.1


class Speed:
    """A line through (bytes, seconds) of recent calls, newer ones counting more: its start is the latency.

    While all calls had about the same size the line is not known; then a smaller call is believed to take as long as
    those, a larger one proportionally longer. Old news counts for nothing: after half a minute without a sample the
    tier is believed to be fast, and tried again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._sums = np.zeros(5)  # decaying sums of 1, x, y, x * x, x * y
        self._seen_at = float("-inf")

    def note(self, num_bytes: int, seconds: float) -> None:
        """Learn from a call."""
        with self._lock:
            self._add(num_bytes, seconds)
            self._seen_at = self._clock()

    def note_latency(self, seconds: float) -> None:
        """Learn from a call that moved nothing, if others that did are known: alone it says nothing of bandwidth."""
        with self._lock:
            if not self._is_stale:
                self._add(0, seconds)

    def _add(self, num_bytes: int, seconds: float) -> None:
        sample = np.array([1.0, num_bytes, seconds, num_bytes**2, num_bytes * seconds])
        keep = 0.0 if self._is_stale else 1.0 - _SMOOTHING
        self._sums = keep * self._sums + sample

    def note_at_least(self, num_bytes: int, seconds: float) -> None:
        """Learn from a call that has not ended after `seconds`, if that is news."""
        if seconds > self.predict_s(num_bytes, 1):
            self.note(num_bytes, seconds)

    def predict_s(self, num_bytes: int, num_calls: int) -> float:
        """Seconds that moving so many bytes in so many calls would take, one after the other."""
        with self._lock:
            if self._is_stale:
                return 0.0
            weight, *sums = self._sums.tolist()
        x, y, xx, xy = (total / weight for total in sums)
        if not x:
            return num_calls * y
        variance = xx - x * x
        if variance < (_SAME_SIZE * x) ** 2:
            return y * max(num_calls, num_bytes / x)
        per_byte = min(max(0.0, (xy - x * y) / variance), y / x)
        return num_calls * (y - per_byte * x) + num_bytes * per_byte

    @property
    def _is_stale(self) -> bool:
        return self._clock() - self._seen_at > _FORGET_S
