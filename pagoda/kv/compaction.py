"""Compactor: a lease lets go of KV entries in its midst, and goes on in fewer blocks that are its own.

    before   | a b c d | e f g h | i j - - |     three blocks, in the tree or not       num_computed_tokens 10
    keep       a     d     f       i j           chosen by the caller, per layer and KV head
    after    | a d f i | j - - - |               two blocks of its own                  num_dropped 5

Nothing that others can see changes: kept entries are copied out of blocks that the tree or another lease has, and the
tree keeps those. Blocks that only this lease has are written over, so that a second compaction needs no room. A token's
place in a table is then its position less the table's `num_dropped`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pagoda.errors import InvariantError
from pagoda.kv.allocator import BlockIds
from pagoda.kv.block_table import BlockTable
from pagoda.kv.lease import Lease
from pagoda.kv.purging import Purging

Move = Callable[[int, BlockIds, BlockIds], None]


class Compactor(Purging):
    """Books on leases that can be compacted."""

    def compact(self, lease: Lease, num_kept: Sequence[int | None], move: Move) -> None:
        """Make a lease private, with as few blocks as its kept entries need; the others are the pool's again.

        From now on nothing of the lease enters the tree or the tiers. `num_computed_tokens` stays as it is.

        Args:
            num_kept: per layer group, how many entries stay; None: all that the table holds, as they are.
            move: called for each group of which entries stay, with its index and the old and new blocks: the caller
                moves the entries. The block lists may have blocks in common.

        Raises:
            OutOfBlocks: the pool cannot supply the blocks to copy to; nothing changed.
        """
        self._commit_own(lease)
        new = [self._target(table, kept) for table, kept in zip(lease.tables, num_kept, strict=True)]
        fresh = self._allocate(sum(int((ids < 0).sum()) for ids in new), lease.scope)
        num_blocks = lease.num_blocks
        last, tail = self._last_in_tree(lease), self._tail_in_tree(lease)
        self._detach(lease)
        for group, (table, kept, ids) in enumerate(zip(lease.tables, num_kept, new, strict=True)):
            missing = np.flatnonzero(ids < 0)
            ids[missing], fresh = fresh[: missing.size], fresh[missing.size :]
            old = table.ids.copy()
            if kept is None:
                for index in missing.tolist():
                    self._pool.copy_block(int(old[table.first + index]), int(ids[index]))
                dropped = table.num_dropped
            else:
                move(group, old, ids)
                dropped = lease.num_computed_tokens - kept
            gone = table.repack(ids, dropped)
            self._allocator.release(gone[~np.isin(gone, ids)])
        self.stats.num_returned_blocks += num_blocks - lease.num_blocks
        self._offer(last)
        self._offer(tail)
        self._offer_parts(lease.prompt, lease.lineage)

    def _target(self, table: BlockTable, kept: int | None) -> BlockIds:
        """The blocks that a table will have: its own where that is possible, -1 where a new one is needed."""
        held = table.held
        own = np.array([self._is_private(int(block)) for block in held], dtype=np.bool_)
        if kept is None:
            return np.where(own, held, -1).astype(np.int32)
        if not 0 < kept <= len(table) * table.block_size or table.first:
            raise InvariantError(f"cannot keep {kept} entries of a table of {held.size} blocks")
        target = np.full(-(-kept // table.block_size), -1, dtype=np.int32)
        reused = held[own][: target.size]
        target[: reused.size] = reused
        return target

    def _is_private(self, block: int) -> bool:
        return self._allocator.ref_count(block) == 1 and not self._allocator.in_tree(block)

    def _last_in_tree(self, lease: Lease) -> int | None:
        """The last of the group-0 blocks that a lease holds and the tree has."""
        table = lease.tables[0]
        ids = table.ids[table.first : lease.num_committed_blocks]
        if lease.is_detached:
            ids = ids[[self._allocator.in_tree(block) for block in ids.tolist()]]
        return int(ids[-1]) if ids.size else None

    def _tail_in_tree(self, lease: Lease) -> int | None:
        """The tree's block that a lease appends to in place."""
        return int(lease.tables[0].ids[lease.num_committed_blocks]) if lease.owns_tail else None
