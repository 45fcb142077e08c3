"""Dropping: what the policies that drop entries for good have in common, which is all but the choice of entries.

    entries of a layer                                 limit = budget + interval
       ^                     /|     /|     /|     /|
       |  prompt, exact  /    |   /  |   /  |   /  |   decode: down to the budget, every `interval` tokens
       |             /        | /    | /    | /    |
       |         /            '      '      '      '   budget
       +-----/--------------------------------------------> tokens computed

The prompt is computed exactly and compressed once, at its end, unless it is too long for that: then a policy that can
compresses all along, on the same rule as in decode. The points are fixed by the counts of tokens alone, never by how
the scheduler cuts its steps, so a preempted request that is computed again comes to the same decisions.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.kv.cache import KVCache
from pagoda.sparse.base import Demand
from pagoda.sparse.choosing import Choosing
from pagoda.sparse.sequence import DroppingSequence
from pagoda.sparse.store import SparseMemory


@dataclass(frozen=True, slots=True)
class Dropping(Choosing):
    """What the engine asks of every dropping policy; see SparsePolicy."""

    def outgrows(self, num_prompt: int, num_total: int) -> bool:
        """Whether a request comes to where it must be compressed."""
        limit = self.num_tokens + self.num_between
        return num_prompt > self.num_tokens or (self.compresses_output and num_total > limit)

    def demand(self, num_prompt: int, num_total: int, *, exact: bool) -> Demand:
        """See SparsePolicy."""
        if not self.outgrows(num_prompt, num_total):
            return Demand(num_total, 0, num_total)
        grown = min(num_total, self.largest_layer + self.num_between)
        if not self.compresses_output:
            grown = self.largest_layer + num_total - num_prompt
        entries = max(num_prompt, grown) if exact else grown
        return Demand(entries, min(self.largest_layer, entries), entries if self.packs_positions else num_total)

    def open(
        self, num_prompt: int, num_total: int, cache: KVCache, memory: SparseMemory, *, exact: bool
    ) -> DroppingSequence | None:
        """See SparsePolicy."""
        if not self.outgrows(num_prompt, num_total):
            return None
        return DroppingSequence(self, num_prompt, cache, memory, exact=exact)
