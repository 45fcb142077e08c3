"""The default: evict what earns the fewest hits for the room it takes.

Keeping a block costs its room for as long as it is kept, and pays if it is used in that time. The most that keeping can
pay per tick, over all lengths of time, is the block's index (Gittins, 1979; hit density in LHD, Beckmann et al., NSDI
2018). A ReuseMonitor learns the chances from what was used before, in the cache or not: how likely is a block of this
kind that was not used for t ticks to be used in the next few? The answer need not fall with t. A conversation's next
turn comes after someone has thought, so under pressure a block of middle age is worth more than a new one, and LRU,
which keeps the new, gets nothing. Candidates wait in one queue per kind; an index rises and falls at most once with
age, so the worst of a kind is its oldest or its youngest, and eviction looks at those. It departs from LRU only for
a victim that is clearly worse: where there is nothing to learn, it is LRU.
"""

from __future__ import annotations

import heapq
from typing import Self

import numpy as np
import numpy.typing as npt

from pagoda.kv.eviction.base import Evictable, Policy
from pagoda.kv.eviction.monitor import NUM_KINDS, WIDTHS, ReuseMonitor, age_bucket
from pagoda.kv.eviction.names import BlockNames

CLEARLY_WORSE = 0.8  # of the index of the least recently used
RELEARN_TICKS = 1024
TAIL_BLOCKS = 64  # how far back from its end a leaf is looked at


# The two leaves of a kind that eviction may choose: (index, leaf, its last access) of the worst and of the oldest.
_Candidates = tuple[float, Evictable, int, float, Evictable, int]


