"""The heap behind sort-key policies alone: order, keys that grew since, each leaf once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pagoda.kv.eviction import LRU, Evictable, EvictionPolicy
from pagoda.kv.eviction.base import SortKey


@dataclass(eq=False)
class Leaf:
    last_access: int
    created: int = 0
    num_hits: int = 0
    queued: bool = False
    note: float = 0.0
    account: int = 0
    priority: int = 35
    expires_at: float = np.inf
    depth: int = 0
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int32))
    blocks: np.ndarray = field(default_factory=lambda: np.zeros((1, 1), dtype=np.int32))
    parent: Evictable | None = None


def drain(queue: EvictionPolicy) -> list[Evictable]:
    taken = []
    while (leaf := queue.take()) is not None:
        taken.append(leaf)
    return taken


def test_an_empty_queue_has_nothing() -> None:
    assert LRU().take() is None


def test_least_recently_used_first() -> None:
    queue = LRU()
    for tick in (3, 1, 2):
        queue.offer(Leaf(tick))
    assert [leaf.last_access for leaf in drain(queue)] == [1, 2, 3]


def test_equal_keys_go_in_the_order_they_were_offered() -> None:
    queue = LRU()
    leaves = [Leaf(7) for _ in range(10)]
    for leaf in leaves:
        queue.offer(leaf)
    assert all(a is b for a, b in zip(drain(queue), leaves, strict=True))


def test_a_leaf_is_in_the_queue_once() -> None:
    queue = LRU()
    leaf = Leaf(1)
    queue.offer(leaf)
    queue.offer(leaf)
    assert queue.take() is leaf
    assert not leaf.queued
    assert queue.take() is None
    queue.offer(leaf)
    assert queue.take() is leaf


def test_a_hit_since_counts() -> None:
    queue = LRU()
    first, second = Leaf(1), Leaf(2)
    queue.offer(first)
    queue.offer(second)
    first.last_access = 9
    assert [leaf.last_access for leaf in drain(queue)] == [2, 9]


def test_a_policy_is_a_sort_key() -> None:
    class FewestHits(SortKey):
        def key(self, leaf: Evictable) -> float:
            return leaf.num_hits

    queue = FewestHits()
    for hits in (5, 0, 2):
        queue.offer(Leaf(last_access=0, num_hits=hits))
    assert [leaf.num_hits for leaf in drain(queue)] == [0, 2, 5]


@given(st.lists(st.tuples(st.sampled_from(["offer", "hit", "take"]), st.integers(0, 5)), max_size=80))
def test_take_is_always_the_minimum(steps: list[tuple[str, int]]) -> None:
    queue = LRU()
    leaves = [Leaf(0) for _ in range(6)]
    for tick, (action, index) in enumerate(steps, start=1):
        if action == "offer":
            queue.offer(leaves[index])
        elif action == "hit":
            leaves[index].last_access = tick
        else:
            waiting = [leaf.last_access for leaf in leaves if leaf.queued]
            taken = queue.take()
            assert (taken.last_access if taken else None) == min(waiting, default=None)
