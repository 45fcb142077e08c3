"""What the levels do to an engine: with the fake model, outputs stay right and the books balance on every level."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pagoda.engine.core import EngineCore
from pagoda.engine.params import LeaseSpec, SamplingParams
from pagoda.engine.pressure.config import ClassLimits, PressureConfig
from pagoda.engine.pressure.control import PressureControl
from pagoda.engine.pressure.ladder import LadderConfig, Level, LevelChange, Signals
from pagoda.engine.scheduler import Relief
from pagoda.engine.tenants import ServiceClass, Share, TenantSpec
from pagoda.errors import Overloaded
from pagoda.kv.hierarchy import WritePolicy
from pagoda.kv.keys import Scope
from pagoda.kv.tiers.fake import MemoryTier
from tests.engine.fakes import VOCAB, FakeRunner, expected_output, make_core, random_load, run
from tests.waiting import PATIENCE_S

CLASSES = {
    "now": TenantSpec(service_class=ServiceClass.INTERACTIVE),
    "later": TenantSpec(service_class=ServiceClass.BATCH),
}


class Stuck:
    """Signals that a test sets, in place of those that are measured; and what the engine gave out."""

    def __init__(self, core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.signals = Signals()
        self.core = core
        self.tokens: dict[str, list[int]] = {}
        monkeypatch.setattr("pagoda.engine.pressure.control.LOOK_EVERY_S", 0.0)
        measure = core.pressure._measure
        monkeypatch.setattr(core.pressure, "_measure", lambda rss: (measure(rss), self.signals)[1])

    def to(self, level: int) -> None:
        """Bring the ladder to a level, and keep it there."""
        self.signals = Signals(throttles=(0.0, 0.1, 0.5, 1.0, 2.0, 10.0)[level])
        for _ in range(6):
            self.core.pressure.look()
        assert self.core.pressure.report.level == level

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.core.step():
                self.tokens.setdefault(output.request_id, []).extend(output.deltas[0].token_ids)
            self.core.cache.check()

    def finish(self, names: Sequence[str], length: int, max_tokens: int = 8) -> None:
        """Run to the end: each request has the output that it has alone, and nothing is held."""
        while self.core.has_work:
            self.step()
        assert {name: self.tokens[name] for name in names} == {
            name: expected_output(prompt(name, length), max_tokens) for name in names
        }
        assert self.core.cache.num_held_blocks == 0


@pytest.fixture
def pressed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a core on a ladder without delays, and what sets its level."""

    def make(**options: Any) -> tuple[EngineCore, FakeRunner, Stuck]:
        ladder = LadderConfig(rise_s=0.0, fall_s=0.0, levels=frozenset(options.pop("levels", range(1, 6))))
        pressure = PressureConfig(ladder, **options.pop("pressure", {}))
        core, runner = make_core(**{"pressure": pressure, "max_model_len": 64} | options)
        return core, runner, Stuck(core, monkeypatch)

    return make


def prompt(name: str, length: int = 12) -> list[int]:
    return np.random.default_rng(list(name.encode())).integers(1, VOCAB, length).tolist()


def add(core: EngineCore, name: str, tenant: str = "", *, length: int = 12, max_tokens: int = 8, **more: Any) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    core.add(name, prompt(name, length), params, scope=Scope(tenant), **more)


def running(core: EngineCore) -> set[str]:
    return {sample.request.request_id for sample in core._scheduler.running}


def test_level_1_lets_fewer_run_and_computes_less_of_prompts_in_a_step(pressed: Any) -> None:
    core, runner, stuck = pressed(num_blocks=400, max_num_seqs=8, token_budget=32)
    for index in range(10):
        add(core, f"r{index}", length=20)
    stuck.to(1)
    stuck.step()
    assert sum(runner.steps[-1]) == 16
    for _ in range(20):
        stuck.step()
        assert len(running(core)) <= 6
        assert sum(count for count in runner.steps[-1] if count > 1) <= 16
    stuck.to(0)
    stuck.finish([f"r{index}" for index in range(10)], 20)


def test_what_a_level_that_is_passed_over_does_is_not_done_above_it(pressed: Any) -> None:
    core, runner, stuck = pressed(num_blocks=400, max_num_seqs=8, token_budget=32, levels=[4, 5])
    for index in range(10):
        add(core, f"r{index}", length=20)
    stuck.to(4)
    stuck.step()
    assert sum(runner.steps[-1]) == 32
    assert core.pressure.fit_share() == 1.0
    assert core._scheduler.relief.reserves_outputs
    stuck.to(0)
    stuck.finish([f"r{index}" for index in range(10)], 20)


