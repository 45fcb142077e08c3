from __future__ import annotations

import numpy as np
import pytest

from pagoda.errors import ConfigError
from pagoda.kv import eviction
from pagoda.kv.eviction import FIFO, GDSF, LFU, LRU, POLICIES, S3FIFO, SLRU, EvictionPolicy, make_policy
from pagoda.kv.eviction.monitor import (
    END,
    NUM_AGES,
    NUM_KINDS,
    RING_SIZE,
    WIDTHS,
    ReuseMonitor,
    age_bucket,
    kind_of_new,
    kind_of_reused,
)
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
    chances = 1 - np.exp(-rate * np.tile(WIDTHS, (NUM_KINDS, 1)))
    young = gittins_index(chances)[0, :16]  # later buckets are wider than the mean time to a reuse
    assert young == pytest.approx(rate, rel=0.05)


def test_the_index_sees_a_reuse_coming() -> None:
    chances = np.zeros((1, NUM_AGES))
    chances[0, 12] = 0.5
    index = gittins_index(chances)[0]
    assert (np.diff(index[:13]) > 0).all()
    assert (index[13:] == 0).all()


def one_block(monitor: ReuseMonitor, block: int, name: int, now: int) -> None:
    monitor.insert(np.array([block], dtype=np.int32), 0, np.array([name]), now)


def test_the_monitor_measures_chances_and_does_not_take_the_young_for_failures() -> None:
    """A block enters every tick; every second one comes back after 100 ticks, evicted or not."""
    for evicts in (False, True):
        monitor = ReuseMonitor(num_blocks=4096)
        for now in range(1, 4001):
            one_block(monitor, now, now, now)
            if evicts:
                monitor.evict(np.array([now], dtype=np.int32), np.array([now]))
            if now > 100 and now % 2:
                if evicts:
                    one_block(monitor, now - 100, now - 100, now)
                else:
                    monitor.hit(np.array([now - 100], dtype=np.int32), now)
        at = age_bucket(100)
        new = monitor.chances(4000)[END]
        assert new[at] == pytest.approx(0.5, abs=0.06)
        assert new[[at - 3, at + 3]] == pytest.approx(0, abs=0.03)


def test_the_monitor_forgets_the_oldest_uses() -> None:
    monitor = ReuseMonitor(num_blocks=64)
    ids = np.arange(64, dtype=np.int32)
    monitor.insert(ids, 0, np.arange(64), 1)
    for now in range(2, 2 + RING_SIZE // 64 + 10):
        monitor.hit(ids, now)
    often = kind_of_reused(1000)
    assert monitor.kind[ids].tolist() == [often] * 64
    assert monitor.chances(now)[often, 0] > 0.99


def kinds(cache: Cache, policy: ReuseRate) -> dict[int, list[int]]:
    """Of every node, by its first token."""
    return {int(node.tokens[0]): policy._monitor.kind[node.blocks[0]].tolist() for node in cache.tree.nodes()}


def test_a_kind_tells_how_much_was_new_where_a_prompt_ended_and_what_was_used_again() -> None:
    policy = ReuseRate()
    cache = Cache(policy, num_blocks=256)
    cache.use(A, num_blocks=40)
    assert kinds(cache, policy)[A] == [kind_of_new(40)] * 39 + [END]
    first = tuple(range(A, A + 78))  # all but the last block, which the next turn does not have
    cache.use(2000, num_blocks=9, prefix=first)
    found = kinds(cache, policy)
    assert found[A] == [kind_of_reused(2)] * 39
    assert found[A + 78] == [END]
    assert found[2000] == [kind_of_new(9)] * 8 + [END]
    assert len({END, kind_of_new(1), kind_of_new(9), kind_of_new(40), kind_of_new(10_000), kind_of_reused(2)}) == 6
    assert kind_of_reused(10_000) == NUM_KINDS - 1


def test_a_prompt_that_grows_piece_by_piece_is_of_the_kind_of_the_whole() -> None:
    policy = ReuseRate()
    tree = RadixTree(2, (None,), 64, policy)
    ids = np.arange(40, dtype=np.int32)
    for start in range(0, 40, 10):
        after = start - 1 if start else None
        tree.insert(SCOPE, after, np.arange(2 * start, 2 * start + 20), ids[None, start : start + 10])
    assert policy._monitor.kind[ids].tolist() == [kind_of_new(40)] * 39 + [END]
    noted = policy._monitor._kinds[: policy._monitor._num_uses]
    assert noted.size
    assert set(noted.tolist()) <= {kind_of_new(40), END}


def test_the_monitor_remembers_uses_after_eviction() -> None:
    policy = ReuseRate()
    cache = used(policy, A)
    for _ in range(2):
        cache.evict()
        cache.use(A)
    assert kinds(cache, policy)[A] == [kind_of_reused(3)]
    cache.use(A + 1000, prefix=(A + 2, A + 3))  # the same tokens elsewhere are another block
    cache.use(A, prefix=(B, B + 1))
    assert kinds(cache, policy)[B] == [kind_of_new(2), END]


def test_absent_blocks_are_not_counted() -> None:
    monitor = ReuseMonitor(num_blocks=8)
    names = np.arange(1, 5)
    ids = np.array([1, -1, -1, 4], dtype=np.int32)
    monitor.insert(ids, 0, names, 1)
    for now in range(2, 50):
        monitor.hit(ids[1:], now)
    assert monitor.chances(50)[kind_of_reused(5), 0] > 0.9
    monitor.evict(ids, names)
    monitor.insert(np.arange(4, dtype=np.int32), 0, names, 51)
    assert monitor._uses[:4].tolist() == [2, 1, 1, 50]


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
    assert sum(len(heap) for heap in [*policy._oldest, *policy._youngest]) < 2 * NUM_KINDS * 100


def test_a_leaf_that_moved_to_a_sibling_is_not_taken_from_here() -> None:
    policy = ReuseRate()
    cache = used(policy, A, B)
    leaves = {int(node.tokens[0]): node for node in cache.tree.nodes()}
    assert policy.take() is leaves[A]
    policy.offer(leaves[A])
    other = policy.sibling()
    policy.discard(leaves[A])
    other.offer(leaves[A])
    assert policy.take() is leaves[B]
    assert policy.take() is None
    assert other.take() is leaves[A]
