"""The gate: what is refused, when, and what it is told. And the numbers it goes by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from pagoda.engine.pressure.admission import MAX_RETRY_S, MIN_RETRY_S, Ask, Gate, Line, Refusal
from pagoda.engine.pressure.config import ClassLimits, PressureConfig
from pagoda.engine.pressure.ladder import MEMORY, WAITING, Cause
from pagoda.engine.tenants import AGED_EVERY, PROMOTE_S, ServiceClass, Share
from pagoda.errors import MemoryPressure, Overloaded
from pagoda.kv.allocator import Allocator
from pagoda.kv.tenants import Tenants

CONFIG = PressureConfig(
    max_queued_tokens=1000,
    longest_share=0.25,
    classes={
        ServiceClass.INTERACTIVE: ClassLimits(5.0, 10),
        ServiceClass.STANDARD: ClassLimits(20.0, 10),
        ServiceClass.BATCH: ClassLimits(100.0, 30),
    },
)
CLASSES = {"now": ServiceClass.INTERACTIVE, "later": ServiceClass.BATCH}
STARTS = {ServiceClass.INTERACTIVE: 10.0, ServiceClass.STANDARD: 6.0, ServiceClass.BATCH: 3.0}  # of ten seconds
LINE = Line(Counter(), 0, num_running=3, starts=STARTS, seconds=9.5, memory=0.0)
NOTHING: dict[ServiceClass, float] = dict.fromkeys(ServiceClass, 0.0)
BOTH = frozenset({MEMORY, WAITING})


class Door:
    """A gate of a pool of 100 blocks, of which tenant a is to have a half and b a quarter."""

    def __init__(self, shares: dict[str, Share] | None = None) -> None:
        self.allocator = Allocator(100)
        self.tenants = Tenants(self.allocator, shares or {})
        self.gate = Gate(CONFIG, CLASSES, self.tenants, 100)

    def hold(self, name: str, count: int) -> None:
        self.allocator.allocate(count, self.tenants.of(name).index)

    def ask(self, line: Line = LINE, holding: Collection[Cause] = BOTH, **ask: Any) -> Refusal | None:
        """Why it is refused; None if it may enter."""
        name = ask.pop("name", "")
        asked = Ask(name, self.gate.service_class(name), ask.pop("num_tokens", 10), ask.pop("num_blocks", 5))
        before = Counter(self.gate.num_refused)
        try:
            self.gate.check(asked, line, holding)
        except Overloaded as error:
            self.error = error
        else:
            assert self.gate.num_refused == before
            return None
        assert self.gate.num_refused == before + Counter([Refusal(self.error.reason)])
        assert MIN_RETRY_S <= self.error.retry_after_s <= MAX_RETRY_S
        return Refusal(self.error.reason)


def waiting(num_tokens: int = 50, **counts: int) -> Line:
    return replace(LINE, waiting=Counter(counts), num_tokens=num_tokens)


def test_below_hold_only_the_queues_memory_counts() -> None:
    door = Door()
    crowd = replace(waiting(nobody=500), memory=2.0, starts=NOTHING)
    assert door.ask(crowd, (), num_blocks=100) is None
    assert door.ask(waiting(num_tokens=995), ()) is Refusal.QUEUE_FULL
    assert door.error.retry_after_s == MAX_RETRY_S
    assert isinstance(door.error, MemoryPressure)


def test_nothing_is_refused_while_nobody_is_there() -> None:
    nobody = replace(LINE, num_running=0, memory=2.0, num_tokens=5000)
    assert Door().ask(nobody, num_blocks=100, num_tokens=2000) is None


def test_while_only_waiting_holds_what_would_take_much_memory_is_no_matter() -> None:
    door = Door()
    assert door.ask(replace(LINE, memory=0.99), {WAITING}, num_blocks=90) is None
    assert door.ask(waiting(a=10), {WAITING}) is Refusal.QUEUE_FULL
    assert door.ask(waiting(a=10), {MEMORY}) is Refusal.QUEUE_FULL
    assert door.ask(LINE, {MEMORY}, num_blocks=90) is Refusal.TOO_LONG


def test_a_request_longer_than_its_part_of_the_pool_is_refused_unless_its_share_has_the_room() -> None:
    assert Door().ask(num_blocks=25) is None
    door = Door()
    assert door.ask(num_blocks=26) is Refusal.TOO_LONG
    assert "26 KV blocks" in str(door.error)
    assert "more than 25" in str(door.error)
    door = Door({"a": Share(guaranteed=0.5)})
    assert door.ask(name="a", num_blocks=40) is None
    door.hold("a", 20)
    assert door.ask(name="a", num_blocks=40) is Refusal.TOO_LONG


def test_each_class_has_a_queue_of_its_own() -> None:
    door = Door()
    assert door.ask(waiting(now=3, a=5, b=4, later=10)) is None
    assert door.ask(waiting(now=3, a=5, b=5)) is Refusal.QUEUE_FULL
    assert "10 standard requests wait already" in str(door.error)
    assert door.ask(waiting(a=9, b=9, later=29), name="now") is None
    assert door.ask(waiting(later=30), name="later") is Refusal.QUEUE_FULL


def test_the_estimated_wait_counts_those_above_and_what_they_leave() -> None:
    """Two start in a second; of those, standard and batch have one, and batch alone 0.42."""
    door = Door()
    line = waiting(now=4, a=6, later=20)
    waits = {kind: door.gate.wait_s(kind, line) for kind in ServiceClass}
    assert waits == {
        ServiceClass.INTERACTIVE: 4 / (20 / 9.5),
        ServiceClass.STANDARD: 4 / 2.0 + 6 / (10 / 9.5),
        ServiceClass.BATCH: 10 / 2.0 + 20 / (4 / 9.5),
    }
    slow = replace(line, seconds=95.0)
    assert door.ask(slow, name="now") is Refusal.WAIT_TOO_LONG
    assert door.error.retry_after_s == 19 - 5
    assert "about 19 s, and 5 s is the most for interactive requests" in str(door.error)
    assert door.ask(slow) is Refusal.WAIT_TOO_LONG
    assert door.ask(line, name="later") is None
    assert door.ask(replace(waiting(later=20), seconds=1e9), name="now") is None  # nobody is before it
    assert door.ask(replace(line, starts=NOTHING), name="now") is None  # nobody has ever started
    assert door.ask(replace(line, seconds=1e9), name="now") is Refusal.WAIT_TOO_LONG
    assert "more than an hour" in str(door.error)
    assert door.error.retry_after_s == MAX_RETRY_S


def test_a_class_of_which_none_starts_waits_until_it_is_promoted() -> None:
    door = Door()
    line = replace(waiting(now=2, later=12), starts=NOTHING | {ServiceClass.INTERACTIVE: 20.0}, seconds=10.0)
    assert door.gate.wait_s(ServiceClass.BATCH, line) == PROMOTE_S + 12 * AGED_EVERY / 2.0
    few = replace(line, waiting=Counter(now=2, later=3))
    assert door.gate.wait_s(ServiceClass.BATCH, few) == 2 / 2.0 + 3 / (1 / 10.0)


def test_a_tenant_over_its_share_may_have_no_more_than_that_of_the_queue() -> None:
    door = Door({"a": Share(weight=3), "b": Share(weight=1)})
    door.hold("a", 80)
    door.hold("b", 10)
    assert door.tenants.entitlements() == pytest.approx([20, 75, 25])  # the commons use nothing
    assert door.ask(waiting(a=6), name="a") is None
    assert door.ask(waiting(a=7), name="a") is Refusal.OVER_QUOTA
    assert door.ask(waiting(b=7), name="b") is None  # below its share it may use the whole queue
    assert door.ask(waiting(a=7), name="b") is None


def test_a_tenant_alone_is_never_over_its_share() -> None:
    door = Door({"a": Share(weight=1), "b": Share(weight=9)})
    door.hold("a", 100)
    assert door.ask(waiting(a=9), name="a") is None


def test_at_its_memory_limit_the_process_takes_nothing_new() -> None:
    door = Door()
    assert door.ask(replace(LINE, memory=0.97)) is None
    assert door.ask(replace(LINE, memory=0.99)) is Refusal.OUT_OF_MEMORY
