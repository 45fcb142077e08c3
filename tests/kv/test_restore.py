"""Restore: up to where a request computes while blocks are on their way to it."""

from __future__ import annotations

import numpy as np
import pytest

from pagoda.kv.fetch import Fetch
from pagoda.kv.keys import Scope
from pagoda.kv.lease import Lease
from pagoda.kv.restore import Restore

BLOCK, TOKENS, BUDGET = 4, 401, 32
NUM_BLOCKS = TOKENS // BLOCK


def restore(meeting: int) -> Restore:
    """A restore of a whole prompt for which nobody waits any more."""
    tokens = np.arange(TOKENS, dtype=np.int64)
    fetch = Fetch([()] * NUM_BLOCKS, block_s=1.0, patience_s=0.0, meeting=meeting, lanes=())
    fetch.hedged.set()
    return Restore(Lease(Scope(), (), [], tokens), tokens, fetch, first=0, block_size=BLOCK)


def steps(one: Restore) -> list[int]:
    """Steps until the prompt is computed, while nothing arrives."""
    sizes = []
    while left := TOKENS - one.lease.num_computed_tokens:
        sizes.append(one.chunk(min(BUDGET, left)))
        one.lease.num_computed_tokens += sizes[-1]
    return sizes


@pytest.mark.parametrize("meeting", range(0, NUM_BLOCKS + 1, 3))
def test_loads_that_do_not_come_cost_no_step_more(meeting: int) -> None:
    assert len(steps(restore(meeting))) == -(-TOKENS // BUDGET)


@pytest.mark.parametrize("meeting", [1, 10, 99])
def test_where_something_came_a_step_ends_at_the_meeting(meeting: int) -> None:
    one = restore(meeting)
    one.fetch.num_loaded = 1
    while one.lease.num_computed_tokens < meeting * BLOCK:
        one.lease.num_computed_tokens += one.chunk(BUDGET)
    assert one.lease.num_computed_tokens == meeting * BLOCK
