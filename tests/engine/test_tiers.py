"""The engine with tiers below its pool: what was evicted or outlived a restart returns; a bad tier costs hits only."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pagoda.engine.core import EngineCore
from pagoda.engine.outputs import MissReason, RequestStats, StepStats
from pagoda.engine.params import SamplingParams
from pagoda.engine.prefill_speed import PrefillSpeed
from pagoda.kv.hierarchy import WritePolicy
from pagoda.kv.keys import Scope
from pagoda.kv.lease import TierUse
from pagoda.kv.lineage import PUBLIC
from pagoda.kv.tiered import TieredCache
from pagoda.kv.tiers.fake import Faults, FaultyTier, MemoryTier
from tests.engine.fakes import VOCAB, expected_output, make_core, random_load, run
from tests.kv.fakes import TokenPool
from tests.waiting import PATIENCE_S, until

THROUGH, BACK = WritePolicy.THROUGH, WritePolicy.BACK
SLOW_RECOMPUTE = 100.0  # seconds a token: any load is worth it, and worth a wait on a busy machine


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def prompt(seed: int, length: int = 60) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, length).tolist()


def ask(core: EngineCore, tokens: list[int], name: str = "r", scope: Scope = Scope(), count: int = 5) -> int:
    """Run one request, check its output, and return how many of its prompt's tokens were hits."""
    core._scheduler.prefill_speed = PrefillSpeed(SLOW_RECOMPUTE)
    core.add(name, tokens, greedy(count), scope=scope)
    request = core._requests[name]
    done = run(core, limit=100_000)
    assert done[name][0].token_ids == expected_output(tokens, count)
    return request.num_hit_tokens


def flushed(core: EngineCore) -> TieredCache:
    assert isinstance(core.cache, TieredCache)
    assert core.cache.hierarchy.flush(PATIENCE_S)
    return core.cache


@pytest.mark.parametrize("windows", [(None,), (None, 9), (9,)])
@pytest.mark.parametrize("policy", [THROUGH, BACK])
def test_what_the_device_evicted_comes_back(policy: WritePolicy, windows: tuple[int | None, ...]) -> None:
    core, runner = make_core(num_blocks=40 * len(windows), windows=windows, tiers=[(MemoryTier(1 << 20), policy)])
    first = prompt(1)
    assert ask(core, first) == 0
    for seed in range(2, 6):
        ask(core, prompt(seed))
    core.cache.clear()
    flushed(core)
    before = runner.num_computed
    assert ask(core, first) == 56  # the whole blocks before the last token
    assert runner.num_computed - before == 4 + 4
    assert core.cache.stats.num_restored_tokens == 56
    core.cache.check()
    assert core.cache.num_held_blocks == 0


def test_a_restart_is_warm() -> None:
    tier = MemoryTier(1 << 20)
    core, _ = make_core(tiers=[(tier, THROUGH)])
    ask(core, prompt(1))
    flushed(core)
    again, runner = make_core(tiers=[(tier, THROUGH)])
    assert ask(again, prompt(1)) == 56
    assert runner.num_computed == 4 + 4
    assert ask(again, [*prompt(1, 60)[:30], 1, 2, 3], "shorter") == 30


def test_a_finished_request_says_why_it_missed_and_what_came_from_tiers() -> None:
    class Watch:
        def __init__(self) -> None:
            self.finished: list[RequestStats] = []

        def on_step(self, stats: StepStats) -> None: ...

        def on_admitted(self, num_query_tokens: int, num_hit_tokens: int) -> None: ...

        def on_finished(self, stats: RequestStats) -> None:
            self.finished.append(stats)

    core, _ = make_core(tiers=[(MemoryTier(1 << 20), THROUGH)])
    watch = Watch()
    core.observers.append(watch)
    ask(core, prompt(1))
    ask(core, prompt(1))
    flushed(core).clear()
    ask(core, prompt(1))
    core.add("aborted", prompt(2), greedy(1))
    core.abort("aborted")
    told = [(each.miss_reason, each.num_restored_tokens, each.usage.num_hit_tokens) for each in watch.finished]
    assert told == [
        (MissReason.NEVER_SEEN, 0, 0),
        (MissReason.NONE, 0, 59),
        (MissReason.PARTIAL_BLOCK, 56, 56),  # all that can be restored: whole blocks
        (None, 0, 0),
    ]


