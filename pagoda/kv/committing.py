"""Committing: the full blocks of leases enter the tree, at the latest when somebody could find them.

    tree    a b            what a lease wrote   a b | c d e .      c, d and e are full: late, and found in its place b
    lookup  a b ...        ends at b ──> c, d and e are committed ──> it looks again, and goes on

To put a block into the tree costs much the same as to put ten, and most that are generated are looked for by nobody
before their request ends. So they may wait, as long as nothing could tell: where they go on from is the end of a leaf,
nobody else goes on from there, no listener or tier is to be told, and no window slides past them. Whoever finds the
end of that leaf, goes on from it or passes it has them committed. So what is late is never what somebody else has, too.
(What counts by entries to the tree, ages of blocks and the ticks of eviction policies, counts what was late from then
on: mostly from the end of the request that held it until then.)
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pagoda.errors import InvariantError
from pagoda.kv.allocator import BlockIds
from pagoda.kv.books import Books
from pagoda.kv.directives import Directive
from pagoda.kv.keys import Scope
from pagoda.kv.lease import Lease
from pagoda.kv.lineage import PUBLIC, Segment
from pagoda.kv.radix import NO_DIRECTIVE
from pagoda.kv.radix_node import ABSENT, Match, TokenArray


class Committing(Books):
    """Books that full blocks enter."""

    def _commit_full(self, lease: Lease, tokens: TokenArray) -> None:
        """Put the full blocks of a lease into the tree, or let them wait. It has some that were not full before."""
        place = self._place(lease)
        late = self._late.get(place)
        if (late is None and self._may_wait(lease, place)) or (late is not None and late[0] is lease):
            self._late[place] = lease, tokens
        else:
            self._commit(lease, tokens, self._whole(lease))

    def _place(self, lease: Lease) -> int:
        """The block that what a lease commits next goes on from: its last in the tree; -1 if it has none."""
        first = lease.num_committed_blocks
        return int(lease.tables[0].ids[first - 1]) if first and not lease.is_detached else -1

    def _may_wait(self, lease: Lease, place: int) -> bool:
        """Whether nothing could tell that a lease's full blocks are not in the tree."""
        return (
            lease.lineage[-1].start < lease.num_committed_blocks * self.block_size
            and not (lease.is_detached or self._slides or self._tells)
            and self._tree.ends_at(place)
        )

    @property
    def _tells(self) -> bool:
        """Whether somebody is told of each block that enters the tree."""
        return self.events is not None

    def _whole(self, lease: Lease) -> int:
        """The tokens in a lease's full blocks."""
        return lease.num_computed_tokens // self.block_size * self.block_size

    def _commit_at_end(self, match: Match) -> bool:
        num_whole = match.num_tokens // self.block_size
        return bool(self._late and num_whole) and self._commit_late(int(match.blocks[0, num_whole - 1]))

    def _commit_late(self, place: int) -> bool:
        """Commit what goes on from a block; whether there was anything."""
        late = self._late.pop(place, None)
        if late is not None:
            lease, tokens = late
            self._commit(lease, tokens, self._whole(lease))
        return late is not None

    def _commit_own(self, lease: Lease) -> None:
        """Commit what is late of a lease."""
        late = self._late.get(self._place(lease))
        if late is not None and late[0] is lease:
            self._commit(*late, self._whole(lease))

    def _catch_up(self) -> None:
        while self._late:
            self._commit_late(next(iter(self._late)))

    def check(self) -> None:
        """See Books."""
        super().check()
        for place, (lease, tokens) in self._late.items():
            full = lease.num_committed_blocks * self.block_size < self._whole(lease) <= tokens.size
            if lease not in self._leases or place != self._place(lease) or not full or not self._tree.ends_at(place):
                raise InvariantError("a lease's full blocks wait to enter the tree where others could miss them")

    def _commit(self, lease: Lease, tokens: TokenArray, end: int) -> None:
        """Put the blocks up to token `end` into the tree; where the tree has them already, use the tree's instead."""
        late = self._late.pop(self._place(lease), None)
        if late is not None and late[0] is not lease:  # it was first
            self._commit(*late, self._whole(late[0]))
        if lease.num_committed_blocks >= -(-end // self.block_size):
            return
        whole = end // self.block_size * self.block_size
        for segment, following in pairwise(lease.lineage):  # they meet where a block ends
            self._commit_part(lease, segment, tokens, min(following.start, whole))
        self._commit_part(lease, lease.lineage[-1], tokens, end)

    def _commit_part(self, lease: Lease, segment: Segment, tokens: TokenArray, end: int) -> None:
        """Commit as far as a segment goes, all before it being committed."""
        first, last = lease.num_committed_blocks, -(-end // self.block_size)
        if not segment.start <= first * self.block_size < end:
            return
        for _, stop, directive in lease.directives.runs(first, last, self.block_size):
            self._commit_run(lease, segment, tokens, min(end, stop * self.block_size), directive)

    def _commit_run(
        self, lease: Lease, segment: Segment, tokens: TokenArray, end: int, directive: Directive | None
    ) -> None:
        start, stop = lease.num_committed_blocks, -(-end // self.block_size)
        if lease.is_detached:
            lease.num_committed_blocks = stop
            return
        after = self._place(lease) if start * self.block_size > segment.start else None
        mine = np.array([table.ids[start:stop] for table in lease.tables])
        standing = NO_DIRECTIVE if directive is None else (directive.priority, lease.directives.ends(directive))
        new = tokens[start * self.block_size : end]
        theirs, superseded = self._tree.insert(segment.scope, after, new, mine, standing)
        if directive is not None:  # what others had computed before goes by it too
            self._tree.prioritize(theirs[0][theirs[0] != ABSENT], standing)
        if lease.owns_tail:  # the tail it appended to is the first of these
            self._disown_tail(lease, int(mine[0, 0]))
        entered = theirs == mine
        self._allocator.enter_tree(mine[entered])
        if segment.scope == PUBLIC:
            self._allocator.relabel(mine[entered], self._tenant(PUBLIC).index)
        self.ages.on_commit(mine[entered])
        swapped = (theirs != mine) & (theirs != ABSENT)
        if swapped.any():
            self._allocator.retain(theirs[swapped])
            self._allocator.release(mine[swapped])
            for group, index in np.argwhere(swapped):
                lease.tables[group].replace(start + int(index), int(theirs[group, index]))
        if superseded.size:
            self._allocator.leave_tree(superseded)
        lease.num_committed_blocks = stop
        for passed in theirs[0][swapped[0]].tolist():
            self._commit_late(passed)
        self.misses.on_commit(segment.scope, after, new, mine)
        if self.events is not None:
            self.events.on_commit(segment.scope, after, new, mine, entered)
        self._on_commit(lease, segment.scope, after, new, mine, entered)

    def _disown_tail(self, lease: Lease, block_id: int) -> None:
        lease.owns_tail = False
        self._tail_owners.discard(block_id)

    def _on_commit(
        self,
        lease: Lease,
        scope: Scope,
        after: int | None,
        tokens: TokenArray,
        blocks: BlockIds,
        entered: npt.NDArray[np.bool_],
    ) -> None:
        """Blocks of a lease came into the tree: those of `blocks` where `entered` is true,
        in a scope after block `after`, or first of all."""
