"""ObjectTier: records in an object store (S3 and its like, GCS, Azure, a folder), shared by all that can reach it.

put  ──>  one pack, created under a name nobody else has        lookup ──> this process's index, brought up to date
delete, set_lease ──> one note                                             from the names that are new since last time
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError

from pagoda.errors import CorruptRecord, TierError, TierUnavailable
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.object_pack import (
    Note,
    Packed,
    decode_header,
    encode_pack,
    header_bytes,
    name_ms,
    object_name,
    parse_name,
)
from pagoda.kv.tiers.records import (
    ByteArray,
    Corrupt,
    Deleted,
    DeleteResult,
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
    readable,
    writable,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_SKEW_MS = 60_000


@dataclass(slots=True, eq=False)
class _Object:
    """A pack or note that exists, and the records of a pack that are the newest of their id."""

    num_bytes: int
    is_pack: bool
    records: dict[RecordId, Packed] = field(default_factory=dict)
    last_used: int = 0


class ObjectTier(Tier):
    """Packs under `prefix` of `store`, an obstore store; its own retries and timeouts are the deadline of each request.

    Other processes' records are found at most `refresh_s` after they were put, and after up to a minute of clock
    difference. Eviction is by pack, least recently read by this process first; with several writers the budget is what
    each of them sees.

    Args:
        capacity_bytes: bound on the bytes of all objects; None leaves that to the service.
        pack_bytes: a larger put becomes several packs, each of at most an eighth of the capacity or one record.
        clock: Unix seconds.

    Raises TierUnavailable if the store cannot be listed. `stats` adds foreign_objects, corrupt_pack and corrupt_note.
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
        self._last_ms = 0
        self._tick = count(1)
        self._lock = threading.RLock()
        self._index: dict[RecordId, Packed] = {}
        self._objects: dict[str, _Object] = {}
        self._ignored: set[str] = set()
        self._deleted: dict[RecordId, str] = {}
        self._used_bytes = 0
        self._refreshed = 0.0
        self._refresh("")

    def _lookup(self, ids: Sequence[RecordId]) -> list[LookupResult]:
        with self._lock:
            if time.monotonic() - self._refreshed > self._refresh_s:
                self._refresh(f"{max(int(self._clock() * 1000) - _SKEW_MS, 0):015}")
            return [_found(self._index.get(id)) for id in ids]

    def _put(self, records: Sequence[Record]) -> list[PutResult]:
        payloads = [readable(record.data) for record in records]
        results: list[PutResult] = []
        pack: list[tuple[RecordId, ByteArray, float]] = []
        filled = 0
        for record, payload in zip(records, payloads, strict=True):
            if pack and (filled + payload.size > self._pack_bytes or any(id == record.id for id, _, _ in pack)):
                results += self._put_pack(pack)
                pack, filled = [], 0
            pack.append((record.id, payload, record.lease_until))
            filled += payload.size
        return results + (self._put_pack(pack) if pack else [])

    def _get_into(self, targets: Sequence[Target]) -> list[GetResult]:
        outs = [writable(target.buffer) for target in targets]
        results: list[GetResult] = [Missing()] * len(targets)
        reads: dict[str, list[tuple[int, Packed]]] = {}
        with self._lock:
            for i, target in enumerate(targets):
                packed = self._index.get(target.id)
                if packed is None:
                    continue
                if outs[i].size < packed.num_bytes:
                    results[i] = Rejected(Reason.BUFFER_TOO_SMALL)
                    continue
                self._objects[packed.pack].last_used = next(self._tick)
                reads.setdefault(packed.pack, []).append((i, packed))
        for name, wanted in reads.items():
            got = self._read(name, [(packed, outs[i]) for i, packed in wanted])
            for (i, _), result in zip(wanted, got, strict=True):
                results[i] = result
        return results

    def _delete(self, ids: Sequence[RecordId]) -> list[DeleteResult]:
        with self._lock:
            present = [id in self._index for id in ids]
            try:
                self._write_note(Note([id for id, there in zip(ids, present, strict=True) if there], None))
            except (BaseError, OSError) as error:
                return [Failed(_error("a deletion", error)) if there else Missing() for there in present]
            return [Deleted() if there else Missing() for there in present]

    def _set_lease(self, ids: Sequence[RecordId], until: float) -> list[LookupResult]:
        with self._lock:
            try:
                self._write_note(Note([id for id in ids if id in self._index], until))
            except (BaseError, OSError) as error:
                raise TierUnavailable(f"a lease cannot be written to the object store: {_why(error)}") from error
            return [_found(self._index.get(id)) for id in ids]

    def _scan(self) -> Iterator[RecordInfo]:
        with self._lock:
            return iter([RecordInfo(p.id, p.num_bytes, p.lease_until) for p in self._index.values()])

    def _usage(self) -> Usage:
        with self._lock:
            payload_bytes = sum(packed.num_bytes for packed in self._index.values())
            return Usage(self._capacity, self._used_bytes, payload_bytes, len(self._index))

    def _close(self) -> None:
        self._index.clear()

    def _put_pack(self, records: list[tuple[RecordId, ByteArray, float]]) -> list[PutResult]:
        with self._lock:
            former = [self._index.get(id) for id, _, _ in records]
            leased = [
                (id, payload, lease if old is None else max(lease, old.lease_until))
                for (id, payload, lease), old in zip(records, former, strict=True)
            ]
            name = self._name(len(records), "pack")
        data, packed = encode_pack(name, leased)
        with self._lock:
            refusal = self._make_room(len(data))
            if refusal is not None:
                return [refusal] * len(records)
            self._used_bytes += len(data)
        try:
            obstore.put(self._store, self._prefix + name, data, mode="create")
        except (BaseError, OSError) as error:
            with self._lock:
                self._used_bytes -= len(data)
            return [Failed(_error("records", error))] * len(records)
        with self._lock:
            self._used_bytes -= len(data)
            self._add_pack(name, len(data), packed)
        return [Stored(p.num_bytes) for p in packed]

    def _make_room(self, num_bytes: int) -> Rejected | Failed | None:
        """Delete packs until `num_bytes` fit; the outcome to give where they cannot."""
        if self._capacity is None:
            return None
        if num_bytes > self._capacity:
            return Rejected(Reason.TOO_LARGE)
        now = self._clock()
        packs = {name: thing for name, thing in self._objects.items() if thing.is_pack}
        idle = {n: p for n, p in packs.items() if not any(r.lease_until > now for r in p.records.values())}
        if self._used_bytes + num_bytes - sum(pack.num_bytes for pack in idle.values()) > self._capacity:
            return Rejected(Reason.FULL)
        try:
            for name in sorted(idle, key=lambda name: idle[name].last_used):
                if self._used_bytes + num_bytes <= self._capacity:
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
        for name in [n for n, thing in self._objects.items() if not thing.is_pack and n < before]:
            self._remove_object(name)

    def _read(self, name: str, wanted: list[tuple[Packed, ByteArray]]) -> list[GetResult]:
        """Read records of one pack, with as few requests as their places allow."""
        starts = [packed.offset for packed, _ in wanted]
        lengths = [packed.num_bytes for packed, _ in wanted]
        try:
            parts = obstore.get_ranges(self._store, self._prefix + name, starts=starts, lengths=lengths)
        except FileNotFoundError:
            with self._lock:
                self._forget(name)
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

    def _name(self, num_records: int, kind: str) -> str:
        """A new name, which sorts after all that this process knows: a note must come after what it speaks of."""
        self._last_ms = max(self._last_ms + 1, int(self._clock() * 1000))
        return object_name(self._last_ms, self._writer, num_records, kind)

    def _write_note(self, note: Note) -> None:
        if not note.ids:
            return
        name, data = self._name(len(note.ids), "note"), note.encode()
        obstore.put(self._store, self._prefix + name, data, mode="create")
        self._add_note(name, len(data), note)

    def _add_pack(self, name: str, num_bytes: int, packed: Sequence[Packed]) -> None:
        thing = self._objects[name] = _Object(num_bytes, True, last_used=next(self._tick))
        self._used_bytes += num_bytes
        self._last_ms = max(self._last_ms, name_ms(name))
        for record in packed:
            former = self._index.get(record.id)
            if self._deleted.get(record.id, "") > name or (former is not None and former.pack > name):
                continue
            if former is not None:
                self._objects[former.pack].records.pop(record.id)
            self._index[record.id] = thing.records[record.id] = record

    def _add_note(self, name: str, num_bytes: int, note: Note) -> None:
        self._objects[name] = _Object(num_bytes, False)
        self._used_bytes += num_bytes
        self._last_ms = max(self._last_ms, name_ms(name))
        for id in note.ids:
            packed = self._index.get(id)
            if packed is not None and packed.pack < name and note.lease_until is not None:
                packed.lease_until = note.lease_until
            elif packed is not None and packed.pack < name:
                del self._index[id], self._objects[packed.pack].records[id]
            if note.lease_until is None:
                self._deleted[id] = max(name, self._deleted.get(id, ""))

    def _remove_object(self, name: str) -> None:
        with suppress(FileNotFoundError):
            obstore.delete(self._store, self._prefix + name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        thing = self._objects.pop(name, None)
        if thing is not None:
            self._used_bytes -= thing.num_bytes
            for id in thing.records:
                del self._index[id]

    def _refresh(self, after: str) -> None:
        """Take in the objects whose names sort after `after`."""
        try:
            found: list[tuple[str, int]] = []
            for batch in obstore.list(
                self._store, self._prefix or None, offset=self._prefix + after if after else None
            ):
                found += [(meta["path"], meta["size"]) for meta in batch]
            for path, size in sorted(found):
                self._take_in(path.removeprefix(self._prefix), size)
        except (BaseError, OSError) as error:
            raise TierUnavailable(f"the object store cannot be listed: {_why(error)}") from error
        self._refreshed = time.monotonic()

    def _take_in(self, name: str, size: int) -> None:
        if name in self._objects or name in self._ignored:
            return
        parsed = parse_name(name)
        if parsed is None:
            self._tally.add("foreign_objects")
            self._ignored.add(name)
            return
        num_records, kind = parsed
        try:
            if kind == "note":
                self._add_note(name, size, Note.decode(bytes(obstore.get(self._store, self._prefix + name).bytes())))
            else:
                end = min(header_bytes(num_records), size)
                front = bytes(obstore.get_range(self._store, self._prefix + name, start=0, end=end)) if end else b""
                self._add_pack(name, size, decode_header(name, front, size))
        except FileNotFoundError:
            pass
        except CorruptRecord:
            self._tally.add(f"corrupt_{kind}")
            self._objects[name] = _Object(size, True)
            self._used_bytes += size


def _found(packed: Packed | None) -> LookupResult:
    return Missing() if packed is None else Found(packed.num_bytes)


def _error(what: str, error: Exception) -> TierError:
    return TierError(f"the object store failed on {what}: {_why(error)}")


def _why(error: Exception) -> str:
    """What obstore says of an error, without the dump of it that follows."""
    return str(error).partition("\n")[0]
