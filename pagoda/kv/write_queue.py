"""What is written to a tier, in order: a bounded queue, and the thread that empties it.

    Write      new records                       given up when the tier failed three times: a miss, later
    SetLease   until when records are kept       the same
    Hold       the same, and which are there     the same
    Delete     these records                     ─┐ tried until it is done: nobody may find them again
    Purge      all records of an owner           ─┘

While the tier is out, what is queued waits for it; if it is out for good, what must be done does.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagoda.errors import TierUnavailable
from pagoda.kv.keys import OWNER_BYTES, OwnerTag
from pagoda.kv.tiers.records import RECORD_ID_BYTES, Found, RecordId
from pagoda.kv.transfer import ByteRows, Lane

logger = logging.getLogger(__name__)

_QUEUE_BYTES = 256 << 20
_ATTEMPTS = 3


class Job(Protocol):
    """What a writer does for a lane; `num_bytes` is what it takes in the queue."""

    @property
    def num_bytes(self) -> int:
        """What it takes in the queue."""

    @property
    def num_lost(self) -> int:
        """Records that are lost if it is given up; 0 if there are none."""

    @property
    def must_be_done(self) -> bool:
        """Whether it is tried until it succeeds."""

    def do(self, lane: Lane) -> bool:
        """Do it; whether it is done. Raises TierUnavailable."""


@dataclass(frozen=True, slots=True)
class Write:
    """Records to store; `counted_as` names the lane's counter."""

    ids: Sequence[RecordId]
    payloads: ByteRows
    owners: Sequence[OwnerTag]
    counted_as: str
    must_be_done = False

    @property
    def num_bytes(self) -> int:
        """See Job."""
        return int(self.payloads.nbytes)

    @property
    def num_lost(self) -> int:
        """See Job."""
        return len(self.ids)

    def do(self, lane: Lane) -> bool:
        """See Job."""
        num_stored, num_failed = lane.store(self.ids, self.payloads, self.owners)
        lane.tally.add(self.counted_as, num_stored)
        return not num_failed


class _OfNames:
    """A Job on records that are there already: their ids are all it has in the queue, and nothing is lost with it."""

    __slots__ = ()
    ids: Sequence[RecordId]
    num_lost = 0
    must_be_done = False

    @property
    def num_bytes(self) -> int:
        """See Job."""
        return len(self.ids) * RECORD_ID_BYTES


@dataclass(frozen=True, slots=True)
class SetLease(_OfNames):
    """Records to keep until a Unix time, of those that are there."""

    ids: Sequence[RecordId]
    until: float

    def do(self, lane: Lane) -> bool:
        """See Job."""
        lane.set_lease(self.ids, self.until)
        return True


@dataclass(eq=False, slots=True)
class Hold(_OfNames):
    """Records to keep until a Unix time.

    Attributes:
        answered: set once it is known which are there.
        found: for each record whether it is; None until then, and for good if the tier failed.
    """

    ids: Sequence[RecordId]
    until: float
    answered: threading.Event
    found: list[bool] | None = None

    def do(self, lane: Lane) -> bool:
        """See Job."""
        self.found = [isinstance(result, Found) for result in lane.set_lease(self.ids, self.until)]
        self.answered.set()
        return True


@dataclass(frozen=True, slots=True)
class Delete(_OfNames):
    """Records to delete."""

    ids: Sequence[RecordId]
    must_be_done = True

    def do(self, lane: Lane) -> bool:
        """See Job."""
        lane.delete(self.ids)
        return True


@dataclass(eq=False, slots=True)
class Purge:
    """All records of an owner to delete from several tiers, and how far that is.

    Attributes:
        waiting: tiers that may still have some.
        counts: records that each of the others had.
    """

    owner: OwnerTag
    waiting: set[Lane]
    counts: dict[str, int] = field(default_factory=dict)
    num_bytes = OWNER_BYTES
    num_lost = 0
    must_be_done = True

    def do(self, lane: Lane) -> bool:
        """See Job."""
        self.counts[lane.name] = lane.purge(self.owner)
        self.waiting.discard(lane)
        return True


class Writer:
    """The write queue of a lane and the thread that empties it.

    Args:
        counted_as: the lane's counter of what was written.
    """

    def __init__(self, lane: Lane, counted_as: str) -> None:
        self.lane = lane
        self._counted_as = counted_as
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._is_ending = False
        threading.Thread(target=self._run, name=f"pagoda-writer-{lane.name}", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        """Whether the queue is empty."""
        return not self._queued_bytes

    @property
    def num_free_bytes(self) -> int:
        """What the queue has room for."""
        return max(0, _QUEUE_BYTES - self._queued_bytes)

    def offer(self, ids: Sequence[RecordId], payloads: ByteRows, owners: Sequence[OwnerTag]) -> None:
        """Queue as many of the records, from the first on, as there is room for."""
        room = min(len(ids), self.num_free_bytes // payloads.shape[1])
        self.lane.tally.add("skipped", len(ids) - room)
        if room:
            self.put(Write(ids[:room], payloads[:room], owners[:room], self._counted_as))

    def put(self, job: Job) -> None:
        """Queue a job. Where the queue is full, one that need not be done is dropped."""
        with self._changed:
            if not job.must_be_done and self._queued_bytes + job.num_bytes > _QUEUE_BYTES:
                return
            self._queued_bytes += job.num_bytes
        self._jobs.put(job)

    def flush(self, deadline: float) -> bool:
        """Wait until the queue is empty, the tier is out or the time is over; whether it is empty."""
        with self._changed:
            while self._queued_bytes and self.lane.is_available and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, 0.1))
            return not self._queued_bytes

    def end_threads(self) -> None:
        """Let the thread end; what is queued is lost. Waits for nothing and takes no lock, as `Lane.end_threads`."""
        self._is_ending = True
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._is_ending:
            if not self._do(job):
                self.lane.tally.add("lost", job.num_lost)
            with self._changed:
                self._queued_bytes -= job.num_bytes
                self._changed.notify_all()
            del job  # or its payloads would stay until the next one comes

    def _do(self, job: Job) -> bool:
        for attempt in itertools.count(1):
            while not self.lane.is_ready:
                if self._is_ending or (self.lane.is_quarantined and not job.must_be_done):
                    return False
                time.sleep(0.05)
            try:
                if job.do(self.lane):
                    return True
            except TierUnavailable as error:
                logger.warning("blocks were not stored, leased or deleted: %s", error)
            if attempt >= _ATTEMPTS and not job.must_be_done:
                break
        return False
