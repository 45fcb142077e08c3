"""The shared tier's own promises: several processes, dead and slow writers, overtaken readers, damage."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pagoda.errors import ConfigError
from pagoda.kv.keys import NO_OWNER
from pagoda.kv.tiers import shared
from pagoda.kv.tiers.records import Corrupt, Found, Missing, Reason, Rejected, Stored, Target
from pagoda.kv.tiers.shared import SharedTier
from pagoda.kv.tiers.shared_table import FREE, WRITE_DEADLINE_S, SharedTable, Writer
from tests.kv.tiers.kit import KIB, Clock, get, record, rid, tag

CAPACITY = 128 * KIB


def open_tier(folder: Path, clock: Clock | None = None, capacity: int = CAPACITY) -> SharedTier:
    return SharedTier(folder / "pool", capacity, granule_bytes=4 * KIB, clock=clock or Clock())


def claim(tier: SharedTier, count: int, writer: Writer, now: float) -> None:
    """What a writer leaves that was stopped before it published."""
    with tier._locked() as table:
        rows = table.free(now)[:count]
        table.claim(rows, rid(99), writer, NO_OWNER, now)


def test_the_file_has_its_size_from_the_start(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    assert (tmp_path / "pool").stat().st_size == CAPACITY == tier.usage().capacity_bytes
    assert (tmp_path / "pool").stat().st_blocks * 512 >= CAPACITY


def test_two_openers_share_records_leases_and_room(tmp_path: Path) -> None:
    clock = Clock()
    one, two = open_tier(tmp_path, clock), open_tier(tmp_path, clock)
    one.put([record(0, lease_until=clock.now + 60), record(1)])
    assert get(two, rid(0), 8 * KIB) == (Found(8 * KIB), record(0).data)
    two.put([record(n) for n in range(10, 100)])
    assert one.lookup([rid(0), rid(1), rid(99)]) == [Found(8 * KIB), Missing(), Found(8 * KIB)]
    two.delete([rid(0)])
    assert one.lookup([rid(0)]) == [Missing()]
    assert one.usage() == two.usage()


def test_a_dead_writers_granules_come_back(tmp_path: Path) -> None:
    clock = Clock()
    tier = open_tier(tmp_path, clock)
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    empty = tier.usage()
    claim(tier, 20, Writer(process.pid, 12345), clock.now)
    assert tier.usage() == empty
    assert tier.put([record(n) for n in range(14)]) == [Stored(8 * KIB)] * 14
    assert tier.stats().get("evicted", 0) == 0


def test_a_living_writers_granules_are_its_own_until_the_deadline(tmp_path: Path) -> None:
    clock = Clock()
    tier = open_tier(tmp_path, clock)
    empty = tier.usage()
    claim(tier, 20, Writer.this_process(), clock.now)
    assert tier.put([record(0, 60 * KIB)]) == [Rejected(Reason.FULL)]
    assert tier.usage().used_bytes == empty.used_bytes + 20 * 4 * KIB
    clock.now += WRITE_DEADLINE_S + 1
    assert tier.put([record(0, 60 * KIB)]) == [Stored(60 * KIB)]


def test_a_process_number_used_again_is_not_the_writer(tmp_path: Path) -> None:
    clock = Clock()
    tier = open_tier(tmp_path, clock)
    claim(tier, 28, Writer(os.getpid(), Writer.this_process().start - 1), clock.now)
    assert tier.put([record(0)]) == [Stored(8 * KIB)]


def test_a_writer_overtaken_by_the_deadline_does_not_publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    slow, fast = open_tier(tmp_path, clock), open_tier(tmp_path, clock)
    checksum = shared.checksum

    def sleepy(algorithm: int, data: np.ndarray) -> int:
        monkeypatch.setattr(shared, "checksum", checksum)
        clock.now += WRITE_DEADLINE_S + 1
        fast.put([record(n) for n in range(10, 30)])
        return checksum(algorithm, data)

    monkeypatch.setattr(shared, "checksum", sleepy)
    assert slow.put([record(0)]) == [Rejected(Reason.FULL)]
    assert slow.lookup([rid(0)]) == [Missing()]
    assert get(fast, rid(29), 8 * KIB) == (Found(8 * KIB), record(29).data)


def test_a_reader_overtaken_by_an_eviction_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    reader, writer = open_tier(tmp_path, clock), open_tier(tmp_path, clock)
    writer.put([record(0)])
    copyto = np.copyto

    def slow_copy(out: np.ndarray, source: np.ndarray) -> None:
        monkeypatch.setattr(np, "copyto", copyto)
        writer.put([record(n) for n in range(10, 60)])
        copyto(out, source)

    monkeypatch.setattr(np, "copyto", slow_copy)
    assert reader.get_into([Target(rid(0), bytearray(8 * KIB))]) == [Missing()]
    assert not [name for name in reader.stats() if name.startswith("corrupt")]


@pytest.mark.parametrize(
    "damage", ["payload", "num_bytes", "checksum", "seal", "algorithm", "id", "order", "owner", "expires_at"]
)
def test_damage_is_never_served(tmp_path: Path, damage: str) -> None:
    tier = open_tier(tmp_path)
    tier.put([record(0), record(1)])
    with tier._locked() as table:
        (head,) = table.find([rid(0)])
        if damage == "payload":
            tier._granules[table.chain(head)[1]][100] ^= 1
        elif damage == "id":
            (other,) = table.find([rid(1)])
            for name in ("id", "prefix"):
                table.rows[name][[head, other]] = table.rows[name][[other, head]]
        elif damage == "order":
            table.rows["order"][table.chain(head)] = [1, 0]
        elif damage == "expires_at":
            table.rows[damage][head] = 4e9
        else:
            table.rows[damage][head] ^= 1
    assert get(tier, rid(0))[0] == Corrupt("checksum")
    assert tier.lookup([rid(0)]) == [Missing()]
    assert tier.stats()["corrupt_checksum"] == 1


def test_a_removal_cut_short_leaves_no_granule_lost(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    empty = tier.usage()
    tier.put([record(0, 40 * KIB)])
    with tier._locked() as table:
        (head,) = table.find([rid(0)])
        table.rows["state"][head] = FREE
    assert tier.usage() == empty
    assert tier.put([record(n) for n in range(14)]) == [Stored(8 * KIB)] * 14


@pytest.mark.parametrize("reopened", [True, False])
def test_a_writer_killed_as_it_replaces_a_record_leaves_one_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reopened: bool
) -> None:
    class Killed(BaseException):
        pass

    def killed(table: SharedTable, head: int) -> None:
        raise Killed

    clock = Clock()
    with open_tier(tmp_path, clock) as tier, open_tier(tmp_path, clock) as friend:
        tier.put([record(1, 5 * KIB, lease_until=clock.now + 100)])
        tier.put([record(2, KIB)])
        monkeypatch.setattr(SharedTable, "remove", killed)
        with pytest.raises(Killed):
            tier.put([record(1, 3 * KIB)])
        monkeypatch.undo()
        left = open_tier(tmp_path, clock) if reopened else friend
        assert get(left, rid(1))[0] == Found(3 * KIB)
        assert left.usage().num_records == 2
        assert [info.lease_until for info in left.scan() if info.id == rid(1)] == [clock.now + 100]
        left.delete([rid(1)])
        assert get(left, rid(1))[0] == Missing()


def test_a_maker_that_died_before_the_end_leaves_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "pool").write_bytes(bytes(5000))
    assert open_tier(tmp_path).put([record(0)]) == [Stored(8 * KIB)]


def test_a_file_of_a_former_version_is_left_to_who_has_it_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_VERSION", 1)
    former = open_tier(tmp_path)
    former.put([record(0)])
    monkeypatch.undo()
    one, two = open_tier(tmp_path), open_tier(tmp_path)
    assert [tier.stats().get("other_format", 0) for tier in (one, two)] == [1, 0]
    assert one.lookup([rid(0)]) == [Missing()]
    one.put([record(1)])
    assert get(two, rid(1), 8 * KIB) == (Found(8 * KIB), record(1).data)
    assert get(former, rid(0), 8 * KIB) == (Found(8 * KIB), record(0).data)


def test_what_is_purged_while_it_is_written_does_not_appear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, other = open_tier(tmp_path), open_tier(tmp_path)
    checksum = shared.checksum

    def purge_meanwhile(algorithm: int, data: np.ndarray) -> int:
        monkeypatch.setattr(shared, "checksum", checksum)
        assert other.purge(tag("a")) == 0
        return checksum(algorithm, data)

    monkeypatch.setattr(shared, "checksum", purge_meanwhile)
    empty = other.usage()
    assert slow.put([record(0, owner=tag("a"))]) == [Rejected(Reason.FULL)]
    assert other.usage() == empty
    assert slow.put([record(0, owner=tag("a"))]) == [Stored(8 * KIB)]


def test_other_sizes_and_foreign_files_are_config_errors(tmp_path: Path) -> None:
    open_tier(tmp_path).close()
    with pytest.raises(ConfigError, match="131072 bytes, not 262144"):
        open_tier(tmp_path, capacity=2 * CAPACITY)
    with pytest.raises(ConfigError, match="granule size"):
        SharedTier(tmp_path / "pool", CAPACITY, granule_bytes=8 * KIB)
    (tmp_path / "pool").write_bytes(b"x" * CAPACITY)
    with pytest.raises(ConfigError, match="no shared tier"):
        open_tier(tmp_path)
    with pytest.raises(ConfigError, match="too few"):
        open_tier(tmp_path, capacity=5000)
    with pytest.raises(ConfigError, match="cannot use"):
        open_tier(tmp_path / "nowhere")
