"""SegmentLog: the segment files of one directory, and the room in them.

    blank   ready to be begun; one is always kept, as the place to which a victim's survivors move
    used    in the order they were begun; the last is active, that is, appended to

`make_room` begins a blank segment while there are two. With one left it cleans: a victim, the oldest as a rule, gives
its survivors to the blank one, which becomes active, and becomes blank itself. Survivors are the leased records, those
within what their owner is guaranteed, and those read since they were written. Each segment gets its turn and each hit
buys one more round: FIFO with reinsertion, or CLOCK. Where owners have shares, only whoever is most over its own has to
be read for that.

A used segment whose records all went, deleted, replaced or expired, gives its file back to the disk.

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

from pagoda.kv.keys import OwnerTag
from pagoda.kv.tiers.accounts import Accounts
from pagoda.kv.tiers.base import Tally
from pagoda.kv.tiers.direct_io import BouncePool, align_up
from pagoda.kv.tiers.disk_lock import LOCK_NAME
from pagoda.kv.tiers.disk_segment import Damage, Geometry, Segment, Stub
from pagoda.kv.tiers.records import ByteArray, Record, RecordId, aligned_empty, is_over

MIN_SEGMENTS = 3
_NAME = re.compile(r"segment-\d{6}\.pagoda")
_MOVE_BYTES = 4 << 20

Moves = list[tuple[Stub, Stub]]
Retire = Callable[[Segment, Moves], None]
"""Told of a victim and of its moved records; returns once nobody reads the victim nor finds records in it."""


class SegmentLog:
    """At most `max_segments` files of `geometry` in `folder`. Not thread-safe: one writer at a time.

    `accounts` is what each owner has, which the tier keeps up to date.

    Attributes:
        num_segments: files that exist now, each of `segment_bytes`.
    """

    def __init__(
        self,
        folder: Path,
        geometry: Geometry,
        max_segments: int,
        pool: BouncePool,
        tally: Tally,
        accounts: Accounts,
    ) -> None:
        self._folder = folder
        self._geometry = geometry
        self._max_segments = max_segments
        self.num_segments = 0
        self._pool = pool
        self._tally = tally
        self._accounts = accounts
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

    def place(self, record: Record | Stub, data: ByteArray, lease_until: float) -> Stub:
        """Claim room in the active segment, where `make_room` made it."""
        return self._used[-1].place(record, data, lease_until, next(self._record_sequence))

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

    def make_room(self, num_bytes: int, owner: OwnerTag, now: float, retire: Retire) -> bool:
        """Make the active segment one that fits `num_bytes` of an owner; False, and no record dropped, if leases and
        shares leave no room.

        Raises OSError; what was in the log is still there then.
        """
        while self.active is None or not self.active.fits(num_bytes):
            while len(self._blank) < 2 and self._grow():
                pass
            if len(self._blank) >= 2:
                self._begin()
                continue
            victim = self._victim(num_bytes, owner, now) if self._blank else None
            if victim is None:
                return False
            self._clean(victim, self._survivors(victim, num_bytes, owner, now), retire)
        return True

    def free_dead(self, now: float, retire: Retire) -> None:
        """Give the disk back the files in which no record is left, or none whose time is not over; the active stays."""
        for segment in self._used[:-1]:
            if segment.is_dead(now):
                self._tally.add("evicted", len(segment.stubs))
                retire(segment, [])
                try:
                    self._remove(segment, self._used)
                except OSError:
                    self._tally.add("stuck_files")  # tried again next time

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
                segment.hold(item)
        if segment.sequence:
            self._used.append(segment)
        else:
            segment.blank()
            self._blank.append(segment)

    def _fit_to_budget(self) -> None:
        """Remove surplus files, after the budget was made smaller; see that there is a blank segment."""
        while self.num_segments > self._max_segments:
            surplus = self._blank if len(self._blank) > 1 or not self._used else self._used
            self._tally.add("evicted", len(surplus[0].stubs))
            self._remove(surplus[0], surplus)
        if not self._blank and self._used and not self._grow():
            copies = self._used.pop()
            copies.blank()
            self._blank.append(copies)

    def _remove(self, segment: Segment, group: list[Segment]) -> None:
        """Delete the file of one of a group, the blank or the used. Raises OSError; nothing changed then."""
        segment.path.unlink()
        group.remove(segment)
        segment.close()
        self.num_segments -= 1

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

    def _victim(self, num_bytes: int, owner: OwnerTag, now: float) -> Segment | None:
        """The segment to clean: an empty one, else the oldest of which less than half should stay, else the one of
        which least should; None if none can give `num_bytes`.
        """
        room, slots = self._geometry.data_bytes - align_up(num_bytes), self._geometry.max_records - 1
        half = self._geometry.data_bytes // 2
        candidates: list[tuple[tuple[bool, int, int], Segment]] = []
        for segment in self._used:
            kept = self._kept(segment, owner, now)
            if sum(stub.cost for stub in kept) <= room and len(kept) <= slots:
                spared = self._spared(segment, kept, owner, now)
                too_much = sum(stub.cost for stub in [*kept, *spared]) - half
                candidates.append(((bool(segment.stubs), max(too_much, 0), segment.sequence), segment))
        return min(candidates, key=lambda c: c[0])[1] if candidates else None

    def _kept(self, segment: Segment, taker: OwnerTag, now: float) -> list[Stub]:
        """The records of a segment that have to stay: the leased, and of each owner what another's record may not take
        from it, those hit most.
        """
        stubs = segment.stubs.values()
        if len(self._accounts) == 1:
            return [stub for stub in stubs if stub.lease_until > now]
        spare = [self._accounts.spare(account, taker) for account in range(len(self._accounts))]
        kept: list[Stub] = []
        for stub in sorted(stubs, key=lambda stub: stub.num_hits):
            account = self._accounts.of(stub.owner)
            if stub.lease_until > now or (stub.cost > spare[account] and not is_over(stub, now)):
                kept.append(stub)
            else:
                spare[account] -= stub.cost
        return kept

    def _spared(self, segment: Segment, kept: list[Stub], taker: OwnerTag, now: float) -> list[Stub]:
        """The other records of a segment whose owner is not the one most over its share: better others go."""
        if len(self._accounts) == 1:
            return []
        loser, stay = next(iter(self._accounts.losers(taker)), None), {id(stub) for stub in kept}
        return [
            stub
            for stub in segment.stubs.values()
            if id(stub) not in stay and not is_over(stub, now) and self._accounts.of(stub.owner) != loser
        ]

    def _survivors(self, victim: Segment, num_bytes: int, taker: OwnerTag, now: float) -> list[Stub]:
        """The records of `victim` to keep, in their order: those that have to stay, and within half a segment and what
        `num_bytes` leaves those to be spared, of whoever is least over its share first, and then the others that were
        hit; of these the hottest first.
        """
        kept = self._kept(victim, taker, now)
        spared = self._spared(victim, kept, taker, now)
        chosen = {id(stub) for stub in [*kept, *spared]}
        hit = [s for s in victim.stubs.values() if s.num_hits and id(s) not in chosen and not is_over(s, now)]
        room = min(self._geometry.data_bytes // 2, self._geometry.data_bytes - align_up(num_bytes))
        room -= sum(stub.cost for stub in kept)
        for stub in sorted([*spared, *hit], key=self._worth, reverse=True):
            room -= stub.cost
            if room < 0:
                break
            kept.append(stub)
        return sorted(kept[: self._geometry.max_records - 1], key=lambda stub: stub.slot)

    def _worth(self, stub: Stub) -> tuple[float, int]:
        return -self._accounts.level(self._accounts.of(stub.owner)), stub.num_hits

    def _clean(self, victim: Segment, survivors: list[Stub], retire: Retire) -> None:
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
            batch.append((stub, self.place(stub, payload, stub.lease_until)))
            payloads.append(payload)
            if sum(p.size for p in payloads) >= _MOVE_BYTES:
                target.write([new for _, new in batch], payloads, self._pool)
                moves, batch, payloads = moves + batch, [], []
        if batch:
            target.write([new for _, new in batch], payloads, self._pool)
        return moves + batch
