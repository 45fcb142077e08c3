"""Leases: they hold under pressure, end in time, never take more than their share, and leak nothing."""

from __future__ import annotations

import heapq
import re
from typing import Any

import numpy as np
import pytest

from pagoda.errors import LeaseRefused, OutOfBlocks
from pagoda.kv.cache import KVCache
from pagoda.kv.keys import Scope
from pagoda.kv.retained import Retained
from tests.kv.fakes import TokenPool, layout
from tests.kv.test_cache import SCOPE, SIZE, Bench, seq


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class LeaseBench(Bench):
    def __init__(self, num_blocks: int = 16, windows: tuple[int | None, ...] = (None,), limit: int = 8) -> None:
        self.clock = Clock()
        self.pool = TokenPool(num_blocks, SIZE)
        self.cache = KVCache(layout(SIZE, windows), self.pool, clock=self.clock)
        self.cache.retention.limit_blocks = limit

    def retain(
        self, tokens: np.ndarray, ttl_s: float | None = 10, owner: str = "a", scope: Scope = SCOPE, name: str = ""
    ) -> Retained:
        lease = self.cache.retention.retain(tokens, scope, ttl_s=ttl_s, owner=owner, name=name)
        self.cache.check()
        return lease

    def flood(self) -> None:
        """Requests that fill the pool with other things."""
        for start in range(1000, 1000 + 100 * self.cache.num_blocks, 100):
            self.run(seq(range(start, start + 2 * SIZE + 1)))

    def touch(self, tokens: np.ndarray) -> None:
        """A request that is admitted and aborted."""
        lease = self.acquire(tokens)
        self.cache.note_hit(lease)
        self.cache.release(lease, tokens)

    def hit(self, tokens: np.ndarray) -> int:
        return self.cache.lookup(tokens, SCOPE).num_tokens

    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.cache.retention.expire()
        self.cache.check()


PREFIX = seq(range(12))
PROMPT = seq(range(12), [90, 91])


def test_a_lease_survives_a_flood_and_then_goes() -> None:
    bench = LeaseBench()
    bench.run(PROMPT)
    lease = bench.retain(PREFIX)
    assert lease.num_tokens == 12
    bench.flood()
    assert bench.hit(PROMPT) == 12
    bench.pass_time(9.9)
    bench.flood()
    assert bench.hit(PROMPT) == 12
    bench.pass_time(0.2)
    assert lease.released
    assert bench.hit(PROMPT) == 12  # still there: it only lost its guarantee
    bench.flood()
    assert bench.hit(PROMPT) == 0
    assert bench.cache.retention.num_blocks == 0


def test_without_a_lease_the_same_flood_takes_it() -> None:
    bench = LeaseBench()
    bench.run(PROMPT)
    bench.flood()
    assert bench.hit(PROMPT) == 0


def test_a_hit_starts_the_time_anew() -> None:
    bench = LeaseBench()
    bench.run(PROMPT)
    bench.retain(PREFIX)
    for _ in range(5):
        bench.pass_time(8)
        bench.touch(PROMPT)
        bench.flood()
        assert bench.hit(PROMPT) >= 12
    bench.pass_time(10.1)
    assert not bench.cache.retention.leases


def test_a_hit_that_ends_before_the_lease_does_not_refresh_it() -> None:
    bench = LeaseBench()
    bench.run(PROMPT)
    lease = bench.retain(PREFIX)
    bench.pass_time(8)
    bench.touch(seq(range(8), [77]))
    bench.pass_time(2.1)
    assert lease.released


def test_available_blocks_shrink_by_what_is_leased() -> None:
    bench = LeaseBench()
    bench.run(PROMPT)
    assert bench.cache.num_available_blocks == 16
    lease = bench.retain(PREFIX)
    assert bench.cache.num_available_blocks == 13
    assert bench.counts()[1] == bench.cache.retention.num_blocks == 3
    other = bench.acquire(seq(range(500, 600)))
    with pytest.raises(OutOfBlocks):
        bench.cache.reserve(other, 14 * SIZE)
    bench.cache.reserve(other, 13 * SIZE)
    bench.cache.release(other, seq(range(500, 600)))
    bench.cache.retention.release(lease)
    bench.cache.check()
    assert bench.cache.num_available_blocks == 16


def test_over_budget_is_refused_with_its_own_figures_and_changes_nothing() -> None:
    bench = LeaseBench(limit=4)
    bench.run(PROMPT)
    bench.run(seq(range(200, 209)))
    bench.retain(PREFIX)
    before = bench.counts()
    with pytest.raises(LeaseRefused, match="2 more KV blocks are needed beside the 3 that the tenant has leased"):
        bench.retain(seq(range(200, 209)))
    assert bench.counts() == before
    bench.pass_time(11)
    assert bench.retain(seq(range(200, 209))).num_tokens == 8


