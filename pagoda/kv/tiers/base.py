"""Tier: a store of records that may lose any of them, and never serves a wrong byte.

    record = RecordId (BlockKey, layer group, shard) -> payload, 8 KiB to a few MiB
             + whose it is (a tag), when it expires, when its lease ends

A tier knows bytes, not blocks, pools or models. Every call takes a batch and answers one typed outcome per record, in
order: a record that is missing, damaged or refused never fails its neighbours. Only a tier that cannot answer at all
raises (`TierUnavailable`). All methods may be called by several threads at once. `lookup`, `scan`, `usage` and
`stats` change nothing, not even recency.

A record whose lease runs is not dropped to make room: a put that would need its room is rejected instead. Only
`delete`, `purge`, damage and crashes remove it. A record that expired is a miss from then on, unless a lease runs, and
its room is taken back as room is needed. Times are Unix seconds, because they outlive the process.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Self

from pagoda.errors import TierUnavailable
from pagoda.kv.keys import OwnerTag
from pagoda.kv.tiers.records import (
    Corrupt,
    DeleteResult,
    Expired,
    Found,
    GetResult,
    LookupResult,
    PutResult,
    Record,
    RecordId,
    RecordInfo,
    Rejected,
    Stored,
    Target,
    Usage,
)


class Tier(ABC):
    """One level of the hierarchy; see the module for the rules every method keeps.

    `is_lossy` says whether a block comes back otherwise than it was put, as its codec says it should. `ttl_s` is how
    long whoever puts records here lets them last; None: until their room is needed. `keeps_leases` says whether the
    tier decides what it drops, so that what it says of leases holds.

    The public methods let calls in while the tier is open and count outcomes; a tier implements the hooks below them,
    one of the same name each.
    """

    is_lossy: bool = False
    ttl_s: float | None = None
    keeps_leases: bool = True

    def __init__(self, name: str) -> None:
        self.name = name
        self._gate = _Gate(name)
        self._tally = Tally()

    def lookup(self, ids: Sequence[RecordId]) -> list[LookupResult]:
        """Which records are there, and their sizes. Reads no payload, so a Found may still turn out Corrupt."""
        with self._gate:
            results = self._lookup(ids)
        if num_expired := sum(isinstance(result, Expired) for result in results):
            self._tally.add("expired", num_expired)
        return results

    def put(self, records: Sequence[Record]) -> list[PutResult]:
        """Store or replace records, dropping colder ones without a lease to make room.

        A replaced record keeps the later of the two leases. Where owners have shares of the tier, whoever is most over
        its own loses first, and nobody loses to another what its share guarantees.
        """
        with self._gate:
            results = self._put(records)
        self._tally.count(results)
        return results

    def get_into(self, targets: Sequence[Target]) -> list[GetResult]:
        """Copy payloads, verified, into the callers' buffers, and mark the records as used."""
        with self._gate:
            results = self._get_into(targets)
        self._tally.count(results)
        return results

    def delete(self, ids: Sequence[RecordId]) -> list[DeleteResult]:
        """Remove records, leased or not."""
        with self._gate:
            results = self._delete(ids)
        self._tally.count(results)
        return results

    def purge(self, owner: OwnerTag) -> int:
        """Remove all records of an owner, leased or not, so that no restart finds them; returns how many there were.

        Raises TierUnavailable if some may still be there.
        """
        with self._gate:
            count = self._purge(owner)
        self._tally.add("purged", count)
        return count

    def set_lease(self, ids: Sequence[RecordId], until: float) -> list[LookupResult]:
        """Set the time before which the tier may not drop these records, earlier or later than before."""
        with self._gate:
            return self._set_lease(ids, until)

    def scan(self) -> Iterator[RecordInfo]:
        """Every record, in no order; one that comes or goes meanwhile may or may not be among them."""
        with self._gate:
            return self._scan()

    def usage(self) -> Usage:
        """How full the tier is now."""
        with self._gate:
            return self._usage()

    def stats(self) -> dict[str, int]:
        """Counts since the tier was opened; absent means zero, and a closed tier still tells.

        Everywhere: stored, stored_bytes, found, found_bytes, missing, expired, deleted, purged, evicted, failed,
        `rejected_<reason>`, `corrupt_<reason>`. A tier may add its own.
        """
        return self._tally.snapshot()

    def close(self) -> None:
        """Wait for calls under way and release everything; later calls raise TierUnavailable, except close."""
        if self._gate.close():
            self._close()

    @abstractmethod
    def _lookup(self, ids: Sequence[RecordId]) -> list[LookupResult]: ...

    @abstractmethod
    def _put(self, records: Sequence[Record]) -> list[PutResult]: ...

    @abstractmethod
    def _get_into(self, targets: Sequence[Target]) -> list[GetResult]: ...

    @abstractmethod
    def _delete(self, ids: Sequence[RecordId]) -> list[DeleteResult]: ...

    @abstractmethod
    def _purge(self, owner: OwnerTag) -> int: ...

    @abstractmethod
    def _set_lease(self, ids: Sequence[RecordId], until: float) -> list[LookupResult]: ...

    @abstractmethod
    def _scan(self) -> Iterator[RecordInfo]: ...

    @abstractmethod
    def _usage(self) -> Usage: ...

    @abstractmethod
    def _close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Tally:
    """Thread-safe counters behind `Tier.stats`; `count` knows the names of the outcomes."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        """Add to one counter."""
        with self._lock:
            self._counts[name] += amount

    def count(self, outcomes: Sequence[PutResult | GetResult | DeleteResult]) -> None:
        """Count the outcomes of a put, get_into or delete."""
        with self._lock:
            for outcome in outcomes:
                match outcome:
                    case Found(num_bytes) | Stored(num_bytes):
                        name = type(outcome).__name__.lower()
                        self._counts[name] += 1
                        self._counts[f"{name}_bytes"] += num_bytes
                    case Rejected(reason):
                        self._counts[f"rejected_{reason.value}"] += 1
                    case Corrupt(word):
                        self._counts[f"corrupt_{word}"] += 1
                    case _:
                        self._counts[type(outcome).__name__.lower()] += 1

    def snapshot(self) -> dict[str, int]:
        """The counts now."""
        with self._lock:
            return dict(self._counts)


class _Gate:
    """Lets calls into an open tier; closing waits for those inside."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._inside = 0
        self._open = True
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            if not self._open:
                raise TierUnavailable(f"the {self._name} tier is closed")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def close(self) -> bool:
        """Shut it and wait until all calls left; whether it was open before."""
        with self._changed:
            was_open, self._open = self._open, False
            self._changed.wait_for(lambda: self._inside == 0)
            return was_open
