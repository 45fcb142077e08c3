"""PrefillSpeed: what computing a prompt's tokens costs at which depth, learned from the steps that were run.

Attention makes a token dearer the more tokens are before it: at 1,500 tokens twice as dear on a small model. Restores
from tiers are weighed against this, so a flat rate would load too much of a short prompt and too little of a long one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_KEEP = 0.9
_MIN_TOKENS = 64
_SAME_DEPTH = 64.0  # tokens: less spread than this says nothing of the slope


class PrefillSpeed:
    """A line of seconds per token over depth, fitted to recent steps, newer ones counting more. Not thread-safe.

    Args:
        guess_s: what a token costs, for as long as nothing was computed.
    """

    def __init__(self, guess_s: float = 0.5e-3) -> None:
        self._guess_s = guess_s
        self._sums = np.zeros(5)  # decaying sums of 1, x, y, x * x, x * y

    def note(self, runs: Sequence[tuple[int, int]], seconds: float) -> None:
        """Learn from a step that computed these runs of positions, `(start, stop)` each; a few tokens say nothing."""
        num_tokens = sum(stop - start for start, stop in runs)
        if num_tokens < _MIN_TOKENS:
            return
        depth = sum((stop - start) * (start + stop) / 2 for start, stop in runs) / num_tokens
        cost = seconds / num_tokens
        self._sums = _KEEP * self._sums + np.array([1.0, depth, cost, depth * depth, depth * cost])

    def seconds_per_token(self, start: int, stop: int) -> float:
        """The mean cost of the tokens from `start` to `stop`."""
        weight, *sums = self._sums.tolist()
        if not weight:
            return self._guess_s
        x, y, xx, xy = (total / weight for total in sums)
        variance = xx - x * x
        slope = max(0.0, (xy - x * y) / variance) if variance > _SAME_DEPTH**2 else 0.0
        slope = min(slope, y / x) if x else slope  # the first token of a prompt is not free
        return max(y + slope * ((start + stop) / 2 - x), 0.0)
