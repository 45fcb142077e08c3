"""Leases that a tier holds since the pool has no room for them: granted, kept under pressure, prolonged, ended."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pagoda.engine.core import EngineCore
from pagoda.engine.outputs import LeaseOutcome, RequestOutput
from pagoda.engine.params import LeaseSpec, SamplingParams
from pagoda.engine.prefill_speed import PrefillSpeed
from pagoda.engine.tenants import TenantSpec
from pagoda.kv.hierarchy import WritePolicy
from pagoda.kv.keys import Scope
from pagoda.kv.lease import TierUse
from pagoda.kv.tiered import TieredCache
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.fake import Faults, FaultyTier, MemoryTier
from tests.engine.fakes import VOCAB, expected_output, make_core
from tests.waiting import PATIENCE_S, until

NUM_TOKENS, NUM_LEASED = 60, 56
SCOPE = Scope("a")
COMPUTED = TierUse(max_restored_tokens=0)  # no tier that hangs is waited for before


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier's answer is waited for however busy the machine is."""
    monkeypatch.setattr("pagoda.kv.tier_leases._DECIDE_S", PATIENCE_S)


def prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, NUM_TOKENS).tolist()


def make(tier: Tier, **config: object) -> EngineCore:
    """An engine whose pool leases nothing: one context fills it."""
    core, _ = make_core(num_blocks=64, tiers=[(tier, WritePolicy.THROUGH)], max_model_len=256, **config)
    core.cache.retention.limit_blocks = 0
    assert isinstance(core.cache, TieredCache)
    hierarchy = core.cache.hierarchy
    until(lambda: all(report.usage for report in hierarchy.reports()))  # its size is known
    return core


def start(
    core: EngineCore,
    seed: int,
    request_id: str = "r",
    *,
    ttl_s: float = 60.0,
    name: str = "",
    tier_use: TierUse = TierUse(),
) -> None:
    core._scheduler.prefill_speed = PrefillSpeed(1.0)  # any load is worth it
    params = SamplingParams(max_tokens=4, temperature=0.0, tier_use=tier_use)
    leases = [LeaseSpec(NUM_LEASED, ttl_s, name)] if ttl_s else []
    core.add(request_id, prompt(seed), params, scope=SCOPE, leases=leases)


def finish(core: EngineCore) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    deadline = time.monotonic() + PATIENCE_S
    while core.has_work and time.monotonic() < deadline:
        outputs += core.step()
        core.cache.check()
    assert not core.has_work
    return outputs


def ask(core: EngineCore, seed: int, *, ttl_s: float = 60.0, name: str = "") -> tuple[LeaseOutcome, ...]:
    """A request's leases as its outputs told: the first and the last the same."""
    start(core, seed, ttl_s=ttl_s, name=name)
    outputs = finish(core)
    tokens = [token for output in outputs for delta in output.deltas for token in delta.token_ids]
    assert tokens == expected_output(prompt(seed), 4)
    assert len({output.leases for output in outputs}) == 1
    return outputs[0].leases


def hit(core: EngineCore, seed: int) -> int:
    start(core, seed, ttl_s=0.0, tier_use=TierUse(wait_s=PATIENCE_S))
    request = core._requests["r"]
    finish(core)
    return request.num_hit_tokens


def flood(core: EngineCore) -> None:
    """Other prompts, several times what pool and tier hold."""
    for seed in range(100, 130):
        ask(core, seed, ttl_s=0.0)
    flush(core)


def flush(core: EngineCore) -> None:
    assert isinstance(core.cache, TieredCache)
    assert core.cache.hierarchy.flush(PATIENCE_S)


def tier_for(num_prompts: int) -> MemoryTier:
    core, _ = make_core()
    return MemoryTier(num_prompts * 16 * core.cache.layout.block_bytes)


def num_leased(tier: Tier) -> int:
    return sum(info.lease_until > time.time() for info in tier.scan())


def test_it_stays_restorable_under_pressure_and_after_a_restart() -> None:
    tier = tier_for(4)
    core = make(tier)
    (outcome,) = ask(core, 0)
    assert (outcome.num_tokens, outcome.refused, outcome.held_in) == (NUM_LEASED, None, "memory")
    assert core.cache.retention.num_blocks == 0
    assert core.cache.retention.num_refused == 0
    flood(core)
    assert hit(core, 0) >= NUM_LEASED
    flood(core)
    assert hit(make(tier), 0) >= NUM_LEASED
    (lease,) = core.cache.retention.leases
    assert (lease.held_in, lease.num_below) == ("memory", 14)


