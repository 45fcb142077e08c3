"""WrittenBelow: a KVCache that writes its full blocks to tiers, and sees that they forget what it forgets.

advance   ── full blocks ──> Hierarchy.write(THROUGH)   so that they survive eviction and restarts
evict     ── last look ────> Hierarchy.write(BACK)
purge     ─────────────────> Hierarchy.delete, purge    and nothing is asked of a tier that has not done it yet
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from pagoda.kv.allocator import BlockIds
from pagoda.kv.cache import Hit
from pagoda.kv.events import BlockEvent
from pagoda.kv.eviction import EvictionPolicy
from pagoda.kv.hierarchy import Hierarchy, WritePolicy
from pagoda.kv.keys import BlockKey, KeyChain, Scope
from pagoda.kv.layout import KVLayout
from pagoda.kv.lease import Lease
from pagoda.kv.leased_below import BlockIO, LeasedBelow
from pagoda.kv.lineage import Segment
from pagoda.kv.radix_node import ABSENT, TokenArray
from pagoda.kv.tenants import Share
from pagoda.kv.tier_events import TierEvents
from pagoda.kv.tiers.records import RecordId
from pagoda.kv.transfer import Lane
from pagoda.kv.write_queue import Purge


class WrittenBelow(LeasedBelow):
    """A KVCache whose full blocks also go to a Hierarchy.

    Args:
        layout, pool, policy, shares: see Books.
        hierarchy, keys: see LeasedBelow. The hierarchy is closed with this cache.
        media: what block events call each tier, in the hierarchy's order; those called nothing are not told of.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: BlockIO,
        hierarchy: Hierarchy,
        keys: KeyChain,
        policy: EvictionPolicy | None,
        shares: Mapping[str, Share],
        media: Sequence[str],
    ) -> None:
        super().__init__(layout, pool, hierarchy, keys, policy, shares)
        self._media = {lane: medium for lane, medium in zip(hierarchy.lanes, media, strict=False) if medium}
        self._tier_events: TierEvents | None = None
        self._source: Lane | None = None  # where the blocks come from that are being committed; None: computed
        self._came_from: dict[int, Lane] = {}  # blocks of the tree that were restored
        self._private: set[int] = set()  # blocks that may not be written to tiers
        self._purged: set[BlockKey] = set()  # what tiers may have until their queues are empty
        self._purges: list[Purge] = []  # of tenants, which some tiers have not done yet

    def tell(self, keys: KeyChain, emit: Callable[[Sequence[BlockEvent]], None], *, with_tokens: bool = False) -> None:
        """See Books. What this process's own tiers have is told too."""
        super().tell(keys, emit, with_tokens=with_tokens)
        if self._media and self.events is not None:
            self.events.below = self._tier_events = TierEvents(self._media, self.events.tell)

    def _expect_in_tiers(self, named: Sequence[tuple[int, RecordId]]) -> None:
        if self._tier_events is not None and self.events is not None:
            told = [(record, stored) for block, record in named if (stored := self.events.stored(block)) is not None]
            self._tier_events.expect(told)

    def _on_commit(
        self,
        lease: Lease,
        scope: Scope,
        after: int | None,
        tokens: TokenArray,
        blocks: BlockIds,
        entered: npt.NDArray[np.bool_],
    ) -> None:
        whole = tokens.size // self.block_size
        parent = self._keys.root(scope) if after is None else self._record_of[after].key
        keys = self._keys.chain(parent, tokens[: whole * self.block_size], self.block_size)
        new: list[tuple[int, RecordId]] = []
        for index, key in enumerate(keys):
            for group in np.flatnonzero(entered[:, index]):
                new.append((int(blocks[group, index]), RecordId(key, int(group))))
        self._record_of.update(new)
        if self._purged:  # computed again, they may be found again
            self._purged.difference_update(keys)
        due = set(self.hierarchy.used([record for _, record in new]))
        if self._source is not None:
            self._came_from.update((block, self._source) for block, _ in new)
            self._expect_in_tiers(new)
        if not lease.tier_use.store and self._source is None:
            self._private.update(block for block, _ in new)
        else:
            self._write(WritePolicy.THROUGH, new, self._source)
            if self._source is not None:  # what is used often goes below where it came from, too
                self._write(WritePolicy.THROUGH, [(block, record) for block, record in new if record in due])

    def acquire(self, tokens: TokenArray, scope: Scope, hit: Hit | None = None) -> Lease:
        """See KVCache. Blocks that were hit often enough for a selective tier are written now."""
        lease = super().acquire(tokens, scope, hit)
        if self.hierarchy.is_selective:
            held = [block for table in lease.tables for block in table.held.tolist() if block in self._record_of]
            due = set(self.hierarchy.used([self._record_of[block] for block in held]))
            self._write(WritePolicy.THROUGH, [(b, r) for b in held if (r := self._record_of[b]) in due])
        return lease

    def _write(self, policy: WritePolicy, named: Sequence[tuple[int, RecordId]], above: Lane | None = None) -> None:
        """Copy blocks out of the pool, as many as are wanted and there is room for, and queue them for tiers."""
        wanted = self.hierarchy.is_wanted(policy, [record for _, record in named])
        named = [one for one, fine in zip(named, wanted, strict=True) if fine and one[0] not in self._private]
        named = named[: self.hierarchy.room(policy, len(named), above)]
        if not named:
            return
        owners = self._owners([block for block, _ in named])
        self.hierarchy.write(policy, [record for _, record in named], self._export(named), owners, above)
        self._expect_in_tiers(named)

    # -- forgetting --------------------------------------------------------------------------------------------------

    def quarantine(self, tokens: TokenArray, scope: Scope) -> str:
        """See KVCache. The block's records go from all tiers, and the tier that it was restored from is taken out."""
        blocks = [int(block) for block in self._tree.match(tokens, scope).blocks[:, -1] if block != ABSENT]
        records = [record for block in blocks if (record := self._record_of.get(block)) is not None]
        lane = next((lane for block in blocks if (lane := self._came_from.get(block)) is not None), None)
        verdict = super().quarantine(tokens, scope)
        for each in self.hierarchy.lanes:
            each.forget(records)
        if lane is not None:
            lane.quarantine()
            verdict = f"it came from the {lane.name} tier, which is out of use from now on"
        return f"{verdict}; key {records[0].key.hex() if records else 'unknown'}"

    def _on_evict(self, ids: BlockIds) -> None:
        named = [(block, record) for block in ids.tolist() if (record := self._record_of.get(block)) is not None]
        self._write(WritePolicy.BACK, named)
        self._forget_names(ids)

    def _forget_names(self, ids: BlockIds) -> None:
        for block in ids.tolist():
            self._record_of.pop(block, None)
            self._came_from.pop(block, None)
            self._private.discard(block)

    def purge(self, where: Scope | str, prefix: TokenArray | None = None) -> int:
        """See Purging. Of a prefix in a scope, blocks that only tiers have go too, but for leases on less of it."""
        self._below.end(where, np.empty(0, dtype=np.int32) if prefix is None else prefix)
        count = super().purge(where, prefix)
        if isinstance(where, Scope) and prefix is not None:
            evicted = self._tree.match(prefix, where).num_tokens // self.block_size
            keys = [key for key, scope in self._whole_names(prefix, where)[evicted:] if scope == where]
            self._delete([RecordId(key, group) for key in keys for group in range(len(self._windows))])
        return count

    def purge_below(self, namespace: str) -> Purge:
        """Delete all that tiers have of a namespace, of whatever model; a tier that has not yet gives it nothing."""
        purge = self.hierarchy.purge(self._keys.owner(namespace))
        self._purges.append(purge)
        return purge

    def _purging(self, lineage: Sequence[Segment]) -> set[Lane]:
        """The tiers that may still have what was purged of whom a sequence belongs to."""
        self._purges = [purge for purge in self._purges if purge.waiting]
        owners = {self._keys.owner(segment.scope.namespace) for segment in lineage} if self._purges else set()
        return {lane for purge in self._purges if purge.owner in owners for lane in list(purge.waiting)}

    def _on_purge(self, ids: BlockIds) -> None:
        self._delete([record for block in ids.tolist() if (record := self._record_of.get(block)) is not None])
        self._forget_names(ids)

    def _delete(self, records: Sequence[RecordId]) -> None:
        if records := [record for record in records if not self._below.has(record)]:
            self._purged.update(record.key for record in records)
            self.hierarchy.delete(records)

    def _before_purged(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """The keys before the first that was purged and that a tier may still have."""
        if self._purged and self.hierarchy.is_idle:
            self._purged.clear()
        gone = next((i for i, key in enumerate(keys) if key in self._purged), None) if self._purged else None
        return keys[:gone]

    def renew(self, fingerprint: bytes) -> None:
        """See KVCache. What tiers have of the old model is not found any more, and goes as they need room."""
        self._below.refuse_open()  # they hold blocks as requests do
        super().renew(fingerprint)
        self._keys = self._keys.for_model(fingerprint)

    def close(self) -> None:
        """Write what is queued and close the tiers."""
        if self._tier_events is not None:
            self._tier_events.close()
        self.hierarchy.close()