def test_nothing_is_held_once_the_last_request_is_gone() -> None:
    inner, faults = MemoryTier(1 << 20), Faults()
    core, _ = make_core(tiers=[(inner, THROUGH)])
    ask(core, prompt(1))
    flushed(core)
    for _ in range(20):
        core.cache.clear()
        ask(core, prompt(1))
        assert core.cache.num_held_blocks == 0
    again, _ = make_core(tiers=[(FaultyTier(inner, faults), THROUGH)])
    faults.hang()
    again._scheduler.prefill_speed = PrefillSpeed(0.01)
    again.add("r", prompt(1), greedy(1))
    again.step()
    again.abort("r")
    assert not again.has_work
    assert not again.cache.is_restoring
    assert again.cache.num_held_blocks == 0
    faults.running.set()


def test_scopes_and_models_find_nothing_of_each_other() -> None:
    tier = MemoryTier(1 << 20)
    core, _ = make_core(tiers=[(tier, THROUGH)])
    ask(core, prompt(1), scope=Scope("a"))
    flushed(core)
    core.cache.clear()
    assert ask(core, prompt(1), scope=Scope("b")) == 0
    other_model, _ = make_core(block_size=5, tiers=[(tier, THROUGH)])
    assert ask(other_model, prompt(1), scope=Scope("a")) == 0


def test_requests_that_arrive_together_share_one_restore() -> None:
    tier = MemoryTier(1 << 20)
    core, _ = make_core(tiers=[(tier, THROUGH)])
    ask(core, prompt(1))
    flushed(core)
    again, runner = make_core(tiers=[(tier, THROUGH)], num_blocks=100)
    again._scheduler.prefill_speed = PrefillSpeed(SLOW_RECOMPUTE)
    for i in range(4):
        again.add(f"r{i}", [*prompt(1), i + 1], greedy(2))
    done = run(again, limit=100_000)
    for i in range(4):
        assert done[f"r{i}"][0].token_ids == expected_output([*prompt(1), i + 1], 2)
    assert again.cache.stats.num_restored_tokens == 60
    assert runner.num_computed == 4 * (1 + 1)


@pytest.mark.parametrize(
    "faults",
    [
        Faults(failing=1.0),
        Faults(corrupting=1.0),
        Faults(failing=0.1, corrupting=0.1),
        Faults(delay_s=0.02),
        Faults(unavailable=True),
    ],
    ids=["failing", "corrupt", "sometimes", "slow", "gone"],
)
def test_a_bad_tier_costs_hits_not_truth(faults: Faults) -> None:
    inner = MemoryTier(1 << 20)
    core, _ = make_core(tiers=[(inner, THROUGH)], num_blocks=40)
    for seed in range(6):
        ask(core, prompt(seed))
    flushed(core)
    bad, _ = make_core(tiers=[(FaultyTier(inner, faults), THROUGH)], num_blocks=40)
    for seed in range(6):
        ask(bad, prompt(seed))
    bad.cache.check()
    assert bad.cache.num_held_blocks == 0


def test_a_tier_that_hangs_delays_a_request_by_no_more_than_its_share() -> None:
    inner, faults = MemoryTier(1 << 20), Faults()
    core, _ = make_core(tiers=[(inner, THROUGH)])
    ask(core, prompt(1))
    flushed(core)
    again, _ = make_core(tiers=[(FaultyTier(inner, faults), THROUGH)])
    faults.hang()
    again._scheduler.prefill_speed = PrefillSpeed(0.2)  # 56 tokens: 11 s; 3% of that is 0.34 s
    again.add("r", prompt(1), greedy(3))
    started = time.perf_counter()
    done = run(again, limit=100_000)
    assert 0.33 < time.perf_counter() - started < 9  # the tier itself is given up after ten
    assert done["r"][0].token_ids == expected_output(prompt(1), 3)
    again.cache.check()
    assert again.cache.num_held_blocks == 0
    faults.running.set()


