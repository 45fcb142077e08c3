"""The pressure ladder: signals in, a level out. Pure: it acts on nothing, and its clock is given.

               memory is short                                      requests wait
    5 preempt  the lowest class gives way to those above it         the same
    4 hold     admitted is only what fits to its end; what is       what would wait too long is refused
               too long, or would wait too long, is refused
    3 compress contexts that allow it become sparse
    2 evict    part of the pool is kept free
    1 shrink   smaller batches, shorter prefills
    0 calm

These are two ladders, as waiting has another cure than want of memory: a smaller batch frees blocks, but makes those
who wait wait longer. On each, a level does what those below it do, too. Each signal has a threshold for each level; the
highest that any asks for is gone to, one level at a time, each given time to help. A level is left when all signals
have stayed clearly below its thresholds for a while, one at a time again. The level that is shown is the higher one.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import IntEnum
from itertools import pairwise

from pagoda.errors import ConfigError

NEVER = math.inf

Rungs = tuple[float, ...]  # what asks for each level


class Level(IntEnum):
    """How much is done about pressure."""

    CALM = 0
    SHRINK = 1
    EVICT = 2
    COMPRESS = 3
    HOLD = 4
    PREEMPT = 5


@dataclass(frozen=True, slots=True)
class Signals:
    """What there is of pressure. Rates are of the last few seconds.

    Attributes:
        pool: the share of blocks that requests and leases hold.
        failures: times a second that blocks were needed and not there.
        preemptions: samples a second put back in the queue.
        queue: the longest wait of those that never ran, over what their class should wait at most.
        expected: the longest wait that one who comes now is expected to have, over the same.
        memory: the process's resident memory over its limit; 0 without a limit.
        throttles: times a second that the kernel held the process's cgroup back for its memory; 0 where none tells.
    """

    pool: float = 0.0
    failures: float = 0.0
    preemptions: float = 0.0
    queue: float = 0.0
    expected: float = 0.0
    memory: float = 0.0
    throttles: float = 0.0

    def __str__(self) -> str:
        return ", ".join(f"{each.name} {getattr(self, each.name):.2f}" for each in fields(self))


@dataclass(frozen=True, slots=True)
class Cause:
    """What one ladder is about: the signals that it follows, and the levels that help against them, in order."""

    signals: tuple[str, ...]
    levels: tuple[Level, ...]


MEMORY = Cause(
    ("pool", "failures", "preemptions", "memory", "throttles"),
    (Level.SHRINK, Level.EVICT, Level.COMPRESS, Level.HOLD, Level.PREEMPT),
)
WAITING = Cause(("queue", "expected"), (Level.HOLD, Level.PREEMPT))


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The value of each signal from which it asks for each level of its ladder.

    Raises:
        ConfigError: values are not positive, fall from one level to the next, or are too many or too few.
    """

    pool: Rungs = (0.85, 0.90, 0.94, 0.97, NEVER)
    failures: Rungs = (0.5, 1.0, 2.0, 4.0, NEVER)
    preemptions: Rungs = (0.5, 1.0, 2.0, 4.0, NEVER)
    queue: Rungs = (1.0, 2.0)
    expected: Rungs = (1.0, NEVER)
    memory: Rungs = (0.80, 0.85, 0.90, 0.95, 0.98)
    throttles: Rungs = (0.1, 0.5, 1.0, 2.0, 10.0)

    def __post_init__(self) -> None:
        for cause in (MEMORY, WAITING):
            for name in cause.signals:
                rungs = getattr(self, name)
                if len(rungs) != len(cause.levels):
                    levels = ", ".join(str(int(level)) for level in cause.levels)
                    raise ConfigError(f"{name} needs a threshold for each of the levels {levels}, got {list(rungs)}")
                if not all(0 < low <= high for low, high in pairwise(rungs)):
                    raise ConfigError(f"{name} needs thresholds above 0 that do not fall, got {list(rungs)}")


@dataclass(frozen=True, slots=True)
class LadderConfig:
    """How the level follows the signals.

    Attributes:
        levels: those that are gone to; the others are passed over, and what they do is not done on higher levels
            either. With none of them the level is always 0.
        thresholds: see there.
        leave: a level is left below this share of its thresholds.
        rise_s: how long a level is given before the next one.
        fall_s: how long all must have been below before a level is left.

    Raises:
        ConfigError: a value is out of range.
    """

    levels: frozenset[int] = frozenset(range(1, 6))
    thresholds: Thresholds = field(default_factory=Thresholds)
    leave: float = 0.9
    rise_s: float = 0.5
    fall_s: float = 3.0

    def __post_init__(self) -> None:
        if not self.levels <= set(range(1, 6)):
            raise ConfigError(f"levels are 1 to 5, got {sorted(self.levels)}")
        if not 0 < self.leave <= 1:
            raise ConfigError(f"leave must be above 0 and at most 1, got {self.leave}")
        for name in ("rise_s", "fall_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number of seconds, got {getattr(self, name)}")