def test_one_owner_has_a_bound_of_its_own() -> None:
    bench = LeaseBench()
    bench.cache.retention.owner_limits["a"] = 3
    bench.run(PROMPT)
    bench.run(seq(range(200, 209)))
    bench.retain(PREFIX, owner="a")
    with pytest.raises(LeaseRefused, match=r"2 more .* and 3 of the tenant's 3 are leased: `lease_budget`"):
        bench.retain(seq(range(200, 209)), owner="a")
    bench.retain(seq(range(200, 209)), owner="b")
    assert bench.cache.retention.usage == {"a": 3, "b": 2}


def test_a_refusal_tells_nothing_of_others() -> None:
    bench = LeaseBench(limit=5)
    bench.run(PROMPT)
    bench.run(seq(range(200, 213)))
    bench.retain(PREFIX, owner="a")
    with pytest.raises(LeaseRefused) as refused:
        bench.retain(seq(range(200, 213)), owner="b")
    assert [int(number) for number in re.findall(r"\d+", str(refused.value))] == [3, 0]


def test_what_others_are_guaranteed_cannot_be_leased() -> None:
    bench = LeaseBench(limit=12)
    retention = bench.cache.retention
    retention.guaranteed, retention.unguaranteed_limit_blocks = {"a": 3}, 2
    for start in range(0, 400, 100):
        bench.run(seq(range(start, start + 13)))
    bench.retain(seq(range(12)), owner="a")  # within its share: the others lose nothing
    with pytest.raises(LeaseRefused):
        bench.retain(seq(range(100, 112)), owner="b")
    bench.retain(seq(range(100, 108)), owner="b")
    with pytest.raises(LeaseRefused):
        bench.retain(seq(range(200, 204)), owner="a")


def test_ids_cannot_be_guessed() -> None:
    bench = LeaseBench()
    bench.run(PROMPT)
    leases = [bench.retain(PREFIX, owner=str(number)) for number in range(3)]
    assert len({lease.id for lease in leases}) == 3
    assert all(len(lease.id) >= 24 for lease in leases)
    assert bench.cache.retention.find(leases[1].id) is leases[1]
    bench.cache.retention.release(leases[1])
    assert bench.cache.retention.find(leases[1].id) is None


@pytest.mark.parametrize("look", ["leases", "usage", "num_blocks"])
def test_whoever_looks_sees_no_lease_that_ran_out(look: str) -> None:
    bench = LeaseBench()
    bench.run(PROMPT)
    bench.retain(PREFIX, ttl_s=10)
    assert bench.cache.retention.next_expiry_s == 10
    bench.clock.now += 10.5  # no step, no expire
    assert not getattr(bench.cache.retention, look)
    assert bench.cache.retention.next_expiry_s is None
    bench.cache.check()


def test_who_needs_room_does_not_wait_for_a_step_to_end_leases() -> None:
    bench = LeaseBench()
    bench.run(PROMPT)
    bench.retain(PREFIX)
    bench.clock.now += 10.5
    lease = bench.acquire(tokens := seq(range(500, 564)))
    bench.cache.reserve(lease, tokens.size)
    bench.cache.release(lease, tokens)
    bench.cache.check()


def test_a_shared_block_is_charged_to_the_first_and_then_to_the_next() -> None:
    bench = LeaseBench()
    bench.run(PROMPT)
    first = bench.retain(seq(range(8)), owner="a")
    bench.retain(PREFIX, owner="b")
    assert bench.cache.retention.usage == {"a": 2, "b": 1}
    bench.cache.retention.release(first)
    assert bench.cache.retention.usage == {"b": 3}
    bench.cache.retention.release(first)  # twice is once
    bench.pass_time(11)
    assert bench.cache.retention.usage == {}
    assert bench.cache.num_held_blocks == 0


def test_the_same_prefix_again_prolongs_the_lease() -> None:
    bench = LeaseBench(limit=3)
    bench.run(PROMPT)
    lease = bench.retain(PREFIX, ttl_s=10)
    bench.pass_time(5)
    assert bench.retain(PREFIX, ttl_s=60) is lease
    bench.pass_time(59)
    assert bench.retain(PREFIX, ttl_s=1) is lease  # never shortened
    bench.pass_time(0.9)
    assert not lease.released
    bench.pass_time(0.2)
    assert lease.released


