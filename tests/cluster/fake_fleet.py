"""Servers that answer without a network: tiny, and as faulty as a test wants them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class FakeServer:
    """An OpenAI-compatible server that says its name in as many pieces as it is told to."""

    name: str
    pieces: int = 3
    refuses: bool = False  # connections
    breaks_after: int | None = None  # pieces
    status: int = 200
    waits: asyncio.Event | None = None  # before its first piece
    health: dict[str, Any] = field(default_factory=lambda: {"status": "ok"})
    health_status: int = 200
    block_names: list[int] | None = None
    answers: dict[str, Any] = field(default_factory=dict)  # JSON by path, in place of its name
    requests: list[httpx.Request] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    num_closed: int = 0

    async def answer(self, request: httpx.Request) -> httpx.Response:
        if self.refuses:
            raise httpx.ConnectError("connection refused", request=request)
        if request.url.path == "/health":
            return httpx.Response(self.health_status, json=self.health)
        if request.headers.get("x-pagoda-block-names"):
            if self.block_names is None:
                return httpx.Response(404)
            told = {"num_tokens": 16 * len(self.block_names) + 1, "block_names": self.block_names}
            return httpx.Response(200, json={"block_size": 16, "prompts": [told]})
        self.requests.append(request)
        self.bodies.append(await request.aread())
        fields = json.loads(self.bodies[-1] or b"{}")
        if self.status != 200:
            said = json.dumps({"error": {"message": f"{self.name} says no"}}).encode()
            headers = {"content-type": "application/json"}
            return httpx.Response(self.status, headers=headers, stream=httpx.ByteStream(said))
        if request.url.path in self.answers:
            return httpx.Response(200, stream=httpx.ByteStream(json.dumps(self.answers[request.url.path]).encode()))
        kind = "text/event-stream" if isinstance(fields, dict) and fields.get("stream") else "application/json"
        return httpx.Response(200, headers={"content-type": kind, "x-request-id": f"{self.name}-1"}, stream=_Body(self))


class _Body(httpx.AsyncByteStream):
    def __init__(self, server: FakeServer) -> None:
        self._server = server

    async def __aiter__(self) -> AsyncIterator[bytes]:
        server = self._server
        if server.waits is not None:
            await server.waits.wait()
        for number in range(server.pieces):
            if number == server.breaks_after:
                raise httpx.ReadError("connection reset")
            yield f"data: {server.name} {number}\n\n".encode()
            await asyncio.sleep(0)

    async def aclose(self) -> None:
        self._server.num_closed += 1


class FakeFleet(httpx.AsyncBaseTransport):
    """Servers at http://0, http://1, ..."""

    def __init__(self, count: int = 2) -> None:
        self.servers = [FakeServer(f"server{number}") for number in range(count)]

    @property
    def urls(self) -> list[str]:
        return [f"http://host{number}" for number in range(len(self.servers))]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self.servers[int(request.url.host.removeprefix("host"))].answer(request)
