"""The disk tier's own promises: warm restarts, exact bytes on disk, and damage of every kind a counted miss."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pagoda.errors import ConfigError, TierUnavailable
from pagoda.kv.tiers import checksum, disk_segment
from pagoda.kv.tiers.disk import DiskTier, usual_segment_bytes
from pagoda.kv.tiers.disk_log import SegmentLog
from pagoda.kv.tiers.disk_segment import ENTRY_BYTES, Geometry, Segment, Stub
from pagoda.kv.tiers.records import Corrupt, Deleted, Failed, Found, Missing, Reason, Rejected, Stored, is_over
from tests.kv.tiers.kit import KIB, Clock, get, record, rid, tag

SEGMENT = 64 * KIB
CAPACITY = 8 * SEGMENT + 64
DATA_START = Geometry(SEGMENT).data_start


def open_tier(folder: Path, clock: Clock | None = None, capacity: int = CAPACITY) -> DiskTier:
    return DiskTier(folder, capacity, segment_bytes=SEGMENT, clock=clock or Clock())


def bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def stored_folder(folder: Path, numbers: range = range(3)) -> Path:
    """A folder whose first segment holds records of 8 KiB and a bit, closed."""
    with open_tier(folder) as tier:
        assert tier.put([record(n, 8 * KIB + 10) for n in numbers]) == [Stored(8 * KIB + 10)] * len(numbers)
    return folder


def first_segment(folder: Path) -> Path:
    """The one segment with a superblock."""
    (path,) = [p for p in folder.glob("segment-*") if any(p.read_bytes()[:8])]
    return path


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def damage(stats: dict[str, int]) -> dict[str, int]:
    names = ("corrupt", "truncated", "wrong", "other", "foreign")
    return {name: n for name, n in stats.items() if name.startswith(names)}


def test_a_restart_is_warm_and_knows_what_was_replaced_deleted_and_leased(tmp_path: Path) -> None:
    clock = Clock()
    with open_tier(tmp_path, clock) as tier:
        tier.put([record(n) for n in range(10)])
        tier.put([record(3, 5000, version=1)])
        tier.delete([rid(4)])
        tier.set_lease([rid(5)], clock.now + 60)
    with open_tier(tmp_path, clock) as tier:
        assert tier.stats() == {"restored": 9}
        for number in (0, 1, 2, 5, 6, 7, 8, 9):
            assert get(tier, rid(number), 8 * KIB) == (Found(8 * KIB), record(number).data)
        assert get(tier, rid(3), 5000) == (Found(5000), record(3, 5000, version=1).data)
        assert tier.lookup([rid(4)]) == [Missing()]
        assert {i.id for i in tier.scan() if i.lease_until} == {rid(5)}
        assert tier.usage().payload_bytes == 8 * 8 * KIB + 5000
        tier.put([record(n) for n in range(100, 300)])
        assert tier.lookup([rid(5), rid(0)]) == [Found(8 * KIB), Missing()]


def test_a_restart_goes_on_in_the_active_segment(tmp_path: Path) -> None:
    for number in range(5):
        with open_tier(tmp_path) as tier:
            tier.put([record(number)])
    assert len(list(tmp_path.glob("segment-*"))) == 2
    with open_tier(tmp_path) as tier:
        assert tier.lookup([rid(n) for n in range(5)]) == [Found(8 * KIB)] * 5


def test_files_never_exceed_the_budget_and_usage_counts_all_of_them(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        for number in range(300):
            tier.put([record(number, 1 + number * 97 % 30_000)])
            assert tier.usage().used_bytes == bytes_on_disk(tmp_path) <= CAPACITY
    assert bytes_on_disk(tmp_path) == CAPACITY


def test_many_tiny_leased_records_fill_the_table_and_are_kept(tmp_path: Path) -> None:
    clock = Clock()
    tier = open_tier(tmp_path, clock)
    leased = [n for n in range(300) if tier.put([record(n, 10, lease_until=clock.now + 9)]) == [Stored(10)]]
    assert len(leased) < 300
    assert tier.lookup([rid(n) for n in leased]) == [Found(10)] * len(leased)
    for number in leased:
        assert get(tier, rid(number), 10) == (Found(10), record(number, 10).data)


def test_hits_are_reinserted_and_lose_their_hit(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.put([record(0)])
    get(tier, rid(0))
    number = 1
    while tier.stats().get("reinserted", 0) == 0:
        tier.put([record(number)])
        number += 1
    assert tier.lookup([rid(0), rid(1)]) == [Found(8 * KIB), Missing()]
    while tier.lookup([rid(0)]) != [Missing()]:
        tier.put([record(number)])
        number += 1
    assert tier.stats()["reinserted"] == 1


def test_a_smaller_budget_at_restart_drops_the_oldest(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        tier.put([record(n) for n in range(40)])
    with open_tier(tmp_path, capacity=4 * SEGMENT + 64) as tier:
        assert tier.usage().used_bytes == bytes_on_disk(tmp_path) <= 4 * SEGMENT + 64
        present = [n for n in range(40) if tier.lookup([rid(n)]) != [Missing()]]
        assert present == list(range(40 - len(present), 40))
        assert tier.put([record(100)]) == [Stored(8 * KIB)]


def test_another_segment_size_starts_cold_and_counts_it(tmp_path: Path) -> None:
    stored_folder(tmp_path)
    with DiskTier(tmp_path, CAPACITY, segment_bytes=2 * SEGMENT) as tier:
        assert damage(tier.stats()) == {"other_format": 1}
        assert tier.usage().num_records == 0
        assert tier.put([record(0)]) == [Stored(8 * KIB)]
        assert tier.usage().used_bytes == bytes_on_disk(tmp_path) <= CAPACITY


def test_segments_of_a_former_version_start_cold_and_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_segment, "_VERSION", 1)
    stored_folder(tmp_path)
    monkeypatch.undo()
    with open_tier(tmp_path) as tier:
        assert damage(tier.stats()) == {"other_format": 1}
        assert tier.usage().num_records == 0
        assert tier.put([record(0)]) == [Stored(8 * KIB)]


def test_a_purge_reaches_what_the_index_has_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replaced record that could not be erased is on disk still, and must not come back."""
    with open_tier(tmp_path) as tier:
        tier.put([record(0, owner=tag("a"))])

        def broken(*_: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(Segment, "erase_entry", broken)
        assert isinstance(tier.put([record(0, version=1, owner=tag("a"))])[0], Failed)
        monkeypatch.undo()
        assert tier.purge(tag("a")) == 1
    with open_tier(tmp_path) as tier:
        assert tier.lookup([rid(0)]) == [Missing()]
        assert tier.stats() == {"restored": 0}


def test_a_purge_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path)
    tier.put([record(0, owner=tag("a"))])

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", broken)
        with pytest.raises(TierUnavailable, match="cannot be erased"):
            tier.purge(tag("a"))
    assert tier.purge(tag("a")) == 1
    assert tier.usage().num_records == 0