def test_a_hit_prolongs_it_and_its_end_frees_the_tier() -> None:
    tier = tier_for(4)
    core = make(tier)
    ask(core, 0)
    (lease,) = core.cache.retention.leases
    before = lease.expires_at
    flood(core)
    hit(core, 0)
    assert lease.expires_at > before
    assert ask(core, 0)[0].held_in == "memory"
    assert len(core.cache.retention.leases) == 1
    core.cache.retention.release(lease)
    flush(core)
    assert num_leased(tier) == 0
    assert not core.cache.retention.leases


def test_it_expires() -> None:
    tier = tier_for(4)
    core = make(tier)
    now = 1000.0
    core.cache.retention._clock = lambda: now
    ask(core, 0, ttl_s=30.0)
    now += 31
    assert not core.cache.retention.leases
    flush(core)
    assert num_leased(tier) == 0


def test_a_tier_leases_at_most_half_of_itself() -> None:
    core = make(tier_for(4))
    outcomes = [ask(core, seed)[0] for seed in range(4)]
    assert [outcome.held_in for outcome in outcomes] == ["memory", "memory", None, None]
    assert "lease" in str(outcomes[2].refused)
    assert core.cache.retention.num_refused == 2


def test_a_tenants_budget_counts_what_tiers_hold() -> None:
    core = make(tier_for(8), tenants={"a": TenantSpec(lease_bytes=20 * make_core()[0].cache.layout.block_bytes)})
    core.cache.retention.limit_blocks = 0
    outcomes = [ask(core, seed)[0] for seed in range(2)]
    assert outcomes[0].held_in == "memory"
    assert "lease_budget" in str(outcomes[1].refused)


