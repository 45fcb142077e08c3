"""What a request needs of the tiers is brought up while it waits in the queue, and nothing else suffers for it."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pagoda.engine.core import EngineCore
from pagoda.engine.params import SamplingParams
from pagoda.engine.prefill_speed import PrefillSpeed
from pagoda.kv.hierarchy import WritePolicy
from pagoda.kv.keys import Scope
from pagoda.kv.lease import RestoreReport, TierUse
from pagoda.kv.tiered import TieredCache
from pagoda.kv.tiers.fake import Faults, FaultyTier, MemoryTier
from pagoda.kv.tiers.records import Record, Target
from tests.engine.fakes import FakeRunner, expected_output, make_core, random_load, run
from tests.engine.test_tiers import SLOW_RECOMPUTE, THROUGH, ask, flushed, greedy, prompt
from tests.waiting import PATIENCE_S, until

LONG = prompt(99, 30)  # what runs while others wait
LONG_OUTPUT = 400


@pytest.fixture
def tier() -> MemoryTier:
    """All blocks of prompts 1 to 3."""
    tier = MemoryTier(1 << 20)
    core, _ = make_core(tiers=[(tier, THROUGH)], num_blocks=128)
    for seed in (1, 2, 3):
        ask(core, prompt(seed))
    flushed(core)
    return tier


def busy(tier: MemoryTier, faults: Faults, **settings: int) -> tuple[EngineCore, FakeRunner, TieredCache]:
    """An engine over that tier that runs one request, and has no place for another."""
    core, runner = make_core(
        tiers=[(FaultyTier(tier, faults), WritePolicy.BACK)], **{"max_num_seqs": 1, "num_blocks": 256} | settings
    )
    core._scheduler.prefill_speed = PrefillSpeed(SLOW_RECOMPUTE)
    core.add("long", LONG, greedy(LONG_OUTPUT))
    while not core.step():  # its own restore ends first: the tier is asked for nothing more
        time.sleep(0.001)
    assert isinstance(core.cache, TieredCache)
    return core, runner, core.cache


def until_prefetched(core: EngineCore, *names: str) -> None:
    """Step until what these requests wait for is there, or known not to be."""
    samples = [core._requests[name].samples[0] for name in names]
    for _ in range(LONG_OUTPUT - 50):
        assert all(sample.lease is None for sample in samples), "it runs already"
        if all(sample.prefetch is not None for sample in samples) and core.cache.can_prefetch:
            return
        core.step()
        until(lambda: not core.cache._prefetches.is_loading)  # type: ignore[attr-defined]
    raise AssertionError("nothing came")


def finish(core: EngineCore, cache: TieredCache, *asked: str) -> dict[str, RestoreReport | None]:
    """Run to the end, check every output, and tell what became of the restores."""
    requests = {name: core._requests[name] for name in asked}
    done = run(core, limit=100_000)
    for name, request in requests.items():
        count = request.max_tokens
        assert done[name][0].token_ids == expected_output(request.prompt.tolist(), count)
    assert cache.num_held_blocks == 0
    assert not cache.is_restoring
    assert cache.hierarchy.fetcher._staged == 0
    assert cache._prefetches.is_loading is False
    return {name: request.first_lease and request.first_lease.restore_report for name, request in requests.items()}


def test_what_waits_finds_its_blocks_ready(tier: MemoryTier) -> None:
    faults = Faults(delay_s=0.05)
    core, runner, cache = busy(tier, faults)
    core.add("waits", prompt(1), greedy(3))
    until_prefetched(core, "waits")
    assert cache.num_held_blocks == core._requests["long"].samples[0].running_lease.num_blocks
    faults.hang()  # nothing is asked of the tier any more
    before = cache.stats.num_hit_tokens
    report = finish(core, cache, "waits")["waits"]
    faults.running.set()
    assert report is not None
    assert (report.num_restored_blocks, report.num_prefetched_blocks) == (14, 14)
    assert cache.stats.num_hit_tokens == before
    assert cache.stats.num_prefetched_tokens == cache.hierarchy.reports()[0].num_prefetched_tokens == 56
    assert runner.num_computed == len(LONG) + LONG_OUTPUT - 1 + 4 + 2


def test_each_prompt_is_looked_for_once_and_one_at_a_time(tier: MemoryTier) -> None:
    core, _, cache = busy(tier, Faults(delay_s=0.01))
    for seed in (1, 2, 3):
        core.add(f"r{seed}", prompt(seed), greedy(1))
    core.step()
    assert [core._requests[f"r{seed}"].samples[0].prefetch is None for seed in (1, 2, 3)] == [False, True, True]
    until_prefetched(core, "r1", "r2", "r3")
    reports = finish(core, cache, "r1", "r2", "r3")
    assert [report and report.num_prefetched_blocks for report in reports.values()] == [14, 14, 14]


def test_a_prefix_that_several_wait_for_is_brought_up_once(tier: MemoryTier) -> None:
    core, _, cache = busy(tier, Faults())
    core.add("first", [*prompt(1), 5], greedy(1))
    core.add("second", [*prompt(1), 6], greedy(1))
    until_prefetched(core, "first", "second")
    finish(core, cache, "first", "second")
    assert cache.hierarchy.reports()[0].num_loaded == 15


def test_who_gives_up_waiting_leaves_nothing_behind(tier: MemoryTier) -> None:
    faults = Faults()
    core, _, cache = busy(tier, faults)
    core.add("comes", prompt(1), greedy(1))
    until_prefetched(core, "comes")
    faults.hang()
    core.add("hangs", prompt(2), greedy(1))
    core.step()
    assert cache._prefetches.is_loading
    core.abort("comes")
    core.abort("hangs")
    assert cache.hierarchy.fetcher._staged == 0
    faults.running.set()
    assert cache.stats.num_prefetched_tokens == 0
    assert cache.hierarchy.reports()[0].num_unused == 14
    finish(core, cache)


def test_what_the_pool_has_meanwhile_is_not_used_twice(tier: MemoryTier) -> None:
    core, _, cache = busy(tier, Faults(), max_num_seqs=2)
    waits = SamplingParams(max_tokens=LONG_OUTPUT, temperature=0.0, tier_use=TierUse(wait_s=PATIENCE_S))
    core.add("other", [*prompt(1, 60)[:30], 7], waits)  # the second place
    core.step()
    [restore] = cache._restores.values()
    until(restore.fetch.done.is_set)
    core.step()
    assert cache.stats.num_restored_tokens == 28
    core.add("waits", prompt(1), greedy(1))
    until_prefetched(core, "waits")
    core.abort("other")
    report = finish(core, cache, "waits")["waits"]
    assert report is not None
    assert report.num_prefetched_blocks == 14 - 7


def test_if_the_pool_lost_what_came_before_all_is_restored_anew(tier: MemoryTier) -> None:
    core, _, cache = busy(tier, Faults())
    core.add("again", [*prompt(1)[:32], 9, 9, 9, 9, 9], greedy(1))
    core.abort("long")
    run(core, limit=10_000)  # 32 tokens of prompt 1 are in the pool now
    core.add("long", LONG, greedy(LONG_OUTPUT))
    core.step()
    core.add("waits", prompt(1), greedy(1))
    until_prefetched(core, "waits")
    assert cache.clear() > 0
    report = finish(core, cache, "waits")["waits"]
    assert report is not None
    assert report.num_restored_blocks == 14
    assert report.num_prefetched_blocks == 0


def test_what_is_purged_while_it_waits_is_gone(tier: MemoryTier) -> None:
    core, _, cache = busy(tier, Faults())
    core.add("waits", prompt(1), greedy(1))
    until_prefetched(core, "waits")
    cache.purge(Scope(), np.array(prompt(1)))
    assert cache.hierarchy.fetcher._staged == 0
    assert cache.hierarchy.flush(PATIENCE_S)
    finish(core, cache, "waits")
    assert cache.stats.num_restored_tokens == 0


def test_a_tier_that_has_nothing_is_asked_again_when_the_request_starts(tier: MemoryTier) -> None:
    empty = MemoryTier(1 << 20)
    core, _, cache = busy(empty, Faults())
    core.add("waits", prompt(1), greedy(1))
    until_prefetched(core, "waits")
    for info in tier.scan():  # another server writes them
        data = bytearray(info.num_bytes)
        tier.get_into([Target(info.id, data)])
        empty.put([Record(info.id, data)])
    report = finish(core, cache, "waits")["waits"]
    assert report is not None
    assert report.num_restored_blocks == 14


def test_a_full_staging_area_stops_prefetching_until_somebody_starts(
    tier: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, _, cache = busy(tier, Faults())
    block_bytes = cache.layout.block_bytes
    monkeypatch.setattr("pagoda.kv.fetcher._EARLY_BYTES", 20 * block_bytes)
    core.add("first", prompt(1), greedy(1))
    core.add("second", prompt(2), greedy(1))
    until_prefetched(core, "first")
    for _ in range(20):
        core.step()
        time.sleep(0.002)
    assert cache.hierarchy.fetcher._staged <= 20 * block_bytes
    assert not cache.can_prefetch  # it waits for room
    reports = finish(core, cache, "first", "second")
    assert [report and report.num_restored_blocks for report in reports.values()] == [14, 14]


def test_prefetching_waits_while_somebody_restores(tier: MemoryTier) -> None:
    faults = Faults()
    core, _, cache = busy(tier, faults, max_num_seqs=2)
    faults.hang()
    core.add("runs", prompt(1), greedy(1))
    core.step()
    assert cache.is_restoring
    [lane] = cache.hierarchy.lanes
    until(lambda: lane._running)
    core.add("waits", prompt(2), greedy(1))
    core.step()
    assert cache._prefetches.is_loading
    time.sleep(0.05)
    assert len(lane._running) == 1  # the tier was asked for one of the two
    faults.running.set()
    finish(core, cache, "runs", "waits")


@pytest.mark.usefixtures("quick_breakers")
@pytest.mark.parametrize("windows", [(None,), (None, 9)])
def test_random_load_with_a_short_bench_leaks_nothing(windows: tuple[int | None, ...]) -> None:
    rng = np.random.default_rng(3)
    faults = Faults()
    tiers = [(MemoryTier(1 << 13), WritePolicy.BACK), (FaultyTier(MemoryTier(1 << 16), faults), THROUGH)]
    core, _ = make_core(
        num_blocks=40 * len(windows), windows=windows, tiers=tiers, token_budget=24, max_model_len=120, max_num_seqs=2
    )
    core._scheduler.prefill_speed = PrefillSpeed(1.0)

    def change_faults(step: int) -> None:
        if step % 20 == 0:
            faults.failing, faults.corrupting, faults.delay_s = rng.random(3) * (0.3, 0.3, 0.002)
        if step % 70 == 0:
            core.cache.clear()

    stats = core.cache.stats
    random_load(
        core,
        rng,
        num_steps=300,
        arrivals=0.4,
        max_tokens=20,
        before_step=change_faults,
        until=lambda: stats.num_prefetched_tokens > 0,
    )
    assert core.cache.num_held_blocks == 0
    assert isinstance(core.cache, TieredCache)
    assert core.cache.hierarchy.fetcher._staged == 0
