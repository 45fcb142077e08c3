"""What the tests of all tiers share: ids, payloads, a clock, and one maker per tier."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pagoda.kv.keys import BlockKey
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.disk import DiskTier
from pagoda.kv.tiers.dram import DramTier
from pagoda.kv.tiers.fake import Faults, FaultyTier, MemoryTier
from pagoda.kv.tiers.records import GetResult, Record, RecordId, Target

KIB = 1 << 10


class Clock:
    """Unix seconds that a test moves."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Maker:
    """How to open one kind of tier.

    `capacity_bytes` bounds a tier of `bounded` kind; an opened tier lives in `folder` if it lives anywhere.
    """

    name: str
    open: Callable[[int, Clock, Path], Tier]
    bounded: bool = True


MAKERS = [
    Maker("memory", lambda capacity, clock, folder: MemoryTier(capacity, clock=clock)),
    Maker("faulty", lambda capacity, clock, folder: FaultyTier(MemoryTier(capacity, clock=clock), Faults())),
    Maker("dram", lambda capacity, clock, folder: DramTier(capacity, granule_bytes=4 * KIB, clock=clock)),
    Maker("disk", lambda capacity, clock, folder: DiskTier(folder, capacity, segment_bytes=64 * KIB, clock=clock)),
]


def rid(number: int, group: int = 0, shard: int = 0) -> RecordId:
    return RecordId(BlockKey(hashlib.sha256(str(number).encode()).digest()), group, shard)


def payload(seed: int, num_bytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


def record(number: int, num_bytes: int = 8 * KIB, *, version: int = 0, lease_until: float = 0.0) -> Record:
    return Record(rid(number), payload(number + 1_000_003 * version, num_bytes), lease_until)


def get(tier: Tier, id: RecordId, room: int = 64 * KIB) -> tuple[GetResult, bytes]:
    """One record's outcome and the whole buffer it was read into."""
    buffer = bytearray(room)
    (result,) = tier.get_into([Target(id, buffer)])
    return result, bytes(buffer)
