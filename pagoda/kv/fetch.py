"""Fetch: blocks of one prompt on their way up. It knows neither the pool nor the tree; fetcher.py loads it.

        computed ──> |           not loaded yet            | <── loaded
    prompt  [ 0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 ]
                      front           meeting       hi

While somebody waits, blocks are loaded from the front, a few first, so that something arrives soon. As soon as waiting
is not sure to pay, the fetch is *hedged*: the engine computes from the front, blocks are loaded from the back, and
`meeting` is where the two are predicted to meet. Whatever the tiers do then, it takes no longer than computing.

An *early* fetch is for a request that does not run yet. Nobody waits and nothing is computed, so that whatever is there
is loaded, between the pieces of others. When the request starts (`begin`), it goes on as any other.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pagoda.kv.tiers.records import RecordId
from pagoda.kv.transfer import ByteRows, Lane

_WAITED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks that arrived: payloads uint8 `[num_groups, block_bytes]` by block."""

    lane: Lane
    blocks: dict[int, ByteRows]


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks on their way, numbered from 0. A fetch thread appends pieces; the engine's thread takes them.

    Attributes:
        ids: for each block its record in every group.
        block_s: seconds that computing a block takes.
        patience_s: seconds that may be waited before anything has arrived.
        hedged: nobody waits any more: blocks come from the back. Set by either side, for good.
        meeting: the block where the computed front and the loads are predicted to meet; the last one's successor when
            nothing is expected.
        lanes: what may be asked.
        is_early: its request does not run yet.
        leading: where the first blocks are, as far as one follows the other, once the tiers that could be waited for
            were asked.
        num_loaded, num_found, num_slower, num_failed: blocks that came; that a tier said it has; of those, which were
            not loaded because computing is faster, and which could not be read.
        skipped: names of tiers that were not asked: out, or slower than computing.
        charged: bytes that arrived or will, and were not taken; see Fetcher.
        clock: seconds.
    """

    ids: Sequence[Sequence[RecordId]]
    block_s: float
    patience_s: float
    meeting: int
    lanes: Sequence[Lane]
    is_early: bool = False
    pieces: queue.SimpleQueue[Piece] = field(default_factory=queue.SimpleQueue)
    hedged: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    leading: Sequence[Lane] | None = None
    num_loaded: int = 0
    num_found: int = 0
    num_slower: int = 0
    num_failed: int = 0
    skipped: list[str] = field(default_factory=list)
    charged: int = 0
    clock: Callable[[], float] = time.monotonic
    _front: tuple[int, float] = (0, 0.0)
    _started: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self.clock()

    def begin(self, block_s: float, patience_s: float) -> None:
        """An early fetch is waited for from now on."""
        self.is_early, self.block_s, self.patience_s, self._started = False, block_s, patience_s, self.clock()

    def note_front(self, block: int) -> None:
        """Tell the fetch that blocks before this one need no loading any more."""
        self._front = block, self.clock()

    @property
    def front(self) -> float:
        """Where the front is now, in blocks: where it was last seen, and computing on since if nobody waits."""
        block, seen_at = self._front
        if not self.hedged.is_set():
            return block
        return block + (self.clock() - max(seen_at, self._started)) / self.block_s

    @property
    def least_front(self) -> int:
        """The first block that may still need loading."""
        return self._front[0]

    def worth_waiting_s(self, num_loaded: int) -> float:
        """How long to wait in all for so many blocks: half of what they save, besides the patience."""
        return self.patience_s + _WAITED_SHARE * num_loaded * self.block_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self.clock() - self._started
