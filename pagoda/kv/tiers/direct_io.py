"""Reads and writes past the page cache (O_DIRECT), through aligned buffers that are reused.

The page cache would double the memory of the tier above, and buffered writes spend a whole core on copying. Direct
transfers need block-aligned memory, so a caller's buffer is read into as it is where it is aligned, and by way of a
bounce buffer where it is not. Where the file system refuses O_DIRECT (tmpfs), the same calls go through the cache.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pagoda.kv.tiers.records import ByteArray

BLOCK = 4096
_BOUNCE_BYTES = 4 << 20


def align_up(num_bytes: int) -> int:
    """`num_bytes` rounded up to whole blocks."""
    return -(-num_bytes // BLOCK) * BLOCK


def open_direct(path: Path) -> int:
    """A descriptor of an existing file, for reading and writing, with O_DIRECT where the file system has it."""
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_RDWR)


class BouncePool:
    """Aligned buffers of one size; as many as were ever needed at once."""

    def __init__(self, num_bytes: int = _BOUNCE_BYTES) -> None:
        self._num_bytes = num_bytes
        self._idle: list[ByteArray] = []
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self) -> Iterator[ByteArray]:
        """A buffer of unknown content, for the length of the with block."""
        with self._lock:
            buffer = self._idle.pop() if self._idle else None
        if buffer is None:
            buffer = np.frombuffer(mmap.mmap(-1, self._num_bytes), dtype=np.uint8)
        try:
            yield buffer
        finally:
            with self._lock:
                self._idle.append(buffer)


def read_into(descriptor: int, offset: int, out: ByteArray, pool: BouncePool) -> None:
    """Fill `out` from `offset`, a multiple of BLOCK. Raises OSError; EIO if the file ends first."""
    done = 0
    if out.ctypes.data % BLOCK == 0:
        done = out.size - out.size % BLOCK
        _read_blocks(descriptor, offset, out[:done], done)
    if done == out.size:
        return
    with pool.borrow() as bounce:
        while done < out.size:
            wanted = min(out.size - done, bounce.size)
            _read_blocks(descriptor, offset + done, bounce[: align_up(wanted)], wanted)
            np.copyto(out[done : done + wanted], bounce[:wanted])
            done += wanted


def _read_blocks(descriptor: int, offset: int, into: ByteArray, wanted: int) -> None:
    done = 0
    while done < wanted:
        count = os.preadv(descriptor, [into[done:].data], offset + done)
        if count == 0 or (count % BLOCK and done + count < wanted):
            raise OSError(errno.EIO, f"the file ends {wanted - done - count} bytes early")
        done += count


def write_blocks(descriptor: int, offset: int, data: ByteArray) -> None:
    """Write aligned `data`, whole blocks, at `offset`. Raises OSError."""
    done = 0
    while done < data.size:
        done += os.pwrite(descriptor, data[done:].data, offset + done)
