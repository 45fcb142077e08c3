"""Publisher and subscriber over real sockets: in order, without gaps, whoever comes late or is slow."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import pytest
import zmq
import zmq.asyncio

from pagoda.cluster.publisher import Publisher
from pagoda.cluster.subscriber import Subscriber
from pagoda.cluster.wire import END, encode, sequence_bytes
from pagoda.errors import ConfigError
from pagoda.kv.events import BlockEvent, BlockRemoved, BlocksCleared, BlockStored
from tests.waiting import PATIENCE_S, eventually

ANY = "tcp://127.0.0.1:*"


class Engine:
    """Has blocks, and tells of them through a publisher."""

    def __init__(self, **settings: int | str | None) -> None:
        self.names: list[int] = []
        self.publisher = Publisher(ANY, ANY, tell_all=self.tell_all, **settings)  # type: ignore[arg-type]
        self.num_told_all = 0

    def store(self, *names: int) -> None:
        self.names += names
        self.publisher.emit([BlockStored(names, None, (), 16)])

    def remove(self, *names: int) -> None:
        self.names = [name for name in self.names if name not in names]
        self.publisher.emit([BlockRemoved(names)])

    def tell_all(self) -> None:
        self.num_told_all += 1
        self.publisher.emit([BlocksCleared(), *(BlockStored((name,), None, (), 16) for name in self.names)])


class Reader:
    def __init__(self) -> None:
        self.names: set[int] = set()
        self.told: list[int] = []
        self.num_cleared = 0

    def apply(self, event: BlockEvent) -> None:
        match event:
            case BlockStored(names):
                self.names |= set(names)
                self.told += names
            case BlockRemoved(names):
                self.names -= set(names)
            case BlocksCleared():
                self.num_cleared += 1
                self.names.clear()

    async def until(self, names: Sequence[int]) -> None:
        await eventually(lambda: self.names == set(names))


@contextmanager
def engine(**settings: int | str | None) -> Iterator[Engine]:
    made = Engine(**settings)
    try:
        yield made
    finally:
        made.publisher.close()


async def until_sent(made: Engine, count: int) -> None:
    """The first message of all says that nothing is cached."""
    await eventually(lambda: made.publisher._number - made.publisher._first == count)


@contextmanager
def reading(publisher: Publisher, reader: Reader, token: str | None = None) -> Iterator[Subscriber]:
    subscriber = Subscriber(publisher.endpoint, publisher.replay_endpoint, reader.apply, token=token)
    task = asyncio.create_task(subscriber.run())
    try:
        yield subscriber
    finally:
        task.cancel()


async def test_events_arrive_in_order() -> None:
    with engine() as made:
        reader = Reader()
        with reading(made.publisher, reader):
            made.store(1, 2)
            await reader.until([1, 2])
            made.remove(1)
            made.store(3)
            await reader.until([2, 3])


async def test_who_comes_late_gets_what_was_told_before() -> None:
    with engine() as made:
        made.store(1, 2)
        made.remove(2)
        await until_sent(made, 3)
        reader = Reader()
        with reading(made.publisher, reader):
            await reader.until([1])
        assert made.num_told_all == 0  # the replay had all


async def test_who_comes_too_late_for_the_replay_is_told_everything_anew() -> None:
    with engine(max_replay=4) as made:
        for name in range(20):
            made.store(name)
        await until_sent(made, 21)
        reader = Reader()
        with reading(made.publisher, reader):
            await reader.until(range(20))
        assert made.num_told_all == 1


async def test_a_missed_message_is_asked_for() -> None:
    """Until its subscription has arrived, a reader gets replays alone and can see no gap: every other one is lost."""
    with engine() as made:
        reader, lost, count = Reader(), list[object](), 0
        send = made.publisher._publish.send_multipart
        with reading(made.publisher, reader) as subscriber:
            async with asyncio.timeout(PATIENCE_S):
                while not subscriber.num_gaps:
                    lost.clear()
                    made.publisher._publish.send_multipart = lost.append  # type: ignore[method-assign]
                    made.store(count)
                    await eventually(lambda: bool(lost))
                    made.publisher._publish.send_multipart = send  # type: ignore[method-assign]
                    made.store(count + 1)
                    count += 2
                    await asyncio.sleep(0.01)
            await reader.until(range(count))
            assert reader.told == list(range(count))


def stored(name: int) -> bytes:
    return encode([BlockStored((name,), None, (), 16)])


@asynccontextmanager
async def played_to(reader: Reader) -> AsyncIterator[tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]]:
    """A subscriber to a publisher that the test plays: the sockets that events and answers to questions go out of."""
    context = zmq.asyncio.Context()
    sockets = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets]
    task = asyncio.create_task(Subscriber(*(f"tcp://127.0.0.1:{port}" for port in ports), reader.apply).run())
    try:
        yield sockets
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        context.destroy(linger=0)


async def test_a_late_answer_is_not_taken_for_the_answer_to_a_later_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.cluster.subscriber._REPLAY_S", 0.2)
    reader = Reader()
    async with played_to(reader) as (publishing, replaying):

        async def tell() -> None:
            while True:
                await publishing.send_multipart([b"", sequence_bytes(5), stored(5)])
                await asyncio.sleep(0.01)

        first = await replaying.recv_multipart()
        await eventually(lambda: reader.num_cleared == 1)  # it has given up
        monkeypatch.setattr("pagoda.cluster.subscriber._REPLAY_S", PATIENCE_S)
        telling = asyncio.create_task(tell())
        second = await replaying.recv_multipart()
        await replaying.send_multipart([*first[:-1], END, b""])
        for number in (3, 4):
            await replaying.send_multipart([*second[:-1], sequence_bytes(number), stored(number)])
        await replaying.send_multipart([*second[:-1], END, b""])
        await reader.until([3, 4, 5])
        telling.cancel()


async def test_what_was_lost_last_of_all_is_asked_for_when_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.cluster.subscriber._QUIET_S", 0.05)
    monkeypatch.setattr("pagoda.cluster.subscriber._REPLAY_S", PATIENCE_S)
    reader = Reader()
    async with played_to(reader) as (_, replaying):
        asked = await replaying.recv_multipart()
        await replaying.send_multipart([*asked[:-1], END, b""])
        asked = await replaying.recv_multipart()
        await replaying.send_multipart([*asked[:-1], sequence_bytes(0), stored(7)])
        await replaying.send_multipart([*asked[:-1], END, b""])
        await reader.until([7])


async def test_what_does_not_fit_the_queue_is_told_anew() -> None:
    """An engine faster than the publisher never waits, and nothing wrong stays told."""
    release, blocked = threading.Event(), threading.Event()
    with engine(max_queued=2) as made:
        reader = Reader()
        with reading(made.publisher, reader):
            await reader.until([])
            send = made.publisher._send

            def slow(events: Sequence[BlockEvent]) -> None:
                blocked.set()
                release.wait(PATIENCE_S)
                send(events)

            made.publisher._send = slow  # type: ignore[method-assign]
            made.store(0)
            await asyncio.to_thread(blocked.wait, PATIENCE_S)
            for name in range(1, 10):
                made.store(name)
            made.remove(0)
            assert made.publisher.num_dropped > 0
            release.set()
            await reader.until(range(1, 10))


async def test_a_restarted_engine_is_not_taken_for_the_old_one() -> None:
    """Its numbers go on, so that the reader sees a gap; and its first message says that nothing is cached."""
    with engine() as old:
        old.store(1, 2)
        reader = Reader()
        with reading(old.publisher, reader):
            await reader.until([1, 2])
        next_number = old.publisher._number
    reborn = Publisher(ANY, ANY)  # at another address: what was this one's may be another's by now
    try:
        subscriber = Subscriber(reborn.endpoint, reborn.replay_endpoint, reader.apply)
        subscriber._next = next_number
        task = asyncio.create_task(subscriber.run())
        reborn.emit([BlockStored((9,), None, (), 16)])
        await reader.until([9])
        task.cancel()
    finally:
        reborn.close()


async def test_only_holders_of_the_token_can_read() -> None:
    with engine(token="secret") as made:
        made.store(1)
        friend, stranger, thief = Reader(), Reader(), Reader()
        with (
            reading(made.publisher, stranger),
            reading(made.publisher, thief, token="guess"),
            reading(made.publisher, friend, token="secret"),
        ):
            await friend.until([1])
            await asyncio.sleep(0.1)
            assert not stranger.names
            assert not thief.names


async def test_nonsense_does_not_stop_a_publisher() -> None:
    with engine() as made:
        reader = Reader()
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket, reading(made.publisher, reader):
            socket.connect(made.publisher.replay_endpoint)
            for parts in ([b""], [b"", b"x"], [b"", sequence_bytes(0), b"more"], [b"", b"\xff" * 8]):
                socket.send_multipart(parts)
            assert await asyncio.to_thread(socket.poll, int(1000 * PATIENCE_S))  # the last is answered: it has them all
            made.store(1)
            await reader.until([1])


async def test_nonsense_does_not_stop_a_reader() -> None:
    reader = Reader()
    async with played_to(reader) as (publishing, replaying):
        asked = await replaying.recv_multipart()
        await replaying.send_multipart([*asked[:-1], END, b""])

        async def tell(number: int) -> None:
            await publishing.send_multipart([b"", sequence_bytes(number), stored(number)])

        async with asyncio.timeout(PATIENCE_S):
            while not reader.names:  # it has not subscribed yet
                await tell(0)
                await asyncio.sleep(0.01)
        for parts in ([b"", b"short", b"x"], [b"one part"], [b"", sequence_bytes(1), b"no event"]):
            await publishing.send_multipart(parts)
        await tell(2)
        await reader.until([0, 2])


def test_an_address_that_cannot_be_bound_is_named() -> None:
    with engine() as made, pytest.raises(ConfigError, match=r"127\.0\.0\.1"):
        Publisher(made.publisher.endpoint, ANY)
    with pytest.raises(ConfigError, match="nonsense"):
        Publisher("nonsense", ANY)
