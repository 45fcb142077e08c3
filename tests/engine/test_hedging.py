"""Restores that are not sure to pay: the request computes from its front while blocks are loaded from its back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pagoda.engine.params import SamplingParams
from pagoda.engine.prefill_speed import PrefillSpeed
from pagoda.kv.hierarchy import WritePolicy
from pagoda.kv.keys import BlockKey, Scope
from pagoda.kv.lease import RestoreReport, TierUse
from pagoda.kv.tiered import TieredCache
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.fake import Faults, FaultyTier, MemoryTier
from pagoda.kv.tiers.records import RecordId
from tests.engine.fakes import expected_output, make_core, random_load, run
from tests.engine.restores import BLOCK, NUM_BLOCKS, S_PER_TOKEN, TOKENS, SimulatedTime, Warm, prompt, warm

PROMPT_S = TOKENS * S_PER_TOKEN
PATIENCE = 0.03  # of that


def keys_of(made: Warm, seed: int) -> Sequence[BlockKey]:
    assert isinstance(made.core.cache, TieredCache)
    names = made.core.cache._keys
    return names.chain(names.root(Scope()), np.array(prompt(seed)[: NUM_BLOCKS * BLOCK]), BLOCK)


def ask(made: Warm, seed: int, use: TierUse = TierUse()) -> tuple[float, RestoreReport | None]:
    """Compute a prompt and a token more; the seconds that took, and what tiers did."""
    core, name = made.core, f"r{seed}"
    core.add(name, prompt(seed), SamplingParams(max_tokens=2, temperature=0.0, tier_use=use))
    request = core._requests[name]
    started = made.time()
    done = run(core)
    assert done[name][0].token_ids == expected_output(prompt(seed), 2)
    assert core.cache.num_held_blocks == 0
    assert request.first_lease is not None
    return made.time() - started, request.first_lease.restore_report


@pytest.mark.parametrize("windows", [(None,), (None, 9)])
def test_the_back_is_loaded_while_the_front_is_computed(time: SimulatedTime, windows: tuple[int | None, ...]) -> None:
    made = warm(time, windows)
    made.faults.delay_s = 0.04  # more than patience, of 0.012 s
    seconds, report = ask(made, 0)
    assert report is not None
    assert 0 < report.num_restored_blocks < NUM_BLOCKS
    assert report.num_late_blocks == 0
    assert made.runner.num_computed == TOKENS - BLOCK * report.num_restored_blocks + 1
    assert made.tier.loads[0][-1].key == keys_of(made, 0)[-1]
    assert seconds < PROMPT_S


def test_a_tier_that_became_known_is_met_where_it_pays_most(time: SimulatedTime) -> None:
    made = warm(time, prompts=6)
    made.faults.delay_s = 0.02
    reports = [ask(made, seed)[1] for seed in range(6)]
    assert min(report.num_restored_blocks for report in reports[3:] if report) > 0.8 * NUM_BLOCKS
    assert (
        max(len(load) for load in made.tier.loads[3:]) > 0.5 * NUM_BLOCKS
    )  # where latency counts, one load brings it all


@pytest.mark.parametrize(
    ("delay_s", "bytes_per_s"),
    [(0.0, 1e5), (0.02, 1e6), (0.02, float("inf")), (0.2, float("inf"))],
)
def test_no_speed_of_a_tier_costs_more_than_patience(time: SimulatedTime, delay_s: float, bytes_per_s: float) -> None:
    made = warm(time, prompts=3)
    made.faults.delay_s, made.faults.bytes_per_s = delay_s, bytes_per_s
    cold, _ = ask(made, 3, TierUse(max_restored_tokens=0))
    tiered = [ask(made, seed)[0] for seed in range(2)]
    made.faults.delay_s, made.faults.bytes_per_s = 1.0, float("inf")
    tiered.append(ask(made, 2)[0])
    assert max(tiered) <= (1 + PATIENCE) * cold + 1e-9


def test_a_hole_is_computed_and_what_follows_it_used(time: SimulatedTime) -> None:
    made = warm(time)
    made.tier.inner.delete([RecordId(key) for key in keys_of(made, 0)[30:40]])
    _, report = ask(made, 0)
    assert report is not None
    assert report.num_found_blocks == 90
    assert report.num_restored_blocks >= 82  # a step is 8: at most one begins before it is known what will come
    assert made.runner.num_computed == TOKENS - BLOCK * report.num_restored_blocks + 1


def test_what_comes_too_late_is_dropped_and_counted(time: SimulatedTime) -> None:
    made = warm(time)
    made.faults.delay_s = 5.0
    seconds, report = ask(made, 0)
    assert report is not None
    assert report.num_restored_blocks == 0
    assert made.runner.num_computed == TOKENS + 1
    assert seconds == pytest.approx(PROMPT_S * (1 + PATIENCE), rel=0.01)
    assert made.core.cache.hierarchy.fetcher._staged == 0  # type: ignore[attr-defined]


def test_requests_choose_how_long_to_wait_and_how_much_to_restore(time: SimulatedTime) -> None:
    made = warm(time, prompts=5)
    made.faults.delay_s = 0.05
    _, report = ask(made, 0, TierUse(wait_s=float("inf")))
    assert report is not None
    assert report.num_restored_blocks == NUM_BLOCKS
    assert made.runner.num_computed == 2
    assert ask(made, 1, TierUse(max_restored_tokens=0))[1] is None
    _, report = ask(made, 2, TierUse(max_restored_tokens=10 * BLOCK, wait_s=2.0))
    assert report is not None
    assert report.num_restored_blocks == 10
    made.faults.delay_s = 1e6  # it hangs
    seconds, _ = ask(made, 3, TierUse(wait_s=0.1))
    assert seconds == pytest.approx(PROMPT_S + 0.1, rel=0.01)


def test_an_abort_at_any_moment_leaves_nothing_behind(time: SimulatedTime) -> None:
    made = warm(time)
    core = made.core
    for number in range(25):
        made.faults.delay_s = 0.002 * (number % 5)
        core.cache.clear()
        core.add("r", prompt(0), SamplingParams(max_tokens=1, temperature=0.0))
        until = time() + 0.002 * number
        while core.has_work and time() < until:
            core.step()
        core.abort("r")
        core.cache.check()
        assert core.cache.num_held_blocks == 0
        assert not core.cache.is_restoring
    assert core.cache.hierarchy.fetcher._staged == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("windows", [(None,), (None, 9)])
def test_a_purge_in_mid_restore_leaves_the_request_to_itself(
    time: SimulatedTime, windows: tuple[int | None, ...]
) -> None:
    made = warm(time, windows)
    core = made.core
    for steps in range(8):
        made.faults.delay_s = 0.01 * (steps % 3)
        core.add("r", prompt(0), SamplingParams(max_tokens=2, temperature=0.0))
        outputs = [output for _ in range(steps) for output in core.step()]
        core.cache.purge(Scope())
        core.cache.check()
        done = run(core)
        tokens = [token for output in outputs for delta in output.deltas for token in delta.token_ids]
        assert tokens + (done["r"][0].token_ids if done else []) == expected_output(prompt(0), 2)
        assert core.cache.num_held_blocks == 0
        core.cache.clear()


@pytest.mark.usefixtures("quick_breakers")
@pytest.mark.parametrize("windows", [(None,), (None, 9)])
def test_random_load_over_tiers_of_changing_speed(windows: tuple[int | None, ...]) -> None:
    rng = np.random.default_rng(5)
    faults = Faults()
    tiers: list[tuple[Tier, WritePolicy]] = [(FaultyTier(MemoryTier(1 << 18), faults), WritePolicy.BACK)]
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
