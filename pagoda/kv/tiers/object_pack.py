"""Pack: the records of one put as one object, so that small blocks are not small requests.

    TIME-WRITER-OWNER-COUNT.pack  | head | entries: id offset length checksum lease expiry | payload 0 | payload 1 | ...
    TIME-WRITER-COUNT.note        {"ids": [...], "lease": seconds, or null if they were deleted}

Objects never change. What happens to a record after its pack was written is said by a note, about every record of that
id in an older object; names sort by time. COUNT is the number of entries, so that one ranged request reads them all. A
pack has one owner, whose name it bears: a purge deletes objects, and reads none.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pagoda.errors import CorruptRecord
from pagoda.kv.keys import OWNER_BYTES, OwnerTag
from pagoda.kv.tiers.checksum import BEST, available, checksum
from pagoda.kv.tiers.records import RECORD_ID_BYTES, ByteArray, Record, RecordId, readable

_MAGIC = b"PAGODAPK"
_HEAD = struct.Struct(
    f"<8sIII{OWNER_BYTES}sI"
)  # magic, version, checksum algorithm, count, owner, crc of owner and entries
_VERSION = 2
_ENTRY = struct.Struct(f"<{RECORD_ID_BYTES}sQQQdd")
_TIME_DIGITS = 15
_NAME = re.compile(rf"\d{{15}}-[0-9a-f]{{16}}(?:-([0-9a-f]{{{2 * OWNER_BYTES}}}))?-(\d{{6}})\.(pack|note)")


@dataclass(slots=True, eq=False)
class Packed:
    """A record in a pack, which lies at `offset` of the object `pack`."""

    id: RecordId
    pack: str
    offset: int
    num_bytes: int
    checksum: int
    algorithm: int
    lease_until: float
    owner: OwnerTag
    expires_at: float

    def verifies(self, payload: ByteArray) -> bool:
        """Whether `payload` is what was stored."""
        return payload.size == self.num_bytes and checksum(self.algorithm, payload) == self.checksum


@dataclass(frozen=True, slots=True)
class Note:
    """What later happened to `ids`: their leases end at `lease_until`, or, where it is None, they were deleted."""

    ids: Sequence[RecordId]
    lease_until: float | None

    def encode(self) -> bytes:
        """The content of the note's object."""
        return json.dumps({"ids": [id.to_bytes().hex() for id in self.ids], "lease": self.lease_until}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Note:
        """Read a note. Raises CorruptRecord."""
        try:
            fields = json.loads(data)
            ids = [RecordId.from_bytes(bytes.fromhex(id)) for id in fields["ids"]]
            lease = fields["lease"]
            return cls(ids, None if lease is None else float(lease))
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptRecord("a note does not parse") from error


@dataclass(frozen=True, slots=True)
class Parsed:
    """What an object's name says. A pack without an owner is of a former version."""

    kind: Literal["pack", "note"]
    num_records: int
    owner: OwnerTag | None


def pack_name(time_ms: int, writer: str, owner: OwnerTag, count: int) -> str:
    """The name of a pack."""
    return f"{time_ms:015}-{writer}-{owner.hex()}-{count:06}.pack"


def note_name(time_ms: int, writer: str, count: int) -> str:
    """The name of a note."""
    return f"{time_ms:015}-{writer}-{count:06}.note"


def parse_name(name: str) -> Parsed | None:
    """None for a name that is not ours."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    owner, count, kind = match.groups()
    return Parsed(
        "note" if kind == "note" else "pack", int(count), None if owner is None else OwnerTag(bytes.fromhex(owner))
    )


def name_ms(name: str) -> int:
    """The time in one of our names."""
    return int(name[:_TIME_DIGITS])


def header_bytes(count: int) -> int:
    """Bytes before the first payload."""
    return _HEAD.size + count * _ENTRY.size


def encode_pack(name: str, owner: OwnerTag, records: Sequence[Record]) -> tuple[bytes, list[Packed]]:
    """The object that holds `records`, all of one owner, and where each lies in it."""
    offset = header_bytes(len(records))
    packed: list[Packed] = []
    payloads = [readable(record.data) for record in records]
    for record, payload in zip(records, payloads, strict=True):
        digest = checksum(BEST, payload)
        packed.append(
            Packed(record.id, name, offset, payload.size, digest, BEST, record.lease_until, owner, record.expires_at)
        )
        offset += payload.size
    entries = b"".join(
        _ENTRY.pack(p.id.to_bytes(), p.offset, p.num_bytes, p.checksum, p.lease_until, p.expires_at) for p in packed
    )
    head = _HEAD.pack(_MAGIC, _VERSION, BEST, len(records), owner, zlib.crc32(owner + entries))
    return b"".join([head, entries, *(payload.data for payload in payloads)]), packed


def decode_header(name: str, owner: OwnerTag, data: bytes, object_bytes: int) -> list[Packed]:
    """The records of a pack of `object_bytes` whose front is `data`. Raises CorruptRecord."""
    if len(data) < _HEAD.size:
        raise CorruptRecord("a pack is shorter than its head")
    magic, version, algorithm, count, whose, crc = _HEAD.unpack_from(data)
    entries = data[_HEAD.size : header_bytes(count)]
    if (magic, version, whose) != (_MAGIC, _VERSION, owner) or not available(algorithm):
        raise CorruptRecord("a pack is not what its name says")
    if zlib.crc32(owner + entries) != crc:
        raise CorruptRecord("a pack's entries do not verify")
    packed: list[Packed] = []
    for id, offset, num_bytes, digest, lease, expires_at in _ENTRY.iter_unpack(entries):
        if offset + num_bytes > object_bytes:
            raise CorruptRecord("a pack is shorter than its entries say")
        packed.append(
            Packed(RecordId.from_bytes(id), name, offset, num_bytes, digest, algorithm, lease, owner, expires_at)
        )
    return packed