def test_level_1_never_makes_a_running_sample_wait(pressed: Any) -> None:
    core, runner, stuck = pressed(num_blocks=400, max_num_seqs=8, token_budget=8)
    for index in range(8):
        add(core, f"r{index}", length=4, max_tokens=30)
    while core.num_running < 8 or any(each.num_uncomputed > 1 for each in core._scheduler.running):
        stuck.step()
    stuck.to(1)
    stuck.step()
    assert runner.steps[-1] == [1] * 8


def test_level_2_keeps_part_of_the_pool_free(pressed: Any) -> None:
    core, _, stuck = pressed(num_blocks=40, pressure={"free_share": 0.25})
    for index in range(8):
        add(core, f"r{index}", length=30, max_tokens=2)
        run(core)
    assert core.cache.num_free_blocks < 10
    stuck.to(1)
    assert core.cache.num_free_blocks < 10
    stuck.to(2)
    assert core.cache.num_free_blocks >= 10
    core.cache.check()


def test_level_2_leaves_leases_and_guaranteed_shares_alone(pressed: Any) -> None:
    tenants = {"sure": TenantSpec(Share(guaranteed=0.25))}
    core, _, stuck = pressed(num_blocks=40, max_model_len=48, pressure={"free_share": 0.9}, tenants=tenants)
    add(core, "leased", length=16, max_tokens=1, leases=[LeaseSpec(16, ttl_s=1000.0)])
    add(core, "kept", "sure", length=16, max_tokens=1)
    add(core, "other", length=16, max_tokens=1)
    run(core)
    stuck.to(2)
    scopes = {"leased": Scope(), "kept": Scope("sure"), "other": Scope()}
    hits = {name: core.cache.lookup(np.array(prompt(name, 16)), scope).num_tokens for name, scope in scopes.items()}
    assert hits == {"leased": 15, "kept": 15, "other": 0}
    assert core.cache.retention.num_blocks == 4


def test_level_2_demotes_before_the_room_is_needed(pressed: Any) -> None:
    tier = MemoryTier(1 << 20)
    core, _, stuck = pressed(num_blocks=40, pressure={"free_share": 0.9}, tiers=[(tier, WritePolicy.BACK)])
    add(core, "r", length=32, max_tokens=1)
    run(core)
    assert tier.usage().num_records == 0
    stuck.to(2)
    assert core.cache.hierarchy.flush(PATIENCE_S)  # type: ignore[attr-defined]
    assert tier.usage().num_records == 4  # of the eight that it has; 36 of 40 are to be free
    core.cache.close()


def test_level_3_gives_those_that_fit_themselves_less(pressed: Any) -> None:
    core, _, stuck = pressed()
    stuck.to(2)
    assert core.pressure.fit_share() == 1.0
    stuck.to(3)
    assert core.pressure.fit_share() == 0.25


def test_level_4_admits_only_what_fits_to_its_end(pressed: Any) -> None:
    """Twelve prompts of three blocks fit at once, but their outputs of eight more do not."""
    thrashing, _, _ = pressed(num_blocks=44, max_num_seqs=16, max_model_len=64)
    core, _, stuck = pressed(num_blocks=44, max_num_seqs=16, max_model_len=64)
    for index in range(12):
        add(thrashing, f"r{index}", max_tokens=32)
        add(core, f"r{index}", max_tokens=32)
    run(thrashing)
    assert thrashing._scheduler.num_preempted > 5
    stuck.to(4)
    stuck.step(6)
    assert len(running(core)) == 4
    stuck.finish([f"r{index}" for index in range(12)], 12, max_tokens=32)
    assert core._scheduler.num_preempted == 0


def test_waiting_alone_makes_no_batch_smaller_and_reserves_nothing(pressed: Any) -> None:
    core, runner, stuck = pressed(num_blocks=400, max_num_seqs=16, token_budget=32)
    for index in range(12):
        add(core, f"r{index}", max_tokens=32)
    stuck.signals = Signals(queue=2.0)
    stuck.step()
    report, relief = core.pressure.report, core._scheduler.relief
    assert (report.level, report.memory_level) == (4, 0)
    assert sum(runner.steps[-1]) == 32
    stuck.step(5)
    assert report.entered == {Level.HOLD: 1}
    assert core.pressure.report.level == 5
    assert relief == core._scheduler.whole_relief
    assert core._scheduler.relief == replace(relief, makes_way=True)
    assert len(running(core)) == 12
    assert core.pressure.fit_share() == 1.0
    stuck.to(0)
    stuck.finish([f"r{index}" for index in range(12)], 12, max_tokens=32)


