"""Retained: one lease, and the prefix that it keeps. What may be leased, and how much, is Retention's to say."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field

from pagoda.kv.allocator import BlockIds
from pagoda.kv.keys import Scope
from pagoda.kv.lineage import Segment
from pagoda.kv.radix_node import TokenArray


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """Whole blocks that somebody holds, those of every layer group.

    Attributes:
        num_tokens: the prefix's length.
        blocks: all of them.
        last_block: the last of the first group.
        anchor: the last of the group in which hits keep most of their blocks: a hit that has it covers the prefix.
        tokens, lineage: the prefix itself.
    """

    num_tokens: int
    blocks: BlockIds
    last_block: int
    anchor: int
    tokens: TokenArray
    lineage: tuple[Segment, ...]


@dataclass(eq=False, slots=True)
class Retained:
    """A lease. Times are the clock's seconds; a pin has no `ttl_s` and an `expires_at` of infinity.

    One that a tier holds has that tier's name in `held_in`, `num_below` blocks there and none in the pool;
    `copies_until` is how long the tier was told to keep them. One with a `name` was asked for by itself: it ends at its
    time whether it is hit or not. Outside a lease is known by its `id`; who has one cannot guess another.
    """

    serial: int
    owner: str
    name: str
    scope: Scope
    pinned: PinnedPrefix
    ttl_s: float | None
    expires_at: float
    held_in: str | None = None
    num_below: int = 0
    copies_until: float = 0.0
    released: bool = False
    id: str = field(default_factory=lambda: f"lease-{secrets.token_urlsafe(15)}")

    @property
    def num_tokens(self) -> int:
        """Tokens that are sure to hit."""
        return self.pinned.num_tokens

    def prolong(self, now: float, ttl_s: float | None) -> None:
        """Last at least `ttl_s` from now, and from every hit on."""
        if ttl_s is None or self.ttl_s is None:
            self.ttl_s, self.expires_at = None, math.inf
        else:
            self.ttl_s = max(self.ttl_s, ttl_s)
            self.expires_at = max(self.expires_at, now + ttl_s)
