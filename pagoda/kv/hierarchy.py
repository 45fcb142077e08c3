"""Hierarchy: the tiers below the device, in order. It moves records; it knows neither blocks nor the tree.

    write   full blocks at once (through), or what the device evicts (back) ──> a bounded queue for each tier
    fetch   what the tiers have of a prompt, piece by piece; see fetch.py ──> a few threads for all

Copies between the pool and staging buffers are the caller's, on the engine's thread: no transfer thread ever touches
pool memory, so a hung tier can hold a staging buffer but never a block. And no call here waits for a tier, but
`flush` and `close`.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum

from pagoda.kv.fetcher import Fetcher
from pagoda.kv.frequency import FrequencySketch
from pagoda.kv.keys import OwnerTag
from pagoda.kv.tier_report import TierReport
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.records import RecordId
from pagoda.kv.transfer import ByteRows, Lane
from pagoda.kv.write_queue import Delete, Hold, Purge, SetLease, Writer

logger = logging.getLogger(__name__)


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
        clock: seconds, for all that is predicted and waited for.
    """

    def __init__(
        self,
        tiers: Sequence[tuple[Tier, WritePolicy]],
        *,
        block_bytes: int,
        num_groups: int,
        timeout_s: float = 10.0,
        after_hits: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.arrived = threading.Event()
        self._block_bytes = block_bytes
        self._after_hits = after_hits
        self._uses = FrequencySketch()
        names = _distinct(tier.name for tier, _ in tiers)
        self.lanes = [
            Lane(tier, name=name, timeout_s=timeout_s, clock=clock)
            for (tier, _), name in zip(tiers, names, strict=True)
        ]
        self._writers: dict[WritePolicy, list[Writer]] = {policy: [] for policy in WritePolicy}
        for lane, (_, policy) in zip(self.lanes, tiers, strict=True):
            self._writers[policy].append(Writer(lane, "demoted" if policy is WritePolicy.BACK else "stored"))
        self.fetcher = Fetcher(self.lanes, block_bytes, num_groups, self.arrived, clock)
        # No thread knows the hierarchy, so one that is dropped without `close` goes, and its threads with it.
        self._end_threads = weakref.finalize(self, _end_threads_of, self._all_writers, self.fetcher, self.lanes)
        self._end_threads.atexit = False

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
        self,
        policy: WritePolicy,
        ids: Sequence[RecordId],
        payloads: ByteRows,
        owners: Sequence[OwnerTag],
        above: Lane | None = None,
    ) -> None:
        """Queue records for the tiers written by this policy. The payloads are kept.

        A tier whose queue is full is skipped, and counts that: it is slower than the engine, or out.

        Args:
            owners: whose each record is.
            above: where the records come from: only faster tiers than that get them. None: all.
        """
        for writer in self._writers_of(policy, above):
            writer.offer(ids, payloads, owners)

    def lease(self, ids: Sequence[RecordId], until: float) -> None:
        """Let every tier that has one of the records keep it until that Unix time, whatever else wants its room.

        That is queued behind what was written before; a record that a tier has not is passed over.
        """
        for writer in self._all_writers:
            if not writer.lane.is_quarantined:
                writer.put(SetLease(ids, until))

    def hold(self, lane: Lane, ids: Sequence[RecordId], until: float) -> Hold:
        """Let one tier keep records until a Unix time, behind what was queued before; what has the answer."""
        hold = Hold(ids, until, self.arrived)
        self._writer_of(lane).put(hold)
        return hold

    def write_to(self, lane: Lane, ids: Sequence[RecordId], payloads: ByteRows, owners: Sequence[OwnerTag]) -> None:
        """Queue records for one tier, as many as there is room for. The payloads are kept."""
        self._writer_of(lane).offer(ids, payloads, owners)

    def _writer_of(self, lane: Lane) -> Writer:
        return next(writer for writer in self._all_writers if writer.lane is lane)

    def delete(self, ids: Sequence[RecordId]) -> None:
        """Let every tier delete records, behind what was queued before. Until then `is_idle` is false."""
        for writer in self._all_writers:
            writer.put(Delete(ids))

    def purge(self, owner: OwnerTag) -> Purge:
        """Let every tier delete all records of an owner, behind what was queued before; returns how far that is."""
        purge = Purge(owner, set(self.lanes))
        for writer in self._all_writers:
            writer.put(purge)
        return purge

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued for any tier."""
        return all(writer.is_idle for writer in self._all_writers)

    @property
    def _all_writers(self) -> list[Writer]:
        return [writer for same_policy in self._writers.values() for writer in same_policy]

    def _writers_of(self, policy: WritePolicy, above: Lane | None) -> list[Writer]:
        lanes = self.lanes if above is None else self.lanes[: self.lanes.index(above)]
        return [each for each in self._writers[policy] if each.lane in lanes and not each.lane.is_quarantined]

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
        self._end_threads()
        for lane in self.lanes:
            lane.close()


def _end_threads_of(writers: Sequence[Writer], fetcher: Fetcher, lanes: Sequence[Lane]) -> None:
    for writer in writers:
        writer.end_threads()
    fetcher.end_threads()
    for lane in lanes:
        lane.end_threads()


def _distinct(names: Iterable[str]) -> Iterator[str]:
    """Names for reports: a second disk is disk-2."""
    seen: Counter[str] = Counter()
    for name in names:
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name}-{seen[name]}"
