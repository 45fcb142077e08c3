"""Purge: what is forgotten is unreachable at once, and its blocks come back when nobody holds them."""

from __future__ import annotations

import numpy as np
import pytest

from pagoda.kv.eviction import POLICIES, make_policy
from pagoda.kv.keys import Scope
from tests.kv.fakes import make
from tests.kv.test_cache import SCOPE, SIZE, Bench, seq
from tests.kv.test_retention import LeaseBench

SYSTEM = range(8)
ALICE = seq(SYSTEM, range(100, 110))
BOB = seq(SYSTEM, range(200, 210))


def known(bench: Bench, tokens: np.ndarray, scope: Scope = SCOPE) -> int:
    return bench.cache.lookup(np.append(tokens, [0]), scope).num_tokens


def purge(bench: Bench, where: Scope | str = SCOPE, prefix: np.ndarray | None = None) -> int:
    gone = bench.cache.purge(where, prefix)
    bench.cache.check()
    return gone


def test_a_prefix_goes_with_all_that_continues_it_and_siblings_stay() -> None:
    bench = Bench(num_blocks=32)
    bench.run(ALICE)
    bench.run(BOB)
    assert purge(bench, prefix=seq(SYSTEM, [100])) == 3
    assert known(bench, ALICE) == len(SYSTEM)
    assert known(bench, BOB) == BOB.size


def test_what_only_led_to_the_purged_goes_too() -> None:
    bench = Bench(num_blocks=32)
    bench.run(ALICE)
    assert purge(bench, prefix=ALICE) == 5
    assert known(bench, ALICE) == 0
    assert bench.counts() == (32, 0, 0)


def test_a_prefix_that_ends_inside_a_block_takes_every_block_that_has_it() -> None:
    bench = Bench(num_blocks=32)
    first, second, other = (seq(SYSTEM, [9, 9], [token] * 4) for token in (1, 2, 3))
    other[8] = 7
    for tokens in first, second, other:
        bench.run(tokens)
    purge(bench, prefix=seq(SYSTEM, [9, 9]))
    assert known(bench, first) <= 8 + 1  # the other's block may share its first token, and no more
    assert known(bench, other) == other.size


def test_what_is_not_cached_purges_nothing() -> None:
    bench = Bench()
    bench.run(seq(SYSTEM))
    for where, prefix in ((Scope("stranger"), None), ("stranger", None), (SCOPE, seq(range(7), [99]))):
        assert purge(bench, where, prefix) == 0
    assert known(bench, seq(SYSTEM)) == 8


def test_a_namespace_is_all_its_scopes_and_no_other() -> None:
    bench = Bench(num_blocks=32)
    salted, other = Scope(SCOPE.namespace, salt="s"), Scope("other")
    for scope in SCOPE, salted, other:
        bench.run(seq(SYSTEM), scope)
    assert purge(bench, SCOPE) == 2
    assert [known(bench, seq(SYSTEM), scope) for scope in (SCOPE, salted, other)] == [0, 8, 8]
    bench.run(seq(SYSTEM))
    assert purge(bench, SCOPE.namespace) == 4
    assert [known(bench, seq(SYSTEM), scope) for scope in (SCOPE, salted, other)] == [0, 0, 8]


def test_a_running_request_goes_on_for_itself_and_gives_its_blocks_back() -> None:
    bench = Bench()
    lease = bench.acquire(ALICE)
    bench.compute(lease, ALICE, 10)
    assert purge(bench) == 2
    assert bench.counts() == (13, 3, 0)
    assert known(bench, ALICE) == 0
    bench.compute(lease, ALICE)
    twin = bench.cache.fork(lease)
    more = seq(ALICE.tolist(), [1, 2, 3])
    bench.compute(twin, more)
    for each, tokens in ((lease, ALICE), (twin, more)):
        bench.cache.release(each, tokens)
    bench.cache.check()
    assert bench.counts() == (16, 0, 0)
    assert bench.run(ALICE) == 0


def test_a_request_that_has_computed_nothing_yet_is_purged_as_well() -> None:
    bench = Bench()
    lease = bench.acquire(ALICE)
    purge(bench, prefix=seq(SYSTEM))
    assert bench.cache.pending(ALICE, SCOPE, 0) is None
    bench.compute(lease, ALICE)
    bench.cache.release(lease, ALICE)
    assert bench.counts() == (16, 0, 0)


def test_a_request_that_continues_a_purged_tail_in_place_keeps_it() -> None:
    bench = Bench()
    bench.run(ALICE)
    longer = seq(ALICE.tolist(), range(8))
    lease = bench.acquire(longer)
    assert lease.owns_tail
    purge(bench)
    bench.compute(lease, longer)
    bench.cache.release(lease, longer)
    bench.cache.check()
    assert bench.counts() == (16, 0, 0)


def test_ancestors_of_a_purged_request_can_be_evicted_when_it_ends() -> None:
    bench = Bench()
    bench.run(BOB)
    lease = bench.acquire(ALICE)
    bench.compute(lease, ALICE)
    purge(bench, prefix=seq(SYSTEM, [100]))
    purge(bench, prefix=seq(SYSTEM, [200]))
    bench.cache.evict(16)  # asks for all candidates, and finds the ancestors held
    bench.cache.release(lease, ALICE)
    bench.cache.check()
    bench.cache.evict(16)
    assert bench.counts() == (16, 0, 0)


def test_leases_on_purged_blocks_end_and_others_hold() -> None:
    bench = LeaseBench(num_blocks=32)
    bench.run(ALICE)
    bench.run(BOB)
    system, alice = bench.retain(seq(SYSTEM)), bench.retain(ALICE[:16])
    assert bench.cache.purge_lease(alice) == 3
    assert alice.released
    assert not system.released
    assert purge(bench, prefix=seq(SYSTEM, [200])) == 3
    assert known(bench, ALICE) == 8  # nothing continues the leased prefix now, and it stays
    assert bench.cache.retention.usage == {"a": 2}
    assert bench.cache.purge_lease(system) == 2
    assert bench.cache.purge_lease(system) == 0
    bench.cache.check()
    assert bench.counts() == (32, 0, 0)


@pytest.mark.parametrize("name", POLICIES)
def test_a_purged_leaf_is_no_candidate_any_more(name: str) -> None:
    bench = Bench()
    bench.cache, bench.pool = make(16, SIZE, policy=make_policy(name))
    bench.run(ALICE)
    bench.run(BOB)
    purge(bench, prefix=ALICE)
    bench.run(ALICE[:12])
    assert bench.cache.evict(16) == 6
    bench.cache.check()
    assert bench.counts() == (16, 0, 0)
