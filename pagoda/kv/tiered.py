"""TieredCache: a KVCache with tiers below the device. What goes down to them is WrittenBelow's; this is what comes up.

    restore   <── pieces ─── Fetcher.fetch         a running lease gets blocks instead of computing them
    prefetch  <── pieces ─── Fetcher.fetch_early   they are there before it runs; see prefetch.py

What is restored enters the tree through the same door as what is computed, and whoever waits for that prefix waits for
the lease that computes or restores it (`PendingPrefix`). A restore ends with its lease, whenever that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pagoda.errors import OutOfBlocks
from pagoda.kv.allocator import BlockIds
from pagoda.kv.compaction import Move
from pagoda.kv.eviction import EvictionPolicy
from pagoda.kv.fetch import Fetch
from pagoda.kv.hierarchy import Hierarchy
from pagoda.kv.keys import BlockKey, KeyChain, Scope
from pagoda.kv.layout import KVLayout
from pagoda.kv.lease import Lease, TierUse
from pagoda.kv.leased_below import BlockIO
from pagoda.kv.lineage import Segment
from pagoda.kv.prefetch import Prefetch, Prefetches
from pagoda.kv.radix_node import TokenArray
from pagoda.kv.restore import Restore
from pagoda.kv.tenants import Share
from pagoda.kv.tiers.records import RecordId
from pagoda.kv.transfer import Lane
from pagoda.kv.write_queue import Purge
from pagoda.kv.written_below import WrittenBelow

_IMPORTED_BLOCKS = 32


class TieredCache(WrittenBelow):
    """A KVCache whose full blocks also live in a Hierarchy.

    Args:
        layout, pool, policy, shares: see Books.
        hierarchy, keys, media: see WrittenBelow.
        lossy: whether requests that do not say so take blocks from tiers that store them with loss.
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
        super().__init__(layout, pool, hierarchy, keys, policy, shares, media)
        self._lossy = lossy
        self._restores: dict[Lease, Restore] = {}
        self._prefetches = Prefetches()

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

    def purge(self, where: Scope | str, prefix: TokenArray | None = None) -> int:
        """See WrittenBelow."""
        self._prefetches.clear()
        return super().purge(where, prefix)

    def purge_below(self, namespace: str) -> Purge:
        """See WrittenBelow."""
        self._prefetches.clear()
        for lease in [lease for lease in self._restores if lease.scope.namespace == namespace]:
            self._end_restore(lease)
        return super().purge_below(namespace)

    def renew(self, fingerprint: bytes) -> None:
        """See WrittenBelow."""
        self._prefetches.clear()
        super().renew(fingerprint)

    def close(self) -> None:
        """See WrittenBelow."""
        self._prefetches.clear()
        super().close()
