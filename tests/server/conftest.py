from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from pagoda.server.app import create_app
from pagoda.server.run import DrainingServer
from pagoda.server.sockets import bind
from tests.waiting import PATIENCE_S, eventually

from .fake_backend import FakeBackend


@dataclass
class Live:
    backend: FakeBackend
    server: DrainingServer
    url: str
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI
    serving: asyncio.Task[None]

    async def until_idle(self) -> None:
        """Wait until the backend holds no request."""
        await eventually(lambda: not self.backend.live)


@asynccontextmanager
async def run_server(backend: Any, port: int = 0, **options: Any) -> AsyncIterator[Live]:
    """`backend` behind a real uvicorn on a loopback port, by default a free one."""
    sock = bind("127.0.0.1", port)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    server = DrainingServer(create_app(backend, **options), log_level="warning")
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started:
        assert not serving.done(), serving.exception()
        await asyncio.sleep(0.005)
    try:
        async with (
            httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
        ):
            yield Live(backend, server, url, http, client, serving)
    finally:
        server.should_exit = True
        await serving


@pytest.fixture
async def live() -> AsyncIterator[Live]:
    async with run_server(FakeBackend()) as running:
        yield running
        await running.until_idle()
