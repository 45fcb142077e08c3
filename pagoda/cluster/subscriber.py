"""Subscriber: a replica's block events, in order and without gaps, or else from nothing again.

A missed number is asked for from the publisher's replay, and so is, whenever it is quiet, what may have been lost last
and left no gap. What a replay does not have either makes all that is known of the replica unsound, so it begins with a
`BlocksCleared`; Pagoda's publisher then tells of everything anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq
import zmq.asyncio

from pagoda.cluster.curve import guard_client
from pagoda.cluster.wire import END, MAX_MESSAGE_BYTES, decode, read_sequence, sequence_bytes
from pagoda.errors import WireError
from pagoda.kv.events import BlockEvent, BlocksCleared

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 100_000  # messages
_REPLAY_S = 5.0
_QUIET_S = 5.0


class Subscriber:
    """Reads one publisher. Everything happens in `run`, on its event loop.

    Args:
        endpoint, replay_endpoint: the publisher's.
        apply: takes each event.
        token: the cluster's, if it has one.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str, apply: Callable[[BlockEvent], None], *, token: str | None = None
    ) -> None:
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._apply = apply
        self._token = token
        self._next = 0  # the number that is due
        self.num_gaps = 0

    async def run(self) -> None:
        """Read until cancelled."""
        context = zmq.asyncio.Context()
        try:
            messages = self._socket(context, zmq.SUB)
            messages.subscribe(b"")
            messages.connect(self._endpoint)
            await self._catch_up(context)
            while True:
                try:
                    if not await messages.poll(int(1000 * _QUIET_S)):
                        with suppress(TimeoutError):
                            await self._ask(context)
                        continue
                    parts = await messages.recv_multipart()
                    number = read_sequence(parts[-2]) if len(parts) == 3 else -1
                    if number > self._next:
                        self.num_gaps += 1
                        await self._catch_up(context)
                    self._take(number, parts[-1])
                except WireError as error:
                    logger.warning("%s: %s", self._endpoint, error)
        finally:
            context.destroy(linger=0)

    def _socket(self, context: zmq.asyncio.Context, kind: int) -> zmq.asyncio.Socket:
        socket: zmq.asyncio.Socket = context.socket(kind)
        socket.rcvhwm = HIGH_WATER_MARK
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        guard_client(socket, self._token)
        return socket

    def _take(self, number: int, payload: bytes) -> None:
        """Apply a message, unless it was applied before."""
        if number >= self._next:
            self._next = number + 1
            for event in decode(payload):
                self._apply(event)

    async def _catch_up(self, context: zmq.asyncio.Context) -> None:
        """Ask for what is due, and take what comes; if nobody answers, nothing that is known counts any more."""
        try:
            await self._ask(context)
        except TimeoutError:
            logger.warning("%s does not replay block events", self._replay_endpoint)
            self._apply(BlocksCleared())

    async def _ask(self, context: zmq.asyncio.Context) -> None:
        """Ask for what is due, and take what comes; on a socket of its own, where no late answer to another comes.

        Raises:
            TimeoutError: nobody answers.
        """
        due, replay = self._next, self._socket(context, zmq.DEALER)
        try:
            replay.connect(self._replay_endpoint)
            async with asyncio.timeout(_REPLAY_S):
                await replay.send_multipart((b"", sequence_bytes(due)))
                async for number, payload in _answers(replay):
                    if number > due == self._next:  # the first, and not the one that is due
                        self._apply(BlocksCleared())
                    self._take(number, payload)
        finally:
            replay.close(linger=0)


async def _answers(replay: zmq.asyncio.Socket) -> Any:
    while (parts := await replay.recv_multipart())[-2] != END:
        yield read_sequence(parts[-2]), parts[-1]
