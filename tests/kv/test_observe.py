"""Explanations of misses: each cause is told from the others, and nothing of another tenant is."""

from __future__ import annotations

import numpy as np
import pytest

from pagoda.kv import observe
from pagoda.kv.keys import Scope
from pagoda.kv.observe import Explanation, MissReason
from tests.kv.fakes import make
from tests.kv.test_cache import SCOPE, SIZE, seq
from tests.kv.test_retention import PREFIX, PROMPT, LeaseBench


def explain(bench: LeaseBench, tokens: np.ndarray, scope: Scope = SCOPE) -> Explanation:
    misses = bench.cache.misses
    facts = misses.facts(tokens, scope, bench.cache.lookup(tokens, scope).match)
    explanation = misses.elsewhere(facts, tokens, scope)
    assert explanation.num_hit_tokens == bench.cache.lookup(tokens, scope).num_tokens
    assert explanation.num_tokens == tokens.size
    return explanation


def test_never_seen() -> None:
    bench = LeaseBench()
    assert explain(bench, PROMPT).reason == MissReason.NEVER_SEEN
    bench.run(PREFIX)
    longer = explain(bench, seq(range(40)))
    assert (longer.reason, longer.num_hit_tokens) == (MissReason.NEVER_SEEN, 12)
    assert (longer.before, longer.asked) == (tuple(range(12)), tuple(range(12, 28)))


def test_nothing_missed() -> None:
    bench = LeaseBench()
    bench.run(PROMPT)
    assert explain(bench, PROMPT).reason == MissReason.NONE


@pytest.mark.parametrize("at", [0, 1, 4, 6, 8, 11])
def test_diverged_at_any_token_with_both_sides(at: int) -> None:
    bench = LeaseBench()
    bench.run(seq(range(30)))
    asked = seq(range(at), range(500, 520))
    told = explain(bench, asked)
    assert (told.reason, told.num_hit_tokens) == (MissReason.DIVERGED, at)
    assert told.before == tuple(range(at))
    assert told.asked == tuple(range(500, 516))
    assert told.cached == tuple(range(at, at + len(told.cached)))
    assert told.cached


@pytest.mark.parametrize("at", [0, 1, 4, 6, 8, 11])
def test_diverged_within_a_block_where_hits_end_with_blocks(at: int) -> None:
    cache, _ = make(20, SIZE, kv_format="int4")
    tokens = seq(range(30))
    lease = cache.acquire(tokens, SCOPE)
    cache.reserve(lease, tokens.size)
    cache.advance(lease, tokens, tokens.size)
    cache.release(lease, tokens)
    asked, hit = seq(range(at), range(500, 530)), at // SIZE * SIZE
    told = cache.misses.facts(asked, SCOPE, cache.lookup(asked, SCOPE).match)
    assert (told.reason, told.num_hit_tokens, told.missed_at) == (MissReason.DIVERGED, hit, hit)
    assert told.before == tuple(range(hit))
    assert told.asked == (*range(hit, at), *range(500, 516))
    assert told.cached[: at - hit + 1] == tuple(range(hit, at + 1))
    beyond = seq(range(28), range(500, 530))
    told = cache.misses.facts(beyond, SCOPE, cache.lookup(beyond, SCOPE).match)
    assert (told.reason, told.missed_at) == (MissReason.NEVER_SEEN, 28)


def test_evicted_with_the_policy_and_the_pressure() -> None:
    bench = LeaseBench()
    bench.run(PROMPT)
    bench.run(seq(range(300, 309)))
    bench.retain(seq(range(300, 308)), ttl_s=None)
    running = bench.acquire(seq(range(400, 440)))
    bench.cache.reserve(running, 6 * SIZE)
    bench.clock.now = 200
    bench.flood()
    told = explain(bench, PROMPT)
    assert (told.reason, told.num_hit_tokens) == (MissReason.EVICTED, 0)
    assert told.eviction is not None
    assert (told.eviction.policy, told.eviction.at) == ("lru", 200)
    assert told.eviction.num_evicted >= 1
    assert (told.eviction.num_held, told.eviction.num_leased) == (8, 2)
    # A prompt that shares nothing with it was never there.
    assert explain(bench, seq(range(700, 720))).eviction is None


