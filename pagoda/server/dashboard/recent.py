"""Recent: what the last requests took and missed. An observer, as Metrics is, that remembers single requests."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from typing import Any

from pagoda.engine.outputs import MissReason, RequestStats, StepStats

MAX_REQUESTS = 512


def is_warm(stats: RequestStats) -> bool:
    """Whether a request found at least half of its prompt in the cache."""
    return 2 * stats.usage.num_hit_tokens >= stats.usage.num_prompt_tokens


class Recent:
    """Times to first token of the last requests, and counts of all since `started`, Unix time."""

    def __init__(self) -> None:
        self.started = time.time()
        self._lock = threading.Lock()  # the engine's thread writes, the event loop reads
        self._ttft: dict[bool, deque[float]] = {warm: deque(maxlen=MAX_REQUESTS) for warm in (False, True)}
        self._missed_requests: Counter[MissReason] = Counter()
        self._missed_tokens: Counter[MissReason] = Counter()
        self._counts = Counter(finished=0, query_tokens=0, hit_tokens=0, restored_tokens=0, preemptions=0)

    def on_step(self, stats: StepStats) -> None:
        """Count preemptions."""
        if stats.num_preempted:
            with self._lock:
                self._counts["preemptions"] += stats.num_preempted

    def on_admitted(self, num_query_tokens: int, num_hit_tokens: int) -> None:
        """Count a prompt, as tenants' are counted; why it missed comes with the end."""
        with self._lock:
            self._counts["query_tokens"] += num_query_tokens
            self._counts["hit_tokens"] += num_hit_tokens

    def on_finished(self, stats: RequestStats) -> None:
        """Remember a request."""
        usage = stats.usage
        with self._lock:
            self._counts["finished"] += 1
            if stats.miss_reason is None:
                return
            self._counts["restored_tokens"] += stats.num_restored_tokens
            if stats.miss_reason is not MissReason.NONE:
                self._missed_requests[stats.miss_reason] += 1
                self._missed_tokens[stats.miss_reason] += usage.num_prompt_tokens - usage.num_hit_tokens
            if stats.ttft_s is not None:
                self._ttft[is_warm(stats)].append(stats.ttft_s)

    def report(self) -> dict[str, Any]:
        """All of it, for JSON."""
        with self._lock:
            return {
                "requests": dict(self._counts),
                "ttft": {"cold": _quantiles(self._ttft[False]), "warm": _quantiles(self._ttft[True])},
                "misses": [
                    {"reason": str(reason), "requests": count, "tokens": self._missed_tokens[reason]}
                    for reason, count in self._missed_requests.most_common()
                ],
            }


def _quantiles(seconds: deque[float]) -> dict[str, float | int | None]:
    ordered = sorted(seconds)
    if not ordered:
        return {"count": 0, "p50_s": None, "p95_s": None}
    last = len(ordered) - 1
    return {"count": len(ordered), "p50_s": ordered[last // 2], "p95_s": ordered[round(0.95 * last)]}
