"""Prometheus metrics of the tiers below the device, read at each scrape, and what /health says of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pagoda.engine.outputs import TierReport

_COUNTERS: dict[str, tuple[str, Callable[[TierReport], int]]] = {
    "loaded_records": ("Records that a tier had and that verified", lambda tier: tier.num_loaded),
    "restored_tokens": ("Tokens restored from a tier instead of computed", lambda tier: tier.num_restored_tokens),
    "prefetched_tokens": (
        "Of those, tokens that had come before their request ran",
        lambda tier: tier.num_prefetched_tokens,
    ),
    "unused_blocks": ("Blocks that had come for requests that did not need them", lambda tier: tier.num_unused),
    "stored_records": ("Records written as soon as their block was full", lambda tier: tier.num_stored),
    "demoted_records": ("Records written as the device evicted their block", lambda tier: tier.num_demoted),
    "skipped_records": ("Records not written because the queue was full", lambda tier: tier.num_skipped),
    "lost_records": ("Records not written because the tier failed every time", lambda tier: tier.num_lost),
    "slower_blocks": ("Blocks not loaded because computing them was faster", lambda tier: tier.num_slower),
    "expired_records": ("Records asked for after their time", lambda tier: tier.num_expired),
    "late_blocks": ("Blocks loaded in vain: they had been computed meanwhile", lambda tier: tier.num_late),
}


def health_of(tiers: Sequence[TierReport]) -> list[dict[str, Any]]:
    """What /health says of each tier; sizes are null until the tier told."""
    return [
        {
            "name": tier.name,
            "state": tier.condition,
            "num_records": tier.usage and tier.usage.num_records,
            "used_bytes": tier.usage and tier.usage.used_bytes,
            "capacity_bytes": tier.usage and tier.usage.capacity_bytes,
        }
        for tier in tiers
    ]


class TierMetrics(Collector):
    """One sample a tier of everything; nothing when there are no tiers."""

    def __init__(self, read: Callable[[], Sequence[TierReport]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """The samples now."""
        tiers = self._read()
        if not tiers:
            return
        yield CounterMetricFamily(
            "pagoda_restored_tokens",
            "Tokens restored from all tiers instead of computed",
            sum(tier.num_restored_tokens for tier in tiers),
        )
        yield from _usage(tiers)
        for name, (about, count) in _COUNTERS.items():
            family = CounterMetricFamily(f"pagoda_tier_{name}", about, labels=["tier"])
            for tier in tiers:
                family.add_metric([tier.name], count(tier))
            yield family
        failures = CounterMetricFamily(
            "pagoda_tier_failures", "Calls and records that went wrong, by reason", labels=["tier", "reason"]
        )
        state = GaugeMetricFamily("pagoda_tier_state", "1 for the breaker's state", labels=["tier", "state"])
        seconds = HistogramMetricFamily("pagoda_tier_load_seconds", "One call that loads records", labels=["tier"])
        for tier in tiers:
            for reason, number in sorted(tier.failures.items()):
                failures.add_metric([tier.name, reason], number)
            for each in type(tier.state):
                state.add_metric([tier.name, str(each)], each is tier.state)
            seconds.add_metric([tier.name], cumulative(tier.load_seconds), tier.load_seconds_sum)
        yield from (failures, state, seconds)


def _usage(tiers: Sequence[TierReport]) -> Iterator[Metric]:
    used = GaugeMetricFamily("pagoda_tier_bytes", "Bytes that a tier occupies", labels=["tier"])
    capacity = GaugeMetricFamily("pagoda_tier_capacity_bytes", "Bytes that a tier may occupy", labels=["tier"])
    records = GaugeMetricFamily("pagoda_tier_records", "Records in a tier", labels=["tier"])
    for tier in tiers:
        if tier.usage is not None:
            used.add_metric([tier.name], tier.usage.used_bytes)
            records.add_metric([tier.name], tier.usage.num_records)
            if tier.usage.capacity_bytes is not None:
                capacity.add_metric([tier.name], tier.usage.capacity_bytes)
    yield from (used, capacity, records)


def cumulative(buckets: Sequence[tuple[float, int]]) -> list[tuple[str, float]]:
    """Buckets of (upper end, count) as Prometheus has them: each with all that is below."""
    total, ends = 0, []
    for end, count in buckets:
        total += count
        ends.append(("+Inf" if math.isinf(end) else str(end), float(total)))
    return ends
