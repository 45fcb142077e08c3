"""Purging: what is cached becomes unreachable at once, whoever uses it.

free or cached   its blocks are free at once
held             the requests go on with them, each for itself alone: `Lease.is_detached`
leased           its lease ends
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pagoda.errors import InvariantError
from pagoda.kv.allocator import BlockIds
from pagoda.kv.committing import Committing
from pagoda.kv.keys import Scope
from pagoda.kv.lease import Lease
from pagoda.kv.radix_node import Node, TokenArray, common_prefix
from pagoda.kv.retained import Retained


class Purging(Committing):
    """Books that can be made to forget."""

    def purge(self, where: Scope | str, prefix: TokenArray | None = None) -> int:
        """Make what is cached unreachable, leased or in use or not; returns how many blocks that took from the tree.

        Blocks that nobody holds are free at once, the others when the requests that hold them end; such a request
        goes on, for itself alone. Leases on purged blocks end.

        Args:
            where: a scope, or a namespace: all its scopes.
            prefix: only what begins with these tokens, and the blocks before it that nothing else continues and no
                other lease has. All when None.
        """

        def is_inside(scope: Scope) -> bool:
            return replace(scope, after=b"") == where if isinstance(where, Scope) else scope.namespace == where

        self._catch_up()
        self.misses.on_purge(where.namespace if isinstance(where, Scope) else where)
        tokens = np.empty(0, dtype=np.int32) if prefix is None else prefix
        gone = []
        for scope in [scope for scope in self._tree.scopes() if is_inside(scope)]:
            before = scope.tokens_before
            if common_prefix(before, tokens) == min(before.size, tokens.size):
                spots = self._tree.subtrees(scope, tokens[before.size :])
                gone += [self._purge_subtree(*spot) for spot in spots]
        for lease in self._leases:
            if is_inside(lease.scope) and np.array_equal(lease.prompt[: tokens.size], tokens):
                self._detach(lease)
        return sum(gone)

    def purge_lease(self, lease: Retained) -> int:
        """Purge what a lease keeps, and all that continues it; nothing if it has ended. Returns as `purge`."""
        return 0 if lease.released else self.purge(lease.scope, lease.pinned.tokens)

    def renew(self, fingerprint: bytes) -> None:
        """Forget all that is cached or leased: another model, of this `KVLayout.fingerprint`, computes from now on.

        Raises:
            InvariantError: a request holds KV; nothing changed.
        """
        if self._leases:
            raise InvariantError(f"{len(self._leases)} requests hold KV of the old model")
        for namespace in {scope.namespace for scope in self._tree.scopes()}:
            self.purge(namespace)
        self.misses.forget()
        if self.events is not None:
            self.events.renew(fingerprint)

    def _purge_subtree(self, node: Node, at: int) -> int:
        count = self._forget(self._tree.cut(node, at))
        above = node if at else node.parent
        while above is not None and above.parent is not None and not above.children:
            leased = np.flatnonzero(self.retention.is_leased(above.blocks).any(axis=0))
            kept = int(leased[-1]) + 1 if leased.size else 0
            count += self._forget(self._tree.cut(above, kept * self.block_size))
            above = None if kept else above.parent
        return count

    def _forget(self, ids: BlockIds) -> int:
        """Let go of blocks that were cut out of the tree."""
        self._on_purge(ids)
        if self.events is not None:
            self.events.on_gone(ids)
        gone = np.zeros(self.num_blocks, dtype=np.bool_)
        gone[ids] = True
        for lease in self._leases:
            if any(gone[table.held].any() for table in lease.tables):
                self._detach(lease)
        self._allocator.leave_tree(ids)
        self.retention.end_on(gone)
        return int(ids.size)

    def _detach(self, lease: Lease) -> None:
        """From now on a lease's blocks are its own."""
        lease.is_detached = True
        lease.num_reserved_tokens = 0
        self._computing.remove(lease)
        if lease.owns_tail:
            self._disown_tail(lease, int(lease.tables[0].ids[lease.num_committed_blocks]))

    def _on_purge(self, ids: BlockIds) -> None:
        """Blocks were purged: nothing may find them again."""
