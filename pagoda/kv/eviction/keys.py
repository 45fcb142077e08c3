"""The classic policies, each a sort key."""

from __future__ import annotations

from pagoda.kv.eviction.base import Evictable, SortKey


class LRU(SortKey):
    """Least recently used first."""

    def key(self, leaf: Evictable) -> float:
        """The tick of the last hit or insertion."""
        return leaf.last_access


class FIFO(SortKey):
    """Oldest first, hit or not."""

    def key(self, leaf: Evictable) -> float:
        """The tick of its insertion."""
        return leaf.created
