"""The ladder alone, on a clock of its own: up and down one level at a time, with hysteresis; its settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda.engine.pressure.config import PressureConfig
from pagoda.engine.pressure.ladder import (
    MEMORY,
    NEVER,
    WAITING,
    LadderConfig,
    Ladders,
    Level,
    LevelChange,
    Rate,
    Signals,
    Thresholds,
)
from pagoda.engine.tenants import ServiceClass
from pagoda.errors import ConfigError

CONFIG = LadderConfig(leave=0.9, rise_s=1.0, fall_s=4.0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A ladder that is looked at every quarter of a second: the last look of one feeling is as long before the next."""

    def __init__(self, config: LadderConfig = CONFIG) -> None:
        self.clock = Clock()
        self.ladders = Ladders(config, self.clock)

    def feel(self, signals: Signals, seconds: float) -> list[tuple[float, int]]:
        """The changes of level, with their times since now."""
        changes, start = [], self.clock.now
        while self.clock.now < start + seconds:
            change = self.ladders.look(signals)
            if change is not None:
                changes.append((self.clock.now - start, int(change.after)))
            self.clock.now += 0.25
        return changes


def test_it_climbs_one_level_at_a_time_to_what_is_asked_for() -> None:
    bench = Bench()
    assert bench.feel(Signals(pool=0.5, memory=0.7), 10) == []
    assert bench.feel(Signals(pool=0.975), 10) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert bench.feel(Signals(pool=0.975, memory=0.99), 10) == [(0, 5)]
    assert bench.ladders.num_entered == dict.fromkeys(range(1, 6), 1)


def test_the_highest_signal_decides() -> None:
    assert Bench().feel(Signals(pool=0.86, preemptions=1.2), 9) == [(0, 1), (1, 2)]
    assert Bench().feel(Signals(pool=0.86, memory=0.96), 9)[-1] == (3, 4)
    assert Bench().feel(Signals(throttles=0.2), 9) == [(0, 1)]
    assert Bench().feel(Signals(failures=0.6), 9) == [(0, 1)]


def test_it_leaves_one_level_at_a_time_when_all_is_clearly_below() -> None:
    bench = Bench()
    bench.feel(Signals(failures=4.2), 5)
    assert bench.ladders.level is Level.HOLD
    assert bench.feel(Signals(failures=3.7), 60) == []  # above 0.9 of what asked for it
    assert bench.feel(Signals(failures=1.9), 30) == [(3.75, 3)]  # and above 0.9 of level 3's
    assert bench.feel(Signals(), 30) == [(3.75, 2), (7.75, 1), (11.75, 0)]
    assert bench.feel(Signals(), 60) == []


def test_a_moment_of_pressure_starts_the_wait_anew() -> None:
    bench = Bench()
    bench.feel(Signals(pool=0.86), 1)
    for _ in range(5):
        assert bench.feel(Signals(), 3.5) == []
        assert bench.feel(Signals(pool=0.86), 0.25) == []
    assert bench.feel(Signals(), 10) == [(3.75, 0)]


def test_a_short_peak_does_not_reach_the_top() -> None:
    bench = Bench()
    assert bench.feel(Signals(pool=1.0), 1.25) == [(0, 1), (1, 2)]
    assert bench.feel(Signals(), 20) == [(3.75, 1), (7.75, 0)]


def test_levels_can_be_passed_over_or_all_be_off() -> None:
    bench = Bench(replace(CONFIG, levels=frozenset({2, 5})))
    assert bench.feel(Signals(memory=9.0), 9) == [(0, 2), (1, 5)]
    assert bench.feel(Signals(), 20) == [(3.75, 2), (7.75, 0)]
    assert bench.feel(Signals(queue=1.5), 9) == []
    assert bench.feel(Signals(queue=2.5), 9) == [(0, 5)]
    assert Bench(replace(CONFIG, levels=frozenset())).feel(Signals(1.0, 9, 9, 9, 9, 9, 9), 30) == []


def test_waiting_asks_for_levels_4_and_5_alone() -> None:
    bench = Bench()
    assert bench.feel(Signals(queue=0.99, expected=0.99), 9) == []
    assert bench.feel(Signals(queue=1.0), 9) == [(0, 4)]
    assert bench.ladders.does(Level.HOLD)
    assert not any(bench.ladders.does(level) for level in (Level.SHRINK, Level.EVICT, Level.COMPRESS))
    assert bench.feel(Signals(queue=2.0), 9) == [(0, 5)]
    assert bench.feel(Signals(), 30) == [(3.75, 4), (7.75, 0)]
    assert bench.feel(Signals(expected=50.0), 9) == [(0, 4)]


def test_the_level_is_the_higher_of_the_two_and_each_does_its_own() -> None:
    bench = Bench()
    bench.feel(Signals(pool=0.91), 5)
    assert bench.feel(Signals(pool=0.91, queue=1.5), 5) == [(0, 4)]
    assert bench.ladders.memory.level is Level.EVICT
    assert bench.ladders.does(Level.EVICT)
    assert not bench.ladders.does(Level.COMPRESS)
    assert [cause.signals[0] for cause in bench.ladders.causes(Level.HOLD)] == ["queue"]
    assert bench.feel(Signals(pool=0.98, queue=1.5), 5) == [(0, 4), (1, 4)]  # memory's goes to 3 and 4 below that
    assert bench.ladders.causes(Level.HOLD) == {MEMORY, WAITING}
    assert bench.feel(Signals(pool=0.98), 9) == [(3.75, 4)]
    assert bench.ladders.num_entered == {Level.SHRINK: 1, Level.EVICT: 1, Level.HOLD: 1}


