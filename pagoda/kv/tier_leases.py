"""TierLeases: prefixes that a tier keeps until their leases end, for which the pool has no room under its bound.

    asking     the tier is told to keep what it has of the prefix ──> which records it lacks
    bringing   those are copied out of the pool, some blocks a step, and written; then it is asked again
    decided    it has all of them, and may not drop one: held; or refused, and the tier is told so

Until it is decided, for a second at most, the pool's blocks are held as a request holds them. A held lease takes
nothing of the pool: whoever asks for the prefix restores it. All leases below take at most half of a tier.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from pagoda.errors import LeaseRefused
from pagoda.kv.hierarchy import Hierarchy
from pagoda.kv.keys import BlockKey, Scope
from pagoda.kv.lease import Lease
from pagoda.kv.radix_node import ABSENT, TokenArray, common_prefix
from pagoda.kv.retained import PinnedPrefix, Retained
from pagoda.kv.retention import KEPT_LONGER, Retention
from pagoda.kv.tiers.records import NO_LEASE, RecordId
from pagoda.kv.transfer import Lane
from pagoda.kv.write_queue import Hold

_DECIDE_S = 1.0
_LARGEST_SHARE = 0.5
_BLOCKS_A_STEP = 32


@dataclass(frozen=True, slots=True)
class Wish:
    """Tokens to be leased for how long, by whom: see Retention. Of a promise they are whole blocks, all known."""

    tokens: TokenArray
    scope: Scope
    ttl_s: float
    owner: str
    name: str


@dataclass(eq=False, slots=True)
class Promise:
    """A lease that a tier is asked to hold.

    Attributes:
        wish: what for.
        lane: which tier.
        hold: the request's hold on the pool's blocks while it is decided.
        blocks: of each record that the pool has, its block.
        is_held: whether the tier took it; None until it is decided.
        is_cancelled: nobody wants it any more, whatever the tier says.
    """

    wish: Wish
    lane: Lane
    hold: Lease
    key: BlockKey
    ids: frozenset[RecordId]
    blocks: Mapping[RecordId, int]
    until: float
    asked: Hold
    missing: list[RecordId] = field(default_factory=list)
    is_held: bool | None = None
    is_cancelled: bool = False
    has_brought: bool = False
    _deadline: float = field(default_factory=lambda: time.monotonic() + _DECIDE_S)

    @property
    def num_tokens(self) -> int:
        """Tokens that are sure to be found."""
        return int(self.wish.tokens.size)

    @property
    def is_late(self) -> bool:
        """Whether the tier took too long."""
        return time.monotonic() > self._deadline


class TierLeases:
    """Those that are being decided, and the records of those that are held. The engine's thread owns it.

    Args:
        bring: copies blocks out of the pool and queues them for a tier.
        let_go: ends a hold on the pool's blocks.
        pooled: of some records, those that leases of the pool need too, and until when, in Unix seconds.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        retention: Retention,
        block_bytes: int,
        bring: Callable[[Lane, Sequence[tuple[int, RecordId]]], None],
        let_go: Callable[[Lease], None],
        pooled: Callable[[Collection[RecordId]], Mapping[RecordId, float]],
    ) -> None:
        self._hierarchy = hierarchy
        self._retention = retention
        self._block_bytes = block_bytes
        self._bring = bring
        self._let_go = let_go
        self._pooled = pooled
        self._open: list[Promise] = []
        self._held: dict[Retained, Promise] = {}
        self._by_key: dict[BlockKey, list[Retained]] = {}
        self._num_leases: Counter[RecordId] = Counter()  # held leases that have a record
        self._taken: Counter[Lane] = Counter()  # bytes

    def ask(self, wish: Wish, hold: Lease, keys: Sequence[BlockKey], blocks: Mapping[RecordId, int]) -> Promise | None:
        """Ask a tier to keep the blocks of these names, which are the wish's; None if none may.

        The hold is the caller's to end then.
        """
        ids = [RecordId(key, group) for key in keys for group in range(len(hold.tables))]
        num_bytes = len(ids) * self._block_bytes
        lane = next((lane for lane in reversed(self._hierarchy.lanes) if self._has_room(lane, num_bytes)), None)
        if lane is None:
            return None
        self._taken[lane] += num_bytes
        until = time.time() + wish.ttl_s * (1 + KEPT_LONGER)
        asked = self._hierarchy.hold(lane, ids, until)
        self._tell_longer(self._longer(ids, until, self._pooled(ids)))
        promise = Promise(wish, lane, hold, keys[-1], frozenset(ids), blocks, until, asked)
        self._open.append(promise)
        return promise

    def _has_room(self, lane: Lane, num_bytes: int) -> bool:
        usage = lane.report().usage
        if usage is None or not lane.is_available or not lane.tier.keeps_leases or lane.tier.is_lossy:
            return False
        capacity = usage.capacity_bytes
        return capacity is None or self._taken[lane] + num_bytes <= _LARGEST_SHARE * capacity

    def poll(self) -> None:
        """Bring on what is being decided. Call once a step."""
        for promise in list(self._open):
            self._advance(promise)
            if promise.is_held is not None:
                self._open.remove(promise)
                self._let_go(promise.hold)
                if promise.is_held:
                    promise.is_held = self._keep(promise)
                if not promise.is_held:
                    self._give_up(promise)

    def refuse_open(self) -> None:
        """Decide against all that is being decided, now."""
        for promise in self._open:
            promise.is_cancelled = True
        self.poll()

    def _advance(self, promise: Promise) -> None:
        if promise.is_cancelled:
            promise.is_held = False
        elif promise.missing:
            some, promise.missing = promise.missing[:_BLOCKS_A_STEP], promise.missing[_BLOCKS_A_STEP:]
            self._bring(promise.lane, [(promise.blocks[record], record) for record in some])
            if not promise.missing:
                promise.asked = self._hierarchy.hold(promise.lane, list(promise.ids), promise.until)
        elif (found := promise.asked.found) is not None:
            lacking = [record for record, there in zip(promise.asked.ids, found, strict=True) if not there]
            if not lacking:
                promise.is_held = True
            elif promise.has_brought or not all(record in promise.blocks for record in lacking):
                promise.is_held = False
            else:
                promise.missing, promise.has_brought = lacking, True
        if promise.is_held is None and promise.is_late:
            promise.is_held = False

    def _give_up(self, promise: Promise) -> None:
        self._taken[promise.lane] -= len(promise.ids) * self._block_bytes
        self.tell(list(promise.ids), NO_LEASE, self._pooled(promise.ids))

    def _keep(self, promise: Promise) -> bool:
        """Note a lease; false if its owner has too many by now."""
        wish = promise.wish
        if (same := self.same(promise.key, wish)) is not None:  # another request asked for it meanwhile
            self._give_up(promise)
            self._retention.prolong(same, wish.ttl_s)
            return True
        nothing = PinnedPrefix(
            promise.num_tokens, np.empty(0, dtype=np.int32), int(ABSENT), int(ABSENT), wish.tokens, promise.hold.lineage
        )
        try:
            lease = self._retention.keep_below(
                nothing, wish.scope, len(promise.ids), wish.ttl_s, wish.owner, wish.name, promise.lane.name
            )
        except LeaseRefused:
            return False
        self._held[lease] = promise
        self._by_key.setdefault(promise.key, []).append(lease)
        self._num_leases.update(promise.ids)
        return True

    def set(self, lease: Retained, ttl_s: float) -> None:
        """Let a lease's records be kept so much longer; 0 if it ended."""
        promise = self._held[lease]
        if ttl_s:
            promise.until = time.time() + ttl_s
            self.tell(list(promise.ids), promise.until, self._pooled(promise.ids))
            return
        del self._held[lease]
        self._by_key[promise.key].remove(lease)
        if not self._by_key[promise.key]:
            del self._by_key[promise.key]
        self._num_leases.subtract(promise.ids)
        self._num_leases += Counter()  # without those that are at zero
        self._give_up(promise)

    def tell(
        self, ids: Sequence[RecordId], until: float, pooled: Mapping[RecordId, float] = MappingProxyType({})
    ) -> None:
        """Let tiers keep records until a Unix time, each longer if a lease here, or one in `pooled`, needs it longer.

        A tier keeps what it was told last, so that a short lease would else end a long one on the same records.
        """
        longer = self._longer(ids, until, pooled)
        if len(longer) < len(ids):
            self._hierarchy.lease([record for record in ids if record not in longer], until)
        self._tell_longer(longer)

    def _longer(
        self, ids: Iterable[RecordId], until: float, pooled: Mapping[RecordId, float]
    ) -> Mapping[RecordId, float]:
        """Those of the records that are needed longer, and until when."""
        needed = {record: max(self._until(record), pooled.get(record, NO_LEASE)) for record in ids}
        return {record: later for record, later in needed.items() if later > until}

    def _tell_longer(self, longer: Mapping[RecordId, float]) -> None:
        for until in set(longer.values()):
            self._hierarchy.lease([record for record, later in longer.items() if later == until], until)

    def _until(self, record: RecordId) -> float:
        """When the last of the leases that have a record ends, in Unix seconds; NO_LEASE if none has it."""
        if not self.has(record):
            return NO_LEASE
        return max(promise.until for promise in self._held.values() if record in promise.ids)

    def has(self, record: RecordId) -> bool:
        """Whether a held lease has a record."""
        return self._num_leases[record] > 0

    def of(self, key: BlockKey) -> Sequence[Retained]:
        """The held leases that end with this block."""
        return self._by_key.get(key, ())

    def same(self, key: BlockKey, wish: Wish) -> Retained | None:
        """The held lease that ends with this block and is of the wish's owner and name; None if there is none."""
        return next((each for each in self.of(key) if (each.owner, each.name) == (wish.owner, wish.name)), None)

    def end(self, where: Scope | str, prefix: TokenArray) -> None:
        """End the leases, and give up the promises, that begin with a prefix in a scope, or in all of a namespace."""

        def is_meant(scope: Scope, tokens: TokenArray) -> bool:
            mine = scope == where if isinstance(where, Scope) else scope.namespace == where
            return mine and common_prefix(tokens, prefix) == prefix.size

        for lease in list(self._held):
            if is_meant(lease.scope, lease.pinned.tokens):
                self._retention.release(lease)
        for promise in self._open:
            if is_meant(promise.wish.scope, promise.wish.tokens):
                promise.is_cancelled = True
