"""StateFile: a small JSON file that survives restarts; replaced whole, so a crash leaves the old or the new one."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

from pagoda.errors import ConfigError
from pagoda.server.errors import HttpError

logger = logging.getLogger(__name__)


class StateFile:
    """Reads at start, writes now and then. Readable by its owner only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._draft = path.with_name(path.name + ".new")
        self._saved = ""
        self._lock = threading.Lock()

    def load(self) -> Any:
        """The value that was saved; None if nothing was.

        Raises:
            ConfigError: the file cannot be read or replaced, or holds something else.
        """
        value = None
        try:
            value = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            raise self.fault(error) from None
        self._check_writable()
        return value

    def _check_writable(self) -> None:
        """Whoever cannot save is to hear of it now, and not from the first client whose change is to last."""
        try:
            os.close(os.open(self._draft, os.O_WRONLY | os.O_CREAT, 0o600))
            self._draft.unlink()
        except OSError as error:
            raise ConfigError(f"cannot write {self._path}: {error.strerror or error}") from None

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
            opened = os.open(self._draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(opened, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            self._draft.replace(self._path)
            self._saved = text


def not_saved(error: OSError, outcome: str) -> HttpError:
    """What to tell a client whose change could not be saved: its `outcome` and why. The log has the path too."""
    logger.error("a file that keeps state over restarts cannot be written: %s", error)
    why = error.strerror or type(error).__name__
    return HttpError(
        503, "not_saved", f"{outcome}: the server cannot write the file that keeps it over restarts ({why})."
    )
