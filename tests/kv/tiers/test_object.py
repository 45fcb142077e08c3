"""The object tier's own promises: packs, notes, several processes, damage."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="the object tier needs the extra 'object'")

import obstore
from obstore.store import LocalStore, MemoryStore

from pagoda.errors import TierUnavailable
from pagoda.kv.tiers.object import ObjectTier
from pagoda.kv.tiers.object_pack import header_bytes
from pagoda.kv.tiers.records import Corrupt, Failed, Found, Missing
from tests.kv.tiers.kit import KIB, Clock, get, record, rid, tag


def open_tier(store: object, clock: Clock | None = None, **options: object) -> ObjectTier:
    return ObjectTier(store, "a/b", refresh_s=0.0, clock=clock or Clock(), **options)


def names(store: object) -> list[str]:
    return sorted(meta["path"] for batch in obstore.list(store) for meta in batch)


def test_one_put_is_one_object(tmp_path: Path) -> None:
    store = MemoryStore()
    tier = open_tier(store)
    tier.put([record(n) for n in range(100)])
    assert len(names(store)) == 1
    assert names(store)[0].endswith("-000100.pack")
    assert tier.usage().used_bytes == 100 * 8 * KIB + header_bytes(100)


def test_a_large_put_is_several_objects(tmp_path: Path) -> None:
    store = MemoryStore()
    open_tier(store, pack_bytes=80 * KIB).put([record(n) for n in range(25)])
    assert len(names(store)) == 3


def test_processes_see_each_others_records_leases_and_deletions() -> None:
    store, clock = MemoryStore(), Clock()
    one, two = open_tier(store, clock), open_tier(store, clock)
    one.put([record(0), record(1)])
    assert two.lookup([rid(0), rid(1)]) == [Found(8 * KIB)] * 2
    assert get(two, rid(1), 8 * KIB) == (Found(8 * KIB), record(1).data)
    two.set_lease([rid(0)], clock.now + 60)
    two.delete([rid(1)])
    assert one.lookup([rid(0), rid(1)]) == [Found(8 * KIB), Missing()]
    assert [i.lease_until for i in one.scan()] == [clock.now + 60]
    three = open_tier(store, clock)
    assert three.lookup([rid(0), rid(1)]) == [Found(8 * KIB), Missing()]
    assert [i.lease_until for i in three.scan()] == [clock.now + 60]


def test_a_deletion_covers_all_older_records_of_the_id_but_no_newer_one() -> None:
    store, clock = MemoryStore(), Clock()
    tier = open_tier(store, clock)
    tier.put([record(1)])
    tier.put([record(1, version=1)])
    tier.delete([rid(1)])
    assert open_tier(store, clock).lookup([rid(1)]) == [Missing()]
    tier.put([record(1, version=2)])
    assert get(open_tier(store, clock), rid(1), 8 * KIB) == (Found(8 * KIB), record(1, version=2).data)


def test_a_pack_that_another_process_evicted_is_a_miss() -> None:
    store = MemoryStore()
    one, two = open_tier(store), open_tier(store)
    one.put([record(0)])
    assert two.lookup([rid(0)]) == [Found(8 * KIB)]
    obstore.delete(store, names(store)[0])
    assert get(two, rid(0))[0] == Missing()
    assert two.usage().used_bytes == 0


def test_a_purge_deletes_the_objects_of_its_owner_also_those_of_other_processes() -> None:
    store, clock = MemoryStore(), Clock()
    one, two = open_tier(store, clock), open_tier(store, clock)
    one.put([record(0, owner=tag("a")), record(1, owner=tag("b")), record(2, owner=tag("a"))])
    assert len(names(store)) == 3
    two.put([record(3, owner=tag("a"))])
    one.delete([rid(2)])
    assert two.purge(tag("a")) == 2
    assert [tag("b").hex() in name for name in names(store) if name.endswith("pack")] == [True]
    assert get(one, rid(0))[0] == Missing()
    assert get(two, rid(1), 8 * KIB) == (Found(8 * KIB), record(1).data)


def test_packs_that_expired_are_deleted_as_others_come(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    tier = open_tier(store, clock)
    tier.put([record(0, expires_at=clock.now + 10), record(1, expires_at=clock.now + 20)])
    tier.put([record(2, expires_at=clock.now + 30)])
    clock.now += 15
    tier.put([record(3)])
    assert len(names(store)) == 3
    clock.now += 10
    tier.put([record(4)])
    assert len(names(store)) == 3
    assert tier.lookup([rid(0), rid(2)]) == [Missing(), Found(8 * KIB)]


def test_notes_on_packs_that_expired_go_with_them() -> None:
    store, clock = MemoryStore(), Clock()
    tier = open_tier(store, clock)
    for number in range(20):
        tier.put([record(number, expires_at=clock.now + 10)])
        tier.set_lease([rid(number)], clock.now + 1)
        clock.now += 5
    assert len(names(store)) < 10


def test_packs_of_a_former_version_are_counted_and_go_first() -> None:
    store = MemoryStore()
    obstore.put(store, f"a/b/{1:015}-{'0' * 16}-000001.pack", b"PAGODAPK" + bytes(9 * KIB))
    tier = open_tier(store, capacity_bytes=64 * KIB)
    assert tier.stats() == {"other_format": 1}
    assert tier.usage().used_bytes == 9 * KIB + 8
    tier.put([record(n) for n in range(7)])
    assert len(names(store)) == 7


def test_eviction_takes_notes_along_once_they_say_nothing() -> None:
    store, clock = MemoryStore(), Clock()
    tier = open_tier(store, clock, capacity_bytes=64 * KIB)
    for number in range(100):
        tier.put([record(number)])
        tier.delete([rid(number - 1)])
        assert sum(meta["size"] for batch in obstore.list(store) for meta in batch) == tier.usage().used_bytes
    assert len(names(store)) < 20


def test_foreign_and_damaged_objects_are_counted_and_never_served() -> None:
    store = MemoryStore()
    open_tier(store).put([record(0)])
    open_tier(store, Clock(2_000_000.0)).put([record(1)])
    open_tier(store, Clock(3_000_000.0)).put([record(2), record(3)])
    first, second, third = names(store)
    obstore.put(store, "a/b/readme.txt", b"hello")
    obstore.put(store, "a/b/other/thing", b"hello")
    data = bytearray(obstore.get(store, first).bytes())
    data[40] ^= 1
    obstore.put(store, first, bytes(data))
    obstore.put(store, second, bytes(obstore.get(store, second).bytes())[:-1])
    data = bytearray(obstore.get(store, third).bytes())
    data[header_bytes(2)] ^= 1
    obstore.put(store, third, bytes(data))
    obstore.put(store, third.replace("pack", "note"), b"{}")
    tier = open_tier(store)
    assert tier.stats() == {"foreign_objects": 2, "corrupt_pack": 2, "corrupt_note": 1}
    assert tier.lookup([rid(0), rid(1)]) == [Missing(), Missing()]
    assert get(tier, rid(2))[0] == Corrupt("checksum")
    assert tier.lookup([rid(2)]) == [Missing()]
    assert get(tier, rid(3), 8 * KIB) == (Found(8 * KIB), record(3).data)


def test_a_store_that_fails_fails_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(MemoryStore())
    tier.put([record(0)])

    def broken(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    for name in ("put", "get_ranges", "list"):
        monkeypatch.setattr(obstore, name, broken)
    assert isinstance(tier.put([record(1)])[0], Failed)
    assert isinstance(get(tier, rid(0))[0], Failed)
    assert isinstance(tier.delete([rid(0)])[0], Failed)
    with pytest.raises(TierUnavailable, match="no route to host"):
        tier.lookup([rid(0)])
    with pytest.raises(TierUnavailable):
        open_tier(MemoryStore())


WRITER = """
import sys
from obstore.store import LocalStore
from pagoda.kv.tiers.object import ObjectTier
from pagoda.kv.tiers.records import Stored
from tests.kv.tiers.kit import record
writer = int(sys.argv[2])
tier = ObjectTier(LocalStore(sys.argv[1], mkdir=True), "a/b")
for n in range(20):
    assert tier.put([record(writer * 100 + n), record(500, version=writer)]) == [Stored(8192)] * 2
"""


def test_two_processes_write_one_folder(tmp_path: Path) -> None:
    """What a network file system sees: two writers that know nothing of each other, and a reader of both."""
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*command, str(number)]) for number in range(2)]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    tier = open_tier(LocalStore(tmp_path), Clock(time.time()))
    for number in [*range(20), *range(100, 120)]:
        assert get(tier, rid(number), 8 * KIB) == (Found(8 * KIB), record(number).data)
    assert get(tier, rid(500), 8 * KIB)[1] in (record(500, version=0).data, record(500, version=1).data)
    assert tier.stats().keys() <= {"found", "found_bytes"}
