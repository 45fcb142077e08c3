"""Figures in vLLM's form: summed in its log line, and registered with its Prometheus client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from pagoda.integrations.vllm.stats import COUNTERS, GAUGES, Figures


class PagodaStats(KVConnectorStats):  # type: ignore[misc]
    """Figures, as `data` that vLLM sends between its processes."""

    data: dict[str, Any]

    @classmethod
    def of(cls, figures: Figures) -> PagodaStats:
        """Pack figures."""
        return cls(data={"counts": figures.counts, "levels": figures.levels})

    @property
    def _figures(self) -> Figures:
        return Figures(self.data.get("counts", {}), self.data.get("levels", {}))

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Those of several workers, or of several steps, as one."""
        figures = Figures(dict(self._figures.counts), dict(self._figures.levels))
        figures.include(Figures(other.data.get("counts", {}), other.data.get("levels", {})))
        return PagodaStats.of(figures)

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        return {key.replace("\t", " "): value for key, value in self._figures.counts.items()}

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self._figures


class PagodaMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Counters and gauges beside vLLM's own."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            name: metric_types[kind](name=name, documentation=tells, labelnames=[*labelnames, *labels], **more)
            for kind, names, more in ((Counter, COUNTERS, {}), (Gauge, GAUGES, {"multiprocess_mode": "mostrecent"}))
            for name, (labels, tells) in names.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in the figures of a step."""
        engine = self.per_engine_labelvalues[engine_idx]
        for key, amount in transfer_stats_data.get("counts", {}).items():
            name, *labels = key.split("\t")
            self._metrics[name].labels(*engine, *labels).inc(amount)
        for key, level in transfer_stats_data.get("levels", {}).items():
            name, *labels = key.split("\t")
            self._metrics[name].labels(*engine, *labels).set(level)
