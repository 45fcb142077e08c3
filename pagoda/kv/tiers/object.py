"""ObjectTier: records in an object store (S3 and its like, GCS, Azure, a folder), shared by all that can reach it.

put  ──>  one pack for each owner, under a name nobody else has    lookup ──> this process's index, brought up to date
delete, set_lease ──> one note                                             from the names that are new since last time
purge ──> the owner's packs are deleted
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError

from pagoda.errors import CorruptRecord, TierError, TierUnavailable
from pagoda.kv.keys import OwnerTag
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.object_index import ObjectIndex
from pagoda.kv.tiers.object_pack import (
    Note,
    Packed,
    decode_header,
    encode_pack,
    header_bytes,
    note_name,
    pack_name,
    parse_name,
)
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

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_SKEW_MS = 60_000


class ObjectTier(Tier):
    """Packs under `prefix` of `store`, an obstore store; its own retries and timeouts are the deadline of each request.

    Other processes' records are found at most `refresh_s` after they were put, and after up to a minute of clock
    difference. Eviction is by pack, least recently read by this process first; with several writers the budget is what
    each of them sees. Packs that expired as a whole are deleted, the oldest first, as others are put.

    Args:
        capacity_bytes: bound on the bytes of all objects; None leaves that to the service.
        pack_bytes: a larger put becomes several packs, each of at most an eighth of the capacity or one record.
        clock: Unix seconds.

    Raises TierUnavailable if the store cannot be listed. `stats` adds foreign_objects, other_format, corrupt_pack and
    corrupt_note.
    """

    def __init__(
        self,
        store: ObjectStore,
        prefix: str = "",
        *,
        capacity_bytes: int | None = None,
        pack_bytes: int = 32 << 20,
        refresh_s: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__("object")
        self._store = store
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._capacity = capacity_bytes
        self._pack_bytes = pack_bytes if capacity_bytes is None else min(pack_bytes, capacity_bytes // 8)
        self._refresh_s = refresh_s
        self._clock = clock
        self._writer = secrets.token_hex(8)
        self._lock = threading.RLock()
        self._index = ObjectIndex()
        self._ignored: set[str] = set()
        self._refreshed = 0.0
        self._refresh("")

    def _lookup(self, ids: Sequence[RecordId]) -> list[LookupResult]:
        with self._lock:
            if time.monotonic() - self._refreshed > self._refresh_s:
                self._refresh(f"{max(int(self._clock() * 1000) - _SKEW_MS, 0):015}")
            now = self._clock()
            return [found(self._index.records.get(id), now) for id in ids]

    def _put(self, records: Sequence[Record]) -> list[PutResult]:
        sizes = [readable(record.data).size for record in records]
        results: list[PutResult] = []
        pack: list[Record] = []
        filled = 0
        for record, size in zip(records, sizes, strict=True):
            if pack and (
                filled + size > self._pack_bytes
                or record.owner != pack[0].owner
                or any(each.id == record.id for each in pack)
            ):
                results += self._put_pack(pack)
                pack, filled = [], 0
            pack.append(record)
            filled += size
        return results + (self._put_pack(pack) if pack else [])

    def _get_into(self, targets: Sequence[Target]) -> list[GetResult]:
        outs = [writable(target.buffer) for target in targets]
        results: list[GetResult] = [Missing()] * len(targets)
        reads: dict[str, list[tuple[int, Packed]]] = {}
        now = self._clock()
        with self._lock:
            for i, target in enumerate(targets):
                packed = self._index.records.get(target.id)
                if packed is None:
                    continue
                if is_over(packed, now):
                    results[i] = Expired()
                    continue
                if outs[i].size < packed.num_bytes:
                    results[i] = Rejected(Reason.BUFFER_TOO_SMALL)
                    continue
                self._index.touch(packed.pack)
                reads.setdefault(packed.pack, []).append((i, packed))
        for name, wanted in reads.items():
            got = self._read(name, [(packed, outs[i]) for i, packed in wanted])
            for (i, _), result in zip(wanted, got, strict=True):
                results[i] = result
        return results

    def _delete(self, ids: Sequence[RecordId]) -> list[DeleteResult]:
        with self._lock:
            present = [id in self._index.records for id in ids]
            try:
                self._write_note(Note([id for id, there in zip(ids, present, strict=True) if there], None))
            except (BaseError, OSError) as error:
                return [Failed(_error("a deletion", error)) if there else Missing() for there in present]
            return [Deleted() if there else Missing() for there in present]

    def _purge(self, owner: OwnerTag) -> int:
        with self._lock:
            self._refresh("")
            packs = self._index.packs_of(owner)
            count = sum(len(self._index.objects[name].records) for name in packs)
            try:
                for name in packs:
                    self._remove_object(name)
            except (BaseError, OSError) as error:
                raise TierUnavailable(f"packs cannot be deleted from the object store: {_why(error)}") from error
            return count

    def _set_lease(self, ids: Sequence[RecordId], until: float) -> list[LookupResult]:
        with self._lock:
            try:
                self._write_note(Note([id for id in ids if id in self._index.records], until))
            except (BaseError, OSError) as error:
                raise TierUnavailable(f"a lease cannot be written to the object store: {_why(error)}") from error
            now = self._clock()
            return [found(self._index.records.get(id), now) for id in ids]

    def _scan(self) -> Iterator[RecordInfo]:
        with self._lock:
            return iter(
                [
                    RecordInfo(p.id, p.num_bytes, p.lease_until, p.owner, p.expires_at)
                    for p in self._index.records.values()
                ]
            )

    def _usage(self) -> Usage:
        with self._lock:
            owners = self._index.bytes_by_owner()
            return Usage(self._capacity, self._index.used_bytes, owners.total(), len(self._index.records), owners)

    def _close(self) -> None:
        self._index = ObjectIndex()

    def _put_pack(self, records: list[Record]) -> list[PutResult]:
        owner = records[0].owner
        with self._lock:
            former = [self._index.records.get(record.id) for record in records]
            leased = [
                record if old is None else replace(record, lease_until=max(record.lease_until, old.lease_until))
                for record, old in zip(records, former, strict=True)
            ]
            name = pack_name(self._next_ms(), self._writer, owner, len(records))
        data, packed = encode_pack(name, owner, leased)
        with self._lock:
            refusal = self._make_room(len(data))
            if refusal is not None:
                return [refusal] * len(records)
            self._index.used_bytes += len(data)
        try:
            obstore.put(self._store, self._prefix + name, data, mode="create")
        except (BaseError, OSError) as error:
            with self._lock:
                self._index.used_bytes -= len(data)
            return [Failed(_error("records", error))] * len(records)
        with self._lock:
            self._index.used_bytes -= len(data)
            self._index.add_pack(name, len(data), packed)
        return [Stored(p.num_bytes) for p in packed]

    def _make_room(self, num_bytes: int) -> Rejected | Failed | None:
        """Delete packs until `num_bytes` fit; the outcome to give where they cannot."""
        now = self._clock()
        try:
            has_expired = False
            for name in self._index.expired(now):
                self._remove_object(name)
                has_expired = True
            if has_expired:
                self._remove_notes(min(self._index.packs(), default="~"))
        except (BaseError, OSError) as error:
            return Failed(_error("an eviction", error))
        if self._capacity is None:
            return None
        if num_bytes > self._capacity:
            return Rejected(Reason.TOO_LARGE)
        packs = self._index.packs()
        idle = {n: p for n, p in packs.items() if not any(r.lease_until > now for r in p.records.values())}
        if self._index.used_bytes + num_bytes - sum(pack.num_bytes for pack in idle.values()) > self._capacity:
            return Rejected(Reason.FULL)
        try:
            for name in sorted(idle, key=lambda name: idle[name].last_used):
                if self._index.used_bytes + num_bytes <= self._capacity:
                    break
                self._tally.add("evicted", len(idle[name].records))
                self._remove_object(name)
                del packs[name]
                self._remove_notes(min(packs, default="~"))
        except (BaseError, OSError) as error:
            return Failed(_error("an eviction", error))
        return None

    def _remove_notes(self, before: str) -> None:
        """Remove the notes older than the oldest pack, `before`: they have nothing left to say."""
        for name in [n for n, thing in self._index.objects.items() if not thing.is_pack and n < before]:
            self._remove_object(name)

    def _read(self, name: str, wanted: list[tuple[Packed, ByteArray]]) -> list[GetResult]:
        """Read records of one pack, with as few requests as their places allow."""
        starts = [packed.offset for packed, _ in wanted]
        lengths = [packed.num_bytes for packed, _ in wanted]
        try:
            parts = obstore.get_ranges(self._store, self._prefix + name, starts=starts, lengths=lengths)
        except FileNotFoundError:
            with self._lock:
                self._index.forget(name)
            return [Missing()] * len(wanted)
        except (BaseError, OSError) as error:
            return [Failed(_error("records", error))] * len(wanted)
        results: list[GetResult] = []
        for part, (packed, out) in zip(parts, wanted, strict=True):
            payload = readable(memoryview(part))
            if packed.verifies(payload):
                out[: payload.size] = payload
                results.append(Found(payload.size))
            else:
                results.append(Corrupt("checksum"))
                self._delete([packed.id])
        return results

    def _next_ms(self) -> int:
        """The time in a new name, later than all that this process knows: a note comes after what it speaks of."""
        self._index.last_ms = max(self._index.last_ms + 1, int(self._clock() * 1000))
        return self._index.last_ms

    def _write_note(self, note: Note) -> None:
        if not note.ids:
            return
        name, data = note_name(self._next_ms(), self._writer, len(note.ids)), note.encode()
        obstore.put(self._store, self._prefix + name, data, mode="create")
        self._index.add_note(name, len(data), note)

    def _remove_object(self, name: str) -> None:
        with suppress(FileNotFoundError):
            obstore.delete(self._store, self._prefix + name)
        self._index.forget(name)

    def _refresh(self, after: str) -> None:
        """Take in the objects whose names sort after `after`."""
        try:
            listed: list[tuple[str, int]] = []
            for batch in obstore.list(
                self._store, self._prefix or None, offset=self._prefix + after if after else None
            ):
                listed += [(meta["path"], meta["size"]) for meta in batch]
            for path, size in sorted(listed):
                self._take_in(path.removeprefix(self._prefix), size)
        except (BaseError, OSError) as error:
            raise TierUnavailable(f"the object store cannot be listed: {_why(error)}") from error
        self._refreshed = time.monotonic()

    def _take_in(self, name: str, size: int) -> None:
        if name in self._index.objects or name in self._ignored:
            return
        parsed = parse_name(name)
        if parsed is None:
            self._tally.add("foreign_objects")
            self._ignored.add(name)
            return
        try:
            if parsed.kind == "note":
                self._index.add_note(
                    name, size, Note.decode(bytes(obstore.get(self._store, self._prefix + name).bytes()))
                )
            elif parsed.owner is None:
                self._tally.add("other_format")
                self._index.add_useless(name, size)
            else:
                end = min(header_bytes(parsed.num_records), size)
                front = bytes(obstore.get_range(self._store, self._prefix + name, start=0, end=end)) if end else b""
                self._index.add_pack(name, size, decode_header(name, parsed.owner, front, size))
        except FileNotFoundError:
            pass
        except CorruptRecord:
            self._tally.add(f"corrupt_{parsed.kind}")
            self._index.add_useless(name, size)


def _error(what: str, error: Exception) -> TierError:
    return TierError(f"the object store failed on {what}: {_why(error)}")


def _why(error: Exception) -> str:
    """What obstore says of an error, without the dump of it that follows."""
    return str(error).partition("\n")[0]
