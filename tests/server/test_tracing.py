"""A request's spans: whose child it is, what it says of the cache, and that it says nothing of the text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pagoda.engine.aio import AsyncEngine
from pagoda.engine.engine import Engine
from pagoda.errors import ConfigError
from pagoda.server.tracing import Tracing, otlp_exporter

from .conftest import run_server
from .fake_backend import FakeBackend
from .test_cache_control import folder

__all__ = ["folder"]

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY = {
    "messages": [{"role": "user", "content": "When do the boats leave the harbour, and from where?"}],
    "max_tokens": 4,
}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def by_name(exporter: InMemorySpanExporter) -> Iterator[tuple[str, ReadableSpan]]:
    for span in exporter.get_finished_spans():
        yield span.name.split()[0], span


async def test_a_request_is_a_span_under_its_callers_and_tells_of_the_cache(
    folder: Path, exporter: InMemorySpanExporter
) -> None:
    tracing = Tracing("tiny", exporter)
    began = time.time_ns()
    async with run_server(AsyncEngine(Engine(folder, kv_memory="4MiB")), tracing=tracing) as live:
        for _ in range(2):
            answer = await live.http.post("/v1/chat/completions", json=BODY, headers={"traceparent": PARENT})
            assert answer.status_code == 200
            usage = answer.json()["usage"]
    spans = exporter.get_finished_spans()
    cold, warm = (span for span in spans if span.name == "chat tiny")
    for span in cold, warm:
        assert span.parent is not None
        assert span.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
        assert span.parent.span_id == 0xB7AD6B7169203331
        assert span.attributes is not None
        assert span.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert span.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
        assert not any("boats" in str(value) for value in span.attributes.values())
    assert cold.attributes is not None
    assert warm.attributes is not None
    assert cold.attributes["gen_ai.usage.cache_read.input_tokens"] == 0
    assert cold.attributes["pagoda.miss_reason"] == "never_seen"
    assert warm.attributes["gen_ai.usage.cache_read.input_tokens"] == usage["prompt_tokens"] - 1
    phases = [span for span in spans if span.parent is not None and span.parent.span_id == warm.context.span_id]
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    times = [moment for span in phases for moment in (span.start_time or 0, span.end_time or 0)]
    assert times == sorted(times)
    assert began <= times[0]


async def test_a_refused_request_is_an_error_span(folder: Path, exporter: InMemorySpanExporter) -> None:
    async with run_server(AsyncEngine(Engine(folder, kv_memory="4MiB")), tracing=Tracing("tiny", exporter)) as live:
        body = {"model": "tiny", "prompt": "a " * 5000}
        answer = await live.http.post("/v1/completions", json={**body, "model": live.backend.model_name})
        assert answer.status_code == 400
    (span,) = exporter.get_finished_spans()
    assert not span.status.is_ok
    assert span.attributes is not None
    assert span.attributes["error.type"] == "ContextTooLong"


async def test_nothing_is_kept_of_requests_that_ended(exporter: InMemorySpanExporter) -> None:
    tracing = Tracing("any", exporter)
    async with run_server(FakeBackend(), tracing=tracing) as live:
        for stream in False, True:
            assert (await live.http.post("/v1/chat/completions", json={**BODY, "stream": stream})).status_code == 200
        await live.until_idle()
        assert not tracing._followed
    assert len([name for name, _ in by_name(exporter) if name == "chat"]) == 2


def test_a_collector_has_a_url() -> None:
    with pytest.raises(ConfigError, match="4318"):
        otlp_exporter("localhost:4318")
