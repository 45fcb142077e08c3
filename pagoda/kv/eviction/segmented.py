"""SLRU and S3-FIFO: policies of two queues, one for what was used once and one for what has proved itself."""

from __future__ import annotations

from collections import OrderedDict

from pagoda.kv.eviction.base import Evictable, Policy
from pagoda.kv.eviction.keys import LRU
from pagoda.kv.eviction.names import BlockNames

PROTECTED_SHARE = 0.8
SMALL_SHARE = 0.1
MAX_CREDIT = 3
NUM_GHOSTS = 16_384


class SLRU(Policy):
    """Segmented LRU (Karedla et al., 1994): leaves never hit go first, until the others are over 80% of all leaves."""

    def __init__(self) -> None:
        self._probation = LRU()
        self._protected = LRU()

    def offer(self, leaf: Evictable) -> None:
        """Put a leaf into the segment it has earned."""
        (self._protected if leaf.num_hits else self._probation).offer(leaf)

    def take(self) -> Evictable | None:
        """Take from probation, or from the protected when they are too many."""
        while len(self._protected) <= PROTECTED_SHARE * (len(self._protected) + len(self._probation)):
            leaf = self._probation.take()
            if leaf is None:
                break
            if not leaf.num_hits:
                return leaf
            self._protected.offer(leaf)  # it was hit while it waited
        return self._protected.take()

    def discard(self, leaf: Evictable) -> None:
        """Take a leaf out of its segment."""
        self._probation.discard(leaf)
        self._protected.discard(leaf)


class S3FIFO(Policy):
    """Three static FIFO queues (Yang et al., SOSP 2023): small, main, and a ghost of what left small.

    New leaves enter small. From there those hit since go to main, the others leave, and are remembered by a hash for a
    while: should they come again, they enter main at once. A leaf at the head of main that was hit goes round again.
    """

    def __init__(self) -> None:
        self._small: OrderedDict[Evictable, None] = OrderedDict()
        self._main: OrderedDict[Evictable, None] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def bind(self, block_size: int, num_blocks: int) -> None:
        """Start to serve a tree."""
        super().bind(block_size, num_blocks)
        self._names = BlockNames(block_size)

    def offer(self, leaf: Evictable) -> None:
        """Queue a leaf, unless it is queued. Its note is the credit it has: hits since it was last looked at."""
        if not leaf.queued:
            leaf.queued = True
            (self._main if leaf.note else self._small)[leaf] = None

    def take(self) -> Evictable | None:
        """Take from small while it is over its share, else from main."""
        while self._small or self._main:
            if len(self._small) > SMALL_SHARE * (len(self._small) + len(self._main)) or not self._main:
                leaf, _ = self._small.popitem(last=False)
                if not leaf.note:
                    break
                self._main[leaf] = None
            else:
                leaf, _ = self._main.popitem(last=False)
                if not leaf.note:
                    break
                leaf.note -= 1
                self._main[leaf] = None
        else:
            return None
        leaf.queued = False
        return leaf

    def discard(self, leaf: Evictable) -> None:
        """Take a leaf out of its queue."""
        if leaf.queued:
            leaf.queued = False
            (self._small if leaf in self._small else self._main).pop(leaf)

    def on_insert(self, node: Evictable, start: int, now: int) -> None:
        """Give credit to what was here before."""
        first = int(self._names.extend(node, start)[0])
        if start == 0 and self._ghosts.pop(first, 0) is None:
            node.note = 1

    def on_hit(self, node: Evictable, now: int) -> None:
        """Give credit."""
        node.note = min(node.note + 1, MAX_CREDIT)

    def on_evict(self, node: Evictable, start: int) -> None:
        """Remember what leaves."""
        if start == 0:
            self._ghosts[int(node.names[0])] = None
            if len(self._ghosts) > NUM_GHOSTS:
                self._ghosts.popitem(last=False)
