"""Eviction policies: each is a sort key over the tree's evictable leaves; the smallest goes first.

The tree offers only what may go (leaves that no request holds), so a policy never thinks about structure.
A key is read when a leaf becomes evictable and again when it reaches the top of the heap: a leaf whose key has grown
since is put back, which keeps eviction at O(log n) without moving heap entries on every hit.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, Protocol, TypeVar


class Evictable(Protocol):
    """What a policy may look at. Times are ticks of the tree's clock, one per lookup or insertion."""

    last_access: int
    created: int
    num_hits: int

    @property
    def depth(self) -> int:
        """Tokens before this node on its path."""


class EvictionPolicy(Protocol):
    """Orders evictable leaves."""

    def key(self, leaf: Evictable) -> float:
        """The sort key; it may grow while the leaf is in the tree, never shrink."""


class LRU:
    """Least recently used first."""

    def key(self, leaf: Evictable) -> float:
        """The tick of the last hit or insertion."""
        return leaf.last_access


class _Queued(Evictable, Protocol):
    queued: bool


L = TypeVar("L", bound=_Queued)


class EvictionQueue(Generic[L]):
    """A heap of leaves in the order of a policy, each leaf in it at most once.

    Entries may be stale: a leaf may have been hit, taken hold of, or left the tree since. Who takes a leaf checks it.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[float, int, L]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, leaf: L) -> None:
        """Put a leaf in, unless it is in already."""
        if not leaf.queued:
            leaf.queued = True
            heapq.heappush(self._heap, (self._policy.key(leaf), next(self._order), leaf))

    def take(self) -> L | None:
        """Take the leaf to evict next out; None when there is no candidate."""
        while self._heap:
            key, _, leaf = self._heap[0]
            current = self._policy.key(leaf)
            if current > key:
                heapq.heapreplace(self._heap, (current, next(self._order), leaf))
                continue
            heapq.heappop(self._heap)
            leaf.queued = False
            return leaf
        return None
