"""Sizes and durations as people write and read them."""

from __future__ import annotations

import re

from pagoda.errors import ConfigError

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000), ("", 1024))
}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


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


def parse_duration(duration: str) -> float:
    """Seconds from a string such as `90s`, `30m`, `12h` or `7d`.

    Raises:
        ConfigError: it is not a positive duration.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", duration.strip())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if seconds <= 0:
        raise ConfigError(f"not a duration: {duration!r}; write such as 90s, 30m, 12h, 7d")
    return seconds


def format_size(num_bytes: float) -> str:
    """Bytes for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
