"""The hierarchy alone: what is written where, what comes back in which pieces, and what is not worth loading."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from pagoda.kv import write_queue
from pagoda.kv.fetch import Fetch
from pagoda.kv.hierarchy import Hierarchy, WritePolicy
from pagoda.kv.keys import NO_OWNER, BlockKey, OwnerTag
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.fake import Faults, FaultyTier, MemoryTier
from pagoda.kv.tiers.records import Found, Record, RecordId
from tests.waiting import PATIENCE_S, until

BYTES = 64
THROUGH, BACK = WritePolicy.THROUGH, WritePolicy.BACK
FOREVER = 1000.0


def block_ids(count: int, num_groups: int = 1) -> list[list[RecordId]]:
    return [[RecordId(BlockKey(i.to_bytes(32, "big")), group) for group in range(num_groups)] for i in range(count)]


def owners(count: int) -> list[OwnerTag]:
    return [NO_OWNER] * count


def ids(count: int) -> list[RecordId]:
    return [record for [record] in block_ids(count)]


def payloads(count: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, (count, BYTES), dtype=np.uint8)


def filled(count: int, first: int = 0) -> MemoryTier:
    tier = MemoryTier(1 << 20)
    tier.put([Record(id, data) for id, data in list(zip(ids(count), payloads(count), strict=True))[first:]])
    return tier


def has(tier: Tier, count: int) -> int:
    return sum(isinstance(found, Found) for found in tier.lookup(ids(count)))


def arrived(fetch: Fetch) -> list[np.ndarray]:
    """The payloads of each piece of a fetch, once it is over."""
    assert fetch.done.wait(PATIENCE_S)
    pieces = []
    while not fetch.pieces.empty():
        piece = fetch.pieces.get()
        assert sorted(piece.blocks) == list(range(min(piece.blocks), max(piece.blocks) + 1))
        pieces.append(np.stack([piece.blocks[block][0] for block in sorted(piece.blocks)]))
    return pieces


def assert_came(fetch: Fetch, count: int, of: int) -> None:
    pieces = arrived(fetch)
    got = np.concatenate(pieces) if pieces else np.empty((0, BYTES), dtype=np.uint8)
    assert np.array_equal(got, payloads(of)[:count])


@pytest.fixture
def faults() -> Iterator[Faults]:
    faults = Faults()
    yield faults
    faults.running.set()


def make(*tiers: tuple[Tier, WritePolicy], num_groups: int = 1, timeout_s: float = 10.0) -> Hierarchy:
    return Hierarchy(tiers, block_bytes=BYTES, num_groups=num_groups, timeout_s=timeout_s)


# -- down --------------------------------------------------------------------------------------------------------------


def test_each_policy_writes_its_own_tiers() -> None:
    back, through = MemoryTier(1 << 20), MemoryTier(1 << 20)
    tiers = make((back, BACK), (through, THROUGH))
    tiers.write(THROUGH, ids(3), payloads(3), owners(3))
    assert tiers.flush(PATIENCE_S)
    assert (has(back, 3), has(through, 3)) == (0, 3)
    tiers.write(BACK, ids(2), payloads(2), owners(2))
    assert tiers.flush(PATIENCE_S)
    assert has(back, 3) == 2
    first, second = tiers.reports()
    assert (first.name, first.num_demoted, first.num_stored) == ("memory", 2, 0)
    assert (second.name, second.num_demoted, second.num_stored) == ("memory-2", 0, 3)


def test_no_write_waits_for_a_tier(faults: Faults) -> None:
    slow, fine = FaultyTier(MemoryTier(1 << 20), faults), MemoryTier(1 << 20)
    tiers = make((slow, THROUGH), (fine, THROUGH))
    faults.hang()
    for _ in range(3):
        tiers.write(THROUGH, ids(5), payloads(5), owners(5))
    until(lambda: has(fine, 5) == 5)  # the hung one holds up its own queue only


def test_a_full_queue_skips_and_counts_for_each_tier(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_queue, "_QUEUE_BYTES", 4 * BYTES)
    fine = MemoryTier(1 << 20)
    tiers = make((FaultyTier(MemoryTier(1 << 20), faults), THROUGH), (fine, THROUGH))
    faults.hang()
    assert tiers.room(THROUGH, 3) == 3
    tiers.write(THROUGH, ids(3), payloads(3), owners(3))
    until(lambda: has(fine, 3) == 3 and tiers.room(THROUGH, 9) == 4)
    assert tiers.room(BACK, 5) == 0  # no such tier: nothing to export
    tiers.write(THROUGH, ids(9)[5:], payloads(4), owners(4))
    until(lambda: tiers.reports()[1].num_stored == 7)
    slow, _ = tiers.reports()
    assert slow.num_skipped >= 3 + 5  # of four, one fits; and five never were exported


def test_what_failed_is_tried_again(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.kv.breaker._FIRST_BACKOFF_S", 0.05)
    inner = MemoryTier(1 << 20)
    tiers = make((FaultyTier(inner, faults), THROUGH))
    faults.unavailable = True
    tiers.write(THROUGH, ids(3), payloads(3), owners(3))
    until(lambda: not tiers.is_available)
    faults.unavailable = False
    until(lambda: has(inner, 3) == 3)
    until(lambda: tiers.flush(1))
    assert tiers.reports()[0].num_lost == 0


def test_single_records_that_failed_are_tried_again(faults: Faults) -> None:
    inner = MemoryTier(1 << 20)
    tiers = make((FaultyTier(inner, faults), THROUGH))
    faults.failing = 0.3
    tiers.write(THROUGH, ids(50), payloads(50), owners(50))
    until(lambda: tiers.flush(1))
    [report] = tiers.reports()
    assert report.failures["failed"] > 5
    assert has(inner, 50) == report.num_stored > 45


def test_what_fails_three_times_is_lost_and_counted(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.kv.breaker._FIRST_BACKOFF_S", 0.01)
    tiers = make((FaultyTier(MemoryTier(1 << 20), faults), THROUGH))
    faults.failing = 1.0
    tiers.write(THROUGH, ids(3), payloads(3), owners(3))
    until(lambda: tiers.reports()[0].num_lost == 3)
    assert tiers.reports()[0].failures == {"failed": 9}


def test_closing_waits_for_what_is_queued_but_for_no_hung_tier(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.kv.transfer._CLOSE_S", 0.05)
    inner, fine = MemoryTier(1 << 20), MemoryTier(1 << 20)
    tiers = make((FaultyTier(inner, faults), THROUGH), (fine, THROUGH))
    faults.delay_s = 0.05
    tiers.write(THROUGH, ids(3), payloads(3), owners(3))
    tiers.close(PATIENCE_S)
    assert tiers.reports()[0].num_stored == 3
    faults.delay_s = 0
    faults.hang()
    tiers = make((FaultyTier(MemoryTier(1 << 20), faults), THROUGH))
    tiers.write(THROUGH, ids(3), payloads(3), owners(3))
    fetch = tiers.fetcher.fetch(block_ids(3), FOREVER, FOREVER)
    tiers.close(0.2)  # the tier hangs until the test is over
    fetch.cancelled.set()
    assert fetch.done.wait(PATIENCE_S)


# -- up ----------------------------------------------------------------------------------------------------------------


def test_a_fetch_brings_the_longest_run_in_small_pieces_first() -> None:
    tiers = make((filled(100), BACK))
    fetch = tiers.fetcher.fetch(block_ids(120), FOREVER, FOREVER)
    pieces = arrived(fetch)
    assert [len(piece) for piece in pieces[:2]] == [5, 10]  # then as large as the tier is found to be quick
    assert np.array_equal(np.concatenate(pieces), payloads(100))


def test_tiers_complete_each_other_and_the_first_wins() -> None:
    first, second = filled(10), filled(30, first=5)
    tiers = make((first, BACK), (second, THROUGH))
    assert_came(tiers.fetcher.fetch(block_ids(40), FOREVER, FOREVER), 30, of=30)
    assert [report.num_loaded for report in tiers.reports()] == [10, 20]


def test_a_block_counts_only_with_all_its_groups() -> None:
    tier = MemoryTier(1 << 20)
    data = payloads(1)[0]
    blocks = block_ids(4, num_groups=2)
    tier.put([Record(record, data) for block in blocks[:3] for record in block])
    tier.put([Record(blocks[3][0], data)])
    tiers = make((tier, BACK), num_groups=2)
    fetch = tiers.fetcher.fetch(blocks, FOREVER, FOREVER)
    assert fetch.done.wait(PATIENCE_S)
    assert sum(len(fetch.pieces.get().blocks) for _ in range(fetch.pieces.qsize())) == 3


def test_a_fetch_tells_where_the_first_blocks_are_up_to_the_first_hole() -> None:
    upper, lower = filled(3), filled(10)
    lower.delete(ids(6)[5:])
    tiers = make((upper, BACK), (lower, BACK))
    fetch = tiers.fetcher.fetch(block_ids(10), FOREVER, FOREVER)
    assert fetch.done.wait(PATIENCE_S)
    assert fetch.leading == [*[tiers.lanes[0]] * 3, *[tiers.lanes[1]] * 2]


def test_a_damaged_record_is_a_hole(faults: Faults) -> None:
    inner = filled(20)
    tiers = make((FaultyTier(inner, faults, seed=3), BACK))
    faults.corrupting = 0.2
    fetch = tiers.fetcher.fetch(block_ids(20), FOREVER, FOREVER)
    assert fetch.done.wait(PATIENCE_S)
    came: dict[int, np.ndarray] = {}
    while not fetch.pieces.empty():
        came |= {block: groups[0] for block, groups in fetch.pieces.get().blocks.items()}
    assert all(np.array_equal(payload, payloads(20)[block]) for block, payload in came.items())
    damaged = tiers.reports()[0].failures["corrupt_injected"]
    assert 0 < damaged == fetch.num_failed == 20 - len(came) < 20


def test_a_tier_whose_records_are_all_damaged_is_taken_out(faults: Faults) -> None:
    tiers = make((FaultyTier(filled(20), faults), BACK))
    faults.corrupting = 1.0
    assert_came(tiers.fetcher.fetch(block_ids(20), FOREVER, FOREVER), 0, of=20)
    assert tiers.reports()[0].failures == {"corrupt_injected": 1}
    assert not tiers.is_available


def test_a_record_of_another_size_is_no_hit() -> None:
    tier = MemoryTier(1 << 20)
    tier.put([Record(ids(1)[0], b"short")])
    tiers = make((tier, BACK))
    assert_came(tiers.fetcher.fetch(block_ids(1), FOREVER, FOREVER), 0, of=1)


def test_a_tier_that_is_out_is_passed_over(faults: Faults) -> None:
    tiers = make((FaultyTier(filled(5), faults), BACK), (filled(5), THROUGH))
    faults.unavailable = True
    for _ in range(3):
        assert_came(tiers.fetcher.fetch(block_ids(5), FOREVER, FOREVER), 5, of=5)
    first, second = tiers.reports()
    assert first.failures == {"unavailable": 1}
    assert second.num_loaded == 15


def test_a_load_predicted_to_be_slower_is_not_started() -> None:
    tiers = make((filled(20), BACK))
    [lane] = tiers.lanes
    lane.load_speed.note(BYTES, 1.0)
    assert_came(tiers.fetcher.fetch(block_ids(20), recompute_s=1.0, patience_s=0.05), 0, of=20)
    assert tiers.reports()[0].num_slower == 20
    assert_came(tiers.fetcher.fetch(block_ids(20), recompute_s=FOREVER, patience_s=0.05 * FOREVER), 20, of=20)


def test_only_the_part_that_is_cheaper_is_loaded() -> None:
    tiers = make((filled(10), BACK), (filled(20), THROUGH))
    tiers.lanes[1].load_speed.note(BYTES, 100.0)
    assert_came(tiers.fetcher.fetch(block_ids(20), recompute_s=20.0, patience_s=1.0), 10, of=20)
    assert [report.num_slower for report in tiers.reports()] == [0, 10]


def test_a_tier_that_answers_later_than_patience_lasts_is_not_waited_for() -> None:
    tiers = make((filled(20), BACK))
    tiers.lanes[0].lookup_speed.note(0, 0.2)
    fetch = tiers.fetcher.fetch(block_ids(20), recompute_s=1.0, patience_s=0.05)
    assert fetch.hedged.is_set()
    pieces = arrived(fetch)
    assert np.array_equal(pieces[0][-1], payloads(20)[-1])  # from the back


def test_a_tier_that_answers_later_than_computing_takes_is_not_asked() -> None:
    tiers = make((filled(20), BACK))
    tiers.lanes[0].lookup_speed.note(0, 1.2)
    fetch = tiers.fetcher.fetch(block_ids(20), recompute_s=1.0, patience_s=0.05)
    assert_came(fetch, 0, of=20)
    assert fetch.skipped == ["memory"]
    assert tiers.reports()[0].num_slower == 20


def test_what_arrived_is_bounded_until_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.kv.fetcher._STAGED_BYTES", 10 * BYTES)
    tiers = make((filled(100), BACK))
    fetch = tiers.fetcher.fetch(block_ids(100), FOREVER, FOREVER)
    num_taken = 0
    while not fetch.done.is_set() or not fetch.pieces.empty():
        if fetch.pieces.empty():
            time.sleep(0.002)
            continue
        count = len(fetch.pieces.get().blocks)
        num_taken += count
        assert tiers.fetcher._staged <= max(10, count) * BYTES  # one piece may be larger, alone
        tiers.fetcher.taken(fetch, count)
        fetch.note_front(num_taken)
    assert num_taken == 100
    other = tiers.fetcher.fetch(block_ids(100), FOREVER, FOREVER)
    until(lambda: not other.pieces.empty())
    tiers.fetcher.end(other)
    assert other.done.wait(PATIENCE_S)
    assert tiers.fetcher._staged == 0


def test_a_fetch_that_is_given_up_ends_and_teaches(faults: Faults) -> None:
    tiers = make((FaultyTier(filled(20), faults), BACK))
    faults.hang()
    fetch = tiers.fetcher.fetch(block_ids(20), recompute_s=1.0, patience_s=0.05)
    until(lambda: any(call.started is not None for call in tiers.lanes[0]._running.copy()))
    time.sleep(0.06)
    fetch.cancelled.set()
    assert fetch.done.wait(PATIENCE_S)
    assert fetch.pieces.empty()
    assert tiers.lanes[0].lookup_speed.predict_s(0, 1) > 0.05
    assert tiers.fetcher.fetch(block_ids(20), recompute_s=1.0, patience_s=0.05).hedged.is_set()


def test_hung_fetches_use_a_bounded_number_of_threads_and_others_get_their_turn(faults: Faults) -> None:
    tiers = make((FaultyTier(filled(5), faults), BACK), timeout_s=0.2)
    faults.hang()
    before = set(threading.enumerate())
    fetches = [tiers.fetcher.fetch(block_ids(5), FOREVER, FOREVER) for _ in range(50)]
    assert not set(threading.enumerate()) - before
    assert all(
        fetch.done.wait(PATIENCE_S) for fetch in fetches
    )  # the first time out, the others find the tier taken out
    faults.running.set()
    until(lambda: tiers.lanes[0].is_available)
    tiers.lanes[0].timeout_s = PATIENCE_S
    assert_came(tiers.fetcher.fetch(block_ids(5), FOREVER, FOREVER), 5, of=5)


def test_reports_wait_for_no_tier(faults: Faults) -> None:
    class Stuck(MemoryTier):
        def _usage(self) -> object:  # type: ignore[override]
            return faults.running.wait()

    faults.hang()
    tiers = make((Stuck(100), BACK))
    [report] = tiers.reports()
    assert report.usage is None


def test_threads_end_with_a_hierarchy_that_is_dropped(faults: Faults) -> None:
    before = set(threading.enumerate())
    tier = MemoryTier(1 << 20)
    tiers = make((tier, THROUGH), (FaultyTier(filled(5), faults), BACK))
    tiers.write(THROUGH, ids(3), payloads(3), owners(3))
    assert tiers.flush(PATIENCE_S)
    assert_came(tiers.fetcher.fetch(block_ids(5), FOREVER, FOREVER), 5, of=5)
    started = set(threading.enumerate()) - before
    assert len(started) > 8
    del tiers
    gc.collect()
    for thread in started:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), thread.name
    gone = weakref.ref(tier)
    del tier
    gc.collect()
    assert gone() is None


def test_what_is_queued_waits_while_another_tries_whether_the_tier_is_well(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tier = MemoryTier(1 << 20)
    tiers = make((tier, WritePolicy.THROUGH))
    (lane,) = tiers.lanes
    now = 0.0
    lane.breaker._clock = lambda: now
    lane.breaker.failed()
    now = 100.0
    assert lane.breaker.admit()  # somebody tries, and takes a while
    tiers.write(WritePolicy.THROUGH, ids(2), payloads(2), owners(2))
    tiers.delete(ids(1))
    time.sleep(0.2)
    assert lane.report().num_lost == 0
    assert not caplog.records
    lane.breaker.succeeded()
    until(lambda: tiers.is_idle)
    assert has(tier, 2) == 1
    tiers.close()


def test_nothing_is_kept_for_a_tier_that_is_out_for_good() -> None:
    tiers = make((MemoryTier(1 << 20), WritePolicy.THROUGH))
    tiers.lanes[0].quarantine()
    tiers.write(WritePolicy.THROUGH, ids(2), payloads(2), owners(2))
    tiers.lease(ids(2), time.time() + 60)
    assert tiers.is_idle
    tiers.close()


def test_leases_are_queued_in_bounds_too(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.kv.write_queue._QUEUE_BYTES", 1000)
    tiers = make((FaultyTier(filled(1), faults), WritePolicy.THROUGH))
    faults.hang()
    for _ in range(100):
        tiers.lease(ids(1), time.time() + 60)
    tiers.delete(ids(1))  # what must be done is
    assert sum(writer._queued_bytes for writer in tiers._all_writers) < 1100
    faults.running.set()
    until(lambda: tiers.is_idle)
    assert has(tiers.lanes[0].tier, 1) == 0
    tiers.close()
