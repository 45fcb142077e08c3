"""Shares of the pool: who gives way, how much, and what each tenant is counted for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.errors import ConfigError, OutOfBlocks
from pagoda.kv.allocator import Allocator
from pagoda.kv.cache import KVCache
from pagoda.kv.eviction import make_policy
from pagoda.kv.keys import Scope
from pagoda.kv.tenants import COMMONS, Share, Tenants
from tests.kv.fakes import TokenPool, layout
from tests.kv.test_cache import SIZE, Bench, seq

A, B, C = Scope("a"), Scope("b"), Scope("c")


class TenantBench(Bench):
    """Prompts of one block each, told apart by their first token."""

    def __init__(
        self,
        shares: dict[str, Share],
        num_blocks: int = 20,
        windows: tuple[int | None, ...] = (None,),
        policy: str = "lru",
    ) -> None:
        self.pool = TokenPool(num_blocks, SIZE)
        self.cache = KVCache(layout(SIZE, windows), self.pool, make_policy(policy), shares=shares)
        self.next = 0

    def use(self, scope: Scope, num_blocks: int) -> None:
        """Compute and leave behind so many blocks."""
        for _ in range(num_blocks):
            self.next += 100
            self.run(seq([self.next], range(SIZE - 1)), scope)

    def used(self, scope: Scope) -> int:
        return self.cache._allocator.num_used_by(self.cache.tenants.of(scope.namespace).index)


def test_a_tenant_within_its_share_loses_nothing_to_one_over_its_own() -> None:
    bench = TenantBench({"a": Share(guaranteed=0.4), "b": Share()})
    bench.use(A, 8)
    bench.use(B, 60)
    assert bench.used(A) == 8
    assert bench.cache.tenants.of("a").num_evicted_blocks == 0
    assert bench.cache.tenants.of("b").num_evicted_blocks == 48


def test_what_is_over_a_share_goes_first() -> None:
    bench = TenantBench({"a": Share(guaranteed=0.4), "b": Share()})
    bench.use(A, 20)
    bench.use(B, 30)
    assert (bench.used(A), bench.used(B)) == (14, 6)  # equal weights: as much over their shares
    bench.use(A, 40)
    assert (bench.used(A), bench.used(B)) == (14, 6)


def test_weights_divide_what_is_not_guaranteed() -> None:
    bench = TenantBench({"a": Share(weight=3), "b": Share(guaranteed=0.2)})
    for _ in range(6):
        for scope in A, B, C:
            bench.use(scope, 10)
    used = [bench.used(scope) for scope in (A, B, C)]
    assert sum(used) == 20
    assert used == pytest.approx([9.6, 7.2, 3.2], abs=1.01)  # 16 blocks by 3 : 1 : 1, and 4 to b


def test_without_shares_the_policy_alone_decides() -> None:
    bench = TenantBench({})
    bench.use(A, 4)
    bench.use(B, 18)
    assert (bench.used(A), bench.used(B)) == (2, 18)


def test_tenants_without_a_share_have_one_together() -> None:
    bench = TenantBench({"a": Share(guaranteed=0.5)})
    bench.use(A, 10)
    bench.use(B, 10)
    bench.use(C, 7)
    assert [bench.used(scope) for scope in (A, B, C)] == [10, 3, 7]


def test_what_is_guaranteed_is_not_available_to_others() -> None:
    bench = TenantBench({"a": Share(guaranteed=0.4)})
    bench.use(A, 10)
    assert bench.cache.num_available_to(B) == 12
    assert bench.cache.num_available_to(A) == bench.cache.num_available_blocks == 20
    tokens = seq(range(13 * SIZE))
    lease = bench.cache.acquire(tokens, B)
    before = bench.counts()
    with pytest.raises(OutOfBlocks):
        bench.cache.reserve(lease, tokens.size)
    assert bench.counts() == before
    bench.cache.reserve(lease, 12 * SIZE)
    assert bench.used(A) == 8
    bench.cache.release(lease, tokens)
    bench.cache.check()


def test_a_tenant_takes_its_own_when_nobody_is_over() -> None:
    bench = TenantBench({"a": Share(guaranteed=0.5), "b": Share(guaranteed=0.5)})
    bench.use(A, 10)
    held = bench.cache.acquire(tokens := seq(range(5000, 5000 + 10 * SIZE)), B)
    bench.cache.reserve(held, tokens.size)
    bench.use(A, 3)
    assert (bench.used(A), bench.used(B)) == (10, 10)
    assert bench.cache.tenants.of("a").num_evicted_blocks == 3
    bench.cache.release(held, tokens)


def test_the_operator_clears_everything() -> None:
    bench = TenantBench({"a": Share(guaranteed=1.0)})
    bench.use(A, 8)
    bench.use(B, 8)
    assert bench.cache.clear() == 16
    bench.cache.check()


@pytest.mark.parametrize("windows", [(None, 5), (5, None, 9), (6,)])
def test_shares_hold_with_several_groups_of_layers(windows: tuple[int | None, ...]) -> None:
    bench = TenantBench({"a": Share(guaranteed=0.5, weight=0.01)}, num_blocks=48, windows=windows)
    for start in range(0, 600, 100):
        bench.run(seq(range(start, start + 5 * SIZE)), A)
        bench.run(seq(range(start, start + 6 * SIZE)), B)
    for start in range(1000, 4000, 100):
        bench.run(seq(range(start, start + 4 * SIZE)), B)
    assert 24 <= bench.used(A) <= 24 + len(windows) - 1


def test_every_tenant_is_counted() -> None:
    bench = TenantBench({})
    tokens = seq(range(2 * SIZE))
    bench.run(tokens, A)
    bench.run(tokens, A)
    held = bench.acquire(seq(range(3 * SIZE)), B)
    bench.compute(held, seq(range(3 * SIZE)), SIZE)
    a, b = (bench.cache.tenants.of(name) for name in ("a", "b"))
    bench.cache.note_prompt(A, 8, 7)  # a prompt counts once, however often it was looked up
    assert (a.num_query_tokens, a.num_hit_tokens, a.num_computed_tokens) == (8, 7, 9)
    assert (b.num_query_tokens, b.num_hit_tokens, b.num_computed_tokens) == (0, 0, 4)
    assert [bench.used(scope) for scope in (A, B)] == [2, 1]
    bench.cache.release(held, seq(range(3 * SIZE)))


@pytest.mark.parametrize(
    "shares",
    [{"a": (1.5, 1)}, {"a": (-0.1, 1)}, {"a": (0, 0)}, {"a": (0, np.nan)}, {"a": (0.6, 1), "b": (0.5, 1)}],
)
def test_shares_that_make_no_sense_are_refused(shares: dict[str, tuple[float, float]]) -> None:
    with pytest.raises(ConfigError):
        Tenants(Allocator(10), {name: Share(*values) for name, values in shares.items()})


@given(
    holdings=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=3, max_size=3),
    shares=st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.3]), st.sampled_from([0.5, 1, 4])), min_size=2, max_size=2),
    count=st.integers(1, 40),
    taker=st.sampled_from(["a", "b", "c"]),
)
def test_a_plan_is_fair(
    holdings: list[tuple[int, int]], shares: list[tuple[float, float]], count: int, taker: str
) -> None:
    allocator = Allocator(80)
    tenants = Tenants(allocator, {name: Share(*share) for name, share in zip("ab", shares, strict=True)})
    for name, (held, cached) in zip("abc", holdings, strict=True):
        ids = allocator.allocate(held + cached, tenants.of(name).index)
        allocator.enter_tree(ids[:cached])
        allocator.release(ids[:cached])
    allocator.check()
    accounts = {COMMONS: ("c", 0, 1.0), 1: ("a", int(shares[0][0] * 80), shares[0][1])}
    accounts[2] = ("b", int(shares[1][0] * 80), shares[1][1])
    plan = dict(tenants.plan(count, taker))
    assert sum(plan.values()) == min(count, tenants.num_evictable(taker))
    levels = {}
    for account, (name, guaranteed, weight) in accounts.items():
        held, cached = holdings["abc".index(name)]
        lost = plan.get(account, 0)
        assert lost <= cached
        assert name == taker or lost == 0 or held + cached - lost >= guaranteed
        spare = cached - lost if name == taker else min(cached - lost, held + cached - lost - guaranteed)
        levels[account] = (held + cached - lost - guaranteed) / weight, weight, spare
    for account, lost in plan.items():  # whoever lost is not far below one that could still give
        level, weight, _ = levels[account]
        assert lost == 0 or all(level + 1 / weight >= other for other, _, spare in levels.values() if spare > 0)


def test_many_tenants_cost_no_scan_of_blocks() -> None:
    allocator = Allocator(1000)
    tenants = Tenants(allocator, {str(index): Share() for index in range(20)})
    ids = allocator.allocate(900, tenants.of("7").index)
    allocator.enter_tree(ids)
    allocator.release(ids)
    assert tenants.plan(5, "3") == [(8, 5)]
    assert np.array_equal(allocator.count_by_label(ids)[7], 900)
