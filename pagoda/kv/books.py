"""Books: which blocks there are, what each holds, and what goes when room is needed.

    free     no request has it             num_free_blocks    ─┐
    cached   only the tree has it          num_cached_blocks   ├─ every block is in one of the three
    held     leases or pins have it        num_held_blocks    ─┘

They join the allocator and the tree, and know requests only as leases, whose blocks count as held. A KVCache is these
books and the life of a lease.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Protocol

import numpy as np

from pagoda.errors import InvariantError, OutOfBlocks
from pagoda.kv.ages import BlockAges
from pagoda.kv.allocator import Allocator, BlockIds
from pagoda.kv.block_map import BlockMap, block_map
from pagoda.kv.block_table import BlockTable
from pagoda.kv.computing import Computing, PendingPrefix
from pagoda.kv.events import BlockEvent, BlockEvents
from pagoda.kv.eviction import LRU, EvictionPolicy, policy_name
from pagoda.kv.keys import KeyChain, Scope
from pagoda.kv.layout import KVLayout
from pagoda.kv.lease import Lease
from pagoda.kv.lineage import Segment
from pagoda.kv.observe import OPERATOR, Eviction, MissLog
from pagoda.kv.radix import RadixTree
from pagoda.kv.radix_node import ABSENT, Match, TokenArray
from pagoda.kv.retained import PinnedPrefix, Retained
from pagoda.kv.retention import Retention
from pagoda.kv.tenants import Share, Taker, Tenant, Tenants
from pagoda.kv.view import PrefixView, outline, prefixes


class BlockCopier(Protocol):
    """What the cache needs of a pool."""

    num_blocks: int

    def copy_block(self, source: int, target: int) -> None:
        """Copy the bytes of a block."""


@dataclass(slots=True)
class CacheStats:
    """Counts since the start."""

    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_evicted_blocks: int = 0
    num_copied_blocks: int = 0
    num_returned_blocks: int = 0  # by compaction
    num_restored_tokens: int = 0
    num_prefetched_tokens: int = 0  # of those, there before their requests ran
    num_failed_allocations: int = 0


@dataclass(frozen=True, slots=True)
class Hit:
    """A known prefix: its length, how many blocks hold it, and how many of those no lease holds yet.

    `match` is it in the tree, good until the cache changes.
    """

    num_tokens: int
    num_blocks: int
    num_idle_blocks: int
    match: Match


class Books:
    """The state of every block of a pool. Not thread-safe: the engine's thread owns it.

    Args:
        layout: the model's KV layout.
        pool: where the bytes are; anything that can copy a block.
        policy: the order of eviction, for this cache alone; LRU when None.
        clock: seconds, for the ends of leases with a time to live.
        shares: of the pool, by namespace; others are in the commons.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: BlockCopier,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        shares: Mapping[str, Share] = MappingProxyType({}),
    ) -> None:
        self.layout = layout
        self.block_size = layout.block_size
        self.stats = CacheStats()
        self._pool = pool
        # A window keeps at least one whole block behind it, so that the last committed block is always held.
        self._windows = tuple(
            None if group.window is None else max(group.window, layout.block_size + 1) for group in layout.groups
        )
        self._anchor = self._windows.index(None) if None in self._windows else 0  # the group that keeps most of a hit
        self._slides = any(self._windows)
        self._only_whole = layout.staged is not None  # partly filled blocks are not in the pool
        self._allocator = Allocator(pool.num_blocks)
        self.tenants = Tenants(self._allocator, shares, slack=len(self._windows) - 1)
        self._tree = RadixTree(
            layout.block_size, self._windows, pool.num_blocks, policy, lambda scope: self._tenant(scope).account
        )
        self._tail_owners: set[int] = set()  # group-0 ids of partial tree blocks that a lease appends to
        self._computing = Computing(layout.block_size)
        self._leases: set[Lease] = set()
        self._late: dict[int, tuple[Lease, TokenArray]] = {}  # by the block they go on from; see Committing
        self.retention = Retention(self, clock)
        self.misses = MissLog(self._tree, self.find, pool.num_blocks, self._only_whole)
        self.ages = BlockAges(pool.num_blocks, clock)
        self.events: BlockEvents | None = None
        self._policy_name = policy_name(policy or LRU())
        self._clock = clock

    def tell(self, keys: KeyChain, emit: Callable[[Sequence[BlockEvent]], None], *, with_tokens: bool = False) -> None:
        """Tell of every block that enters or leaves the tree: see BlockEvents. Call it before anything is cached."""
        if self._allocator.num_free != self.num_blocks:
            raise InvariantError("blocks were cached before events of them were asked for")
        lineages = self._tree.lineages
        self.events = BlockEvents(keys, self.block_size, self._anchor, lineages, emit, with_tokens=with_tokens)

    # -- counts and lookups ------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._allocator.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return self._allocator.num_free

    @property
    def num_held_blocks(self) -> int:
        """Blocks that requests or retained prefixes hold."""
        return self._allocator.num_held

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that only the tree has: they may be evicted."""
        return self._allocator.num_cached

    @property
    def num_available_blocks(self) -> int:
        """Blocks that a reserve could get: free or evictable."""
        return self._allocator.num_free + self._allocator.num_cached

    def num_available_to(self, scope: Scope) -> int:
        """Blocks that a reserve of this scope could get: free, or evictable before its tenant."""
        return self._allocator.num_free + self.tenants.num_evictable(scope.namespace)

    def lookup(self, tokens: TokenArray, scope: Scope) -> Hit:
        """What `acquire` would find now. Counts as no use; full blocks that waited to be found enter the tree."""
        return self._hit(self._match(tokens, scope))

    def _match(self, tokens: TokenArray, scope: Scope) -> Match:
        """The longest known prefix of all but the last of `tokens`, in whole blocks where only those mean something."""
        found = self._known(tokens[:-1], scope)
        while self._only_whole and found.num_tokens % self.block_size:  # shorter, it may look back on other blocks
            found = self._tree.match(tokens[: found.num_tokens // self.block_size * self.block_size], scope)
        return found

    def _known(self, tokens: TokenArray, scope: Scope) -> Match:
        """What the tree has of a whole sequence, once all that others may find is in it."""
        match = self._tree.match(tokens, scope)
        while self._commit_at_end(match):
            match = self._tree.match(tokens, scope)
        return match

    def _commit_at_end(self, match: Match) -> bool:
        """Put what may wait to enter the tree where a match ends into it; whether there was anything."""
        return False

    def _catch_up(self) -> None:
        """Put all that may wait to enter the tree into it."""

    def _hit(self, match: Match) -> Hit:
        ids = match.blocks[match.blocks != ABSENT]
        num_idle = ids.size - int(np.count_nonzero(self._allocator.held(ids)))
        return Hit(match.num_tokens, int(ids.size), num_idle, match)

    def find(self, tokens: TokenArray, scope: Scope) -> Match:
        """What is cached of a whole sequence, its last token included. As `lookup`, it counts as no use."""
        return self._known(tokens, scope)

    def use(self, tokens: TokenArray, scope: Scope) -> Match:
        """What `find` finds, counted as a hit: of who copies it at once and holds nothing."""
        match = self._tree.touch(self._known(tokens, scope))
        if match.num_tokens:
            self._offer(int(match.blocks[0, -1]))
        return match

    def pending(self, tokens: TokenArray, scope: Scope, num_hit_tokens: int) -> PendingPrefix | None:
        """The longest prefix beyond `num_hit_tokens` that a live lease is computing; None if there is none."""
        return self._computing.find(tokens, self._tree.lineages.of(tokens, scope), num_hit_tokens)

    def peak_blocks(self, num_tokens: int, step_tokens: int, num_forks: int = 1, num_shared_tokens: int = 0) -> int:
        """The most blocks that a sequence of `num_tokens` holds at once, with at most `step_tokens` added in a step.

        Or that `num_forks` of such sequences hold together, which have their first `num_shared_tokens` in common.
        """
        whole = -(-num_tokens // self.block_size)
        shared = num_shared_tokens // self.block_size
        return sum(
            shared + num_forks * (whole - shared)
            if window is None
            else num_forks * min(whole, -(-(window + step_tokens) // self.block_size) + 1)
            for window in self._windows
        )

    def open_blocks(self) -> list[int]:
        """The partly filled last block of every lease, in all groups. Mutates nothing."""
        return [
            int(table.ids[lease.num_computed_tokens // self.block_size])
            for lease in self._leases
            if lease.num_computed_tokens % self.block_size
            for table in lease.tables
        ]

    # -- holding prefixes --------------------------------------------------------------------------------------------

    def pin(self, tokens: TokenArray, scope: Scope) -> PinnedPrefix | None:
        """Hold the known whole blocks of a prefix, to which nobody appends; None if there is none. See Retention."""
        full = tokens.size // self.block_size
        while (found := self._known(tokens[: full * self.block_size], scope)).num_tokens < full * self.block_size:
            full = found.num_tokens // self.block_size  # shorter than the hit, it may look back on other window blocks
        if not full:
            return None
        num_tokens = full * self.block_size
        tables = [self._pin(row, window, num_tokens) for row, window in zip(found.blocks, self._windows, strict=True)]
        blocks = np.concatenate([table.held for table in tables])
        last, anchor = int(found.blocks[0, -1]), int(found.blocks[self._anchor, -1])
        prefix = tokens[:num_tokens]
        return PinnedPrefix(num_tokens, blocks, last, anchor, prefix, self._tree.lineages.of(prefix, scope))

    def unpin(self, pinned: PinnedPrefix) -> None:
        """Let go of a pinned prefix."""
        self._allocator.release(pinned.blocks)
        self._offer(pinned.last_block)
        self._offer_parts(pinned.tokens, pinned.lineage)

    def keep_copies(self, blocks: BlockIds, ttl_s: float) -> None:
        """Let copies of blocks in lower tiers last so long, 0 if no lease needs them any more; here there are none."""

    def keep_below(self, lease: Retained, ttl_s: float) -> None:
        """Let the tier that holds a lease keep its prefix so long; here there are no tiers, and no such leases."""

    def _pin(self, row: BlockIds, window: int | None, num_tokens: int) -> BlockTable:
        """A table of tree blocks, each retained but those that no token after `num_tokens` will read."""
        table = BlockTable(self.block_size, row)
        table.slide(min(self._first_needed(window, num_tokens), row.size))
        self._allocator.retain(table.held)
        return table

    def _first_needed(self, window: int | None, num_tokens: int) -> int:
        """The first block that the token at position `num_tokens` still reads."""
        return 0 if window is None else max(0, num_tokens - window + 1) // self.block_size

    # -- making room -------------------------------------------------------------------------------------------------

    def _tenant(self, scope: Scope) -> Tenant:
        return self.tenants.of(scope.namespace)

    def _allocate(self, count: int, scope: Scope) -> BlockIds:
        missing = count - self._allocator.num_free
        if missing > 0:
            self.retention.expire()
        if missing > self.tenants.num_evictable(scope.namespace):
            self.stats.num_failed_allocations += 1
            raise OutOfBlocks(count, self.num_available_to(scope))
        if missing > 0:
            self.evict(missing, scope.namespace)
        return self._allocator.allocate(count, self._tenant(scope).index)

    def keep_free(self, count: int) -> int:
        """Evict what nobody holds or is guaranteed until `count` blocks are free; returns how many that took."""
        missing = count - self._allocator.num_free
        return self.evict(missing, Taker.NEXT) if missing > 0 else 0

    def evict(self, count: int, taker: str | Taker = Taker.OPERATOR) -> int:
        """Free at least `count` cached blocks, or all that may go; returns how many.

        Args:
            taker: for which namespace, or for whom else.
        """
        why = OPERATOR if taker is Taker.OPERATOR else self._policy_name
        self._tree.expire(self._clock())
        freed, unable = 0, set[int]()
        while freed < count and (plan := self.tenants.plan(count - freed, taker, unable)):
            for account, share in plan:
                num_evicted = self._evict_from(account, share, why)
                freed += num_evicted
                if num_evicted < share:
                    unable.add(account)
        return freed

    def _evict_from(self, account: int, count: int, why: str) -> int:
        ids = self._tree.evict(count, self._allocator.held, account)
        self._on_evict(ids)
        self._note_evicted(ids, why)
        self._allocator.leave_tree(ids)
        self.stats.num_evicted_blocks += ids.size
        return int(ids.size)

    def _note_evicted(self, ids: BlockIds, why: str) -> None:
        self.tenants.note_evicted(ids)
        self.ages.on_evict(ids)
        if self.events is not None:
            self.events.on_gone(ids)
        lapsed_at = self.retention.lapsed_at[ids]
        self.retention.lapsed_at[ids] = 0
        books = why, int(ids.size), self.num_held_blocks, self.retention.num_blocks
        for moment in set(lapsed_at.tolist()):
            eviction = Eviction(self._clock(), *books, lease_expired_at=moment or None)
            self.misses.on_evict(ids[lapsed_at == moment], eviction)

    def _on_evict(self, ids: BlockIds) -> None:
        """Blocks are about to be freed; their bytes are still there."""

    def _offer(self, block_id: int | None) -> None:
        if block_id is not None and self._allocator.in_tree(block_id):
            self._tree.offer(block_id)

    def _offer_parts(self, tokens: TokenArray, lineage: Sequence[Segment]) -> None:
        """Offer what a sequence has in the scopes before its last one, whose nodes are not above its last block."""
        for segment, following in pairwise(lineage):
            self._tree.offer_along(tokens[segment.start : following.start], segment.scope)

    # -- all of it ---------------------------------------------------------------------------------------------------

    def blocks_by_namespace(self) -> Counter[str]:
        """Blocks in the tree of each namespace. O(blocks)."""
        self._catch_up()
        counts = self._allocator.count_by_label(self._allocator.ids_in_tree().astype(np.int32))
        return Counter({tenant.name: int(count) for tenant, count in zip(self.tenants.all(), counts, strict=False)})

    def block_map(self, max_cells: int) -> BlockMap:
        """What the pool is used for, and by whom: see `pagoda.kv.block_map`."""
        self._catch_up()
        return block_map(self._allocator, self.retention, max_cells)

    def outline(self, namespace: str | None, limit: int) -> list[PrefixView]:
        """The most used runs of the tree: see `pagoda.kv.view`."""
        self._catch_up()
        return outline(self._tree, self._allocator.held, namespace, limit)

    def prefixes(self, namespace: str | None = None) -> Iterator[PrefixView]:
        """What the tree has for a namespace, or for all: see `pagoda.kv.view`. Take it before the cache changes."""
        self._catch_up()
        return prefixes(self._tree, self._allocator.held, namespace)

    def clear(self) -> int:
        """Evict everything that no lease holds; returns how many blocks that freed."""
        return self.evict(self._allocator.num_cached)

    def check(self) -> None:
        """Verify conservation: every block is free, held or cached, and every reference has an owner. O(blocks).

        Raises:
            InvariantError: what is broken.
        """
        self._allocator.check()
        self._tree.check(self._allocator.held)
        refs = np.zeros(self.num_blocks, dtype=np.int64)
        for lease in self._leases:
            for table in lease.tables:
                np.add.at(refs, table.held, 1)
        for retained in self.retention.leases:
            refs[retained.pinned.blocks] += 1
        if not np.array_equal(refs, self._allocator.ref_counts()):
            raise InvariantError("reference counts and leases disagree")
        if not np.array_equal(np.sort(self._tree.block_ids()), self._allocator.ids_in_tree()):
            raise InvariantError("the tree and the allocator disagree on what is in the tree")
        tails = {int(lease.tables[0].ids[lease.num_committed_blocks]) for lease in self._leases if lease.owns_tail}
        if tails != self._tail_owners:
            raise InvariantError("append rights and leases disagree")
