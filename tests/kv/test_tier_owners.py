"""Whose records in tiers are: marks, time to live, purges and what moves down, through a whole engine."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from pagoda.engine.core import EngineCore
from pagoda.engine.params import SamplingParams
from pagoda.engine.prefill_speed import PrefillSpeed
from pagoda.kv.hierarchy import WritePolicy
from pagoda.kv.keys import KeyChain, Scope
from pagoda.kv.tiered import TieredCache
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.fake import MemoryTier
from pagoda.kv.tiers.records import Expired
from pagoda.kv.transfer import Lane
from pagoda.kv.write_queue import Purge
from tests.engine.fakes import VOCAB, expected_output, make_core, run
from tests.kv.tiers.kit import Clock
from tests.waiting import PATIENCE_S, until

ALICE, BOB = Scope("alice"), Scope("bob")
LOOK = 0.01


def prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, 60).tolist()


def ask(core: EngineCore, seed: int, scope: Scope = ALICE) -> int:
    """How many tokens of a prompt hit; those after the pool's from tiers."""
    core._scheduler.prefill_speed = PrefillSpeed(1.0)  # any load is worth it
    core.add("r", prompt(seed), SamplingParams(max_tokens=5, temperature=0.0), scope=scope)
    request = core._requests["r"]
    assert run(core, limit=100_000)["r"][0].token_ids == expected_output(prompt(seed), 5)
    return request.num_hit_tokens


def tiered(core: EngineCore) -> TieredCache:
    assert isinstance(core.cache, TieredCache)
    return core.cache


def flush(core: EngineCore) -> None:
    assert tiered(core).hierarchy.flush(PATIENCE_S)


def purge(core: EngineCore, tenant: str) -> Purge:
    """As CacheAdmin does it."""
    purge = tiered(core).purge_below(tenant)
    core.cache.purge(tenant)
    return purge


def wait(purge: Purge) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while purge.waiting and time.monotonic() < deadline:
        time.sleep(LOOK)
    assert not purge.waiting


def filled(*tiers: Tier) -> EngineCore:
    """An engine that answered two tenants, and has the first prompts of both in tiers alone."""
    core, _ = make_core(num_blocks=64, tiers=[(tier, WritePolicy.THROUGH) for tier in tiers])
    for seed in range(8):
        ask(core, seed, ALICE)
        ask(core, seed, BOB)
    flush(core)
    return core


def test_records_bear_their_tenants_mark() -> None:
    tier = MemoryTier(1 << 20)
    core = filled(tier)
    keys = KeyChain(core.cache.layout.fingerprint({"weights": "another model"}))
    owners = tier.usage().owners
    assert owners.keys() == {keys.owner("alice"), keys.owner("bob")}
    expected = {name: {"memory": owners[keys.owner(name)]} for name in ("alice", "bob")}
    until(lambda: tiered(core).bytes_by_tier() == expected)  # each look asks for what the next one tells


def test_a_tenant_is_purged_from_tiers_too_and_stays_so_after_a_restart() -> None:
    tiers = [MemoryTier(1 << 20), MemoryTier(1 << 20)]
    core = filled(*tiers)
    before = tiers[0].usage().num_records
    done = purge(core, "alice")
    wait(done)
    assert set(done.counts) == {"memory", "memory-2"}
    assert done.counts["memory"] == before - tiers[0].usage().num_records > 8 * 14
    assert [ask(core, 0, ALICE), ask(core, 0, BOB)] == [0, 56]
    again, _ = make_core(num_blocks=64, tiers=[(tier, WritePolicy.THROUGH) for tier in tiers])
    assert [ask(again, 1, ALICE), ask(again, 1, BOB)] == [0, 56]


class _Standing:
    """A job that stands in the way until it is let go."""

    num_bytes, num_lost, must_be_done = 1, 0, False

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def do(self, lane: Lane) -> bool:
        return self.go_on.wait(PATIENCE_S)


