"""Priorities of token ranges: who goes first under pressure, for how long, and with every policy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.errors import InvalidRequest
from pagoda.kv.cache import KVCache
from pagoda.kv.directives import Directive, Directives
from pagoda.kv.eviction import DEFAULT_PRIORITY, POLICIES, make_policy
from tests.kv.fakes import TokenPool, layout
from tests.kv.test_cache import SCOPE, SIZE, Bench, seq
from tests.kv.test_retention import Clock


class DirectiveBench(Bench):
    def __init__(self, num_blocks: int = 32, policy: str = "lru", windows: tuple[int | None, ...] = (None,)) -> None:
        self.clock = Clock()
        self.pool = TokenPool(num_blocks, SIZE)
        self.cache = KVCache(layout(SIZE, windows), self.pool, make_policy(policy), clock=self.clock)

    def ask(self, tokens: np.ndarray, *directives: Directive) -> int:
        lease = self.acquire(tokens)
        self.cache.direct(lease, directives)
        self.compute(lease, tokens)
        self.cache.release(lease, tokens)
        self.cache.check()
        return lease.num_hit_tokens

    def priorities(self, tokens: np.ndarray) -> list[int]:
        """Of each block of a cached sequence."""
        match = self.cache._tree.match(tokens, SCOPE)
        return [node.priority for node, shared in match.path for _ in range(-(-shared // SIZE))]


def block(name: int) -> np.ndarray:
    return seq([name], range(SIZE - 1))


def hits(bench: Bench, *tokens: np.ndarray) -> list[bool]:
    return [bench.cache.lookup(np.append(each, [0]), SCOPE).num_tokens == each.size for each in tokens]


LOW, HIGH = Directive(0, None, 10), Directive(0, None, 90)


@pytest.mark.parametrize("policy", POLICIES)
def test_lower_priorities_go_first_whatever_the_policy(policy: str) -> None:
    bench = DirectiveBench(policy=policy)
    high, low, plain, lowest = (block(name) for name in (100, 200, 300, 400))
    bench.ask(high, HIGH)
    for _ in range(3):
        bench.ask(low, LOW)
    bench.ask(plain)
    bench.ask(lowest, Directive(0, None, 0))
    held = []
    while bench.cache.num_cached_blocks:
        held.append(hits(bench, high, plain, low, lowest))
        bench.cache.evict(1)
        bench.cache.check()
    assert held == [[True] * keep + [False] * (4 - keep) for keep in (4, 3, 2, 1)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flood_of_others_leaves_what_has_a_high_priority(policy: str) -> None:
    bench = DirectiveBench(num_blocks=12, policy=policy)
    kept = seq(range(4 * SIZE))
    bench.ask(kept, HIGH)
    for name in range(1000, 3000, 100):
        bench.ask(seq([name], range(2 * SIZE)))
    assert hits(bench, kept) == [True]


def test_a_priority_is_over_after_its_duration() -> None:
    bench = DirectiveBench()
    old, new = block(100), block(200)
    bench.ask(old, Directive(0, None, 90, duration_s=60))
    bench.ask(new)
    bench.clock.now += 59
    bench.cache.evict(1)
    assert hits(bench, old, new) == [True, False]
    bench.ask(new)
    bench.clock.now += 2
    bench.cache.evict(1)
    assert hits(bench, old, new) == [False, True]
    bench.cache.check()


def test_what_was_evictable_first_is_not_when_its_low_priority_is_over() -> None:
    bench = DirectiveBench()
    low, plain = block(100), block(200)
    bench.ask(plain)
    bench.ask(low, Directive(0, None, 1, duration_s=60))
    bench.clock.now += 61
    bench.cache.evict(1)
    assert hits(bench, low, plain) == [True, False]


def test_ranges_split_a_sequence_at_blocks() -> None:
    bench = DirectiveBench()
    tokens = seq(range(6 * SIZE + 2))
    bench.ask(tokens, Directive(0, 2 * SIZE - 1, 80), Directive(4 * SIZE + 1, None, 5))
    assert bench.priorities(tokens) == [80, 80, 35, 35, 35, 5, 5]
    bench.cache.evict(3)
    assert bench.priorities(tokens) == [80, 80, 35, 35]


def test_an_answer_has_a_priority_of_its_own_and_grows_in_one_node() -> None:
    bench = DirectiveBench()
    tokens = seq(range(8 * SIZE))
    lease = bench.acquire(tokens[: 4 * SIZE])
    bench.cache.direct(lease, [Directive(4 * SIZE, None, 20, duration_s=5)])
    for end in range(4 * SIZE, 8 * SIZE + 1):
        bench.clock.now += 0.01
        bench.compute(lease, tokens, end)
    bench.cache.release(lease, tokens)
    assert bench.priorities(tokens) == [35] * 4 + [20] * 4
    assert len(list(bench.cache._tree.nodes())) == 2


def test_the_latest_directive_counts_and_none_changes_nothing() -> None:
    bench = DirectiveBench()
    tokens = seq(range(4 * SIZE), [1])
    bench.ask(tokens, HIGH)
    bench.ask(tokens)
    assert bench.priorities(tokens) == [90] * 5
    bench.ask(tokens, Directive(0, 2 * SIZE, 50), Directive(2 * SIZE, 3 * SIZE, 10))
    assert bench.priorities(tokens) == [50, 50, 10, 90, 90]
    bench.ask(tokens, Directive(0, None, DEFAULT_PRIORITY))
    assert set(bench.priorities(tokens)) == {DEFAULT_PRIORITY}


def test_what_follows_something_important_is_not_important() -> None:
    bench = DirectiveBench()
    system = seq(range(2 * SIZE))
    bench.ask(system, HIGH)
    longer = seq(range(5 * SIZE))
    bench.ask(longer)
    assert bench.priorities(longer) == [90, 90, 35, 35, 35]
    tail = seq(range(SIZE + 2))
    bench = DirectiveBench()
    bench.ask(tail, HIGH)
    bench.ask(longer)  # its second block continues that of the first in place
    assert bench.priorities(longer) == [90, 90, 35, 35, 35]


def test_what_another_computed_first_goes_by_the_directive_too() -> None:
    bench = DirectiveBench()
    tokens = seq(range(3 * SIZE))
    first, second = bench.acquire(tokens), bench.acquire(tokens)
    bench.cache.direct(second, [HIGH])
    bench.compute(first, tokens)
    bench.compute(second, tokens)
    for lease in (first, second):
        bench.cache.release(lease, tokens)
    assert bench.priorities(tokens) == [90] * 3


@pytest.mark.parametrize("windows", [(None, 5), (6,)])
def test_directives_with_windows(windows: tuple[int | None, ...]) -> None:
    bench = DirectiveBench(num_blocks=64, windows=windows)
    tokens = seq(range(6 * SIZE))
    bench.ask(tokens, Directive(0, 3 * SIZE, 80))
    bench.ask(tokens, Directive(SIZE, 5 * SIZE, 10, duration_s=5))
    bench.clock.now += 6
    bench.cache.evict(1000)
    bench.cache.check()
    assert bench.cache.num_free_blocks == 64


def test_ends_leave_nothing_behind() -> None:
    bench = DirectiveBench()
    tokens = block(100)
    for _ in range(500):
        bench.ask(tokens, Directive(0, None, 80, duration_s=1e6))
    queues = bench.cache._tree._queues
    assert len(queues._expiries) < 100
    bench.cache.clear()
    bench.ask(tokens, Directive(0, None, 80, duration_s=1.0))
    bench.clock.now += 2e6
    bench.cache.evict(1)
    assert queues._expiries == []
    assert queues._num_expiring == 0


@pytest.mark.parametrize(
    "arguments", [(-1, 4, 50), (4, 4, 50), (0, 4, 101), (0, 4, -1), (0, 4, 50, 0.0), (0, 4, 50, math.inf)]
)
def test_directives_that_make_no_sense_are_refused(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidRequest):
        Directive(*arguments)


@given(
    cuts=st.lists(st.integers(0, 40), min_size=2, max_size=6, unique=True),
    first=st.integers(0, 10),
    count=st.integers(0, 10),
    open_end=st.booleans(),
)
def test_runs_give_every_block_the_directive_of_its_first_token(
    cuts: list[int], first: int, count: int, open_end: bool
) -> None:
    cuts = sorted(cuts)
    pairs = list(zip(cuts[::2], cuts[1::2], strict=False))
    ranges = [Directive(start, stop, number) for number, (start, stop) in enumerate(pairs)]
    if open_end:
        ranges.append(Directive(cuts[-1], None, 99))
    runs = list(Directives(ranges).runs(first, first + count, SIZE))
    covered = [(index, directive) for start, stop, directive in runs for index in range(start, stop)]
    assert [index for index, _ in covered] == list(range(first, first + count))
    for index, directive in covered:
        token = index * SIZE
        expected = [d for d in ranges if d.start <= token and (d.stop is None or token < d.stop)]
        assert [directive] == (expected or [None])
