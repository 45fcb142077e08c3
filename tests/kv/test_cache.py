"""The cache: what a lease holds, shares, copies and leaves. The fake pool stores tokens, so KV can be read back."""

from __future__ import annotations

import numpy as np
import pytest

from pagoda.errors import InvariantError, OutOfBlocks
from pagoda.kv.cache import CacheStats, KVCache
from pagoda.kv.keys import Scope
from pagoda.kv.lease import Lease
from pagoda.kv.observe import MissReason
from pagoda.kv.radix_node import as_tokens
from tests.kv.fakes import TokenPool, make

SCOPE = Scope("tenant")
SIZE = 4


class Bench:
    """A cache, its pool, and the steps of a request in one call."""

    def __init__(self, num_blocks: int = 16, windows: tuple[int | None, ...] = (None,)) -> None:
        self.cache: KVCache
        self.pool: TokenPool
        self.cache, self.pool = make(num_blocks, SIZE, windows)

    def acquire(self, prompt: np.ndarray, scope: Scope = SCOPE) -> Lease:
        lease = self.cache.acquire(prompt, scope)
        self.check(lease, prompt)
        return lease

    def compute(self, lease: Lease, tokens: np.ndarray, until: int | None = None) -> None:
        """Write KV for everything up to `until`, and check that it and all before it reads back."""
        end = tokens.size if until is None else until
        start = lease.num_computed_tokens
        self.cache.reserve(lease, end - start)
        self.pool.fill(lease, tokens, start, end)
        self.cache.advance(lease, tokens, end)
        self.check(lease, tokens)

    def check(self, lease: Lease, tokens: np.ndarray) -> None:
        self.cache.check()
        for group, table in enumerate(lease.tables):
            start, end = table.first * SIZE, lease.num_computed_tokens
            assert self.pool.read(lease, group, start, end).tolist() == tokens[start:end].tolist()

    def run(self, tokens: np.ndarray, scope: Scope = SCOPE) -> int:
        """A whole request; returns how many tokens it found."""
        lease = self.acquire(tokens, scope)
        self.compute(lease, tokens)
        self.cache.release(lease, tokens)
        self.cache.check()
        return lease.num_hit_tokens

    def counts(self) -> tuple[int, int, int]:
        return self.cache.num_free_blocks, self.cache.num_held_blocks, self.cache.num_cached_blocks


def seq(*parts: range | list[int]) -> np.ndarray:
    return as_tokens([token for part in parts for token in part])


def table(lease: Lease, group: int = 0) -> list[int]:
    return lease.tables[group].ids.tolist()


def test_the_last_token_is_always_computed() -> None:
    bench = Bench()
    assert bench.run(seq(range(8))) == 0
    assert bench.run(seq(range(8))) == 7
    assert bench.run(seq(range(12))) == 8


def test_nothing_is_shared_across_scopes() -> None:
    bench = Bench()
    bench.run(seq(range(8)))
    for other in (Scope("other"), Scope("tenant", salt="s"), Scope("tenant", adapter="a")):
        assert bench.cache.lookup(seq(range(8)), other).num_blocks == 0


def test_lookup_says_what_acquire_finds_and_changes_nothing() -> None:
    bench = Bench()
    bench.run(seq(range(10)))
    before = bench.counts(), CacheStats(**{f: getattr(bench.cache.stats, f) for f in CacheStats.__slots__})
    hit = bench.cache.lookup(seq(range(20)), SCOPE)
    assert (hit.num_tokens, hit.num_blocks, hit.num_idle_blocks) == (10, 3, 3)
    assert (bench.counts(), bench.cache.stats) == before
    lease = bench.acquire(seq(range(20)))
    assert lease.num_hit_tokens == 10
    assert bench.cache.lookup(seq(range(20)), SCOPE).num_idle_blocks == 0


def test_full_blocks_are_shared_while_the_request_runs() -> None:
    bench = Bench()
    one = bench.acquire(seq(range(10)))
    bench.compute(one, seq(range(10)))
    two = bench.acquire(seq(range(10)))
    assert two.num_hit_tokens == 8
    assert table(two) == table(one)[:2]
    assert bench.counts() == (13, 3, 0)


