"""Lanes: each tier with threads of its own, a memory of its speed, and a circuit breaker.

    engine thread ──> writer dram ──┐
                  ──> fetch ────────┴─> lane dram   [thread, thread] ──> tier.lookup / put / get_into
                  ──> fetch ──────────> lane redis  [thread, thread]

A tier that hangs blocks its own lane only. A lane that fails or hangs is taken out for a while, longer each time, then
tried again by one call; meanwhile everything it has is a miss. All threads are daemons: no tier can keep the process
from ending.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pagoda.errors import TierError, TierUnavailable
from pagoda.kv.breaker import Breaker, BreakerState
from pagoda.kv.keys import OwnerTag
from pagoda.kv.speed import Speed
from pagoda.kv.tier_report import TierReport
from pagoda.kv.tiers.base import Tally, Tier
from pagoda.kv.tiers.records import (
    NO_EXPIRY,
    Corrupt,
    Expired,
    Failed,
    Found,
    GetResult,
    LookupResult,
    Missing,
    PutResult,
    Record,
    RecordId,
    Stored,
    Target,
    Usage,
    readable,
)
from pagoda.kv.workers import Workers

logger = logging.getLogger(__name__)

T = TypeVar("T")

_GLANCE_S = 0.02
_CLOSE_S = 2.0
_USAGE_PAUSE = 20
_SHARE_SMOOTHING = 0.3
_LOAD_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, float("inf"))

ByteRows = npt.NDArray[np.uint8]
"""uint8 `[num_records, block_bytes]`."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call; `started` is None while it waits for a thread."""

    started: float | None = None


