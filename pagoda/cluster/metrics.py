"""What a router counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagoda.cluster.placement import Placement

_DECISION_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2)
_WAIT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)


class RouterMetrics:
    """Counters of a router, and gauges of its placement."""

    def __init__(self, placement: Placement, urls: Sequence[str]) -> None:
        registry = self._registry = CollectorRegistry()
        registry.register(_Gauges(placement, urls))

        def counter(name: str, about: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"pagoda_router_{name}", about, labels, registry=registry)

        self.requests = counter("requests", "Requests by the replica that answered and its status", ("replica", "code"))
        self.retries = counter("retries", "Requests sent to another replica after one failed", ("replica",))
        self.broken = counter("broken_streams", "Answers that ended with their replica", ("replica",))
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens routed; estimates without block events")
        self.known_tokens = counter("known_tokens", "Of those, the tokens that the chosen replica had, or would have")
        self.unnamed = counter("unnamed_prompts", "Prompts whose blocks no replica told in time")
        self.decision = Histogram(
            "pagoda_router_decision_seconds", "Choosing a replica", buckets=_DECISION_S, registry=registry
        )
        self.first_byte = Histogram(
            "pagoda_router_first_byte_seconds",
            "Arrival to the first byte of the answer",
            buckets=_WAIT_S,
            registry=registry,
        )

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)


class _Gauges(Collector):
    def __init__(self, placement: Placement, urls: Sequence[str]) -> None:
        self._placement = placement
        self._urls = urls

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        placement = self._placement
        up = GaugeMetricFamily("pagoda_router_replica_up", "Whether a replica gets requests", labels=["replica", "url"])
        load = GaugeMetricFamily("pagoda_router_load_tokens", "Tokens a replica has to compute", labels=["replica"])
        for number, url in enumerate(self._urls):
            up.add_metric([str(number), url], placement.is_up(number))
            load.add_metric([str(number)], placement.load(number))
        yield up
        yield load
        yield GaugeMetricFamily("pagoda_router_index_blocks", "Blocks replicas told of", placement.index.num_blocks)
        yield GaugeMetricFamily("pagoda_router_telling_replicas", "Of block events", len(placement.index.tells))
