"""How much memory the KV pool may take: sizes as people write them, and a safe default."""

from __future__ import annotations

import re
from pathlib import Path

from pagoda.errors import ConfigError

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000), ("", 1024))
}
_SAFE_FRACTION = 0.5


def parse_size(size: int | str) -> int:
    """Bytes from a number, or from a string such as `2GiB`, `500MB`, `1.5G` (a bare letter is binary).

    Raises:
        ConfigError: it is not a positive size.
    """
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        units = {unit.lower(): factor for unit, factor in _UNITS.items()}
        if not found or found[2].lower() not in units:
            raise ConfigError(f"not a size: {size!r}; write bytes or such as 2GiB, 500MB")
        size = int(float(found[1]) * units[found[2].lower()])
    if size < 1:
        raise ConfigError(f"a size must be positive, got {size}")
    return size


def format_size(num_bytes: float) -> str:
    """Bytes for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


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
