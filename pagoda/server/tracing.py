"""OpenTelemetry traces: a span for each request, under the caller's, with its waiting, prefill and decoding below it.

    chat smollm2            hits by source, why the rest missed, output tokens
      ├─ queue              arrival to first being scheduled
      ├─ prefill            to the first output token
      └─ decode             to the end

The caller's span comes in the W3C `traceparent` header. Attributes follow the conventions for generative AI
(`gen_ai.*`), and what those have no name for begins with `pagoda.`. No text and no token leaves the server.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing

from opentelemetry import propagate
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from pagoda import __version__
from pagoda.engine.outputs import RequestOutput, RequestStats, StepStats
from pagoda.errors import ConfigError, PagodaError

_NS = 1_000_000_000
_PATIENCE_S = 2  # with a collector that does not answer: also how long stopping the server may take for it


class Tracing:
    """An EngineObserver that follows streams and turns each into spans, sent in the background.

    Args:
        model_name: the model's, for every span.
        exporter: where spans go; `otlp_exporter` makes the usual one.
    """

    def __init__(self, model_name: str, exporter: SpanExporter) -> None:
        resource = Resource.create({"service.name": "pagoda", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, export_timeout_millis=_PATIENCE_S * 1000))
        self._tracer = self._provider.get_tracer("pagoda", __version__)
        self._model_name = model_name
        self._followed: dict[str, RequestStats | None] = {}  # written by the engine's thread, for requests still here

    def on_step(self, stats: StepStats) -> None:
        """Nothing."""

    def on_admitted(self, num_query_tokens: int, num_hit_tokens: int) -> None:
        """Nothing."""

    def on_finished(self, stats: RequestStats) -> None:
        """Keep the figures of a followed request until its stream ends, which is a moment later."""
        if stats.request_id in self._followed:
            self._followed[stats.request_id] = stats

    async def follow(
        self, stream: AsyncGenerator[RequestOutput, None], request_id: str, headers: Mapping[str, str]
    ) -> AsyncGenerator[RequestOutput, None]:
        """The stream; its spans end when it does, as an error if it failed. One that nobody reads has none."""
        span = self._tracer.start_span(
            f"chat {self._model_name}", propagate.extract(headers), SpanKind.SERVER, start_time=time.time_ns()
        )
        self._followed[request_id] = None
        try:
            async with aclosing(stream):
                async for output in stream:
                    yield output
        except PagodaError as error:
            span.set_status(Status(StatusCode.ERROR, str(error)))
            span.set_attribute("error.type", type(error).__name__)
            raise
        finally:
            stats = self._followed.pop(request_id)
            span.set_attribute("gen_ai.operation.name", "chat")
            span.set_attribute("gen_ai.request.model", self._model_name)
            span.set_attribute("gen_ai.response.id", request_id)
            if stats is not None:
                span.set_attributes(dict(_attributes(stats)))
                self._phases(span, stats)
            span.end(time.time_ns())

    def _phases(self, span: Span, stats: RequestStats) -> None:
        """The spans below a request's, placed by what the engine's clock says of its length."""
        end = time.time_ns()
        start = end - int(stats.e2e_s * _NS)
        admitted = start + int(stats.queue_s * _NS)
        first = end if stats.ttft_s is None else start + int(stats.ttft_s * _NS)
        context = set_span_in_context(span)
        for name, begin, stop in ("queue", start, admitted), ("prefill", admitted, first), ("decode", first, end):
            if stop > begin:
                self._tracer.start_span(name, context, start_time=begin).end(stop)

    def close(self) -> None:
        """Send what is left, for two seconds at most, and stop."""
        stopping = threading.Thread(target=self._provider.shutdown, name="pagoda-tracing", daemon=True)
        stopping.start()
        stopping.join(_PATIENCE_S)


def _attributes(stats: RequestStats) -> Iterator[tuple[str, str | int | float | tuple[str, ...]]]:
    usage = stats.usage
    yield "gen_ai.usage.input_tokens", usage.num_prompt_tokens
    yield "gen_ai.usage.cache_read.input_tokens", usage.num_hit_tokens
    yield "gen_ai.usage.output_tokens", usage.num_output_tokens
    yield "gen_ai.response.finish_reasons", (str(stats.finish_reason),)
    yield "pagoda.restored_tokens", stats.num_restored_tokens
    if stats.miss_reason is not None:
        yield "pagoda.miss_reason", str(stats.miss_reason)
    if stats.ttft_s is not None:
        yield "gen_ai.response.time_to_first_chunk", stats.ttft_s


def otlp_exporter(endpoint: str) -> SpanExporter:
    """An exporter to a collector, such as `http://127.0.0.1:4318/v1/traces`, over OTLP and HTTP.

    Raises:
        ConfigError: the address is none.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--otlp-endpoint takes a URL such as http://127.0.0.1:4318/v1/traces, got {endpoint!r}")
    for name in ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk.trace.export"):
        logging.getLogger(name).setLevel(logging.ERROR)  # it warns of every try; the failure is enough
    return OTLPSpanExporter(endpoint=endpoint, timeout=_PATIENCE_S)
