"""Files: the cache folder on disk: content hashes of weights, and models converted from other formats.

    $PAGODA_CACHE (default ~/.cache/pagoda)
    ├── hashes/<sha256 of path>.json      {path, size, mtime_ns, sha256}: valid while size and mtime still agree
    └── models/<sha256 of GGUF>-.../      a Hugging Face folder made from that GGUF file

Everything here is written beside its final name and then renamed, so a reader sees all of it or none.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pagoda.errors import WeightsError

Progress = Callable[[str, int, int], None]
"""Called with a phrase for what is being done, the amount done and the total, both in the same unit."""

_READ_BYTES = 8 << 20


def no_progress(what: str, done: int, total: int) -> None:
    """A `Progress` that shows nothing."""


def cache_dir() -> Path:
    """The folder for derived files; it may not exist yet."""
    return Path(os.environ.get("PAGODA_CACHE") or Path.home() / ".cache" / "pagoda")


def content_hash(path: Path, progress: Progress = no_progress) -> str:
    """SHA-256 of a file's bytes in hex, remembered on disk by (path, size, mtime).

    Raises:
        WeightsError: the file cannot be read.
    """
    path = path.resolve()
    try:
        stat = path.stat()
        known_as = {"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
        record = cache_dir() / "hashes" / f"{hashlib.sha256(str(path).encode()).hexdigest()}.json"
        remembered = _read_record(record)
        digest = remembered.pop("sha256", None)
        if isinstance(digest, str) and remembered == known_as:
            return digest
        digest = _hash_file(path, stat.st_size, progress)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        with written_atomically(record) as temporary:
            temporary.write_text(json.dumps({**known_as, "sha256": digest}))
    except OSError:
        pass  # The hash is right without being remembered; an unwritable cache only costs time.
    return digest


@contextmanager
def written_atomically(target: Path) -> Iterator[Path]:
    """Yield a path to write instead of `target`; it becomes `target` if the block succeeds and vanishes if it fails."""
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def folder_written_atomically(target: Path) -> Iterator[Path]:
    """Like `written_atomically` for a folder; if another process finished `target` first, its work stands."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        yield temporary
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _read_record(record: Path) -> dict[str, object]:
    try:
        loaded = json.loads(record.read_text())
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _hash_file(path: Path, size: int, progress: Progress) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(f"hashing {path.name}", done, size)
    return digest.hexdigest()
