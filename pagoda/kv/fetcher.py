"""Fetcher: the threads that load fetches, and what they expect of the tiers.

quick tiers     lookup ──> from the front while somebody waits ──> from the back
slow tiers                                                         lookup ──> from the back
early           lookup ──> from the front, between the pieces of all others
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from pagoda.errors import TierUnavailable
from pagoda.kv.fetch import Fetch, Piece
from pagoda.kv.tiers.records import Found, RecordId, Target, aligned_empty
from pagoda.kv.transfer import ByteRows, Lane
from pagoda.kv.workers import Workers

logger = logging.getLogger(__name__)

_PIECE_BYTES = 8 << 20
_STAGED_BYTES = 1 << 30
_EARLY_BYTES = _STAGED_BYTES // 2  # of those, at most so many while an early fetch loads more
_FETCH_THREADS = 8
_FIRST_PIECE = 1 / 20
_LEAST_GAIN = 1 / 20
_MARGIN = 1.2


class Fetcher:
    """Loads fetches on a few threads. What arrived and was not taken yet is bounded over all of them.

    Args:
        lanes: the tiers, fastest first.
        block_bytes: payload of a record.
        num_groups: records per block.
        arrived: set whenever a fetch has news.
        clock: seconds, for fetches.
    """

    def __init__(
        self,
        lanes: list[Lane],
        block_bytes: int,
        num_groups: int,
        arrived: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lanes = lanes
        self._clock = clock
        self._arrived = arrived
        self._num_groups = num_groups
        self._block_bytes = block_bytes
        self._bytes = block_bytes * num_groups
        self._workers = Workers(_FETCH_THREADS, "pagoda-fetch")
        self._staged = 0
        self._num_urgent = 0  # fetches that are loading and not early
        self._room = threading.Condition()

    def fetch(
        self,
        ids: Sequence[Sequence[RecordId]],
        recompute_s: float,
        patience_s: float,
        lanes: Sequence[Lane] | None = None,
    ) -> Fetch:
        """Start to load what of these blocks is worth it. It ends with `end`.

        Args:
            ids: for each block its record in every group.
            recompute_s: seconds that computing all of them would take.
            patience_s: seconds that the first piece may take while somebody waits, looking up included.
            lanes: those that may be asked, fastest first; None: all.
        """
        asked = self.lanes if lanes is None else lanes
        fetch = Fetch(ids, recompute_s / len(ids), patience_s, len(ids), asked, clock=self._clock)
        if not self._quick(fetch):
            fetch.meeting = self._guess(fetch, fetch.lanes)
            fetch.hedged.set()
        self._submit(fetch)
        return fetch

    def fetch_early(self, ids: Sequence[Sequence[RecordId]], lanes: Sequence[Lane]) -> Fetch:
        """Start to load what these lanes have of these blocks, for a request that will `begin` later, or `end` it."""
        fetch = Fetch(ids, 0.0, math.inf, len(ids), lanes, is_early=True, clock=self._clock)
        self._submit(fetch)
        return fetch

    def begin(self, fetch: Fetch, block_s: float, patience_s: float) -> None:
        """The request of an early fetch starts."""
        with self._room:
            fetch.begin(block_s, patience_s)
            self._num_urgent += not fetch.done.is_set()
            self._room.notify_all()

    def _submit(self, fetch: Fetch) -> None:
        with self._room:
            self._num_urgent += not fetch.is_early
        self._workers.submit(lambda: self._run(fetch))

    def taken(self, fetch: Fetch, num_blocks: int) -> None:
        """So many blocks that arrived are needed no more."""
        with self._room:
            num_bytes = min(fetch.charged, num_blocks * self._bytes)
            fetch.charged -= num_bytes
            self._staged -= num_bytes
            self._room.notify_all()

    def end(self, fetch: Fetch) -> None:
        """Stop loading; what arrived is needed no more."""
        with self._room:
            fetch.cancelled.set()
            self._staged -= fetch.charged
            fetch.charged = 0
            self._room.notify_all()

    def end_threads(self) -> None:
        """Let the threads end; waits for none, and takes no lock, as `Lane.end_threads`."""
        self._workers.close()

    # -- predictions -------------------------------------------------------------------------------------------------

    def _quick(self, fetch: Fetch) -> list[Lane]:
        """The lanes whose answer can be waited for."""
        return [lane for lane in fetch.lanes if lane.lookup_speed.predict_s(0, 1) <= fetch.patience_s]

    def _load_s(self, lane: Lane, num_blocks: int) -> float:
        return lane.load_speed.predict_s(num_blocks * self._bytes, 1)

    def _guess(self, fetch: Fetch, lanes: Sequence[Lane]) -> int:
        """Where the first lane that lately had most of what it was asked for would meet the front, if it has all."""
        end = len(fetch.ids)
        for lane in lanes:
            if lane.is_available and lane.found_share > 0.5:
                return end - self._from_back(fetch, lane, end, end, lane.lookup_speed.predict_s(0, 1))
        return end

    def _pays_to_ask(self, fetch: Fetch, lane: Lane) -> bool:
        """Whether a lane could bring anything that matters before all is computed, or patience ends."""
        least = max(1, int(_LEAST_GAIN * len(fetch.ids)))
        left_s = (len(fetch.ids) - fetch.front) * fetch.block_s
        return lane.lookup_speed.predict_s(0, 1) + self._load_s(lane, least) < max(left_s, fetch.patience_s)

    def _from_back(self, fetch: Fetch, lane: Lane, stop: int, most: int, delay_s: float = 0.0) -> int:
        """How many blocks before `stop` one load could bring before the front is there; none if too few to matter."""
        front = fetch.front
        low, high = 0, max(0, min(most, int(stop - front)))
        while low < high:
            size = (low + high + 1) // 2
            if delay_s + _MARGIN * self._load_s(lane, size) <= (stop - size - front) * fetch.block_s:
                low = size
            else:
                high = size - 1
        least = 1 if fetch.num_loaded else _LEAST_GAIN * len(fetch.ids)
        return low if low >= least else 0

    def _piece(self, lane: Lane, size: int, most: int) -> int:
        """The size of a load: as given, or larger while it is latency that takes the time."""
        while size < most and self._load_s(lane, 2 * size) < 1.5 * self._load_s(lane, size):
            size *= 2
        return min(size, most)

    # -- on a fetch thread -------------------------------------------------------------------------------------------

    def _run(self, fetch: Fetch) -> None:
        try:
            quick = self._quick(fetch)
            left = self._load_from(quick, fetch, set(range(len(fetch.ids))))
            slow = [lane for lane in fetch.lanes if lane not in quick]
            if slow and left and not fetch.cancelled.is_set():
                self._hedge(fetch, self._guess(fetch, slow))
                self._load_from(slow, fetch, left)
        except Exception:
            logger.exception("a restore failed")
        finally:
            with self._room:
                fetch.done.set()
                self._num_urgent -= not fetch.is_early
                self._room.notify_all()
            self._arrived.set()

    def _hedge(self, fetch: Fetch, meeting: int) -> None:
        fetch.meeting = meeting  # before the event: who sees the one must see the other
        if not fetch.hedged.is_set():
            fetch.hedged.set()
            self._arrived.set()

    def _load_from(self, lanes: Sequence[Lane], fetch: Fetch, wanted: set[int]) -> set[int]:
        """Load what these lanes have of the wanted blocks, as far as it pays; returns those that did not come."""
        there = self._where(lanes, fetch, wanted)
        if fetch.leading is None:
            fetch.leading = [lane for lane in itertools.takewhile(bool, there) if lane]
        low, high = 0, len(there)
        largest = max(1, _PIECE_BYTES // self._bytes)
        step = min(largest, max(1, int(sum(lane is not None for lane in there) * _FIRST_PIECE)))
        while not fetch.cancelled.is_set():
            low = max(low, fetch.least_front)
            while low < high and there[high - 1] is None:
                high -= 1
            if low >= high:
                break
            start, stop = self._from_front(fetch, there, low, high, step)
            if start == stop:
                lane = there[high - 1]
                assert lane is not None
                run = next((i for i in range(high - 1, low - 1, -1) if there[i] is not lane), low - 1)
                size = self._from_back(fetch, lane, high, high - 1 - run)
                self._hedge(fetch, high - size if size else len(there))
                start, stop = high - self._piece(lane, min(step, size), size), high
            if start == stop:
                for slower, count in Counter(filter(None, there[low:high])).items():
                    slower.tally.add("slower", count)
                    fetch.num_slower += count
                break
            lane = there[start]
            assert lane is not None
            blocks = self._load(lane, fetch, start, stop)
            wanted -= blocks.keys()
            there[start:stop] = [None] * (stop - start)
            if start == low and len(blocks) == stop - start:
                low = stop
            if not lane.is_available:
                there = [None if other is lane else other for other in there]
            step = min(largest, 2 * step)
            fetch.num_failed += stop - start - len(blocks)
            if blocks:
                fetch.num_loaded += len(blocks)
                fetch.pieces.put(Piece(lane, blocks))
                self._arrived.set()
        return wanted

    def _from_front(
        self, fetch: Fetch, there: Sequence[Lane | None], low: int, high: int, step: int
    ) -> tuple[int, int]:
        """The next load while somebody waits; an empty one if it would come too late, or the front is nowhere."""
        if fetch.is_early:
            low = next(i for i in range(low, high) if there[i] is not None)
        lane = there[low]
        if lane is None or fetch.hedged.is_set():
            return low, low
        end = next((i for i in range(low, high) if there[i] is not lane), high)
        stop = low + self._piece(lane, min(step, end - low), end - low)
        if fetch.elapsed_s + self._load_s(lane, stop - low) > fetch.worth_waiting_s(fetch.num_loaded):
            return low, low
        return low, stop

    def _where(self, lanes: Sequence[Lane], fetch: Fetch, wanted: set[int]) -> list[Lane | None]:
        """For each block the first of these lanes that has it in every group.

        A lane that could not bring anything before all is computed is not asked.
        """
        found: list[Lane | None] = [None] * len(fetch.ids)
        for lane in lanes:
            blocks = sorted(block for block in wanted if found[block] is None and block >= fetch.least_front)
            if not blocks or not self._charge(fetch, 0):
                break
            if not self._pays_to_ask(fetch, lane):
                lane.tally.add("slower", len(blocks))
                fetch.skipped.append(lane.name)
                continue
            flat = [record for block in blocks for record in fetch.ids[block]]
            try:
                there = lane.lookup(flat, fetch.cancelled)
            except TierUnavailable:
                fetch.skipped.append(lane.name)
                continue
            for index, block in enumerate(blocks):
                records = there[index * self._num_groups : (index + 1) * self._num_groups]
                if all(isinstance(record, Found) for record in records):
                    found[block] = lane
            fetch.num_found += sum(found[block] is lane for block in blocks)
        return found

    def _load(self, lane: Lane, fetch: Fetch, start: int, stop: int) -> dict[int, ByteRows]:
        """Those of these blocks that verify, whole in every group."""
        if not self._charge(fetch, stop - start):
            return {}
        shape = stop - start, self._num_groups, self._block_bytes
        payloads = aligned_empty(math.prod(shape)).reshape(shape)
        targets = [
            Target(record, payloads[i, group])
            for i, block in enumerate(fetch.ids[start:stop])
            for group, record in enumerate(block)
        ]
        try:
            results = lane.load(targets, fetch.cancelled)
        except TierUnavailable:
            self.taken(fetch, stop - start)
            return {}
        good = [isinstance(result, Found) and result.num_bytes == self._block_bytes for result in results]
        whole = np.array(good).reshape(-1, self._num_groups).all(axis=1)
        blocks = {start + int(i): payloads[i] for i in np.flatnonzero(whole)}
        self.taken(fetch, stop - start - len(blocks))
        return blocks

    def _charge(self, fetch: Fetch, num_blocks: int) -> bool:
        """Wait for room for blocks that will arrive, and for its turn; false if the fetch was cancelled."""
        num_bytes = num_blocks * self._bytes

        def is_due() -> bool:
            if fetch.is_early and self._num_urgent:
                return False
            most = _EARLY_BYTES if fetch.is_early else _STAGED_BYTES
            return not self._staged or self._staged + num_bytes <= most

        with self._room:
            self._room.wait_for(lambda: fetch.cancelled.is_set() or is_due())
            if fetch.cancelled.is_set():
                return False
            self._staged += num_bytes
            fetch.charged += num_bytes
            return True
