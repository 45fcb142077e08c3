"""KVCache: the one class of this package that others call. It joins the allocator, the tree and the pool.

    acquire(prompt)  pin the longest known prefix           ──> Lease with num_hit_tokens
    reserve(n)       blocks for the next n tokens: allocate, evicting if short; copy a shared block before it is written
    advance(tokens)  the KV of these tokens is written: full blocks enter the tree, so that others share them at once
    fork()           a second lease on the same blocks
    release()        let go; the partly filled tail enters the tree too

A call either does all it says or raises and changes nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagoda.errors import InvariantError, OutOfBlocks
from pagoda.kv.allocator import Allocator, BlockIds
from pagoda.kv.block_table import BlockTable
from pagoda.kv.computing import Computing, PendingPrefix
from pagoda.kv.eviction import LRU, EvictionPolicy
from pagoda.kv.keys import Scope
from pagoda.kv.layout import KVLayout
from pagoda.kv.lease import Lease
from pagoda.kv.observe import Eviction, MissLog
from pagoda.kv.radix import RadixTree
from pagoda.kv.radix_node import ABSENT, Match, TokenArray
from pagoda.kv.retention import PinnedPrefix, Retention


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
    num_restored_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Hit:
    """A known prefix: its length, how many blocks hold it, and how many of those no lease holds yet."""

    num_tokens: int
    num_blocks: int
    num_idle_blocks: int


class KVCache:
    """Paged KV memory with prefix sharing. Not thread-safe: the engine's thread owns it.

    Args:
        layout: the model's KV layout.
        pool: where the bytes are; anything that can copy a block.
        policy: the order of eviction, for this cache alone; LRU when None.
        clock: seconds, for the ends of leases with a time to live.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: BlockCopier,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
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
        self._allocator = Allocator(pool.num_blocks)
        self._tree = RadixTree(layout.block_size, self._windows, pool.num_blocks, policy)
        self._tail_owners: set[int] = set()  # group-0 ids of partial tree blocks that a lease appends to
        self._computing = Computing(layout.block_size)
        self._leases: set[Lease] = set()
        self.retention = Retention(self, clock)
        self.misses = MissLog(self._tree, pool.num_blocks)
        self._policy_name = type(policy or LRU()).__name__
        self._clock = clock

    # -- looking up --------------------------------------------------------------------------------------------------

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

    def lookup(self, tokens: TokenArray, scope: Scope) -> Hit:
        """What `acquire` would find now. Mutates nothing."""
        return self._hit(self._tree.match(tokens[:-1], scope))

    def _hit(self, match: Match) -> Hit:
        ids = match.blocks[match.blocks != ABSENT]
        num_idle = ids.size - int(np.count_nonzero(self._allocator.held(ids)))
        return Hit(match.num_tokens, int(ids.size), num_idle)

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

    def pending(self, tokens: TokenArray, scope: Scope, num_hit_tokens: int) -> PendingPrefix | None:
        """The longest prefix beyond `num_hit_tokens` that a live lease is computing; None if there is none."""
        return self._computing.find(tokens, scope, num_hit_tokens)

    # -- the life of a lease -----------------------------------------------------------------------------------------

    def acquire(self, tokens: TokenArray, scope: Scope) -> Lease:
        """Pin the longest known prefix of `tokens`, at most all but the last, whose logits someone has to compute.

        A hit may end inside a block. If nobody else appends to that block, and all its tokens matched, the lease
        appends to it in place; otherwise it gets a copy, or, with no block to spare, a hit that ends before it.
        """
        lease = self._hold(tokens, scope)
        self.stats.num_query_tokens += tokens.size
        self.stats.num_hit_tokens += lease.num_hit_tokens
        self._computing.add(lease)
        return lease

    def _hold(self, tokens: TokenArray, scope: Scope) -> Lease:
        match = self._tree.match(tokens[:-1], scope)
        if (
            self._copies_tail(match)
            and len(self._windows) > self.num_available_blocks - self._hit(match).num_idle_blocks
        ):
            match = self._tree.match(tokens[: match.num_tokens // self.block_size * self.block_size], scope)
        match = self._tree.touch(match)
        full, extra = divmod(match.num_tokens, self.block_size)
        tables = [
            self._pin(row[:full], window, match.num_tokens)
            for row, window in zip(match.blocks, self._windows, strict=True)
        ]
        lease = Lease(scope, tables, tokens)
        lease.num_committed_blocks = full
        lease.num_computed_tokens = match.num_tokens
        if extra:
            tail = match.blocks[:, full]
            if self._copies_tail(match):
                self._copy_tail(lease, tail)
            else:
                self._adopt_tail(lease, tail)
        lease.num_hit_tokens = lease.num_computed_tokens
        self._leases.add(lease)
        return lease

    def _pin(self, row: BlockIds, window: int | None, num_tokens: int) -> BlockTable:
        """A table of tree blocks, each retained but those that no token after `num_tokens` will read."""
        table = BlockTable(self.block_size, row)
        table.slide(min(self._first_needed(window, num_tokens), row.size))
        self._allocator.retain(table.held)
        return table

    def _first_needed(self, window: int | None, num_tokens: int) -> int:
        """The first block that the token at position `num_tokens` still reads."""
        return 0 if window is None else max(0, num_tokens - window + 1) // self.block_size

    def _copies_tail(self, match: Match) -> bool:
        """Whether a hit ends inside a block that the lease may not append to."""
        if match.num_tokens % self.block_size == 0:
            return False
        node, shared = match.path[-1]
        return shared < node.tokens.size or int(match.blocks[0, -1]) in self._tail_owners

    def _adopt_tail(self, lease: Lease, tail: BlockIds) -> None:
        self._allocator.retain(tail)
        self._tail_owners.add(int(tail[0]))
        lease.owns_tail = True
        for table, block in zip(lease.tables, tail, strict=True):
            table.append(np.array([block], dtype=np.int32))

    def _copy_tail(self, lease: Lease, tail: BlockIds) -> None:
        self._allocator.retain(tail)  # the source must outlive the eviction that may make room for its copy
        for table, source, copy in zip(lease.tables, tail, self._allocate(tail.size), strict=True):
            self._pool.copy_block(int(source), int(copy))
            table.append(np.array([copy], dtype=np.int32))
        self.stats.num_copied_blocks += tail.size
        self._allocator.release(tail)
        self._offer(int(tail[0]))

    def reserve(self, lease: Lease, num_tokens: int) -> None:
        """Make room for the next `num_tokens` tokens of a lease: new blocks, and a copy of a block it may not write to.

        Raises:
            OutOfBlocks: the pool cannot supply them; nothing changed.
        """
        position = lease.num_computed_tokens
        first = position // self.block_size
        shared = [group for group, table in enumerate(lease.tables) if self._must_copy(lease, table, first)]
        grow = max(0, -(-(position + num_tokens) // self.block_size) - len(lease.tables[0]))
        if not shared and not grow:
            return
        ids = self._allocate(len(shared) + grow * len(lease.tables))
        for group, copy in zip(shared, ids, strict=False):
            self._replace_shared(lease, group, first, int(copy))
        for group, table in enumerate(lease.tables):
            start = len(shared) + group * grow
            table.append(ids[start : start + grow])

    def _replace_shared(self, lease: Lease, group: int, index: int, copy: int) -> None:
        """Copy-on-write of one table entry."""
        table = lease.tables[group]
        source = int(table.ids[index])
        self._pool.copy_block(source, copy)
        self.stats.num_copied_blocks += 1
        table.replace(index, copy)
        self._allocator.release(np.array([source], dtype=np.int32))
        if group == 0:  # the tree knows a block by its id in this group
            if lease.owns_tail:
                self._disown_tail(lease, source)
            self._offer(source)

    def _must_copy(self, lease: Lease, table: BlockTable, index: int) -> bool:
        if index >= len(table):
            return False
        block = int(table.ids[index])
        return self._allocator.ref_count(block) > 1 or (self._allocator.in_tree(block) and not lease.owns_tail)

    def _allocate(self, count: int) -> BlockIds:
        missing = count - self._allocator.num_free
        if missing > self._allocator.num_cached:
            raise OutOfBlocks(count, self.num_available_blocks)
        if missing > 0:
            self.evict(missing)
        return self._allocator.allocate(count)

    def evict(self, count: int) -> int:
        """Free at least `count` cached blocks, or all there are; returns how many."""
        ids = self._tree.evict(count, self._allocator.held)
        self._on_evict(ids)
        self._note_evicted(ids)
        self._allocator.leave_tree(ids)
        self.stats.num_evicted_blocks += ids.size
        return int(ids.size)

    def _note_evicted(self, ids: BlockIds) -> None:
        lapsed_at = self.retention.lapsed_at[ids]
        self.retention.lapsed_at[ids] = 0
        books = self._policy_name, int(ids.size), self.num_held_blocks, self.retention.num_blocks
        for moment in set(lapsed_at.tolist()):
            eviction = Eviction(self._clock(), *books, lease_expired_at=moment or None)
            self.misses.on_evict(ids[lapsed_at == moment], eviction)

    def advance(self, lease: Lease, tokens: TokenArray, num_computed_tokens: int) -> None:
        """Note that KV up to `num_computed_tokens` is written. Full blocks enter the tree; what slid out is let go.

        Args:
            tokens: the lease's whole sequence so far, at least that long.
        """
        if not lease.num_computed_tokens <= num_computed_tokens <= min(lease.capacity, tokens.size):
            raise InvariantError(f"cannot advance from {lease.num_computed_tokens} to {num_computed_tokens} tokens")
        if lease.num_computed_tokens < lease.prompt.size <= num_computed_tokens:
            self._computing.remove(lease)
        lease.num_computed_tokens = num_computed_tokens
        self._commit(lease, tokens, num_computed_tokens // self.block_size * self.block_size)
        slid = False
        for table, window in zip(lease.tables, self._windows, strict=True):
            first = min(self._first_needed(window, num_computed_tokens), lease.num_committed_blocks - 1)
            if first > table.first:
                self._allocator.release(table.slide(first))
                slid = True
        if slid:
            self._offer(self._last_committed(lease))

    def _last_committed(self, lease: Lease) -> int:
        return int(lease.tables[0].ids[lease.num_committed_blocks - 1])

    def _commit(self, lease: Lease, tokens: TokenArray, end: int) -> None:
        """Put the blocks up to token `end` into the tree; where the tree has them already, use the tree's instead."""
        start = lease.num_committed_blocks
        stop = -(-end // self.block_size)
        if stop <= start:
            return
        after = self._last_committed(lease) if start else None
        mine = np.array([table.ids[start:stop] for table in lease.tables])
        theirs, superseded = self._tree.insert(lease.scope, after, tokens[start * self.block_size : end], mine)
        if lease.owns_tail:  # the tail it appended to is the first of these
            self._disown_tail(lease, int(mine[0, 0]))
        entered = theirs == mine
        self._allocator.enter_tree(mine[entered])
        swapped = (theirs != mine) & (theirs != ABSENT)
        if swapped.any():
            self._allocator.retain(theirs[swapped])
            self._allocator.release(mine[swapped])
            for group, index in np.argwhere(swapped):
                lease.tables[group].replace(start + int(index), int(theirs[group, index]))
        if superseded.size:
            self._allocator.leave_tree(superseded)
        lease.num_committed_blocks = stop
        self.misses.on_commit(lease.scope, after, tokens[start * self.block_size : end], mine)
        self._on_commit(lease, after, tokens[start * self.block_size : end], mine, entered)

    def _disown_tail(self, lease: Lease, block_id: int) -> None:
        lease.owns_tail = False
        self._tail_owners.discard(block_id)

    def fork(self, lease: Lease) -> Lease:
        """A second lease on the same blocks; whichever writes to a shared one first gets a copy (in `reserve`)."""
        twin = Lease(lease.scope, [table.fork() for table in lease.tables], lease.prompt)
        twin.tier_use = lease.tier_use
        twin.num_hit_tokens = lease.num_computed_tokens
        twin.num_computed_tokens = lease.num_computed_tokens
        twin.num_committed_blocks = lease.num_committed_blocks
        for table in twin.tables:
            self._allocator.retain(table.held)
        self._leases.add(twin)
        return twin

    def release(self, lease: Lease, tokens: TokenArray) -> None:
        """End a lease. What it computed stays in the tree, the partly filled last block included.

        Args:
            tokens: the lease's whole sequence, at least `num_computed_tokens` long.
        """
        self._end(lease)
        self._commit(lease, tokens, lease.num_computed_tokens)
        self._let_go(lease)

    def discard(self, lease: Lease) -> None:
        """End a lease whose sequence nobody will continue: its partly filled last block is free at once."""
        self._end(lease)
        tail = lease.tables[0].ids[lease.num_committed_blocks :][:1].tolist()
        if lease.owns_tail:
            self._disown_tail(lease, tail[0])
        self._let_go(lease)
        for block in tail:  # it may be another's in the tree, whom this lease was the last to hold
            self._offer(block)

    def _end(self, lease: Lease) -> None:
        if lease.released:
            raise InvariantError("a lease was released twice")
        lease.released = True

    def _let_go(self, lease: Lease) -> None:
        self._leases.remove(lease)
        self._computing.remove(lease)
        for table in lease.tables:
            self._allocator.release(table.held)
        if lease.num_committed_blocks:
            self._offer(self._last_committed(lease))

    def _offer(self, block_id: int) -> None:
        if self._allocator.in_tree(block_id):
            self._tree.offer(block_id)

    def pin(self, tokens: TokenArray, scope: Scope) -> PinnedPrefix | None:
        """Hold the known whole blocks of a prefix, to which nobody appends; None if there is none. See Retention."""
        full = tokens.size // self.block_size
        while (found := self._tree.match(tokens[: full * self.block_size], scope)).num_tokens < full * self.block_size:
            full = found.num_tokens // self.block_size  # shorter than the hit, it may look back on other window blocks
        if not full:
            return None
        num_tokens = full * self.block_size
        tables = [self._pin(row, window, num_tokens) for row, window in zip(found.blocks, self._windows, strict=True)]
        blocks = np.concatenate([table.held for table in tables])
        return PinnedPrefix(num_tokens, blocks, int(found.blocks[0, -1]), int(found.blocks[self._anchor, -1]))

    def note_hit(self, lease: Lease) -> None:
        """Start the time of retained prefixes anew that a lease's hit covers."""
        table = lease.tables[self._anchor]
        self.retention.refresh(table.ids[table.first : lease.num_hit_tokens // self.block_size])

    def unpin(self, pinned: PinnedPrefix) -> None:
        """Let go of a pinned prefix."""
        self._allocator.release(pinned.blocks)
        self._offer(pinned.last_block)

    # -- tiers below the device: none here; see TieredCache ----------------------------------------------------------

    @property
    def is_restoring(self) -> bool:
        """Whether anything is on its way from a lower tier."""
        return False

    def restore(self, lease: Lease, seconds_per_token: float) -> None:
        """Start to restore more of a lease's prompt from lower tiers, if that may pay.

        Args:
            seconds_per_token: what computing a token costs now.
        """

    def chunk(self, lease: Lease, num_tokens: int) -> int:
        """How many of a lease's next tokens to compute now, at most `num_tokens`; 0 to wait for lower tiers."""
        return num_tokens

    def poll(self) -> None:
        """Take in what lower tiers delivered. Called once a step."""

    def wait(self, timeout_s: float) -> None:
        """Sleep until lower tiers deliver something, at most so long."""

    def close(self) -> None:
        """Let go of lower tiers."""

    def _on_commit(
        self, lease: Lease, after: int | None, tokens: TokenArray, blocks: BlockIds, entered: npt.NDArray[np.bool_]
    ) -> None:
        """Blocks of a lease came into the tree: those of `blocks`, after block `after`, where `entered` is true."""

    def _on_evict(self, ids: BlockIds) -> None:
        """Blocks are about to be freed; their bytes are still there."""

    # -- all of it ---------------------------------------------------------------------------------------------------

    def blocks_by_namespace(self) -> Counter[str]:
        """Blocks in the tree of each namespace. O(nodes)."""
        counts: Counter[str] = Counter()
        for scope in self._tree.scopes():
            counts[scope.namespace] += self._tree.num_blocks(scope)
        return counts

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
        counted = np.array([self._allocator.ref_count(block) for block in range(self.num_blocks)])
        if not np.array_equal(refs, counted):
            raise InvariantError("reference counts and leases disagree")
        ids = self._tree.block_ids()
        if ids.size != sum(self._allocator.in_tree(block) for block in range(self.num_blocks)):
            raise InvariantError("the tree and the allocator disagree on what is in the tree")
        tails = {int(lease.tables[0].ids[lease.num_committed_blocks]) for lease in self._leases if lease.owns_tail}
        if tails != self._tail_owners:
            raise InvariantError("append rights and leases disagree")
