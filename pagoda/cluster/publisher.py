"""Publisher: block events from the engine's thread to whoever subscribes, on a thread of its own.

    engine ── emit ──> bounded queue ──> one thread: number, encode ──> PUB socket    a slow reader misses messages,
                                         │  the last N messages                       sees it by their numbers,
                                         └──────────────────────────────> ROUTER      and asks for them here

A reader that asks for more than the last N is told of everything anew, and so are all others. When the engine is faster
than this thread, what does not fit the queue is dropped, and everything told anew. Numbers grow over restarts, so that
no reader takes a new process for the old one; a process's first message says that nothing is cached.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from pagoda.cluster.curve import guard_server
from pagoda.cluster.wire import END, encode, read_sequence, sequence_bytes
from pagoda.errors import ConfigError, WireError
from pagoda.kv.events import BlockEvent, BlocksCleared

logger = logging.getLogger(__name__)

MAX_QUEUED = 10_000  # calls of `emit`
MAX_REPLAY = 10_000  # messages
HIGH_WATER_MARK = 100_000  # messages that wait for a slow reader
_EVENTS_A_MESSAGE = 16  # when everything is told anew, some have a thousand blocks
_TELL_ALL_EVERY_S = 1.0
_NUMBERS_A_SECOND = 1 << 20  # more messages than a process sends, so that its numbers stay behind the next one's


class Publisher:
    """Publishes until it is closed.

    Args:
        endpoint: a ZeroMQ TCP address, such as `tcp://127.0.0.1:5557`; port `*` takes a free one.
        replay_endpoint: likewise, for readers that missed messages.
        tell_all: has the engine tell of everything anew, soon; called on this thread.
        token: only its holders may connect; anyone when None.

    Raises:
        ConfigError: an address cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str,
        *,
        tell_all: Callable[[], None] = lambda: None,
        token: str | None = None,
        max_queued: int = MAX_QUEUED,
        max_replay: int = MAX_REPLAY,
    ) -> None:
        self.tell_all = tell_all
        self.num_dropped = 0
        self._context: zmq.Context[Any] = zmq.Context()
        self._publish = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self._publish.sndhwm = self._replay.sndhwm = HIGH_WATER_MARK
        self.endpoint = _bind(self._context, self._publish, endpoint, token)
        self.replay_endpoint = _bind(self._context, self._replay, replay_endpoint, token)
        self._queue: deque[Sequence[BlockEvent]] = deque()
        self._max_queued = max_queued
        self._number = self._first = int(time.time() * _NUMBERS_A_SECOND)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=max_replay)
        self._has_dropped = False
        self._told_all_at = -_TELL_ALL_EVERY_S
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="pagoda-events", daemon=True)
        self._thread.start()

    @property
    def ports(self) -> dict[str, int]:
        """The TCP ports of both sockets, as a server's /health has them."""
        return {"port": _port(self.endpoint), "replay_port": _port(self.replay_endpoint)}

    def emit(self, events: Sequence[BlockEvent]) -> None:
        """Queue events, one call at a time. Never waits."""
        # What begins by forgetting everything needs nothing that is queued before it, and is never dropped itself.
        if isinstance(events[0], BlocksCleared):
            self._has_dropped = False
        elif len(self._queue) >= self._max_queued or self._has_dropped:
            self.num_dropped += 1
            self._has_dropped = True
            events = ()
        if events:
            self._queue.append(events)
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Send what is queued and let go of the sockets."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        try:
            self._send([BlocksCleared()])
            while not self._stopping:
                ready = dict(poller.poll(None if not self._has_dropped else int(_TELL_ALL_EVERY_S * 1000)))
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                while self._queue:
                    self._send(self._queue.popleft())
                if self._has_dropped:
                    self._ask_for_all()
                if self._replay in ready:
                    self._answer()
            while self._queue:
                self._send(self._queue.popleft())
        except Exception:
            logger.exception("block events are not published any more, after an error")
        finally:
            self._context.destroy(linger=200)

    def _send(self, events: Sequence[BlockEvent]) -> None:
        for start in range(0, len(events), _EVENTS_A_MESSAGE):
            payload = encode(events[start : start + _EVENTS_A_MESSAGE])
            self._sent.append((self._number, payload))
            self._publish.send_multipart((b"", sequence_bytes(self._number), payload))
            self._number += 1

    def _ask_for_all(self) -> None:
        now = time.monotonic()
        if now - self._told_all_at >= _TELL_ALL_EVERY_S:
            self._told_all_at = now
            if self._has_dropped:
                logger.warning("%d calls of the engine were too many: its blocks are told anew", self.num_dropped)
            self.tell_all()

    def _answer(self) -> None:
        """Send again what a reader asks for, from a number on; what is gone is told anew to all."""
        parts = self._replay.recv_multipart()
        try:
            start = read_sequence(parts[-1])
        except WireError as error:
            logger.warning("a reader of block events asked for %s", error)
            return
        reader, delimiter = parts[0], parts[1:-1]
        if start < self._sent[0][0] > self._first:
            self._ask_for_all()
        for number, payload in self._sent:
            if number >= start:
                self._replay.send_multipart((reader, *delimiter, sequence_bytes(number), payload))
        self._replay.send_multipart((reader, *delimiter, END, b""))


def _bind(context: zmq.Context[Any], socket: zmq.Socket[Any], endpoint: str, token: str | None) -> str:
    guard_server(socket, token)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise ConfigError(f"block events cannot be published at {endpoint}: {error}") from None
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.decode().rstrip("\0")


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])
