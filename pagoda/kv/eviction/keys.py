"""The classic policies, each a sort key."""

from __future__ import annotations

from typing import Self

from pagoda.kv.eviction.base import Evictable, SortKey

# Computing a token costs `a + b * depth` operations: weights, and attention over what precedes it. The two are equal at
# a / b tokens, 30,000 for Llama-3-8B and more for larger models.
EQUAL_COST_TOKENS = 30_000


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


class LFU(SortKey):
    """Least frequently used first, with dynamic ageing (Arlitt et al., 2000).

    A node's worth is added to the rank of the last victim when it is used, so what was popular long ago sinks below
    what is used now.
    """

    def __init__(self) -> None:
        super().__init__()
        self._floor = 0.0
        self._first: LFU = self

    def sibling(self) -> Self:
        """One that raises the same floor."""
        other = super().sibling()
        other._first = self._first
        return other

    def worth(self, node: Evictable) -> float:
        """How much above the last victim a node that is used now ranks."""
        return 1.0 + node.num_hits

    def key(self, leaf: Evictable) -> float:
        """Its rank at its last use."""
        return leaf.note

    def take(self) -> Evictable | None:
        """Take out the leaf with the smallest rank, which is the floor from now on."""
        leaf = super().take()
        if leaf is not None:
            self._first._floor = leaf.note
        return leaf

    def on_insert(self, node: Evictable, start: int, now: int) -> None:
        """Rank what is new."""
        node.note = max(node.note, self._floor + self.worth(node))

    def on_hit(self, node: Evictable, now: int) -> None:
        """Rank it anew."""
        node.note = max(node.note, self._floor + self.worth(node))


class GDSF(LFU):
    """Cheapest to lose first: uses times the cost of computing a token at this depth (after Cherkasova, 1998).

    The size in the original divides cost per byte; here every token takes equally many bytes.
    """

    def worth(self, node: Evictable) -> float:
        """Expected uses times relative cost per token."""
        return (1.0 + node.num_hits) * (1.0 + node.depth / EQUAL_COST_TOKENS)
