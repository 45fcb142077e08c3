"""KVCache: the one class of this package that others call. It joins the allocator, the tree and the pool.

    acquire(prompt)  pin the longest known prefix           ──> Lease with num_hit_tokens
    reserve(n)       blocks for the next n tokens: allocate, evicting if short; copy a shared block before it is written
    advance(tokens)  the KV of these tokens is written: others find its full blocks at once; see Committing
    fork()           a second lease on the same blocks
    compact()        fewer entries in blocks of its own: see Compactor
    release()        let go; the partly filled tail enters the tree too

A call either does all it says or raises and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagoda.errors import InvariantError, LeaseRefused, OutOfBlocks
from pagoda.kv.allocator import BlockIds
from pagoda.kv.block_table import BlockTable
from pagoda.kv.books import BlockCopier, CacheStats, Hit
from pagoda.kv.compaction import Compactor
from pagoda.kv.directives import Directive, Directives
from pagoda.kv.keys import Scope
from pagoda.kv.lease import Lease, TierUse
from pagoda.kv.lineage import PUBLIC
from pagoda.kv.radix_node import Match, TokenArray

__all__ = ["BlockCopier", "CacheStats", "Hit", "KVCache"]


class KVCache(Compactor):
    """Paged KV memory with prefix sharing: Books, and the life of a lease on them. Not thread-safe."""

    def acquire(self, tokens: TokenArray, scope: Scope, hit: Hit | None = None) -> Lease:
        """Pin the longest known prefix of `tokens`, at most all but the last, whose logits someone has to compute.

        A hit may end inside a block. If nobody else appends to that block, and all its tokens matched, the lease
        appends to it in place; otherwise it gets a copy, or, with no block to spare, a hit that ends before it.

        Args:
            hit: what `lookup` found, if nothing changed since.
        """
        lease = self._hold(tokens, scope, self._match(tokens, scope) if hit is None else hit.match)
        table = lease.tables[self._anchor]
        self.ages.on_hit(table.ids[table.first : lease.num_committed_blocks])
        self.stats.num_query_tokens += tokens.size
        self.stats.num_hit_tokens += lease.num_hit_tokens
        self._computing.add(lease)
        return lease

    def hold(self, tokens: TokenArray, scope: Scope) -> Lease:
        """A lease as `acquire` gives, of one who computes nothing that others may wait for: it counts as no lookup."""
        return self._hold(tokens, scope, self._match(tokens, scope))

    def quarantine(self, tokens: TokenArray, scope: Scope) -> str:
        """The last block of a prefix was found to hold wrong KV: it and all that continues it are forgotten.

        Returns what is known of where it came from.
        """
        self.purge(scope, tokens)
        return "it was computed here"

    def _hold(self, tokens: TokenArray, scope: Scope, match: Match) -> Lease:
        if (
            self._copies_tail(match)
            and len(self._windows) > self.num_available_to(scope) - self._hit(match).num_idle_blocks
        ):
            match = self._tree.match(tokens[: match.num_tokens // self.block_size * self.block_size], scope)
        match = self._tree.touch(match)
        full, extra = divmod(match.num_tokens, self.block_size)
        tables = [
            self._pin(row[:full], window, match.num_tokens)
            for row, window in zip(match.blocks, self._windows, strict=True)
        ]
        lease = Lease(scope, self._tree.lineages.of(tokens, scope), tables, tokens)
        lease.num_committed_blocks = full
        lease.num_computed_tokens = match.num_tokens
        if extra:
            tail = match.blocks[:, full]
            if self._copies_tail(match):
                self._copy_tail(lease, tail)
            else:
                self._adopt_tail(lease, tail)
        lease.num_hit_tokens = lease.num_leading_tokens = lease.num_computed_tokens
        self._leases.add(lease)
        return lease

    def direct(self, lease: Lease, ranges: Sequence[Directive]) -> None:
        """Give priorities to ranges of a lease's sequence: to what it hit now, and to what it commits when it does.

        Args:
            ranges: in order, none overlapping another; their time begins now.
        """
        self._commit_own(lease)
        lease.directives = Directives(tuple(ranges), self._clock())
        table = lease.tables[0]
        for start, stop, directive in lease.directives.runs(table.first, lease.num_committed_blocks, self.block_size):
            if directive is not None and not lease.is_detached:
                standing = directive.priority, lease.directives.ends(directive)
                self._tree.prioritize(table.ids[start:stop], standing)

    def detach(self, lease: Lease) -> None:
        """Keep what a lease writes from now on to itself: nothing of it enters the tree or a tier."""
        if not lease.is_detached:
            self._commit_own(lease)
            self._detach(lease)

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
        for table, source, copy in zip(lease.tables, tail, self._allocate(tail.size, lease.scope), strict=True):
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
        position, tables = lease.num_computed_tokens, lease.tables
        if position + num_tokens <= lease.num_reserved_tokens:
            return
        shared = [
            (group, index)
            for group, table in enumerate(tables)
            for index in range(table.index(position), len(table))
            if self._must_copy(lease, table, index)
        ]
        grow = [max(0, table.index(position + num_tokens - 1) + 1 - len(table)) for table in tables]
        ids = self._allocate(len(shared) + sum(grow), lease.scope)
        for (group, index), copy in zip(shared, ids, strict=False):
            self._replace_shared(lease, group, index, int(copy))
        start = len(shared)
        for table, count in zip(tables, grow, strict=True):
            table.append(ids[start : start + count])
            start += count
        lease.num_reserved_tokens = lease.capacity

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
        block = int(table.ids[index])
        return self._allocator.ref_count(block) > 1 or (self._allocator.in_tree(block) and not lease.owns_tail)

    def advance(self, lease: Lease, tokens: TokenArray, num_computed_tokens: int) -> None:
        """Note that KV up to `num_computed_tokens` is written. Others may find full blocks; what slid out is let go.

        Args:
            tokens: the lease's whole sequence so far, at least that long.
        """
        before, size = lease.num_computed_tokens, self.block_size
        room = lease.num_reserved_tokens or lease.capacity
        if not before <= num_computed_tokens <= min(room, tokens.size):
            raise InvariantError(f"cannot advance from {before} to {num_computed_tokens} tokens")
        if before < lease.prompt.size <= num_computed_tokens:
            self._computing.remove(lease)
        self._tenant(lease.scope).num_written_tokens += num_computed_tokens - before
        lease.num_computed_tokens = num_computed_tokens
        if num_computed_tokens // size > before // size:
            self._commit_full(lease, tokens)
        if self._slides:
            self._slide(lease)

    def _slide(self, lease: Lease) -> None:
        """Let go of the blocks that slid out of a lease's windows."""
        slid = False
        last = self._last_in_tree(lease)
        for table, window in zip(lease.tables, self._windows, strict=True):
            first = min(self._first_needed(window, lease.num_computed_tokens), lease.num_committed_blocks - 1)
            if first > table.first:
                self._allocator.release(table.slide(first))
                slid = True
        if slid:
            self._offer(last)
            self._offer_parts(lease.prompt, lease.lineage)

    def publish(self, tokens: TokenArray, scope: Scope) -> int:
        """Let every tenant hit the whole blocks of a prefix; what follows it stays each one's own.

        Of what the scope has cached, a copy becomes public; the rest does when it is next computed.

        Returns:
            How many of the prefix's tokens are cached for all now.

        Raises:
            LeaseRefused: there is no whole block in it, or too much is public; nothing changed.
        """
        whole = tokens[: tokens.size // self.block_size * self.block_size]
        if not whole.size:
            raise LeaseRefused(f"only whole blocks of {self.block_size} tokens can be published")
        known = self.pin(whole, scope)
        try:
            self._tree.lineages.publish(whole)
            if known is not None and known.blocks.size * self.block_size == known.num_tokens * len(self._windows):
                self._copy_to_public(whole[: known.num_tokens], known.blocks.reshape(len(self._windows), -1))
        finally:
            if known is not None:
                self.unpin(known)
        return self._tree.match(whole, PUBLIC).num_tokens

    def published(self) -> list[tuple[TokenArray, int]]:
        """The public prefixes, and how many tokens of each are cached for all now."""
        tree = self._tree
        return [(tokens, tree.match(tokens, PUBLIC).num_tokens) for tokens in tree.lineages.published]

    def unpublish(self, tokens: TokenArray) -> int:
        """Let nobody find what begins with these whole blocks as public any more; returns how many prefixes end."""
        whole = tokens[: tokens.size // self.block_size * self.block_size]
        return self._tree.lineages.unpublish(whole) if whole.size else 0

    def _copy_to_public(self, tokens: TokenArray, source: BlockIds) -> None:
        lease = self._hold(np.append(tokens, tokens[:1]), PUBLIC, self._tree.match(tokens, PUBLIC))
        first = lease.num_computed_tokens // self.block_size
        try:
            self.reserve(lease, tokens.size - lease.num_computed_tokens)
        except OutOfBlocks:
            self.discard(lease)  # the next request that has these tokens computes them
            return
        for table, row in zip(lease.tables, source, strict=True):
            for block, copy in zip(row[first:].tolist(), table.ids[first:].tolist(), strict=True):
                self._pool.copy_block(block, copy)
        self.advance(lease, tokens, int(tokens.size))
        self.release(lease, tokens)

    def fork(self, lease: Lease) -> Lease:
        """A second lease on the same blocks; whichever writes to a shared one first gets a copy (in `reserve`)."""
        self._commit_own(lease)
        twin = Lease(lease.scope, lease.lineage, [table.fork() for table in lease.tables], lease.prompt)
        twin.tier_use = lease.tier_use
        twin.num_hit_tokens = twin.num_leading_tokens = lease.num_computed_tokens
        twin.num_computed_tokens = lease.num_computed_tokens
        twin.num_committed_blocks = lease.num_committed_blocks
        twin.is_detached = lease.is_detached
        twin.directives = lease.directives
        lease.num_reserved_tokens = 0
        for table in twin.tables:
            self._allocator.retain(table.held)
        self._leases.add(twin)
        return twin

    def release(self, lease: Lease, tokens: TokenArray) -> None:
        """End a lease. What it computed stays in the tree, if the pool has it the partly filled block too.

        Args:
            tokens: the lease's whole sequence, at least `num_computed_tokens` long.
        """
        self._end(lease)
        self._commit(lease, tokens, self._whole(lease) if self._only_whole else lease.num_computed_tokens)
        self._let_go(lease)

    def discard(self, lease: Lease) -> None:
        """End a lease whose sequence nobody will continue: its partly filled last block is free at once."""
        self._end(lease)
        self._commit_own(lease)
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
        last = self._last_in_tree(lease)
        for table in lease.tables:
            self._allocator.release(table.held)
        self._offer(last)
        self._offer_parts(lease.prompt, lease.lineage)

    def note_hit(self, lease: Lease) -> None:
        """Start the time of retained prefixes anew that a lease's hit covers."""
        table = lease.tables[self._anchor]
        self.retention.refresh(table.ids[table.first : lease.num_hit_tokens // self.block_size])

    def note_prompt(self, scope: Scope, num_tokens: int, num_hit_tokens: int) -> None:
        """Count a prompt for its tenant, once, however often it is looked up, and what of it tiers and the pool had."""
        tenant = self._tenant(scope)
        tenant.num_query_tokens += num_tokens
        tenant.num_hit_tokens += num_hit_tokens

    def check(self) -> None:
        """See Books."""
        super().check()
        for lease in self._leases:
            if not lease.num_reserved_tokens:
                continue
            if lease.num_reserved_tokens != lease.capacity:
                raise InvariantError("a lease has less room, or more, than it was told")
            for table in lease.tables:
                for index in range(table.index(lease.num_computed_tokens), len(table)):
                    if self._must_copy(lease, table, index):
                        raise InvariantError("a lease may write to a block that others read")

    # -- tiers below the device: none here; see TieredCache ----------------------------------------------------------

    @property
    def is_restoring(self) -> bool:
        """Whether anything is on its way from a lower tier."""
        return False

    @property
    def can_prefetch(self) -> bool:
        """Whether another waiting prompt may be prefetched for now."""
        return False

    def prefetch(self, tokens: TokenArray, scope: Scope, use: TierUse) -> int:
        """Start to bring up what lower tiers have of a prompt that waits; returns a ticket for `restore`.

        Whoever gives the prompt up hands the ticket to `drop_prefetch`.
        """
        return 0

    def drop_prefetch(self, ticket: int) -> None:
        """The prompt of a ticket will not be restored; nothing if it was."""

    def restore(self, lease: Lease, seconds_per_token: float, ticket: int = 0) -> None:
        """Start to restore more of a lease's prompt from lower tiers, if that may pay.

        What was prefetched is there at once: `num_computed_tokens` may be more than before.

        Args:
            seconds_per_token: what computing a token costs now.
            ticket: of what was prefetched for the prompt; 0: nothing.
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
