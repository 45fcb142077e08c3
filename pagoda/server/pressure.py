"""Pressure over HTTP: a header that tells the level, bodies that never take more memory than they may, and metrics.

request ──> PressureMiddleware ── counts the bytes of bodies until their answers end ──> routes
                    └── x-pagoda-pressure: 4 <── engine.stats().pressure ── PressureMetrics ──> /metrics
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda.engine.pressure.admission import Refusal
from pagoda.engine.pressure.ladder import Level
from pagoda.engine.pressure.report import PressureReport
from pagoda.errors import Overloaded
from pagoda.server.backend import Backend

HEADER = b"x-pagoda-pressure"
BODIES_FULL = "bodies_full"
_RETRY_S = 1.0


class BodyBudget:
    """Bytes of request bodies that are in memory, at most `limit` of them. For the event loop alone."""

    def __init__(self, limit: int) -> None:
        self.num_refused = 0
        self._limit = limit
        self._taken = 0

    def take(self, count: int) -> None:
        """Count more bytes.

        Raises:
            Overloaded: they would be too many; nothing changed.
        """
        if self._taken + count > self._limit:
            self.num_refused += 1
            raise Overloaded(
                "The server is overloaded: the bodies of the requests it has take all the memory they may.",
                reason=BODIES_FULL,
                retry_after_s=_RETRY_S,
            )
        self._taken += count

    def give_back(self, count: int) -> None:
        """So many are gone."""
        self._taken -= count


class PressureMiddleware:
    """See the module. Plain ASGI: streams pass through as they come."""

    def __init__(self, app: ASGIApp, engine: Backend, bodies: BodyBudget) -> None:
        self._app = app
        self._engine = engine
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        taken = 0

        async def receive_counted() -> Message:
            nonlocal taken
            message = await receive()
            count = len(message.get("body", b""))
            self._bodies.take(count)
            taken += count
            return message

        async def send_with_level(message: Message) -> None:
            if message["type"] == "http.response.start" and (level := self._engine.stats().pressure.level):
                message = {**message, "headers": [*message["headers"], (HEADER, b"%d" % level)]}
            await send(message)

        try:
            await self._app(scope, receive_counted, send_with_level)
        finally:
            self._bodies.give_back(taken)


class PressureMetrics(Collector):
    """What the ladder did and sees, read at each scrape."""

    def __init__(self, read: Callable[[], PressureReport], bodies: BodyBudget) -> None:
        self._read = read
        self._bodies = bodies

    def collect(self) -> Iterator[Metric]:
        """The samples now."""
        report = self._read()
        yield GaugeMetricFamily("pagoda_pressure_level", "The higher level of the two ladders, 0 to 5", report.level)
        yield GaugeMetricFamily("pagoda_pressure_memory_level", "Level of memory's ladder", report.memory_level)
        yield GaugeMetricFamily(
            "pagoda_scale_out_wanted", "1 while more replicas would help", int(report.level >= Level.HOLD)
        )
        changes = CounterMetricFamily("pagoda_pressure_transitions", "Changes to a level", labels=["level"])
        seconds = CounterMetricFamily("pagoda_pressure_seconds", "Time in a level", labels=["level"])
        for level in Level:
            changes.add_metric([str(int(level))], report.entered.get(level, 0))
            seconds.add_metric([str(int(level))], report.seconds.get(level, 0.0))
        signals = GaugeMetricFamily("pagoda_pressure_signal", "What the ladder looks at", labels=["signal"])
        for name, value in asdict(report.signals).items():
            signals.add_metric([name], value)
        refused = CounterMetricFamily("pagoda_refused_requests", "Requests answered 429, by why", labels=["reason"])
        for reason in Refusal:
            refused.add_metric([reason], report.refused.get(reason, 0))
        refused.add_metric([BODIES_FULL], self._bodies.num_refused)
        yield from (changes, seconds, signals, refused)
        yield CounterMetricFamily(
            "pagoda_pressure_compressed_contexts", "Running contexts made smaller on level 3", report.num_compressed
        )
        yield GaugeMetricFamily("pagoda_resident_memory_bytes", "Resident memory of the process", report.rss_bytes)
        if report.memory_limit is not None:
            yield GaugeMetricFamily("pagoda_memory_limit_bytes", "Most it may have", report.memory_limit)


def pressure_overview(report: PressureReport) -> dict[str, Any]:
    """The ladder for JSON."""
    return {
        "level": int(report.level),
        "name": report.level.name.lower(),
        "memory_level": int(report.memory_level),
        "signals": {name: round(value, 3) for name, value in asdict(report.signals).items()},
        "refused": {str(reason): count for reason, count in report.refused.items()},
        "compressed": report.num_compressed,
        "resident_bytes": report.rss_bytes,
        "memory_limit_bytes": report.memory_limit,
    }
