"""What goes into a tier and what comes out: ids, records, targets, and one typed outcome per record."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pagoda.errors import TierError
from pagoda.kv.keys import KEY_BYTES, NO_OWNER, BlockKey, OwnerTag

Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]
ByteArray = npt.NDArray[np.uint8]

_PLACE = struct.Struct(">HH")
RECORD_ID_BYTES = KEY_BYTES + _PLACE.size
NO_LEASE = 0.0
NO_EXPIRY = 0.0
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RecordId:
    """The name of one record: a block of one layer group, as one shard (tensor-parallel rank) holds it."""

    key: BlockKey
    group: int = 0
    shard: int = 0

    def to_bytes(self) -> bytes:
        """Its 36 bytes: key, group, shard. Raises ValueError for a key of another length or numbers over 16 bits."""
        if len(self.key) != KEY_BYTES or not (0 <= self.group < 1 << 16 and 0 <= self.shard < 1 << 16):
            raise ValueError(f"not a record id: {len(self.key)} key bytes, group {self.group}, shard {self.shard}")
        return self.key + _PLACE.pack(self.group, self.shard)

    @classmethod
    def from_bytes(cls, data: bytes) -> RecordId:
        """The id that `to_bytes` encoded. Raises ValueError unless `data` has 36 bytes."""
        if len(data) != RECORD_ID_BYTES:
            raise ValueError(f"a record id has {RECORD_ID_BYTES} bytes, not {len(data)}")
        return cls(BlockKey(data[:KEY_BYTES]), *_PLACE.unpack_from(data, KEY_BYTES))


@dataclass(frozen=True, slots=True)
class Record:
    """What `put` stores. `data` is read before `put` returns and not kept.

    Attributes:
        lease_until: before this Unix time it is not dropped to make room.
        owner: whose it is, as `KeyChain.owner` marks it.
        expires_at: from this Unix time on it is a miss, unless a lease runs longer.
    """

    id: RecordId
    data: Buffer
    lease_until: float = NO_LEASE
    owner: OwnerTag = NO_OWNER
    expires_at: float = NO_EXPIRY


@dataclass(frozen=True, slots=True)
class Target:
    """Where `get_into` puts a payload: the front of `buffer`, writable and owned by the caller.

    The bytes of `buffer` are undefined unless the outcome is Found. Nobody else may touch them meanwhile, so buffers of
    one batch must not overlap: what is verified is what was read into them.
    """

    id: RecordId
    buffer: Buffer


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """What a tier knows of a record without reading its payload."""

    id: RecordId
    num_bytes: int
    lease_until: float
    owner: OwnerTag
    expires_at: float


class Reason(Enum):
    """Why a record was rejected; only FULL is worth another try later."""

    FULL = "full"
    TOO_LARGE = "too_large"
    BUFFER_TOO_SMALL = "buffer_too_small"


@dataclass(frozen=True, slots=True)
class Stored:
    """The record is in the tier with its `num_bytes` of payload; the same id's former payload is not."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """The record is there, with a payload of `num_bytes`."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Missing:
    """The tier does not have the record."""


@dataclass(frozen=True, slots=True)
class Expired(Missing):
    """The record was there, and its time is over: a miss."""


@dataclass(frozen=True, slots=True)
class Corrupt:
    """The record was there and did not verify; the tier dropped it. `reason` is a short stable word."""

    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """The tier refused; nothing changed."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Failed:
    """An input/output error hit this record; whether it is stored is unknown."""

    error: TierError


@dataclass(frozen=True, slots=True)
class Deleted:
    """The record was there and is no longer."""


LookupResult = Found | Missing
PutResult = Stored | Rejected | Failed
GetResult = Found | Missing | Corrupt | Rejected | Failed
DeleteResult = Deleted | Missing | Failed


@dataclass(frozen=True, slots=True)
class Usage:
    """How full a tier is. `used_bytes` counts everything it occupies, headers and rounding included, and never
    exceeds `capacity_bytes` (None: bounded only by the service behind it). `owners` has what the records of each owner
    take: their payloads and what those are rounded up to.
    """

    capacity_bytes: int | None
    used_bytes: int
    payload_bytes: int
    num_records: int
    owners: Mapping[OwnerTag, int]


class Kept(Protocol):
    """What a tier has of a record in its index."""

    @property
    def num_bytes(self) -> int:
        """Size of its payload."""

    @property
    def lease_until(self) -> float:
        """See Record."""

    @property
    def expires_at(self) -> float:
        """See Record."""


def is_over(kept: Kept, now: float) -> bool:
    """Whether a record's time and its lease, if it has one, ran out."""
    return 0 < kept.expires_at <= now and kept.lease_until <= now


def found(kept: Kept | None, now: float) -> LookupResult:
    """What a lookup says of a record."""
    if kept is None:
        return Missing()
    return Expired() if is_over(kept, now) else Found(kept.num_bytes)


def readable(buffer: Buffer) -> ByteArray:
    """`buffer` as flat bytes, not copied. Raises TypeError unless it is C-contiguous."""
    view = memoryview(buffer)  # type: ignore[arg-type]  # numpy's stubs know no buffer protocol before 3.12
    if not view.c_contiguous:
        raise TypeError("a record's bytes must be contiguous")
    return np.frombuffer(view, dtype=np.uint8) if view.nbytes else np.empty(0, dtype=np.uint8)


def writable(buffer: Buffer) -> ByteArray:
    """`buffer` as flat writable bytes, not copied. Raises TypeError if it is read-only or not contiguous."""
    if memoryview(buffer).readonly:  # type: ignore[arg-type]
        raise TypeError("get_into needs a writable buffer")
    return readable(buffer)


def aligned_empty(num_bytes: int) -> ByteArray:
    """Memory of unknown content that starts on a page: what every tier reads into and writes from without a detour.

    It comes from the ordinary allocator, which hands out used pages again; fresh ones cost more than the detour.
    """
    memory = np.empty(num_bytes + PAGE_BYTES, dtype=np.uint8)
    start = -address(memory) % PAGE_BYTES
    return memory[start : start + num_bytes]


def address(buffer: ByteArray) -> int:
    """Where `buffer` starts in memory."""
    where: int = buffer.__array_interface__["data"][0]  # several times faster than `ctypes.data`
    return where
