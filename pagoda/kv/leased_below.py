"""LeasedBelow: a KVCache whose blocks have names that tiers know them by, and which tiers hold leases for.

keep_copies   a lease of the pool: tiers keep what they have of it as long
promise       a lease that the pool has no room for: a tier is asked to hold it; see TierLeases
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagoda.kv.allocator import BlockIds
from pagoda.kv.cache import BlockCopier, KVCache
from pagoda.kv.eviction import EvictionPolicy
from pagoda.kv.hierarchy import Hierarchy
from pagoda.kv.keys import BlockKey, KeyChain, OwnerTag, Scope
from pagoda.kv.layout import KVLayout
from pagoda.kv.lease import Lease
from pagoda.kv.radix_node import TokenArray
from pagoda.kv.retained import Retained
from pagoda.kv.tenants import Share
from pagoda.kv.tier_leases import Promise, TierLeases, Wish
from pagoda.kv.tiers.records import NO_LEASE, RecordId
from pagoda.kv.transfer import ByteRows, Lane


class BlockIO(BlockCopier, Protocol):
    """What moves blocks between a pool and buffers; a foreign engine's cache can be one."""

    def export_block(self, block_id: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Copy a block's bytes, uint8 `[block_bytes]`, into a buffer."""

    def import_block(self, block_id: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill a block from a buffer."""


class LeasedBelow(KVCache):
    """A KVCache whose tree's blocks have names outside it.

    Args:
        layout, pool, policy, shares: see Books.
        hierarchy: the tiers.
        keys: names of blocks outside the device, for this model and secret.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: BlockIO,
        hierarchy: Hierarchy,
        keys: KeyChain,
        policy: EvictionPolicy | None,
        shares: Mapping[str, Share],
    ) -> None:
        super().__init__(layout, pool, policy, shares=shares)
        self.hierarchy = hierarchy
        self._io = pool
        self._keys = keys
        self._record_of: dict[int, RecordId] = {}  # blocks of the tree that have a name
        self._below = TierLeases(hierarchy, self.retention, layout.block_bytes, self._bring, self.discard, self._pooled)

    @property
    def _tells(self) -> bool:
        """Tiers are told."""
        return True

    def bytes_by_tier(self) -> dict[str, dict[str, int]]:
        """What each namespace that was seen here has in each tier, in bytes, as the tier said lately."""
        names = [tenant.name for tenant in self.tenants.all()]
        found: dict[str, dict[str, int]] = {name: {} for name in names}
        for lane in self.hierarchy.lanes:
            usage = lane.report().usage
            owners = {} if usage is None else usage.owners
            for name in names:
                if num_bytes := owners.get(self._keys.owner(name)):
                    found[name][lane.name] = num_bytes
        return found

    def keep_copies(self, blocks: BlockIds, ttl_s: float) -> None:
        """See KVCache. Told to the tiers in the order in which they were written to."""
        ids = [record for block in blocks.tolist() if (record := self._record_of.get(block)) is not None]
        self._below.tell(ids, time.time() + ttl_s if ttl_s else NO_LEASE)

    def kept_below(self, wish: Wish) -> Retained | None:
        """The lease on a prefix that a tier holds for the same owner and name, prolonged; None if there is none."""
        keys = [key for key, _ in self._whole_names(wish.tokens, wish.scope)]
        same = self._below.same(keys[-1], wish) if keys else None
        if same is not None:
            self.retention.prolong(same, wish.ttl_s)
        return same

    def promise(self, wish: Wish) -> Promise | None:
        """Ask a tier to hold a lease on the known whole blocks of a prefix; None if there are none, or no tier can."""
        size, keys = self.block_size, [key for key, _ in self._whole_names(wish.tokens, wish.scope)]
        if not keys:
            return None
        tokens = wish.tokens[: len(keys) * size]
        hold = self.hold(np.append(tokens, tokens[:1]), wish.scope)
        keys = keys[: hold.num_hit_tokens // size]
        blocks = {
            RecordId(keys[index], group): int(table.ids[index])
            for group, table in enumerate(hold.tables)
            for index in range(table.first, len(keys))
        }
        wish = replace(wish, tokens=tokens[: len(keys) * size])
        promise = self._below.ask(wish, hold, keys, blocks) if keys else None
        if promise is None:
            self.discard(hold)
        return promise

    @property
    def can_promise(self) -> bool:
        """Whether any tier may hold leases."""
        return any(lane.is_available and lane.tier.keeps_leases for lane in self.hierarchy.lanes)

    def keep_below(self, lease: Retained, ttl_s: float) -> None:
        """See Pins."""
        self._below.set(lease, ttl_s)

    def note_hit(self, lease: Lease) -> None:
        """See KVCache."""
        super().note_hit(lease)
        self._refresh_below(lease, lease.tables[0].first)

    def _refresh_below(self, lease: Lease, first: int) -> None:
        """Start the time of leases anew that a hit from block `first` on covers."""
        for block in lease.tables[0].ids[first : lease.num_hit_tokens // self.block_size].tolist():
            record = self._record_of.get(block)
            for kept in () if record is None else self._below.of(record.key):
                if not kept.name:
                    self.retention.prolong(kept)

    def _whole_names(self, tokens: TokenArray, scope: Scope) -> list[tuple[BlockKey, Scope]]:
        """The keys of all whole blocks of a prefix, and the scope that each belongs to."""
        tokens = tokens[: tokens.size // self.block_size * self.block_size]
        lineage = self._tree.lineages.of(tokens, scope)
        names: list[tuple[BlockKey, Scope]] = []
        for segment, end in zip(lineage, [*(each.start for each in lineage[1:]), tokens.size], strict=True):
            part, owner = tokens[segment.start : min(end, tokens.size)], replace(segment.scope, after=b"")
            names += [(key, owner) for key in self._keys.chain(self._keys.root(segment.scope), part, self.block_size)]
        return names

    def _bring(self, lane: Lane, named: Sequence[tuple[int, RecordId]]) -> None:
        ids = [record for _, record in named]
        self.hierarchy.write_to(lane, ids, self._export(named), self._owners([block for block, _ in named]))

    def _pooled(self, records: Collection[RecordId]) -> Mapping[RecordId, float]:
        """Those of the records that leases of the pool need, and until when copies of them were promised."""
        wanted, now = set(records), time.time()
        blocks = np.flatnonzero(self.retention.leases_of_every(1))
        lasts_s = self.retention.copies_last_s(blocks)
        return {
            record: now + left
            for block, left in zip(blocks.tolist(), lasts_s, strict=True)
            if (record := self._record_of.get(block)) is not None and record in wanted
        }

    def _export(self, named: Sequence[tuple[int, RecordId]]) -> ByteRows:
        payloads: ByteRows = np.empty((len(named), self.layout.block_bytes), dtype=np.uint8)
        for payload, (block, _) in zip(payloads, named, strict=True):
            self._io.export_block(block, payload)
        return payloads

    def _owners(self, blocks: Sequence[int]) -> list[OwnerTag]:
        names = self.tenants.names_of(np.array(blocks, dtype=np.int32))
        tags = {name: self._keys.owner(name) for name in set(names)}
        return [tags[name] for name in names]