@pytest.mark.parametrize("offset", range(0, disk_segment._SUPERBLOCK.size + 4))
def test_a_bit_flip_in_the_superblock_loses_the_segment_and_is_counted(tmp_path: Path, offset: int) -> None:
    path = first_segment(stored_folder(tmp_path))
    flip(path, offset)
    with open_tier(tmp_path) as tier:
        assert damage(tier.stats()) == {"corrupt_segment": 1}
        assert tier.lookup([rid(n) for n in range(3)]) == [Missing()] * 3
        assert tier.put([record(1)]) == [Stored(8 * KIB)]
        assert get(tier, rid(1), 8 * KIB)[1] == record(1).data


@pytest.mark.parametrize("offset", range(0, ENTRY_BYTES))
def test_a_bit_flip_in_an_entry_loses_that_record_and_is_counted(tmp_path: Path, offset: int) -> None:
    path = first_segment(stored_folder(tmp_path))
    flip(path, 4096 + ENTRY_BYTES + offset)
    with open_tier(tmp_path) as tier:
        assert damage(tier.stats()) == {"corrupt_entry": 1}
        assert tier.lookup([rid(n) for n in range(3)]) == [Found(8 * KIB + 10), Missing(), Found(8 * KIB + 10)]
        tier.put([record(9)])
        for number, size in ((0, 8 * KIB + 10), (2, 8 * KIB + 10), (9, 8 * KIB)):
            assert get(tier, rid(number), size) == (Found(size), record(number, size).data)


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 8 * KIB + 9])
@pytest.mark.parametrize("algorithm", [checksum.CRC32, checksum.BEST])
def test_a_bit_flip_in_a_payload_is_a_counted_miss(
    tmp_path: Path, offset: int, algorithm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_segment, "BEST", algorithm)
    path = first_segment(stored_folder(tmp_path))
    flip(path, DATA_START + 3 * 4096 + offset)
    with open_tier(tmp_path) as tier:
        assert get(tier, rid(1))[0] == Corrupt("checksum")
        assert damage(tier.stats()) == {"corrupt_checksum": 1}
        assert tier.lookup([rid(1)]) == [Missing()]
        assert get(tier, rid(0), 8 * KIB + 10) == (Found(8 * KIB + 10), record(0, 8 * KIB + 10).data)
    with open_tier(tmp_path) as tier:
        assert tier.lookup([rid(1)]) == [Missing()]
        assert damage(tier.stats()) == {}


