"""Leases below the pool: a tier keeps the records of a leased prefix until the lease ends, whatever happens above."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pagoda.engine.core import EngineCore
from pagoda.engine.params import SamplingParams
from pagoda.engine.prefill_speed import PrefillSpeed
from pagoda.kv.hierarchy import WritePolicy
from pagoda.kv.keys import Scope
from pagoda.kv.retained import Retained
from pagoda.kv.tiered import TieredCache
from pagoda.kv.tiers.fake import Faults, FaultyTier, MemoryTier
from tests.engine.fakes import VOCAB, expected_output, make_core, run
from tests.waiting import PATIENCE_S

LEASED, NUM_OTHERS = 0, 12


def prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, 60).tolist()


def ask(core: EngineCore, seed: int) -> int:
    core._scheduler.prefill_speed = PrefillSpeed(1.0)  # any load is worth it
    core.add("r", prompt(seed), SamplingParams(max_tokens=5, temperature=0.0))
    request = core._requests["r"]
    assert run(core, limit=100_000)["r"][0].token_ids == expected_output(prompt(seed), 5)
    return request.num_hit_tokens


def lease(core: EngineCore, seed: int, ttl_s: float | None) -> Retained:
    core.cache.retention.limit_blocks = core.cache.retention.unguaranteed_limit_blocks = 20
    return core.cache.retention.retain(np.array(prompt(seed)[:56], dtype=np.int32), Scope(), ttl_s=ttl_s, owner="a")


def flush(core: EngineCore) -> None:
    assert isinstance(core.cache, TieredCache)
    assert core.cache.hierarchy.flush(PATIENCE_S)


def small_tier() -> MemoryTier:
    """Room for the blocks of three prompts."""
    core, _ = make_core()
    return MemoryTier(3 * 16 * core.cache.layout.block_bytes)


def leases(tier: MemoryTier) -> list[float]:
    now = time.time()
    return [info.lease_until - now for info in tier.scan() if info.lease_until > now]


@pytest.mark.parametrize("ttl_s", [60.0, None])
def test_a_leased_prefix_is_still_in_the_tier_after_a_restart(ttl_s: float | None) -> None:
    """A pin (None) has no end, so it ends with the process."""
    tier = small_tier()
    core, _ = make_core(num_blocks=64, tiers=[(tier, WritePolicy.THROUGH)])
    ask(core, LEASED)
    lease(core, LEASED, ttl_s)
    for seed in range(1, NUM_OTHERS):
        ask(core, seed)
    flush(core)
    again, _ = make_core(num_blocks=64, tiers=[(tier, WritePolicy.THROUGH)])
    assert ask(again, LEASED) == (56 if ttl_s else 0)
    assert len(leases(tier)) == (14 if ttl_s else 0)


def test_hits_prolong_what_the_tier_was_told_but_not_each_of_them() -> None:
    tier = small_tier()
    core, _ = make_core(num_blocks=64, tiers=[(tier, WritePolicy.THROUGH)])
    now = 1000.0
    core.cache.retention._clock = lambda: now
    ask(core, LEASED)
    lease(core, LEASED, 60.0)
    told: list[float] = []
    keep = core.cache.keep_copies
    core.cache.keep_copies = lambda blocks, ttl_s: (told.append(ttl_s), keep(blocks, ttl_s))[1]  # type: ignore[method-assign]
    for _ in range(100):
        now += 1.0
        ask(core, LEASED)
        kept = next(iter(core.cache.retention.leases))
        assert min(core.cache.retention._copies_until[kept.pinned.blocks]) >= kept.expires_at
    assert 0 < len(told) < 10


def test_a_lease_that_is_released_lets_the_tier_drop_its_records_unless_another_needs_them() -> None:
    tier = small_tier()
    core, _ = make_core(num_blocks=64, tiers=[(tier, WritePolicy.THROUGH)])
    ask(core, LEASED)
    one = lease(core, LEASED, 60.0)
    short = core.cache.retention.retain(np.array(prompt(LEASED)[:20], dtype=np.int32), Scope(), ttl_s=30.0, owner="b")
    flush(core)
    assert len(leases(tier)) == 14
    core.cache.retention.release(one)
    flush(core)
    assert len(leases(tier)) == 5
    core.cache.retention.release(short)
    flush(core)
    assert leases(tier) == []
    core.cache.check()


def test_a_tier_that_is_gone_costs_the_guarantee_and_nothing_else() -> None:
    faults = Faults()
    core, _ = make_core(num_blocks=64, tiers=[(FaultyTier(small_tier(), faults), WritePolicy.THROUGH)])
    ask(core, LEASED)
    flush(core)
    faults.unavailable = True
    lease(core, LEASED, 60.0)
    assert ask(core, LEASED) >= 56
    core.cache.check()
    faults.unavailable = False
