"""RedisTier: records in a Redis or Valkey server, shared by every process that reaches it.

    PREFIX + id  ->  lease | format, checksum algorithm, checksum, owner, expiry, crc of these | payload
                     the key expires with the record or after `ttl_s`, or with its lease if that is later

A purge reads the heads of all keys under PREFIX and deletes the owner's. The server owns room and eviction: shares do
not count. A lease holds if its `maxmemory-policy` is noeviction (the default: it then refuses writes when full, which
comes back as Rejected) or a `volatile-ttl`; any other may drop leased records.
"""

from __future__ import annotations

import logging
import re
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import redis
from redis.exceptions import OutOfMemoryError, RedisError

from pagoda.errors import CorruptRecord, TierError, TierUnavailable
from pagoda.kv.keys import OWNER_BYTES, OwnerTag
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.checksum import BEST, available, checksum
from pagoda.kv.tiers.records import (
    NO_EXPIRY,
    RECORD_ID_BYTES,
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

logger = logging.getLogger(__name__)

_FORMAT = b"PGD2"
_LEASE = struct.Struct("<d")
_ABOUT = struct.Struct(f"<4sIQ{OWNER_BYTES}sd")
_CRC = struct.Struct("<I")
HEAD_BYTES = _LEASE.size + _ABOUT.size + _CRC.size
_SCAN_COUNT = 1000
_FULL = 0.95

# Keeps the later lease, and the key until it ends: in one step, because several processes write.
_PUT = """
local lease, head = ARGV[1], redis.call('GETRANGE', KEYS[1], 0, 7)
if #head == 8 and struct.unpack('<d', head) > struct.unpack('<d', lease) then lease = head end
redis.call('SET', KEYS[1], lease .. ARGV[2])
redis.call('PEXPIREAT', KEYS[1], string.format('%.0f', math.max(struct.unpack('<d', lease) * 1000, tonumber(ARGV[3]))))
return 1
"""
# ARGV: lease, when a key without an expiry of its own goes, where in the value that expiry is.
_SET_LEASE = """
local expiry = redis.call('GETRANGE', KEYS[1], ARGV[3], ARGV[3] + 7)
if #expiry < 8 then return 0 end
redis.call('SETRANGE', KEYS[1], 0, ARGV[1])
local last = struct.unpack('<d', expiry) * 1000
if last == 0 then last = tonumber(ARGV[2]) end
redis.call('PEXPIREAT', KEYS[1], string.format('%.0f', math.max(struct.unpack('<d', ARGV[1]) * 1000, last)))
return 1
"""
_EXPIRY_AT = _LEASE.size + _ABOUT.size - 8


@dataclass(frozen=True, slots=True)
class _Head:
    """What stands before a payload of `num_bytes`."""

    num_bytes: int
    lease_until: float
    algorithm: int
    checksum: int
    owner: OwnerTag
    expires_at: float

    @classmethod
    def decode(cls, front: bytes, value_bytes: int) -> _Head | None:
        """Of a value that begins with `front`; None for another format. Raises CorruptRecord."""
        if len(front) < HEAD_BYTES:
            raise CorruptRecord("a value is shorter than its head")
        about = front[_LEASE.size : _LEASE.size + _ABOUT.size]
        form, algorithm, digest, owner, expires_at = _ABOUT.unpack(about)
        if form != _FORMAT:
            return None
        if _CRC.unpack_from(front, HEAD_BYTES - _CRC.size)[0] != zlib.crc32(about):
            raise CorruptRecord("a value's head does not verify")
        (lease_until,) = _LEASE.unpack_from(front)
        return cls(value_bytes - HEAD_BYTES, lease_until, algorithm, digest, owner, expires_at)


class RedisTier(Tier):
    """Keys under `prefix` at `url`.

    Args:
        ttl_s: how long a record without an expiry is kept at most, so that nothing stays for ever.
        timeout_s: deadline of each request.
        clock: Unix seconds.

    Raises TierUnavailable if the server does not answer. `stats` adds other_format.
    """

    keeps_leases = False

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "pagoda:",
        ttl_s: float = 7 * 86400.0,
        timeout_s: float = 5.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__("redis")
        self._prefix = prefix.encode()
        self.ttl_s: float = ttl_s
        self._clock = clock
        self._client: Any = redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
        self._put_script = self._client.register_script(_PUT)
        self._lease_script = self._client.register_script(_SET_LEASE)
        if warning := policy_warning(self._answer(lambda: self._client.info("memory"))):
            logger.warning("%s", warning)

    def _lookup(self, ids: Sequence[RecordId]) -> list[LookupResult]:
        now = self._clock()
        return [found(head, now) for head in self._heads([self._key(id) for id in ids])]

    def _put(self, records: Sequence[Record]) -> list[PutResult]:
        return [self._put_one(record) for record in records]

    def _get_into(self, targets: Sequence[Target]) -> list[GetResult]:
        return [self._get_one(target) for target in targets]

    def _delete(self, ids: Sequence[RecordId]) -> list[DeleteResult]:
        pipeline = self._client.pipeline(transaction=False)
        for id in ids:
            pipeline.delete(self._key(id))
        try:
            return [Deleted() if count else Missing() for count in pipeline.execute()]
        except RedisError as error:
            return [Failed(TierError(f"redis: {error}"))] * len(ids)

    def _purge(self, owner: OwnerTag) -> int:
        return int(self._answer(lambda: sum(self._purge_keys(owner, keys) for keys in _batches(self._keys()))))

    def _purge_keys(self, owner: OwnerTag, keys: Sequence[bytes]) -> int:
        mine = [key for key, head in zip(keys, self._heads(keys), strict=True) if head and head.owner == owner]
        return int(self._client.unlink(*mine)) if mine else 0

    def _set_lease(self, ids: Sequence[RecordId], until: float) -> list[LookupResult]:
        arguments: list[Any] = [_LEASE.pack(until), self._expiry_ms(NO_EXPIRY), _EXPIRY_AT]
        try:
            for id in ids:
                self._lease_script(keys=[self._key(id)], args=arguments)
        except RedisError as error:
            raise TierUnavailable(f"redis: {error}") from error
        return self._lookup(ids)

    def _scan(self) -> Iterator[RecordInfo]:
        for keys in _batches(self._keys()):
            for key, head in zip(keys, self._heads(keys), strict=True):
                if head is not None:
                    id = RecordId.from_bytes(key[len(self._prefix) :])
                    yield RecordInfo(id, head.num_bytes, head.lease_until, head.owner, head.expires_at)

    def _keys(self) -> Iterator[bytes]:
        """The keys that name records."""
        pattern = re.sub(rb"([][*?\\^])", rb"\\\1", self._prefix) + b"*"
        for key in self._client.scan_iter(match=pattern, count=_SCAN_COUNT):
            if len(key) == len(self._prefix) + RECORD_ID_BYTES:
                yield key

    def _heads(self, keys: Sequence[bytes]) -> list[_Head | None]:
        """What stands at these keys; None where there is nothing, or nothing of this format."""
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.getrange(key, 0, HEAD_BYTES - 1)
            pipeline.strlen(key)
        answers = self._answer(pipeline.execute) if keys else []
        return [self._head(front, size) for front, size in zip(answers[::2], answers[1::2], strict=True)]

    def _head(self, front: bytes, value_bytes: int) -> _Head | None:
        try:
            head = _Head.decode(front, value_bytes)
        except CorruptRecord:
            return None
        if head is None:
            self._tally.add("other_format")
        return head

    def _usage(self) -> Usage:
        infos = self._answer(lambda: list(self._scan()))
        owners = Counter[OwnerTag]()
        for info in infos:
            owners[info.owner] += info.num_bytes
        overhead = len(infos) * (HEAD_BYTES + len(self._prefix) + RECORD_ID_BYTES)
        return Usage(None, owners.total() + overhead, owners.total(), len(infos), owners)

    def _close(self) -> None:
        self._client.close()

    def _put_one(self, record: Record) -> PutResult:
        payload = readable(record.data)
        about = _ABOUT.pack(_FORMAT, BEST, checksum(BEST, payload), record.owner, record.expires_at)
        body = about + _CRC.pack(zlib.crc32(about)) + payload.tobytes()
        arguments: list[Any] = [_LEASE.pack(record.lease_until), body, self._expiry_ms(record.expires_at)]
        try:
            self._put_script(keys=[self._key(record.id)], args=arguments)
        except OutOfMemoryError:
            return Rejected(Reason.FULL)
        except RedisError as error:
            return Failed(TierError(f"redis: {error}"))
        return Stored(payload.size)

    def _get_one(self, target: Target) -> GetResult:
        out = writable(target.buffer)
        try:
            value = self._client.get(self._key(target.id))
        except RedisError as error:
            return Failed(TierError(f"redis: {error}"))
        if value is None:
            return Missing()
        try:
            head = _Head.decode(value[:HEAD_BYTES], len(value))
        except CorruptRecord:
            return self._corrupt(target.id, "head")
        if head is None:
            self._tally.add("other_format")
            return Missing()
        if is_over(head, self._clock()):
            return Expired()
        payload = np.frombuffer(value, dtype=np.uint8)[HEAD_BYTES:]
        if not available(head.algorithm) or checksum(head.algorithm, payload) != head.checksum:
            return self._corrupt(target.id, "checksum")
        if out.size < payload.size:
            return Rejected(Reason.BUFFER_TOO_SMALL)
        out[: payload.size] = payload
        return Found(payload.size)

    def _corrupt(self, id: RecordId, reason: str) -> Corrupt:
        self._delete([id])
        return Corrupt(reason)

    def _key(self, id: RecordId) -> bytes:
        return self._prefix + id.to_bytes()

    def _expiry_ms(self, expires_at: float) -> int:
        return int((expires_at or self._clock() + self.ttl_s) * 1000)

    def _answer(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except RedisError as error:
            raise TierUnavailable(f"redis: {error}") from error


def _batches(keys: Iterator[bytes]) -> Iterator[list[bytes]]:
    while batch := list(islice(keys, _SCAN_COUNT)):
        yield batch


def policy_warning(memory: Mapping[str, Any]) -> str:
    """What is wrong with how a server makes room, told by its INFO; empty if nothing is, or it does not tell."""
    most, policy = memory.get("maxmemory"), memory.get("maxmemory_policy")
    if most is None or policy is None:
        return ""
    if not most:
        return (
            "the Redis server has no maxmemory: it keeps every block until its time is over, and grows until its "
            "machine has no memory left; set maxmemory, and maxmemory-policy allkeys-lru or volatile-ttl"
        )
    if policy != "noeviction":
        return ""
    full = "is full now" if memory.get("used_memory", 0) >= _FULL * most else "is full"
    return (
        f"the Redis server has maxmemory-policy noeviction: when it {full}, it refuses new blocks until old ones' time "
        "is over; allkeys-lru makes room at once, volatile-ttl too and drops leased blocks last"
    )
