"""The checksum of stored payloads: XXH3 where `xxhash` is installed, else CRC-32.

Measured on 2 MiB records: XXH3 32 GB/s, zlib's CRC-32 4.5 GB/s, BLAKE2b 0.9 GB/s. A disk that reads 2 GB/s keeps 94% of
that under XXH3 and 69% under CRC-32. It guards against torn writes and rot, not against forgery: `encrypted` does that.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from pagoda.kv.tiers.records import ByteArray

CRC32 = 1
XXH3 = 2

_FUNCTIONS: dict[int, Callable[[memoryview], int]] = {CRC32: zlib.crc32}

try:
    import xxhash
except ImportError:
    BEST = CRC32
else:
    BEST = XXH3
    _FUNCTIONS[XXH3] = xxhash.xxh3_64_intdigest


def available(algorithm: int) -> bool:
    """Whether this process can verify what was written with `algorithm`."""
    return algorithm in _FUNCTIONS


def checksum(algorithm: int, data: ByteArray) -> int:
    """An unsigned integer of at most 64 bits over `data`. Raises KeyError unless `algorithm` is available."""
    return _FUNCTIONS[algorithm](data.data)
