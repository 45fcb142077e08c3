"""Segment: one file of the disk tier, of fixed size, written front to back.

    0           4096                      data_start                                segment_bytes
    | superblock | table: 96 bytes a record | payload 0 | payload 1 | ...  room       |
                   crc length id first_block checksum lease sequence owner expiry      every payload starts on a block

The table stands apart from the payloads, so that a restart reads a few MiB a segment and payloads keep their
alignment. An entry is written after its payload, hence a process killed at any instant leaves whole records or none.
A power cut may keep an entry and lose its payload: the checksum tells at the first read. Entries are sealed with the
segment's nonce: what an earlier life of the file left behind is never taken for a record. A superblock of zeros is a
blank segment.
"""

from __future__ import annotations

import os
import secrets
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagoda.kv.keys import OWNER_BYTES, OwnerTag
from pagoda.kv.tiers.checksum import BEST, available, checksum
from pagoda.kv.tiers.direct_io import BLOCK, BouncePool, align_up, open_direct, read_run, write_blocks
from pagoda.kv.tiers.records import RECORD_ID_BYTES, ByteArray, Record, RecordId, is_over

_MAGIC = b"PAGODASG"
_VERSION = 2
_SUPERBLOCK = struct.Struct("<8sIIQQ16s")  # magic, version, checksum algorithm, segment_bytes, sequence, nonce
_CRC = struct.Struct("<I")
# Length, id, first block, checksum, lease, sequence, owner, expiry; after its crc.
_ENTRY = struct.Struct(f"<I{RECORD_ID_BYTES}sIQdQ{OWNER_BYTES}sd")
ENTRY_BYTES = _CRC.size + _ENTRY.size
_OWNER_AT = ENTRY_BYTES - OWNER_BYTES - 8
_FREE_ENTRY = bytes(ENTRY_BYTES)
_BYTES_PER_ENTRY = 8 << 10
_MIN_DATA_BLOCKS = 4
RUN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where things are in every segment of one tier."""

    segment_bytes: int

    @property
    def max_records(self) -> int:
        """Entries of the table: one for every 8 KiB of the segment."""
        return self.segment_bytes // _BYTES_PER_ENTRY

    @property
    def data_start(self) -> int:
        """Where payloads begin."""
        return BLOCK + align_up(self.max_records * ENTRY_BYTES)

    @property
    def data_bytes(self) -> int:
        """Room for payloads; the largest record."""
        return self.segment_bytes - self.data_start

    def valid(self) -> bool:
        """Whether it is whole blocks with room for payloads."""
        return self.segment_bytes % BLOCK == 0 and self.data_bytes >= _MIN_DATA_BLOCKS * BLOCK


@dataclass(slots=True, eq=False)
class Stub:
    """A record on disk: what its table entry says, and where that entry is."""

    id: RecordId
    segment: Segment
    slot: int
    offset: int
    num_bytes: int
    checksum: int
    lease_until: float
    sequence: int
    owner: OwnerTag
    expires_at: float
    num_hits: int = 0

    @property
    def cost(self) -> int:
        """Bytes of the segment that its payload takes."""
        return align_up(self.num_bytes)


@dataclass(frozen=True, slots=True)
class Damage:
    """Why an entry, or a whole segment, was not loaded. `reason` is a counter's name."""

    reason: str