@pytest.mark.parametrize("fault", ["unavailable", "hung"])
def test_a_tier_that_does_not_answer_refuses_within_a_moment_and_holds_nobody_else_up(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.kv.tier_leases._DECIDE_S", 0.3)
    faults = Faults()
    core = make(FaultyTier(tier_for(4), faults))
    faults.unavailable = fault == "unavailable"
    if fault == "hung":
        faults.hang()
    start(core, 0, tier_use=COMPUTED)
    start(core, 1, "other", ttl_s=0.0, tier_use=COMPUTED)
    outputs = finish(core)
    faults.running.set()
    if fault == "hung":  # a tier that is known to be out is not asked, so that nobody need wait
        assert outputs[0].request_id == "other"
    assert {output.leases[0].held_in for output in outputs if output.request_id == "r"} == {None}
    core.cache.check()


def test_an_aborted_request_leaves_no_lease() -> None:
    faults = Faults()
    tier = tier_for(4)
    core = make(FaultyTier(tier, faults))
    faults.hang()
    start(core, 0, tier_use=COMPUTED)
    while not core._desk.is_waiting:
        core.step()
    core.abort("r")
    faults.running.set()
    ask(core, 1, ttl_s=0.0)
    assert not core.cache.retention.leases
    flush(core)
    assert num_leased(tier) == 0


def test_a_purge_ends_it() -> None:
    tier = tier_for(4)
    core = make(tier)
    ask(core, 0)
    core.cache.purge(SCOPE, np.array(prompt(0)[:20], dtype=np.int32))
    assert not core.cache.retention.leases
    flush(core)
    assert num_leased(tier) == 0


def test_a_lease_of_the_pool_on_the_same_prefix_does_not_shorten_it() -> None:
    tier = tier_for(4)
    core = make(tier)
    ask(core, 0, ttl_s=600.0)
    core.cache.retention.limit_blocks = core.cache.retention.unguaranteed_limit_blocks = 20
    (outcome,) = ask(core, 0, ttl_s=30.0, name="short")
    assert outcome.held_in == "pool"
    core.cache.retention.release(next(each for each in core.cache.retention.leases if each.name == "short"))
    flush(core)
    left = [info.lease_until - time.time() for info in tier.scan() if info.lease_until]
    assert len(left) == 14
    assert min(left) > 500


def lease_left(tier: Tier) -> list[float]:
    """For how many seconds more the tier keeps each leased record, the shortest first."""
    return sorted(info.lease_until - time.time() for info in tier.scan() if info.lease_until)


def ask_for(core: EngineCore, num_tokens: int, ttl_s: float) -> LeaseOutcome:
    core._scheduler.prefill_speed = PrefillSpeed(1.0)
    params = SamplingParams(max_tokens=4, temperature=0.0)
    core.add("r", prompt(0), params, scope=SCOPE, leases=[LeaseSpec(num_tokens, ttl_s)])
    return finish(core)[0].leases[0]


def test_a_short_lease_on_more_does_not_shorten_a_long_one_on_less_granted_or_not() -> None:
    tier = tier_for(8)
    core = make(tier)
    assert ask_for(core, 40, 600.0).held_in == "memory"
    assert ask_for(core, 56, 30.0).held_in == "memory"
    flush(core)
    assert [left > 500 for left in lease_left(tier)] == [False] * 4 + [True] * 10
    short = next(each for each in core.cache.retention.leases if each.num_tokens == 56)
    core.cache.retention.prolong(short, 60.0)
    flush(core)
    assert [left > 500 for left in lease_left(tier)] == [False] * 4 + [True] * 10
    core.cache.retention.owner_limits["a"] = 24  # what is leased: any more is refused, when the tier has answered
    core.cache.retention._check_owner = lambda count, owner: None  # type: ignore[method-assign]
    start(core, 0, ttl_s=20.0, name="other")
    while core.has_work and not core._desk.is_waiting:
        core.step()
    assert core._desk.is_waiting
    del core.cache.retention._check_owner
    assert finish(core)[0].leases[0].held_in is None
    flush(core)
    assert [left > 500 for left in lease_left(tier)] == [False] * 4 + [True] * 10


def test_a_lease_below_does_not_shorten_what_the_pool_leases() -> None:
    tier = tier_for(4)
    core = make(tier)
    core.cache.retention.limit_blocks = core.cache.retention.unguaranteed_limit_blocks = 10
    assert ask_for(core, 40, 600.0).held_in == "pool"
    assert ask_for(core, 56, 30.0).held_in == "memory"
    flush(core)
    assert [left > 500 for left in lease_left(tier)] == [False] * 4 + [True] * 10


def test_requests_that_ask_for_the_same_at_once_share_a_lease() -> None:
    core = make(tier_for(8))
    for number in range(3):
        start(core, 0, str(number))
    outcomes = {output.request_id: output.leases for output in finish(core)}
    assert {leases[0].held_in for leases in outcomes.values()} == {"memory"}
    (lease,) = core.cache.retention.leases
    assert core.cache.retention._usage_below["a"] == lease.num_below == 14
    assert isinstance(core.cache, TieredCache)
    assert sum(core.cache._below._taken.values()) == 14 * core.cache.layout.block_bytes


def test_what_a_budget_does_not_allow_is_not_allowed_because_it_was_asked_for_at_once() -> None:
    core = make(tier_for(8), tenants={"a": TenantSpec(lease_bytes=20 * make_core()[0].cache.layout.block_bytes)})
    core.cache.retention.limit_blocks = 0
    for seed in range(3):
        start(core, seed, str(seed))
    outcomes = {output.request_id: output.leases[0].held_in for output in finish(core)}
    assert sorted(outcomes.values(), key=str) == [None, None, "memory"]
    assert core.cache.retention.num_refused == 2


def test_a_lease_below_promises_whole_blocks_only() -> None:
    core = make(tier_for(4))
    assert ask_for(core, 59, 60.0).num_tokens == 56
    (lease,) = core.cache.retention.leases
    assert (lease.num_tokens, lease.num_below) == (56, 14)


def test_a_purge_of_more_leaves_a_lease_on_less_what_it_has() -> None:
    tier = tier_for(4)
    core = make(tier)
    assert ask_for(core, 40, 600.0).held_in == "memory"
    for evicts in False, True:
        if evicts:
            core.cache.clear()
        core.cache.purge(SCOPE, np.array(prompt(0)[:50], dtype=np.int32))
        flush(core)
        assert sum(left > 500 for left in lease_left(tier)) == 10
        assert hit(core, 0) >= 40
        flush(core)
    (lease,) = core.cache.retention.leases
    assert core.cache.purge_lease(lease) > 0
    assert not core.cache.retention.leases
    flush(core)
    assert list(tier.scan()) == []


def test_another_model_waits_for_no_tiers_answer() -> None:
    faults = Faults()
    core = make(FaultyTier(tier_for(4), faults))
    faults.hang()
    start(core, 0, tier_use=COMPUTED)
    while core.has_work and not core._desk.is_waiting:
        core.step()
    assert core._desk.is_waiting
    core.renew(bytes(32))
    core.cache.check()
    faults.running.set()
    assert finish(core)[0].leases[0].held_in is None
    assert not core.cache.retention.leases
