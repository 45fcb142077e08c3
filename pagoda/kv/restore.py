"""Restore: a running lease whose blocks come from tiers while it waits or computes. It decides which of the two.

    front ──> │ computed │ ........ missing ........ │ arrived │ .. │ arrived │
              what arrived counts as soon as the front meets it; what the front passes first is dropped

A request waits only while that is sure to pay: for its patience, a small share of what computing would take, and for
half of what the restored tokens saved. After that it computes, up to where the loads are predicted to meet it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagoda.kv.fetch import Fetch
from pagoda.kv.lease import Lease, RestoreReport
from pagoda.kv.radix_node import TokenArray
from pagoda.kv.transfer import ByteRows, Lane


@dataclass(slots=True, eq=False)
class Restore:
    """What a lease gets from tiers.

    Attributes:
        tokens: the lease's sequence, as far as it is restored.
        first: the block of the sequence that is the fetch's first.
        has_all: no more will arrive.
        arrived: blocks of the sequence that came and were not used yet, with the lane they came from.
        early: those that had come before the request started.
    """

    lease: Lease
    tokens: TokenArray
    fetch: Fetch
    first: int
    block_size: int
    arrived: dict[int, tuple[Lane, ByteRows]] = field(default_factory=dict)
    early: frozenset[int] = frozenset()
    has_all: bool = False
    num_restored: int = 0
    num_prefetched: int = 0
    num_late: int = 0
    _waited_s: float = 0.0
    _waiting_since: float | None = None

    @property
    def front(self) -> int:
        """The block of the sequence that holds the next token."""
        return self.lease.num_computed_tokens // self.block_size

    @property
    def is_over(self) -> bool:
        """Whether nothing can come any more that would be used."""
        return self.front - self.first >= len(self.fetch.ids) or (self.has_all and not self.arrived)

    def take_in(self) -> int:
        """Take what came and drop what is late; returns how many blocks that dropped."""
        self.has_all = self.fetch.done.is_set()  # asked first: a piece may arrive between the two
        while not self.fetch.pieces.empty():
            piece = self.fetch.pieces.get()
            for block, payload in piece.blocks.items():
                self.arrived[self.first + block] = piece.lane, payload
        late = [block for block in self.arrived if block < self.front]
        for block in late:
            lane, _ = self.arrived.pop(block)
            lane.tally.add("late")
        self.num_late += len(late)
        return len(late)

    def run(self, most: int) -> list[tuple[Lane, ByteRows]]:
        """The arrived blocks at the front, of one lane, at most so many."""
        blocks: list[tuple[Lane, ByteRows]] = []
        while len(blocks) < most and (block := self.arrived.get(self.front + len(blocks))) is not None:
            if blocks and block[0] is not blocks[0][0]:
                break
            blocks.append(block)
        return blocks

    def chunk(self, num_tokens: int) -> int:
        """How many of the next tokens to compute now, at most `num_tokens`; 0 to wait. Mutates the time waited.

        As long as nothing came, a step ends early only where that costs no step more if nothing ever comes: predictions
        of a tier whose speed changes are wrong, and a step reads all weights however few its tokens are.
        """
        ahead = self._target * self.block_size - self.lease.num_computed_tokens
        if (not self.fetch.hedged.is_set() or ahead <= 0) and self.patience_s > 0 and not self.has_all:
            self._waiting_since = self.fetch.clock() if self._waiting_since is None else self._waiting_since
            return 0
        if self._waiting_since is not None:
            self._waited_s += self.fetch.clock() - self._waiting_since
            self._waiting_since = None
        self.fetch.hedged.set()
        if ahead <= 0:
            return num_tokens
        if not self.fetch.num_loaded:
            ahead = max(ahead, (self.lease.prompt.size - self.lease.num_computed_tokens - 1) % num_tokens + 1)
        return min(num_tokens, ahead)

    @property
    def _target(self) -> int:
        """The block up to which to compute."""
        return min(self.arrived, default=0) if self.has_all else self.first + self.fetch.meeting

    @property
    def patience_s(self) -> float:
        """How much longer to wait for the next blocks; negative when it is over."""
        waiting_s = 0.0 if self._waiting_since is None else self.fetch.clock() - self._waiting_since
        return self.fetch.worth_waiting_s(self.num_restored) - self._waited_s - waiting_s

    def report(self) -> RestoreReport:
        """What became of it so far."""
        return RestoreReport(
            num_asked_blocks=len(self.fetch.ids),
            num_found_blocks=self.fetch.num_found,
            num_restored_blocks=self.num_restored,
            num_late_blocks=self.num_late,
            num_slower_blocks=self.fetch.num_slower,
            num_failed_blocks=self.fetch.num_failed,
            skipped_tiers=tuple(self.fetch.skipped),
            num_prefetched_blocks=self.num_prefetched,
        )
