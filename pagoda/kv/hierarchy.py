"""Hierarchy: the tiers below the device, in order. It moves records; it knows neither blocks nor the tree.

    write   full blocks at once (through), or what the device evicts (back) ──> a bounded queue for each tier
    fetch   the longest run of consecutive blocks that the tiers have, piece by piece ──> a few threads for all

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
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby

import numpy as np
import numpy.typing as npt

from pagoda.errors import TierUnavailable
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.records import Found, RecordId, Target
from pagoda.kv.transfer import ByteRows, Lane, TierReport, Workers

logger = logging.getLogger(__name__)

Payloads = npt.NDArray[np.uint8]
"""uint8 `[num_blocks, num_groups, block_bytes]`: whole blocks of every layer group."""

_PIECE_BYTES = 8 << 20
_QUEUE_BYTES = 256 << 20
_FETCH_THREADS = 8
_ATTEMPTS = 3
_FIRST_PIECE = 1 / 20


class WritePolicy(StrEnum):
    """When a tier gets a block: as soon as it is full, or when the device evicts it."""

    THROUGH = "through"
    BACK = "back"


@dataclass(frozen=True, slots=True)
class Piece:
    """Some consecutive blocks that arrived."""

    lane: Lane
    payloads: Payloads


@dataclass(slots=True)
class Fetch:
    """A run of blocks on its way. A fetch thread appends pieces; the engine's thread takes them."""

    ids: Sequence[Sequence[RecordId]]
    recompute_s: float
    patience_s: float
    pieces: queue.SimpleQueue[Piece] = field(default_factory=queue.SimpleQueue)
    done: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)