def test_time_in_levels_adds_up() -> None:
    bench = Bench()
    bench.feel(Signals(), 3)
    bench.feel(Signals(pool=0.91), 7)
    bench.feel(Signals(), 20)
    seconds = bench.ladders.seconds()
    assert sum(seconds.values()) == bench.clock.now - 100
    assert seconds[Level.SHRINK] == 1 + 4
    assert seconds[Level.EVICT] == 6 + 3.75


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 3), st.floats(0.25, 6)), max_size=20))
def test_no_two_steps_at_once_and_back_to_calm_in_the_end(phases: list[tuple[float, float, float]]) -> None:
    bench = Bench()
    last: LevelChange | None = None
    for pool, queue, seconds in phases:
        end = bench.clock.now + seconds
        while bench.clock.now < end:
            memory = bench.ladders.memory.level
            change = bench.ladders.look(Signals(pool=pool, queue=queue))
            if change is not None:
                assert abs(change.memory - memory) <= 1
                assert change.after >= change.memory
                assert last is None or last.after is change.before
                last = change
            bench.clock.now += 0.25
    bench.feel(Signals(), 5 * 4.5)
    assert bench.ladders.level is Level.CALM


def test_a_rate_is_what_happens_in_a_second_and_is_forgotten() -> None:
    clock = Clock()
    rate = Rate(2.0, clock)
    assert (rate.per_s, rate.count, rate.seconds) == (0, 0, 0)
    clock.now += 0.5
    rate.add(5)
    assert rate.per_s == 2.5
    assert (rate.count, rate.seconds) == (5, pytest.approx(0.44, rel=0.01))  # about five in half a second
    for _ in range(400):
        clock.now += 0.1
        rate.add(1)
    assert rate.per_s == pytest.approx(10, rel=0.06)
    assert (rate.count, rate.seconds) == (pytest.approx(2 * rate.per_s), pytest.approx(2.0))
    clock.now += 2.0
    assert rate.per_s == pytest.approx(10 / 2.718, rel=0.06)
    clock.now += 60
    assert rate.per_s < 1e-9


FILE = """
levels = [1, 2, 4]
leave = 0.8
fall_s = 10
batch_share = 0.5
memory_limit = "2GiB"
max_queued_tokens = 1000

[thresholds]
pool = [0.5, 0.6, 0.7, 0.8, inf]

[classes.batch]
max_wait_s = 3600
"""


def test_every_value_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ladder.toml"
    path.write_text(FILE)
    config = PressureConfig.load(path)
    assert config.ladder.levels == {1, 2, 4}
    assert (config.ladder.leave, config.ladder.fall_s, config.ladder.rise_s) == (0.8, 10, 0.5)
    assert config.ladder.thresholds.pool == (0.5, 0.6, 0.7, 0.8, NEVER)
    assert config.ladder.thresholds.queue == Thresholds().queue
    assert (config.batch_share, config.memory_limit, config.max_queued_tokens) == (0.5, 2 << 30, 1000)
    assert config.classes[ServiceClass.BATCH].max_wait_s == 3600
    assert config.classes[ServiceClass.BATCH].max_waiting == PressureConfig().classes[ServiceClass.BATCH].max_waiting
    path.write_text("")
    assert PressureConfig.load(path) == PressureConfig()


WRONG = [
    ("levels = [6]", "levels are 1 to 5"),
    ("levels = 3", "list of numbers"),
    ("level = [1]", "level is not known"),
    ("leave = 0", "leave"),
    ("rise_s = -1", "rise_s"),
    ("fall_s = inf", "fall_s"),
    ("batch_share = 0", "batch_share"),
    ("prefill_share = 1.5", "prefill_share"),
    ("free_share = 1.0", "free_share"),
    ("longest_share = true", "longest_share"),
    ("window_s = 0", "window_s"),
    ("memory_limit = []", "memory_limit"),
    ("memory_limit = 0", "positive"),
    ("[thresholds]\npool = [0.5, 0.4, 1, 1, 1]", "do not fall"),
    ("[thresholds]\npool = [0.5]", r"levels 1, 2, 3, 4, 5, got \[0.5\]"),
    ("[thresholds]\nqueue = [0.25, 0.5, 0.75, 1.0, 2.0]", "levels 4, 5"),
    ("[thresholds]\npool = [0, 1, 1, 1, 1]", "above 0"),
    ("[thresholds]\nheat = [1, 1, 1, 1, 1]", "heat is not known"),
    ("thresholds = 3", "should be a table"),
    ("[classes.gold]\nmax_wait_s = 3", "gold is not known"),
    ("[classes.batch]\nmax_wait_s = 0", "max_wait_s"),
    ("[classes.batch]\nmax_waiting = 0.5", "max_waiting"),
    ('[thresholds]\nqueue = ["a", 2.0]', r"queue\[0\] must be a number, got 'a'"),
    ("levels = [", "ladder.toml: it is no TOML: .*at the end of line 1"),
    ("leave = 0.5\nlevels = what", "it is no TOML: .*at line 2"),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_a_wrong_file_is_refused_with_what_is_wrong(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "ladder.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        PressureConfig.load(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        PressureConfig.load(tmp_path / "nowhere.toml")
