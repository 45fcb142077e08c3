"""Engines above a tier whose delays are simulated: what takes how long is exact, on however busy a machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from pagoda.engine.core import EngineCore
from pagoda.engine.params import SamplingParams
from pagoda.engine.prefill_speed import PrefillSpeed
from pagoda.kv.hierarchy import WritePolicy
from pagoda.kv.tiered import TieredCache
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.fake import Faults, FaultyTier, MemoryTier
from pagoda.kv.tiers.records import GetResult, RecordId, Target
from tests.engine.fakes import VOCAB, FakeRunner, make_core, run
from tests.waiting import PATIENCE_S

BLOCK, TOKENS = 4, 401
S_PER_TOKEN = 1e-3  # 400 tokens: 0.4 s
NUM_BLOCKS = TOKENS // BLOCK
NO_WRITES = 1 << 30  # hits before a block is written: a write would be one more call that takes its time


@dataclass(eq=False)
class _Call:
    """A call to the tier, asleep; `is_left`: nobody waits for it any more."""

    wake: float
    is_left: bool = False


class SimulatedTime:
    """Seconds that pass only while the engine and all that is loaded for it sleep; called, it is a clock.

    The engine sleeps while it computes and while it waits for something to arrive. A fetch sleeps while the tier does,
    or waits for one of the tier's threads. Calls that nobody waits for any more are slept to their ends besides.
    """

    _THREADS = 2  # of a lane

    def __init__(self) -> None:
        self._now = 0.0
        self._asleep: list[_Call] = []
        self._num_fetches = 0
        self._is_over = False
        self._changed = threading.Condition()

    def __call__(self) -> float:
        return self._now

    def end(self) -> None:
        """Nobody sleeps any longer."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def sleep_in_tier(self, seconds: float) -> None:
        with self._changed:
            call = _Call(self._now + seconds)
            self._asleep.append(call)
            self._changed.wait_for(lambda: self._now >= call.wake or self._is_over)
            self._asleep.remove(call)

    def sleep_in_engine(self, seconds: float, is_enough: Callable[[], bool] = lambda: False) -> None:
        with self._changed:
            end = self._now + max(seconds, 1e-9)  # less would be lost in rounding, and never pass
            while self._now < end and not is_enough():
                if len(self._waited_for) >= self._num_fetches or len(self._asleep) == self._THREADS:
                    self._now = min([end, *(call.wake for call in self._asleep)])
                    self._changed.notify_all()
                self._changed.wait(0.0005)

    @property
    def _waited_for(self) -> list[_Call]:
        return [call for call in self._asleep if not call.is_left]

    def counted(self, submit: Callable[..., Future[None]]) -> Callable[..., Future[None]]:
        """`submit`, of a fetcher's workers: what it runs is a fetch."""

        def fetch(work: Callable[[], None]) -> None:
            try:
                work()
            finally:
                with self._changed:
                    self._num_fetches -= 1
                    if len(waited_for := self._waited_for) > self._num_fetches:
                        waited_for[0].is_left = True

        def counting(work: Callable[[], None]) -> Future[None]:
            with self._changed:
                self._num_fetches += 1
            return submit(lambda: fetch(work))

        return counting


class _Arrived(threading.Event):
    def __init__(self, time: SimulatedTime) -> None:
        super().__init__()
        self._time = time

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._time.sleep_in_engine(timeout, self.is_set)
        return self.is_set()


class Watched(FaultyTier):
    """Notes which records are loaded, call by call."""

    def __init__(self, inner: Tier, time: SimulatedTime) -> None:
        super().__init__(inner, Faults(), sleep=time.sleep_in_tier)
        self.loads: list[list[RecordId]] = []

    def _get_into(self, targets: Sequence[Target]) -> list[GetResult]:
        self.loads.append([target.id for target in targets])
        return super()._get_into(targets)


@dataclass
class Warm:
    """An engine that computes at a known speed, above a tier that has the first prompts."""

    core: EngineCore
    runner: FakeRunner
    tier: Watched
    time: SimulatedTime

    @property
    def faults(self) -> Faults:
        return self.tier.faults


def prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, TOKENS).tolist()


def warm(time: SimulatedTime, windows: tuple[int | None, ...] = (None,), prompts: int = 1) -> Warm:
    memory = MemoryTier(1 << 22)
    filling, _ = make_core(num_blocks=300 * len(windows), windows=windows, tiers=[(memory, WritePolicy.THROUGH)])
    for seed in range(prompts):
        filling.add(f"fill{seed}", prompt(seed), SamplingParams(max_tokens=1, temperature=0.0))
    run(filling)
    assert isinstance(filling.cache, TieredCache)
    assert filling.cache.hierarchy.flush(PATIENCE_S)
    tier = Watched(memory, time)
    core, runner = make_core(
        num_blocks=300 * len(windows),
        windows=windows,
        tiers=[(tier, WritePolicy.THROUGH)],
        after_hits=NO_WRITES,
        clock=time,
    )
    assert isinstance(core.cache, TieredCache)
    hierarchy = core.cache.hierarchy
    hierarchy.arrived = hierarchy.fetcher._arrived = _Arrived(time)
    workers = hierarchy.fetcher._workers
    workers.submit = time.counted(workers.submit)  # type: ignore[assignment]
    runner.seconds_per_token, runner.sleep = S_PER_TOKEN, time.sleep_in_engine
    core._scheduler.prefill_speed = PrefillSpeed(S_PER_TOKEN)
    return Warm(core, runner, tier, time)
