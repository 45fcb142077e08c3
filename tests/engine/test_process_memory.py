"""What the kernel says of a process's memory, from folders like its own; nothing, without noise, where it is silent."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from pagoda.engine import process_memory


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8,000 kB available and this process in cgroup /outer/inner."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("4:memory:/elsewhere\n0::/outer/inner\n")
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:   8000 kB\n")
    (tmp_path / "cgroups/outer/inner").mkdir(parents=True)
    monkeypatch.setattr(process_memory, "_PROC", tmp_path)
    monkeypatch.setattr(process_memory, "_CGROUPS", tmp_path / "cgroups")
    return tmp_path / "cgroups"


def test_without_limits(kernel: Path) -> None:
    assert process_memory.cgroup_limit() is None
    assert process_memory.num_throttles() == 0
    assert process_memory.available_memory() == 8000 << 10


def test_the_tightest_limit_around_it_counts(kernel: Path) -> None:
    (kernel / "outer/inner/memory.max").write_text("max\n")
    (kernel / "outer/inner/memory.high").write_text("7000000\n")
    (kernel / "outer/memory.max").write_text("6000000\n")
    (kernel / "outer/memory.current").write_text("2000000\n")
    assert process_memory.cgroup_limit() == 6_000_000
    assert process_memory.available_memory() == 4_000_000


def test_events_are_those_of_the_innermost_that_tells(kernel: Path) -> None:
    (kernel / "outer/memory.events").write_text("low 0\nhigh 100\nmax 100\noom 0\noom_kill 0\n")
    assert process_memory.num_throttles() == 200
    (kernel / "outer/inner/memory.events").write_text("low 5\nhigh 3\nmax 1\noom 0\noom_kill 0\n")
    assert process_memory.num_throttles() == 4


def test_a_machine_without_cgroups_of_this_kind(kernel: Path) -> None:
    (kernel.parent / "self/cgroup").write_text("4:memory:/elsewhere\n")
    assert (process_memory.cgroup_limit(), process_memory.num_throttles()) == (None, 0)
    (kernel.parent / "self/cgroup").unlink()
    assert (process_memory.cgroup_limit(), process_memory.num_throttles()) == (None, 0)


def test_resident_memory_grows_with_what_is_touched() -> None:
    before = process_memory.rss_bytes()
    with mmap.mmap(-1, 32 << 20) as held:  # fresh pages: the heap may have some to give that are resident already
        held[:: mmap.PAGESIZE] = b"x" * (len(held) // mmap.PAGESIZE)
        grown = process_memory.rss_bytes() - before
    assert 24 << 20 < grown < 64 << 20
