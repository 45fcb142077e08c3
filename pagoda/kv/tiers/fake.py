"""Fakes, for tests here and in users' code: a tier in plain memory, and faults around any tier.

FaultyTier(MemoryTier(capacity), faults)        slow, failing, hung, corrupt: change `faults` at any time
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from pagoda.errors import TierError, TierUnavailable
from pagoda.kv.keys import OwnerTag
from pagoda.kv.tiers.accounts import Shares
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.ledger import Entry, Ledger, lru
from pagoda.kv.tiers.records import (
    Corrupt,
    Deleted,
    DeleteResult,
    Expired,
    Failed,
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
from pagoda.kv.tiers.wrapped import WrappedTier


class MemoryTier(Tier):
    """Every rule of a tier in the fewest lines: `bytes` in a ledger, one lock around everything."""

    def __init__(
        self,
        capacity_bytes: int,
        *,
        shares: Shares = MappingProxyType({}),
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__("memory")
        self._ledger: Ledger[bytes] = Ledger(capacity_bytes, lru, shares)
        self._clock = clock
        self._lock = threading.Lock()

    def _lookup(self, ids: Sequence[RecordId]) -> list[LookupResult]:
        with self._lock:
            return [self._find(id) for id in ids]

    def _put(self, records: Sequence[Record]) -> list[PutResult]:
        with self._lock:
            return [self._put_one(record, readable(record.data).tobytes()) for record in records]

    def _get_into(self, targets: Sequence[Target]) -> list[GetResult]:
        with self._lock:
            return [self._get_one(target) for target in targets]

    def _delete(self, ids: Sequence[RecordId]) -> list[DeleteResult]:
        results: list[DeleteResult] = []
        with self._lock:
            for id in ids:
                entry = self._ledger.get(id)
                if entry is not None:
                    self._ledger.remove(entry)
                results.append(Missing() if entry is None else Deleted())
        return results

    def _purge(self, owner: OwnerTag) -> int:
        with self._lock:
            return len(self._ledger.purge(owner))

    def _set_lease(self, ids: Sequence[RecordId], until: float) -> list[LookupResult]:
        with self._lock:
            for id in ids:
                entry = self._ledger.get(id)
                if entry is not None:
                    self._ledger.set_lease(entry, until, self._clock())
            return [self._find(id) for id in ids]

    def _scan(self) -> Iterator[RecordInfo]:
        with self._lock:
            return iter([entry.info for entry in self._ledger])

    def _usage(self) -> Usage:
        with self._lock:
            return self._ledger.usage()

    def _close(self) -> None:
        pass

    def _find(self, id: RecordId) -> LookupResult:
        return found(self._ledger.get(id), self._clock())

    def _put_one(self, record: Record, data: bytes) -> PutResult:
        if len(data) > self._ledger.capacity:
            return Rejected(Reason.TOO_LARGE)
        now = self._clock()
        self._ledger.drop_expired(now)
        victims = self._ledger.reserve(len(data), record.owner, now)
        if victims is None:
            return Rejected(Reason.FULL)
        if victims:
            self._tally.add("evicted", len(victims))
        size, lease = len(data), record.lease_until
        self._ledger.add(Entry(record.id, data, size, size, lease, record.owner, record.expires_at), now)
        return Stored(len(data))

    def _get_one(self, target: Target) -> GetResult:
        out, entry = writable(target.buffer), self._ledger.get(target.id)
        if entry is None:
            return Missing()
        if is_over(entry, self._clock()):
            return Expired()
        if out.size < entry.num_bytes:
            return Rejected(Reason.BUFFER_TOO_SMALL)
        self._ledger.touch(entry)
        out[: entry.num_bytes] = readable(entry.place)
        return Found(entry.num_bytes)


@dataclass(slots=True)
class Faults:
    """What goes wrong; every field may be changed while the tier is in use.

    Attributes:
        delay_s: added to every call.
        bytes_per_s: payload bandwidth of each call.
        failing: share of put and get records that come back Failed; 1.0 is all.
        corrupting: share of reads that come back Corrupt, detected.
        rotting: share of reads that come back Found with one byte changed, undetected, as bad memory would.
        unavailable: every call raises TierUnavailable.
        running: while clear, calls hang; set it to let them go on.
    """

    delay_s: float = 0.0
    bytes_per_s: float = float("inf")
    failing: float = 0.0
    corrupting: float = 0.0
    rotting: float = 0.0
    unavailable: bool = False
    running: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.running.set()

    def hang(self) -> None:
        """Make all calls hang until `running` is set."""
        self.running.clear()


class FaultyTier(WrappedTier):
    """`inner`, with `faults` in front of each call; `sleep` is how its delays pass."""

    def __init__(
        self, inner: Tier, faults: Faults, *, seed: int = 0, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        super().__init__(inner, f"faulty {inner.name}")
        self.faults = faults
        self._random = random.Random(seed)
        self._sleep = sleep

    def _lookup(self, ids: Sequence[RecordId]) -> list[LookupResult]:
        self._suffer(0)
        return super()._lookup(ids)

    def _put(self, records: Sequence[Record]) -> list[PutResult]:
        self._suffer(sum(readable(record.data).size for record in records))
        failed = [self._strikes(self.faults.failing) for _ in records]
        done = iter(self.inner.put([record for record, bad in zip(records, failed, strict=True) if not bad]))
        return [_injected() if bad else next(done) for bad in failed]

    def _get_into(self, targets: Sequence[Target]) -> list[GetResult]:
        sizes = self.inner.lookup([target.id for target in targets])
        self._suffer(sum(size.num_bytes for size in sizes if isinstance(size, Found)))
        return [self._damage(target) for target in targets]

    def _delete(self, ids: Sequence[RecordId]) -> list[DeleteResult]:
        self._suffer(0)
        return super()._delete(ids)

    def _purge(self, owner: OwnerTag) -> int:
        self._suffer(0)
        return super()._purge(owner)

    def _set_lease(self, ids: Sequence[RecordId], until: float) -> list[LookupResult]:
        self._suffer(0)
        return super()._set_lease(ids, until)

    def _scan(self) -> Iterator[RecordInfo]:
        self._suffer(0)
        return super()._scan()

    def _suffer(self, num_bytes: int) -> None:
        self.faults.running.wait()
        if self.faults.unavailable:
            raise TierUnavailable("injected: the tier is gone")
        pause = self.faults.delay_s + num_bytes / self.faults.bytes_per_s
        if pause > 0:
            self._sleep(pause)

    def _strikes(self, share: float) -> bool:
        return share > 0 and self._random.random() < share

    def _damage(self, target: Target) -> GetResult:
        if self._strikes(self.faults.failing):
            return _injected()
        if self._strikes(self.faults.corrupting):
            self.inner.delete([target.id])
            return Corrupt("injected")
        (result,) = self.inner.get_into([target])
        if isinstance(result, Found) and result.num_bytes and self._strikes(self.faults.rotting):
            writable(target.buffer)[self._random.randrange(result.num_bytes)] ^= 1
        return result


def _injected() -> Failed:
    return Failed(TierError("injected: input/output error"))
