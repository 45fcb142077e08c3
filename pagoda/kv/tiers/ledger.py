"""Ledger: which records a memory tier holds, what they cost, and which go first.

    index      id -> Entry
    evictable  heap of (policy key when pushed, entry)      leased  heap of (lease_until, entry)

Each entry has one valid heap item (`ticket`), placed as the entry was when last looked at; a key that has grown since
is noticed when the item comes to the top (lazy heaps: a hit costs no heap operation). Policy keys may only grow.
Not thread-safe: its tier holds a lock around each call.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from pagoda.kv.tiers.records import RecordId, RecordInfo

Place = TypeVar("Place")


@dataclass(slots=True, eq=False)
class Entry(Generic[Place]):
    """A record in memory.

    Attributes:
        place: where its payload is; the tier's business.
        cost: bytes of budget it takes.
        pins: copies that are reading it; while there are any, its place is not reused.
        ticket: which heap item stands for it; others are stale.
        live: it is in the index; a dead entry's place is freed by its last reader.
    """

    id: RecordId
    place: Place
    num_bytes: int
    cost: int
    lease_until: float
    last_used: int = 0
    num_hits: int = 0
    pins: int = 0
    ticket: int = 0
    live: bool = False

    @property
    def info(self) -> RecordInfo:
        """What others may know of it."""
        return RecordInfo(self.id, self.num_bytes, self.lease_until)


Policy = Callable[[Entry[Place]], float]


def lru(entry: Entry[Place]) -> float:
    """Least recently used goes first."""
    return entry.last_used


def lfu(entry: Entry[Place]) -> float:
    """Least often used goes first; of equals the earlier stored."""
    return entry.num_hits


class Ledger(Generic[Place]):
    """Index, budget and eviction order over `capacity` bytes."""

    def __init__(self, capacity: int, policy: Policy[Place]) -> None:
        self.capacity = capacity
        self.payload_bytes = 0
        self._policy = policy
        self._used = 0
        self._index: dict[RecordId, Entry[Place]] = {}
        self._evictable: list[tuple[float, int, Entry[Place]]] = []
        self._leased: list[tuple[float, int, Entry[Place]]] = []
        self._tick = count(1)

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[Entry[Place]]:
        return iter(self._index.values())

    @property
    def used(self) -> int:
        """Bytes of budget taken: live entries, reservations, and dead entries that are still being read."""
        return self._used

    def get(self, id: RecordId) -> Entry[Place] | None:
        """The entry of `id`, or None if it is not here."""
        return self._index.get(id)

    def touch(self, entry: Entry[Place]) -> None:
        """Mark `entry` as used now."""
        entry.last_used = next(self._tick)
        entry.num_hits += 1

    def reserve(self, cost: int, now: float) -> list[Entry[Place]] | None:
        """Take `cost` bytes of budget; the entries evicted for it, or None, and no change, if leases and readers
        leave too little.
        """
        shortfall = self._used + cost - self.capacity
        victims: list[Entry[Place]] = []
        pinned: list[Entry[Place]] = []
        while shortfall > 0:
            entry = self._pop_coldest(now)
            if entry is None:
                break
            if entry.pins:
                pinned.append(entry)
            else:
                victims.append(entry)
                shortfall -= entry.cost
        for entry in pinned if shortfall <= 0 else pinned + victims:
            self._push(entry, now)
        if shortfall > 0:
            return None
        for entry in victims:
            self._unlink(entry)
            self._used -= entry.cost
        self._used += cost
        return victims

    def cancel(self, cost: int) -> None:
        """Give back a reservation, or the budget of a dead entry whose last reader left."""
        self._used -= cost

    def add(self, entry: Entry[Place], now: float) -> Entry[Place] | None:
        """Put `entry`, whose cost was reserved, in the index; the entry it replaces, if any, as `remove` leaves it."""
        former = self._index.get(entry.id)
        if former is not None:
            entry.lease_until = max(entry.lease_until, former.lease_until)
            self.remove(former)
        entry.live, entry.last_used = True, next(self._tick)
        self._index[entry.id] = entry
        self.payload_bytes += entry.num_bytes
        self._push(entry, now)
        return former

    def remove(self, entry: Entry[Place]) -> None:
        """Take `entry` out of the index, and its cost out of the budget unless it is still being read."""
        self._unlink(entry)
        if not entry.pins:
            self._used -= entry.cost
        if len(self._evictable) + len(self._leased) > 2 * len(self._index) + 64:
            self._evictable = [item for item in self._evictable if _valid(item)]
            self._leased = [item for item in self._leased if _valid(item)]
            heapq.heapify(self._evictable)
            heapq.heapify(self._leased)

    def set_lease(self, entry: Entry[Place], until: float, now: float) -> None:
        """Change when `entry` may be dropped."""
        entry.lease_until = until
        self._push(entry, now)

    def coldest(self, num_bytes: int, now: float) -> list[RecordInfo]:
        """The entries that would go first for `num_bytes` of payload, those with a running lease last."""
        order = sorted(self._index.values(), key=lambda e: (e.lease_until > now, self._policy(e), e.last_used))
        chosen: list[RecordInfo] = []
        for entry in order:
            if num_bytes <= 0:
                break
            chosen.append(entry.info)
            num_bytes -= entry.num_bytes
        return chosen

    def _unlink(self, entry: Entry[Place]) -> None:
        del self._index[entry.id]
        entry.live = False
        self.payload_bytes -= entry.num_bytes

    def _push(self, entry: Entry[Place], now: float) -> None:
        entry.ticket = next(self._tick)
        if entry.lease_until > now:
            heapq.heappush(self._leased, (entry.lease_until, entry.ticket, entry))
        else:
            heapq.heappush(self._evictable, (self._policy(entry), entry.ticket, entry))

    def _pop_coldest(self, now: float) -> Entry[Place] | None:
        """Take the coldest live entry without a lease off its heap."""
        while self._leased and (self._leased[0][0] <= now or not _valid(self._leased[0])):
            item = heapq.heappop(self._leased)
            if _valid(item):
                self._push(item[2], now)
        while self._evictable:
            item = heapq.heappop(self._evictable)
            if not _valid(item):
                continue
            key, _, entry = item
            if key == self._policy(entry):
                return entry
            self._push(entry, now)
        return None


def _valid(item: tuple[float, int, Entry[Place]]) -> bool:
    _, ticket, entry = item
    return entry.live and entry.ticket == ticket
