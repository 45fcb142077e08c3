"""StateFile: a small JSON file that survives restarts; replaced whole, so a crash leaves the old or the new one."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from pagoda.errors import ConfigError


class StateFile:
    """Reads at start, writes now and then. Readable by its owner only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._saved = ""
        self._lock = threading.Lock()

    def load(self) -> Any:
        """The value that was saved; None if nothing was.

        Raises:
            ConfigError: the file cannot be read, or holds something else.
        """
        try:
            text = self._path.read_text(encoding="utf-8")
            return json.loads(text)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self.fault(error) from None

    def fault(self, error: Exception) -> ConfigError:
        """What to raise of a file whose value is not the expected one."""
        return ConfigError(f"{self._path} cannot be used, move it away to start a new one: {error!r}")

    def save(self, text: str) -> None:
        """Write JSON text, from any thread, if it differs from what was written last.

        Raises:
            OSError: it cannot be written; the old file stays.
        """
        with self._lock:
            if text == self._saved:
                return
            draft = self._path.with_name(self._path.name + ".new")
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
            self._saved = text
