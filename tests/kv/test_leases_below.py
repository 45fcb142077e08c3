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
from pagoda.kv.tiered import TieredCache
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.fake import Faults, FaultyTier, MemoryTier
from tests.engine.fakes import VOCAB, expected_output, make_core
from tests.waiting import PATIENCE_S

NUM_TOKENS, NUM_LEASED = 60, 56
SCOPE = Scope("a")


def prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, NUM_TOKENS).tolist()


def make(tier: Tier, **config: object) -> EngineCore:
    """An engine whose pool leases nothing: one context fills it."""
    core, _ = make_core(num_blocks=64, tiers=[(tier, WritePolicy.THROUGH)], max_model_len=256, **config)
    core.cache.retention.limit_blocks = 0
    assert isinstance(core.cache, TieredCache)
    core.cache.hierarchy.reports()  # asks for its size
    time.sleep(0.05)
    return core


def start(core: EngineCore, seed: int, request_id: str = "r", *, ttl_s: float = 60.0, name: str = "") -> None:
    core._scheduler.prefill_speed = PrefillSpeed(1.0)  # any load is worth it
    params = SamplingParams(max_tokens=4, temperature=0.0)
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
    start(core, seed, ttl_s=0.0)
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
    assert core.cache.hierarchy.flush(5)


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
def test_a_tier_that_does_not_answer_refuses_within_a_moment_and_holds_nobody_else_up(fault: str) -> None:
    faults = Faults()
    core = make(FaultyTier(tier_for(4), faults))
    faults.unavailable = fault == "unavailable"
    if fault == "hung":
        faults.hang()
    start(core, 0)
    start(core, 1, "other", ttl_s=0.0)
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
    start(core, 0)
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