def test_a_flip_in_the_padding_hurts_nobody(tmp_path: Path) -> None:
    path = first_segment(stored_folder(tmp_path))
    flip(path, DATA_START + 3 * 4096 - 1)
    with open_tier(tmp_path) as tier:
        assert get(tier, rid(0), 8 * KIB + 10) == (Found(8 * KIB + 10), record(0, 8 * KIB + 10).data)


BOUNDARIES = [0, 8, 52, 4095, 4096, DATA_START - 1]
BOUNDARIES += [4096 + n * ENTRY_BYTES for n in range(4)] + [DATA_START + n * 4096 for n in range(10)]


@pytest.mark.parametrize("size", sorted({b + d for b in BOUNDARIES for d in (-1, 0, 1) if b + d >= 0}))
def test_a_truncated_file_keeps_what_is_whole_and_counts_the_rest(tmp_path: Path, size: int) -> None:
    path = first_segment(stored_folder(tmp_path))
    os.truncate(path, size)
    with open_tier(tmp_path) as tier:
        for number in range(3):
            result, data = get(tier, rid(number), 8 * KIB + 10)
            whole = DATA_START + number * 3 * 4096 + 8 * KIB + 10 <= size
            assert result == (Found(8 * KIB + 10) if whole else Missing())
            assert not whole or data == record(number, 8 * KIB + 10).data
        assert any(name in tier.stats() for name in ("wrong_size", "truncated_segment"))
        assert tier.put([record(n) for n in range(100, 200)]) == [Stored(8 * KIB)] * 100
        assert tier.usage().used_bytes == bytes_on_disk(tmp_path) <= CAPACITY


def test_a_file_grown_by_others_is_cut_back(tmp_path: Path) -> None:
    path = first_segment(stored_folder(tmp_path))
    with path.open("ab") as file:
        file.write(b"x" * 10_000)
    with open_tier(tmp_path) as tier:
        assert damage(tier.stats()) == {"wrong_size": 1}
        assert tier.usage().used_bytes == bytes_on_disk(tmp_path)
        assert get(tier, rid(2), 8 * KIB + 10)[1] == record(2, 8 * KIB + 10).data


def test_foreign_files_are_counted_and_left_alone(tmp_path: Path) -> None:
    stored_folder(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "segment-9.pagoda").write_text("not a segment's name")
    (tmp_path / "segment-000007.pagoda").mkdir()
    with open_tier(tmp_path) as tier:
        assert damage(tier.stats()) == {"foreign_files": 3}
        assert tier.put([record(n) for n in range(200)]) == [Stored(8 * KIB)] * 200
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_records_of_an_earlier_life_of_a_file_are_never_found(tmp_path: Path) -> None:
    """A stale table, with its payloads, under a new superblock: as a power cut may leave it."""
    path = first_segment(stored_folder(tmp_path))
    stale = path.read_bytes()[4096:]
    segment = Segment(path, Geometry(SEGMENT))
    segment.blank()
    segment.begin(1)
    segment.close()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(stale)
    with open_tier(tmp_path) as tier:
        assert tier.usage().num_records == 0
        assert damage(tier.stats()) == {"corrupt_entry": 3}


