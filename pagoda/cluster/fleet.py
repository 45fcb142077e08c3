"""Fleet: the replicas by number, as a router asks them: a client's request with other credentials, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
from starlette.requests import Request

from pagoda.cluster.relay import request_headers
from pagoda.errors import ConfigError
from pagoda.server.block_names import HEADER as BLOCK_NAMES_HEADER
from pagoda.server.token import HEADER as TOKEN_HEADER

MAX_NAMES = 1 << 20
NAMES_TIMEOUT_S = 1.0


class Fleet:
    """Replicas at addresses such as `http://127.0.0.1:8001`.

    Args:
        token: the cluster's, which replicas ask for.
        backend_key: what replicas get instead of the client's key; None passes that on.
        read_timeout_s: the longest silence of a replica that is answering.
        transport: in place of the network, for tests.

    Raises:
        ConfigError: a URL is not one of HTTP, or comes twice, or there is none.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None = None,
        backend_key: str | None = None,
        read_timeout_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.urls = [_checked(url) for url in urls]
        if not urls or len(set(self.urls)) != len(urls):
            raise ConfigError("a router needs backends, each of them once")
        self._token = token
        self._backend_key = backend_key
        # Servers close idle connections after some seconds; one that closes as a request is sent looks like a fault.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0)
        self.client = httpx.AsyncClient(
            headers={TOKEN_HEADER: token} if token else {},
            timeout=httpx.Timeout(read_timeout_s, connect=2.0),
            limits=limits,
            transport=transport,
            trust_env=False,
        )

    def __len__(self) -> int:
        return len(self.urls)

    async def begin(self, number: int, request: Request, body: bytes) -> httpx.Response:
        """The answer of a replica, its status and headers read; whoever gets it closes it.

        Raises:
            httpx.HTTPError: it did not answer.
        """
        return await self.client.send(self._request(number, request, body), stream=True)

    async def whole(self, number: int, request: Request, body: bytes) -> httpx.Response:
        """The answer of a replica, all of it; raises httpx.HTTPError."""
        return await self.client.send(self._request(number, request, body))

    async def blocks(self, number: int, request: Request, body: bytes) -> tuple[int, list[int], int]:
        """What a replica says a request's prompt is made of: its tokens, the names of its whole blocks, their size.

        Raises:
            httpx.HTTPError, ValueError, KeyError, TypeError, IndexError: it does not say, not in time or not in form.
        """
        asked = self._request(number, request, body, only_names=True)
        answer = (await self.client.send(asked)).raise_for_status()
        told = answer.json()
        prompt = told["prompts"][0]
        names = prompt["block_names"]
        if not isinstance(names, list) or len(names) > MAX_NAMES:
            raise ValueError("block_names is no list")
        return _count(prompt["num_tokens"]), [_count(name) for name in names], _count(told["block_size"])

    def _request(self, number: int, request: Request, body: bytes, *, only_names: bool = False) -> httpx.Request:
        instead = {BLOCK_NAMES_HEADER: "1" if only_names else "", TOKEN_HEADER: self._token or ""}
        if self._backend_key is not None:
            instead |= {"authorization": f"Bearer {self._backend_key}", "x-api-key": ""}
        query = f"?{request.url.query}" if request.url.query else ""
        url = self.urls[number] + request.url.path + query
        headers = request_headers(request.headers, instead)
        timeout = httpx.Timeout(NAMES_TIMEOUT_S) if only_names else httpx.USE_CLIENT_DEFAULT
        return self.client.build_request(request.method, url, headers=headers, content=body, timeout=timeout)

    async def close(self) -> None:
        """Let go of all connections."""
        await self.client.aclose()


def _checked(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{url!r} is no address of a backend: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.path not in ("", "/"):
        raise ConfigError(f"a backend is given as http://HOST:PORT, got {url!r}")
    return url.rstrip("/")


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"{value!r} is no count")
    return value
