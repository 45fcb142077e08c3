"""Records: one conversation under one policy, a line of JSON each, written as soon as it is known.

A run that is ended loses nothing, a run that is started again leaves out what is there, and several runs into one
folder add up, since each writes a file of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.quality.compare import Compared

Key = tuple[str, int, int, str, float]


@dataclass(frozen=True)
class Record:
    """A conversation's answers under a policy, each compared with full KV's.

    Attributes:
        kind, length, index: of the conversation.
        policy: as a line of text without its budget; `full`, or `kvpress` and one of its names.
        fraction: of the prompt's entries that stay.
        num_steps: decoded tokens.
        kv_bytes: of the prompt's KV in full.
        sparse: what the engine reported; None: nothing was compressed.
    """

    kind: str
    length: int
    index: int
    policy: str
    fraction: float
    answers: list[Compared]
    num_steps: int = 0
    kv_bytes: float = 0
    sparse: dict[str, Any] | None = None

    @property
    def key(self) -> Key:
        """What it is a record of."""
        return self.kind, self.length, self.index, self.policy, self.fraction

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Record:
        """What `asdict` was made from."""
        return cls(**{**fields, "answers": [Compared(**each) for each in fields["answers"]]})


class Records:
    """The records in a folder. Those that are added go to a file of this process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"answers-{os.getpid()}.jsonl"
        self._known = {each.key: each for path in sorted(folder.glob("answers-*.jsonl")) for each in _read(path)}

    def __contains__(self, key: Key) -> bool:
        return key in self._known

    def __iter__(self) -> Iterator[Record]:
        return iter(self._known.values())

    def add(self, record: Record) -> None:
        """Keep a record."""
        self._known[record.key] = record
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")


def _read(path: Path) -> Iterator[Record]:
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):  # or its process was killed as it wrote
            yield Record.of(json.loads(line))
