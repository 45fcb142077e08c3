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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pagoda.kv.tiers.records import PAGE_BYTES, ByteArray, address

BLOCK = PAGE_BYTES
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


def read_run(descriptor: int, offset: int, outs: Sequence[ByteArray], pool: BouncePool) -> None:
    """Fill `outs` with what lies from `offset` on, each beginning on a block of its own. Raises OSError.

    One call reads the whole blocks of aligned buffers into place, and everything else into a bounce buffer beside them.
    """
    with pool.borrow() as bounce:
        views: list[ByteArray] = []
        copies: list[tuple[ByteArray, ByteArray]] = []
        fill = 0
        for out in (whole[i : i + bounce.size] for whole in outs for i in range(0, whole.size, bounce.size)):
            direct = out.size - out.size % BLOCK if address(out) % BLOCK == 0 else 0
            rest = out.size - direct
            if fill + align_up(rest) > bounce.size:
                offset += _scatter(descriptor, offset, views, copies)
                views, copies, fill = [], [], 0
            if direct:
                views.append(out[:direct])
            if rest:
                views.append(bounce[fill : fill + align_up(rest)])
                copies.append((out[direct:], views[-1][:rest]))
                fill += align_up(rest)
        _scatter(descriptor, offset, views, copies)


def _scatter(
    descriptor: int, offset: int, views: list[ByteArray], copies: Sequence[tuple[ByteArray, ByteArray]]
) -> int:
    """Fill aligned `views`, then copy; returns the bytes read. Raises OSError; EIO if the file ends first."""
    wanted = sum(view.size for view in views)
    done = 0
    while done < wanted:
        count = os.preadv(descriptor, [view.data for view in views], offset + done)
        if count == 0 or count % BLOCK:
            raise OSError(errno.EIO, f"the file ends {wanted - done - count} bytes early")
        done += count
        while views and count >= views[0].size:
            count -= views.pop(0).size
        if count:
            views[0] = views[0][count:]
    for out, part in copies:
        np.copyto(out, part)
    return done


def write_blocks(descriptor: int, offset: int, data: ByteArray) -> None:
    """Write aligned `data`, whole blocks, at `offset`. Raises OSError."""
    done = 0
    while done < data.size:
        done += os.pwrite(descriptor, data[done:].data, offset + done)
