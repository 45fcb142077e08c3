"""What a policy sees, what it must do, and the heap behind those that are a sort key.

    tree ── offer(leaf) ──>  candidates  ── take() ──> the leaf whose end goes next
         ── on_insert, on_hit, on_evict ──> whatever the policy wants to learn

The tree offers only what may go (leaves that no request holds), so a policy never thinks about structure.
A policy serves one tree: it keeps that tree's candidates and may write `note` and `names` on its nodes.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from pagoda.errors import ConfigError


class Evictable(Protocol):
    """What a policy may look at; equal to itself only. Times are the tree's ticks, one per lookup or insertion."""

    tokens: npt.NDArray[np.integer]
    blocks: npt.NDArray[np.int32]  # ids, [num_groups, ceil(len(tokens) / block_size)]; -1 where a group has none
    depth: int  # tokens before this node on its path
    created: int
    last_access: int
    num_hits: int
    queued: bool  # the policy's: whether it has the leaf among its candidates
    note: float  # the policy's: nothing else reads it, and both parts of a split node keep it
    names: npt.NDArray[np.int64]  # the policy's: one a block, or none at all; at the top of a scope one, the scope's
    account: int  # whose share it is charged to
    priority: int  # 0 to 100; lower ones go first
    expires_at: float  # when it has the default priority again, in the cache's seconds

    @property
    def parent(self) -> Evictable | None:
        """The node above; None at the top of a scope."""


class EvictionPolicy(Protocol):
    """Chooses among evictable leaves."""

    def bind(self, block_size: int, num_blocks: int) -> None:
        """Start to serve a tree whose block ids are below `num_blocks`; called once, by the tree.

        Raises:
            ConfigError: it serves another.
        """

    def sibling(self) -> EvictionPolicy:
        """Another of this kind for other leaves of the same tree, which sees what this one learns.

        Of those that serve one tree, only the first is told of insertions, hits and evictions: of all nodes.
        """

    def offer(self, leaf: Evictable) -> None:
        """Make a leaf a candidate; called again for one that already is when another request lets go of it."""

    def take(self) -> Evictable | None:
        """Take the leaf to evict next out of the candidates; None when there is none.

        It may be stale: hit, taken hold of, or no leaf since it was offered. The tree checks that.
        """

    def discard(self, leaf: Evictable) -> None:
        """Take a leaf out of the candidates, wherever it stands; nothing if it is none."""

    def tail(self, leaf: Evictable) -> int:
        """How many tokens at the end of a leaf just taken may go before it is offered again; at least one."""

    def on_insert(self, node: Evictable, start: int, now: int) -> None:
        """`node.tokens[start:]` are new. Called after the node's statistics changed."""

    def on_hit(self, node: Evictable, now: int) -> None:
        """All of the node was hit. Called after its statistics changed."""

    def on_evict(self, node: Evictable, start: int) -> None:
        """`node.tokens[start:]` are about to go."""


class Policy:
    """What most policies have in common: they serve one tree, give up whole leaves and learn nothing from hooks."""

    block_size = 0

    def bind(self, block_size: int, num_blocks: int) -> None:
        """Note the block size."""
        if self.block_size:
            raise ConfigError("an eviction policy serves one tree; make another for another tree")
        self.block_size = block_size

    def sibling(self) -> Self:
        """One with candidates of its own. Whoever learns must share that."""
        other = type(self)()
        other.block_size = self.block_size
        return other

    def tail(self, leaf: Evictable) -> int:
        """All of it."""
        return leaf.tokens.size

    def on_insert(self, node: Evictable, start: int, now: int) -> None:
        """Nothing."""

    def on_hit(self, node: Evictable, now: int) -> None:
        """Nothing."""

    def on_evict(self, node: Evictable, start: int) -> None:
        """Nothing."""


class SortKey(Policy):
    """Base of the policies that are a sort key: the smallest goes first.

    A key is read when a leaf becomes evictable and again when it reaches the top of the heap: a leaf whose key has
    grown since is put back, which keeps eviction at O(log n) without moving heap entries on every hit.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Evictable]] = []
        self._entry: dict[Evictable, int] = {}  # which of its entries in the heap counts; the others are stale
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._entry)

    def key(self, leaf: Evictable) -> float:
        """The sort key; it may grow while the leaf is in the tree, never shrink."""
        raise NotImplementedError

    def offer(self, leaf: Evictable) -> None:
        """Put a leaf into the heap, unless it is there."""
        if not leaf.queued:
            leaf.queued = True
            order = self._entry[leaf] = next(self._order)
            heapq.heappush(self._heap, (self.key(leaf), order, leaf))

    def take(self) -> Evictable | None:
        """Take out the leaf with the smallest key."""
        while self._heap:
            key, order, leaf = self._heap[0]
            if self._entry.get(leaf) != order:
                heapq.heappop(self._heap)
                continue
            current = self.key(leaf)
            if current > key:
                order = self._entry[leaf] = next(self._order)
                heapq.heapreplace(self._heap, (current, order, leaf))
                continue
            heapq.heappop(self._heap)
            self.discard(leaf)
            return leaf
        return None

    def discard(self, leaf: Evictable) -> None:
        """Leave its entry behind, stale."""
        if self._entry.pop(leaf, None) is not None:
            leaf.queued = False
            if len(self._heap) > 2 * len(self._entry) + 64:
                self._heap = [entry for entry in self._heap if self._entry.get(entry[2]) == entry[1]]
                heapq.heapify(self._heap)
