"""AccessLog: which prompts shared how much, and when, without a word of them; `pagoda replay` reads it.

    engine's thread ── on_finished ──> bounded queue ──> one thread: hash, write ──> JSON lines

The format is in plan/access_log.py. Block ids are the first 64 bits of HMACs chained over the prompt, under a key made
from the cluster secret, or from nothing but chance where there is none: then only ids of one run of the server compare.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import queue
import threading
import time
from pathlib import Path
from typing import TextIO

from pagoda.engine.outputs import RequestStats, StepStats
from pagoda.errors import ConfigError
from pagoda.kv.keys import KeyChain

logger = logging.getLogger(__name__)

VERSION = 1
BLOCK_TOKENS = 16
ID_BYTES = 8
_MAX_QUEUED = 4096


class AccessLog:
    """An EngineObserver that appends a line to a file for each request that was answered.

    When the writer falls behind, lines are left out and counted, never waited for.

    Args:
        path: appended to; made readable by its owner only.
        model_name: prompts of different models share nothing.
        secret: the cluster's, if it has one.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path, model_name: str, secret: str | None = None) -> None:
        key = os.urandom(64) if secret is None else hashlib.sha512(b"pagoda access log\0" + secret.encode()).digest()
        self._keys = KeyChain(hashlib.sha256(model_name.encode()).digest(), key)
        self._file = _opened(path)
        self._queue: queue.Queue[tuple[float, RequestStats] | None] = queue.Queue(_MAX_QUEUED)
        self.num_dropped = 0
        self._write({"pagoda_access_log": VERSION, "model": model_name, "block_tokens": BLOCK_TOKENS})
        self._thread = threading.Thread(target=self._run, name="pagoda-access-log", daemon=True)
        self._thread.start()

    def on_step(self, stats: StepStats) -> None:
        """Nothing."""

    def on_admitted(self, num_query_tokens: int, num_hit_tokens: int) -> None:
        """Nothing."""

    def on_finished(self, stats: RequestStats) -> None:
        """Queue a line, if the request got as far as a first token."""
        if stats.ttft_s is None:
            return
        try:
            self._queue.put_nowait((time.time() - stats.e2e_s, stats))
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Write what is queued and close the file. The engine must have stopped."""
        self._queue.put(None)
        self._thread.join()
        self._file.close()
        if self.num_dropped:
            logger.warning("%d requests are not in the access log: they ended faster than it writes", self.num_dropped)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            arrived_at, stats = item
            usage = stats.usage
            self._write(
                {
                    "time": round(arrived_at, 6),
                    "prompt": usage.num_prompt_tokens,
                    "output": usage.num_output_tokens,
                    "hit": usage.num_hit_tokens,
                    "blocks": base64.b64encode(self._ids(stats)).decode(),
                }
            )

    def _ids(self, stats: RequestStats) -> bytes:
        """The ids of the prompt's blocks, the last possibly partial."""
        prompt, root = stats.prompt, self._keys.root(stats.scope)
        whole = prompt.size // BLOCK_TOKENS * BLOCK_TOKENS
        keys = list(self._keys.chain(root, prompt[:whole], BLOCK_TOKENS))
        if whole < prompt.size:
            keys.append(self._keys.child(keys[-1] if keys else root, prompt[whole:]))
        return b"".join(key[:ID_BYTES] for key in keys)

    def _write(self, row: dict[str, object]) -> None:
        try:
            self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
            if self._queue.empty():
                self._file.flush()
        except OSError as error:  # a full disk must not stop the server
            self.num_dropped += 1
            logger.error("the access log cannot be written: %s", error)


def _opened(path: Path) -> TextIO:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot open the access log {path}: {error.strerror or error}") from error
    return os.fdopen(descriptor, "w", encoding="utf-8")