def test_a_tail_is_adopted_in_place() -> None:
    bench = Bench()
    bench.run(seq(range(6)))
    lease = bench.acquire(seq(range(9)))
    assert (lease.num_hit_tokens, lease.owns_tail) == (6, True)
    bench.compute(lease, seq(range(9)))
    assert bench.cache.stats.num_copied_blocks == 0
    bench.cache.release(lease, seq(range(9)))
    assert bench.run(seq(range(10))) == 9


def test_one_append_right_for_two_leases() -> None:
    """The first continues the tail in place, the second gets a copy; neither sees what the other writes."""
    bench = Bench()
    bench.run(seq(range(6)))
    a, b = seq(range(6), [70, 71, 72]), seq(range(6), [80, 81, 82])
    one, two = bench.acquire(a), bench.acquire(b)
    assert (one.owns_tail, two.owns_tail) == (True, False)
    assert (one.num_hit_tokens, two.num_hit_tokens) == (6, 6)
    assert bench.cache.stats.num_copied_blocks == 1
    assert table(one)[0] == table(two)[0]
    assert table(one)[1] != table(two)[1]
    bench.compute(one, a)
    bench.compute(two, b)
    bench.check(one, a)
    for lease, tokens in ((one, a), (two, b)):
        bench.cache.release(lease, tokens)
    assert [bench.cache.lookup(seq(s, [0]), SCOPE).num_tokens for s in (a.tolist(), b.tolist())] == [9, 9]


def test_the_append_right_returns_when_its_owner_leaves() -> None:
    bench = Bench()
    bench.run(seq(range(6)))
    bench.cache.release(bench.acquire(seq(range(9))), seq(range(9)))
    assert bench.acquire(seq(range(9))).owns_tail


def test_a_block_of_which_only_the_start_matched_is_copied() -> None:
    bench = Bench()
    bench.run(seq(range(8)))
    other = seq(range(6), [90, 91])
    lease = bench.acquire(other)
    assert (lease.num_hit_tokens, lease.owns_tail) == (6, False)
    assert bench.cache.stats.num_copied_blocks == 1
    bench.compute(lease, other)
    assert bench.run(seq(range(8))) == 7


def test_without_a_block_for_the_copy_the_hit_ends_before_it() -> None:
    bench = Bench(num_blocks=3)
    bench.run(seq(range(8)))
    keeper = bench.acquire(seq([50, 51]))
    bench.compute(keeper, seq([50, 51]))
    assert bench.counts() == (0, 1, 2)
    lease = bench.acquire(seq(range(6), [90, 91]))
    assert lease.num_hit_tokens == 4
    assert bench.cache.stats.num_copied_blocks == 0


def test_two_that_compute_the_same_block_end_with_one() -> None:
    bench = Bench()
    tokens = seq(range(8))
    one, two = bench.acquire(tokens), bench.acquire(tokens)
    bench.compute(one, tokens)
    mine = table(one)
    bench.compute(two, tokens)
    assert table(two) == mine
    assert bench.counts() == (14, 2, 0)
    bench.cache.release(one, tokens)
    bench.check(two, tokens)
    assert bench.counts() == (14, 2, 0)


def test_fork_copies_on_the_first_write_only() -> None:
    bench = Bench()
    tokens = seq(range(6))
    one = bench.acquire(tokens)
    bench.compute(one, tokens)
    two = bench.cache.fork(one)
    assert bench.counts() == (14, 2, 0)
    a, b = seq(range(6), [70]), seq(range(6), [80, 81])
    bench.compute(one, a)
    assert bench.cache.stats.num_copied_blocks == 1
    bench.compute(two, b)
    assert bench.cache.stats.num_copied_blocks == 1
    bench.check(one, a)
    assert table(one)[0] == table(two)[0]


def test_a_twin_may_not_write_to_the_tail_that_the_other_left_in_the_tree() -> None:
    """Nobody else holds it, but the append right belongs to the tree: who acquires it next may take it."""
    bench = Bench()
    tokens = seq(range(6))
    one = bench.acquire(tokens)
    bench.compute(one, tokens)
    two = bench.cache.fork(one)
    bench.cache.release(one, tokens)
    tail = table(two)[1]
    longer = seq(range(6), [80])
    bench.compute(two, longer)
    assert table(two)[1] != tail
    assert bench.acquire(seq(range(9))).num_hit_tokens == 6


# -- pending prefixes ------------------------------------------------------------------------------------------------


