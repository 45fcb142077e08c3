"""Restores that are not sure to pay: the request computes from its front while blocks are loaded from its back."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from pagoda.engine.core import EngineCore
from pagoda.engine.params import SamplingParams
from pagoda.engine.prefill_speed import PrefillSpeed
from pagoda.kv.hierarchy import WritePolicy
from pagoda.kv.keys import BlockKey, Scope
from pagoda.kv.lease import RestoreReport, TierUse
from pagoda.kv.tiered import TieredCache
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.fake import Faults, FaultyTier, MemoryTier
from pagoda.kv.tiers.records import GetResult, RecordId, Target
from tests.engine.fakes import VOCAB, FakeRunner, expected_output, make_core, random_load, run
from tests.waiting import PATIENCE_S

THROUGH, BACK = WritePolicy.THROUGH, WritePolicy.BACK
BLOCK, TOKENS = 4, 401
S_PER_TOKEN = 1e-3  # 400 tokens: 0.4 s
NUM_BLOCKS = TOKENS // BLOCK


class Watched(FaultyTier):
    """Notes which records are loaded, call by call."""

    def __init__(self, inner: Tier, faults: Faults) -> None:
        super().__init__(inner, faults)
        self.loads: list[list[RecordId]] = []

    def _get_into(self, targets: Sequence[Target]) -> list[GetResult]:
        self.loads.append([target.id for target in targets])
        return super()._get_into(targets)


@pytest.fixture
def faults() -> Iterator[Faults]:
    faults = Faults()
    yield faults
    faults.running.set()


def prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, TOKENS).tolist()


def warm_core(
    faults: Faults, windows: tuple[int | None, ...] = (None,), prompts: int = 1
) -> tuple[EngineCore, FakeRunner, Watched]:
    """An engine that computes at a known speed, above a tier that has the first prompts."""
    tier = MemoryTier(1 << 22)
    filling, _ = make_core(num_blocks=300 * len(windows), windows=windows, tiers=[(tier, THROUGH)])
    for seed in range(prompts):
        filling.add(f"fill{seed}", prompt(seed), SamplingParams(max_tokens=1, temperature=0.0))
    run(filling)
    assert isinstance(filling.cache, TieredCache)
    assert filling.cache.hierarchy.flush(PATIENCE_S)
    watched = Watched(tier, faults)
    core, runner = make_core(num_blocks=300 * len(windows), windows=windows, tiers=[(watched, THROUGH)])
    runner.seconds_per_token = S_PER_TOKEN
    core._scheduler.prefill_speed = PrefillSpeed(S_PER_TOKEN)
    return core, runner, watched


def keys_of(core: EngineCore, seed: int) -> Sequence[BlockKey]:
    assert isinstance(core.cache, TieredCache)
    names = core.cache._keys
    return names.chain(names.root(Scope()), np.array(prompt(seed)[: NUM_BLOCKS * BLOCK]), BLOCK)


def ask(core: EngineCore, seed: int, use: TierUse = TierUse()) -> tuple[float, RestoreReport | None]:
    name = f"r{seed}"
    core.add(name, prompt(seed), SamplingParams(max_tokens=2, temperature=0.0, tier_use=use))
    request = core._requests[name]
    started = time.perf_counter()
    done = run(core)
    assert done[name][0].token_ids == expected_output(prompt(seed), 2)
    assert core.cache.num_held_blocks == 0
    assert request.first_lease is not None
    return time.perf_counter() - started, request.first_lease.restore_report


@pytest.mark.parametrize("windows", [(None,), (None, 9)])
def test_the_back_is_loaded_while_the_front_is_computed(faults: Faults, windows: tuple[int | None, ...]) -> None:
    core, runner, tier = warm_core(faults, windows)
    faults.delay_s = 0.04  # more than patience, of 0.012 s
    _, report = ask(core, 0)
    assert report is not None
    assert 0 < report.num_restored_blocks < NUM_BLOCKS
    assert runner.num_computed <= TOKENS - BLOCK * report.num_restored_blocks + 1
    assert tier.loads[0][-1].key == keys_of(core, 0)[-1]


def test_a_tier_that_became_known_is_met_where_it_pays_most(faults: Faults) -> None:
    core, _, tier = warm_core(faults, prompts=6)
    faults.delay_s = 0.02
    reports = [ask(core, seed)[1] for seed in range(6)]
    assert max(report.num_restored_blocks for report in reports[3:] if report) > 0.5 * NUM_BLOCKS
    assert max(len(load) for load in tier.loads[3:]) > 0.5 * NUM_BLOCKS  # where latency counts, one load brings it all


@pytest.mark.parametrize(
    ("delay_s", "bytes_per_s"),
    [(0.0, 1e5), (0.02, 1e6), (0.02, float("inf")), (0.2, float("inf"))],
)
def test_no_speed_of_a_tier_costs_more_than_patience(faults: Faults, delay_s: float, bytes_per_s: float) -> None:
    core, _, _ = warm_core(faults, prompts=3)
    faults.delay_s, faults.bytes_per_s = delay_s, bytes_per_s
    cold, _ = ask(core, 3, TierUse(max_restored_tokens=0))
    tiered = [ask(core, seed)[0] for seed in range(2)]
    faults.delay_s, faults.bytes_per_s = 1.0, float("inf")
    tiered.append(ask(core, 2)[0])
    assert statistics.median(tiered) < 1.5 * cold + 0.1  # patience is 3%; the rest is for a busy machine


def test_a_hole_is_computed_and_what_follows_it_used(faults: Faults) -> None:
    core, runner, tier = warm_core(faults)
    tier.inner.delete([RecordId(key) for key in keys_of(core, 0)[30:40]])
    _, report = ask(core, 0)
    assert report is not None
    assert report.num_found_blocks == 90
    assert report.num_restored_blocks > 60  # a busy machine may bring some after they were computed
    assert runner.num_computed <= TOKENS - BLOCK * report.num_restored_blocks + 1


def test_what_comes_too_late_is_dropped_and_counted(faults: Faults) -> None:
    core, runner, _ = warm_core(faults)
    faults.delay_s = 5.0
    _, report = ask(core, 0)
    assert report is not None
    assert report.num_restored_blocks == 0
    assert runner.num_computed == TOKENS + 1
    assert core.cache.hierarchy.fetcher._staged == 0  # type: ignore[attr-defined]


def test_requests_choose_how_long_to_wait_and_how_much_to_restore(faults: Faults) -> None:
    core, runner, _ = warm_core(faults, prompts=5)
    faults.delay_s = 0.05
    _, report = ask(core, 0, TierUse(wait_s=float("inf")))
    assert report is not None
    assert report.num_restored_blocks == NUM_BLOCKS
    assert runner.num_computed == 2
    assert ask(core, 1, TierUse(max_restored_tokens=0))[1] is None
    _, report = ask(core, 2, TierUse(max_restored_tokens=10 * BLOCK, wait_s=2.0))
    assert report is not None
    assert report.num_restored_blocks == 10
    faults.hang()
    seconds, _ = ask(core, 3, TierUse(wait_s=0.1))
    assert 0.1 < seconds - TOKENS * S_PER_TOKEN < 9  # the tier itself is given up after ten


def test_an_abort_at_any_moment_leaves_nothing_behind(faults: Faults) -> None:
    core, _, _ = warm_core(faults)
    for number in range(25):
        faults.delay_s = 0.002 * (number % 5)
        core.cache.clear()
        core.add("r", prompt(0), SamplingParams(max_tokens=1, temperature=0.0))
        until = time.perf_counter() + 0.002 * number
        while core.has_work and time.perf_counter() < until:
            core.step()
        core.abort("r")
        core.cache.check()
        assert core.cache.num_held_blocks == 0
        assert not core.cache.is_restoring
    assert core.cache.hierarchy.fetcher._staged == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("windows", [(None,), (None, 9)])
def test_a_purge_in_mid_restore_leaves_the_request_to_itself(faults: Faults, windows: tuple[int | None, ...]) -> None:
    core, _, _ = warm_core(faults, windows)
    for steps in range(8):
        faults.delay_s = 0.01 * (steps % 3)
        core.add("r", prompt(0), SamplingParams(max_tokens=2, temperature=0.0))
        outputs = [output for _ in range(steps) for output in core.step()]
        core.cache.purge(Scope())
        core.cache.check()
        done = run(core)
        tokens = [token for output in outputs for delta in output.deltas for token in delta.token_ids]
        assert tokens + (done["r"][0].token_ids if done else []) == expected_output(prompt(0), 2)
        assert core.cache.num_held_blocks == 0
        core.cache.clear()


@pytest.mark.parametrize("windows", [(None,), (None, 9)])
def test_random_load_over_tiers_of_changing_speed(
    windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.kv.breaker._FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr("pagoda.kv.breaker._LAST_BACKOFF_S", 0.02)
    rng = np.random.default_rng(5)
    faults = Faults()
    tiers: list[tuple[Tier, WritePolicy]] = [(FaultyTier(MemoryTier(1 << 18), faults), BACK)]
    core, runner = make_core(
        num_blocks=30 * len(windows), windows=windows, tiers=tiers, token_budget=24, max_model_len=90
    )
    runner.seconds_per_token, core._scheduler.prefill_speed = 1e-4, PrefillSpeed(3e-3)

    def change(step: int) -> None:
        if step % 20 == 0:
            faults.delay_s = float(rng.choice([0.0, 0.0005, 0.002, 0.01]))
            faults.failing, faults.corrupting = rng.random(2) * 0.1

    stats = core.cache.stats
    random_load(
        core,
        rng,
        num_steps=400,
        arrivals=0.4,
        max_tokens=20,
        before_step=change,
        until=lambda: stats.num_restored_tokens > 0,
    )
    assert core.cache.num_held_blocks == 0
