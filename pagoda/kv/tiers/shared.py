"""SharedTier: one memory file for all processes of a machine (tmpfs, a DAX device's file system, or any local file).

The lock on the file is held for table work alone; payloads are copied without it. A reader that was overtaken by an
eviction sees another generation after its copy, and calls it a miss. A writer killed at any instant holds no lock and
leaves nothing that others cannot take back: see `shared_table`. Whatever a table says, only bytes that match their
checksum, sealed together with the record's id, are served.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import numpy as np

from pagoda.errors import ConfigError, TierUnavailable
from pagoda.kv.keys import NO_OWNER, OWNER_BYTES, OwnerTag
from pagoda.kv.tiers.accounts import Accounts, Shares
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.checksum import BEST, available, checksum
from pagoda.kv.tiers.records import (
    ByteArray,
    Corrupt,
    Deleted,
    DeleteResult,
    Expired,
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
    readable,
    writable,
)
from pagoda.kv.tiers.shared_table import HEAD, HEADER, ROW, WRITING, Rows, SharedTable, Writer

_MAGIC = b"PAGODASH"
_VERSION = 2
_FRONT = struct.Struct("<8sI")
_SEAL = struct.Struct(f"<IQQ{OWNER_BYTES}sd")


class SharedTier(Tier):
    """The memory file at `path`, made by the first process; the others must give the same sizes.

    Open it after a fork, not before: a child would share its parent's lock. Nobody may cut the file while it is mapped.

    Args:
        capacity_bytes: size of the file, table included; exact.
        granule_bytes: allocation unit.
        shares: what owners have of the granules, when this process needs room.
        clock: Unix seconds.

    Raises ConfigError if the budget is too small, the file cannot be made, or it has other sizes.
    """

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        *,
        granule_bytes: int = 64 << 10,
        shares: Shares = MappingProxyType({}),
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__("shared")
        self._clock = clock
        self._granule_bytes = granule_bytes
        self._num_granules = _num_granules(capacity_bytes, granule_bytes)
        if granule_bytes % mmap.PAGESIZE or self._num_granules < 1:
            raise ConfigError(f"{capacity_bytes} bytes are too few for a shared tier with granules of {granule_bytes}")
        self._capacity = capacity_bytes
        self._shares = shares
        self._writer = Writer.this_process()
        self._thread_lock = threading.Lock()
        while True:
            try:
                self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            except OSError as error:
                raise ConfigError(f"a shared tier cannot use {path}: {error.strerror}") from error
            try:
                if self._map(path):
                    return
            except BaseException:
                os.close(self._file)
                raise
            os.close(self._file)

    def _lookup(self, ids: Sequence[RecordId]) -> list[LookupResult]:
        now = self._clock()
        with self._locked() as table:
            return table.answer(table.find(ids), now)

    def _put(self, records: Sequence[Record]) -> list[PutResult]:
        payloads = [readable(record.data) for record in records]
        return [self._put_one(record, payload) for record, payload in zip(records, payloads, strict=True)]

    def _get_into(self, targets: Sequence[Target]) -> list[GetResult]:
        outs = [writable(target.buffer) for target in targets]
        return [self._get_one(target.id, out) for target, out in zip(targets, outs, strict=True)]

    def _delete(self, ids: Sequence[RecordId]) -> list[DeleteResult]:
        results: list[DeleteResult] = []
        with self._locked() as table:
            for id in ids:
                (head,) = table.find([id])
                if head is not None:
                    table.remove(head)
                results.append(Missing() if head is None else Deleted())
        return results

    def _purge(self, owner: OwnerTag) -> int:
        with self._locked() as table:
            return table.purge(owner)

    def _set_lease(self, ids: Sequence[RecordId], until: float) -> list[LookupResult]:
        now = self._clock()
        with self._locked() as table:
            heads = table.find(ids)
            for head in heads:
                if head is not None:
                    table.rows["lease_until"][head] = until
            return table.answer(heads, now)

    def _scan(self) -> Iterator[RecordInfo]:
        with self._locked() as table:
            return iter([table.info(int(head)) for head in table.heads()])

    def _usage(self) -> Usage:
        with self._locked() as table:
            heads = table.heads()
            num_free = table.free(self._clock()).size
            rows, payload = table.num_rows(heads, self._granule_bytes), int(table.rows["num_bytes"][heads].sum())
            owners, which = np.unique(table.rows["owner"][heads], axis=0, return_inverse=True)
        taken = np.bincount(which.reshape(-1), rows, len(owners)).astype(np.int64) * self._granule_bytes
        by_owner = {
            OwnerTag(owner.tobytes()): num_bytes for owner, num_bytes in zip(owners, taken.tolist(), strict=True)
        }
        return Usage(self._capacity, self._capacity - num_free * self._granule_bytes, payload, heads.size, by_owner)

    def _close(self) -> None:
        del self._table, self._granules
        os.close(self._file)

    def _map(self, path: Path) -> bool:
        """Make the file if it is new, and map it. The magic is written last: a maker that dies leaves a new file.

        False if the file is another by now: one of a former version is left to the processes that have it open.
        """
        expected = (_MAGIC, _VERSION, self._granule_bytes, self._num_granules)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            status = os.fstat(self._file)
            size, is_there = status.st_size, path.exists() and path.stat().st_ino == status.st_ino
            if not is_there or self._is_former():
                if is_there:
                    path.unlink()
                    self._tally.add("other_format")
                return False
            fresh = not size or not any(os.pread(self._file, len(_MAGIC), 0))
            if fresh:
                os.ftruncate(self._file, self._capacity)
                os.posix_fallocate(self._file, 0, self._capacity)
            elif size != self._capacity:
                raise ConfigError(f"{path} has {size} bytes, not {self._capacity}, or is no shared tier")
            memory = np.frombuffer(mmap.mmap(self._file, self._capacity), dtype=np.uint8)
            header = memory[: HEADER.itemsize].view(HEADER)[0:1]
            rows = memory[mmap.PAGESIZE :][: self._num_granules * ROW.itemsize].view(ROW)
            if fresh:
                rows["state"] = 0
                header["version"], header["granule"], header["granules"] = expected[1:]
                header["magic"] = _MAGIC
            if tuple(header[0].tolist())[:4] != expected:
                raise ConfigError(f"{path} is no shared tier, or one of another version or granule size")
        except OSError as error:
            raise ConfigError(f"a shared tier cannot use {path}: {error.strerror}") from error
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._table = SharedTable(header[0], rows)
        with self._locked() as table:
            table.settle()
        self._granules = memory[self._capacity - self._num_granules * self._granule_bytes :].reshape(
            self._num_granules, self._granule_bytes
        )
        return True

    def _is_former(self) -> bool:
        magic, version = _FRONT.unpack(os.pread(self._file, _FRONT.size, 0).ljust(_FRONT.size, b"\0"))
        return bool(magic == _MAGIC and 0 < version < _VERSION)

    @contextmanager
    def _locked(self) -> Iterator[SharedTable]:
        """The table, while no other thread or process changes it."""
        with self._thread_lock:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX)
            except OSError as error:
                raise TierUnavailable(f"the shared tier's file cannot be locked: {error}") from error
            try:
                yield self._table
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _put_one(self, record: Record, payload: ByteArray) -> PutResult:
        count = max(1, -(-payload.size // self._granule_bytes))
        if count > self._num_granules:
            return Rejected(Reason.TOO_LARGE)
        with self._locked() as table:
            rows = self._make_room(table, count, record.owner)
            if rows is None:
                return Rejected(Reason.FULL)
            head = int(rows[0])
            generation = table.claim(rows, record.id, self._writer, record.owner, self._clock())
            row = table.rows[head : head + 1]
            row["num_bytes"], row["algorithm"] = payload.size, BEST
        for position, granule in enumerate(rows):
            part = payload[position * self._granule_bytes : (position + 1) * self._granule_bytes]
            self._granules[granule][: part.size] = part
        digest = checksum(BEST, payload)
        with self._locked() as table:
            if not table.holds(head, generation, WRITING):
                return Rejected(Reason.FULL)
            if not table.belongs(rows[:1], record.owner).all():  # purged while it was written
                table.remove(head)
                return Rejected(Reason.FULL)
            row["checksum"], row["lease_until"], row["expires_at"] = digest, record.lease_until, record.expires_at
            row["seal"] = _seal(record.id, row)
            (former,) = table.find([record.id])
            if former is not None:
                row["lease_until"] = max(record.lease_until, float(table.rows["lease_until"][former]))
            table.publish(head)  # before the former goes: a writer killed between the two leaves both, never neither
            if former is not None:
                table.remove(former)
        return Stored(payload.size)

    def _make_room(self, table: SharedTable, count: int, owner: OwnerTag) -> Rows | None:
        """`count` rows to claim for an owner, evicting as needed; None where leases and shares leave too few."""
        now = self._clock()
        free = table.free(now)
        if free.size < count:
            heads = table.heads()
            for head in heads[table.is_over(heads, now)]:
                table.remove(int(head))
            free = table.free(now)
        if free.size < count:
            victims = self._victims(table, count - free.size, owner, now)
            if victims is None:
                return None
            for head in victims:
                table.remove(head)
            self._tally.add("evicted", len(victims))
            free = table.free(now)
        return free[:count] if free.size >= count else None

    def _victims(self, table: SharedTable, count: int, taker: OwnerTag, now: float) -> list[int] | None:
        """The heads that go for `count` rows, coldest first of whoever is most over its share; None if too few may."""
        accounts, owners = Accounts(self._num_granules, self._shares), [NO_OWNER, *self._shares]
        heads = table.heads()
        rows, account = table.num_rows(heads, self._granule_bytes), np.zeros(heads.size, dtype=np.int64)
        for owner in self._shares:
            account[table.belongs(heads, owner)] = accounts.of(owner)
        for index, owner in enumerate(owners):
            accounts.charge(owner, int(rows[account == index].sum()))
        evictable = table.evictable(now)
        at = np.searchsorted(heads, evictable)
        queues = [at[account[at] == index] for index in range(len(accounts))]
        victims: list[int] = []
        while count > 0:
            able = (
                i for i in accounts.losers(taker) if queues[i].size and rows[queues[i][0]] <= accounts.spare(i, taker)
            )
            loser = next(able, None)
            if loser is None:
                return None
            first, queues[loser] = queues[loser][0], queues[loser][1:]
            victims.append(int(heads[first]))
            accounts.charge(owners[loser], -int(rows[first]))
            count -= int(rows[first])
        return victims

    def _get_one(self, id: RecordId, out: ByteArray) -> GetResult:
        with self._locked() as table:
            (head,) = table.find([id])
            if head is None:
                return Missing()
            if table.is_over(np.array([head]), self._clock()).all():
                return Expired()
            row = table.rows[head].copy()
            num_bytes, generation = int(row["num_bytes"]), int(row["generation"])
            if out.size < num_bytes:
                return Rejected(Reason.BUFFER_TOO_SMALL)
            rows = table.chain(head)
            table.rows["last_used"][head] = table.tick()
        sound = rows.size * self._granule_bytes >= num_bytes and available(int(row["algorithm"]))
        if sound:
            for position, granule in enumerate(rows):
                part = out[position * self._granule_bytes : min((position + 1) * self._granule_bytes, num_bytes)]
                np.copyto(part, self._granules[granule][: part.size])
            digest = checksum(int(row["algorithm"]), out[:num_bytes])
            sound = digest == int(row["checksum"]) and int(row["seal"]) == _seal(id, row)
        if sound:
            return Found(num_bytes)
        with self._locked() as table:
            if not table.holds(head, generation, HEAD):
                return Missing()
            table.remove(head)
        return Corrupt("checksum")


def _num_granules(capacity_bytes: int, granule_bytes: int) -> int:
    """How many granules fit after a header page and their rows."""
    return max(0, (capacity_bytes - mmap.PAGESIZE) // (granule_bytes + ROW.itemsize))


def _seal(id: RecordId, row: np.ndarray) -> int:
    """A checksum over what a row says of its payload, together with the id."""
    fields = (np.asarray(row[name]).item() for name in ("algorithm", "num_bytes", "checksum"))
    about = _SEAL.pack(*fields, row["owner"].tobytes(), np.asarray(row["expires_at"]).item())
    return checksum(BEST, np.frombuffer(id.to_bytes() + about, dtype=np.uint8))
