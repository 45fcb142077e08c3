"""One process per directory: an advisory lock that the kernel drops when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from pagoda.errors import TierUnavailable

LOCK_NAME = "LOCK"


class DirectoryLock:
    """Held from construction to `close`. Raises TierUnavailable, with the holder's process id, if it is held already.

    The file has one fixed size, so that the tier's budget is exact.
    """

    FILE_BYTES = 64

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._file, self.FILE_BYTES, 0).decode(errors="replace").strip()
            os.close(self._file)
            raise TierUnavailable(f"the disk tier's directory {folder} is in use by {holder or 'a process'}") from error
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()}".ljust(self.FILE_BYTES).encode(), 0)

    def close(self) -> None:
        """Let another process in."""
        os.close(self._file)
