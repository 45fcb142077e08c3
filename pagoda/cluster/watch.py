"""Watch: which replicas are alive, and what they say they have.

    every second   GET /health ──> up: gets requests     down: gets none, and the index forgets it
    up, with "kv_events" in its answer ──> a Subscriber feeds the index

A replica that refuses a connection is down at once; one that is slow or answers 5xx, after the second time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx

from pagoda.cluster.placement import Placement

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
TIMEOUT_S = 2.0
MAX_FAILURES = 2

EventPorts = tuple[int, int]  # of messages and of replays


@dataclass(eq=False, slots=True)
class _Watched:
    """A replica as it was found last."""

    number: int
    url: str
    failures: int = 0
    ports: EventPorts | None = None
    reading: asyncio.Task[None] | None = None


class Watch:
    """Keeps a Placement up to date until cancelled.

    Args:
        urls: of the replicas, in the placement's order.
        client: sends the cluster token, if there is one.
        token: the same, for block events.
    """

    def __init__(
        self,
        urls: Sequence[str],
        client: httpx.AsyncClient,
        placement: Placement,
        *,
        token: str | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._client = client
        self._placement = placement
        self._token = token
        self._interval_s = interval_s
        self._replicas = [_Watched(number, url) for number, url in enumerate(urls)]
        self._suspected = [asyncio.Event() for _ in urls]

    async def run(self) -> None:
        """Watch all."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for replica in self._replicas:
                    tasks.create_task(self._follow(replica))
        finally:
            for replica in self._replicas:
                await self._stop_reading(replica)

    def suspect(self, number: int, *, refused: bool = False) -> None:
        """A request to a replica failed: look at it now. One that refused the connection is down already."""
        if refused:
            self._down(self._replicas[number], "it refuses connections")
        self._suspected[number].set()

    async def _follow(self, replica: _Watched) -> None:
        suspected = self._suspected[replica.number]
        while True:
            suspected.clear()
            await self._look(replica)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):  # `wait_for` may lose a cancellation before Python 3.12
                    await suspected.wait()

    async def _look(self, replica: _Watched) -> None:
        try:
            answer = await self._client.get(f"{replica.url}/health", timeout=TIMEOUT_S)
        except httpx.ConnectError as error:
            return await self._gone(replica, str(error) or "it refuses connections")
        except httpx.HTTPError as error:
            return await self._failed(replica, str(error) or type(error).__name__)
        if answer.status_code == 401:
            return await self._failed(replica, "it does not take this router's cluster token")
        if answer.status_code >= 500:
            return await self._failed(replica, f"/health answers {answer.status_code}")
        replica.failures = 0
        if not self._placement.is_up(replica.number):
            logger.info("replica %d is up: %s", replica.number, replica.url)
            await self._stop_reading(replica)  # what is known of it was forgotten: read it from its beginning
            self._placement.set_up(replica.number, True)
        await self._read_from(replica, _event_ports(answer))

    async def _failed(self, replica: _Watched, why: str) -> None:
        replica.failures += 1
        if replica.failures >= MAX_FAILURES:
            await self._gone(replica, why)

    async def _gone(self, replica: _Watched, why: str) -> None:
        await self._stop_reading(replica)
        self._down(replica, why)

    def _down(self, replica: _Watched, why: str) -> None:
        if self._placement.is_up(replica.number):
            logger.warning("replica %d is down: %s (%s)", replica.number, why, replica.url)
        self._placement.set_up(replica.number, False)
        self._placement.index.forget(replica.number)

    async def _read_from(self, replica: _Watched, ports: EventPorts | None) -> None:
        is_read = replica.reading is not None and not replica.reading.done()
        if ports == replica.ports and is_read == (ports is not None):
            return
        await self._stop_reading(replica)
        if ports is not None:
            replica.reading = asyncio.create_task(self._read(replica, ports))
            replica.ports = ports

    async def _read(self, replica: _Watched, ports: EventPorts) -> None:
        from pagoda.cluster.subscriber import Subscriber  # an optional extra, of use to those who tell events

        # Only its ports are taken from what a replica says, so that none can send the router elsewhere.
        host = urlsplit(replica.url).hostname
        messages, replays = (f"tcp://{host}:{port}" for port in ports)
        apply = partial(self._placement.index.apply, replica.number)
        try:
            await Subscriber(messages, replays, apply, token=self._token).run()
        except Exception:
            logger.exception("block events of replica %d cannot be read", replica.number)
            self._placement.index.forget(replica.number)

    async def _stop_reading(self, replica: _Watched) -> None:
        if replica.reading is not None:
            replica.reading.cancel()
            await asyncio.gather(replica.reading, return_exceptions=True)
            self._placement.index.forget(replica.number)
        replica.reading = replica.ports = None


def _event_ports(answer: httpx.Response) -> EventPorts | None:
    """Where a replica publishes block events, as its /health says."""
    try:
        body: Any = answer.json()
    except ValueError:
        return None
    told = body.get("kv_events") if isinstance(body, dict) else None
    if not isinstance(told, dict):
        return None
    ports = told.get("port"), told.get("replay_port")
    if all(type(port) is int and 0 < port < 1 << 16 for port in ports):
        return ports  # type: ignore[return-value]
    return None
