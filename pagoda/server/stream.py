"""From the engine's streams to a client that may leave at any moment.

    engine.stream(prompt 0) ─┐
    engine.stream(prompt 1) ─┼─ merge() ── (prompt index, RequestOutput) ── EventStream ── socket
              ...           ─┘                                                 ^ watches for the client leaving

Closing travels the other way: EventStream closes the merged stream, which closes every engine stream, which aborts its
request and frees its blocks.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from pagoda.engine.outputs import RequestOutput
from pagoda.errors import RequestAborted
from pagoda.server.disconnect import until_disconnect
from pagoda.server.errors import describe
from pagoda.server.ids import OPENAI_HEADER

Merged = AsyncGenerator[tuple[int, RequestOutput], None]
Chunk = dict[str, Any] | bytes  # an object for the stream to encode, or the event as it is sent

logger = logging.getLogger(__name__)
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_HOLE = uuid.uuid4().hex


async def merge(streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> Merged:
    """Interleave streams as (stream index, output). The first error ends them all; closing closes them all."""
    if len(streams) == 1:  # as most requests have: no task and no second queue between the engine and the socket
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    news: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    news.put_nowait((index, output))
            news.put_nowait(None)
        except Exception as error:
            news.put_nowait(error)

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    num_open = len(pumps)
    try:
        while num_open:
            item = await news.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


class EventEncoder(Protocol):
    """Words the engine's news as an endpoint's JSON chunks. May keep state between calls."""

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterable[Chunk]:
        """The chunks that tell `output`."""

    def closing(self) -> Iterable[Chunk]:
        """The chunks after the last output."""


class EventStream(Response):
    """Server-sent events, one per chunk, ended by `last`; after an error, by an error event. OpenAI's forms of these.

    Starlette's StreamingResponse is not used: on some ASGI versions it sees a disconnect only at the next send, which
    for a request waiting in a queue is minutes away.
    """

    media_type = "text/event-stream"
    last = b"data: [DONE]\n\n"

    def __init__(
        self, first: tuple[int, RequestOutput], rest: Merged, encoder: EventEncoder, headers: dict[str, str]
    ) -> None:
        super().__init__(headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._encoder = encoder

    def encode(self, chunk: dict[str, Any]) -> bytes:
        """A chunk as an event."""
        return event(chunk)

    def encode_error(self, error: Exception) -> bytes:
        """The event that ends a stream that failed."""
        return event(describe(error)[1])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until its end or until the client leaves."""
        async with aclosing(self._rest):
            with suppress(RequestAborted):
                await until_disconnect(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        async def send_events(chunks: Iterable[Chunk]) -> None:
            if data := b"".join([chunk if isinstance(chunk, bytes) else self.encode(chunk) for chunk in chunks]):
                await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            await send_events(self._encoder.chunks(*self._first))
            async for prompt_index, output in self._rest:
                await send_events(self._encoder.chunks(prompt_index, output))
            await send_events(self._encoder.closing())
            last = self.last
        except Exception as error:
            # The status has been sent; clients raise on an event that holds an error.
            if describe(error)[0] == 500:
                logger.error("failed in the midst of %s", self.headers.get(OPENAI_HEADER), exc_info=error)
            last = self.encode_error(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})


class NamedEventStream(EventStream):
    """Events with names, from chunks with a `type`; the last of them is the end."""

    last = b""

    def encode(self, chunk: dict[str, Any]) -> bytes:
        """A chunk as an event of its type."""
        return named_event(chunk)


def event(chunk: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {_JSON.encode(chunk)}\n\n".encode()


def named_event(chunk: dict[str, Any]) -> bytes:
    """One server-sent event of the chunk's `type`."""
    return f"event: {chunk['type']}\n".encode() + event(chunk)


class TextEvent:
    """An event that is the same for every token but for one text: encoded once, and filled in for each.

    Args:
        encode: makes the event of a chunk.
        chunk_of: makes the chunk of a text, which it holds once.
    """

    def __init__(self, encode: Callable[[dict[str, Any]], bytes], chunk_of: Callable[[str], dict[str, Any]]) -> None:
        self._head, self._tail = encode(chunk_of(_HOLE)).split(_JSON.encode(_HOLE).encode())

    def of(self, text: str) -> bytes:
        """The event of a text."""
        return self._head + _JSON.encode(text).encode() + self._tail
