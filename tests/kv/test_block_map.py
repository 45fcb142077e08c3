"""The pool in cells, the outline of the tree and the ages of blocks."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pagoda.kv import block_map
from pagoda.kv.ages import SAMPLED, BlockAges
from pagoda.kv.block_map import NO_LABEL, BlockUse
from pagoda.kv.books import Books
from pagoda.kv.cache import KVCache
from pagoda.kv.keys import Scope
from tests.kv import fakes
from tests.kv.test_cache import SIZE, seq


def cache_of(num_blocks: int) -> KVCache:
    return KVCache(fakes.layout(SIZE), fakes.TokenPool(num_blocks, SIZE))


def run(cache: KVCache, tokens: np.ndarray, scope: Scope) -> None:
    lease = cache.acquire(tokens, scope)
    cache.reserve(lease, tokens.size - lease.num_computed_tokens)
    cache.advance(lease, tokens, tokens.size)
    cache.release(lease, tokens)


def test_every_use_is_told_from_the_others() -> None:
    cache = cache_of(12)
    a, b = Scope("a"), Scope("b")
    prefix, longer = seq(range(2 * SIZE)), seq(range(3 * SIZE))
    run(cache, prefix, a)
    run(cache, seq(range(100, 100 + SIZE)), b)
    first, second = cache.acquire(longer, a), cache.acquire(longer, a)
    cache.reserve(first, SIZE)
    cache.retention.limit_blocks = 12
    cache.retention.retain(seq(range(100, 100 + SIZE)), b, ttl_s=None, owner="b")
    run(cache, seq(range(200, 200 + SIZE)), b)
    found = cache.block_map(100)
    names = [BlockUse(use).name for use in found.uses]
    assert (found.blocks_per_cell, names[:5]) == (1, ["SHARED", "SHARED", "LEASED", "PRIVATE", "CACHED"])
    assert set(names[5:]) == {"FREE"}
    assert found.counts.tolist() == [7, 1, 1, 2, 1]
    assert found.labels.tolist() == [0, 0, 1, 0, 1] + [NO_LABEL] * 7
    assert [tenant.name for tenant in cache.tenants.all()] == ["a", "b"]
    cells = cache.block_map(3)
    assert cells.blocks_per_cell == 4
    assert [BlockUse(use).name for use in cells.uses] == ["SHARED", "CACHED", "FREE"]
    assert cells.filled.tolist() == [100, 25, 0]
    assert cache.blocks_by_namespace() == {"a": 2, "b": 2}
    cache.release(first, longer)
    cache.release(second, longer)
    cache.check()


def test_cells_of_a_pool_that_they_do_not_divide() -> None:
    cache = cache_of(11)
    run(cache, seq(range(11 * SIZE)), Scope())
    found = cache.block_map(3)
    assert (found.blocks_per_cell, found.filled.tolist()) == (4, [100, 100, 100])
    assert int(found.counts.sum()) == 11


def test_of_a_very_large_pool_every_nth_block_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_map, "MAX_LOOKED_AT", 6)
    cache = cache_of(12)
    run(cache, seq(range(6 * SIZE)), Scope())
    found = cache.block_map(3)
    assert (found.blocks_per_cell, found.filled.tolist()) == (4, [100, 50, 0])
    assert found.counts.tolist() == [6, 6, 0, 0, 0]


def test_the_outline_has_the_most_hit_runs_and_their_parents() -> None:
    cache = cache_of(200)
    scope = Scope("a")
    hot = seq(range(SIZE))
    for index in range(40):
        run(cache, np.concatenate([hot, seq(range(1000 + index * 50, 1000 + index * 50 + SIZE))]), scope)
    runs = cache.outline("a", 10)
    assert [each.level for each in runs] == [0] + [1] * 9
    assert (runs[0].num_hits, runs[0].head) == (39, tuple(hot.tolist()))
    assert runs[1].head[0] == 1000 + 39 * 50  # among equals the last used first
    assert cache.outline("b", 10) == []
    whole = cache.outline(None, 1000)
    assert len(whole) == 33  # of one run at most 32 children
    assert {each.head for each in whole} <= {each.head for each in cache.prefixes()}


def test_a_look_at_a_large_pool_is_short() -> None:
    cache = cache_of(100_000)
    rng = np.random.default_rng(0)
    for index in range(300):
        run(cache, rng.integers(0, 1000, 64 * SIZE), Scope(f"tenant {index % 20}"))
    times = []
    for _ in range(5):
        started = time.thread_time()
        cache.block_map(2048)
        cache.outline(None, 200)
        cache.blocks_by_namespace()
        times.append(time.thread_time() - started)
    assert min(times) < 0.1  # 5 ms; one that looks at all blocks takes hundreds


def test_ages_of_sampled_blocks() -> None:
    now = 0.0
    ages = BlockAges(2 * SAMPLED, lambda: now)
    ids = np.arange(2 * SAMPLED, dtype=np.int32)
    ages.on_commit(ids)
    now = 2.0
    ages.on_hit(ids[:SAMPLED])
    now = 12.0
    ages.on_evict(ids)
    lifetime, idle, gap = ages.histograms()
    assert [each.name for each in (lifetime, idle, gap)] == ["lifetime", "idle_before_evict", "reuse_gap"]
    assert (lifetime.sum_s, idle.sum_s, gap.sum_s) == (24.0, 22.0, 2.0)
    assert dict(idle.buckets)[10.0] == 1
    assert dict(idle.buckets)[30.0] == 1
    assert dict(gap.buckets)[3.0] == 1


def test_a_cache_tells_ages_of_its_blocks() -> None:
    cache = cache_of(64)
    assert isinstance(cache, Books)
    tokens = seq(range(40 * SIZE))
    run(cache, tokens, Scope())
    run(cache, tokens, Scope())
    cache.clear()
    counts = {each.name: sum(count for _, count in each.buckets) for each in cache.ages.histograms()}
    assert counts["lifetime"] == counts["idle_before_evict"] == 3  # of ids 0 to 39: 0, 16 and 32
    assert counts["reuse_gap"] == 3