def test_a_prefix_that_is_being_computed_is_pending() -> None:
    bench = Bench()
    first = seq(range(12))
    one = bench.acquire(first)
    same = seq(range(10), [99, 98])
    pending = bench.cache.pending(same, SCOPE, 0)
    assert pending is not None
    assert (pending.lease, pending.num_tokens) == (one, 8)
    bench.compute(one, first, until=4)
    assert pending.is_pending
    assert bench.cache.pending(same, SCOPE, 4) is not None
    bench.compute(one, first, until=8)
    assert not pending.is_pending
    assert bench.cache.lookup(same, SCOPE).num_tokens == 8
    assert bench.cache.pending(same, SCOPE, 8) is None
    bench.compute(one, first)
    assert bench.cache._computing._leases == {}  # nobody searches it again


def test_waiting_ends_when_the_computing_lease_is_released() -> None:
    bench = Bench()
    one = bench.acquire(seq(range(12)))
    pending = bench.cache.pending(seq(range(12)), SCOPE, 0)
    assert pending is not None
    bench.cache.release(one, seq(range(12)))
    assert not pending.is_pending
    assert bench.cache.pending(seq(range(12)), SCOPE, 0) is None


@pytest.mark.parametrize(
    ("prompt", "scope"), [(seq(range(1, 13)), SCOPE), (seq(range(12)), Scope("other")), (seq(range(4)), SCOPE)]
)
def test_nothing_is_pending_for_others(prompt: np.ndarray, scope: Scope) -> None:
    bench = Bench()
    bench.acquire(seq(range(12)))
    assert bench.cache.pending(prompt, scope, 0) is None


def test_the_longest_pending_prefix_wins() -> None:
    bench = Bench()
    bench.acquire(seq(range(8), [50] * 8))
    long = bench.acquire(seq(range(16)))
    bench.acquire(seq(range(4), [60] * 8))
    pending = bench.cache.pending(seq(range(20)), SCOPE, 0)
    assert pending is not None
    assert (pending.lease, pending.num_tokens) == (long, 16)


# -- memory runs out -------------------------------------------------------------------------------------------------


def test_reserve_is_all_or_nothing() -> None:
    """Not even what could be evicted is, when that is not enough."""
    bench = Bench(num_blocks=5)
    bench.run(seq(range(60, 64)))
    tokens = seq(range(30))
    lease = bench.acquire(tokens)
    bench.compute(lease, tokens, until=8)
    other = bench.acquire(seq([50, 51]))
    bench.compute(other, seq([50, 51]))
    before = bench.counts(), table(lease), lease.num_computed_tokens
    with pytest.raises(OutOfBlocks) as caught:
        bench.cache.reserve(lease, 12)
    assert (caught.value.needed, caught.value.available) == (3, 2)
    assert (bench.counts(), table(lease), lease.num_computed_tokens) == before
    bench.cache.check()
    bench.compute(lease, tokens, until=12)


def test_out_of_blocks_on_a_copy_changes_nothing() -> None:
    bench = Bench(num_blocks=2)
    tokens = seq(range(6))
    one = bench.acquire(tokens)
    bench.compute(one, tokens)
    two = bench.cache.fork(one)
    with pytest.raises(OutOfBlocks):
        bench.cache.reserve(two, 1)
    assert table(one) == table(two)
    bench.cache.check()
    bench.check(two, tokens)


def test_reserve_evicts_what_nobody_holds() -> None:
    bench = Bench(num_blocks=4)
    bench.run(seq(range(8)))
    bench.run(seq(range(100, 108)))
    lease = bench.acquire(seq(range(200, 209)))
    bench.compute(lease, seq(range(200, 209)))
    assert bench.cache.stats.num_evicted_blocks == 3
    assert bench.cache.lookup(seq(range(9)), SCOPE).num_tokens == 0
    assert bench.cache.lookup(seq(range(100, 109)), SCOPE).num_tokens == 4


def test_clear_spares_what_leases_hold() -> None:
    bench = Bench()
    bench.run(seq(range(100, 110)))
    lease = bench.acquire(seq(range(10)))
    bench.compute(lease, seq(range(10)))
    assert bench.cache.clear() == 3
    assert bench.counts() == (13, 3, 0)
    bench.check(lease, seq(range(10)))
    bench.cache.release(lease, seq(range(10)))
    assert bench.cache.clear() == 3
    assert bench.counts() == (16, 0, 0)


