"""Hierarchy: the tiers below the device, in order. It moves records; it knows neither blocks nor the tree.

    store   every full block, once, to the tiers written through              in the background; bounded, may be skipped
    demote  what the device evicts, to the tiers written back (host memory)   at once: one copy
    fetch   the longest run of consecutive blocks that the tiers have         in the background, piece by piece

Copies between the pool and staging buffers are the caller's, on the engine's thread: no transfer thread ever touches
pool memory, so a hung tier can hold a staging buffer but never a block.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from pagoda.errors import TierUnavailable
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.records import Found, Missing, Record, RecordId, Stored, Target
from pagoda.kv.transfer import Lane

logger = logging.getLogger(__name__)

Payloads = npt.NDArray[np.uint8]
"""uint8 `[num_blocks, num_groups, block_bytes]`: whole blocks of every layer group."""

_PIECE_BYTES = 8 << 20
_QUEUE_BYTES = 256 << 20


class WritePolicy(StrEnum):
    """When a tier gets a block: as soon as it is full, or when the device evicts it."""

    THROUGH = "through"
    BACK = "back"


@dataclass(slots=True)
class HierarchyStats:
    """Blocks since the start, and why fetches ended early."""

    num_stored: int = 0
    num_demoted: int = 0
    num_skipped: int = 0
    num_fetched: int = 0
    num_failed: int = 0
    num_slower: int = 0


@dataclass(slots=True)
class Fetch:
    """A run of blocks on its way. The transfer thread appends pieces; the engine's thread takes them."""

    ids: Sequence[Sequence[RecordId]]
    recompute_s: float
    pieces: queue.SimpleQueue[Payloads] = field(default_factory=queue.SimpleQueue)
    done: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)