def test_each_level_that_is_left_stops_what_it_did(pressed: Any) -> None:
    limits = {kind: ClassLimits(max_wait_s=1.0, max_waiting=1) for kind in ServiceClass}
    pressure = {"free_share": 0.5, "classes": limits}
    core, _, stuck = pressed(num_blocks=40, max_num_seqs=2, token_budget=8, pressure=pressure)
    scheduler, whole = core._scheduler, core._scheduler.whole_relief
    stuck.to(5)
    assert scheduler.relief == Relief(1, 4, reserves_outputs=True, makes_way=True)
    stuck.to(4)
    assert scheduler.relief == Relief(1, 4, reserves_outputs=True)
    add(core, "r0", length=30, max_tokens=2)
    with pytest.raises(Overloaded):
        add(core, "r1", length=30, max_tokens=2)
    stuck.to(3)
    add(core, "r1", length=30, max_tokens=2)
    add(core, "r2", length=30, max_tokens=2)
    assert scheduler.relief == Relief(1, 4)
    assert core.pressure.fit_share() < 1
    stuck.to(2)
    assert core.pressure.fit_share() == 1
    stuck.finish(["r0", "r1", "r2"], 30, 2)
    core.pressure.look()
    assert core.cache.num_free_blocks >= 20
    stuck.to(1)
    assert scheduler.relief == Relief(1, 4)
    for index in range(3, 6):
        add(core, f"r{index}", length=30, max_tokens=2)
    stuck.finish(["r3", "r4", "r5"], 30, 2)
    assert core.cache.num_free_blocks < 20
    stuck.to(0)
    assert scheduler.relief == whole


def test_what_is_expected_of_an_output_is_learned(pressed: Any) -> None:
    core, _, _ = pressed(num_blocks=200, max_model_len=512)
    add(core, "first", max_tokens=400)
    [sample] = core._scheduler.waiting
    assert core._scheduler.expected_output(sample.request) == 400
    core.abort("first")
    assert core._scheduler.expected_output(sample.request) == 400  # whoever left says nothing of how long answers are
    for index in range(3):
        add(core, f"r{index}", max_tokens=10)
    run(core)
    assert core._scheduler.expected_output(sample.request) == 20


def test_level_4_refuses_and_below_it_nothing_is(pressed: Any) -> None:
    limits = {kind: ClassLimits(30.0, 3) for kind in ServiceClass}
    core, _, stuck = pressed(max_num_seqs=2, pressure={"classes": limits})
    for index in range(8):
        add(core, f"r{index}")
    stuck.step()
    assert core.num_waiting == 6
    stuck.to(4)
    with pytest.raises(Overloaded) as refused:
        add(core, "late")
    assert refused.value.reason == "queue_full"
    assert core.pressure.report.refused == {"queue_full": 1}
    stuck.to(3)
    add(core, "r8")
    stuck.finish([f"r{index}" for index in range(9)], 12)
    stuck.to(4)
    add(core, "alone")  # nobody is before it
    stuck.finish(["alone"], 12)


def test_nothing_is_refused_above_level_4_where_that_is_passed_over(pressed: Any) -> None:
    limits = {kind: ClassLimits(max_wait_s=1.0, max_waiting=1) for kind in ServiceClass}
    core, _, stuck = pressed(num_blocks=40, max_num_seqs=1, levels=[5], pressure={"classes": limits})
    add(core, "r0")
    stuck.step()
    stuck.to(5)
    for index in range(1, 4):
        add(core, f"r{index}")
    stuck.finish([f"r{index}" for index in range(4)], 12)


def test_level_5_makes_way_for_a_higher_class(pressed: Any) -> None:
    core, _, stuck = pressed(num_blocks=24, tenants=CLASSES, max_num_seqs=8)
    for index in range(3):
        add(core, f"b{index}", "later", length=24, max_tokens=8)
    stuck.step(3)
    assert running(core) == {"b0", "b1", "b2"}
    add(core, "i", "now", length=24, max_tokens=8)
    stuck.step()
    assert "i" not in running(core)
    stuck.to(5)
    stuck.step(2)
    assert running(core) == {"b0", "b1", "i"}
    assert (core._scheduler.num_preempted, core._scheduler.num_made_way) == (1, 1)
    stuck.finish(["b0", "b1", "b2", "i"], 24)


def test_level_5_makes_way_where_only_a_place_is_missing(pressed: Any) -> None:
    core, _, stuck = pressed(num_blocks=100, tenants=CLASSES, max_num_seqs=2, pressure={"batch_share": 1.0})
    add(core, "b0", "later")
    add(core, "b1", "later")
    stuck.step()
    add(core, "i", "now")
    stuck.to(5)
    stuck.step(2)
    assert running(core) == {"b0", "i"}
    add(core, "same", "now")
    add(core, "same2", "now")
    stuck.step(3)
    assert running(core) == {"i", "same"}  # an equal is not preempted for an equal
    stuck.finish(["b0", "b1", "i", "same", "same2"], 12)


