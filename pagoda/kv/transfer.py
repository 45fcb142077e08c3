"""Lanes: each tier with threads of its own, a memory of its speed, and a circuit breaker.

    engine thread ──submit──> lane disk   [thread, thread] ──> tier.put / lookup / get_into
                  └─submit──> lane redis  [thread, thread]

A tier that hangs blocks its own lane only. A lane that fails or hangs is taken out for a while, longer each time, then
tried again; meanwhile everything it has is a miss.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

from pagoda.errors import TierError, TierUnavailable
from pagoda.kv.tiers.base import Tier

T = TypeVar("T")

_SMOOTHING = 0.3
_FORGET_S = 30.0
_FIRST_BACKOFF_S = 1.0
_LAST_BACKOFF_S = 60.0


class Speed:
    """A tier's latency and bandwidth, as exponentially weighted averages of what was seen.

    Old news counts for nothing: after half a minute without a sample a tier is believed to be fast, and tried again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds_per_byte = 0.0
        self._latency = 0.0
        self._seen_at = float("-inf")

    def note(self, num_bytes: int, seconds: float) -> None:
        """Learn from a call; one that moved no bytes tells the latency."""
        weight = 1.0 if self._is_stale else _SMOOTHING
        if num_bytes:
            per_byte = max(0.0, seconds - self._latency) / num_bytes
            self._seconds_per_byte += weight * (per_byte - self._seconds_per_byte)
        else:
            self._latency += weight * (seconds - self._latency)
        self._seen_at = self._clock()

    def predict_s(self, num_bytes: int, num_calls: int) -> float:
        """Seconds that moving so many bytes in so many calls would take."""
        return 0.0 if self._is_stale else num_calls * self._latency + num_bytes * self._seconds_per_byte

    @property
    def _is_stale(self) -> bool:
        return self._clock() - self._seen_at > _FORGET_S


class Breaker:
    """Open after a failure, for one second, then two, up to a minute; closed by the first success."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._backoff_s = _FIRST_BACKOFF_S
        self._open_until = float("-inf")
        self.num_failures = 0

    @property
    def is_open(self) -> bool:
        """Whether calls are refused now."""
        return self._clock() < self._open_until

    def failed(self) -> None:
        """Refuse calls for a while."""
        self.num_failures += 1
        self._open_until = self._clock() + self._backoff_s
        self._backoff_s = min(_LAST_BACKOFF_S, 2 * self._backoff_s)

    def succeeded(self) -> None:
        """Trust the tier again."""
        self._backoff_s = _FIRST_BACKOFF_S


class Lane:
    """One tier and the threads that talk to it.

    Args:
        tier: where records are.
        num_threads: calls under way at once.
        timeout_s: a call that takes longer counts as a failure; its thread stays occupied until the tier returns.
    """

    def __init__(self, tier: Tier, *, num_threads: int = 2, timeout_s: float = 10.0) -> None:
        self.tier = tier
        self.timeout_s = timeout_s
        self.speed = Speed()
        self.breaker = Breaker()
        self._idle = threading.Semaphore(num_threads)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"pagoda-{tier.name}")

    @property
    def name(self) -> str:
        """The tier's name."""
        return self.tier.name

    def call(self, work: Callable[[Tier], T], num_bytes: Callable[[T], int] = lambda result: 0) -> T:
        """Run `work` on one of the lane's threads and wait for it.

        Raises:
            TierUnavailable: the breaker is open, every thread hangs, the tier failed, or the time ran out.
        """
        if self.breaker.is_open:
            raise TierUnavailable(f"the {self.name} tier is taken out after {self.breaker.num_failures} failures")
        started = time.monotonic()
        if not self._idle.acquire(timeout=self.timeout_s):
            self.breaker.failed()
            raise TierUnavailable(f"all threads of the {self.name} tier are busy")
        future: Future[T] = self._threads.submit(work, self.tier)
        future.add_done_callback(lambda _: self._idle.release())
        try:
            result = future.result(timeout=self.timeout_s)
        except FutureTimeout:
            self.breaker.failed()
            raise TierUnavailable(f"the {self.name} tier did not answer in {self.timeout_s:g} s") from None
        except (TierError, OSError) as error:
            self.breaker.failed()
            raise TierUnavailable(f"the {self.name} tier failed: {error}") from error
        self.breaker.succeeded()
        self.speed.note(num_bytes(result), time.monotonic() - started)
        return result

    def close(self) -> None:
        """Close the tier, unless a hung call keeps it; no thread is waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if not self.breaker.is_open:
            self.tier.close()
