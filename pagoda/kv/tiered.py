"""TieredCache: a KVCache with tiers below the device.

    advance   ── full blocks ──> Hierarchy.write(THROUGH)   so that they survive eviction and restarts
    evict     ── last look ────> Hierarchy.write(BACK)
    restore   <── pieces ─────── Fetcher.fetch              a running lease gets blocks instead of computing them
    prefetch  <── pieces ─────── Fetcher.fetch_early        they are there before it runs; see prefetch.py

What is restored enters the tree through the same door as what is computed, and whoever waits for that prefix waits for
the lease that computes or restores it (`PendingPrefix`). A restore ends with its lease, whenever that is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from pagoda.errors import OutOfBlocks
from pagoda.kv.allocator import BlockIds
from pagoda.kv.cache import Hit
from pagoda.kv.compaction import Move
from pagoda.kv.events import BlockEvent
from pagoda.kv.eviction import EvictionPolicy
from pagoda.kv.fetch import Fetch
from pagoda.kv.hierarchy import Hierarchy, WritePolicy
from pagoda.kv.keys import BlockKey, KeyChain, Scope
from pagoda.kv.layout import KVLayout
from pagoda.kv.lease import Lease, TierUse
from pagoda.kv.leased_below import BlockIO, LeasedBelow
from pagoda.kv.lineage import Segment
from pagoda.kv.prefetch import Prefetch, Prefetches
from pagoda.kv.radix_node import ABSENT, TokenArray
from pagoda.kv.restore import Restore
from pagoda.kv.tenants import Share
from pagoda.kv.tier_events import TierEvents
from pagoda.kv.tiers.records import RecordId
from pagoda.kv.transfer import Lane
from pagoda.kv.write_queue import Purge

_IMPORTED_BLOCKS = 32


class TieredCache(LeasedBelow):
    """A KVCache whose full blocks also live in a Hierarchy.

    Args:
        layout, pool, policy, shares: see Books.
        hierarchy, keys: see LeasedBelow. The hierarchy is closed with this cache.
        lossy: whether requests that do not say so take blocks from tiers that store them with loss.
        media: what block events call each tier, in the hierarchy's order; those called nothing are not told of.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: BlockIO,
        hierarchy: Hierarchy,
        keys: KeyChain,
        policy: EvictionPolicy | None = None,
        shares: Mapping[str, Share] = MappingProxyType({}),
        lossy: bool = False,
        media: Sequence[str] = (),
    ) -> None:
        super().__init__(layout, pool, hierarchy, keys, policy, shares)
        self._lossy = lossy
        self._media = {lane: medium for lane, medium in zip(hierarchy.lanes, media, strict=False) if medium}
        self._tier_events: TierEvents | None = None
        self._restores: dict[Lease, Restore] = {}
        self._prefetches = Prefetches()
        self._came_from: dict[int, Lane] = {}  # blocks of the tree that were restored
        self._private: set[int] = set()  # blocks that may not be written to tiers
        self._purged: set[BlockKey] = set()  # what tiers may have until their queues are empty
        self._purges: list[Purge] = []  # of tenants, which some tiers have not done yet
        self._source: Lane | None = None  # where the blocks come from that are being committed; None: computed

    def tell(self, keys: KeyChain, emit: Callable[[Sequence[BlockEvent]], None], *, with_tokens: bool = False) -> None:
        """See Books. What this process's own tiers have is told too."""
        super().tell(keys, emit, with_tokens=with_tokens)
        if self._media and self.events is not None:
            self.events.below = self._tier_events = TierEvents(self._media, self.events.tell)

    def _expect_in_tiers(self, named: Sequence[tuple[int, RecordId]]) -> None:
        if self._tier_events is not None and self.events is not None:
            told = [(record, stored) for block, record in named if (stored := self.events.stored(block)) is not None]
            self._tier_events.expect(told)

    @property
    def can_prefetch(self) -> bool:
        """See KVCache. One prompt at a time: who waits longest is to be ready first."""
        return not self._prefetches.is_loading and self.hierarchy.is_available

    def prefetch(self, tokens: TokenArray, scope: Scope, use: TierUse) -> int:
        """See KVCache. Blocks that are being computed or brought up for another are left to the other."""
        match = self._match(tokens, scope)
        held = match.blocks[0, : match.num_tokens // self.block_size]
        lineage = self._tree.lineages.of(tokens, scope)
        lanes = self._lanes(lineage, use)
        keys = self._missing(tokens, lineage, held, use) if lanes else []
        pending = self.pending(tokens, scope, match.num_tokens)
        known = 0 if pending is None else pending.num_tokens // self.block_size - held.size
        known = next((i for i in range(known, len(keys)) if keys[i] not in self._prefetches), len(keys))
        if not (keys := keys[known:]):
            return 0
        fetcher = self.hierarchy.fetcher
        return self._prefetches.add(
            Prefetch(fetcher, fetcher.fetch_early(self._records(keys), lanes), held.size + known, keys)
        )

    def drop_prefetch(self, ticket: int) -> None:
        """See KVCache."""
        self._prefetches.drop(ticket)

    def restore(self, lease: Lease, seconds_per_token: float, ticket: int = 0) -> None:
        """See KVCache. The lease must be new."""
        block_s = self.block_size * seconds_per_token
        restore = self._restore_early(lease, block_s, ticket)
        if restore is None:
            held = lease.tables[0].ids[: lease.num_committed_blocks]
            lanes = self._lanes(lease.lineage, lease.tier_use)
            keys = self._missing(lease.prompt, lease.lineage, held, lease.tier_use) if lanes else []
            if not keys:
                return
            recompute_s = len(keys) * block_s
            patience_s = lease.tier_use.patience_s(recompute_s)
            fetch = self.hierarchy.fetcher.fetch(self._records(keys), recompute_s, patience_s, lanes)
            restore = self._restore_of(lease, fetch, held.size)
        self._restores[lease] = restore
        self._use(restore)

    def _restore_early(self, lease: Lease, block_s: float, ticket: int) -> Restore | None:
        """Go on with what was prefetched for a lease; None if there is nothing, or nothing that continues what it has.

        What was not there then is asked for anew.
        """
        early = self._prefetches.take(ticket)
        if early is None:
            return None
        fetch, fetcher, front = early.fetch, early.fetcher, lease.num_committed_blocks - early.first
        if not 0 <= front < len(fetch.ids) or (fetch.done.is_set() and not fetch.num_loaded):
            early.end()
            return None
        fetcher.begin(fetch, block_s, lease.tier_use.patience_s((len(fetch.ids) - front) * block_s))
        restore = self._restore_of(lease, fetch, early.first)
        fetcher.taken(fetch, restore.take_in())
        restore.early = frozenset(restore.arrived)
        return restore

    def _restore_of(self, lease: Lease, fetch: Fetch, first: int) -> Restore:
        tokens = lease.prompt[: (first + len(fetch.ids)) * self.block_size]
        return Restore(lease, tokens, fetch, first, self.block_size)

    def _lanes(self, lineage: Sequence[Segment], use: TierUse) -> list[Lane]:
        """The tiers that a request may be given blocks from; none if all are out."""
        takes_lossy = self._lossy if use.lossy is None else use.lossy
        purging = self._purging(lineage)
        lanes = [
            lane for lane in self.hierarchy.lanes if (takes_lossy or not lane.tier.is_lossy) and lane not in purging
        ]
        return lanes if any(lane.is_available for lane in lanes) else []

    def _records(self, keys: Sequence[BlockKey]) -> list[list[RecordId]]:
        return [[RecordId(key, group) for group in range(len(self._windows))] for key in keys]

    def _missing(
        self, prompt: TokenArray, lineage: Sequence[Segment], held: BlockIds, use: TierUse
    ) -> Sequence[BlockKey]:
        """The names of the blocks of a prompt that tiers may be asked for, after those that it holds."""
        first, last = held.size, (prompt.size - 1) // self.block_size
        if use.max_restored_tokens is not None:
            last = min(last, first + use.max_restored_tokens // self.block_size)
        return self._before_purged(self._names(lineage, held, prompt[: last * self.block_size])) if first < last else []

    def _names(self, lineage: Sequence[Segment], held: BlockIds, tokens: TokenArray) -> list[BlockKey]:
        """The keys of the whole blocks of `tokens` after those that are held, which are in the tree."""
        keys: list[BlockKey] = []
        ends = [*(segment.start for segment in lineage[1:]), tokens.size]
        for segment, end in zip(lineage, ends, strict=True):
            at = (held.size + len(keys)) * self.block_size
            end = min(end, tokens.size)
            if segment.start <= at < end:
                if at == segment.start:
                    parent = self._keys.root(segment.scope)
                else:
                    parent = keys[-1] if keys else self._record_of[int(held[-1])].key
                keys += self._keys.chain(parent, tokens[at:end], self.block_size)
        return keys

    def chunk(self, lease: Lease, num_tokens: int) -> int:
        """See KVCache."""
        restore = self._restores.get(lease)
        return num_tokens if restore is None else restore.chunk(num_tokens)

    def poll(self) -> None:
        """Take in what arrived. Call once a step."""
        self.hierarchy.arrived.clear()
        self._below.poll()
        for restore in list(self._restores.values()):
            self._use(restore)

    def _use(self, restore: Restore) -> None:
        """Fill a lease with what arrived for it."""
        self.hierarchy.fetcher.taken(restore.fetch, restore.take_in())
        while self._fill(restore):
            pass
        restore.fetch.note_front(restore.front - restore.first)
        if restore.is_over:
            self._end_restore(restore.lease)

    def _fill(self, restore: Restore) -> bool:
        """Import some of what arrived at the front of a lease; false if there is nothing, or no room for it."""
        lease, front = restore.lease, restore.front
        run = restore.run(_IMPORTED_BLOCKS)
        num_tokens = (front + len(run)) * self.block_size - lease.num_computed_tokens
        if not run:
            return False
        lane = run[0][0]
        if lane.tier.is_lossy:  # and so is all that is computed from it: nobody else shall find it
            self._detach(lease)  # before room is made: a partial block of the tree is then copied, not written over
        try:
            self.reserve(lease, num_tokens)
        except OutOfBlocks:
            return False
        num_early = 0
        for index, (_, groups) in enumerate(run, start=front):
            num_early += index in restore.early
            for table, payload in zip(lease.tables, groups, strict=True):
                self._io.import_block(int(table.ids[index]), payload)
            del restore.arrived[index]
        if lease.num_leading_tokens == lease.num_computed_tokens:  # nothing was computed yet
            lease.num_leading_tokens += num_tokens
        self._source = lane
        try:
            self.advance(lease, restore.tokens, lease.num_computed_tokens + num_tokens)
        finally:
            self._source = None
        lease.num_hit_tokens += num_tokens
        self._refresh_below(lease, front)
        num_early_tokens = min(num_tokens, num_early * self.block_size)
        restore.num_restored += len(run)
        restore.num_prefetched += num_early
        for counts in self.stats, self._tenant(lease.scope):
            counts.num_restored_tokens += num_tokens
            counts.num_prefetched_tokens += num_early_tokens
        lane.tally.add("restored_tokens", num_tokens)
        lane.tally.add("prefetched_tokens", num_early_tokens)
        self.hierarchy.fetcher.taken(restore.fetch, len(run))
        return True

    def _end_restore(self, lease: Lease) -> None:
        restore = self._restores.pop(lease, None)
        if restore is not None:
            lease.restore_report = restore.report()
            self.hierarchy.fetcher.end(restore.fetch)

    def _end(self, lease: Lease) -> None:
        self._end_restore(lease)
        super()._end(lease)

    def compact(self, lease: Lease, num_kept: Sequence[int | None], move: Move) -> None:
        """See Compactor. A restore that still runs ends: its blocks would be anybody's."""
        super().compact(lease, num_kept, move)
        self._end_restore(lease)

    @property
    def is_restoring(self) -> bool:
        """Whether any restore is under way."""
        return bool(self._restores)

    def wait(self, timeout_s: float) -> None:
        """Sleep until something arrives from the tiers or the time to wait for them is over, at most so long."""
        patience_s = min((restore.patience_s for restore in self._restores.values()), default=timeout_s)
        self.hierarchy.arrived.wait(max(0.0, min(timeout_s, patience_s)))

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

    def purge(self, where: Scope | str, prefix: TokenArray | None = None) -> int:
        """See Purging. Of a prefix in a scope, blocks that only tiers have go too, but for leases on less of it."""
        self._prefetches.clear()
        self._below.end(where, np.empty(0, dtype=np.int32) if prefix is None else prefix)
        count = super().purge(where, prefix)
        if isinstance(where, Scope) and prefix is not None:
            evicted = self._tree.match(prefix, where).num_tokens // self.block_size
            keys = [key for key, scope in self._whole_names(prefix, where)[evicted:] if scope == where]
            self._delete([RecordId(key, group) for key in keys for group in range(len(self._windows))])
        return count

    def purge_below(self, namespace: str) -> Purge:
        """Delete all that tiers have of a namespace, of whatever model; a tier that has not yet gives it nothing."""
        self._prefetches.clear()
        for lease in [lease for lease in self._restores if lease.scope.namespace == namespace]:
            self._end_restore(lease)
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

    def _forget_names(self, ids: BlockIds) -> None:
        for block in ids.tolist():
            self._record_of.pop(block, None)
            self._came_from.pop(block, None)
            self._private.discard(block)

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

    def renew(self, fingerprint: bytes) -> None:
        """See KVCache. What tiers have of the old model is not found any more, and goes as they need room."""
        self._prefetches.clear()
        self._below.refuse_open()  # they hold blocks as requests do
        super().renew(fingerprint)
        self._keys = self._keys.for_model(fingerprint)

    def close(self) -> None:
        """Write what is queued and close the tiers."""
        if self._tier_events is not None:
            self._tier_events.close()
        self._prefetches.clear()
        self.hierarchy.close()
