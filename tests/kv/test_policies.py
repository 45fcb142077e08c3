from __future__ import annotations

import numpy as np
import pytest

from pagoda.errors import ConfigError
from pagoda.kv import eviction
from pagoda.kv.eviction import FIFO, GDSF, LFU, LRU, POLICIES, S3FIFO, SLRU, EvictionPolicy, make_policy
from pagoda.kv.eviction.monitor import NUM_AGES, NUM_CLASSES, WIDTHS, ReuseMonitor, age_bucket
from pagoda.kv.eviction.reuse import ReuseRate, gittins_index
from pagoda.kv.keys import Scope
from pagoda.kv.radix import RadixTree

SCOPE = Scope()


class Cache:
    """A tree whose blocks are two tokens, no request holds, and are named by the first token of the prompt."""

    def __init__(self, policy: EvictionPolicy, num_blocks: int = 64) -> None:
        self.tree = RadixTree(2, (None,), num_blocks, policy)
        self.free = list(range(num_blocks))
        self.names: dict[int, int] = {}

    def use(self, name: int, num_blocks: int = 1, prefix: tuple[int, ...] = ()) -> None:
        tokens = np.array([*prefix, *range(name, name + 2 * num_blocks)], dtype=np.int32)
        match = self.tree.touch(self.tree.match(tokens, SCOPE))
        assert match.num_tokens % 2 == 0
        missing = (tokens.size - match.num_tokens) // 2
        if missing:
            after = int(match.blocks[0, -1]) if match.num_tokens else None
            ids = np.array([self.free.pop() for _ in range(missing)], dtype=np.int32)
            self.tree.insert(SCOPE, after, tokens[match.num_tokens :], ids[None])
            self.names.update(dict.fromkeys(ids.tolist(), name))
            self.tree.offer(int(ids[-1]))
        else:
            self.tree.offer(int(match.blocks[0, -1]))

    def evict(self, count: int = 1) -> list[int]:
        ids = self.tree.evict(count, held=lambda ids: np.zeros(ids.shape, dtype=np.bool_))
        self.free.extend(ids.tolist())
        return [self.names.pop(block) for block in ids.tolist()]

    def __len__(self) -> int:
        return len(self.names)


def used(policy: EvictionPolicy, *names: int) -> Cache:
    cache = Cache(policy)
    for name in names:
        cache.use(name)
    return cache


A, B, C, D = 100, 200, 300, 400


def test_lru_takes_what_was_not_used_for_longest() -> None:
    assert used(LRU(), A, B, C, A).evict(3) == [B, C, A]


def test_fifo_does_not_care_about_hits() -> None:
    assert used(FIFO(), A, B, C, A).evict(3) == [A, B, C]


def test_lfu_takes_what_was_used_least() -> None:
    assert used(LFU(), A, A, A, B, B, C).evict(3) == [C, B, A]


def test_lfu_ages_what_was_popular_long_ago() -> None:
    cache = used(LFU(), A, A, A, A)
    for name in range(1000, 1200, 2):  # each of these raises the floor when it goes
        cache.use(name)
        cache.use(name)
        cache.evict()
        if A not in cache.names.values():
            break
    assert A not in cache.names.values()


def test_gdsf_keeps_what_is_dear_to_compute() -> None:
    cache = Cache(GDSF(), num_blocks=40_000)
    cache.use(0, num_blocks=15_000)
    cache.use(100_000)
    cache.use(100_002, prefix=tuple(range(30_000)))  # computed over 30,000 tokens: twice as dear
    assert cache.evict(2) == [100_000, 100_002]


def test_slru_evicts_a_scan_before_what_was_hit() -> None:
    cache = used(SLRU(), A, A, B, B, *range(1000, 1020, 2))
    assert not {A, B} & set(cache.evict(10))
    assert cache.evict(2) == [A, B]


def test_slru_bounds_the_protected() -> None:
    cache = used(SLRU(), *(name for name in range(1000, 1040, 2) for _ in range(2)), A)
    assert cache.evict() == [1000]  # twenty protected leaves of twenty-one are too many


def test_s3fifo_evicts_a_scan_and_keeps_what_was_hit() -> None:
    cache = used(S3FIFO(), A, B, A, *range(1000, 1020, 2))
    assert cache.evict(10) == [B, *range(1000, 1018, 2)]


def test_s3fifo_remembers_what_it_evicted() -> None:
    cache = used(S3FIFO(), A, B)
    assert cache.evict() == [A]
    cache.use(A)  # a ghost: straight to main
    cache.use(C)
    assert cache.evict(2) == [B, C]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_up_everything_leaves_first(name: str) -> None:
    cache = Cache(make_policy(name))
    rng = np.random.default_rng(0)
    for _ in range(300):
        root = 1000 * int(rng.integers(4))
        prefix = tuple(range(root, root + 2 * int(rng.integers(4))))
        cache.use(root + 100 + 10 * int(rng.integers(8)), int(rng.integers(1, 3)), prefix)
        if len(cache) > 48:
            cache.evict(int(rng.integers(1, 20)))
        cache.tree.check(held=lambda ids: np.zeros(ids.shape, dtype=np.bool_))
    count = len(cache)
    assert len(cache.evict(count + 1)) == count
    assert cache.evict() == []