class Hierarchy:
    """Ordered tiers, fastest first.

    Args:
        tiers: each with its write policy.
        block_bytes: payload of a record.
        num_groups: records per block position.
    """

    def __init__(self, tiers: Sequence[tuple[Tier, WritePolicy]], *, block_bytes: int, num_groups: int) -> None:
        self.stats = HierarchyStats()
        self.arrived = threading.Event()
        self._block_bytes = block_bytes
        self._num_groups = num_groups
        self.lanes = [Lane(tier) for tier, _ in tiers]
        self._through = [
            lane for lane, (_, policy) in zip(self.lanes, tiers, strict=True) if policy is WritePolicy.THROUGH
        ]
        self._back = [lane for lane, (_, policy) in zip(self.lanes, tiers, strict=True) if policy is WritePolicy.BACK]
        self._writes: queue.SimpleQueue[tuple[list[RecordId], Payloads] | None] = queue.SimpleQueue()
        self._queued_bytes = 0
        self._lock = threading.Lock()
        self._writer = threading.Thread(target=self._write_all, name="pagoda-writer", daemon=True)
        self._writer.start()

    @property
    def writes_through(self) -> bool:
        """Whether `store` does anything."""
        return bool(self._through)

    @property
    def writes_back(self) -> bool:
        """Whether `demote` does anything."""
        return bool(self._back)

    @property
    def is_available(self) -> bool:
        """Whether any tier can be asked now."""
        return any(not lane.breaker.is_open for lane in self.lanes)

    # -- down --------------------------------------------------------------------------------------------------------

    def room_to_store(self, num_records: int) -> int:
        """How many of so many records the write queue has room for; the others are skipped and counted."""
        room = max(0, (_QUEUE_BYTES - self._queued_bytes) // self._block_bytes)
        self.stats.num_skipped += max(0, num_records - room)
        return min(num_records, room)

    def store(self, ids: Sequence[RecordId], payloads: Payloads) -> None:
        """Queue records, uint8 `[len(ids), block_bytes]`, for the tiers written through. The payloads are kept."""
        with self._lock:
            self._queued_bytes += payloads.nbytes
        self._writes.put((list(ids), payloads))

    def _write_all(self) -> None:
        while (job := self._writes.get()) is not None:
            ids, payloads = job
            for lane in self._through:
                self.stats.num_stored += self._put(lane, ids, payloads)
            with self._lock:
                self._queued_bytes -= payloads.nbytes

    def demote(self, ids: Sequence[RecordId], payloads: Payloads) -> None:
        """Put records into the tiers written back, now."""
        for lane in self._back:
            self.stats.num_demoted += self._put(lane, ids, payloads)

    def _put(self, lane: Lane, ids: Sequence[RecordId], payloads: Payloads) -> int:
        def work(tier: Tier) -> int:
            missing = [i for i, found in enumerate(tier.lookup(ids)) if isinstance(found, Missing)]
            results = tier.put([Record(ids[i], payloads[i]) for i in missing])
            return sum(isinstance(result, Stored) for result in results)

        try:
            return lane.call(work)
        except TierUnavailable as error:
            self.stats.num_failed += len(ids)
            logger.warning("%d blocks were not stored: %s", len(ids), error)
            return 0

    def flush(self, timeout_s: float) -> bool:
        """Wait until all queued records are written; false if time ran out."""
        deadline = time.monotonic() + timeout_s
        while self._queued_bytes and time.monotonic() < deadline:
            time.sleep(0.005)
        return not self._queued_bytes

    # -- up ----------------------------------------------------------------------------------------------------------

    def fetch(self, ids: Sequence[Sequence[RecordId]], recompute_s: float) -> Fetch:
        """Start to load the longest run of consecutive blocks, from the first on.

        Args:
            ids: for each block its record in every group.
            recompute_s: seconds that computing all of them would take; a load predicted to take longer is not started.
        """
        fetch = Fetch(ids, recompute_s)
        threading.Thread(target=self._fetch, args=(fetch,), name="pagoda-fetch", daemon=True).start()
        return fetch

    def _fetch(self, fetch: Fetch) -> None:
        try:
            lanes = self._where(fetch)
            position_bytes = self._block_bytes * self._num_groups
            step = max(1, _PIECE_BYTES // position_bytes)
            predicted = sum(
                lane.speed.predict_s(count * position_bytes, -(-count // step))
                for lane, count in Counter(lanes).items()
            )
            if predicted > fetch.recompute_s * len(lanes) / len(fetch.ids):
                self.stats.num_slower += len(lanes)
                return
            start = 0
            while start < len(lanes) and not fetch.cancelled.is_set():
                lane = lanes[start]
                stop = next((i for i in range(start, len(lanes)) if lanes[i] is not lane), len(lanes))
                stop = min(stop, start + step)
                piece = self._load(lane, fetch.ids[start:stop])
                self.stats.num_fetched += len(piece)
                if len(piece):
                    fetch.pieces.put(piece)
                    self.arrived.set()
                if len(piece) < stop - start:
                    self.stats.num_failed += stop - start - len(piece)
                    return
                start = stop
        except TierUnavailable as error:
            self.stats.num_failed += len(fetch.ids)
            logger.warning("a restore ended early: %s", error)
        finally:
            fetch.done.set()
            self.arrived.set()

    def _where(self, fetch: Fetch) -> list[Lane]:
        """The fastest lane that has each block in every group, up to the first block that none has."""
        flat = [record for block in fetch.ids for record in block]
        found: list[Lane | None] = [None] * len(fetch.ids)
        for lane in self.lanes:
            try:
                there = lane.call(lambda tier: tier.lookup(flat))
            except TierUnavailable:
                continue
            for block in range(len(fetch.ids)):
                records = there[block * self._num_groups : (block + 1) * self._num_groups]
                if found[block] is None and all(isinstance(record, Found) for record in records):
                    found[block] = lane
        run = next((i for i, lane in enumerate(found) if lane is None), len(found))
        return [lane for lane in found[:run] if lane is not None]

    def _load(self, lane: Lane, ids: Sequence[Sequence[RecordId]]) -> Payloads:
        """As many leading blocks of `ids` as verify, whole in every group."""
        payloads = np.empty((len(ids), self._num_groups, self._block_bytes), dtype=np.uint8)
        targets = [
            Target(record, payloads[i, group]) for i, block in enumerate(ids) for group, record in enumerate(block)
        ]
        results = lane.call(lambda tier: tier.get_into(targets), num_bytes=lambda _: payloads.nbytes)
        good = [isinstance(result, Found) and result.num_bytes == self._block_bytes for result in results]
        first_bad = next((i for i, fine in enumerate(good) if not fine), len(good))
        return payloads[: first_bad // self._num_groups]

    def close(self, flush_s: float = 10.0) -> None:
        """Write what is queued, for at most `flush_s` seconds, and close the tiers."""
        self.flush(flush_s)
        self._writes.put(None)
        for lane in self.lanes:
            lane.close()
