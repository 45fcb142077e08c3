from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagoda.errors import ConfigError
from pagoda.kv.eviction import LRU, POLICIES, make_policy
from pagoda.plan.belady import belady_hits, count_blocks
from pagoda.plan.replay import Replay, Service
from pagoda.plan.traces import TraceRequest


def request(*blocks: int, time: float = 0.0, output: int = 0) -> TraceRequest:
    return TraceRequest(time, np.array(blocks, dtype=np.int64), 512, 512 * len(blocks), output)


def prefix_ids(prompts: list[list[int]]) -> list[TraceRequest]:
    """Prompts over a small alphabet, with ids that stand for everything before them."""
    ids: dict[tuple[int, ...], int] = {}
    return [request(*(ids.setdefault(tuple(p[: n + 1]), len(ids)) for n in range(len(p)))) for p in prompts]


def most_hits(requests: list[TraceRequest], capacity: int) -> int:
    """By trying every set of blocks that could be kept after each request."""
    best = {frozenset[int](): 0}
    for one in requests:
        after: dict[frozenset[int], int] = {}
        blocks = one.blocks.tolist()
        for kept, hits in best.items():
            now = hits + next((n for n, block in enumerate(blocks) if block not in kept), len(blocks))
            pool = kept | set(blocks)
            for size in range(min(capacity, len(pool)) + 1):
                for choice in itertools.combinations(sorted(pool), size):
                    after[frozenset(choice)] = max(now, after.get(frozenset(choice), 0))
        best = after
    return max(best.values())


PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(PROMPTS, st.integers(1, 4))
def test_belady_is_the_most_that_can_be_hit(prompts: list[list[int]], capacity: int) -> None:
    requests = prefix_ids(prompts)
    assert sum(belady_hits(requests, capacity)) == most_hits(requests, capacity)


@settings(max_examples=40, deadline=None)
@given(PROMPTS, st.integers(3, 8), st.sampled_from(sorted(POLICIES)))
def test_no_policy_beats_belady(prompts: list[list[int]], capacity: int, name: str) -> None:
    requests = prefix_ids(prompts)
    report = Replay(capacity, make_policy(name)).run(requests)
    assert report.num_hit_blocks <= sum(belady_hits(requests, capacity))


def test_a_cache_that_holds_all_hits_all_that_was_seen() -> None:
    requests = prefix_ids([[0, 1, 2], [0, 1, 3], [0, 1, 2], [4]])
    report = Replay(count_blocks(requests), LRU()).run(requests)
    assert (report.num_blocks, report.num_hit_blocks, report.num_evicted_blocks) == (10, 5, 0)
    assert report.num_hit_blocks == sum(belady_hits(requests, count_blocks(requests)))
    assert report.token_hit_rate == report.block_hit_rate == 0.5


def test_evictions_and_waste_are_counted() -> None:
    report = Replay(2, LRU()).run([request(1), request(1), request(2), request(3, 4), request(1)])
    assert (report.num_hit_blocks, report.num_evicted_blocks, report.num_wasted_blocks) == (1, 3, 2)
    assert report.waste == 2 / 3


def test_a_partial_last_block_counts_its_tokens() -> None:
    short = TraceRequest(0.0, np.array([1, 2]), 512, 600, 0)
    report = Replay(4, LRU()).run([short, short])
    assert (report.num_tokens, report.num_hit_tokens) == (1200, 600)


def test_of_a_prompt_larger_than_the_cache_the_head_is_kept() -> None:
    report = Replay(2, LRU()).run([request(1, 2, 3), request(1, 2, 3)])
    assert report.num_hit_blocks == 2


def test_requests_in_flight_hold_their_blocks_and_others_wait() -> None:
    service = Service(seconds_per_prompt_token=1 / 512, seconds_per_output_token=0.5)
    requests = [request(1, 2, output=4), request(3, time=1.0), request(1, 2, time=5.0)]
    report = Replay(2, LRU(), service).run(requests)
    assert report.seconds_waited == 3.0  # the second waits from 1 to 4, when the first ends
    assert report.num_hit_blocks == 1  # and evicts the end of the first


def test_what_a_request_in_flight_computed_is_shared_at_once() -> None:
    report = Replay(4, LRU(), Service(seconds_per_output_token=1.0)).run([request(1, 2, output=9), request(1, 2)])
    assert report.num_hit_blocks == 2


def test_requests_out_of_order_are_refused() -> None:
    with pytest.raises(ConfigError, match="order of arrival"):
        Replay(2, LRU()).run([request(1, time=2.0), request(1, time=1.0)])