class Lane:
    """One tier and the threads that talk to it.

    Args:
        tier: where records are.
        name: how it is called in reports; the tier's own name by default.
        num_threads: calls under way at once.
        timeout_s: a call that takes longer counts as a failure; while it goes on, the lane is out.
        clock: seconds, for speed and breaker.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        name: str | None = None,
        num_threads: int = 2,
        timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = tier
        self.name = name or tier.name
        self.timeout_s = timeout_s
        self.lookup_speed = Speed(clock)
        self.load_speed = Speed(clock)
        self.found_share = 0.0  # of what was looked up lately; a new tier is believed to be empty
        self.breaker = Breaker(clock)
        self.tally = Tally()
        self._is_quarantined = False
        self._clock = clock
        self._workers = Workers(num_threads, f"pagoda-{self.name}")
        self._running: set[_Call] = set()
        self._lock = threading.Lock()
        self._load_buckets = [0] * len(_LOAD_BUCKETS_S)
        self._load_seconds = 0.0
        self._usage: Usage | None = None
        self._usage_worker = Workers(1, f"pagoda-usage-{self.name}")
        self._usage_is_due_at = 0.0
        self._asking_usage = self._usage_worker.submit(self._ask_usage)

    @property
    def state(self) -> BreakerState:
        """Open too while a call hangs, and for good once the tier gave wrong KV."""
        return BreakerState.OPEN if self._is_quarantined or self._is_hung else self.breaker.state

    @property
    def is_available(self) -> bool:
        """Whether it is not out: a call may be tried, or is being tried."""
        return self.state is not BreakerState.OPEN

    @property
    def is_ready(self) -> bool:
        """Whether a call would be made now, and not refused because another finds out whether the tier is well."""
        return self.is_available and self.breaker.is_ready

    @property
    def is_quarantined(self) -> bool:
        """Whether it is out for good."""
        return self._is_quarantined

    def quarantine(self) -> None:
        """Take the tier out until the process ends: it gave back, in good order, what was never the right KV."""
        self._is_quarantined = True
        self.tally.add("failure_audit")

    @property
    def _is_hung(self) -> bool:
        with self._lock:
            oldest = min((call.started for call in self._running if call.started is not None), default=None)
        return oldest is not None and self._clock() - oldest > self.timeout_s

    # -- what is asked of the tier; all raise TierUnavailable ---------------------------------------------------------

    def lookup(self, ids: Sequence[RecordId], given_up: threading.Event) -> list[LookupResult]:
        """Which records are there."""
        results = self._call(lambda tier: tier.lookup(ids), given_up, self.lookup_speed, 0)
        self.breaker.succeeded()
        self.tally.add("expired", sum(isinstance(result, Expired) for result in results))
        share = sum(isinstance(result, Found) for result in results) / max(1, len(results))
        self.found_share += _SHARE_SMOOTHING * (share - self.found_share)
        return results

    def load(self, targets: Sequence[Target], given_up: threading.Event) -> list[GetResult]:
        """Read records. If none could be read, and not for being absent, that is a failure of the tier."""
        num_bytes = sum(readable(target.buffer).size for target in targets)
        results = self._call(lambda tier: tier.get_into(targets), given_up, self.load_speed, num_bytes)
        self.tally.add("loaded", self._note(results))
        return results

    def store(self, ids: Sequence[RecordId], payloads: ByteRows, owners: Sequence[OwnerTag]) -> tuple[int, int]:
        """Put the records that are not there yet, to last as long as the tier has them last; returns how many were
        stored, and how many to try again later.
        """
        expires_at = NO_EXPIRY if self.tier.ttl_s is None else time.time() + self.tier.ttl_s

        def work(tier: Tier) -> list[PutResult]:
            new = [i for i, found in enumerate(tier.lookup(ids)) if isinstance(found, Missing)]
            records = [Record(ids[i], payloads[i], owner=owners[i], expires_at=expires_at) for i in new]
            return tier.put(records) if records else []

        results = self._call(work, threading.Event())
        return self._note(results), sum(isinstance(result, Failed) for result in results)

    def set_lease(self, ids: Sequence[RecordId], until: float) -> list[LookupResult]:
        """Let the tier keep those of the records that it has until a Unix time; which those are."""
        results = self._call(lambda tier: tier.set_lease(ids, until), threading.Event())
        self.breaker.succeeded()
        return results

    def delete(self, ids: Sequence[RecordId]) -> None:
        """Delete those of the records that the tier has. If some may still be there, that is a failure of the tier."""
        results = self._call(lambda tier: tier.delete(ids), threading.Event())
        if num_failed := sum(isinstance(result, Failed) for result in results):
            self._fail("failed")
            raise TierUnavailable(f"the {self.name} tier failed to delete {num_failed} records")
        self.breaker.succeeded()

    def purge(self, owner: OwnerTag) -> int:
        """Delete all records of an owner; returns how many there were."""
        count = self._call(lambda tier: tier.purge(owner), threading.Event())
        self.breaker.succeeded()
        return count

    def forget(self, ids: Sequence[RecordId]) -> None:
        """Delete records, whatever the state of the tier. Does not wait."""
        self._workers.submit(lambda: self.tier.delete(ids))

    def _note(self, results: Sequence[GetResult | PutResult]) -> int:
        """Count outcomes and feed the breaker; returns how many were good."""
        good = 0
        for result in results:
            match result:
                case Stored() | Found():
                    good += 1
                case Failed():
                    self.tally.add("failure_failed")
                case Corrupt(why):
                    self.tally.add(f"failure_corrupt_{why}")
                case Expired():
                    self.tally.add("expired")
                case Missing():
                    self.tally.add("failure_missing")
                case _:
                    self.tally.add(f"failure_rejected_{result.reason.value}")
        if results and all(isinstance(result, Failed | Corrupt) for result in results):
            self.breaker.failed()
        else:
            self.breaker.succeeded()
        return good

    # -- calls -------------------------------------------------------------------------------------------------------

    def _call(
        self,
        work: Callable[[Tier], T],
        given_up: threading.Event,
        speed: Speed | None = None,
        num_bytes: int = 0,
    ) -> T:
        """Run `work` on one of the lane's threads and wait for it, until `given_up`, which is nobody's failure.

        What came back is the caller's to judge: it tells the breaker.
        """
        if self._is_quarantined or self._is_hung or not self.breaker.admit():
            raise TierUnavailable(f"the {self.name} tier is taken out for a while")
        call = _Call()
        future = self._workers.submit(lambda: self._timed(call, work, speed, num_bytes))
        deadline = self._clock() + self.timeout_s
        while not future.done():
            wait([future], timeout=_GLANCE_S)
            if future.done():
                break
            if given_up.is_set():
                future.cancel()
                self.breaker.abandoned()
                if speed is not None and call.started is not None:
                    speed.note_at_least(num_bytes, self._clock() - call.started)
                raise TierUnavailable(f"the {self.name} tier was not waited for")
            if self._clock() > deadline:
                future.cancel()
                self._fail("timeout")
                raise TierUnavailable(f"the {self.name} tier did not answer in {self.timeout_s:g} s")
        try:
            return future.result()
        except (TierError, OSError) as error:
            self._fail("unavailable")
            raise TierUnavailable(f"the {self.name} tier failed: {error}") from error
        except Exception as error:
            logger.exception("the %s tier raised what no tier may raise", self.name)
            self._fail("unavailable")
            raise TierUnavailable(f"the {self.name} tier failed: {error!r}") from error

    def _fail(self, reason: str) -> None:
        self.breaker.failed()
        self.tally.add(f"failure_{reason}")

    def _timed(self, call: _Call, work: Callable[[Tier], T], speed: Speed | None, num_bytes: int) -> T:
        """On a lane's thread: what a call takes is learned even if nobody waits for it any more."""
        started = call.started = self._clock()
        with self._lock:
            self._running.add(call)
        try:
            result = work(self.tier)
        finally:
            with self._lock:
                self._running.remove(call)
        seconds = self._clock() - started
        if speed is not None:
            speed.note(num_bytes, seconds)
        if speed is self.lookup_speed:  # to load nothing would take as long: this tells latency from bandwidth
            self.load_speed.note_latency(seconds)
        if num_bytes:
            with self._lock:
                self._load_buckets[bisect_left(_LOAD_BUCKETS_S, seconds)] += 1
                self._load_seconds += seconds
        return result

    # -- reports -----------------------------------------------------------------------------------------------------

    def _ask_usage(self) -> None:
        """Some tiers count all their records for this: the longer that takes, the more seldom they are asked."""
        started = time.monotonic()
        self._usage = self.tier.usage()
        now = time.monotonic()
        self._usage_is_due_at = now + _USAGE_PAUSE * (now - started)

    def report(self) -> TierReport:
        """The tier's figures. Waits for nothing: usage is what the tier said when last asked, and it is asked anew."""
        if self._asking_usage.done() and self.is_available and time.monotonic() >= self._usage_is_due_at:
            self._asking_usage = self._usage_worker.submit(self._ask_usage)
        counts = self.tally.snapshot()
        with self._lock:
            buckets = tuple(zip(_LOAD_BUCKETS_S, self._load_buckets, strict=True))
            seconds = self._load_seconds
        return TierReport(
            name=self.name,
            state=self.state,
            is_quarantined=self._is_quarantined,
            usage=self._usage,
            num_stored=counts.get("stored", 0),
            num_demoted=counts.get("demoted", 0),
            num_skipped=counts.get("skipped", 0),
            num_lost=counts.get("lost", 0),
            num_loaded=counts.get("loaded", 0),
            num_slower=counts.get("slower", 0),
            num_late=counts.get("late", 0),
            num_expired=counts.get("expired", 0),
            num_unused=counts.get("unused", 0),
            num_restored_tokens=counts.get("restored_tokens", 0),
            num_prefetched_tokens=counts.get("prefetched_tokens", 0),
            failures={
                name.removeprefix("failure_"): count for name, count in counts.items() if name.startswith("failure_")
            },
            load_seconds=buckets,
            load_seconds_sum=seconds,
        )

    def end_threads(self) -> None:
        """Let the threads end; waits for none, and takes no lock: garbage collection may call it anywhere."""
        self._workers.close()
        self._usage_worker.close()

    def close(self) -> None:
        """Close the tier, waiting for it a moment; one that hangs is left to the end of the process."""
        self.end_threads()
        closing = threading.Thread(target=self.tier.close, name=f"pagoda-close-{self.name}", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        if closing.is_alive():
            logger.warning("the %s tier hangs and was not closed", self.name)