def test_each_change_is_one_line_and_is_told_to_listeners(pressed: Any, caplog: pytest.LogCaptureFixture) -> None:
    core, _, stuck = pressed()
    told: list[LevelChange] = []
    core.pressure.listeners.append(told.append)
    with caplog.at_level(logging.WARNING, logger="pagoda.engine.pressure.control"):
        stuck.to(2)
        stuck.to(0)
    assert [(change.before, change.after) for change in told] == [(0, 1), (1, 2), (2, 1), (1, 0)]
    assert [record.getMessage()[:38] for record in caplog.records][:2] == [
        "pressure level 1 (shrink), was 0; memo",
        "pressure level 2 (evict), was 1; memor",
    ]
    assert "throttles 0.50" in caplog.records[1].getMessage()
    assert core.pressure.report.entered == {Level.SHRINK: 2, Level.EVICT: 1, Level.CALM: 1}
    assert core.pressure.next_look_s is None


def test_it_measures_what_there_is() -> None:
    core, _ = make_core(num_blocks=20, max_model_len=64, max_num_seqs=1, pressure=PressureConfig(memory_limit=1 << 40))
    add(core, "a", length=20, max_tokens=20)
    add(core, "b", length=40, max_tokens=2)
    core.step()
    waiting = core._scheduler.waiting[0].request
    waiting.arrived_at -= 15.0
    control: PressureControl = core.pressure
    signals = control._measure(1 << 39)
    assert signals.pool == core.cache.num_held_blocks / 20 > 0.2
    assert signals.queue == pytest.approx(0.5, abs=0.01)
    assert signals.memory == 0.5
    assert (signals.preemptions, signals.failures) == (0, 0)
    core._scheduler.preempt_all()  # as new weights do
    assert control._measure(0).preemptions == 0
    run(core)


def test_preemptions_and_failures_for_want_of_blocks_are_measured() -> None:
    core, _ = make_core(num_blocks=20, max_model_len=64, pressure=PressureConfig())
    for index in range(4):
        add(core, f"r{index}", max_tokens=30)
    run(core)
    signals = core.pressure._measure(0)
    assert signals.preemptions > 0.3
    assert signals.failures == pytest.approx(signals.preemptions, rel=0.01)


def test_the_queue_is_counted() -> None:
    core, _ = make_core(max_num_seqs=1)
    add(core, "a", "acme")
    add(core, "b", "acme", length=20)
    add(core, "c", "bolt")
    scheduler = core._scheduler
    assert (scheduler.num_queued, scheduler.num_queued_tokens) == ({"acme": 2, "bolt": 1}, 44)
    core.step()
    core.abort("c")
    assert (scheduler.num_queued, scheduler.num_queued_tokens) == ({"acme": 1}, 20)
    run(core)
    assert (scheduler.num_queued, scheduler.num_queued_tokens) == ({}, 0)


def test_tenants_with_weights_share_what_runs_whoever_sends_more() -> None:
    tenants = {"two": TenantSpec(Share(weight=2)), "one": TenantSpec(Share(weight=1))}
    core, _ = make_core(num_blocks=60, tenants=tenants, max_num_seqs=32, max_model_len=64)
    for index in range(120):
        add(core, f"one{index}", "one", length=16, max_tokens=4)  # sends first, and more
    for index in range(80):
        add(core, f"two{index}", "two", length=16, max_tokens=4)
    generated = {"one": 0, "two": 0}
    while {"one", "two"} <= core._scheduler.num_queued.keys():
        for output in core.step():
            generated[output.request_id[:3]] += len(output.deltas[0].token_ids)
    assert generated["two"] / generated["one"] == pytest.approx(2.0, rel=0.1)
    run(core)


@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_whatever_the_level_outputs_are_right_and_all_comes_back(pressed: Any, windows: tuple[int | None, ...]) -> None:
    rng = np.random.default_rng(11)
    core, _, stuck = pressed(
        num_blocks=64 * len(windows),
        windows=windows,
        max_model_len=128,
        max_num_seqs=6,
        tenants=CLASSES,
        pressure={"longest_share": 1.0},
    )

    def change(step: int) -> None:
        if step % 7 == 0:
            stuck.to(int(rng.integers(6)))

    scopes = [Scope("now"), Scope("later"), Scope("nobody")]
    random_load(core, rng, num_steps=400, arrivals=0.6, max_tokens=30, before_step=change, scopes=scopes)
    assert core.cache.num_held_blocks == 0
