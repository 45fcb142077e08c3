"""What the tests of all tiers share: ids, payloads, a clock, and one maker per tier."""

from __future__ import annotations

import atexit
import hashlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagoda.kv.keys import NO_OWNER, OWNER_BYTES, BlockKey, OwnerTag
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.disk import DiskTier
from pagoda.kv.tiers.dram import DramTier
from pagoda.kv.tiers.fake import Faults, FaultyTier, MemoryTier
from pagoda.kv.tiers.records import GetResult, Record, RecordId, Target
from pagoda.kv.tiers.shared import SharedTier
from tests.kv.tiers.s3 import S3Server, find_binary

KIB = 1 << 10


class Clock:
    """Unix seconds that a test moves."""

    def __init__(self, now: float | None = None) -> None:
        self.now = float(int(time.time())) if now is None else now

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Maker:
    """How to open one kind of tier.

    `capacity_bytes` bounds a tier of `bounded` kind; an opened tier lives in `folder` if it lives anywhere. What is in
    a `lasting` one is there when it is opened again. One that `has_shares` takes `shares`.
    """

    name: str
    open: Callable[..., Tier]
    bounded: bool = True
    lasting: bool = True
    has_shares: bool = False


def object_tier(capacity: int, clock: Clock, folder: Path) -> Tier:
    """On a folder; skips the test where the extra is not installed."""
    pytest.importorskip("obstore", reason="the object tier needs the extra 'object'")
    from obstore.store import LocalStore

    from pagoda.kv.tiers.object import ObjectTier

    return ObjectTier(LocalStore(folder, mkdir=True), "tier", capacity_bytes=capacity, clock=clock)


@cache
def redis_url() -> str:
    """A server for all tests, stopped at exit; skips the test where there is none."""
    return start_redis()[0]


def start_redis(*more: str) -> tuple[str, subprocess.Popen[bytes]]:
    """The address of a new server on a free loopback port, and its process, stopped at exit at the latest.

    More options override those given here.
    """
    pytest.importorskip("redis", reason="the redis tier needs the extra 'redis'")
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("no redis-server on this machine")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tempfile.TemporaryDirectory()
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--maxmemory", "64mb", "--dir", folder.name]
    server = subprocess.Popen([binary, *options, *more], stdout=subprocess.DEVNULL)
    atexit.register(lambda: (server.kill(), server.wait(), folder.cleanup()))
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return f"redis://127.0.0.1:{port}/0", server
        time.sleep(0.05)
    raise RuntimeError("redis-server did not come up")


def redis_tier(capacity: int, clock: Clock, folder: Path) -> Tier:
    """Under a prefix of its own, which glob patterns must not mistake."""
    url = redis_url()
    from pagoda.kv.tiers.redis import RedisTier

    return RedisTier(url, prefix=f"[test*]{folder}:", clock=clock)


@cache
def s3_server() -> S3Server:
    """A server for all tests, killed at exit; skips the test where there is none."""
    pytest.importorskip("obstore", reason="the object tier needs the extra 'object'")
    find_binary()
    folder = tempfile.TemporaryDirectory()
    server = S3Server(Path(folder.name))
    atexit.register(lambda: (server.kill(), folder.cleanup()))
    server.start()
    import obstore

    obstore.put(server.store("contract"), "made", b"")
    return server


def s3_tier(capacity: int, clock: Clock, folder: Path) -> Tier:
    """Under a prefix of its own."""
    store = s3_server().store("contract")
    from pagoda.kv.tiers.object import ObjectTier

    return ObjectTier(store, str(folder), capacity_bytes=capacity, clock=clock)


def encrypted_tier(capacity: int, clock: Clock, folder: Path, **options: Any) -> Tier:
    """Around a disk tier; skips the test where the extra is not installed."""
    pytest.importorskip("cryptography", reason="encryption needs the extra 'encryption'")
    from pagoda.kv.tiers.encrypted import EncryptedTier

    return EncryptedTier(disk_tier(capacity, clock, folder, **options), bytes(range(32)))


def memory_tier(capacity: int, clock: Clock, folder: Path, **options: Any) -> Tier:
    return MemoryTier(capacity, clock=clock, **options)


def faulty_tier(capacity: int, clock: Clock, folder: Path, **options: Any) -> Tier:
    return FaultyTier(MemoryTier(capacity, clock=clock, **options), Faults())


def dram_tier(capacity: int, clock: Clock, folder: Path, **options: Any) -> Tier:
    return DramTier(capacity, granule_bytes=4 * KIB, clock=clock, **options)


def disk_tier(capacity: int, clock: Clock, folder: Path, **options: Any) -> Tier:
    return DiskTier(folder, capacity, segment_bytes=64 * KIB, clock=clock, **options)


def shared_tier(capacity: int, clock: Clock, folder: Path, **options: Any) -> Tier:
    return SharedTier(folder / "pool", capacity, granule_bytes=4 * KIB, clock=clock, **options)


MAKERS = [
    Maker("memory", memory_tier, lasting=False, has_shares=True),
    Maker("faulty", faulty_tier, lasting=False, has_shares=True),
    Maker("dram", dram_tier, lasting=False, has_shares=True),
    Maker("disk", disk_tier, has_shares=True),
    Maker("object", object_tier),
    Maker("s3", s3_tier),
    Maker("shared", shared_tier, has_shares=True),
    Maker("encrypted", encrypted_tier, has_shares=True),
    Maker("redis", redis_tier, bounded=False),
]


def tag(name: str) -> OwnerTag:
    return OwnerTag(hashlib.sha256(name.encode()).digest()[:OWNER_BYTES])


def rid(number: int, group: int = 0, shard: int = 0) -> RecordId:
    return RecordId(BlockKey(hashlib.sha256(str(number).encode()).digest()), group, shard)


def payload(seed: int, num_bytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


def record(
    number: int,
    num_bytes: int = 8 * KIB,
    *,
    version: int = 0,
    lease_until: float = 0.0,
    owner: OwnerTag = NO_OWNER,
    expires_at: float = 0.0,
) -> Record:
    return Record(rid(number), payload(number + 1_000_003 * version, num_bytes), lease_until, owner, expires_at)


def get(tier: Tier, id: RecordId, room: int = 64 * KIB) -> tuple[GetResult, bytes]:
    """One record's outcome and the whole buffer it was read into."""
    buffer = bytearray(room)
    (result,) = tier.get_into([Target(id, buffer)])
    return result, bytes(buffer)