@pytest.mark.parametrize("name", POLICIES)
def test_what_was_discarded_is_not_taken_until_it_is_offered_again(name: str) -> None:
    policy = make_policy(name)
    cache = used(policy, A, B, C)
    assert type(policy.sibling()) is type(policy)
    leaf = next(node for node in cache.tree.nodes() if node.tokens[0] == A)
    policy.discard(leaf)
    assert not leaf.queued
    policy.discard(leaf)  # twice is once
    assert sorted(cache.evict(3)) == [B, C]
    policy.offer(leaf)
    assert cache.evict(3) == [A]


def test_discarding_leaves_no_heap_behind() -> None:
    policy = LRU()
    cache = used(policy, *range(1000, 1060, 2))
    leaf = next(iter(cache.tree.nodes()))
    for _ in range(1000):
        policy.discard(leaf)
        policy.offer(leaf)
    assert len(policy._heap) < 200


def test_a_policy_serves_one_tree() -> None:
    policy = LRU()
    Cache(policy)
    with pytest.raises(ConfigError, match="one tree"):
        Cache(policy)


def test_policies_are_made_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_policy(), ReuseRate)
    with pytest.raises(ConfigError, match=r"'mru'; there are reuse, lru"):
        make_policy("mru")

    class Point:
        name = "mru"

        def load(self) -> type[LRU]:
            return LRU

    monkeypatch.setattr(eviction, "entry_points", lambda group: [Point()] if group == eviction.ENTRY_POINTS else [])
    assert isinstance(make_policy("mru"), LRU)


def test_the_index_of_a_constant_rate_is_that_rate() -> None:
    rate = 1e-3
    chances = 1 - np.exp(-rate * np.tile(WIDTHS, (NUM_CLASSES, 1)))
    young = gittins_index(chances)[0, :16]  # later buckets are wider than the mean time to a reuse
    assert young == pytest.approx(rate, rel=0.05)


def test_the_index_sees_a_reuse_coming() -> None:
    chances = np.zeros((1, NUM_AGES))
    chances[0, 12] = 0.5
    index = gittins_index(chances)[0]
    assert (np.diff(index[:13]) > 0).all()
    assert (index[13:] == 0).all()


def test_the_monitor_measures_chances_and_does_not_take_the_young_for_failures() -> None:
    monitor = ReuseMonitor(block_size=2)
    for now in range(1, 4001):
        monitor.use(np.array([now, now]), 0, now)
        if now > 100 and now % 2:
            monitor.use(np.array([now - 100, now - 100]), 0, now)
    at = age_bucket(100)
    once = monitor.chances(4000)[0]
    assert once[at] == pytest.approx(0.5, abs=0.05)
    assert once[[at - 3, at + 3]] == pytest.approx(0, abs=0.02)


def test_the_monitor_remembers_uses_after_eviction() -> None:
    cache = used(ReuseRate(), A)
    for _ in range(3):
        cache.evict()
        cache.use(A)
    cache.use(B)
    leaves = {int(node.tokens[0]): node for node in cache.tree.nodes()}
    monitor = ReuseMonitor(block_size=2)
    for _ in range(4):
        monitor.use(leaves[A].tokens, 0, 1)
    assert monitor.classes(leaves[A].tokens, 0).tolist() == [3]
    assert monitor.classes(leaves[A].tokens, 2).tolist() == [0]  # the same tokens elsewhere are another block


def test_the_default_keeps_what_comes_back_through_scans() -> None:
    """Ten prompts in turn, one every fourth request, among prompts seen once; room for ten of each in LRU's order."""

    def hits(policy: EvictionPolicy) -> int:
        cache = Cache(policy, num_blocks=20)
        count = 0
        for turn in range(4000):
            name = 10 * (turn // 4 % 10) if turn % 4 == 0 else 1000 + 10 * turn
            count += name in cache.names.values()
            if not cache.free and name not in cache.names.values():
                cache.evict()
            cache.use(name)
        return count

    assert hits(LRU()) == 0
    assert hits(ReuseRate()) > 500


def test_the_default_keeps_its_heaps_small() -> None:
    policy = ReuseRate()
    cache = Cache(policy)
    for turn in range(3000):
        cache.use(10 * (turn % 8))
    assert sum(len(heap) for heap in [*policy._oldest, *policy._youngest]) < 2 * NUM_CLASSES * 100