def test_a_crash_while_cleaning_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the folder, taken when the survivors are written and the victim not yet blank."""
    clock = Clock()
    folder, copy = tmp_path / "tier", tmp_path / "copy"
    clean: Callable[..., None] = SegmentLog._move
    snapshots: list[set[int]] = []

    def move_and_copy(self: SegmentLog, *args: object) -> object:
        moves = clean(self, *args)
        if not snapshots:
            snapshots.append({n for n in range(200) if tier.lookup([rid(n)]) != [Missing()]})
            shutil.copytree(folder, copy)
        return moves

    monkeypatch.setattr(SegmentLog, "_move", move_and_copy)
    with open_tier(folder, clock) as tier:
        for number in range(100):
            tier.put([record(number, lease_until=clock.now + 60 if number < 3 else 0.0)])
    (before,) = snapshots
    with open_tier(copy, clock) as tier:
        assert {n for n in range(200) if tier.lookup([rid(n)]) != [Missing()]} == before
        assert before >= {0, 1, 2}
        assert tier.put([record(n) for n in range(200, 300)]) == [Stored(8 * KIB)] * 100
        assert tier.lookup([rid(n) for n in range(3)]) == [Found(8 * KIB)] * 3


def test_a_full_disk_makes_the_tier_smaller_not_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = os.posix_fallocate
    room = [4]

    def scarce(descriptor: int, offset: int, length: int) -> None:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= 1
        allocate(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", scarce)
    tier = open_tier(tmp_path)
    assert tier.put([record(n) for n in range(100)]) == [Stored(8 * KIB)] * 100
    assert tier.stats()["disk_full"] > 0
    assert tier.usage().used_bytes == bytes_on_disk(tmp_path) == 4 * SEGMENT + 64
    assert get(tier, rid(99), 8 * KIB)[1] == record(99).data
    room[0] = 4
    tier.put([record(n) for n in range(100, 200)])
    assert tier.usage().used_bytes == bytes_on_disk(tmp_path) == CAPACITY


def test_what_holds_nothing_any_more_is_given_back_to_the_disk(tmp_path: Path) -> None:
    clock = Clock()
    tier = open_tier(tmp_path, clock)

    def size() -> int:
        assert tier.usage().used_bytes == bytes_on_disk(tmp_path)
        return bytes_on_disk(tmp_path)

    tier.put([record(n) for n in range(30)])
    full = size()
    tier.delete([rid(n) for n in range(29)])
    small = size()
    assert small <= 3 * SEGMENT + 64 < full  # one with the last record, a blank one, and the one that is written
    assert get(tier, rid(29), 8 * KIB) == (Found(8 * KIB), record(29).data)
    tier.put([record(n, owner=tag("a")) for n in range(100, 130)])
    assert size() > small
    assert tier.purge(tag("a")) == 30
    assert size() <= 3 * SEGMENT + 64
    tier.put([record(n, expires_at=clock.now + 5) for n in range(200, 230)])
    clock.now += 6
    tier.put([record(300)])
    assert size() <= 3 * SEGMENT + 64
    assert get(tier, rid(300), 8 * KIB) == (Found(8 * KIB), record(300).data)
    tier.put([record(n) for n in range(400, 1000)])
    assert size() <= CAPACITY
    tier.close()
    with open_tier(tmp_path, clock) as again:
        assert again.lookup([rid(999)]) == [Found(8 * KIB)]
        assert damage(again.stats()) == {}


def test_whether_a_segment_is_dead_is_not_asked_of_every_record_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, num_asked = Clock(), 0

    def counted(stub: Stub, now: float) -> bool:
        nonlocal num_asked
        num_asked += 1
        return is_over(stub, now)

    monkeypatch.setattr(disk_segment, "is_over", counted)
    with DiskTier(tmp_path, 20 << 20, segment_bytes=4 << 20, clock=clock) as tier:
        tier.put([record(n, expires_at=0.0 if n == 200 else clock.now + 5) for n in range(400)])
        tier.put([record(n) for n in range(400, 600)])  # these fill the first segment and begin another
        clock.now += 6
        tier.delete([rid(n) for n in range(400, 600)])
        num_asked = 0
        for number in range(1000, 1100):
            tier.put([record(number)])
        assert num_asked < 1000
        files = bytes_on_disk(tmp_path)
        assert tier.set_lease([rid(7)], clock.now + 9) == [Found(8 * KIB)]
        tier.delete([rid(200)])
        assert bytes_on_disk(tmp_path) == files  # the leased one holds its segment
        clock.now += 10
        tier.put([record(2000)])
        assert bytes_on_disk(tmp_path) < files


def test_a_disk_full_from_the_start_rejects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    tier = open_tier(tmp_path)
    assert tier.put([record(0), record(1)]) == [Rejected(Reason.FULL)] * 2
    assert tier.usage().used_bytes == bytes_on_disk(tmp_path) == 64


def test_write_errors_fail_their_records_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path)
    tier.put([record(0)])
    write = os.pwrite

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", broken)
    results = tier.put([record(1), record(2)])
    assert all(isinstance(r, Failed) for r in results)
    assert "Input/output error" in str(results[0].error)
    assert isinstance(tier.delete([rid(0)])[0], Failed)
    with pytest.raises(TierUnavailable, match="Input/output error"):
        tier.set_lease([rid(0)], 1.0)
    monkeypatch.setattr(os, "pwrite", write)
    assert tier.lookup([rid(0), rid(1), rid(2)]) == [Found(8 * KIB), Missing(), Missing()]
    assert tier.put([record(1)]) == [Stored(8 * KIB)]
    assert get(tier, rid(0), 8 * KIB)[1] == record(0).data
    assert tier.delete([rid(0)]) == [Deleted()]


def test_read_errors_fail_their_records_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path)
    tier.put([record(0), record(1)])
    read = os.preadv

    def broken(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset >= DATA_START + 8 * KIB:
            raise OSError(errno.EIO, "Input/output error")
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    assert get(tier, rid(0), 8 * KIB) == (Found(8 * KIB), record(0).data)
    assert isinstance(get(tier, rid(1))[0], Failed)
    monkeypatch.setattr(os, "preadv", read)
    assert get(tier, rid(1), 8 * KIB) == (Found(8 * KIB), record(1).data)


def test_a_file_truncated_under_a_running_tier_is_an_error_not_a_crash(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    tier.put([record(0), record(1)])
    os.truncate(first_segment(tmp_path), DATA_START + 10_000)
    assert get(tier, rid(0), 8 * KIB)[1] == record(0).data
    assert isinstance(get(tier, rid(1))[0], Failed)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from pagoda.kv.tiers.disk import DiskTier;"
        "DiskTier(Path(sys.argv[1]), 1 << 20, segment_bytes=65536)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with open_tier(tmp_path):
        with pytest.raises(TierUnavailable, match=f"{tmp_path} is in use by process {os.getpid()}"):
            open_tier(tmp_path)
        other = subprocess.run(command, capture_output=True, text=True, check=False)
        assert f"is in use by process {os.getpid()}" in other.stderr
    assert subprocess.run(command, check=False).returncode == 0


def test_settings_that_cannot_work_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="room for 2 segments of 65536"):
        open_tier(tmp_path, capacity=3 * SEGMENT)
    with pytest.raises(ConfigError, match="whole blocks"):
        DiskTier(tmp_path, 1 << 20, segment_bytes=65_000)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot use"):
        open_tier(tmp_path / "file")


def test_usual_segments() -> None:
    assert usual_segment_bytes(1 << 30) == 64 << 20
    assert usual_segment_bytes(100 << 30) == 256 << 20
    assert usual_segment_bytes(1 << 40) == 4 << 30
