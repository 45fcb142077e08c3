"""Ledger: which records a memory tier holds, what they cost, and which go first.

    index      id -> Entry
    evictable  for each account of owners: heap of (policy key when pushed, entry)
    leased     heap of (lease_until, entry)
    expiring   heap of (expires_at, entry)

Each entry has one valid item (`ticket`) in the first two, placed as the entry was when last looked at; a key that has
grown since is noticed when the item comes to the top (lazy heaps: a hit costs no heap operation). Policy keys may only
grow. Not thread-safe: its tier holds a lock around each call.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Generic, TypeVar

from pagoda.kv.keys import NO_OWNER, OwnerTag
from pagoda.kv.tiers.accounts import Accounts, Shares
from pagoda.kv.tiers.records import NO_EXPIRY, RecordId, RecordInfo, Usage, is_over

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
    owner: OwnerTag = NO_OWNER
    expires_at: float = NO_EXPIRY
    last_used: int = 0
    num_hits: int = 0
    pins: int = 0
    ticket: int = 0
    live: bool = False

    @property
    def info(self) -> RecordInfo:
        """What others may know of it."""
        return RecordInfo(self.id, self.num_bytes, self.lease_until, self.owner, self.expires_at)


Policy = Callable[[Entry[Place]], float]
_Item = tuple[float, int, Entry[Place]]
_Heap = list[_Item[Place]]
_SLACK = 64


def lru(entry: Entry[Place]) -> float:
    """Least recently used goes first."""
    return entry.last_used


def lfu(entry: Entry[Place]) -> float:
    """Least often used goes first; of equals the earlier stored."""
    return entry.num_hits


class Ledger(Generic[Place]):
    """Index, budget and eviction order over `capacity` bytes, of which owners may have shares."""

    def __init__(self, capacity: int, policy: Policy[Place], shares: Shares = MappingProxyType({})) -> None:
        self.capacity = capacity
        self._payload_bytes = 0
        self._policy = policy
        self._used = 0
        self._accounts = Accounts(capacity, shares)
        self._index: dict[RecordId, Entry[Place]] = {}
        self._evictable: list[_Heap[Place]] = [[] for _ in range(len(self._accounts))]
        self._leased: _Heap[Place] = []
        self._expiring: _Heap[Place] = []
        self._tick = count(1)

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[Entry[Place]]:
        return iter(self._index.values())

    def usage(self) -> Usage:
        """How full it is: live entries, reservations, and dead entries that are still being read."""
        return Usage(self.capacity, self._used, self._payload_bytes, len(self._index), dict(self._accounts.costs))

    def get(self, id: RecordId) -> Entry[Place] | None:
        """The entry of `id`, or None if it is not here."""
        return self._index.get(id)

    def touch(self, entry: Entry[Place]) -> None:
        """Mark `entry` as used now."""
        entry.last_used = next(self._tick)
        entry.num_hits += 1

    def drop_expired(self, now: float) -> list[Entry[Place]]:
        """Take out of the index what expired and has no lease, as `remove` does; returns it."""
        dropped: list[Entry[Place]] = []
        while self._expiring and self._expiring[0][0] <= now:
            _, ticket, entry = heapq.heappop(self._expiring)
            if entry.live and is_over(entry, now):
                self.remove(entry)
                dropped.append(entry)
            elif entry.live:
                heapq.heappush(self._expiring, (entry.lease_until, ticket, entry))
        return dropped

    def reserve(self, cost: int, owner: OwnerTag, now: float) -> list[Entry[Place]] | None:
        """Take `cost` bytes of budget for an owner; the entries evicted for it, or None, and no change, if leases,
        shares and readers leave too little.
        """
        shortfall = self._used + cost - self.capacity
        victims: list[Entry[Place]] = []
        pinned: list[Entry[Place]] = []
        while shortfall > 0:
            entry = self._pop_coldest(owner, now)
            if entry is None:
                break
            if entry.pins:
                pinned.append(entry)
            else:
                victims.append(entry)
                shortfall -= entry.cost
                self._accounts.charge(entry.owner, -entry.cost)  # who is most over its share may be another now
        for entry in victims:
            self._accounts.charge(entry.owner, entry.cost)
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
        self._payload_bytes += entry.num_bytes
        self._accounts.charge(entry.owner, entry.cost)
        self._push(entry, now)
        if entry.expires_at:
            heapq.heappush(self._expiring, (entry.expires_at, next(self._tick), entry))
            if len(self._expiring) > 2 * len(self._index) + _SLACK:
                self._expiring = [item for item in self._expiring if item[2].live]
                heapq.heapify(self._expiring)
        return former

    def remove(self, entry: Entry[Place]) -> None:
        """Take `entry` out of the index, and its cost out of the budget unless it is still being read."""
        self._unlink(entry)
        if not entry.pins:
            self._used -= entry.cost
        heaps = [*self._evictable, self._leased]
        if sum(map(len, heaps)) > 2 * len(self._index) + _SLACK:
            for heap in heaps:
                heap[:] = [item for item in heap if _valid(item)]
                heapq.heapify(heap)

    def purge(self, owner: OwnerTag) -> list[Entry[Place]]:
        """Remove all entries of an owner; returns them."""
        entries = [entry for entry in self._index.values() if entry.owner == owner]
        for entry in entries:
            self.remove(entry)
        return entries

    def set_lease(self, entry: Entry[Place], until: float, now: float) -> None:
        """Change when `entry` may be dropped."""
        entry.lease_until = until
        self._push(entry, now)

    def _unlink(self, entry: Entry[Place]) -> None:
        del self._index[entry.id]
        entry.live = False
        self._payload_bytes -= entry.num_bytes
        self._accounts.charge(entry.owner, -entry.cost)

    def _push(self, entry: Entry[Place], now: float) -> None:
        entry.ticket = next(self._tick)
        if entry.lease_until > now:
            heapq.heappush(self._leased, (entry.lease_until, entry.ticket, entry))
        else:
            heap = self._evictable[self._accounts.of(entry.owner)]
            heapq.heappush(heap, (self._policy(entry), entry.ticket, entry))

    def _pop_coldest(self, taker: OwnerTag, now: float) -> Entry[Place] | None:
        """Take the coldest live entry without a lease off its heap: of those most over their share that have one."""
        while self._leased and (self._leased[0][0] <= now or not _valid(self._leased[0])):
            item = heapq.heappop(self._leased)
            if _valid(item):
                self._push(item[2], now)
        for account in self._accounts.losers(taker):
            heap = self._evictable[account]
            while heap:
                item = heapq.heappop(heap)
                if not _valid(item):
                    continue
                key, _, entry = item
                if key != self._policy(entry):
                    self._push(entry, now)
                elif entry.cost <= self._accounts.spare(account, taker):
                    return entry
                else:
                    self._push(entry, now)
                    break
        return None


def _valid(item: _Item[Place]) -> bool:
    _, ticket, entry = item
    return entry.live and entry.ticket == ticket
