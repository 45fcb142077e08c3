"""How much memory the KV pool may take unless told otherwise."""

from __future__ import annotations

import re
from pathlib import Path

_SAFE_FRACTION = 0.5


def available_memory() -> int:
    """Bytes that this process could still take without pushing the machine, or its cgroup, out of memory."""
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text(), flags=re.MULTILINE))
    available = int(meminfo["MemAvailable"]) * 1024
    limit, used = (_cgroup_number(name) for name in ("memory.max", "memory.current"))
    return available if limit is None or used is None else min(available, max(0, limit - used))


def _cgroup_number(name: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" means no limit


def safe_kv_memory(useful: int) -> int:
    """Half of the available memory, but no more than `useful` bytes: what all users at full context would fill."""
    return min(useful, int(available_memory() * _SAFE_FRACTION))
