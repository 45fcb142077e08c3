"""The default: evict what earns the fewest hits for the room it takes.

Keeping a block costs its room for as long as it is kept, and pays if it is used in that time. The most that keeping can
pay per tick, over all lengths of time, is the block's index (Gittins, 1979; hit density in LHD, Beckmann et al., NSDI
2018). A ReuseMonitor learns the chances from what was used before, in the cache or not: how likely is a block that was
used k times and not for t ticks to be used in the next few? The answer need not fall with t. A conversation's next turn
comes after someone has thought, so under pressure a block of middle age is worth more than a new one, and LRU, which
keeps the new, gets nothing. Candidates wait in one queue per class; an index rises and falls at most once with age, so
the worst of a class is its oldest or its youngest, and eviction looks at those. It departs from LRU only for a victim
that is clearly worse: where there is nothing to learn, it is LRU.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Self

import numpy as np
import numpy.typing as npt

from pagoda.kv.eviction.base import Evictable, Policy
from pagoda.kv.eviction.monitor import NUM_AGES, NUM_CLASSES, WIDTHS, ReuseMonitor, age_bucket

CLEARLY_WORSE = 0.8  # of the index of the least recently used
RELEARN_TICKS = 256
TAIL_BLOCKS = 64  # how far back from its end a leaf is looked at


class ReuseRate(Policy):
    """Lowest expected rate of reuse first, learned online. Eviction is O(log n); memory besides the heaps is fixed."""

    def __init__(self) -> None:
        # Two heaps per class, the oldest and the youngest on top; entries of leaves since moved or taken are stale.
        self._oldest: list[list[tuple[int, int, Evictable]]] = [[] for _ in range(NUM_CLASSES)]
        self._youngest: list[list[tuple[int, int, Evictable]]] = [[] for _ in range(NUM_CLASSES)]
        self._entry: dict[Evictable, int] = {}
        self._order = itertools.count()
        self._index = gittins_index(np.outer(np.ones(NUM_CLASSES), 1 / WIDTHS.cumsum())).tolist()
        self._first: ReuseRate = self
        self._num_blocks = 0
        self._now = self._relearn_at = 0

    def bind(self, block_size: int) -> None:
        """Start to serve a tree."""
        super().bind(block_size)
        self._monitor = ReuseMonitor(block_size)

    def sibling(self) -> Self:
        """One that goes by what this one learns."""
        other = super().sibling()
        other._first = self._first
        return other

    def offer(self, leaf: Evictable) -> None:
        """Put a leaf into its class's queue, or move it there."""
        kind = int(self._first._monitor.classes(*self._end(leaf, 1))[-1])
        entry = self._entry[leaf] = next(self._order)
        leaf.queued = True
        for heap, tick in (self._oldest[kind], leaf.last_access), (self._youngest[kind], -leaf.last_access):
            heapq.heappush(heap, (tick, entry, leaf))
            if len(heap) > 2 * len(self._entry) + 64:  # stale entries at the bottom never surface by themselves
                heap[:] = [item for item in heap if self._entry.get(item[2]) == item[1]]
                heapq.heapify(heap)

    def take(self) -> Evictable | None:
        """Take the leaf of the smallest index, or the least recently used unless another is clearly worse."""
        first = self._first
        worst: tuple[float, Evictable] | None = None
        lru: tuple[float, Evictable] | None = None
        for kind in range(NUM_CLASSES):
            for heap in (self._oldest[kind], self._youngest[kind]):
                leaf = self._top(heap)
                if leaf is None:
                    break
                ranked = first._index[kind][age_bucket(first._now - leaf.last_access)], leaf
                if worst is None or ranked[0] < worst[0]:
                    worst = ranked
                if lru is None or leaf.last_access < lru[1].last_access:
                    lru = ranked
        if worst is None or lru is None:
            return None
        leaf = worst[1] if worst[0] < CLEARLY_WORSE * lru[0] else lru[1]
        self.discard(leaf)
        return leaf

    def discard(self, leaf: Evictable) -> None:
        """Leave its entries behind, stale."""
        if self._entry.pop(leaf, None) is not None:
            leaf.queued = False

    def _top(self, heap: list[tuple[int, int, Evictable]]) -> Evictable | None:
        while heap:
            tick, entry, leaf = heap[0]
            current = self._entry.get(leaf) == entry
            if current and leaf.last_access == abs(tick):
                return leaf
            heapq.heappop(heap)
            if current:  # it was hit while it waited
                self.offer(leaf)
        return None

    def tail(self, leaf: Evictable) -> int:
        """The blocks at its end that are of one class."""
        tokens, depth = self._end(leaf, TAIL_BLOCKS)
        kinds = self._first._monitor.classes(tokens, depth)
        others = np.flatnonzero(kinds != kinds[-1])
        return tokens.size - (int(others[-1]) + 1) * self.block_size if others.size else tokens.size

    def _end(self, leaf: Evictable, num_blocks: int) -> tuple[npt.NDArray[np.integer], int]:
        start = max(0, -(-leaf.tokens.size // self.block_size) - num_blocks) * self.block_size
        return leaf.tokens[start:], leaf.depth + start

    def on_insert(self, node: Evictable, start: int, now: int) -> None:
        """Count a first use, or one after eviction."""
        self._num_blocks += -(-(node.tokens.size - start) // self.block_size)
        self._use(node, start, now)

    def on_hit(self, node: Evictable, now: int) -> None:
        """Count a use."""
        self._use(node, 0, now)

    def on_evict(self, node: Evictable, start: int) -> None:
        """Keep count of the cache's size."""
        self._num_blocks -= -(-(node.tokens.size - start) // self.block_size)

    def _use(self, node: Evictable, start: int, now: int) -> None:
        self._now = now
        self._monitor.use(node.tokens[start:], node.depth + start, now)
        if now >= self._relearn_at:
            self._relearn_at = now + min(RELEARN_TICKS, 64 + now // 4)
            self._monitor.span(self._num_blocks)
            self._index = gittins_index(self._monitor.chances(now)).tolist()


def gittins_index(chances: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The best rate of reuse that keeping can buy, from each age on.

    Args:
        chances: `[classes, NUM_AGES]`, the chance of reuse within each bucket of ages for a block that reaches it.

    Returns:
        Reuses per tick, `[classes, NUM_AGES]`: for each bucket, the largest over all later ones of
        (chance of reuse by then) / (expected ticks until reuse or then).
    """
    index = np.empty_like(chances)
    for age in range(NUM_AGES):
        now = chances[:, age:]
        unused = np.cumprod(np.concatenate([np.ones((len(now), 1)), 1 - now[:, :-1]], axis=1), axis=1)
        reuses = np.cumsum(unused * now, axis=1)
        ticks = np.cumsum(unused * (1 - now / 2) * WIDTHS[age:], axis=1)
        index[:, age] = (reuses / ticks).max(axis=1)
    return index
