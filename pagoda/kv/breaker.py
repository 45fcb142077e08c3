"""Breaker: takes a tier out after a failure, and lets one call find out whether it is well again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import StrEnum

_FIRST_BACKOFF_S = 1.0
_LAST_BACKOFF_S = 60.0


class BreakerState(StrEnum):
    """Closed: calls pass. Open: none does. Half-open: one may, and decides."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Opens at a failure, for one second, then two, up to a minute; after that one call tries, and a success closes it.

    Failures while it is open, of calls that began earlier, are the same outage: they do not make it longer.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._backoff_s = _FIRST_BACKOFF_S
        self._open_until: float | None = None  # None: closed
        self._is_trying = False

    @property
    def state(self) -> BreakerState:
        """The state now."""
        until = self._open_until
        if until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < until else BreakerState.HALF_OPEN

    @property
    def is_ready(self) -> bool:
        """Whether `admit` would let a call start now; while one is trying, none."""
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._is_trying)

    def admit(self) -> bool:
        """Whether a call may start. Each that may must end in `succeeded`, `failed` or `abandoned`."""
        with self._lock:
            match self.state:
                case BreakerState.CLOSED:
                    return True
                case BreakerState.HALF_OPEN if not self._is_trying:
                    self._is_trying = True
                    return True
            return False

    def failed(self) -> None:
        """Refuse calls for a while."""
        with self._lock:
            self._is_trying = False
            if self.state is not BreakerState.OPEN:
                self._open_until = self._clock() + self._backoff_s
                self._backoff_s = min(_LAST_BACKOFF_S, 2 * self._backoff_s)

    def succeeded(self) -> None:
        """Trust the tier again."""
        with self._lock:
            self._is_trying = False
            self._open_until = None
            self._backoff_s = _FIRST_BACKOFF_S

    def abandoned(self) -> None:
        """Nothing was learned: nobody waited for the end of the call."""
        with self._lock:
            self._is_trying = False
