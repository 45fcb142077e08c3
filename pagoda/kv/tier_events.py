"""TierEvents: which blocks a process's own tiers keep, told to routers beside those of the pool.

    a block is queued for a tier, or came from one ──> expected ── it is there ──> BlockStored(medium) ──> told
                                                        │ not after a minute                               │ it is gone
                                                        v                                                  v
                                                      forgotten                                    BlockRemoved(medium)

A thread for each tier looks each second whether what is expected came, and looks at a part of what was told, so that
all of it is looked at in ten seconds. So no tier has to know of events, and what one loses by itself, to damage, expiry
or another's hand, is told too. A router that goes by what went a moment ago sends a request where it must be computed:
that costs time and nothing else. Tiers that several processes share are not told of: every replica has what is in them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from pagoda.errors import TierError
from pagoda.kv.events import BlockEvent, BlockRemoved, BlockStored
from pagoda.kv.tiers.records import Found, RecordId
from pagoda.kv.transfer import Lane

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
MAX_EXPECTED = 1 << 16
_EXPECTED_S = 60.0
_ROUND_LOOKS = 10  # in so many looks all that was told is looked at
_LEAST_LOOKED_AT = 256


Tell = Callable[[Callable[[], Sequence[BlockEvent]]], None]


class TierEvents:
    """Tells of what tiers have, until it is closed.

    Args:
        media: what to call each lane's tier; those that are not named are not told of.
        tell: see BlockEvents.
    """

    def __init__(self, media: Mapping[Lane, str], tell: Tell) -> None:
        self._watches = [_Watch(lane, medium, tell) for lane, medium in media.items()]

    def expect(self, records: Sequence[tuple[RecordId, BlockStored]]) -> None:
        """These records may be in the tiers soon, or are: what was told of their blocks in the pool."""
        for watch in self._watches:
            watch.expect(records)

    def all(self) -> list[BlockEvent]:
        """See Below."""
        return [event for watch in self._watches for event in watch.all()]

    def forget(self) -> None:
        """See Below."""
        for watch in self._watches:
            watch.forget()

    def close(self) -> None:
        """Tell no more. Waits for no tier."""
        for watch in self._watches:
            watch.close()


class _Watch:
    """One tier, and the thread that looks at it."""

    def __init__(self, lane: Lane, medium: str, tell: Tell) -> None:
        self._lane = lane
        self._medium = medium
        self._tell = tell
        self._lock = threading.Lock()
        self._expected: OrderedDict[RecordId, tuple[float, BlockStored]] = OrderedDict()  # the oldest first
        self._told: OrderedDict[RecordId, BlockStored] = OrderedDict()  # looked at longest ago first
        self._closing = threading.Event()
        threading.Thread(target=self._run, name=f"pagoda-events-{lane.name}", daemon=True).start()

    def expect(self, records: Sequence[tuple[RecordId, BlockStored]]) -> None:
        now = time.monotonic()
        with self._lock:
            for record, stored in records:
                if record not in self._told:
                    self._expected[record] = now, replace(stored, medium=self._medium)
                    self._expected.move_to_end(record)
            while len(self._expected) > MAX_EXPECTED:
                self._expected.popitem(last=False)

    def all(self) -> list[BlockEvent]:
        with self._lock:
            return list(self._told.values())

    def forget(self) -> None:
        with self._lock:
            self._expected.clear()
            self._told.clear()

    def close(self) -> None:
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(LOOK_EVERY_S):
            try:
                if self._lane.is_available:
                    self.look()
            except (TierError, OSError) as error:
                logger.debug("the %s tier was not looked at: %s", self._lane.name, error)
            except Exception:
                logger.exception("what the %s tier has is not told any more", self._lane.name)
                return

    def look(self) -> None:
        """See what came and what went, and tell."""
        with self._lock:
            expected = dict(self._expected)
            count = max(_LEAST_LOOKED_AT, -(-len(self._told) // _ROUND_LOOKS))
            told = dict(islice(self._told.items(), count))
        there = self._there([*expected, *told])
        self._tell(lambda: self._news(expected, told, there))

    def _news(
        self,
        expected: Mapping[RecordId, tuple[float, BlockStored]],
        told: Mapping[RecordId, BlockStored],
        there: Collection[RecordId],
    ) -> list[BlockEvent]:
        """What is new of that which was expected and told when it was looked for, and is not forgotten by now."""
        overdue = time.monotonic() - _EXPECTED_S
        with self._lock:
            came = [record for record in expected if record in there and record in self._expected]
            for record, (since, _) in expected.items():
                if record in there or since < overdue:
                    self._expected.pop(record, None)
            went = [record for record in told if record not in there and self._told.pop(record, None) is not None]
            for record in told:
                if record in self._told:
                    self._told.move_to_end(record)
            self._told.update((record, expected[record][1]) for record in came)
        events: list[BlockEvent] = [expected[record][1] for record in came]
        if went:
            events.append(BlockRemoved(tuple(name for record in went for name in told[record].names), self._medium))
        return events

    def _there(self, records: Sequence[RecordId]) -> set[RecordId]:
        found = self._lane.tier.lookup(records) if records else []
        return {record for record, result in zip(records, found, strict=True) if isinstance(result, Found)}