def test_until_a_tier_has_purged_a_tenant_it_gives_it_nothing() -> None:
    tier = MemoryTier(1 << 20)
    core = filled(tier)
    standing = _Standing()
    (writer,) = tiered(core).hierarchy._all_writers
    writer.put(standing)
    waiting = purge(core, "alice")
    assert [ask(core, 0, ALICE), ask(core, 0, BOB)] == [0, 56]
    assert waiting.waiting
    standing.go_on.set()
    wait(waiting)
    assert ask(core, 0, ALICE) >= 56  # the pool has it again, as it was computed since


def test_a_purge_ends_restores_under_way() -> None:
    core = filled(MemoryTier(1 << 20))
    core._scheduler.prefill_speed = PrefillSpeed(1.0)
    core.add("r", prompt(0), SamplingParams(max_tokens=5, temperature=0.0), scope=ALICE)
    core._scheduler.schedule()
    assert core.cache.is_restoring
    wait(purge(core, "alice"))
    assert not core.cache.is_restoring
    assert run(core, limit=100_000)["r"][0].token_ids == expected_output(prompt(0), 5)
    assert ask(core, 0) == 0


def test_a_tier_lets_nothing_last_longer_than_its_ttl() -> None:
    clock = Clock(time.time())
    tier = MemoryTier(1 << 20, clock=clock)
    tier.ttl_s = 600.0
    core = filled(tier)
    assert {round(info.expires_at - clock.now, -2) for info in tier.scan()} == {600.0}
    assert ask(core, 0) == 56
    flush(core)
    ids = [info.id for info in tier.scan()]
    clock.now += 700
    (lane,) = tiered(core).hierarchy.lanes
    assert lane.lookup(ids, threading.Event()) == [Expired()] * len(ids)
    assert lane.report().num_expired == len(ids)
    assert lane.report().failures == {}
    assert ask(core, 1) == 0


def test_what_is_used_often_moves_down_below_the_tier_it_is_restored_from() -> None:
    upper, lower = MemoryTier(1 << 20), MemoryTier(1 << 20)
    core, _ = make_core(num_blocks=64, tiers=[(upper, WritePolicy.BACK), (lower, WritePolicy.THROUGH)], after_hits=2)

    def ask_and_evict() -> int:
        hit = ask(core, 0)
        core.cache.clear()
        flush(core)
        return hit

    assert ask_and_evict() == 0
    assert ask_and_evict() == 56  # from the upper tier
    assert lower.usage().num_records == 0
    assert ask_and_evict() == 56
    assert lower.usage().num_records >= 14


@pytest.mark.parametrize("count", [1, 4])
def test_what_could_not_be_deleted_is_tried_again_and_not_found_meanwhile(count: int) -> None:
    from pagoda.errors import TierError
    from pagoda.kv.tiers.records import DeleteResult, Failed, RecordId

    class Stubborn(MemoryTier):
        left = count

        def _delete(self, ids: list[RecordId]) -> list[DeleteResult]:  # type: ignore[override]
            if self.left:
                self.left -= 1
                return [Failed(TierError("not now"))] * len(ids)
            return super()._delete(ids)

    tier = Stubborn(1 << 20)
    core = filled(tier)
    lane = tiered(core).hierarchy.lanes[0]
    core.cache.purge(ALICE, np.array(prompt(0), dtype=np.int32))
    assert ask(core, 0) == 0
    deadline = time.monotonic() + PATIENCE_S
    while not tiered(core).hierarchy.is_idle and time.monotonic() < deadline:
        lane.breaker.succeeded()  # no test waits for seconds
        time.sleep(LOOK)
    assert not tier.left
    again, _ = make_core(num_blocks=64, tiers=[(tier, WritePolicy.THROUGH)])
    assert ask(again, 0) == 56  # as it was computed since
    assert tier.stats()["deleted"] >= 14