class Ladder:
    """Follows the signals of one cause.

    Args:
        clock: seconds that never go back.

    Attributes:
        level: now.
        cause: whose signals those are.
    """

    def __init__(self, config: LadderConfig, cause: Cause, clock: Callable[[], float]) -> None:
        self.level = Level.CALM
        self.cause = cause
        self._config = config
        self._clock = clock
        self._steps = [Level.CALM, *(level for level in cause.levels if level in config.levels)]
        thresholds = {name: getattr(config.thresholds, name) for name in cause.signals}
        self._rungs = {name: dict(zip(cause.levels, rungs, strict=True)) for name, rungs in thresholds.items()}
        self._changed_at = self._pressed_at = clock()

    def look(self, signals: Signals) -> None:
        """Go to the next level up or down, if it is time to. Call it every now and then."""
        now = self._clock()
        at = self._steps.index(self.level)
        if self._asked(signals, 1.0) > self.level:
            self._pressed_at = now
            if self.level is Level.CALM or now - self._changed_at >= self._config.rise_s:
                self._go(self._steps[at + 1])
        elif self._asked(signals, self._config.leave) >= self.level:
            self._pressed_at = now
        elif now - max(self._pressed_at, self._changed_at) >= self._config.fall_s:
            self._go(self._steps[at - 1])

    def does(self, level: Level) -> bool:
        """Whether what a level does is done now: it or a higher one was gone to, and it is not passed over."""
        return self.level >= level and level in self._steps

    def _asked(self, signals: Signals, share: float) -> Level:
        """The highest level of which some signal has reached a share of its threshold."""
        pairs = [(getattr(signals, name), rungs) for name, rungs in self._rungs.items()]
        reached = [step for step in self._steps[1:] if any(value >= share * rungs[step] for value, rungs in pairs)]
        return max(reached, default=Level.CALM)

    def _go(self, level: Level) -> None:
        self.level = level
        self._changed_at = self._clock()


@dataclass(frozen=True, slots=True)
class LevelChange:
    """A step on one of the two ladders, and the signals that caused it.

    Attributes:
        before, after: the level that is shown; the same where the other ladder's is higher.
        memory: the level of memory's ladder now.
    """

    before: Level
    after: Level
    memory: Level
    signals: Signals


class Ladders:
    """Both ladders, and what is told of them: the higher level of the two.

    Attributes:
        memory, waiting: see the module.
        num_entered: how often each level was gone to.
    """

    def __init__(self, config: LadderConfig, clock: Callable[[], float]) -> None:
        self.memory = Ladder(config, MEMORY, clock)
        self.waiting = Ladder(config, WAITING, clock)
        self.num_entered: Counter[Level] = Counter()
        self._clock = clock
        self._counted_at = clock()
        self._seconds: defaultdict[Level, float] = defaultdict(float)

    @property
    def level(self) -> Level:
        """The higher of the two."""
        return max(self.memory.level, self.waiting.level)

    def causes(self, level: Level) -> frozenset[Cause]:
        """For which of the two what a level does is done now."""
        return frozenset(each.cause for each in (self.memory, self.waiting) if each.does(level))

    def does(self, level: Level) -> bool:
        """Whether it is done for either."""
        return bool(self.causes(level))

    def look(self, signals: Signals) -> LevelChange | None:
        """Let both follow. Call it every now and then."""
        before, memory, waiting = self.level, self.memory.level, self.waiting.level
        self.seconds()
        self.memory.look(signals)
        self.waiting.look(signals)
        if (self.memory.level, self.waiting.level) == (memory, waiting):
            return None
        if self.level is not before:
            self.num_entered[self.level] += 1
        return LevelChange(before, self.level, self.memory.level, signals)

    def seconds(self) -> dict[Level, float]:
        """How long each level has lasted until now, all its times together."""
        now = self._clock()
        self._seconds[self.level] += now - self._counted_at
        self._counted_at = now
        return dict(self._seconds)


class Rate:
    """How often something happens, forgotten exponentially.

    Args:
        window_s: what is older than a few of these does not count.
    """

    def __init__(self, window_s: float, clock: Callable[[], float]) -> None:
        self._window_s = window_s
        self._clock = clock
        self._per_s = 0.0
        self._began_at = self._at = clock()

    def add(self, count: int) -> None:
        """It happened so often just now."""
        self._per_s = self.per_s + count / self._window_s

    @property
    def per_s(self) -> float:
        """Times a second."""
        now = self._clock()
        self._per_s *= math.exp((self._at - now) / self._window_s)
        self._at = now
        return self._per_s

    @property
    def count(self) -> float:
        """How often it happened in the last `seconds`; what is older counts less."""
        return self.per_s * self._window_s

    @property
    def seconds(self) -> float:
        """The window; less if this was made only lately: what was before is not known, and is not nothing."""
        return self._window_s * (1 - math.exp((self._began_at - self._clock()) / self._window_s))