def test_a_full_write_queue_skips_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.kv.write_queue._QUEUE_BYTES", 3 * 256)
    faults = Faults()
    core, _ = make_core(tiers=[(FaultyTier(MemoryTier(1 << 20), faults), THROUGH)])
    faults.hang()
    core.add("r", prompt(1), greedy(2))  # at the guessed speed of computing: a short wait
    run(core, limit=100_000)
    assert isinstance(core.cache, TieredCache)
    assert core.cache.hierarchy.reports()[0].num_skipped > 0
    faults.running.set()


@pytest.mark.usefixtures("quick_breakers")
@pytest.mark.parametrize("windows", [(None,), (None, 9)])
def test_random_load_over_faulty_tiers_leaks_nothing(windows: tuple[int | None, ...]) -> None:
    rng = np.random.default_rng(1)
    faults = Faults()
    tiers = [(MemoryTier(1 << 14), BACK), (FaultyTier(MemoryTier(1 << 16), faults), THROUGH)]
    core, _ = make_core(num_blocks=40 * len(windows), windows=windows, tiers=tiers, token_budget=24, max_model_len=120)
    core._scheduler.prefill_speed = PrefillSpeed(1.0)

    def change_faults(step: int) -> None:
        if step % 50 == 0:
            faults.failing, faults.corrupting, faults.delay_s = rng.random(3) * (0.3, 0.3, 0.002)
            faults.unavailable = bool(rng.random() < 0.2)

    stats = core.cache.stats
    random_load(
        core,
        rng,
        num_steps=300,
        arrivals=0.4,
        max_tokens=20,
        before_step=change_faults,
        until=lambda: stats.num_restored_tokens > 0,
    )
    assert core.cache.num_held_blocks == 0


def test_a_tier_known_to_be_slow_is_not_waited_for_again() -> None:
    inner, faults = MemoryTier(1 << 20), Faults()
    core, _ = make_core(tiers=[(inner, THROUGH)])
    for seed in range(2):
        ask(core, prompt(seed))
    flushed(core)
    again, runner = make_core(tiers=[(FaultyTier(inner, faults), THROUGH)])
    assert isinstance(again.cache, TieredCache)
    [lane] = again.cache.hierarchy.lanes
    faults.delay_s = 3.0
    computes_at_once = []
    for seed in range(2):
        again._scheduler.prefill_speed = PrefillSpeed(0.1)  # 56 tokens: 5.6 s; 3% of that is 0.17 s
        again.add(f"r{seed}", prompt(seed), greedy(1))
        before = runner.num_computed
        again.step()
        computes_at_once.append(runner.num_computed > before)
        run(again, limit=100_000)
        until(lambda: lane.lookup_speed.predict_s(0, 1) > 0.17)  # the fetch has noticed
    assert computes_at_once == [False, True]


def test_closing_the_engine_waits_for_no_hung_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda.kv.transfer._CLOSE_S", 0.1)
    faults = Faults()
    core, _ = make_core(tiers=[(FaultyTier(MemoryTier(1 << 20), faults), THROUGH)])
    assert isinstance(core.cache, TieredCache)
    for lane in core.cache.hierarchy.lanes:
        lane.timeout_s = 0.2
    faults.hang()
    core._scheduler.prefill_speed = PrefillSpeed(1e-3)
    core.add("r", prompt(1), greedy(2))
    run(core, limit=100_000)
    core.cache.close()  # the tier hangs until the test is over
    faults.running.set()


def num_stored(tier: MemoryTier) -> int:
    return tier.usage().num_records


