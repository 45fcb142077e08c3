"""The most that any policy could hit: Belady's rule with knowledge of the future, on prefix blocks.

The block whose next use is farthest goes first, and one that is never used again is not kept at all. A block is used
only together with those before it, so its next use never precedes theirs: this order always takes leaves, the kept set
is closed under prefixes, and the rule, optimal for blocks of one size (Mattson et al., 1970), is so for trees too.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from pagoda.plan.traces import TraceRequest


def belady_hits(requests: Sequence[TraceRequest], capacity: int) -> list[int]:
    """Leading blocks of each request that an optimal cache of `capacity` blocks would have. O(n log n) in blocks."""
    next_uses = _next_uses(requests)
    never = sum(request.blocks.size for request in requests)
    cached: dict[int, int] = {}  # block -> its next use
    farthest: list[tuple[int, int]] = []  # (-next use, block), stale where it differs from `cached`
    hits = []
    position = 0
    for request in requests:
        num_hits = 0
        for block in request.blocks.tolist():
            num_hits += cached.pop(block, None) is not None
            if next_uses[position] < never:
                cached[block] = next_uses[position]
                heapq.heappush(farthest, (-next_uses[position], block))
                while len(cached) > capacity:
                    use, victim = heapq.heappop(farthest)
                    if cached.get(victim) == -use:
                        del cached[victim]
            position += 1
        hits.append(num_hits)
    return hits


def _next_uses(requests: Sequence[TraceRequest]) -> list[int]:
    """For each block of each request in order, the position of the same block's next use, or the end."""
    position = never = sum(request.blocks.size for request in requests)
    seen: dict[int, int] = {}
    uses = [never] * never
    for request in reversed(requests):
        for block in reversed(request.blocks.tolist()):
            position -= 1
            uses[position] = seen.get(block, never)
            seen[block] = position
    return uses


def count_blocks(requests: Sequence[TraceRequest]) -> int:
    """Different blocks in a trace."""
    return len({block for request in requests for block in request.blocks.tolist()})
