"""What the kernel says of this process's memory: what it has, may have, and could still take."""

from __future__ import annotations

import os
import re
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def available_memory() -> int:
    """Bytes that this process could still take without pushing the machine, or its cgroup, out of memory."""
    text = (_PROC / "meminfo").read_text()
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, flags=re.MULTILINE))
    available = int(meminfo["MemAvailable"]) * 1024
    for folder in _own_cgroups():
        limit, used = (_number(folder / name) for name in ("memory.max", "memory.current"))
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used))
    return available


def rss_bytes() -> int:
    """Bytes of this process that are in memory now."""
    return int((_PROC / "self/statm").read_text().split()[1]) * _PAGE_BYTES


def cgroup_limit() -> int | None:
    """The least of the limits, soft or hard, that hold for this process's cgroup (v2); None without any."""
    found = [_number(folder / name) for folder in _own_cgroups() for name in ("memory.high", "memory.max")]
    return min((limit for limit in found if limit is not None), default=None)


def num_throttles() -> int:
    """How often the kernel has held this process's cgroup (v2) back at one of its memory limits; 0 where none tells."""
    for folder in _own_cgroups():
        try:
            text = (folder / "memory.events").read_text()
        except OSError:
            continue
        events = dict(re.findall(r"^(\w+) (\d+)$", text, flags=re.MULTILINE))
        return int(events.get("high", 0)) + int(events.get("max", 0))
    return 0


def _own_cgroups() -> list[Path]:
    """The folders of this process's cgroup (v2) and of those around it, from the inside out; none without cgroups."""
    try:
        lines = (_PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    if own is None:
        return []
    inner = _CGROUPS / own
    return [folder for folder in (inner, *inner.parents) if folder.is_relative_to(_CGROUPS)]


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" means no limit
