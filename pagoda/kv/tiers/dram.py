"""DramTier: records in one slab of host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType

from pagoda.errors import ConfigError
from pagoda.kv.keys import OwnerTag
from pagoda.kv.tiers.accounts import Shares
from pagoda.kv.tiers.arena import Arena, Extent, PageLock
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.ledger import Entry, Ledger, Policy, lru
from pagoda.kv.tiers.records import (
    ByteArray,
    Deleted,
    DeleteResult,
    Expired,
    Found,
    GetResult,
    LookupResult,
    Missing,
    PutResult,
    Reason,
    Record,
    RecordId,
    RecordInfo,
    Rejected,
    Stored,
    Target,
    Usage,
    found,
    is_over,
    readable,
    writable,
)


class DramTier(Tier):
    """Host memory, allocated and touched once, with its own budget and policy.

    The lock guards bookkeeping alone. Copies run outside it, side by side: a put writes granules that nobody else knows
    yet, a get pins its entry so that its granules are not reused under it.

    Args:
        capacity_bytes: budget; rounded down to whole granules.
        granule_bytes: allocation unit; a record wastes half of one on average.
        policy: sort key of eviction, smallest first; may only grow as an entry ages or is used.
        shares: what owners have of the budget.
        page_lock: locks the slab for device copies, such as `cuda_page_lock`.
        clock: Unix seconds.

    Raises ConfigError if the budget is smaller than one granule.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        granule_bytes: int = 16 << 10,
        policy: Policy[Extent] = lru,
        shares: Shares = MappingProxyType({}),
        page_lock: PageLock | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__("dram")
        num_granules = capacity_bytes // granule_bytes
        if num_granules < 1:
            raise ConfigError(f"a dram tier needs {granule_bytes} bytes or more, not {capacity_bytes}")
        self._arena = Arena(num_granules, granule_bytes, page_lock)
        self._ledger: Ledger[Extent] = Ledger(num_granules * granule_bytes, policy, shares)
        self._clock = clock
        self._lock = threading.Lock()

    def _lookup(self, ids: Sequence[RecordId]) -> list[LookupResult]:
        now = self._clock()
        with self._lock:
            return [found(self._ledger.get(id), now) for id in ids]

    def _put(self, records: Sequence[Record]) -> list[PutResult]:
        return [self._put_one(record, readable(record.data)) for record in records]

    def _get_into(self, targets: Sequence[Target]) -> list[GetResult]:
        outs = [writable(target.buffer) for target in targets]
        results: list[GetResult] = [Missing()] * len(targets)
        pinned: list[tuple[Entry[Extent], ByteArray]] = []
        now = self._clock()
        with self._lock:
            for i, (target, out) in enumerate(zip(targets, outs, strict=True)):
                entry = self._ledger.get(target.id)
                if entry is None:
                    continue
                if is_over(entry, now):
                    results[i] = Expired()
                    continue
                if out.size < entry.num_bytes:
                    results[i] = Rejected(Reason.BUFFER_TOO_SMALL)
                    continue
                self._ledger.touch(entry)
                entry.pins += 1
                pinned.append((entry, out[: entry.num_bytes]))
                results[i] = Found(entry.num_bytes)
        for entry, out in pinned:
            self._arena.load(entry.place, out)
        with self._lock:
            for entry, _ in pinned:
                entry.pins -= 1
                if not entry.live and not entry.pins:
                    self._ledger.cancel(entry.cost)
                    self._arena.give(entry.place)
        return results

    def _delete(self, ids: Sequence[RecordId]) -> list[DeleteResult]:
        results: list[DeleteResult] = []
        with self._lock:
            for id in ids:
                entry = self._ledger.get(id)
                if entry is not None:
                    self._ledger.remove(entry)
                    self._reclaim(entry)
                results.append(Missing() if entry is None else Deleted())
        return results

    def _purge(self, owner: OwnerTag) -> int:
        with self._lock:
            removed = self._ledger.purge(owner)
            for entry in removed:
                self._reclaim(entry)
        return len(removed)

    def _set_lease(self, ids: Sequence[RecordId], until: float) -> list[LookupResult]:
        now = self._clock()
        with self._lock:
            entries = [self._ledger.get(id) for id in ids]
            for entry in entries:
                if entry is not None:
                    self._ledger.set_lease(entry, until, now)
            return [found(entry, now) for entry in entries]

    def _scan(self) -> Iterator[RecordInfo]:
        with self._lock:
            return iter([entry.info for entry in self._ledger])

    def _usage(self) -> Usage:
        with self._lock:
            return self._ledger.usage()

    def _close(self) -> None:
        self._arena.close()

    def _put_one(self, record: Record, data: ByteArray) -> PutResult:
        count = self._arena.granules_for(data.size)
        cost = count * self._arena.granule_bytes
        if cost > self._ledger.capacity:
            return Rejected(Reason.TOO_LARGE)
        now = self._clock()
        with self._lock:
            for entry in self._ledger.drop_expired(now):
                self._reclaim(entry)
            victims = self._ledger.reserve(cost, record.owner, now)
            if victims is None:
                return Rejected(Reason.FULL)
            for victim in victims:
                self._arena.give(victim.place)
            granules = self._arena.take(count)
        if victims:
            self._tally.add("evicted", len(victims))
        self._arena.store(granules, data)
        with self._lock:
            entry = Entry(record.id, granules, data.size, cost, record.lease_until, record.owner, record.expires_at)
            former = self._ledger.add(entry, now)
            if former is not None:
                self._reclaim(former)
        return Stored(data.size)

    def _reclaim(self, removed: Entry[Extent]) -> None:
        """Free the granules of a removed entry, unless its last reader will."""
        if not removed.pins:
            self._arena.give(removed.place)
