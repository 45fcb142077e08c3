"""Prometheus metrics of the cache that are read at a scrape: the ages of its blocks, and what each tenant has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pagoda.engine.admin import TenantUsage
from pagoda.engine.outputs import AgeHistogram
from pagoda.server.tier_metrics import cumulative

_AGES = {
    "lifetime": "From a block's entering the cache to its eviction, of sampled blocks",
    "idle_before_evict": "From a block's last hit to its eviction, of sampled blocks",
    "reuse_gap": "From one hit of a block to the next, of sampled blocks",
}
_GAUGES: dict[str, tuple[str, Callable[[TenantUsage], int]]] = {
    "leased_blocks": ("Blocks charged to a tenant's leases", lambda tenant: tenant.num_leased_blocks),
    "guaranteed_blocks": ("Blocks that nobody can take from a tenant", lambda tenant: tenant.num_guaranteed_blocks),
}
_COUNTERS: dict[str, tuple[str, Callable[[TenantUsage], int]]] = {
    "query_tokens": ("Prompt tokens looked up", lambda tenant: tenant.num_query_tokens),
    "hit_tokens": ("Prompt tokens found on the device or in tiers", lambda tenant: tenant.num_hit_tokens),
    "computed_tokens": ("Tokens whose KV was computed", lambda tenant: tenant.num_computed_tokens),
    "restored_tokens": ("Tokens restored from tiers", lambda tenant: tenant.num_restored_tokens),
    "prefetched_tokens": ("Of those, come before their request ran", lambda tenant: tenant.num_prefetched_tokens),
    "evicted_blocks": ("Blocks that a tenant lost to make room", lambda tenant: tenant.num_evicted_blocks),
}


class AgeMetrics(Collector):
    """A histogram of each age."""

    def __init__(self, read: Callable[[], Sequence[AgeHistogram]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """The samples now."""
        for each in self._read():
            family = HistogramMetricFamily(f"pagoda_kv_block_{each.name}_seconds", _AGES[each.name])
            family.add_metric([], cumulative(each.buckets), each.sum_s)
            yield family


class TenantMetrics(Collector):
    """What each tenant has and did. Their names are for the operator only: see /metrics."""

    def __init__(self, tenants: Sequence[TenantUsage]) -> None:
        self._tenants = tenants

    def collect(self) -> Iterator[Metric]:
        """One sample a tenant of everything."""
        blocks = GaugeMetricFamily("pagoda_tenant_kv_blocks", "A tenant's KV blocks", labels=["tenant", "state"])
        for tenant in self._tenants:
            blocks.add_metric([tenant.tenant, "held"], tenant.num_held_blocks)
            blocks.add_metric([tenant.tenant, "cached"], tenant.num_cached_blocks)
        yield blocks
        kinds = (GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)
        for kind, table in kinds:
            for name, (about, count) in table.items():
                family = kind(f"pagoda_tenant_{name}", about, labels=["tenant"])
                for tenant in self._tenants:
                    family.add_metric([tenant.tenant], count(tenant))
                yield family
        tiers = GaugeMetricFamily("pagoda_tenant_tier_bytes", "What a tenant has in a tier", labels=["tenant", "tier"])
        for tenant in self._tenants:
            for tier, num_bytes in tenant.tier_bytes.items():
                tiers.add_metric([tenant.tenant, tier], num_bytes)
        yield tiers