class ReuseRate(Policy):
    """Lowest expected rate of reuse first, learned online. Eviction is O(log n).

    Memory: two heap entries a leaf, 25 bytes a block, and 14 MB for what is remembered of uses and evictions.
    """

    def __init__(self) -> None:
        # Two heaps per kind, the oldest and the youngest on top. A leaf's note is the number of its latest entry; older
        # entries, and those of leaves taken, are stale.
        self._oldest: list[list[tuple[int, int, Evictable]]] = [[] for _ in range(NUM_KINDS)]
        self._youngest: list[list[tuple[int, int, Evictable]]] = [[] for _ in range(NUM_KINDS)]
        self._num_entries = self._num_queued = 0
        self._candidates: list[_Candidates | None] = [None] * NUM_KINDS
        self._changed = set(range(NUM_KINDS))  # kinds whose candidates are to be looked at again
        self._index = gittins_index(np.outer(np.ones(NUM_KINDS), 1 / WIDTHS.cumsum())).tolist()
        self._now = self._relearn_at = self._looked_at = 0
        self._first: ReuseRate = self

    def bind(self, block_size: int, num_blocks: int) -> None:
        """Start to serve a tree."""
        super().bind(block_size, num_blocks)
        self._monitor = ReuseMonitor(num_blocks)
        self._names = BlockNames(block_size)

    def sibling(self) -> Self:
        """One that goes by what this one learns."""
        other = super().sibling()
        other._first = self._first
        return other

    def offer(self, leaf: Evictable) -> None:
        """Put a leaf into its kind's queue, or move it there."""
        first = self._first
        kind = int(first._monitor.kind[leaf.blocks[0, -1]])
        self._num_queued += not leaf.queued
        first._num_entries += 1
        entry = first._num_entries
        leaf.queued, leaf.note = True, entry
        for heap, tick in (self._oldest[kind], leaf.last_access), (self._youngest[kind], -leaf.last_access):
            heapq.heappush(heap, (tick, entry, leaf))
            if len(heap) > 2 * self._num_queued + 64:  # stale entries at the bottom never surface by themselves
                heap[:] = [item for item in heap if item[2].queued and item[2].note == item[1]]
                heapq.heapify(heap)
        self._changed.add(kind)

    def take(self) -> Evictable | None:
        """Take the leaf of the smallest index, or the least recently used unless another is clearly worse."""
        if self._looked_at != self._first._now:
            self._looked_at = self._first._now
            self._changed.update(range(NUM_KINDS))
        while True:
            while self._changed:
                kind = self._changed.pop()
                self._candidates[kind] = self._look(kind)
            worst = lru = None
            for kind, found in enumerate(self._candidates):
                if found is not None:
                    index, leaf, access, old_index, oldest, old_access = found
                    if worst is None or index < worst[0]:
                        worst = index, leaf, access, kind
                    if lru is None or old_access < lru[2]:
                        lru = old_index, oldest, old_access, kind
            if worst is None or lru is None:
                return None
            _, leaf, access, kind = worst if worst[0] < CLEARLY_WORSE * lru[0] else lru
            self._changed.add(kind)
            if leaf.queued and leaf.last_access == access:  # else it was hit, or taken from another kind's queue
                leaf.queued = False
                self._num_queued -= 1
                return leaf

    def discard(self, leaf: Evictable) -> None:
        """Leave its entries behind, stale."""
        if leaf.queued:
            leaf.queued = False
            self._num_queued -= 1
            self._looked_at = -1  # it may be a candidate

    def _look(self, kind: int) -> _Candidates | None:
        oldest, youngest = self._top(self._oldest[kind]), self._top(self._youngest[kind])
        if oldest is None or youngest is None:
            return None
        index, now = self._first._index[kind], self._first._now
        old = index[age_bucket(now - oldest.last_access)]
        young = index[age_bucket(now - youngest.last_access)]
        worst = youngest if young < old else oldest
        return min(young, old), worst, worst.last_access, old, oldest, oldest.last_access

    def _top(self, heap: list[tuple[int, int, Evictable]]) -> Evictable | None:
        while heap:
            tick, entry, leaf = heap[0]
            current = leaf.queued and leaf.note == entry
            if current and leaf.last_access == abs(tick):
                return leaf
            heapq.heappop(heap)
            if current:  # it was hit while it waited
                self.offer(leaf)
        return None

    def tail(self, leaf: Evictable) -> int:
        """The blocks at its end that are of one kind."""
        kinds = self._first._monitor.kind[leaf.blocks[0, -TAIL_BLOCKS:]]
        others = (kinds != kinds[-1]).nonzero()[0]
        first = leaf.blocks.shape[1] - kinds.size + int(others[-1]) + 1 if others.size else 0
        return leaf.tokens.size - first * self.block_size

    def on_insert(self, node: Evictable, start: int, now: int) -> None:
        """Count a first use, or one after eviction."""
        names = self._names.extend(node, start)
        self._monitor.insert(node.blocks[0], start // self.block_size, names, now)
        self._advance(now)

    def on_hit(self, node: Evictable, now: int) -> None:
        """Count a use."""
        self._monitor.hit(node.blocks[0], now)
        self._advance(now)

    def on_evict(self, node: Evictable, start: int) -> None:
        """Remember what leaves."""
        first = start // self.block_size
        self._monitor.evict(node.blocks[0, first:], node.names[first:])

    def _advance(self, now: int) -> None:
        self._now = now
        if now >= self._relearn_at:
            self._relearn_at = now + min(RELEARN_TICKS, 16 + now // 8)
            self._index = gittins_index(self._monitor.chances(now)).tolist()


def gittins_index(chances: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The best rate of reuse that keeping can buy, from each age on.

    Args:
        chances: `[kinds, ages]`, the chance of reuse within each bucket of ages for a block that reaches it.

    Returns:
        Reuses per tick, `[kinds, ages]`: for each bucket, the largest over all later ones of
        (chance of reuse by then) / (expected ticks until reuse or then). Where hardly any block comes, it is rough.
    """
    start = np.zeros((len(chances), 1))
    unused = np.cumprod(np.concatenate([start + 1, 1 - chances[:, :-1]], axis=1), axis=1)
    reuses = np.concatenate([start, np.cumsum(unused * chances, axis=1)], axis=1)
    ticks = np.concatenate([start, np.cumsum(unused * (1 - chances / 2) * WIDTHS, axis=1)], axis=1)
    # [kinds, from, until]; what a block's chance of coming this far would divide both by cancels out
    gain = reuses[:, None, 1:] - reuses[:, :-1, None]
    cost = ticks[:, None, 1:] - ticks[:, :-1, None]
    index: npt.NDArray[np.float64] = np.triu(gain / np.maximum(np.abs(cost), 1e-9)).max(axis=2)
    return index
