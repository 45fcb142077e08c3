"""Trace files: what format they have, and one stream of requests out of any number of them.

format      files                              told by
mooncake    JSON lines, blocks of 512          hash_ids, as many as input_length has blocks of 512
bailian     JSON lines, blocks of 16           hash_ids, as many as input_length has blocks of 16
sessions    JSON lines with full text          input; each file, or file of a folder, is a session
lengths     CSV of Azure's traces              .csv
access-log  pagoda serve --access-log          pagoda_access_log
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagoda.errors import ConfigError
from pagoda.plan.access_log import read_access_log
from pagoda.plan.traces import (
    Advance,
    Reader,
    TraceRequest,
    no_advance,
    overlap,
    read_bailian,
    read_lengths,
    read_mooncake,
    read_session,
)

READERS: Mapping[str, Reader] = {
    "mooncake": read_mooncake,
    "bailian": read_bailian,
    "sessions": read_session,
    "lengths": read_lengths,
    "access-log": read_access_log,
}
DEFAULT_INTERVAL_S = 4.0


@dataclass(frozen=True, slots=True)
class Trace:
    """Files of one format, read as often as wanted.

    Attributes:
        interval_s: sessions start so far apart; other files keep their times.
    """

    name: str
    format: str
    files: tuple[Path, ...]
    interval_s: float = DEFAULT_INTERVAL_S

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.stat().st_size for file in self.files)

    def requests(self, advance: Advance = no_advance) -> Iterator[TraceRequest]:
        """All requests by arrival, the first at 0 s. Memory is bounded by one request of each file.

        Raises:
            ConfigError: a line cannot be read; the message names it.
        """
        read = READERS[self.format]
        streams = [read(file, advance) for file in self.files]
        if self.format == "sessions":
            return overlap(streams, self.interval_s)
        return _from_zero(heapq.merge(*streams, key=lambda request: request.time))


def open_trace(paths: Sequence[Path], format: str = "auto", interval_s: float = DEFAULT_INTERVAL_S) -> Trace:
    """The trace in files and in the *.jsonl of folders.

    Raises:
        ConfigError: there is no such file, or its format is not known or not the others'.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"there is no trace at {path}")
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"there are no .jsonl files in {', '.join(map(str, paths))}")
    if format == "auto":
        formats = {detect(file): file for file in reversed(files)}
        if len(formats) > 1:
            found = ", ".join(f"{file.name} {name}" for name, file in formats.items())
            raise ConfigError(f"the files have different formats: {found}")
        (format,) = formats
    elif format not in READERS:
        raise ConfigError(f"no trace format is called {format!r}; there are auto, {', '.join(READERS)}")
    return Trace(paths[0].stem, format, tuple(files), interval_s)


def _from_zero(requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
    start: float | None = None
    for request in requests:
        start = request.time if start is None else start
        yield replace(request, time=request.time - start) if start else request


def detect(file: Path) -> str:
    """The format of a file, from its name and first line.

    Raises:
        ConfigError: it is none known here.
    """
    if file.suffix.lower() == ".csv":
        return "lengths"
    with file.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"{}")
    try:
        row: dict[str, Any] = json.loads(first)
        if "pagoda_access_log" in row:
            return "access-log"
        if "hash_ids" in row:
            num_blocks, length = len(row["hash_ids"]), int(row["input_length"])
            return "bailian" if num_blocks == -(-length // 16) != -(-length // 512) else "mooncake"
        if "input" in row:
            return "sessions"
    except (ValueError, TypeError, KeyError):
        pass
    raise ConfigError(f"{file}: not a trace of a known format; give --format {', '.join(READERS)}")
