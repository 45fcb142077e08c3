"""RedisTier: records in a Redis or Valkey server, shared by every process that reaches it.

    PREFIX + id  ->  lease (8 bytes) | checksum algorithm (4) | checksum (8) | payload
                     expires after `ttl_s`, or with its lease if that is later

The server owns room and eviction. A lease holds if the server's `maxmemory-policy` is noeviction (the default: it then
refuses writes when full, which comes back as Rejected) or a `volatile-ttl`; any other may drop leased records.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import redis
from redis.exceptions import OutOfMemoryError, RedisError

from pagoda.errors import TierError, TierUnavailable
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.checksum import BEST, available, checksum
from pagoda.kv.tiers.records import (
    RECORD_ID_BYTES,
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

_HEAD = struct.Struct("<dIQ")
_LEASE = struct.Struct("<d")
_SCAN_COUNT = 1000

# Keeps the later lease, and the key until it ends: in one step, because several processes write.
_PUT = """
local lease, head = ARGV[1], redis.call('GETRANGE', KEYS[1], 0, 7)
if #head == 8 and struct.unpack('<d', head) > struct.unpack('<d', lease) then lease = head end
redis.call('SET', KEYS[1], lease .. ARGV[2])
redis.call('PEXPIREAT', KEYS[1], string.format('%.0f', math.max(struct.unpack('<d', lease) * 1000, tonumber(ARGV[3]))))
return 1
"""
_SET_LEASE = """
local size = redis.call('STRLEN', KEYS[1])
if size == 0 then return 0 end
redis.call('SETRANGE', KEYS[1], 0, ARGV[1])
redis.call('PEXPIREAT', KEYS[1], ARGV[2])
return size
"""


class RedisTier(Tier):
    """Keys under `prefix` at `url`.

    Args:
        ttl_s: how long a record without a lease is kept at most, so that nothing stays for ever.
        timeout_s: deadline of each request.
        clock: Unix seconds.

    Raises TierUnavailable if the server does not answer.
    """

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
        self._ttl_s = ttl_s
        self._clock = clock
        self._client: Any = redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
        self._put_script = self._client.register_script(_PUT)
        self._lease_script = self._client.register_script(_SET_LEASE)
        self._answer(self._client.ping)

    def _lookup(self, ids: Sequence[RecordId]) -> list[LookupResult]:
        pipeline = self._client.pipeline(transaction=False)
        for id in ids:
            pipeline.strlen(self._key(id))
        return [_found(size) for size in self._answer(pipeline.execute)]

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

    def _set_lease(self, ids: Sequence[RecordId], until: float) -> list[LookupResult]:
        expiry = self._expiry_ms(until)
        arguments: list[Any] = [_LEASE.pack(until), expiry]
        try:
            return [_found(self._lease_script(keys=[self._key(id)], args=arguments)) for id in ids]
        except RedisError as error:
            raise TierUnavailable(f"redis: {error}") from error

    def _scan(self) -> Iterator[RecordInfo]:
        for key in self._client.scan_iter(
            match=re.sub(rb"([][*?\\^])", rb"\\\1", self._prefix) + b"*", count=_SCAN_COUNT
        ):
            try:
                id = RecordId.from_bytes(key[len(self._prefix) :])
            except ValueError:
                continue
            head, size = self._client.getrange(key, 0, _LEASE.size - 1), self._client.strlen(key)
            if size >= _HEAD.size:
                yield RecordInfo(id, size - _HEAD.size, _LEASE.unpack(head)[0])

    def _usage(self) -> Usage:
        sizes = [info.num_bytes for info in self._answer(lambda: list(self._scan()))]
        used = sum(sizes) + len(sizes) * (_HEAD.size + len(self._prefix) + RECORD_ID_BYTES)
        return Usage(None, used, sum(sizes), len(sizes))

    def _close(self) -> None:
        self._client.close()

    def _put_one(self, record: Record) -> PutResult:
        payload = readable(record.data)
        body = _HEAD.pack(0.0, BEST, checksum(BEST, payload))[_LEASE.size :] + payload.tobytes()
        arguments: list[Any] = [_LEASE.pack(record.lease_until), body, self._expiry_ms(record.lease_until)]
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
        if len(value) < _HEAD.size:
            return self._corrupt(target.id, "head")
        _, algorithm, digest = _HEAD.unpack_from(value)
        payload = np.frombuffer(value, dtype=np.uint8, offset=_HEAD.size) if len(value) > _HEAD.size else out[:0]
        if not available(algorithm) or checksum(algorithm, payload) != digest:
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

    def _expiry_ms(self, lease_until: float) -> int:
        return int(max(self._clock() + self._ttl_s, lease_until) * 1000)

    def _answer(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except RedisError as error:
            raise TierUnavailable(f"redis: {error}") from error


def _found(value_bytes: int) -> LookupResult:
    return Found(value_bytes - _HEAD.size) if value_bytes >= _HEAD.size else Missing()