class Hierarchy:
    """Ordered tiers, fastest first.

    Args:
        tiers: each with its write policy.
        block_bytes: payload of a record.
        num_groups: records per block position.
        timeout_s: a call to a tier that takes longer counts as a failure.
    """

    def __init__(
        self,
        tiers: Sequence[tuple[Tier, WritePolicy]],
        *,
        block_bytes: int,
        num_groups: int,
        timeout_s: float = 10.0,
    ) -> None:
        self.arrived = threading.Event()
        self._block_bytes = block_bytes
        self._num_groups = num_groups
        names = _distinct(tier.name for tier, _ in tiers)
        self.lanes = [Lane(tier, name=name, timeout_s=timeout_s) for (tier, _), name in zip(tiers, names, strict=True)]
        self._writers: dict[WritePolicy, list[_Writer]] = {policy: [] for policy in WritePolicy}
        for lane, (_, policy) in zip(self.lanes, tiers, strict=True):
            self._writers[policy].append(_Writer(lane, "demoted" if policy is WritePolicy.BACK else "stored"))
        self._fetchers = Workers(_FETCH_THREADS, "pagoda-fetch")

    @property
    def is_available(self) -> bool:
        """Whether any tier can be asked now."""
        return any(lane.is_available for lane in self.lanes)

    def reports(self) -> list[TierReport]:
        """The figures of each tier. Does not wait for any."""
        return [lane.report() for lane in self.lanes]

    # -- down --------------------------------------------------------------------------------------------------------

    def room(self, policy: WritePolicy, num_records: int) -> int:
        """How many of so many records a tier written by this policy has queue for; none if there is no such tier."""
        writers = self._writers[policy]
        most = max((writer.num_free_bytes // self._block_bytes for writer in writers), default=0)
        room = min(num_records, most)
        for writer in writers:
            writer.lane.tally.add("skipped", num_records - room)
        return room

    def write(self, policy: WritePolicy, ids: Sequence[RecordId], payloads: ByteRows) -> None:
        """Queue records for the tiers written by this policy. The payloads are kept.

        A tier whose queue is full is skipped, and counts that: it is slower than the engine, or out.
        """
        for writer in self._writers[policy]:
            writer.offer(ids, payloads)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued records are written or their tiers are out; false if time ran out or some are left."""
        deadline = time.monotonic() + timeout_s
        writers = [writer for same_policy in self._writers.values() for writer in same_policy]
        return not [writer for writer in writers if not writer.flush(deadline)]

    # -- up ----------------------------------------------------------------------------------------------------------

    def fetch(self, ids: Sequence[Sequence[RecordId]], recompute_s: float, patience_s: float) -> Fetch:
        """Start to load the longest run of consecutive blocks, from the first on.

        Args:
            ids: for each block its record in every group.
            recompute_s: seconds that computing all of them would take; of a load, only the part predicted to take
                less is started.
            patience_s: seconds that the first piece may take, looking up included.
        """
        fetch = Fetch(ids, recompute_s, patience_s)
        self._fetchers.submit(lambda: self._fetch(fetch))
        return fetch

    def _fetch(self, fetch: Fetch) -> None:
        started = time.monotonic()
        try:
            lanes = self._where(fetch)
            worth = self._worth_loading(fetch, lanes, time.monotonic() - started)
            for lane, count in Counter(lanes[worth:]).items():
                lane.tally.add("slower", count)
            for lane, start, stop in self._pieces(lanes[:worth]):
                if fetch.cancelled.is_set():
                    return
                payloads = self._load(lane, fetch, start, stop)
                if len(payloads):
                    fetch.pieces.put(Piece(lane, payloads))
                    self.arrived.set()
                if len(payloads) < stop - start:
                    return
        except TierUnavailable as error:
            logger.debug("a restore ended early: %s", error)
        except Exception:
            logger.exception("a restore failed")
        finally:
            fetch.done.set()
            self.arrived.set()

    def _where(self, fetch: Fetch) -> list[Lane]:
        """The fastest lane that has each block in every group, up to the first block that none has.

        A lane whose answer would use up the patience is not asked.
        """
        flat = [record for block in fetch.ids for record in block]
        found: list[Lane | None] = [None] * len(fetch.ids)
        for lane in self.lanes:
            if fetch.cancelled.is_set() or all(found):
                break
            if lane.lookup_speed.predict_s(0, 1) > fetch.patience_s:
                lane.tally.add("slower", len(fetch.ids))
                continue
            try:
                there = lane.lookup(flat, fetch.cancelled)
            except TierUnavailable:
                continue
            for block in range(len(fetch.ids)):
                records = there[block * self._num_groups : (block + 1) * self._num_groups]
                if found[block] is None and all(isinstance(record, Found) for record in records):
                    found[block] = lane
        run = next((i for i, lane in enumerate(found) if lane is None), len(found))
        return [lane for lane in found[:run] if lane is not None]

    def _worth_loading(self, fetch: Fetch, lanes: Sequence[Lane], spent_s: float) -> int:
        """How many leading blocks to load: where most time is saved, or none if nothing would arrive in time."""
        recompute_s = fetch.recompute_s / len(fetch.ids)
        best, best_gain, gain = 0, 0.0, -spent_s
        for number, (lane, start, stop) in enumerate(self._pieces(lanes)):
            load_s = lane.load_speed.predict_s((stop - start) * self._num_groups * self._block_bytes, 1)
            if number == 0 and spent_s + load_s > fetch.patience_s:
                return 0
            gain += (stop - start) * recompute_s - load_s
            if gain > best_gain:
                best, best_gain = stop, gain
        return best

    def _pieces(self, lanes: Sequence[Lane]) -> Iterator[tuple[Lane, int, int]]:
        """Cut blocks into loads: small ones first, so that something arrives before patience ends, then doubling.

        Yields the lane, and the first block and the one after the last.
        """
        most = max(1, _PIECE_BYTES // (self._block_bytes * self._num_groups))
        step = min(most, max(1, int(len(lanes) * _FIRST_PIECE)))
        start = 0
        for lane, run in groupby(lanes):
            end = start + sum(1 for _ in run)
            while start < end:
                stop = min(end, start + step)
                yield lane, start, stop
                start, step = stop, min(most, 2 * step)

    def _load(self, lane: Lane, fetch: Fetch, start: int, stop: int) -> Payloads:
        """As many of these blocks, from the first on, as verify, whole in every group."""
        payloads = np.empty((stop - start, self._num_groups, self._block_bytes), dtype=np.uint8)
        targets = [
            Target(record, payloads[i, group])
            for i, block in enumerate(fetch.ids[start:stop])
            for group, record in enumerate(block)
        ]
        results = lane.load(targets, fetch.cancelled)
        good = [isinstance(result, Found) and result.num_bytes == self._block_bytes for result in results]
        first_bad = next((i for i, fine in enumerate(good) if not fine), len(good))
        return payloads[: first_bad // self._num_groups]

    def close(self, flush_s: float = 10.0) -> None:
        """Write what is queued, for at most `flush_s` seconds, and close the tiers. Waits for no tier that hangs."""
        if not self.flush(flush_s):
            logger.warning("some blocks were not written to their tiers before the end")
        for writers in self._writers.values():
            for writer in writers:
                writer.close()
        self._fetchers.close()
        for lane in self.lanes:
            lane.close()


class _Writer:
    """The bounded write queue of a lane, and the thread that empties it.

    While the tier is out, what is queued waits for it. What fails is tried again, three times in all.
    """

    def __init__(self, lane: Lane, counted_as: str) -> None:
        self.lane = lane
        self._counted_as = counted_as
        self._jobs: queue.SimpleQueue[tuple[Sequence[RecordId], ByteRows] | None] = queue.SimpleQueue()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        threading.Thread(target=self._run, name=f"pagoda-writer-{lane.name}", daemon=True).start()

    @property
    def num_free_bytes(self) -> int:
        """What the queue has room for."""
        return max(0, _QUEUE_BYTES - self._queued_bytes)

    def offer(self, ids: Sequence[RecordId], payloads: ByteRows) -> None:
        """Queue as many of the records, from the first on, as there is room for."""
        room = min(len(ids), self.num_free_bytes // payloads.shape[1])
        self.lane.tally.add("skipped", len(ids) - room)
        if room:
            with self._changed:
                self._queued_bytes += payloads[:room].nbytes
            self._jobs.put((ids[:room], payloads[:room]))

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
            ids, payloads = job
            if not self._write(ids, payloads):
                self.lane.tally.add("lost", len(ids))
            with self._changed:
                self._queued_bytes -= payloads.nbytes
                self._changed.notify_all()

    def _write(self, ids: Sequence[RecordId], payloads: ByteRows) -> bool:
        for _ in range(_ATTEMPTS):
            while not self.lane.is_available:
                if self._closing.wait(0.05):
                    return False
            try:
                num_stored, num_failed = self.lane.store(ids, payloads)
            except TierUnavailable as error:
                logger.warning("%d blocks were not stored: %s", len(ids), error)
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
