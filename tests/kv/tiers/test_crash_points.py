"""A crash before every single write of a busy disk tier: what a copy of the folder, taken there, comes back as."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from pagoda.kv.tiers.disk import DiskTier
from pagoda.kv.tiers.disk_log import SegmentLog
from pagoda.kv.tiers.records import Found, Missing, Record, Stored
from tests.kv.tiers.kit import KIB, Clock, get, rid
from tests.kv.tiers.writer import NUM_OWNERS, content, owner_of

SEGMENT = 64 * KIB
CAPACITY = 5 * SEGMENT + 64
NUM_IDS = 40


@pytest.mark.parametrize("seed", range(2))
def test_every_write_may_be_the_last(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, clock = random.Random(seed), Clock()
    folder = tmp_path / "tier"
    stored: dict[int, tuple[int, float]] = {}
    writing: set[int] = set()
    deleting: set[int] = set()
    write = os.pwrite
    checked = cleaned = 0

    def check_copy() -> None:
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        with DiskTier(copy, CAPACITY, segment_bytes=SEGMENT, clock=clock) as tier:
            assert not [n for n in tier.stats() if n.startswith(("corrupt", "truncated", "wrong"))]
            for number in range(NUM_IDS):
                result, data = get(tier, rid(number))
                if isinstance(result, Found):
                    version = int.from_bytes(data[4:8], "little")
                    assert data[: result.num_bytes] == content(number, version)
                    assert number in writing or version == stored[number][0]  # and a KeyError of what was purged
                else:
                    assert result == Missing()
                    leased = number in stored and stored[number][1] > clock.now
                    assert not leased or number in deleting
        shutil.rmtree(copy)

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal checked
        if not watching:
            return write(descriptor, data, offset)
        watching.clear()
        check_copy()
        watching.add(True)
        checked += 1
        return write(descriptor, data, offset)

    clean = SegmentLog._clean

    def count_clean(self: SegmentLog, *args: object) -> None:
        nonlocal cleaned
        cleaned += 1
        clean(self, *args)

    watching: set[bool] = set()
    monkeypatch.setattr(SegmentLog, "_clean", count_clean)
    with DiskTier(folder, CAPACITY, segment_bytes=SEGMENT, clock=clock) as tier:
        monkeypatch.setattr(os, "pwrite", pwrite)
        watching.add(True)
        for version in range(1, 60):
            numbers = [rng.randrange(NUM_IDS) for _ in range(rng.randrange(1, 4))]
            lease = clock.now + 1000 if rng.random() < 0.2 else 0.0
            writing.update(numbers)
            results = tier.put([Record(rid(n), content(n, version), lease, owner_of(n)) for n in numbers])
            for number, result in zip(numbers, results, strict=True):
                if result == Stored(len(content(number, version))):
                    _, old = stored.get(number, (0, 0.0))
                    stored[number] = (version, max(lease, old))
            writing.clear()
            if version % 5 == 0:
                number = rng.randrange(NUM_IDS)
                deleting.add(number)
                tier.delete([rid(number)])
                stored.pop(number, None)
                deleting.clear()
            if version % 13 == 0:
                deleting.update(range(version % NUM_OWNERS, NUM_IDS, NUM_OWNERS))
                tier.purge(owner_of(version))
                for number in deleting:
                    stored.pop(number, None)
                deleting.clear()
            get(tier, rid(rng.randrange(NUM_IDS)))
            if version % 15 == 0:
                clock.now += 400
        watching.clear()
    assert checked > 100
    assert cleaned > 5
