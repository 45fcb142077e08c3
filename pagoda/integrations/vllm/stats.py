"""Figures on their way from workers and scheduler to vLLM's /metrics and log, as plain data that vLLM can send.

key     "name\\tlabel value\\tlabel value"     the names and their labels are in METRICS
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pagoda.kv.breaker import BreakerState
from pagoda.kv.hierarchy import Hierarchy
from pagoda.kv.tier_report import TierReport

_TIER = ("tier", "rank")

# Counters and gauges by name, with their labels and what they tell. A tier's are named as `pagoda serve` names them.
COUNTERS = {
    "pagoda_tier_restored_tokens": (_TIER, "Tokens that requests got from a tier instead of computing them"),
    "pagoda_tier_loaded_records": (_TIER, "Records read from a tier"),
    "pagoda_tier_stored_records": (_TIER, "Records written to a tier"),
    "pagoda_tier_skipped_records": (_TIER, "Records not written because the tier's queue was full"),
    "pagoda_tier_lost_records": (_TIER, "Records given up after writing them failed three times"),
    "pagoda_tier_slower_blocks": (_TIER, "Blocks not loaded because computing them was predicted to be faster"),
    "pagoda_tier_failures": ((*_TIER, "reason"), "Calls and records that went wrong"),
    "pagoda_vllm_missed_tokens": (("reason",), "Prompt tokens in whole blocks that nobody had, by reason"),
}
GAUGES = {
    "pagoda_tier_bytes": (_TIER, "Bytes that a tier occupies, as it said lately"),
    "pagoda_tier_capacity_bytes": (_TIER, "Most bytes that a tier may occupy"),
    "pagoda_tier_records": (_TIER, "Records in a tier, as it said lately"),
    "pagoda_tier_open": (_TIER, "1 while a tier is taken out after a failure"),
}


@dataclass(slots=True)
class Figures:
    """`counts` are added to counters, `levels` replace gauges."""

    counts: dict[str, int] = field(default_factory=dict)
    levels: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, amount: int, *labels: str) -> None:
        """Count something."""
        key = "\t".join((name, *labels))
        if amount:
            self.counts[key] = self.counts.get(key, 0) + amount

    def include(self, other: Figures) -> None:
        """Take in later figures, or another worker's."""
        for key, amount in other.counts.items():
            self.counts[key] = self.counts.get(key, 0) + amount
        self.levels.update(other.levels)

    def __bool__(self) -> bool:
        return bool(self.counts or self.levels)


class TierFigures:
    """What changed in the reports of a worker's tiers."""

    def __init__(self, hierarchy: Hierarchy, rank: int) -> None:
        self._hierarchy = hierarchy
        self._rank = str(rank)
        self._before = Figures()

    def changes(self) -> Figures:
        """Counts since the last call, and levels that differ from it."""
        now = Figures()
        for report in self._hierarchy.reports():
            for name, amount, *more in _counts(report):
                now.add(name, amount, report.name, self._rank, *more)
            for name, level in _levels(report):
                now.levels["\t".join((name, report.name, self._rank))] = level
        news = Figures(
            {
                key: count - old
                for key, count in now.counts.items()
                if count != (old := self._before.counts.get(key, 0))
            },
            {key: level for key, level in now.levels.items() if level != self._before.levels.get(key)},
        )
        self._before = now
        return news


def _counts(report: TierReport) -> Iterator[tuple[str, int, *tuple[str, ...]]]:
    yield "pagoda_tier_restored_tokens", report.num_restored_tokens
    yield "pagoda_tier_loaded_records", report.num_loaded
    yield "pagoda_tier_stored_records", report.num_stored
    yield "pagoda_tier_skipped_records", report.num_skipped
    yield "pagoda_tier_lost_records", report.num_lost
    yield "pagoda_tier_slower_blocks", report.num_slower
    for reason, count in report.failures.items():
        yield "pagoda_tier_failures", count, reason


def _levels(report: TierReport) -> Iterator[tuple[str, int]]:
    yield "pagoda_tier_open", int(report.state is BreakerState.OPEN)
    if report.usage is not None:
        yield "pagoda_tier_bytes", report.usage.used_bytes
        yield "pagoda_tier_records", report.usage.num_records
        if report.usage.capacity_bytes is not None:
            yield "pagoda_tier_capacity_bytes", report.usage.capacity_bytes
