"""ObjectIndex: what one process knows of a store's objects. Names sort by time; the newest word on a record counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from pagoda.kv.keys import OwnerTag
from pagoda.kv.tiers.object_pack import Note, Packed, name_ms, parse_name
from pagoda.kv.tiers.records import RecordId, is_over


@dataclass(slots=True, eq=False)
class StoredObject:
    """A pack or note that exists, and the records of a pack that are the newest of their id."""

    num_bytes: int
    is_pack: bool
    records: dict[RecordId, Packed] = field(default_factory=dict)
    last_used: int = 0


class ObjectIndex:
    """Not thread-safe: its tier holds a lock around each call.

    Attributes:
        records: the newest of each id.
        objects: by name.
        used_bytes: of all objects; whoever is writing one adds it first.
        last_ms: the latest time in a name.
    """

    def __init__(self) -> None:
        self.records: dict[RecordId, Packed] = {}
        self.objects: dict[str, StoredObject] = {}
        self.used_bytes = 0
        self.last_ms = 0
        self._deleted: dict[RecordId, str] = {}
        self._tick = count(1)

    def touch(self, pack: str) -> None:
        """Mark a pack as used now."""
        self.objects[pack].last_used = next(self._tick)

    def add_pack(self, name: str, num_bytes: int, packed: Sequence[Packed]) -> None:
        """Take in a pack; what is known of newer packs and notes stands."""
        pack = self._add(name, StoredObject(num_bytes, True, last_used=next(self._tick)))
        for record in packed:
            former = self.records.get(record.id)
            if self._deleted.get(record.id, "") > name or (former is not None and former.pack > name):
                continue
            if former is not None:
                self.objects[former.pack].records.pop(record.id)
            self.records[record.id] = pack.records[record.id] = record

    def add_note(self, name: str, num_bytes: int, note: Note) -> None:
        """Take in a note: it speaks of records in older packs."""
        self._add(name, StoredObject(num_bytes, False))
        for id in note.ids:
            packed = self.records.get(id)
            if packed is not None and packed.pack < name and note.lease_until is not None:
                packed.lease_until = note.lease_until
            elif packed is not None and packed.pack < name:
                del self.records[id], self.objects[packed.pack].records[id]
            if note.lease_until is None:
                self._deleted[id] = max(name, self._deleted.get(id, ""))

    def add_useless(self, name: str, num_bytes: int) -> None:
        """Take in an object that has nothing to read, and goes first."""
        self._add(name, StoredObject(num_bytes, True))

    def _add(self, name: str, thing: StoredObject) -> StoredObject:
        self.objects[name] = thing
        self.used_bytes += thing.num_bytes
        self.last_ms = max(self.last_ms, name_ms(name))
        return thing

    def forget(self, name: str) -> None:
        """An object is gone."""
        thing = self.objects.pop(name, None)
        if thing is not None:
            self.used_bytes -= thing.num_bytes
            for id in thing.records:
                del self.records[id]

    def packs(self) -> dict[str, StoredObject]:
        """All packs, by name."""
        return {name: thing for name, thing in self.objects.items() if thing.is_pack}

    def packs_of(self, owner: OwnerTag) -> list[str]:
        """The names of an owner's packs."""
        return [name for name in self.objects if (parsed := parse_name(name)) is not None and parsed.owner == owner]

    def expired(self, now: float) -> Iterator[str]:
        """The oldest packs, as long as all their records expired; the caller forgets each before it takes the next."""
        while (oldest := next((n for n, thing in self.objects.items() if thing.records), None)) is not None:
            if not all(is_over(packed, now) for packed in self.objects[oldest].records.values()):
                return
            yield oldest

    def bytes_by_owner(self) -> Counter[OwnerTag]:
        """Payloads of each owner."""
        owners = Counter[OwnerTag]()
        for packed in self.records.values():
            owners[packed.owner] += packed.num_bytes
        return owners
