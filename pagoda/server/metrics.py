"""Prometheus metrics: counters and histograms from the engine's reports, gauges from its state at the scrape.

Names follow what vLLM's dashboards ask for, under the prefix `pagoda_`. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagoda.engine.admin import TenantUsage
from pagoda.engine.outputs import FinishReason, MissReason, RequestStats, StepStats
from pagoda.server.backend import Backend
from pagoda.server.cache_metrics import AgeMetrics, TenantMetrics
from pagoda.server.dashboard.recent import is_warm
from pagoda.server.pressure import BodyBudget, PressureMetrics
from pagoda.server.tier_metrics import TierMetrics

_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_STEP_S = (0.001, *_TOKEN_S)
_REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class Metrics:
    """An EngineObserver with a registry of its own. Its methods run on the engine's thread and only add numbers."""

    def __init__(self, engine: Backend, bodies: BodyBudget) -> None:
        registry = self.registry = CollectorRegistry()
        registry.register(_EngineGauges(engine))
        registry.register(PressureMetrics(lambda: engine.stats().pressure, bodies))
        registry.register(TierMetrics(engine.tiers))
        registry.register(AgeMetrics(engine.block_ages))

        def counter(name: str, about: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"pagoda_{name}", about, labels, registry=registry)

        def histogram(name: str, about: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(f"pagoda_{name}_seconds", about, labels, buckets=buckets, registry=registry)

        self._query_tokens = counter("prefix_query_tokens", "Prompt tokens looked up in the prefix cache")
        self._hit_tokens = counter("prefix_hit_tokens", "Prompt tokens found in the prefix cache")
        self._preemptions = counter("preemptions", "Requests put back in the queue for want of blocks")
        self._resumed = counter("resumed_tokens", "Tokens of preempted requests restored, not computed again")
        self._audited = counter("audited_blocks", "Blocks of hits that were computed again and compared")
        self._mismatches = counter("audit_mismatches", "Audited blocks that were wrong")
        self._evicted = counter("evicted_blocks", "Cached blocks given up to make room")
        self._returned = counter("sparse_returned_blocks", "KV blocks that compressing sparse requests gave back")
        self._returned_bytes = counter("sparse_returned_bytes", "Bytes of those")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests")
        self._generation_tokens = counter("generation_tokens", "Output tokens of finished requests")
        self._finished = counter("requests", "Finished requests", ("finish_reason",))
        for reason in FinishReason:
            self._finished.labels(reason)
        self._sources = counter("prompt_tokens_by_source", "Prompt tokens by where their KV came from", ("source",))
        for source in ("device", "tiers", "blended", "computed"):
            self._sources.labels(source)
        self._recomputed = counter("blend_recomputed_tokens", "Tokens of passages that were found and computed anew")
        self._extra = counter("blend_extra_tokens", "Tokens computed beside prompts: passages alone, blends given up")
        self._guarded = counter("blend_guarded", "Chunks of passages of which the guard had more computed", ("all",))
        for whole in ("no", "yes"):
            self._guarded.labels(whole)
        self._misses = counter("prefix_misses", "Requests that did not hit all they could, by why", ("reason",))
        self._missed_tokens = counter("prefix_missed_tokens", "Prompt tokens that did not hit, by why", ("reason",))
        for why in MissReason:
            if why is not MissReason.NONE:
                self._misses.labels(why)
                self._missed_tokens.labels(why)
        self._ttft = histogram("time_to_first_token", "Arrival to first output token", _REQUEST_S, ("prefix",))
        for prefix in ("cold", "warm"):
            self._ttft.labels(prefix)
        self._tpot = histogram("time_per_output_token", "Mean time per output token after the first", _TOKEN_S)
        self._itl = histogram("inter_token_latency", "Time between one output token and the next", _TOKEN_S)
        self._e2e = histogram("e2e_request_latency", "Arrival to end", _REQUEST_S)
        self._queue = histogram("request_queue_time", "Arrival to first being scheduled", _REQUEST_S)
        self._step = histogram("step_time", "One forward pass and its bookkeeping", _STEP_S)

    def on_step(self, stats: StepStats) -> None:
        """Count a step."""
        self._step.observe(stats.step_s)
        self._preemptions.inc(stats.num_preempted)
        self._resumed.inc(stats.num_resumed_tokens)
        self._audited.inc(stats.num_audited_blocks)
        self._mismatches.inc(stats.num_audit_mismatches)
        self._evicted.inc(stats.num_evicted_blocks)
        self._returned.inc(stats.num_returned_blocks)
        self._returned_bytes.inc(stats.returned_bytes)

    def on_admitted(self, num_query_tokens: int, num_hit_tokens: int) -> None:
        """Count a prefix lookup."""
        self._query_tokens.inc(num_query_tokens)
        self._hit_tokens.inc(num_hit_tokens)

    def on_finished(self, stats: RequestStats) -> None:
        """Count a finished request."""
        self._finished.labels(stats.finish_reason).inc()
        self._count_prefix(stats)
        self._recomputed.inc(stats.usage.num_recomputed_tokens)
        self._extra.inc(stats.usage.num_extra_tokens)
        self._guarded.labels("yes").inc(stats.num_blends_whole)
        self._guarded.labels("no").inc(stats.num_blends_raised - stats.num_blends_whole)
        self._prompt_tokens.inc(stats.usage.num_prompt_tokens)
        self._generation_tokens.inc(stats.usage.num_output_tokens)
        self._queue.observe(stats.queue_s)
        self._e2e.observe(stats.e2e_s)
        if stats.ttft_s is not None:
            self._ttft.labels("warm" if is_warm(stats) else "cold").observe(stats.ttft_s)
        if stats.itl_s:
            self._tpot.observe(sum(stats.itl_s) / len(stats.itl_s))
        for seconds in stats.itl_s:
            self._itl.observe(seconds)

    def _count_prefix(self, stats: RequestStats) -> None:
        reason, num_hit, num_restored = stats.miss_reason, stats.usage.num_hit_tokens, stats.num_restored_tokens
        if reason is None:
            return
        num_missed = stats.usage.num_prompt_tokens - num_hit
        self._sources.labels("device").inc(num_hit - num_restored)
        self._sources.labels("tiers").inc(num_restored)
        self._sources.labels("blended").inc(stats.usage.num_blended_tokens)
        self._sources.labels("computed").inc(num_missed - stats.usage.num_blended_tokens)
        if reason is not MissReason.NONE:
            self._misses.labels(reason).inc()
            self._missed_tokens.labels(reason).inc(num_missed)

    def render(self, tenants: Sequence[TenantUsage] = ()) -> bytes:
        """The text exposition format, with what is given of tenants."""
        text = generate_latest(self.registry)
        return text + generate_latest(TenantMetrics(tenants)) if tenants else text


class _EngineGauges(Collector):
    """Reads the engine at each scrape: a gauge set by steps would go stale when the last request is aborted."""

    def __init__(self, engine: Backend) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """The gauges now."""
        stats = self._engine.stats()
        blocks = GaugeMetricFamily("pagoda_kv_blocks", "KV blocks by state", labels=["state"])
        blocks.add_metric(["free"], stats.num_free_blocks)
        blocks.add_metric(["held"], stats.num_held_blocks)
        blocks.add_metric(["cached"], stats.num_cached_blocks)
        yield blocks
        yield GaugeMetricFamily("pagoda_kv_leased_blocks", "KV blocks under a lease", stats.num_leased_blocks)
        yield GaugeMetricFamily(
            "pagoda_kv_lease_limit_blocks", "Most KV blocks under a lease", stats.lease_limit_blocks
        )
        yield GaugeMetricFamily("pagoda_kv_leases", "Leases on prefixes", stats.num_leases)
        yield CounterMetricFamily("pagoda_kv_leases_refused", "Leases that were not granted", stats.num_leases_refused)
        usage = stats.num_held_blocks / stats.num_blocks
        yield GaugeMetricFamily(
            "pagoda_kv_usage_ratio", "Share of KV blocks that running requests and leases hold", usage
        )
        yield GaugeMetricFamily("pagoda_sparse_host_bytes", "Host memory that holds KV to recall", stats.host_bytes)
        yield CounterMetricFamily("pagoda_sparse_fetched_bytes", "KV that was recalled", stats.fetched_bytes)
        yield GaugeMetricFamily("pagoda_requests_running", "Requests being computed", stats.num_running)
        yield GaugeMetricFamily("pagoda_requests_waiting", "Requests in the queue", stats.num_waiting)
