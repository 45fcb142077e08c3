"""SegmentLog: the segment files of one directory, and the room in them.

    blank   ready to be begun; one is always kept, as the place to which a victim's survivors move
    used    in the order they were begun; the last is active, that is, appended to

`make_room` begins a blank segment while there are two. With one left it cleans: a victim, the oldest as a rule, gives
its survivors (leased records, and those read since they were written) to the blank one, which becomes active, and
becomes blank itself. Each segment gets its turn and each hit buys one more round: FIFO with reinsertion, or CLOCK.

A process killed while cleaning leaves no blank segment. Then the youngest holds nothing but copies of records that the
victim still has, and is blanked at the next start: nothing is lost.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from pagoda.kv.tiers.base import Tally
from pagoda.kv.tiers.direct_io import BouncePool, align_up
from pagoda.kv.tiers.disk_lock import LOCK_NAME
from pagoda.kv.tiers.disk_segment import Damage, Geometry, Segment, Stub
from pagoda.kv.tiers.records import ByteArray, RecordId, aligned_empty

MIN_SEGMENTS = 3
_NAME = re.compile(r"segment-\d{6}\.pagoda")
_MOVE_BYTES = 4 << 20

Moves = list[tuple[Stub, Stub]]
Retire = Callable[[Segment, Moves], None]
"""Told of a victim and of its moved records; returns once nobody reads the victim nor finds records in it."""


class SegmentLog:
    """At most `max_segments` files of `geometry` in `folder`. Not thread-safe: one writer at a time.

    Attributes:
        num_segments: files that exist now, each of `segment_bytes`.
    """

    def __init__(self, folder: Path, geometry: Geometry, max_segments: int, pool: BouncePool, tally: Tally) -> None:
        self._folder = folder
        self._geometry = geometry
        self._max_segments = max_segments
        self.num_segments = 0
        self._pool = pool
        self._tally = tally
        self._blank: list[Segment] = []
        self._used: list[Segment] = []
        self._record_sequence = count(1)

    @property
    def active(self) -> Segment | None:
        """The segment that is appended to, once there is one."""
        return self._used[-1] if self._used else None

    def segments(self) -> Iterator[Segment]:
        """The segments that hold records, oldest first."""
        return iter(self._used)

    def place(self, id: RecordId, data: ByteArray, lease_until: float) -> Stub:
        """Claim room in the active segment, where `make_room` made it."""
        return self._used[-1].place(id, data, lease_until, next(self._record_sequence))

    def load(self) -> dict[RecordId, Stub]:
        """Take over what is in the folder: the newest record of each id. Raises OSError."""
        found: list[Stub] = []
        for path in sorted(self._folder.iterdir()):
            if path.name == LOCK_NAME:
                continue
            if _NAME.fullmatch(path.name) is None or not path.is_file():
                self._tally.add("foreign_files")
                continue
            self._load_segment(Segment(path, self._geometry))
        self._used.sort(key=lambda segment: segment.sequence)
        self._fit_to_budget()
        for segment in self._used:
            found.extend(segment.stubs.values())
        index: dict[RecordId, Stub] = {}
        for stub in sorted(found, key=lambda stub: stub.sequence):
            older = index.get(stub.id)
            if older is not None:
                older.segment.erase_entry(older)
                del older.segment.stubs[older.slot]
            index[stub.id] = stub
        self._record_sequence = count(max((stub.sequence for stub in found), default=0) + 1)
        self._tally.add("restored", len(index))
        return index

    def make_room(self, num_bytes: int, now: float, retire: Retire) -> bool:
        """Make the active segment one that fits `num_bytes`; False, and no record dropped, if leases leave no room.

        Raises OSError; what was in the log is still there then.
        """
        while self.active is None or not self.active.fits(num_bytes):
            while len(self._blank) < 2 and self._grow():
                pass
            if len(self._blank) >= 2:
                self._begin()
                continue
            victim = self._victim(num_bytes, now) if self._blank else None
            if victim is None:
                return False
            self._clean(victim, num_bytes, now, retire)
        return True

    def close(self) -> None:
        """Close all files."""
        for segment in self._blank + self._used:
            segment.close()

    def _load_segment(self, segment: Segment) -> None:
        self.num_segments += 1
        for item in segment.load():
            if isinstance(item, Damage):
                self._tally.add(item.reason)
            else:
                segment.stubs[item.slot] = item
        if segment.sequence:
            self._used.append(segment)
        else:
            segment.blank()
            self._blank.append(segment)

    def _fit_to_budget(self) -> None:
        """Remove surplus files, after the budget was made smaller; see that there is a blank segment."""
        while self.num_segments > self._max_segments:
            segment = self._blank.pop() if len(self._blank) > 1 or not self._used else self._used.pop(0)
            self._tally.add("evicted", len(segment.stubs))
            segment.close()
            segment.path.unlink()
            self.num_segments -= 1
        if not self._blank and self._used and not self._grow():
            copies = self._used.pop()
            copies.blank()
            self._blank.append(copies)

    def _grow(self) -> bool:
        """Add a blank segment; False if the budget, or the disk, has no room for it."""
        if self.num_segments >= self._max_segments:
            return False
        path = next(p for n in count() if not os.path.lexists(p := self._folder / f"segment-{n:06}.pagoda"))
        try:
            self._blank.append(Segment.create(path, self._geometry))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._tally.add("disk_full")
            return False
        self.num_segments += 1
        return True

    def _begin(self) -> Segment:
        """Make a blank segment the active one."""
        segment = self._blank[-1]
        segment.begin(self._used[-1].sequence + 1 if self._used else 1)
        self._used.append(self._blank.pop())
        return segment

    def _victim(self, num_bytes: int, now: float) -> Segment | None:
        """The segment to clean: an empty one, else the oldest that is mostly free of leases, else the freest; None
        if the leases of none leave `num_bytes`.
        """
        room, slots = self._geometry.data_bytes - align_up(num_bytes), self._geometry.max_records - 1
        half = self._geometry.data_bytes // 2
        candidates: list[tuple[tuple[bool, int, int], Segment]] = []
        for segment in self._used:
            leased = [_cost(stub) for stub in segment.stubs.values() if stub.lease_until > now]
            if sum(leased) <= room and len(leased) <= slots:
                rank = (bool(segment.stubs), max(sum(leased) - half, 0), segment.sequence)
                candidates.append((rank, segment))
        return min(candidates, key=lambda c: c[0])[1] if candidates else None

    def _survivors(self, victim: Segment, num_bytes: int, now: float) -> list[Stub]:
        """The records of `victim` to keep, in their order: the leased, and the hottest of the others that were hit,
        within half a segment and within what `num_bytes` leaves.
        """
        stubs = list(victim.stubs.values())
        kept = [stub for stub in stubs if stub.lease_until > now]
        room = min(self._geometry.data_bytes // 2, self._geometry.data_bytes - align_up(num_bytes)) - sum(
            map(_cost, kept)
        )
        hot = [stub for stub in stubs if stub.num_hits and stub.lease_until <= now]
        for stub in sorted(hot, key=lambda stub: -stub.num_hits):
            room -= _cost(stub)
            if room < 0:
                break
            kept.append(stub)
        return sorted(kept[: self._geometry.max_records - 1], key=lambda stub: stub.slot)

    def _clean(self, victim: Segment, num_bytes: int, now: float, retire: Retire) -> None:
        survivors = self._survivors(victim, num_bytes, now)
        target = self._begin()
        try:
            moves = self._move(survivors, target)
        except OSError:
            self._used.remove(target)
            self._blank.append(target)
            target.blank()
            raise
        self._tally.add("reinserted", len(moves))
        self._tally.add("evicted", len(victim.stubs) - len(survivors))
        retire(victim, moves)
        victim.blank()
        self._used.remove(victim)
        self._blank.append(victim)

    def _move(self, survivors: list[Stub], target: Segment) -> Moves:
        """Copy records to `target`, a few MiB at a time; those that do not verify are left behind and counted."""
        moves: Moves = []
        batch: Moves = []
        payloads: list[ByteArray] = []
        for stub in survivors:
            payload = aligned_empty(stub.num_bytes)
            if not all(stub.segment.read([stub], [payload], self._pool)):
                self._tally.add("corrupt_checksum")
                continue
            batch.append((stub, self.place(stub.id, payload, stub.lease_until)))
            payloads.append(payload)
            if sum(p.size for p in payloads) >= _MOVE_BYTES:
                target.write([new for _, new in batch], payloads, self._pool)
                moves, batch, payloads = moves + batch, [], []
        if batch:
            target.write([new for _, new in batch], payloads, self._pool)
        return moves + batch


def _cost(stub: Stub) -> int:
    return align_up(stub.num_bytes)