def test_the_first_missing_block_of_a_partly_evicted_prefix() -> None:
    bench = LeaseBench()
    bench.run(seq(range(24)))
    bench.cache.evict(2)
    told = explain(bench, seq(range(24), [9]))
    assert told.eviction is not None
    assert told.eviction.policy == "operator"
    assert (told.reason, told.num_hit_tokens) == (MissReason.EVICTED, 16)


def test_a_computed_block_is_no_ghost_any_more_for_what_follows_it() -> None:
    bench = LeaseBench()
    bench.run(PROMPT)
    bench.flood()
    bench.run(PROMPT)
    assert explain(bench, PROMPT).reason == MissReason.NONE
    assert explain(bench, seq(range(14), range(900, 910))).reason != MissReason.EVICTED


def test_an_expired_lease_is_told_from_an_eviction() -> None:
    bench = LeaseBench()
    bench.run(PROMPT)
    bench.retain(PREFIX, ttl_s=10)
    bench.pass_time(10)
    bench.flood()
    told = explain(bench, PROMPT)
    assert told.reason == MissReason.LEASE_EXPIRED
    assert told.eviction is not None
    assert told.eviction.lease_expired_at == 110
    bench.run(PROMPT)
    bench.flood()
    assert explain(bench, PROMPT).reason == MissReason.EVICTED


def test_another_salt_of_the_same_tenant() -> None:
    bench = LeaseBench()
    bench.run(PROMPT, Scope("tenant", salt="s"))
    told = explain(bench, PROMPT)
    assert (told.reason, told.differs) == (MissReason.OTHER_SCOPE, ("cache_salt",))
    assert told.cached == ()


def test_nothing_is_told_of_another_tenant() -> None:
    bench = LeaseBench()
    bench.run(PROMPT, Scope("other"))
    asked = tuple(PROMPT.tolist())
    assert explain(bench, PROMPT) == Explanation(14, 0, 0, MissReason.NEVER_SEEN, asked=asked, before=())
    bench.flood()  # evicts the other's
    assert bench.cache.lookup(PROMPT, Scope("other")).num_tokens == 0
    told = explain(bench, PROMPT)
    assert (told.eviction, told.differs) == (None, ())
    assert set(told.cached).isdisjoint(PROMPT.tolist())


def test_a_purge_is_of_no_concern_to_other_tenants() -> None:
    """What the asking tenant had there was evicted since, not purged: it may be told still."""
    bench, asked = LeaseBench(), seq(range(8), range(500, 520))
    bench.run(seq(range(30)))
    misses = bench.cache.misses
    facts = misses.facts(asked, SCOPE, bench.cache.lookup(asked, SCOPE).match)
    bench.flood()
    bench.cache.purge("someone else")
    later = seq(range(600, 620))
    assert explain(bench, later).num_purges == 0
    assert misses.still_cached(facts, asked, SCOPE).cached == facts.cached != ()
    bench.cache.purge(SCOPE, seq(range(12)))
    assert misses.still_cached(facts, asked, SCOPE).cached == ()
    assert explain(bench, later).num_purges == 1


def test_without_tenants_salts_are_not_told_of() -> None:
    bench = LeaseBench()
    bench.run(PROMPT, Scope("", salt="s"))
    assert explain(bench, PROMPT, Scope("")).reason == MissReason.NEVER_SEEN


def test_ghosts_are_bounded_and_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "MAX_GHOSTS", 20)
    bench = LeaseBench()
    bench.run(PROMPT)
    bench.flood()
    assert len(bench.cache.misses._ghosts) == 20
    assert explain(bench, PROMPT).reason != MissReason.EVICTED


@pytest.mark.parametrize("windows", [(None, 5), (6,)])
def test_window_groups(windows: tuple[int | None, ...]) -> None:
    bench = LeaseBench(num_blocks=48, windows=windows)
    bench.run(PROMPT)
    assert explain(bench, PROMPT).reason == MissReason.NONE
    bench.flood()
    assert explain(bench, PROMPT).reason == MissReason.EVICTED
