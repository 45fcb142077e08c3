"""TierReport: what a lane tells of its tier."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.kv.breaker import BreakerState
from pagoda.kv.tiers.records import Usage

_CONDITIONS = {BreakerState.CLOSED: "ok", BreakerState.HALF_OPEN: "trying", BreakerState.OPEN: "out"}


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier at one moment. Counts are records since the start, unless their names say otherwise.

    `failures` counts calls and records that went wrong, by reason: unavailable, timeout, failed, `corrupt_<why>`,
    `rejected_<why>`, audit. `is_quarantined`: out till the process ends. `num_expired` were asked for after their time.
    `load_seconds` is a histogram: upper ends of buckets, and loads in each. `usage` is None until the tier told.
    """

    name: str
    state: BreakerState
    is_quarantined: bool
    usage: Usage | None
    num_stored: int
    num_demoted: int
    num_skipped: int
    num_lost: int
    num_loaded: int
    num_slower: int
    num_late: int
    num_expired: int
    num_unused: int
    num_restored_tokens: int
    num_prefetched_tokens: int
    failures: dict[str, int]
    load_seconds: tuple[tuple[float, int], ...]
    load_seconds_sum: float

    @property
    def condition(self) -> str:
        """How it is, in words that need no knowledge of breakers: ok, trying, out or quarantined."""
        return "quarantined" if self.is_quarantined else _CONDITIONS[self.state]
