"""The gate before the queue: who may wait, for how long, and who is told to come back later.

    request ──> room in the queue's memory? ──┬── both ladders below "hold" ──> queue
                                              ├── memory's at "hold": process within its limit? request not too long?
                                              └── either at "hold": its class's queue not full? its tenant not ahead of
                                                  its share? would it start in time?

A refusal says why and when to come back. Nothing is refused while nothing waits or runs: whatever can run at all, can
then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pagoda.engine.pressure.config import PressureConfig
from pagoda.engine.pressure.ladder import MEMORY, Cause, Level
from pagoda.engine.tenants import AGED_EVERY, PROMOTE_S, ServiceClass
from pagoda.errors import Overloaded
from pagoda.kv.tenants import Tenants

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


class Refusal(StrEnum):
    """Why a request is not taken now."""

    QUEUE_FULL = "queue_full"
    WAIT_TOO_LONG = "wait_too_long"
    TOO_LONG = "too_long"
    OVER_QUOTA = "over_quota"
    OUT_OF_MEMORY = "out_of_memory"


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request wants: its tenant and class, prompt tokens, and the most blocks it may come to hold."""

    namespace: str
    service_class: ServiceClass
    num_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Line:
    """Who is there already.

    Attributes:
        waiting: samples in the queue, by namespace.
        num_tokens: of the waiting samples' prompts.
        num_running: samples that hold KV.
        starts: how many of each class began to run in the last `seconds`.
        memory: as in Signals.
    """

    waiting: Counter[str]
    num_tokens: int
    num_running: int
    starts: Mapping[ServiceClass, float]
    seconds: float
    memory: float

    @property
    def starts_per_s(self) -> float:
        """How many begin to run in a second; 0 also while that is not known."""
        return sum(self.starts.values()) / self.seconds if self.seconds else 0.0


class Gate:
    """Decides, and counts what it refuses. Changes nothing else.

    Args:
        class_of: the class of each tenant that has one.
        tenants: their shares.
        num_blocks: of the pool.
    """

    def __init__(
        self, config: PressureConfig, class_of: Mapping[str, ServiceClass], tenants: Tenants, num_blocks: int
    ) -> None:
        self.num_refused: Counter[Refusal] = Counter()
        self._config = config
        self._class_of = class_of
        self._tenants = tenants
        self._num_blocks = num_blocks

    def service_class(self, namespace: str) -> ServiceClass:
        """The class of a tenant."""
        return self._class_of.get(namespace, ServiceClass.STANDARD)

    def check(self, ask: Ask, line: Line, holding: Collection[Cause]) -> None:
        """Whether a request may join the line.

        Args:
            holding: the causes whose ladders are at "hold".

        Raises:
            Overloaded: it may not.
        """
        if not line.waiting and not line.num_running:
            return
        if line.num_tokens + ask.num_tokens > self._config.max_queued_tokens:
            self._refuse(Refusal.QUEUE_FULL, "the prompts in the queue take all the memory they may", MAX_RETRY_S)
        if MEMORY in holding:
            if line.memory >= self._config.ladder.thresholds.memory[Level.PREEMPT - 1]:
                self._refuse(Refusal.OUT_OF_MEMORY, "the server's process is at its memory limit", MAX_RETRY_S)
            self._check_size(ask)
        if holding:
            self._check_queue(ask, line)

    def _check_size(self, ask: Ask) -> None:
        most = int(self._config.longest_share * self._num_blocks)
        if ask.num_blocks > most and not self._tenants.is_within(ask.namespace, ask.num_blocks):
            self._refuse(
                Refusal.TOO_LONG,
                f"prompt and output may need {ask.num_blocks} KV blocks, and requests of more than {most} are not "
                "taken while the server is this busy: ask for fewer tokens",
                MAX_RETRY_S,
            )

    def _check_queue(self, ask: Ask, line: Line) -> None:
        limits = self._config.classes[ask.service_class]
        same = sum(count for name, count in line.waiting.items() if self.service_class(name) is ask.service_class)
        rate = line.starts_per_s
        if same >= limits.max_waiting:
            self._refuse(
                Refusal.QUEUE_FULL,
                f"{same} {ask.service_class} requests wait already",
                1 / rate if rate else MAX_RETRY_S,
            )
        own = line.waiting[ask.namespace]
        if own >= self._most_waiting(ask.namespace, limits.max_waiting):
            self._refuse(
                Refusal.OVER_QUOTA,
                f"this tenant uses more than its share of the server, and has {own} requests waiting",
                own / rate if rate else MAX_RETRY_S,
            )
        wait_s = self.wait_s(ask.service_class, line)
        if wait_s > limits.max_wait_s:
            about = f"about {wait_s:.0f} s" if wait_s < 3600 else "more than an hour"
            self._refuse(
                Refusal.WAIT_TOO_LONG,
                f"it would wait {about}, and {limits.max_wait_s:g} s is the most for {ask.service_class} requests",
                wait_s - limits.max_wait_s,
            )

    def _most_waiting(self, namespace: str, most: int) -> int:
        """How many of a queue's `most` places a tenant may have: its part of them, if it holds more than it is due."""
        if not self._tenants.has_shares:
            return most
        account = self._tenants.of(namespace).account
        due = self._tenants.entitlements()[account]
        return max(1, int(due / self._num_blocks * most)) if self._tenants.num_held_by(account) > due else most

    def wait_s(self, service_class: ServiceClass, line: Line) -> float:
        """The estimated wait of a request that joins now. 0 until any has started: nothing is known then.

        Those of higher classes start first, and more of them will come: what lately was left for its class and those
        below is what its class gets (one start more than were seen: to have seen none does not mean that there are
        none). If that is little, it waits until it is promoted, and those before it.
        """
        rate = line.starts_per_s
        if not rate:
            return 0.0
        rank = service_class.rank
        above = sum(count for name, count in line.waiting.items() if self.service_class(name).rank < rank)
        same = sum(count for name, count in line.waiting.items() if self.service_class(name).rank == rank)
        left = (1 + sum(count for kind, count in line.starts.items() if kind.rank >= rank)) / line.seconds
        return min(above / rate + same / left, PROMOTE_S + same * AGED_EVERY / rate)

    def _refuse(self, reason: Refusal, why: str, retry_after_s: float) -> None:
        self.num_refused[reason] += 1
        raise Overloaded(
            f"The server is overloaded: {why}.",
            reason=reason,
            retry_after_s=min(MAX_RETRY_S, max(MIN_RETRY_S, retry_after_s)),
        )
