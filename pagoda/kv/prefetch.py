"""Prefetch: blocks of prompts that wait in the queue, on their way up before there is a lease for them.

    queue     A        B        C          first come, first looked for; one is loaded at a time
    staging   # # # #  # # . .             host memory; no block of the pool is taken by who does not run yet

When a request starts, what was brought up for it is the beginning of its restore (`TieredCache.restore`). A prefix that
several wait for is brought up once, for the first of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from pagoda.kv.fetch import Fetch
from pagoda.kv.fetcher import Fetcher
from pagoda.kv.keys import BlockKey


@dataclass(frozen=True, slots=True, eq=False)
class Prefetch:
    """An early fetch of blocks of one prompt.

    Attributes:
        first: the block of the prompt that is the fetch's first.
        keys: the names of its blocks.
    """

    fetcher: Fetcher
    fetch: Fetch
    first: int
    keys: Sequence[BlockKey]

    def end(self) -> None:
        """Nobody needs it any more."""
        self.fetcher.end(self.fetch)
        while not self.fetch.pieces.empty():
            piece = self.fetch.pieces.get()
            piece.lane.tally.add("unused", len(piece.blocks))


class Prefetches:
    """What is on its way for waiting prompts, by ticket. The engine's thread owns it."""

    def __init__(self) -> None:
        self._tickets = itertools.count(1)
        self._live: dict[int, Prefetch] = {}
        self._keys: set[BlockKey] = set()

    def __contains__(self, key: BlockKey) -> bool:
        """Whether a block is on its way for somebody who waits, or there already."""
        return key in self._keys

    @property
    def is_loading(self) -> bool:
        """Whether any of them is not done."""
        return any(not each.fetch.done.is_set() for each in self._live.values())

    def add(self, prefetch: Prefetch) -> int:
        """Keep a prefetch; returns its ticket."""
        ticket = next(self._tickets)
        self._live[ticket] = prefetch
        self._keys.update(prefetch.keys)
        return ticket

    def take(self, ticket: int) -> Prefetch | None:
        """Hand out a prefetch for good; None if it was taken or dropped."""
        prefetch = self._live.pop(ticket, None)
        if prefetch is not None:
            self._keys.difference_update(prefetch.keys)
        return prefetch

    def drop(self, ticket: int) -> None:
        """Stop a prefetch, if it is here."""
        prefetch = self.take(ticket)
        if prefetch is not None:
            prefetch.end()

    def clear(self) -> None:
        """Stop all."""
        for ticket in list(self._live):
            self.drop(ticket)
