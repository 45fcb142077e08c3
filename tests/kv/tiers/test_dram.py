"""The slab: granules, pieces, pins, policies."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pagoda.errors import ConfigError
from pagoda.kv.keys import NO_OWNER
from pagoda.kv.tiers.arena import Arena, Extent
from pagoda.kv.tiers.dram import DramTier
from pagoda.kv.tiers.ledger import Entry, Ledger, lfu, lru
from pagoda.kv.tiers.records import Found, Missing, Reason, Rejected, Stored, Target
from tests.kv.tiers.kit import KIB, Clock, get, record, rid, tag


def test_a_slab_smaller_than_a_granule_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="4096 bytes or more, not 4095"):
        DramTier(4095, granule_bytes=4096)


def test_the_budget_counts_whole_granules() -> None:
    tier = DramTier(40_000, granule_bytes=4 * KIB)
    tier.put([record(1, 4097), record(2, 1)])
    usage = tier.usage()
    assert (usage.capacity_bytes, usage.used_bytes, usage.payload_bytes) == (9 * 4 * KIB, 3 * 4 * KIB, 4098)


def test_lru_is_exact() -> None:
    tier = DramTier(32 * KIB, granule_bytes=4 * KIB)
    tier.put([record(n) for n in range(4)])
    get(tier, rid(0))
    tier.put([record(4), record(5)])
    assert [r != Missing() for r in tier.lookup([rid(n) for n in range(6)])] == [True, False, False, True, True, True]


def test_lfu_keeps_what_is_read_often() -> None:
    tier = DramTier(32 * KIB, granule_bytes=4 * KIB, policy=lfu)
    tier.put([record(n) for n in range(4)])
    for number in (0, 0, 1, 2, 3, 3):
        get(tier, rid(number))
    tier.put([record(4)])
    assert [r != Missing() for r in tier.lookup([rid(n) for n in range(5)])] == [True, False, True, True, True]


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 12_288, 20_000])
def test_scattered_granules_hold_the_same_bytes_as_one_piece(size: int) -> None:
    arena = Arena(16, 4 * KIB)
    data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    whole, out = arena.take(arena.granules_for(size)), np.zeros(size, dtype=np.uint8)
    scattered = arena.extent(np.array([11, 3, 15, 7, 9][: arena.granules_for(size)]))
    assert whole.piece is not None
    for extent in (whole, scattered):
        arena.store(extent, data)
        out[:] = 0
        arena.load(extent, out)
        np.testing.assert_array_equal(out, data)


def test_granules_freed_whole_come_back_in_one_piece() -> None:
    arena = Arena(64, 4 * KIB)
    runs = [arena.take(8) for _ in range(8)]
    for run in (runs[5], runs[2], runs[7]):
        arena.give(run)
    for _ in range(3):
        assert arena.take(8).piece is not None


def test_a_reader_keeps_its_granules_while_the_record_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow read of a record that is meanwhile deleted, with the tier filled up behind it."""
    tier = DramTier(32 * KIB, granule_bytes=4 * KIB)
    tier.put([record(n) for n in range(4)])
    reading, go_on = threading.Event(), threading.Event()
    load = tier._arena.load

    def slow_load(extent: Extent, out: np.ndarray) -> None:
        reading.set()
        go_on.wait()
        load(extent, out)

    monkeypatch.setattr(tier._arena, "load", slow_load)
    buffer = bytearray(8 * KIB)
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.extend(tier.get_into([Target(rid(0), buffer)])))
    thread.start()
    reading.wait()
    tier.delete([rid(0)])
    assert tier.usage().used_bytes == 32 * KIB
    assert tier.put([record(n) for n in range(10, 13)]) == [Stored(8 * KIB)] * 3
    assert tier.put([record(20, 32 * KIB)]) == [Rejected(Reason.FULL)]
    go_on.set()
    thread.join()
    assert results == [Found(8 * KIB)]
    assert bytes(buffer) == record(0).data
    assert tier.put([record(20, 32 * KIB)]) == [Stored(32 * KIB)]


def test_the_page_lock_is_taken_once_and_given_back_at_close() -> None:
    calls: list[object] = []

    def page_lock(memory: np.ndarray) -> object:
        calls.append(memory.nbytes)
        return lambda: calls.append("unlocked")

    tier = DramTier(64 * KIB, granule_bytes=4 * KIB, page_lock=page_lock)
    tier.close()
    tier.close()
    assert calls == [64 * KIB, "unlocked"]


def test_stale_heap_items_are_swept() -> None:
    ledger: Ledger[None] = Ledger(1 << 20, lru)
    for number in range(5000):
        assert ledger.reserve(1, NO_OWNER, 0.0) == []
        ledger.add(Entry(rid(number % 7), None, 1, 1, 0.0, expires_at=9.0), 0.0)
    assert ledger.usage().used_bytes == 7
    assert len(ledger._evictable[0]) <= 2 * 7 + 65
    assert len(ledger._expiring) <= 2 * 7 + 65


def test_what_expired_goes_before_what_was_used_longest_ago() -> None:
    clock = Clock()
    tier = DramTier(32 * KIB, granule_bytes=4 * KIB, clock=clock)
    tier.put([record(0), record(1, expires_at=clock.now + 5), record(2, expires_at=clock.now + 5), record(3)])
    tier.set_lease([rid(2)], clock.now + 60)
    get(tier, rid(1))
    clock.now += 5
    tier.put([record(4)])
    assert [r != Missing() for r in tier.lookup([rid(n) for n in range(5)])] == [True, False, True, True, True]
    assert tier.stats().get("evicted", 0) == 0
    tier.set_lease([rid(2)], 0.0)
    clock.now += 60
    tier.put([record(5)])
    assert [r != Missing() for r in tier.lookup([rid(n) for n in range(6)])] == [True, False, False, True, True, True]


def test_a_purge_waits_for_no_reader_and_gives_its_granules_back_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DramTier(32 * KIB, granule_bytes=4 * KIB)
    tier.put([record(n, owner=tag("a")) for n in range(4)])
    load = tier._arena.load

    def load_and_purge(extent: Extent, out: np.ndarray) -> None:
        monkeypatch.undo()
        assert tier.purge(tag("a")) == 4
        assert tier.usage().used_bytes == 8 * KIB
        load(extent, out)

    monkeypatch.setattr(tier._arena, "load", load_and_purge)
    assert get(tier, rid(0), 8 * KIB) == (Found(8 * KIB), record(0).data)
    assert tier.usage().used_bytes == 0
    assert tier.put([record(20, 32 * KIB)]) == [Stored(32 * KIB)]