def test_preempted_requests_continue_from_memory() -> None:
    tier = MemoryTier(1 << 20)
    core, runner = make_core(num_blocks=24, tiers=[(tier, BACK)])
    core._scheduler.prefill_speed = PrefillSpeed(SLOW_RECOMPUTE)
    prompts = {f"r{seed}": prompt(seed, 20) for seed in range(3)}
    for name, tokens in prompts.items():
        core.add(name, tokens, greedy(50))
    done = run(core, limit=100_000)
    for name, tokens in prompts.items():
        assert done[name][0].token_ids == expected_output(tokens, 50)
    assert core._scheduler.num_preempted > 0
    resumed = core._scheduler.num_resumed_tokens
    assert resumed > 0
    assert runner.num_computed < 3 * 70 + core._scheduler.num_preempted * 70 - resumed
    assert core.cache.num_held_blocks == 0


def test_what_one_tier_gives_enters_the_faster_ones() -> None:
    near, far = MemoryTier(1 << 20), MemoryTier(1 << 20)
    core, _ = make_core(tiers=[(far, THROUGH)])
    ask(core, prompt(1))
    flushed(core)
    written = num_stored(far)
    again, _ = make_core(tiers=[(near, THROUGH), (far, THROUGH)])
    assert ask(again, prompt(1)) == 56
    flushed(again)
    assert num_stored(near) == 14 + 2  # what was restored, and what was computed after it
    assert num_stored(far) == written
    assert flushed(again).hierarchy.reports()[1].num_stored == 0


def test_a_selective_tier_gets_what_was_used_again() -> None:
    tier = MemoryTier(1 << 20)
    core, _ = make_core(tiers=[(tier, THROUGH)], after_hits=2)
    for number, expected in enumerate([0, 0, 14, 14]):
        assert ask(core, prompt(1), f"r{number}") == (59 if number else 0)
        flushed(core)
        assert num_stored(tier) == expected
    ask(core, prompt(2))
    core.cache.clear()
    ask(core, prompt(2))
    flushed(core)
    assert num_stored(tier) == 14  # computed twice is used once again
    core.cache.clear()
    ask(core, prompt(2))
    flushed(core)
    assert num_stored(tier) == 14 + 16


@pytest.mark.parametrize("policy", [THROUGH, BACK])
def test_a_request_may_keep_its_blocks_out_of_the_tiers(policy: WritePolicy) -> None:
    tier = MemoryTier(1 << 20)
    core, _ = make_core(tiers=[(tier, policy)])
    core.add("private", prompt(1), SamplingParams(max_tokens=5, temperature=0.0, tier_use=TierUse(store=False)))
    run(core)
    assert ask(core, prompt(1), "public") == 59  # still shared on the device
    core.cache.clear()
    flushed(core)
    assert num_stored(tier) == 0
    ask(core, prompt(1))
    core.cache.clear()
    flushed(core)
    assert num_stored(tier) == 16


@pytest.mark.parametrize("policy", [THROUGH, BACK])
def test_what_was_purged_is_in_no_tier_and_not_found_while_it_is_deleted(policy: WritePolicy) -> None:
    tier = MemoryTier(1 << 20)
    core, _ = make_core(num_blocks=40, tiers=[(tier, policy)])
    first = prompt(1)
    ask(core, first)
    cache = flushed(core)
    assert cache.purge(Scope(), np.array(first)) > 0
    assert ask(core, first) == 0
    cache.clear()
    flushed(core)
    assert ask(core, first) == 56  # computed anew, and written anew
    cache.purge(Scope())
    flushed(core)
    assert list(tier.scan()) == []
    assert ask(core, first) == 0


