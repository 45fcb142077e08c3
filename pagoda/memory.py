"""Host memory for what is read over and over, in huge pages where the system has them: weights, KV blocks, arenas.

Through pages of 2 MiB weights were read 1.2 to 1.8 times as fast as through those of 4 KiB, and blocks, which lie
anywhere, a fifth faster (benchmarks/NOTES.md). A page is taken when it is first touched, and given back with the last
view.
"""

from __future__ import annotations

import contextlib
import mmap
import sys

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]

_HUGE_PAGE = 2 << 20
_LINE = 64
_HAS_HUGE_PAGES = sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE")


def host_memory(num_bytes: int) -> ByteArray:
    """Zeroed memory, uint8 `[num_bytes]`, that starts at a page.

    Raises:
        OSError: there is not that much address space.
    """
    if num_bytes < _HUGE_PAGE or not _HAS_HUGE_PAGES:
        mapping = mmap.mmap(-1, max(1, num_bytes))
        return np.frombuffer(mapping, dtype=np.uint8)[:num_bytes]
    # Private: huge pages of shared memory are a setting of their own, and off as a rule.
    mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel that was built without them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, dtype=np.uint8)
    skipped = -memory.ctypes.data % _HUGE_PAGE
    return memory[skipped : skipped + num_bytes]


class Shelf:
    """Memory that is handed out piece by piece and kept together, so that small pieces share huge pages."""

    _CHUNK_BYTES = 64 << 20

    def __init__(self) -> None:
        self._left = np.empty(0, dtype=np.uint8)

    def take(self, num_bytes: int) -> ByteArray:
        """Zeroed memory, uint8 `[num_bytes]`, that starts at a cache line.

        Raises:
            OSError: there is not that much address space.
        """
        if num_bytes > self._left.size:
            self._left = host_memory(max(num_bytes, self._CHUNK_BYTES))
        piece, self._left = self._left[:num_bytes], self._left[num_bytes + -num_bytes % _LINE :]
        return piece