# -- windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 3, 4, 7])
@pytest.mark.parametrize("window", [1, 5, 6, 9])
def test_peak_blocks_is_what_a_sequence_holds_at_most(window: int, step: int) -> None:
    bench = Bench(num_blocks=64, windows=(None, window))
    tokens = seq(range(60))
    lease = bench.acquire(tokens)
    peak = 0
    while lease.num_computed_tokens < tokens.size:
        count = min(step, tokens.size - lease.num_computed_tokens)
        bench.cache.reserve(lease, count)
        peak = max(peak, lease.num_blocks)
        bench.compute(lease, tokens, until=lease.num_computed_tokens + count)
    bound = bench.cache.peak_blocks(tokens.size, step)
    assert peak <= bound <= peak + 2  # it allows for the worst place of a window among block boundaries


def test_blocks_that_slid_out_may_be_evicted_while_the_request_runs() -> None:
    bench = Bench(num_blocks=24, windows=(None, 5))
    tokens = seq(range(40))
    lease = bench.acquire(tokens)
    for end in range(4, 41, 4):
        bench.compute(lease, tokens, until=end)
    assert lease.tables[1].first == 9
    assert bench.counts() == (4, 11, 9)
    assert bench.cache.evict(9) == 9
    bench.check(lease, tokens)


def test_a_hit_needs_every_group() -> None:
    bench = Bench(num_blocks=24, windows=(None, 5))
    bench.run(seq(range(40)))
    assert bench.cache.lookup(seq(range(20), [99]), SCOPE).num_tokens == 20
    bench.cache.evict(9)  # what lies behind the last window
    assert bench.cache.lookup(seq(range(20), [99]), SCOPE).num_tokens == 0
    assert bench.cache.lookup(seq(range(40), [99]), SCOPE).num_tokens == 40


# -- misuse ----------------------------------------------------------------------------------------------------------


def test_a_lease_ends_once() -> None:
    bench = Bench()
    lease = bench.acquire(seq(range(5)))
    bench.cache.release(lease, seq(range(5)))
    with pytest.raises(InvariantError, match="twice"):
        bench.cache.release(lease, seq(range(5)))


@pytest.mark.parametrize("target", [3, 9, 13])
def test_advance_stays_within_what_was_reserved_and_said(target: int) -> None:
    """Backwards, beyond the known tokens, beyond the reserved blocks."""
    bench = Bench()
    tokens = seq(range(8))
    lease = bench.acquire(tokens)
    bench.compute(lease, tokens, until=4)
    bench.cache.reserve(lease, 8)
    with pytest.raises(InvariantError, match="cannot advance"):
        bench.cache.advance(lease, tokens if target < 12 else seq(range(20)), target)
    bench.check(lease, tokens)


def test_check_sees_a_lost_reference() -> None:
    bench = Bench()
    lease = bench.acquire(seq(range(8)))
    bench.compute(lease, seq(range(8)))
    bench.cache._allocator.retain(lease.tables[0].ids)
    with pytest.raises(InvariantError, match="leases disagree"):
        bench.cache.check()


def test_tokens_are_int32_unless_images_need_more() -> None:
    assert as_tokens([1, 2]).dtype == np.int32
    assert as_tokens([]).size == 0
    wide = as_tokens([1, 2**40])
    assert (wide.dtype, wide.tolist()) == (np.int64, [1, 2**40])


def test_where_blocks_are_staged_hits_end_where_blocks_end() -> None:
    cache, _ = make(20, 4, kv_format="int4")
    tokens = as_tokens(range(1, 12))
    lease = cache.acquire(tokens, Scope())
    cache.reserve(lease, 11)
    assert cache.open_blocks() == []
    cache.advance(lease, tokens, 11)
    assert cache.open_blocks() == [lease.tables[0].ids[2]]
    cache.release(lease, tokens)
    assert cache.num_cached_blocks == 2
    found = cache.lookup(tokens, Scope())
    assert found.num_tokens == 8
    assert cache.misses.facts(tokens, Scope(), found.match).reason is MissReason.PARTIAL_BLOCK
    assert cache.lookup(as_tokens([1, 2, 3, 4, 5, 6, 9, 9, 9]), Scope()).num_tokens == 4
    cache.check()
