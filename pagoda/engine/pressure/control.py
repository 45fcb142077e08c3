"""PressureControl: measures pressure, follows the ladder, and tells those who can relieve it.

    cache, process ── signals ──> memory's Ladder ── level ──┬──> Scheduler.relief     1, 4: who runs, how much of it
                                                             ├──> KVCache.keep_free    2
                                                             ├──> Sparsity.fit_share   3: of requests that come
                                                             └──> Compressor           3: of those that run
    the queue ─── signal ───> waiting's Ladder ── either's ──┬──> Gate                 4: who may queue
                                                             ├──> Scheduler.relief     5: who makes way
                                                             └──> listeners            scale out; and whoever asks

Leases keep their word on every level: what they hold is held, as if a request held it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping

from pagoda.engine import process_memory
from pagoda.engine.pressure.admission import Ask, Gate, Line
from pagoda.engine.pressure.compress import Compressor
from pagoda.engine.pressure.config import PressureConfig
from pagoda.engine.pressure.ladder import Ladders, Level, LevelChange, Rate, Signals
from pagoda.engine.pressure.report import PressureReport
from pagoda.engine.request import Request
from pagoda.engine.scheduler import Relief, Scheduler
from pagoda.engine.tenants import ServiceClass
from pagoda.kv.cache import KVCache

LOOK_EVERY_S = 0.1
STARTS_WINDOW_S = 10.0
logger = logging.getLogger(__name__)


class PressureControl:
    """The ladders of an engine. For the engine's thread alone.

    Args:
        class_of: the class of each tenant that has one.

    Attributes:
        listeners: told of every step on a ladder; they must be quick and never raise.
        compressor: shrinks running contexts, where the engine can.
        report: of the last look.
    """

    def __init__(
        self,
        config: PressureConfig,
        cache: KVCache,
        scheduler: Scheduler,
        class_of: Mapping[str, ServiceClass],
    ) -> None:
        self.listeners: list[Callable[[LevelChange], object]] = []
        self.compressor: Compressor | None = None
        self._config = config
        self._cache = cache
        self._scheduler = scheduler
        self._clock = clock = time.perf_counter  # the one that requests' times are of
        self._ladders = Ladders(config.ladder, clock)
        self._gate = Gate(config, class_of, cache.tenants, cache.num_blocks)
        self._memory_limit = config.memory_limit or process_memory.cgroup_limit()
        self._failures, self._preemptions, self._throttles = (Rate(config.window_s, clock) for _ in range(3))
        self._starts = self._no_starts()
        self._counted: Counter[str] = Counter(throttles=process_memory.num_throttles())
        self._due_at = clock()
        self.report = PressureReport(memory_limit=self._memory_limit)

    @property
    def next_look_s(self) -> float | None:
        """When to look again though nothing happens: a level is left by time passing. None if that can wait."""
        return LOOK_EVERY_S if self._ladders.level > Level.CALM else None

    def fit_share(self) -> float:
        """Of the tokens that a `kv_policy` of budget `fit` may keep, how many one that comes now may."""
        return self._config.longest_share if self._ladders.does(Level.COMPRESS) else 1.0

    def compress(self) -> None:
        """Shrink a running context that allows it, if the level asks for that. Call it once a step."""
        if self.compressor is not None and self._ladders.does(Level.COMPRESS):
            self.compressor.shrink_longest()

    def admit(self, request: Request) -> None:
        """Whether a request may join the queue.

        Raises:
            Overloaded: it may not.
        """
        scheduler, namespace = self._scheduler, request.scope.namespace
        num_tokens = int(request.prompt.size)
        wanted = request.max_tokens if request.params.max_tokens is not None else scheduler.expected_output(request)
        ask = Ask(
            namespace,
            self._gate.service_class(namespace),
            num_tokens,
            request.peak_blocks or self._cache.peak_blocks(num_tokens + wanted, scheduler.relief.prefill_budget),
        )
        refused_before = self._gate.num_refused.total()
        try:
            self._gate.check(ask, self._line(), self._ladders.causes(Level.HOLD))
        finally:
            if self._gate.num_refused.total() > refused_before:
                self._write_report(self.report.signals, self.report.rss_bytes)

    def look(self) -> None:
        """Measure, and go to another level if it is time to; a few times a second, however often it is called."""
        if self._clock() < self._due_at:
            return
        self._due_at = self._clock() + LOOK_EVERY_S
        rss_bytes = process_memory.rss_bytes()
        signals = self._measure(rss_bytes)
        change = self._ladders.look(signals)
        if change is not None:
            self._change(change)
        if self._ladders.does(Level.EVICT):
            self._cache.keep_free(int(self._config.free_share * self._cache.num_blocks))
        self._write_report(signals, rss_bytes)

    def _measure(self, rss_bytes: int) -> Signals:
        cache, scheduler = self._cache, self._scheduler
        self._count("failures", cache.stats.num_failed_allocations, self._failures)
        self._count("preemptions", scheduler.num_short, self._preemptions)
        self._count("throttles", process_memory.num_throttles(), self._throttles)
        if not scheduler.waiting:
            self._starts = self._no_starts()  # how fast they could start is not known
        for kind, rate in self._starts.items():
            self._count(f"{kind} starts", scheduler.num_started[kind.rank], rate)
        return Signals(
            pool=cache.num_held_blocks / cache.num_blocks,
            failures=self._failures.per_s,
            preemptions=self._preemptions.per_s,
            queue=self._longest_wait(),
            expected=self._expected_wait(),
            memory=rss_bytes / self._memory_limit if self._memory_limit else 0.0,
            throttles=self._throttles.per_s,
        )

    def _count(self, name: str, total: int, rate: Rate) -> None:
        rate.add(total - self._counted[name])
        self._counted[name] = total

    def _longest_wait(self) -> float:
        """Of the samples that never ran: how long one has waited, over what its class should wait at most."""
        oldest: dict[ServiceClass, float] = {}
        for sample in self._scheduler.waiting:  # in order of arrival
            kind = self._gate.service_class(sample.request.scope.namespace)
            if kind not in oldest and not sample.was_preempted:
                oldest[kind] = sample.request.arrived_at
                if len(oldest) == len(ServiceClass):
                    break
        now, classes = self._clock(), self._config.classes
        return max(((now - arrived) / classes[kind].max_wait_s for kind, arrived in oldest.items()), default=0.0)

    def _expected_wait(self) -> float:
        """Of one that comes now to a class in which others wait: how long, over what it should wait at most."""
        line, classes = self._line(), self._config.classes
        kinds = {self._gate.service_class(name) for name in line.waiting}
        return max((self._gate.wait_s(kind, line) / classes[kind].max_wait_s for kind in kinds), default=0.0)

    def _line(self) -> Line:
        scheduler = self._scheduler
        return Line(
            scheduler.num_queued,
            scheduler.num_queued_tokens,
            len(scheduler.running),
            {kind: rate.count for kind, rate in self._starts.items()},
            self._starts[ServiceClass.STANDARD].seconds,
            self.report.signals.memory,
        )

    def _no_starts(self) -> dict[ServiceClass, Rate]:
        return {kind: Rate(STARTS_WINDOW_S, self._clock) for kind in ServiceClass}

    def _change(self, change: LevelChange) -> None:
        logger.warning(
            "pressure level %d (%s), was %d; memory's %d: %s",
            change.after,
            change.after.name.lower(),
            change.before,
            change.memory,
            change.signals,
        )
        whole, smaller = self._scheduler.whole_relief, self._ladders.does(Level.SHRINK)
        self._scheduler.relief = Relief(
            max_running=max(1, int(self._config.batch_share * whole.max_running)) if smaller else whole.max_running,
            prefill_budget=max(self._cache.block_size, int(self._config.prefill_share * whole.prefill_budget))
            if smaller
            else whole.prefill_budget,
            reserves_outputs=self._ladders.memory.does(Level.HOLD),  # where there is room, nobody need wait for it
            makes_way=self._ladders.does(Level.PREEMPT),
        )
        for listener in self.listeners:
            listener(change)

    def _write_report(self, signals: Signals, rss_bytes: int) -> None:
        self.report = PressureReport(
            self._ladders.level,
            signals,
            dict(self._ladders.num_entered),
            self._ladders.seconds(),
            dict(self._gate.num_refused),
            rss_bytes,
            self._memory_limit,
            0 if self.compressor is None else self.compressor.num_compressed,
            self._ladders.memory.level,
        )
