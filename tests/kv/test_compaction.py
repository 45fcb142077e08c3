"""Compaction of leases: what stays is there, what is shared stays as it was, and every block is accounted for."""

from __future__ import annotations

import numpy as np
import pytest

from pagoda.errors import OutOfBlocks
from pagoda.kv.allocator import BlockIds
from pagoda.kv.cache import KVCache
from pagoda.kv.keys import Scope
from pagoda.kv.lease import Lease
from pagoda.kv.tenants import Share
from tests.kv.fakes import TokenPool, make

A, B = Scope("a"), Scope("b")


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 1000, count).astype(np.int32)


def compute(cache: KVCache, pool: TokenPool, lease: Lease, sequence: np.ndarray, stop: int) -> None:
    start = lease.num_computed_tokens
    cache.reserve(lease, stop - start)
    pool.fill(lease, sequence, start, stop)
    cache.advance(lease, sequence, stop)
    cache.check()


def start(cache: KVCache, pool: TokenPool, sequence: np.ndarray, stop: int, scope: Scope = A) -> Lease:
    lease = cache.acquire(sequence[:stop], scope)
    compute(cache, pool, lease, sequence, stop)
    return lease


def keep(cache: KVCache, pool: TokenPool, lease: Lease, entries: list[int]) -> None:
    """Keep these entries of the groups that see everything."""

    def move(group: int, old: BlockIds, new: BlockIds) -> None:
        size, flat = cache.block_size, pool.slots.reshape(-1)
        at = np.array(entries)
        moved = flat[old[at // size] * size + at % size].copy()
        to = np.arange(len(entries))
        flat[new[to // size] * size + to % size] = moved

    groups = cache.layout.groups
    cache.compact(lease, [None if group.window else len(entries) for group in groups], move)
    cache.check()
    pool.poison(cache)


def content(cache: KVCache, pool: TokenPool, lease: Lease, group: int = 0) -> list[int]:
    table = lease.tables[group]
    count = lease.num_computed_tokens - table.num_dropped
    at = np.arange(count)
    return pool.slots.reshape(-1)[table.ids[at // cache.block_size] * cache.block_size + at % cache.block_size].tolist()


def test_kept_entries_move_into_fewer_blocks_and_the_rest_come_back() -> None:
    cache, pool = make(20, 4)
    sequence = tokens(60)
    lease = start(cache, pool, sequence, 30)
    assert (lease.num_blocks, cache.num_held_blocks) == (8, 8)
    entries = [0, 1, 7, 13, 22, 28, 29]
    keep(cache, pool, lease, entries)
    assert (lease.num_blocks, cache.num_held_blocks, cache.num_cached_blocks) == (2, 2, 7)
    assert cache.stats.num_returned_blocks == 6
    assert content(cache, pool, lease) == sequence[entries].tolist()
    compute(cache, pool, lease, sequence, 36)
    assert content(cache, pool, lease) == sequence[[*entries, *range(30, 36)]].tolist()
    assert lease.num_blocks == 4
    keep(cache, pool, lease, [0, 2, 4, 12])
    assert content(cache, pool, lease) == sequence[[0, 7, 22, 35]].tolist()
    cache.release(lease, sequence)
    cache.check()
    assert cache.num_held_blocks == 0
    cache.clear()
    assert cache.num_free_blocks == 20


def test_the_exact_prefix_stays_for_others_and_nothing_sparse_enters_the_tree() -> None:
    cache, pool = make(40, 4)
    sequence = tokens(60)
    other = start(cache, pool, sequence, 30)
    lease = start(cache, pool, sequence, 34)
    assert lease.num_hit_tokens == 28
    keep(cache, pool, lease, [0, 9, 32])
    compute(cache, pool, lease, sequence, 50)
    assert content(cache, pool, other) == sequence[:30].tolist()
    cache.release(lease, sequence)
    again = cache.acquire(sequence, A)
    assert again.num_hit_tokens == 32  # the whole blocks from before the compaction
    assert content(cache, pool, again) == sequence[:32].tolist()
    for each in (again, other):
        cache.release(each, sequence)
    cache.check()
    assert cache.lookup(sequence, B).num_tokens == 0


def test_a_tail_that_the_lease_appended_to_in_place_is_let_go() -> None:
    cache, pool = make(20, 4)
    sequence = tokens(40)
    cache.release(start(cache, pool, sequence, 10), sequence[:10])
    lease = cache.acquire(sequence[:12], A)
    assert lease.owns_tail
    compute(cache, pool, lease, sequence, 11)
    keep(cache, pool, lease, [0, 10])
    assert content(cache, pool, lease) == sequence[[0, 10]].tolist()
    cache.release(lease, sequence)
    assert cache.lookup(sequence, A).num_tokens == 10
    cache.clear()
    cache.check()
    assert cache.num_free_blocks == 20


def test_groups_with_a_window_keep_their_entries_in_blocks_of_their_own() -> None:
    cache, pool = make(60, 4, (None, 9))
    sequence = tokens(80)
    other = start(cache, pool, sequence, 40)
    lease = start(cache, pool, sequence, 41)
    keep(cache, pool, lease, [1, 5, 40])
    assert all(cache._allocator.ref_count(int(b)) == 1 for table in lease.tables for b in table.held)
    for stop in range(42, 70):
        compute(cache, pool, lease, sequence, stop)
        window = pool.read(lease, 1, stop - 8, stop)  # what the next token reads
        assert window.tolist() == sequence[stop - 8 : stop].tolist()
    assert content(cache, pool, lease) == sequence[[1, 5, 40, *range(41, 69)]].tolist()
    assert lease.tables[1].held.size <= 4
    assert content(cache, pool, other) == sequence[:40].tolist()
    for each in (lease, other):
        cache.release(each, sequence)
    cache.check()
    cache.clear()
    assert cache.num_free_blocks == 60


def test_without_room_for_the_copies_nothing_changes() -> None:
    cache, pool = make(10, 4)
    sequence = tokens(60)
    lease = start(cache, pool, sequence, 40)
    with pytest.raises(OutOfBlocks):
        keep(cache, pool, lease, [0, 1])
    cache.check()
    assert not lease.is_detached
    assert content(cache, pool, lease) == sequence[:40].tolist()
    cache.release(lease, sequence)
    assert cache.lookup(sequence, A).num_tokens == 40


def test_a_second_compaction_needs_no_room() -> None:
    cache, pool = make(11, 4)
    sequence = tokens(80)
    lease = start(cache, pool, sequence, 32)
    keep(cache, pool, lease, list(range(12)))
    blocker = start(cache, pool, tokens(32, seed=5), 32, B)
    assert cache.num_free_blocks + cache.num_cached_blocks == 0
    keep(cache, pool, lease, [0, 3, 6])
    assert content(cache, pool, lease) == sequence[[0, 3, 6]].tolist()
    for each in (lease, blocker):
        cache.discard(each)
    cache.check()


def test_whoever_waits_for_a_prefix_is_told_that_it_will_not_come() -> None:
    cache, pool = make(40, 4)
    sequence = tokens(60)
    lease = cache.acquire(sequence, A)
    compute(cache, pool, lease, sequence, 20)
    waits = cache.pending(sequence, A, 20)
    assert waits is not None
    assert waits.is_pending
    keep(cache, pool, lease, [0, 1, 2])
    assert not waits.is_pending
    assert cache.pending(sequence, A, 20) is None
    cache.release(lease, sequence)


def test_copies_count_for_their_tenant() -> None:
    cache, pool = make(40, 4, shares={"a": Share(guaranteed=0.2), "b": Share(guaranteed=0.2)})
    sequence = tokens(60)
    lease = start(cache, pool, sequence, 40)
    keep(cache, pool, lease, [0, 1, 2, 3, 4])
    label = cache.tenants.of("a").index
    assert cache._allocator.num_used_by(label) == 2 + 10
    cache.check()
    cache.release(lease, sequence)
    cache.check()


def test_random_lives() -> None:
    """Several leases on common prefixes, compacted at random: what each reads is what it kept."""
    rng = np.random.default_rng(3)
    cache, pool = make(70, 4, (None, 6))
    texts = [np.concatenate([tokens(20, 1), tokens(60, seed)]) for seed in range(2, 6)]
    live: list[tuple[Lease, np.ndarray, list[int]]] = []
    for _ in range(150):
        pool.poison(cache)
        kind = rng.integers(4)
        try:
            if kind == 0 and len(live) < 4:
                sequence = texts[rng.integers(4)]
                stop = int(rng.integers(2, 40))
                lease = cache.acquire(sequence[:stop], A)
                live.append((lease, sequence, list(range(lease.num_computed_tokens))))
            elif live:
                index = int(rng.integers(len(live)))
                lease, sequence, mine = live[index]
                if kind == 1 and lease.num_computed_tokens < 70:
                    before = lease.num_computed_tokens
                    stop = min(70, before + int(rng.integers(1, 9)))
                    compute(cache, pool, lease, sequence, stop)
                    mine += range(before, stop)
                elif kind == 2 and mine:
                    chosen = sorted(rng.choice(len(mine), rng.integers(1, len(mine) + 1), replace=False).tolist())
                    keep(cache, pool, lease, chosen)
                    live[index] = lease, sequence, [mine[i] for i in chosen]
                elif kind == 3:
                    cache.release(lease, sequence)
                    del live[index]
        except OutOfBlocks:
            pass
        cache.check()
        for lease, sequence, mine in live:
            assert content(cache, pool, lease) == sequence[mine].tolist()
    for lease, sequence, _ in live:
        cache.release(lease, sequence)
    cache.clear()
    cache.check()
    assert cache.num_free_blocks == 70
