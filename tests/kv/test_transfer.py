"""Lanes over a faulty tier: what is learned, what is refused, and that nothing that hangs holds anybody for long."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from pagoda.errors import TierUnavailable
from pagoda.kv.breaker import Breaker, BreakerState
from pagoda.kv.keys import NO_OWNER, BlockKey
from pagoda.kv.speed import Speed
from pagoda.kv.tiers.fake import Faults, FaultyTier, MemoryTier
from pagoda.kv.tiers.records import Corrupt, Failed, Found, LookupResult, Missing, RecordId, Target
from pagoda.kv.transfer import Lane
from pagoda.kv.workers import Workers
from tests.waiting import PATIENCE_S, until

BYTES = 64
NEVER = threading.Event()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def ids(count: int) -> list[RecordId]:
    return [RecordId(BlockKey(bytes([i]) * 32)) for i in range(count)]


def payloads(count: int) -> np.ndarray:
    return np.arange(count * BYTES, dtype=np.uint8).reshape(count, BYTES)


def state_of(breaker: Breaker) -> BreakerState:
    return breaker.state  # a property that mypy believes to stay as it was


@pytest.fixture
def faults() -> Iterator[Faults]:
    faults = Faults()
    yield faults
    faults.running.set()


def lane_of(faults: Faults, timeout_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> Lane:
    return Lane(FaultyTier(MemoryTier(1 << 20), faults), timeout_s=timeout_s, clock=clock)


# -- speed -------------------------------------------------------------------------------------------------------------


def test_speed_tells_latency_from_bandwidth_once_sizes_differ() -> None:
    speed = Speed(Clock())
    assert speed.predict_s(1000, 1) == 0  # nothing known: worth a try
    for num_bytes in (1000, 100_000, 20_000, 500_000):
        speed.note(num_bytes, 0.1 + num_bytes * 1e-6)
    assert speed.predict_s(50_000, 1) == pytest.approx(0.15)
    assert speed.predict_s(50_000, 5) == pytest.approx(0.55)


def test_lookups_tell_latency_but_only_beside_loads() -> None:
    clock = Clock()
    speed = Speed(clock)
    speed.note_latency(0.1)
    assert speed.predict_s(1000, 1) == 0  # still nothing known of loads
    for _ in range(2):
        speed.note(1000, 0.2)
        speed.note_latency(0.1)
    assert speed.predict_s(2000, 1) == pytest.approx(0.3)
    clock.now += 20
    speed.note_latency(0.1)
    clock.now += 20
    assert speed.predict_s(2000, 1) == 0  # lookups keep no old load alive


def test_speed_of_calls_of_one_size_is_never_too_hopeful() -> None:
    speed = Speed(Clock())
    for _ in range(5):
        speed.note(1000, 0.1)
    assert speed.predict_s(10, 1) == pytest.approx(0.1)  # it may all be latency
    assert speed.predict_s(2000, 1) == pytest.approx(0.2)  # it may all be bandwidth


def test_speed_follows_a_change_and_forgets() -> None:
    clock = Clock()
    speed = Speed(clock)
    for _ in range(10):
        speed.note(1000, 0.001)
    for _ in range(10):
        speed.note(1000, 0.1)
    assert speed.predict_s(1000, 1) == pytest.approx(0.1, rel=0.05)
    clock.now += 31
    assert speed.predict_s(1000, 1) == 0
    speed.note(1000, 0.002)
    assert speed.predict_s(1000, 1) == pytest.approx(0.002)


def test_what_has_not_ended_yet_teaches_only_bad_news() -> None:
    speed = Speed(Clock())
    speed.note(0, 0.5)
    speed.note_at_least(0, 0.1)
    assert speed.predict_s(0, 1) == pytest.approx(0.5)
    speed.note_at_least(0, 2.0)
    assert speed.predict_s(0, 1) > 0.5


# -- breaker -----------------------------------------------------------------------------------------------------------


def test_a_breaker_waits_longer_each_time_and_lets_one_call_try() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for backoff_s in (1, 2, 4, 8, 16, 32, 60, 60):
        assert breaker.admit()
        breaker.failed()
        clock.now += backoff_s - 0.01
        assert state_of(breaker) is BreakerState.OPEN
        assert not breaker.admit()
        clock.now += 0.02
        assert state_of(breaker) is BreakerState.HALF_OPEN
    assert breaker.admit()
    assert not breaker.admit()
    breaker.succeeded()
    assert state_of(breaker) is BreakerState.CLOSED
    breaker.failed()
    clock.now += 1.01
    assert state_of(breaker) is BreakerState.HALF_OPEN  # from the start again


def test_one_outage_seen_by_many_calls_is_one_failure() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(20):
        breaker.failed()
    clock.now += 1.01
    assert state_of(breaker) is BreakerState.HALF_OPEN


def test_an_abandoned_try_leaves_the_try_to_the_next() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    breaker.failed()
    clock.now += 1.01
    assert breaker.admit()
    breaker.abandoned()
    assert breaker.admit()


# -- lanes -------------------------------------------------------------------------------------------------------------


def test_records_go_down_once_and_come_back(faults: Faults) -> None:
    lane = lane_of(faults)
    assert lane.store(ids(3), payloads(3), [NO_OWNER] * 3) == (3, 0)
    assert lane.store(ids(4), payloads(4), [NO_OWNER] * 4) == (1, 0)  # three are there
    assert lane.lookup(ids(5), NEVER) == [Found(BYTES)] * 4 + [Missing()]
    out = np.zeros((4, BYTES), dtype=np.uint8)
    assert lane.load([Target(id, row) for id, row in zip(ids(4), out, strict=True)], NEVER) == [Found(BYTES)] * 4
    assert np.array_equal(out, payloads(4))
    report = lane.report()
    assert report.num_loaded == 4
    assert sum(count for _, count in report.load_seconds) == 1
    assert report.load_seconds_sum > 0
    assert report.failures == {}
    until(lambda: (usage := lane.report().usage) is not None and usage.num_records == 4)


@pytest.mark.parametrize(
    ("kind", "opens"), [(Failed, True), (Corrupt, True), (Missing, False)], ids=["failed", "corrupt", "missing"]
)
def test_a_batch_of_nothing_but_errors_opens_the_breaker(faults: Faults, kind: type, opens: bool) -> None:
    lane = lane_of(faults)
    lane.store(ids(4), payloads(4), [NO_OWNER] * 4)
    faults.failing, faults.corrupting = float(kind is Failed), float(kind is Corrupt)
    wanted = ids(9)[5:] if kind is Missing else ids(4)
    out = np.zeros((4, BYTES), dtype=np.uint8)
    results = lane.load([Target(id, row) for id, row in zip(wanted, out, strict=True)], NEVER)
    assert all(isinstance(result, kind) for result in results)
    assert (lane.state is BreakerState.OPEN) == opens
    assert sum(lane.report().failures.values()) == 4


def test_each_batch_of_errors_makes_the_next_pause_longer(faults: Faults) -> None:
    clock = Clock()
    lane = lane_of(faults, clock=clock)
    faults.failing = 1.0
    assert lane.store(ids(2), payloads(2), [NO_OWNER] * 2) == (0, 2)
    clock.now += 1.01
    assert lane.store(ids(2), payloads(2), [NO_OWNER] * 2) == (0, 2)
    clock.now += 1.01
    assert lane.state is BreakerState.OPEN
    clock.now += 1.0
    assert lane.is_available


def test_a_batch_with_one_error_does_not_open_it(faults: Faults) -> None:
    lane = lane_of(faults)
    lane.store(ids(4), payloads(4), [NO_OWNER] * 4)
    inner = lane.tier.inner  # type: ignore[attr-defined]
    inner.delete(ids(1))
    out = np.zeros((4, BYTES), dtype=np.uint8)
    lane.load([Target(id, row) for id, row in zip(ids(4), out, strict=True)], NEVER)
    assert lane.is_available


def test_a_tier_that_is_gone_is_not_asked_again_until_it_is_time(faults: Faults) -> None:
    clock = Clock()
    lane = lane_of(faults, clock=clock)
    faults.unavailable = True
    with pytest.raises(TierUnavailable, match="failed"):
        lane.lookup(ids(1), NEVER)
    faults.unavailable = False
    with pytest.raises(TierUnavailable, match="taken out"):
        lane.lookup(ids(1), NEVER)
    clock.now += 1.01
    assert lane.lookup(ids(1), NEVER) == [Missing()]
    assert lane.state is BreakerState.CLOSED
    assert lane.report().failures == {"unavailable": 1}


def test_an_error_that_no_tier_may_raise_is_a_failure_too(faults: Faults, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MemoryTier):
        def _lookup(self, ids: Sequence[RecordId]) -> list[LookupResult]:
            raise ZeroDivisionError

    lane = Lane(Broken(100))
    with pytest.raises(TierUnavailable):
        lane.lookup(ids(1), NEVER)
    assert not lane.is_available
    assert "no tier may raise" in caplog.text


def test_a_hung_call_takes_the_lane_out_until_it_ends(faults: Faults) -> None:
    lane = lane_of(faults, timeout_s=0.1)
    faults.hang()
    with pytest.raises(TierUnavailable, match="did not answer"):
        lane.lookup(ids(1), NEVER)
    lane.breaker.succeeded()  # whatever the breaker says
    assert lane.state is BreakerState.OPEN
    with pytest.raises(TierUnavailable, match="taken out"):
        lane.lookup(ids(1), NEVER)
    faults.running.set()
    until(lambda: lane.is_available)
    lane.timeout_s = PATIENCE_S
    assert lane.lookup(ids(1), NEVER) == [Missing()]


def test_giving_up_is_quick_and_no_failure_but_teaches(faults: Faults) -> None:
    lane = lane_of(faults)
    faults.hang()
    given_up = threading.Event()

    def give_up() -> None:
        until(lambda: any(call.started is not None for call in lane._running.copy()))
        time.sleep(0.05)
        given_up.set()

    threading.Thread(target=give_up).start()
    with pytest.raises(TierUnavailable, match="not waited for"):
        lane.lookup(ids(1), given_up)
    assert lane.is_available
    assert lane.report().failures == {}
    assert lane.lookup_speed.predict_s(0, 1) >= 0.03


def test_closing_does_not_wait_for_a_hung_call(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.kv.transfer._CLOSE_S", 0.05)
    lane = lane_of(faults, timeout_s=0.05)
    faults.hang()
    with pytest.raises(TierUnavailable):
        lane.lookup(ids(1), NEVER)
    lane.close()  # the call hangs until the test is over


def test_a_cancelled_job_never_runs_and_a_failed_one_hurts_no_worker() -> None:
    workers = Workers(1, "test")
    go, ran = threading.Event(), []
    first = workers.submit(go.wait)
    second = workers.submit(lambda: ran.append(2))
    third = workers.submit(lambda: 1 // 0)
    fourth = workers.submit(lambda: 4)
    assert second.cancel()
    go.set()
    assert first.result(PATIENCE_S)
    with pytest.raises(ZeroDivisionError):
        third.result(PATIENCE_S)
    assert fourth.result(PATIENCE_S) == 4
    assert ran == []


def test_a_process_ends_although_a_tier_hangs() -> None:
    program = """
import threading
from pagoda.kv.tiers.fake import Faults, FaultyTier, MemoryTier
from pagoda.kv.transfer import Lane
faults = Faults()
faults.hang()
lane = Lane(FaultyTier(MemoryTier(100), faults), timeout_s=0.05)
try:
    lane.lookup([], threading.Event())
except Exception as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert "did not answer" in done.stdout
