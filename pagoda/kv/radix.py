"""RadixTree: which tokens have KV, and in which blocks. It holds ids only; it never frees and never touches tensors.

    root ── [You are a helpful assistant. | blocks 0 1 2] ──┬── [What is a radix tree? | 3 4]
                                                            └── [What is a B-tree? An | 5 6]      6 is a partial tail

Follows SGLang's RadixAttention (Zheng et al., 2024), with these rules:
- Nodes split only at block boundaries, so a block belongs to one node. Only a leaf may end in a partial block.
- Siblings may share the start of their first block; matching takes the one that shares most, so hits end at any token.
- Every node carries block ids per layer group. A window group may have holes (ABSENT).
- Evicting takes blocks from the ends of leaves, in the order of a policy. Before any of them go the blocks of window
  groups that lie more than a window before their node's end: no hit at that end, or below it, reads them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import cast

import numpy as np

from pagoda.errors import InvariantError
from pagoda.kv.allocator import BlockIds
from pagoda.kv.eviction import DEFAULT_PRIORITY, LRU, EvictionPolicy, Queues
from pagoda.kv.keys import Scope
from pagoda.kv.radix_index import Held, RadixIndex
from pagoda.kv.radix_node import ABSENT, Match, Node, Root, TokenArray, common_prefix, first_block_key

NO_DIRECTIVE = DEFAULT_PRIORITY, math.inf


class RadixTree(RadixIndex):
    """Prefixes of every scope, over blocks of `block_size` tokens and one set of ids per layer group.

    Args:
        block_size: tokens per block.
        windows: per layer group, its sliding window in tokens, or None.
        num_blocks: block ids are below this.
        policy: the order of eviction; it serves this tree alone.
        account_of: whose share a scope's blocks are charged to.
    """

    def __init__(
        self,
        block_size: int,
        windows: tuple[int | None, ...],
        num_blocks: int,
        policy: EvictionPolicy | None = None,
        account_of: Callable[[Scope], int] = lambda scope: 0,
    ) -> None:
        super().__init__(block_size, windows, num_blocks)
        self._now = 0
        self._queues = Queues(LRU() if policy is None else policy, block_size, num_blocks)
        self._account_of = account_of
        self._slid: defaultdict[int, dict[Node, None]] = defaultdict(dict)
        """Of each account an ordered set: nodes that may hold window blocks no hit will read."""

    # -- growing -----------------------------------------------------------------------------------------------------

    def touch(self, match: Match) -> Match:
        """Record a hit on every node of a match. Mutates their statistics.

        A node matched in part is split first, and blocks hit in part do not count: what was hit is likelier to be hit
        again, so statistics must not mix. Returns the match with its path as it is then.
        """
        self._now += 1
        path: list[tuple[Node, int]] = []
        for node, shared in match.path:
            whole = shared // self.block_size * self.block_size
            if shared == node.tokens.size:
                path.append((node, shared))
                continue
            if whole:
                path.append((self._split(node, whole), whole))
            if shared > whole:
                path.append((node, shared - whole))
        for node, shared in path:
            if shared == node.tokens.size:
                node.last_access = self._now
                node.num_hits += 1
                self._queues.first.on_hit(node, self._now)
        return Match(match.num_tokens, tuple(path), match.blocks)

    def insert(
        self,
        scope: Scope,
        after: int | None,
        tokens: TokenArray,
        blocks: BlockIds,
        standing: tuple[int, float] = NO_DIRECTIVE,
    ) -> tuple[BlockIds, BlockIds]:
        """Add computed blocks to the tree.

        Args:
            scope: whose prefixes they extend.
            after: the group-0 block that precedes them, itself in the tree; None at the start of a sequence.
            tokens: what the blocks hold; the last block may be partial.
            blocks: int32 `[num_groups, n]`, ABSENT where a window group has none.
            standing: the priority of what is new, and until when it has it.

        Returns:
            The blocks the tree has for these tokens, `[num_groups, n]`: the given ones, or those of whoever was first,
            or ABSENT; and the partial tails that the given blocks supersede and the tree gave up.
        """
        self._now += 1
        node, at = self._locate(scope, after)
        size, done = self.block_size, 0
        kept = blocks.copy()
        superseded = np.empty(0, dtype=np.int32)
        while done < tokens.size:
            rest = tokens[done:]
            block = done // size
            if at == node.tokens.size:  # below this node
                child = self._continuation(node, rest)
                if child is None:
                    self._append(node, rest, blocks[:, block:], standing)
                    break
                node, at = child, 0
            shared = common_prefix(node.tokens[at:], rest)
            whole = shared // size
            if whole:
                end = at // size + whole
                kept[:, block : block + whole] = self._merge(node, at // size, blocks[:, block : block + whole])
                at, done = end * size, done + whole * size
            elif shared == rest.size:  # a partial block whose tokens the tree has; it must not fill a hole for more
                kept[:, block:] = node.blocks[:, at // size : at // size + 1]
                break
            elif shared == node.tokens.size - at:  # the node's partial tail is the start of this block
                if (node.priority, node.expires_at) == standing or rest.size <= size:
                    superseded = self._supersede(node, at, rest, blocks[:, block:])
                    break
                superseded = self._supersede(node, at, rest[:size], blocks[:, block : block + 1])
                at, done = at + size, done + size
            else:
                node = self._split(node, at)
            node.last_access = self._now
        return kept, superseded

    def _locate(self, scope: Scope, after: int | None) -> tuple[Node, int]:
        """The node and the token offset in it just after a block."""
        if after is None:
            root = self._roots.get(scope)
            if root is None:
                root = self._roots[scope] = Root(scope, len(self.windows), self._now, self._account_of(scope))
            return root, 0
        node = self._owner[after]
        if node is None:
            raise InvariantError(f"block {after} is not in the tree")
        return node, (int(np.flatnonzero(node.blocks[0] == after)[-1]) + 1) * self.block_size

    def _append(self, node: Node, tokens: TokenArray, blocks: BlockIds, standing: tuple[int, float]) -> None:
        """Put tokens below a node that ends at a block boundary: in a leaf of the same standing, or a new child."""
        if node.parent is not None and not node.children and (node.priority, node.expires_at) == standing:
            start = node.tokens.size
            node.tokens = np.concatenate([node.tokens, tokens])
            node.blocks = np.concatenate([node.blocks, blocks], axis=1)
        else:
            start = 0
            child = Node(tokens.copy(), blocks.copy(), node, node.depth + node.tokens.size, self._now)
            node.attach(first_block_key(tokens, self.block_size), child)
            node = child
            if standing != NO_DIRECTIVE:
                self._queues.place(node, *standing)
        node.last_access = self._now
        self._own(node, blocks[0])
        self._queues.first.on_insert(node, start, self._now)

    def _merge(self, node: Node, start: int, blocks: BlockIds) -> BlockIds:
        """Fill the holes of a node from another's blocks for the same tokens; return what the node has now."""
        mine: BlockIds = node.blocks[:, start : start + blocks.shape[1]]
        np.copyto(mine, blocks, where=mine == ABSENT)
        self._own(node, mine[0])
        return mine

    def _supersede(self, node: Node, at: int, tokens: TokenArray, blocks: BlockIds) -> BlockIds:
        """Replace a node's partial tail by the same block with more tokens in it."""
        old = node.blocks[:, at // self.block_size]
        dropped: BlockIds = old[(old != blocks[:, 0]) & (old != ABSENT)]
        self._owner[dropped] = None
        if at == 0 and node.parent is not None:
            node.parent.detach(node)
            node.parent.attach(first_block_key(tokens, self.block_size), node)
        node.tokens = np.concatenate([node.tokens[:at], tokens])
        node.blocks = np.concatenate([node.blocks[:, : at // self.block_size], blocks], axis=1)
        node.last_access = self._now
        self._own(node, blocks[0])
        self._queues.first.on_insert(node, at, self._now)
        return dropped

    def _split(self, node: Node, at: int) -> Node:
        """Split a node at a block boundary; return the new upper part."""
        if node.parent is None or at == 0 or at % self.block_size:
            raise InvariantError("nodes split at block boundaries, and roots do not")
        columns = at // self.block_size
        upper = Node(node.tokens[:at].copy(), node.blocks[:, :columns].copy(), node.parent, node.depth, node.created)
        upper.last_access, upper.num_hits, upper.note = node.last_access, node.num_hits, node.note
        if (node.priority, node.expires_at) != NO_DIRECTIVE:
            self._queues.place(upper, node.priority, node.expires_at)
        node.parent.attach(node.key, upper)
        node.tokens, node.blocks = node.tokens[at:].copy(), node.blocks[:, columns:].copy()
        upper.names, node.names = node.names[:columns].copy(), node.names[columns:].copy()
        node.depth += at
        upper.attach(first_block_key(node.tokens, self.block_size), node)
        self._own(upper, upper.blocks[0])
        if node in self._slid[node.account]:
            self._slid[node.account][upper] = None
        return upper

    def prioritize(self, ids: BlockIds, standing: tuple[int, float]) -> None:
        """Give a priority until a time to consecutive group-0 blocks of one sequence, those that the tree has."""
        while ids.size:
            node: Node | None = self._owner[ids[0]]
            if node is None:
                ids = ids[1:]
                continue
            first = int(np.flatnonzero(node.blocks[0] == ids[0])[-1])
            count = min(ids.size, node.blocks.shape[1] - first)
            if (node.priority, node.expires_at) != standing:
                if first:
                    self._split(node, first * self.block_size)
                if count < node.blocks.shape[1]:
                    node = self._split(node, count * self.block_size)
                self._queues.place(node, *standing)
            ids = ids[count:]

    def _own(self, node: Node, ids: BlockIds) -> None:
        self._owner[ids[ids != ABSENT]] = node

    # -- shrinking ---------------------------------------------------------------------------------------------------

    def offer(self, block_id: int) -> None:
        """Note that a request let go of a group-0 block and of those before it: they may be evictable now."""
        node = self._owner[block_id]
        if node is None:
            raise InvariantError(f"block {block_id} is not in the tree")
        self._offer_node(node)

    def _offer_node(self, node: Node) -> None:
        if not node.children:
            self._queues.of(node).offer(node)
        if any(self.windows):
            above: Node | None = node
            while above is not None and above.parent is not None:
                self._slid[above.account][above] = None
                above = above.parent

    def expire(self, now: float) -> None:
        """Note the time: priorities that were given until then are over."""
        self._queues.expire(now)

    def offer_along(self, tokens: TokenArray, scope: Scope) -> None:
        """Note that a request let go of what the tree has of these tokens in a scope: it may be evictable now."""
        node: Node | None = self._roots.get(scope)
        done, last = 0, None
        while node is not None and done < tokens.size:
            child, shared = self._step(node, tokens[done:])
            if child is None:
                break
            last, done = child, done + shared
            node = child if shared == child.tokens.size else None
        if last is not None:
            self._offer_node(last)

    def evict(self, count: int, held: Held, account: int = 0) -> BlockIds:
        """Give up at least `count` blocks of an account, or all of its that may go. Mutates the tree.

        The caller frees what is returned.

        Args:
            held: tells for each block whether a request holds it; those stay.

        Returns:
            Block ids in the order of eviction; a few more than `count` where layer groups go together.
        """
        gone: list[BlockIds] = []
        missing = count
        slid = self._slid[account]
        while missing > 0 and slid:
            node = next(iter(slid))
            ids = self._take_slid(node, held, missing)
            if ids.size < missing:
                del slid[node]
            gone.append(ids)
            missing -= ids.size
        while missing > 0 and (taken := self._queues.take(account)) is not None:
            leaf, policy = cast(Node, taken[0]), taken[1]
            if leaf.children:
                continue
            most = -(-policy.tail(leaf) // self.block_size) * len(self.windows)
            ids, blocked = self._take_tail(leaf, held, min(missing, most))
            gone.append(ids)
            missing -= ids.size
            if not leaf.tokens.size:
                self._remove(leaf)
            elif not blocked:
                policy.offer(leaf)
        if missing > 0 and any(self.windows):  # only paths of running requests are left, and they slid past these
            for node in self.nodes():
                if node.account == account:
                    ids = self._take_slid(node, held, missing, even_recent=True)
                    gone.append(ids)
                    missing -= ids.size
        evicted = np.concatenate(gone) if gone else np.empty(0, dtype=np.int32)
        self._owner[evicted] = None
        return evicted

    def _take_slid(self, node: Node, held: Held, count: int, *, even_recent: bool = False) -> BlockIds:
        """Up to `count` unheld blocks of window groups that lie more than a window before the node's end, or any."""
        gone: list[BlockIds] = []
        for group, window in enumerate(self.windows):
            if window is not None:
                end = node.tokens.size if even_recent else max(0, node.tokens.size - window + 1)
                row = node.blocks[group, : end // self.block_size]
                columns = np.flatnonzero(row != ABSENT)
                columns = columns[~held(row[columns])][: count - sum(ids.size for ids in gone)]
                gone.append(row[columns])
                row[columns] = ABSENT
        return np.concatenate(gone)

    def _take_tail(self, leaf: Node, held: Held, count: int) -> tuple[BlockIds, bool]:
        """At least `count` blocks from the end of a leaf, if so many are unheld, and whether a held one stopped it."""
        if self.windows == (None,):  # no holes, and no groups that go together: the same in fewer steps
            row = leaf.blocks[0]
            stops = held(row[-count:]).nonzero()[0]
            columns = max(0, row.size - count) + (int(stops[-1]) + 1 if stops.size else 0)
            return self._cut(leaf, columns, row[columns:][::-1]), bool(stops.size)
        present = leaf.blocks != ABSENT
        busy = np.zeros_like(present)
        busy[present] = held(leaf.blocks[present])
        stops = np.flatnonzero(busy.any(axis=0))
        first = int(stops[-1]) + 1 if stops.size else 0  # the columns from here on may go
        supply = np.cumsum(present[:, first:].sum(axis=0)[::-1])
        if not supply.size:
            return np.empty(0, dtype=np.int32), True
        enough = supply[min(int(np.searchsorted(supply, count)), supply.size - 1)]
        columns = leaf.blocks.shape[1] - int(np.searchsorted(supply, enough, side="right"))
        tail = leaf.blocks[:, columns:]
        ids = tail.T[::-1][present[:, columns:].T[::-1]]
        return self._cut(leaf, columns, ids), columns == first and columns > 0

    def _cut(self, leaf: Node, columns: int, ids: BlockIds) -> BlockIds:
        """Take all but the first columns from a leaf; they hold `ids`, fewer than columns where windows slid past."""
        if columns < leaf.blocks.shape[1]:
            self._queues.first.on_evict(leaf, columns * self.block_size)
            leaf.tokens = _head(leaf.tokens, columns * self.block_size)
            leaf.blocks = leaf.blocks[:, :columns].copy()
            leaf.names = leaf.names[:columns].copy()
        return ids

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        if parent is None:
            raise InvariantError("a root is never evicted")
        parent.detach(leaf)
        self._slid[leaf.account].pop(leaf, None)
        self._queues.forget(leaf)
        if parent.children:
            return
        if isinstance(parent, Root):
            del self._roots[parent.scope]
        else:
            self._queues.of(parent).offer(parent)

    def cut(self, node: Node, at: int) -> BlockIds:
        """Give up `node.tokens[at:]` and all below, held or not; `at` is a block boundary. Returns the blocks."""
        gone = [self._drop(node, at)]
        below = node.detach_all()
        while below:
            child = below.pop()
            gone.append(self._drop(child, 0))
            below += child.detach_all()
        ids = np.concatenate(gone)
        self._owner[ids] = None
        if at:
            self._queues.of(node).offer(node)
        else:
            self._remove(node)
        return ids

    def _drop(self, node: Node, at: int) -> BlockIds:
        """Take the end off a node, and the node out of the books if nothing is left of it."""
        self._queues.first.on_evict(node, at)
        if at == 0:
            self._queues.forget(node)
            self._slid[node.account].pop(node, None)
        gone = node.blocks[:, at // self.block_size :]
        node.tokens, node.blocks = node.tokens[:at].copy(), node.blocks[:, : at // self.block_size].copy()
        node.names = node.names[: at // self.block_size].copy()
        ids: BlockIds = gone[gone != ABSENT]
        return ids


def _head(array: TokenArray, length: int) -> TokenArray:
    """The first elements: a view while it keeps at most twice their memory alive, else a copy."""
    whole = array if array.base is None else array.base
    return array[:length] if 2 * length >= whole.size else array[:length].copy()