def test_what_was_purged_is_not_looked_for_while_its_tier_cannot_delete_it() -> None:
    tier = MemoryTier(1 << 20)
    core, _ = make_core(num_blocks=40, tiers=[(tier, THROUGH)])
    ask(core, prompt(1))
    cache = flushed(core)
    keys = [record.id.key for record in tier.scan()]
    assert cache._before_purged(keys) == keys
    cache.hierarchy.lanes[0].quarantine()
    assert cache.purge(Scope()) > 0
    assert not cache.hierarchy.is_idle
    assert cache._before_purged(keys) == []


@pytest.mark.parametrize("policy", [THROUGH, BACK])
def test_what_is_public_comes_back_for_everybody(policy: WritePolicy) -> None:
    core, _ = make_core(num_blocks=60, tiers=[(MemoryTier(1 << 20), policy)])
    public = prompt(1, 40)
    a, b = Scope("a"), Scope("b")
    assert ask(core, [*public, 1, 2, 3, 4, 5], scope=a) == 0
    assert core.cache.publish(np.array(public), a) == 40
    for text in (7, 8):
        assert ask(core, [*public, *prompt(text, 13)], scope=a) == 40
    core.cache.clear()
    flushed(core)
    assert ask(core, [*public, *prompt(7, 13)], scope=b) == 40  # what follows is not b's
    core.cache.clear()
    flushed(core)
    assert ask(core, [*public, *prompt(7, 13)], scope=a) == 52
    core.cache.check()
    core.cache.close()


def test_a_purged_prefix_is_gone_from_tiers_that_alone_had_it() -> None:
    tier = MemoryTier(1 << 20)
    core, _ = make_core(num_blocks=40, tiers=[(tier, THROUGH)])
    first, sibling = prompt(1), prompt(1)[:28] + prompt(2)[:32]
    ask(core, first)
    core.cache.clear()
    ask(core, sibling)
    cache = flushed(core)
    cache.purge(Scope(), np.array(first))
    flushed(core)
    assert ask(core, first) == 28
    assert ask(core, sibling) == 59


def test_a_purge_reaches_what_tiers_have_behind_a_public_prefix_and_leaves_that_alone() -> None:
    tier = MemoryTier(1 << 20)
    core, _ = make_core(num_blocks=60, tiers=[(tier, THROUGH)])
    public, a = prompt(1, 20), Scope("a")
    secret = [*public, *prompt(2, 20), 1]
    core.cache.publish(np.array(public), a)
    ask(core, secret, scope=a, count=1)
    core.cache.clear()
    flushed(core)
    core.cache.purge(a, np.array(secret))
    cache = flushed(core)
    assert [info.owner for info in tier.scan()] == [cache._keys.owner(PUBLIC.namespace)] * 5
    core.cache.check()
    core.cache.close()


def test_lossy_blocks_are_not_written_over_a_partial_block_of_the_tree() -> None:
    tier = MemoryTier(1 << 20)
    core, _ = make_core(num_blocks=60, tiers=[(tier, THROUGH)])
    whole = np.array(prompt(1, 41), dtype=np.int32)
    ask(core, whole.tolist())
    core.cache.clear()
    cache = flushed(core)
    assert isinstance(cache._pool, TokenPool)
    lease = cache.acquire(whole[:38], Scope())
    cache.reserve(lease, 38)
    cache._pool.fill(lease, whole, 0, 38)
    cache.advance(lease, whole[:38], 38)
    cache.release(lease, whole[:38])
    last = int(cache.find(whole[:38], Scope()).blocks[0, -1])
    before = cache._pool.slots[last].copy()
    tier.is_lossy = True
    lease = cache.acquire(whole, Scope())
    assert lease.owns_tail
    lease.tier_use = TierUse(wait_s=PATIENCE_S, lossy=True)
    cache._pool.import_block = lambda block, _: cache._pool.slots[block].fill(-1)  # type: ignore[method-assign]
    cache.restore(lease, SLOW_RECOMPUTE)
    until(lambda: (cache.poll(), lease.num_hit_tokens == 40)[1])
    assert (cache._pool.slots[last] == before).all()
    cache.discard(lease)
    cache.check()
    core.cache.close()
