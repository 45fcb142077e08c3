"""Hierarchy: the tiers below the device, in order. It moves records; it knows neither blocks nor the tree.

    write   full blocks at once (through), or what the device evicts (back) ──> a bounded queue for each tier
    fetch   what the tiers have of a prompt, piece by piece; see fetch.py ──> a few threads for all

Copies between the pool and staging buffers are the caller's, on the engine's thread: no transfer thread ever touches
pool memory, so a hung tier can hold a staging buffer but never a block. And no call here waits for a tier, but
`flush` and `close`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pagoda.errors import TierUnavailable
from pagoda.kv.fetch import Fetcher
from pagoda.kv.frequency import FrequencySketch
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.records import RECORD_ID_BYTES, RecordId
from pagoda.kv.transfer import ByteRows, Lane, TierReport

logger = logging.getLogger(__name__)

_QUEUE_BYTES = 256 << 20
_ATTEMPTS = 3


class WritePolicy(StrEnum):
    """When a tier gets a block: as soon as it is full, or when the device evicts it."""

    THROUGH = "through"
    BACK = "back"


class Hierarchy:
    """Ordered tiers, fastest first.

    Args:
        tiers: each with its write policy.
        block_bytes: payload of a record.
        num_groups: records per block position.
        timeout_s: a call to a tier that takes longer counts as a failure.
        after_hits: tiers that are written through get a block when it was used again so often, not when it is computed.
    """

    def __init__(
        self,
        tiers: Sequence[tuple[Tier, WritePolicy]],
        *,
        block_bytes: int,
        num_groups: int,
        timeout_s: float = 10.0,
        after_hits: int = 0,
    ) -> None:
        self.arrived = threading.Event()
        self._block_bytes = block_bytes
        self._after_hits = after_hits
        self._uses = FrequencySketch()
        names = _distinct(tier.name for tier, _ in tiers)
        self.lanes = [Lane(tier, name=name, timeout_s=timeout_s) for (tier, _), name in zip(tiers, names, strict=True)]
        self._writers: dict[WritePolicy, list[_Writer]] = {policy: [] for policy in WritePolicy}
        for lane, (_, policy) in zip(self.lanes, tiers, strict=True):
            self._writers[policy].append(_Writer(lane, "demoted" if policy is WritePolicy.BACK else "stored"))
        self.fetcher = Fetcher(self.lanes, block_bytes, num_groups, self.arrived)

    @property
    def is_available(self) -> bool:
        """Whether any tier can be asked now."""
        return any(lane.is_available for lane in self.lanes)

    def reports(self) -> list[TierReport]:
        """The figures of each tier. Does not wait for any."""
        return [lane.report() for lane in self.lanes]

    # -- down --------------------------------------------------------------------------------------------------------

    @property
    def is_selective(self) -> bool:
        """Whether uses of blocks decide what is written."""
        return self._after_hits > 0

    def used(self, ids: Sequence[RecordId]) -> list[RecordId]:
        """Count a use of records; returns those that a selective tier now takes and did not before."""
        if not self._after_hits or not ids:
            return []
        counts = self._uses.add([record.key for record in ids])
        return [record for record, count in zip(ids, counts.tolist(), strict=True) if count == self._after_hits + 1]

    def room(self, policy: WritePolicy, num_records: int, above: Lane | None = None) -> int:
        """How many of so many records a tier written by this policy has queue for."""
        writers = self._writers_of(policy, above)
        most = max((writer.num_free_bytes // self._block_bytes for writer in writers), default=0)
        room = min(num_records, most)
        for writer in writers:
            writer.lane.tally.add("skipped", num_records - room)
        return room

    def write(
        self, policy: WritePolicy, ids: Sequence[RecordId], payloads: ByteRows, above: Lane | None = None
    ) -> None:
        """Queue records for the tiers written by this policy. The payloads are kept.

        A tier whose queue is full is skipped, and counts that: it is slower than the engine, or out.

        Args:
            above: where the records come from: only faster tiers than that get them. None: all.
        """
        for writer in self._writers_of(policy, above):
            writer.offer(ids, payloads)

    def lease(self, ids: Sequence[RecordId], until: float) -> None:
        """Let every tier that has one of the records keep it until that Unix time, whatever else wants its room.

        That is queued behind what was written before; a record that a tier has not is passed over.
        """
        for writer in self._all_writers:
            writer.put(_Job(ids, None, until))

    def delete(self, ids: Sequence[RecordId]) -> None:
        """Let every tier delete records, behind what was queued before. Until then `is_idle` is false."""
        for writer in self._all_writers:
            writer.put(_Job(ids, None, None))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued for any tier."""
        return all(writer.is_idle for writer in self._all_writers)

    @property
    def _all_writers(self) -> list[_Writer]:
        return [writer for same_policy in self._writers.values() for writer in same_policy]

    def _writers_of(self, policy: WritePolicy, above: Lane | None) -> list[_Writer]:
        lanes = self.lanes if above is None else self.lanes[: self.lanes.index(above)]
        return [writer for writer in self._writers[policy] if writer.lane in lanes]

    def is_wanted(self, policy: WritePolicy, ids: Sequence[RecordId]) -> list[bool]:
        """Which records were used often enough to be written by this policy."""
        if policy is WritePolicy.BACK or not self._after_hits or not ids:
            return [True] * len(ids)
        counts: list[int] = self._uses.count([record.key for record in ids]).tolist()
        return [count > self._after_hits for count in counts]

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued records are written or their tiers are out; false if time ran out or some are left."""
        deadline = time.monotonic() + timeout_s
        return not [writer for writer in self._all_writers if not writer.flush(deadline)]

    def close(self, flush_s: float = 10.0) -> None:
        """Write what is queued, for at most `flush_s` seconds, and close the tiers. Waits for no tier that hangs."""
        if not self.flush(flush_s):
            logger.warning("some blocks were not written to their tiers before the end")
        for writers in self._writers.values():
            for writer in writers:
                writer.close()
        self.fetcher.close()
        for lane in self.lanes:
            lane.close()


@dataclass(frozen=True, slots=True)
class _Job:
    """Records to write; or, without payloads, those that are leased until then, or deleted."""

    ids: Sequence[RecordId]
    payloads: ByteRows | None
    lease_until: float | None = None

    @property
    def num_bytes(self) -> int:
        """What it takes in a queue."""
        return len(self.ids) * RECORD_ID_BYTES if self.payloads is None else self.payloads.nbytes


class _Writer:
    """The bounded write queue of a lane, and the thread that empties it.

    While the tier is out, what is queued waits for it. What fails is tried again, three times in all.
    """

    def __init__(self, lane: Lane, counted_as: str) -> None:
        self.lane = lane
        self._counted_as = counted_as
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        threading.Thread(target=self._run, name=f"pagoda-writer-{lane.name}", daemon=True).start()

    @property
    def is_idle(self) -> bool:
        """Whether the queue is empty."""
        return not self._queued_bytes

    @property
    def num_free_bytes(self) -> int:
        """What the queue has room for."""
        return max(0, _QUEUE_BYTES - self._queued_bytes)

    def offer(self, ids: Sequence[RecordId], payloads: ByteRows) -> None:
        """Queue as many of the records, from the first on, as there is room for."""
        room = min(len(ids), self.num_free_bytes // payloads.shape[1])
        self.lane.tally.add("skipped", len(ids) - room)
        if room:
            self.put(_Job(ids[:room], payloads[:room]))

    def put(self, job: _Job) -> None:
        """Queue a job, bounded or not."""
        with self._changed:
            self._queued_bytes += job.num_bytes
        self._jobs.put(job)

    def flush(self, deadline: float) -> bool:
        """Wait until the queue is empty, the tier is out or the time is over; whether it is empty."""
        with self._changed:
            while self._queued_bytes and self.lane.is_available and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left, 0.1))
            return not self._queued_bytes

    def close(self) -> None:
        """End the thread; what is queued is lost."""
        self._closing.set()
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closing.is_set():
            if not self._do(job) and job.payloads is not None:
                self.lane.tally.add("lost", len(job.ids))
            with self._changed:
                self._queued_bytes -= job.num_bytes
                self._changed.notify_all()

    def _do(self, job: _Job) -> bool:
        for _ in range(_ATTEMPTS):
            while not self.lane.is_available:
                if self._closing.wait(0.05):
                    return False
            try:
                if job.payloads is None:
                    if job.lease_until is None:
                        self.lane.delete(job.ids)
                    else:
                        self.lane.set_lease(job.ids, job.lease_until)
                    return True
                num_stored, num_failed = self.lane.store(job.ids, job.payloads)
            except TierUnavailable as error:
                logger.warning("%d blocks were not stored, leased or deleted: %s", len(job.ids), error)
                continue
            self.lane.tally.add(self._counted_as, num_stored)
            if not num_failed:
                return True
        return False


def _distinct(names: Iterable[str]) -> Iterator[str]:
    """Names for reports: a second disk is disk-2."""
    seen: Counter[str] = Counter()
    for name in names:
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name}-{seen[name]}"
