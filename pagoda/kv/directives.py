"""Directives: how long which tokens of a sequence are worth keeping, as TensorRT-LLM's retention configuration says it.

    tokens     0 ............ 96 ............ 400 ............ 470 ->
    directive  [ priority 90     ][ none: 35      ][ priority 5, 60 s  ]     a system prompt, a question, the answer
    blocks     each goes by its first token

Under pressure lower priorities go first, and within one the eviction policy decides. When its time is over, a block
has the default priority again. The latest directive counts; requests without one change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagoda.kinds import is_integer, is_number, require


@dataclass(frozen=True, slots=True)
class Directive:
    """Tokens from `start` to before `stop`, or on and on when None, have `priority` for `duration_s`, or for good.

    Raises:
        InvalidRequest: an empty range, a priority not in 0 to 100, or a duration that is not positive or has no end.
    """

    start: int
    stop: int | None
    priority: int
    duration_s: float | None = None

    def __post_init__(self) -> None:
        start, stop, priority, duration_s = self.start, self.stop, self.priority, self.duration_s
        is_range = is_integer(start) and start >= 0 and (stop is None or (is_integer(stop) and start < stop))
        require(is_range, f"a range of tokens cannot go from {start!r} to {stop!r}", param="kv_retention")
        is_priority = is_integer(priority) and 0 <= priority <= 100
        require(is_priority, f"a priority is between 0 and 100, got {priority!r}", param="kv_retention")
        is_time = duration_s is None or (is_number(duration_s) and 0 < duration_s < math.inf)
        require(is_time, f"a duration is a number of seconds, got {duration_s!r}", param="kv_retention")


@dataclass(frozen=True, slots=True)
class Directives:
    """Directives in order, none overlapping another, whose time began at `since`."""

    ranges: Sequence[Directive] = ()
    since: float = 0.0

    def runs(self, first: int, last: int, block_size: int) -> Iterator[tuple[int, int, Directive | None]]:
        """Cut the blocks from `first` to before `last` where the directive for them changes.

        Yields the first block, the one after the last, and the directive, None where there is none.
        """
        for directive in self.ranges:
            start = min(max(first, -(-directive.start // block_size)), last)
            stop = last if directive.stop is None else min(-(-directive.stop // block_size), last)
            if start >= stop:
                continue
            if first < start:
                yield first, start, None
            yield start, stop, directive
            first = stop
        if first < last:
            yield first, last, None

    def ends(self, directive: Directive) -> float:
        """When a directive's time is over."""
        return math.inf if directive.duration_s is None else self.since + directive.duration_s
