"""What tiers have is told when it is there, and taken back when it is gone, whatever took it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from pagoda.kv import tier_events
from pagoda.kv.events import BlockEvent, BlockEvents, BlockRemoved, BlocksCleared, BlockStored
from pagoda.kv.keys import BlockKey, KeyChain
from pagoda.kv.lineage import Lineages
from pagoda.kv.tier_events import TierEvents
from pagoda.kv.tiers.fake import Faults, FaultyTier, MemoryTier
from pagoda.kv.tiers.records import Record, RecordId
from pagoda.kv.transfer import Lane
from tests.waiting import until

BYTES = 64


def record(number: int) -> RecordId:
    return RecordId(BlockKey(number.to_bytes(32, "big")))


def in_pool(number: int) -> BlockStored:
    return BlockStored((number,), number - 1 if number else None, (), 16)


class Bench:
    def __init__(self, capacity: int = 1 << 20) -> None:
        self.faults = Faults()
        self.tier = FaultyTier(MemoryTier(capacity), self.faults)
        self.lane = Lane(self.tier)
        self.names: set[int] = set()
        self.events = TierEvents({self.lane: "CPU"}, self.hear)
        [self.watch] = self.events._watches

    def hear(self, look: Callable[[], Sequence[BlockEvent]]) -> None:
        for event in look():
            match event:
                case BlockStored(names, medium="CPU"):
                    assert not self.names & set(names), "told twice"
                    self.names |= set(names)
                case BlockRemoved(names, medium="CPU"):
                    assert self.names >= set(names), "taken back and never told"
                    self.names -= set(names)
                case _:
                    raise AssertionError(event)

    def expect(self, *numbers: int) -> None:
        self.events.expect([(record(number), in_pool(number)) for number in numbers])

    def put(self, *numbers: int) -> None:
        self.tier.put([Record(record(number), np.full(BYTES, number, dtype=np.uint8)) for number in numbers])


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(tier_events, "LOOK_EVERY_S", 3600.0)  # the test looks
    made = Bench()
    yield made
    made.events.close()
    made.lane.close()


def test_a_block_is_told_once_it_is_there(bench: Bench) -> None:
    bench.expect(1, 2, 3)
    bench.watch.look()
    assert bench.names == set()
    bench.put(1, 2, 9)
    bench.watch.look()
    bench.watch.look()
    assert bench.names == {1, 2}
    bench.expect(1)  # restored, say: it is known already
    bench.watch.look()
    bench.put(3)
    bench.watch.look()
    assert bench.names == {1, 2, 3}
    told = [BlockStored((n,), n - 1, (), 16, "CPU") for n in (1, 2, 3)]
    assert all(event in told for event in bench.events.all())
    assert len(bench.events.all()) == 3


def test_what_a_tier_loses_is_taken_back_and_may_come_again(bench: Bench) -> None:
    bench.expect(*range(10))
    bench.put(*range(10))
    bench.watch.look()
    bench.tier.delete([record(3), record(4)])
    bench.watch.look()
    assert bench.names == set(range(10)) - {3, 4}
    bench.expect(3)
    bench.put(3)
    bench.watch.look()
    assert bench.names == set(range(10)) - {4}


def test_all_of_much_is_looked_at_in_some_looks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_events, "_LEAST_LOOKED_AT", 2)
    bench.expect(*range(40))
    bench.put(*range(40))
    bench.watch.look()
    bench.tier.delete([record(n) for n in range(0, 40, 5)])
    for _ in range(tier_events._ROUND_LOOKS + 1):
        bench.watch.look()
    assert bench.names == {n for n in range(40) if n % 5}


def test_what_never_comes_is_forgotten(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.expect(1)
    monkeypatch.setattr(tier_events, "_EXPECTED_S", -1.0)
    bench.watch.look()
    bench.put(1)
    bench.watch.look()
    assert bench.names == set()
    monkeypatch.setattr(tier_events, "MAX_EXPECTED", 5)
    bench.expect(*range(20))
    assert len(bench.watch._expected) == 5


def test_another_model_has_none_of_it(bench: Bench) -> None:
    bench.expect(1, 2)
    bench.put(1)
    bench.watch.look()
    bench.events.forget()
    assert bench.events.all() == []
    bench.put(2)
    bench.watch.look()
    assert bench.names == {1}  # whoever renews the model has everything cleared


@pytest.mark.usefixtures("bench")  # no thread looks
def test_another_model_that_comes_while_a_tier_is_looked_at_has_none_of_it_either() -> None:
    told: list[BlockEvent] = []
    door = BlockEvents(KeyChain(bytes(32), b"secret"), 16, 0, Lineages(16), told.extend)
    lane = Lane(MemoryTier(1 << 20))

    def tell_late(look: Callable[[], Sequence[BlockEvent]]) -> None:
        door.renew(bytes([1]) * 32)
        door.tell(look)

    door.below = events = TierEvents({lane: "CPU"}, tell_late)
    try:
        events.expect([(record(1), in_pool(1))])
        lane.tier.put([Record(record(1), np.zeros(BYTES, dtype=np.uint8))])
        events._watches[0].look()
        assert told == [BlocksCleared()]
        assert events.all() == []
    finally:
        events.close()
        lane.close()


def test_a_tier_that_is_out_is_left_alone_and_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_events, "LOOK_EVERY_S", 0.01)
    made = Bench()
    try:
        made.faults.unavailable = True
        made.expect(1)
        time.sleep(0.05)
        made.faults.unavailable = False
        made.put(1)
        until(lambda: made.names == {1})
    finally:
        made.events.close()
        made.lane.close()