class Segment:
    """One segment file. Not thread-safe, but for `read`.

    Attributes:
        stubs: its records, by slot. The tier adds them with `hold`, and removes them.
        readers: reads under way; the tier counts them, and blanks the segment only when there are none.
        sequence: when it was begun, in order of all segments; 0 while blank.
    """

    def __init__(self, path: Path, geometry: Geometry) -> None:
        self.path = path
        self.stubs: dict[int, Stub] = {}
        self._to_end: list[Stub] = []  # every record whose time is not over, and some others
        self.readers = 0
        self.sequence = 0
        self._geometry = geometry
        self._algorithm = BEST
        self._nonce = b""
        self._next_slot = 0
        self._next_offset = geometry.data_start
        self._file = open_direct(path)

    @classmethod
    def create(cls, path: Path, geometry: Geometry) -> Segment:
        """A blank segment in a new file with all its bytes allocated, or no file. Raises OSError: ENOSPC, for one."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, geometry.segment_bytes)
            return cls(path, geometry)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)

    def load(self) -> Iterator[Stub | Damage]:
        """Read superblock and table of a segment found on disk: its records, and what is damaged.

        A file that is too short is brought back to full size. One whose superblock does not verify yields one Damage
        and stays blank in memory; the caller blanks the file.
        """
        data, size = self._read_front()
        head = data[: _SUPERBLOCK.size]
        if len(data) < BLOCK:
            yield Damage("truncated_segment")
            return
        if not any(data[:BLOCK]):
            return
        if zlib.crc32(head) != _CRC.unpack_from(data, _SUPERBLOCK.size)[0]:
            yield Damage("corrupt_segment")
            return
        magic, version, algorithm, segment_bytes, sequence, nonce = _SUPERBLOCK.unpack(head)
        if (magic, version, segment_bytes) != (_MAGIC, _VERSION, self._geometry.segment_bytes):
            yield Damage("other_format")
            return
        if not available(algorithm):
            yield Damage("other_checksum")
            return
        self.sequence, self._nonce, self._algorithm = sequence, nonce, algorithm
        yield from self._load_table(data, size)

    def begin(self, sequence: int) -> None:
        """Make a blank segment ready to be written. Raises OSError."""
        self.sequence, self._nonce, self._algorithm = sequence, secrets.token_bytes(16), BEST
        head = _SUPERBLOCK.pack(_MAGIC, _VERSION, self._algorithm, self._geometry.segment_bytes, sequence, self._nonce)
        self._write_front(0, head + _CRC.pack(zlib.crc32(head)))

    def blank(self) -> None:
        """Forget everything in the file: first the superblock, so that no instant shows a damaged table.

        Raises OSError.
        """
        self._write_front(0, bytes(BLOCK))
        self._write_front(BLOCK, bytes(self._geometry.data_start - BLOCK))
        self.stubs.clear()
        self._to_end.clear()
        self.sequence, self._nonce = 0, b""
        self._next_slot, self._next_offset = 0, self._geometry.data_start

    def hold(self, stub: Stub) -> None:
        """Add a record; again where its time was over and no longer is."""
        self.stubs[stub.slot] = stub
        self._to_end.append(stub)

    def is_dead(self, now: float) -> bool:
        """Whether no record is left, or none whose time is not over. Amortized O(1): each record is passed by once."""
        while self._to_end:
            stub = self._to_end[-1]
            if self.stubs.get(stub.slot) is stub and not is_over(stub, now):
                return False
            self._to_end.pop()
        return True

    def seal(self) -> None:
        """Take no more records: its table or payloads are in doubt."""
        self._next_slot = self._geometry.max_records

    def fits(self, num_bytes: int) -> bool:
        """Whether a payload of `num_bytes` can still be appended."""
        room = self._geometry.segment_bytes - self._next_offset
        return self._next_slot < self._geometry.max_records and align_up(num_bytes) <= room

    def place(self, record: Record | Stub, data: ByteArray, lease_until: float, sequence: int) -> Stub:
        """Claim the next slot and room for a record's payload, which fits, and compute its checksum. Writes nothing."""
        stub = Stub(
            record.id,
            self,
            self._next_slot,
            self._next_offset,
            data.size,
            checksum(self._algorithm, data),
            lease_until,
            sequence,
            record.owner,
            record.expires_at,
        )
        self._next_slot += 1
        self._next_offset += align_up(data.size)
        return stub

    def write(self, stubs: Sequence[Stub], payloads: Sequence[ByteArray], pool: BouncePool) -> None:
        """Write consecutively placed records: the payloads, then their entries. Raises OSError."""
        with pool.borrow() as buffer:
            start, fill = stubs[0].offset, 0
            for payload in payloads:
                done = 0
                while done < payload.size:
                    if fill == buffer.size:
                        write_blocks(self._file, start, buffer)
                        start, fill = start + fill, 0
                    count = min(payload.size - done, buffer.size - fill)
                    np.copyto(buffer[fill : fill + count], payload[done : done + count])
                    done, fill = done + count, fill + count
                fill = align_up(fill)
            write_blocks(self._file, start, buffer[:fill])
        self._write_front(_entry_offset(stubs[0].slot), b"".join(map(self._encode, stubs)))

    def rewrite_entry(self, stub: Stub) -> None:
        """Write the entry of `stub` again, its lease having changed. Raises OSError."""
        self._write_front(_entry_offset(stub.slot), self._encode(stub))

    def erase_entry(self, stub: Stub) -> None:
        """Make the entry of `stub` free for good: no restart finds the record. Raises OSError."""
        self._write_front(_entry_offset(stub.slot), _FREE_ENTRY)

    def erase_owner(self, owner: OwnerTag) -> None:
        """Make every entry of an owner free, those too that no index knows any more, and wait until the disk has it.

        Raises OSError.
        """
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            table = os.pread(descriptor, self._geometry.max_records * ENTRY_BYTES, _entry_offset(0))
            for slot in range(len(table) // ENTRY_BYTES):
                entry = table[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES]
                if entry[_OWNER_AT : _OWNER_AT + OWNER_BYTES] == owner:
                    os.pwrite(descriptor, _FREE_ENTRY, _entry_offset(slot))
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, stubs: Sequence[Stub], outs: Sequence[ByteArray], pool: BouncePool) -> list[bool]:
        """Read neighbouring payloads into all of `outs`, with one call; which verify. Raises OSError."""
        read_run(self._file, stubs[0].offset, outs, pool)
        return [checksum(self._algorithm, out) == stub.checksum for stub, out in zip(stubs, outs, strict=True)]

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _encode(self, stub: Stub) -> bytes:
        body = _ENTRY.pack(
            stub.num_bytes,
            stub.id.to_bytes(),
            stub.offset // BLOCK,
            stub.checksum,
            stub.lease_until,
            stub.sequence,
            stub.owner,
            stub.expires_at,
        )
        return _CRC.pack(zlib.crc32(self._nonce + body)) + body

    def _load_table(self, data: bytes, size: int) -> Iterator[Stub | Damage]:
        sound = size == self._geometry.segment_bytes
        if not sound:
            yield Damage("wrong_size")
        for slot in range((len(data) - BLOCK) // ENTRY_BYTES):
            entry = data[_entry_offset(slot) : _entry_offset(slot + 1)]
            if slot >= self._geometry.max_records or entry == _FREE_ENTRY:
                continue
            self._next_slot = slot + 1
            if zlib.crc32(self._nonce + entry[_CRC.size :]) != _CRC.unpack_from(entry)[0]:
                sound = False
                yield Damage("corrupt_entry")
                continue
            num_bytes, id, first_block, digest, lease_until, sequence, *about = _ENTRY.unpack_from(entry, _CRC.size)
            offset = first_block * BLOCK
            self._next_offset = max(self._next_offset, offset + align_up(num_bytes))
            if offset + num_bytes > size:
                yield Damage("truncated_record")
                continue
            yield Stub(RecordId.from_bytes(id), self, slot, offset, num_bytes, digest, lease_until, sequence, *about)
        if not sound:
            self.seal()

    def _read_front(self) -> tuple[bytes, int]:
        """Superblock and table, and the size of the file; then make sure that all of it is allocated."""
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            size = os.fstat(descriptor).st_size
            data = os.pread(descriptor, self._geometry.data_start, 0)
            if size != self._geometry.segment_bytes:
                os.ftruncate(descriptor, self._geometry.segment_bytes)
                os.posix_fallocate(descriptor, 0, self._geometry.segment_bytes)
            return data, size
        finally:
            os.close(descriptor)

    def _write_front(self, offset: int, data: bytes) -> None:
        """Write to superblock or table, through the page cache: parts of blocks, which direct writes cannot."""
        descriptor = os.open(self.path, os.O_WRONLY)
        try:
            os.pwrite(descriptor, data, offset)
        finally:
            os.close(descriptor)


def _entry_offset(slot: int) -> int:
    return BLOCK + slot * ENTRY_BYTES
