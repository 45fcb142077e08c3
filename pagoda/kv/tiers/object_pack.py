"""Pack: the records of one put as one object, so that small blocks are not small requests.

    TIME-WRITER-COUNT.pack    | head | entries: id offset length checksum lease | payload 0 | payload 1 | ...
    TIME-WRITER-COUNT.note    {"ids": [...], "lease": seconds, or null if they were deleted}

Objects never change. What happens to a record after its pack was written is said by a note, about every record of that
id in an older object; names sort by time. COUNT is the number of entries, so that one ranged request reads them all.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from pagoda.errors import CorruptRecord
from pagoda.kv.tiers.checksum import BEST, available, checksum
from pagoda.kv.tiers.records import RECORD_ID_BYTES, ByteArray, RecordId

_MAGIC = b"PAGODAPK"
_HEAD = struct.Struct("<8sIIII")  # magic, version, checksum algorithm, count, crc of the entries
_VERSION = 1
_ENTRY = struct.Struct(f"<{RECORD_ID_BYTES}sQQQd")
_TIME_DIGITS = 15
_NAME = re.compile(r"\d{15}-[0-9a-f]{16}-(\d{6})\.(pack|note)")


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


def object_name(time_ms: int, writer: str, count: int, kind: str) -> str:
    """The name of a pack or note."""
    return f"{time_ms:015}-{writer}-{count:06}.{kind}"


def parse_name(name: str) -> tuple[int, str] | None:
    """(count, "pack" or "note"), or None for a name that is not ours."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), match[2])


def name_ms(name: str) -> int:
    """The time in one of our names."""
    return int(name[:_TIME_DIGITS])


def header_bytes(count: int) -> int:
    """Bytes before the first payload."""
    return _HEAD.size + count * _ENTRY.size


def encode_pack(name: str, records: Sequence[tuple[RecordId, ByteArray, float]]) -> tuple[bytes, list[Packed]]:
    """The object that holds `records` (id, payload, lease), and where each lies in it."""
    offset = header_bytes(len(records))
    packed: list[Packed] = []
    for id, payload, lease in records:
        packed.append(Packed(id, name, offset, payload.size, checksum(BEST, payload), BEST, lease))
        offset += payload.size
    entries = b"".join(_ENTRY.pack(p.id.to_bytes(), p.offset, p.num_bytes, p.checksum, p.lease_until) for p in packed)
    head = _HEAD.pack(_MAGIC, _VERSION, BEST, len(records), zlib.crc32(entries))
    return b"".join([head, entries, *(payload.data for _, payload, _ in records)]), packed


def decode_header(name: str, data: bytes, object_bytes: int) -> list[Packed]:
    """The records of a pack of `object_bytes` whose front is `data`. Raises CorruptRecord."""
    if len(data) < _HEAD.size:
        raise CorruptRecord("a pack is shorter than its head")
    magic, version, algorithm, count, crc = _HEAD.unpack_from(data)
    entries = data[_HEAD.size : header_bytes(count)]
    if (magic, version) != (_MAGIC, _VERSION) or not available(algorithm) or zlib.crc32(entries) != crc:
        raise CorruptRecord("a pack's entries do not verify")
    packed: list[Packed] = []
    for id, offset, num_bytes, digest, lease in _ENTRY.iter_unpack(entries):
        if offset + num_bytes > object_bytes:
            raise CorruptRecord("a pack is shorter than its entries say")
        packed.append(Packed(RecordId.from_bytes(id), name, offset, num_bytes, digest, algorithm, lease))
    return packed
