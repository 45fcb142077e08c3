"""DiskTier: records in a log of segments on a local disk, warm after a restart.

    disk_segment  one file: superblock, table, payloads        disk_log   which segment is written, cleaned, blanked
    direct_io     transfers past the page cache                disk_lock  one process per directory

Nothing is ever synced: a crash of the process loses the records it was writing; a crash of the machine may also lose,
or damage, what the kernel had not yet written back. Either way a record is served whole and verified, or is a miss.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pagoda.errors import ConfigError, TierError, TierUnavailable
from pagoda.kv.keys import OwnerTag
from pagoda.kv.tiers.accounts import Accounts, Shares
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.direct_io import BouncePool, align_up
from pagoda.kv.tiers.disk_lock import DirectoryLock
from pagoda.kv.tiers.disk_log import MIN_SEGMENTS, Moves, SegmentLog
from pagoda.kv.tiers.disk_segment import RUN_BYTES, Geometry, Segment, Stub
from pagoda.kv.tiers.records import (
    ByteArray,
    Corrupt,
    Deleted,
    DeleteResult,
    Expired,
    Failed,
    Found,
    GetResult,
    LookupResult,
    Missing,
    PutResult,
    Reason,
    Record,
    RecordId,
    RecordInfo,
    Rejected,
    Stored,
    Target,
    Usage,
    found,
    is_over,
    readable,
    writable,
)

_LARGEST_USUAL_SEGMENT = 256 << 20
_USUAL_SEGMENTS = 16
_MOST_SEGMENTS = 256
_HELPERS = 3


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """One record on its way from disk to `out`; `position` is its place in the batch."""

    position: int
    stub: Stub
    out: ByteArray


class DiskTier(Tier):
    """At most `capacity_bytes` of files in `folder`, made if it is not there.

    Two locks. `_writing`: one writer at a time, since one thread fills the disk's write bandwidth; whoever changes
    the index or a file holds it. `_lock`: held for moments, by lookups, by reads that pin their segment, and while the
    index changes.

    Args:
        capacity_bytes: bound on the bytes of all files, exact at every moment. It is taken in whole segments as needed,
            and given back when nothing in one is left; `usage().used_bytes` counts segments, so watch `payload_bytes`
            for how full the tier is.
        segment_bytes: unit of eviction and of allocation; by default a power of two from 256 files' to 16 files' worth.
            Another value than at the last start leaves what was stored unread, and counted as `other_format`.
        shares: what owners have of the payloads.
        clock: Unix seconds.

    Raises ConfigError if the budget is too small for three segments or the folder cannot be used, TierUnavailable if
    another process uses it. `stats` adds restored, reinserted, foreign_files, stuck_files, disk_full, corrupt_entry,
    corrupt_segment, wrong_size, truncated_segment, truncated_record, other_format and other_checksum.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        *,
        segment_bytes: int | None = None,
        shares: Shares = MappingProxyType({}),
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__("disk")
        self._geometry = Geometry(segment_bytes or usual_segment_bytes(capacity_bytes))
        max_segments = (capacity_bytes - DirectoryLock.FILE_BYTES) // self._geometry.segment_bytes
        if max_segments < MIN_SEGMENTS or not self._geometry.valid():
            raise ConfigError(
                f"a disk tier needs {MIN_SEGMENTS} segments of whole blocks and its lock file; {capacity_bytes} bytes "
                f"have room for {max_segments} segments of {self._geometry.segment_bytes}"
            )
        self._capacity = capacity_bytes
        self._clock = clock
        self._pool = BouncePool()
        self._helpers = ThreadPoolExecutor(_HELPERS, "pagoda-disk")
        self._writing = threading.Lock()
        self._lock = threading.Condition()
        self._index: dict[RecordId, Stub] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._directory_lock = DirectoryLock(folder)
        except OSError as error:
            raise ConfigError(f"a disk tier cannot use {folder}: {error.strerror}") from error
        try:
            self._accounts = Accounts((max_segments - 1) * self._geometry.data_bytes, shares)
            self._log = SegmentLog(folder, self._geometry, max_segments, self._pool, self._tally, self._accounts)
            self._index = self._log.load()
        except OSError as error:
            self._directory_lock.close()
            raise TierUnavailable(f"the disk tier's directory {folder} cannot be read: {error}") from error
        self._payload_bytes = sum(stub.num_bytes for stub in self._index.values())
        for stub in self._index.values():
            self._accounts.charge(stub.owner, stub.cost)

    def _lookup(self, ids: Sequence[RecordId]) -> list[LookupResult]:
        now = self._clock()
        with self._lock:
            return [found(self._index.get(id), now) for id in ids]

    def _put(self, records: Sequence[Record]) -> list[PutResult]:
        payloads = [readable(record.data) for record in records]
        results: list[PutResult] = []
        batch: dict[RecordId, tuple[Stub, ByteArray]] = {}
        with self._writing:
            for record, payload in zip(records, payloads, strict=True):
                active = self._log.active
                if record.id in batch or active is None or not active.fits(payload.size):
                    results += self._write(batch)
                    batch = {}
                refusal = self._make_room(payload.size, record.owner)
                if refusal is not None:
                    results.append(refusal)
                    continue
                former = self._index.get(record.id)
                lease = record.lease_until if former is None else max(record.lease_until, former.lease_until)
                batch[record.id] = (self._log.place(record, payload, lease), payload)
            results += self._write(batch)
            self._log.free_dead(self._clock(), self._retire)
        return results

    def _get_into(self, targets: Sequence[Target]) -> list[GetResult]:
        outs = [writable(target.buffer) for target in targets]
        results: list[GetResult] = [Missing()] * len(targets)
        reads: list[_Read] = []
        now = self._clock()
        with self._lock:
            for i, target in enumerate(targets):
                stub = self._index.get(target.id)
                if stub is None:
                    continue
                if is_over(stub, now):
                    results[i] = Expired()
                    continue
                if outs[i].size < stub.num_bytes:
                    results[i] = Rejected(Reason.BUFFER_TOO_SMALL)
                    continue
                stub.num_hits += 1
                stub.segment.readers += 1
                reads.append(_Read(i, stub, outs[i][: stub.num_bytes]))
        runs = deque(_runs(reads))
        helpers = [self._helpers.submit(self._drain, runs, results) for _ in range(min(_HELPERS, len(runs) - 1))]
        self._drain(runs, results)
        for helper in helpers:
            if not helper.cancel():
                helper.result()
        for read in reads:
            if isinstance(results[read.position], Corrupt):
                self._drop(read.stub)
        return results

    def _delete(self, ids: Sequence[RecordId]) -> list[DeleteResult]:
        results: list[DeleteResult] = []
        with self._writing:
            for id in ids:
                stub = self._index.get(id)
                results.append(Missing() if stub is None else self._remove(stub))
            self._log.free_dead(self._clock(), self._retire)
        return results

    def _purge(self, owner: OwnerTag) -> int:
        with self._writing:
            try:
                for segment in self._log.segments():
                    segment.erase_owner(owner)
            except OSError as error:
                raise TierUnavailable(f"records cannot be erased from disk: {error}") from error
            with self._lock:
                stubs = [stub for stub in self._index.values() if stub.owner == owner]
                for stub in stubs:
                    self._unlink(stub)
            self._log.free_dead(self._clock(), self._retire)
        return len(stubs)

    def _set_lease(self, ids: Sequence[RecordId], until: float) -> list[LookupResult]:
        now = self._clock()
        with self._writing:
            stubs = [self._index.get(id) for id in ids]
            for stub in stubs:
                if stub is not None:
                    if is_over(stub, now):
                        stub.segment.hold(stub)
                    stub.lease_until = until
                    try:
                        stub.segment.rewrite_entry(stub)
                    except OSError as error:
                        raise TierUnavailable(f"a lease cannot be written to disk: {error}") from error
            return [found(stub, now) for stub in stubs]

    def _scan(self) -> Iterator[RecordInfo]:
        with self._lock:
            return iter([_info(stub) for stub in self._index.values()])

    def _usage(self) -> Usage:
        with self._lock:
            used = self._log.num_segments * self._geometry.segment_bytes + DirectoryLock.FILE_BYTES
            return Usage(self._capacity, used, self._payload_bytes, len(self._index), dict(self._accounts.costs))

    def _close(self) -> None:
        self._helpers.shutdown()
        self._log.close()
        self._directory_lock.close()

    def _make_room(self, num_bytes: int, owner: OwnerTag) -> Rejected | Failed | None:
        """See that the active segment fits `num_bytes` of an owner; the outcome to give where it cannot."""
        if align_up(num_bytes) > self._geometry.data_bytes:
            return Rejected(Reason.TOO_LARGE)
        try:
            made = self._log.make_room(num_bytes, owner, self._clock(), self._retire)
        except OSError as error:
            return Failed(TierError(f"no segment can be made ready on disk: {error}"))
        return None if made else Rejected(Reason.FULL)

    def _write(self, batch: dict[RecordId, tuple[Stub, ByteArray]]) -> list[PutResult]:
        """Write placed records and let them be found, in place of what they replace."""
        if not batch:
            return []
        stubs = [stub for stub, _ in batch.values()]
        try:
            stubs[0].segment.write(stubs, [payload for _, payload in batch.values()], self._pool)
        except OSError as error:
            stubs[0].segment.seal()
            return [Failed(TierError(f"records cannot be written to disk: {error}"))] * len(batch)
        return [self._publish(stub) for stub in stubs]

    def _publish(self, stub: Stub) -> PutResult:
        former = self._index.get(stub.id)
        with self._lock:
            if former is not None:
                self._unlink(former)
            self._link(stub)
        if former is not None:
            try:
                former.segment.erase_entry(former)
            except OSError as error:
                return Failed(TierError(f"a replaced record cannot be erased from disk: {error}"))
        return Stored(stub.num_bytes)

    def _drain(self, runs: deque[list[_Read]], results: list[GetResult]) -> None:
        """Read runs until none is left; a caller and its helpers share them, so that some read while others verify."""
        while True:
            try:
                run = runs.popleft()
            except IndexError:
                return
            for read, result in zip(run, self._read(run), strict=True):
                results[read.position] = result

    def _read(self, run: list[_Read]) -> Sequence[GetResult]:
        """Read neighbours, whose segment is pinned once for each, and unpin it."""
        segment = run[0].stub.segment
        try:
            sound = segment.read([read.stub for read in run], [read.out for read in run], self._pool)
        except OSError as error:
            return [Failed(TierError(f"a record cannot be read from disk: {error}"))] * len(run)
        finally:
            with self._lock:
                segment.readers -= len(run)
                self._lock.notify_all()
        return [Found(read.out.size) if ok else Corrupt("checksum") for read, ok in zip(run, sound, strict=True)]

    def _drop(self, stub: Stub) -> None:
        """Forget a damaged record, unless it was replaced or moved meanwhile."""
        with self._writing:
            if self._index.get(stub.id) is stub:
                self._remove(stub)

    def _remove(self, stub: Stub) -> Deleted | Failed:
        try:
            stub.segment.erase_entry(stub)
        except OSError as error:
            return Failed(TierError(f"a record cannot be erased from disk: {error}"))
        with self._lock:
            self._unlink(stub)
        return Deleted()

    def _unlink(self, stub: Stub) -> None:
        del self._index[stub.id]
        del stub.segment.stubs[stub.slot]
        self._payload_bytes -= stub.num_bytes
        self._accounts.charge(stub.owner, -stub.cost)

    def _link(self, stub: Stub) -> None:
        self._index[stub.id] = stub
        stub.segment.hold(stub)
        self._payload_bytes += stub.num_bytes
        self._accounts.charge(stub.owner, stub.cost)

    def _retire(self, victim: Segment, moves: Moves) -> None:
        """Point the index away from `victim`, and wait for its last reader."""
        with self._lock:
            for stub in list(victim.stubs.values()):
                self._unlink(stub)
            for _, new in moves:
                self._link(new)
            self._lock.wait_for(lambda: victim.readers == 0)


def usual_segment_bytes(capacity_bytes: int) -> int:
    """A sixteenth of the budget and at most 256 MiB, or more where that would be over 256 files; a power of two."""
    wanted = max(min(capacity_bytes // _USUAL_SEGMENTS, _LARGEST_USUAL_SEGMENT), capacity_bytes // _MOST_SEGMENTS)
    return 1 << max(wanted.bit_length() - 1, 0)


def _runs(reads: list[_Read]) -> Iterator[list[_Read]]:
    """Cut `reads`, in order of their place on disk, into runs of neighbours that one call can read."""
    run: list[_Read] = []
    for read in sorted(reads, key=lambda read: (read.stub.segment.sequence, read.stub.offset)):
        if run:
            first, last = run[0].stub, run[-1].stub
            adjoins = read.stub.segment is last.segment and read.stub.offset == last.offset + last.cost
            if not adjoins or read.stub.offset + read.stub.cost - first.offset > RUN_BYTES:
                yield run
                run = []
        run.append(read)
    if run:
        yield run


def _info(stub: Stub) -> RecordInfo:
    return RecordInfo(stub.id, stub.num_bytes, stub.lease_until, stub.owner, stub.expires_at)