def test_a_named_lease_stands_for_itself_and_hits_do_not_prolong_it() -> None:
    bench = LeaseBench(limit=3)
    bench.run(PROMPT)
    plain, named = bench.retain(PREFIX, ttl_s=10), bench.retain(PREFIX, ttl_s=10, name="cache-1")
    assert named is not plain
    assert bench.cache.retention.num_blocks == 3
    bench.pass_time(6)
    bench.touch(PROMPT)
    bench.pass_time(6)
    assert named.released
    assert not plain.released


@pytest.mark.parametrize(("ttl_s", "lives"), [(3.0, 3.0), (60.0, 60.0)])
def test_a_lease_may_be_moved_either_way(ttl_s: float, lives: float) -> None:
    bench = LeaseBench()
    bench.run(PROMPT)
    lease = bench.retain(PREFIX, ttl_s=10, name="cache-1")
    bench.cache.retention.postpone(lease, ttl_s)
    bench.pass_time(lives - 0.1)
    assert not lease.released
    bench.pass_time(0.2)
    assert lease.released
    assert bench.cache.num_held_blocks == 0


def test_a_pin_has_no_end() -> None:
    bench = LeaseBench()
    bench.run(PROMPT)
    lease = bench.retain(PREFIX, ttl_s=10)
    assert bench.retain(PREFIX, ttl_s=None) is lease
    bench.pass_time(1e9)
    bench.flood()
    assert bench.hit(PROMPT) == 12
    bench.cache.retention.release(lease)
    bench.flood()
    assert bench.hit(PROMPT) == 0


@pytest.mark.parametrize("tokens", [seq(range(3)), seq(range(300, 320)), PREFIX])
def test_what_has_no_whole_block_is_refused(tokens: np.ndarray) -> None:
    bench = LeaseBench()
    bench.run(PROMPT)
    scope = Scope("other") if tokens is PREFIX else SCOPE
    with pytest.raises(LeaseRefused, match="whole blocks of 4 tokens"):
        bench.retain(tokens, scope=scope)


def test_no_room_for_any_lease_is_said_with_its_cause() -> None:
    bench = LeaseBench(limit=0)
    bench.cache.retention.limit_cause = "a context takes all"
    bench.run(PROMPT)
    with pytest.raises(LeaseRefused, match="no KV block may be leased: a context takes all"):
        bench.retain(PREFIX)


def test_a_leased_block_is_continued_in_a_copy() -> None:
    bench = LeaseBench()
    bench.run(seq(range(12)))
    bench.retain(seq(range(12)))
    assert bench.run(seq(range(12), range(60, 70))) == 12
    assert bench.run(seq(range(10), range(80, 90))) == 10
    bench.flood()
    assert bench.hit(PROMPT) == 12


@pytest.mark.parametrize("windows", [(None, 5), (6,), (5, None, 9)])
def test_window_groups_hold_their_window(windows: tuple[int | None, ...]) -> None:
    bench = LeaseBench(num_blocks=64, windows=windows, limit=40)
    lease = bench.acquire(PROMPT)
    bench.compute(lease, PROMPT, 12)
    retained = bench.retain(PREFIX)
    bench.compute(lease, PROMPT)
    bench.cache.release(lease, PROMPT)
    bench.flood()
    assert retained.num_tokens == 12
    assert bench.hit(PROMPT) >= 12
    bench.pass_time(9)
    bench.touch(PROMPT)
    bench.pass_time(9)
    assert not retained.released
    bench.pass_time(2)
    assert bench.cache.num_held_blocks == 0


def test_a_thousand_leases_end_in_order_without_a_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = LeaseBench(num_blocks=1200, limit=1100)
    cache = bench.cache
    for index in range(1000):
        tokens = seq([10_000 + index], range(SIZE))
        lease = cache.acquire(tokens, SCOPE)
        cache.reserve(lease, tokens.size)
        cache.advance(lease, tokens, tokens.size)
        cache.release(lease, tokens)
        cache.retention.retain(tokens, SCOPE, ttl_s=1 + index, owner=str(index % 7))
    popped = 0

    def heappop(heap: list[Any]) -> Any:
        nonlocal popped
        popped += 1
        return real_heappop(heap)

    real_heappop = heapq.heappop
    monkeypatch.setattr(heapq, "heappop", heappop)
    for index in range(0, 1000, 100):
        popped = 0
        bench.pass_time(100)
        assert len(cache.retention.leases) == 900 - index
        assert min((lease.ttl_s or 0 for lease in cache.retention.leases), default=1000) >= 100 + index
        assert popped == 100  # those that ran out, and no others
    assert cache.num_held_blocks == 0
