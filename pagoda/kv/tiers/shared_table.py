"""The shared table: which granule of a memory file belongs to which record, for many processes at once.

    file     | header | table: one row a granule | granule 0 | granule 1 | ...
    record   a HEAD row (id, size, checksum, lease, ...) and MEMBER rows that point to it; `order` puts them in sequence

There is nothing else: no free list, no hash table, no counters that a dying process could leave wrong. What is free
and who is where is computed from the rows, by column. A row's `state` is written last when a record appears and first
when it goes, so a process killed between any two stores leaves a record that is whole, or a WRITING one of a dead
owner, or MEMBERs of a head that is no longer theirs (another `generation`), and the latter two count as free.

Writers are known by process id, so all processes must see the same ids (one container, or a shared namespace). A living
writer that takes over WRITE_DEADLINE_S loses its rows; should it still write, the checksum of whoever has them tells.

Callers hold the file's lock, which the kernel drops when its holder dies.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pagoda.kv.keys import OWNER_BYTES, OwnerTag
from pagoda.kv.tiers.records import (
    NO_EXPIRY,
    RECORD_ID_BYTES,
    Expired,
    Found,
    LookupResult,
    Missing,
    RecordId,
    RecordInfo,
)

FREE, WRITING, HEAD, MEMBER = range(4)
WRITE_DEADLINE_S = 30.0
_NOBODY = np.iinfo(np.uint64).max

ROW = np.dtype(
    [
        ("state", "<u4"),
        ("head", "<u4"),
        ("order", "<u4"),
        ("writer", "<u4"),
        ("writer_start", "<u8"),
        ("generation", "<u8"),
        ("prefix", "<u8"),
        ("id", f"V{RECORD_ID_BYTES}"),
        ("algorithm", "<u4"),
        ("num_bytes", "<u8"),
        ("checksum", "<u8"),
        ("seal", "<u8"),
        ("owner", "<u8", OWNER_BYTES // 8),
        ("lease_until", "<f8"),
        ("expires_at", "<f8"),
        ("last_used", "<u8"),
        ("written_at", "<f8"),
    ]
)
HEADER = np.dtype([("magic", "S8"), ("version", "<u4"), ("granule", "<u4"), ("granules", "<u8"), ("tick", "<u8")])
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Writer:
    """A process, told from a later one with the same number by its start time."""

    pid: int
    start: int

    @classmethod
    def this_process(cls) -> Writer:
        """The calling process."""
        return cls(os.getpid(), process_start(os.getpid()))


def process_start(pid: int) -> int:
    """When process `pid` started, in clock ticks since boot; 0 if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


class SharedTable:
    """The rows, mapped from the file. Every method needs the file's lock."""

    def __init__(self, header: npt.NDArray[Any], rows: npt.NDArray[Any]) -> None:
        self._header = header
        self.rows = rows
        self._column = {name: rows[name] for name in ROW.names or ()}

    def info(self, head: int) -> RecordInfo:
        """What the row of a record says."""
        row = self.rows[head]
        return RecordInfo(
            RecordId.from_bytes(row["id"].tobytes()),
            int(row["num_bytes"]),
            float(row["lease_until"]),
            OwnerTag(row["owner"].tobytes()),
            float(row["expires_at"]),
        )

    def tick(self) -> int:
        """A number larger than all before: a generation, or a time of use."""
        self._header["tick"] += 1
        return int(self._header["tick"])

    def heads(self) -> Rows:
        """The rows of all records that can be read."""
        return np.flatnonzero(self._column["state"] == HEAD)

    def find(self, ids: Sequence[RecordId]) -> list[int | None]:
        """The head row of each id, or None: one pass over the table for the whole batch.

        Mutates only what a dead writer left: of two records with one of these ids, the earlier goes.
        """
        names = [id.to_bytes() for id in ids]
        heads = self.heads()
        wanted = np.array([_prefix(name) for name in names], dtype=np.uint64)
        known = self._by_id(heads[np.isin(self._column["prefix"][heads], wanted)])
        return [known.get(name) for name in names]

    def settle(self) -> None:
        """Remove what a writer that died as it replaced records left twice."""
        self._by_id(self.heads())

    def _by_id(self, heads: Rows) -> dict[bytes, int]:
        """These records by id; of two with one id, the one written later stays."""
        known: dict[bytes, int] = {}
        for head in heads[np.argsort(self._column["generation"][heads], kind="stable")].tolist():
            name = self._column["id"][head].tobytes()
            if name in known:
                self.remove(known[name])
            known[name] = head
        return known

    def chain(self, head: int) -> Rows:
        """The rows of a record in sequence, its head first."""
        column = self._column
        mine = (column["head"] == head) & (column["generation"] == column["generation"][head])
        rows = np.flatnonzero(mine & (column["state"] != FREE))
        return rows[np.argsort(column["order"][rows], kind="stable")]

    def free(self, now: float) -> Rows:
        """Rows that may be taken: free ones, and what dead or overdue writers and removed heads left behind."""
        column = self._column
        for row in np.flatnonzero(column["state"] == WRITING):
            alive = process_start(int(column["writer"][row])) == column["writer_start"][row]
            if not alive or now - column["written_at"][row] > WRITE_DEADLINE_S:
                column["state"][row] = FREE
        head_state = column["state"][column["head"]]
        has_head = (column["generation"] == column["generation"][column["head"]]) & (
            (head_state == HEAD) | (head_state == WRITING)
        )
        return np.flatnonzero((column["state"] == FREE) | ((column["state"] == MEMBER) & ~has_head))

    def is_over(self, heads: Rows, now: float) -> npt.NDArray[np.bool_]:
        """For each of these records, whether its time, and its lease if it has one, ran out."""
        expires_at, lease_until = self._column["expires_at"][heads], self._column["lease_until"][heads]
        over: npt.NDArray[np.bool_] = (expires_at > 0) & (expires_at <= now) & (lease_until <= now)
        return over

    def answer(self, heads: Sequence[int | None], now: float) -> list[LookupResult]:
        """What a lookup says of records, of which None are not there."""
        known = [head for head in heads if head is not None]
        over = dict(zip(known, self.is_over(np.array(known, dtype=np.int64), now).tolist(), strict=True))
        sizes = self._column["num_bytes"]
        return [Missing() if head is None else Expired() if over[head] else Found(int(sizes[head])) for head in heads]

    def evictable(self, now: float) -> Rows:
        """Heads without a running lease, least recently used first."""
        heads = self.heads()
        heads = heads[self._column["lease_until"][heads] <= now]
        return heads[np.argsort(self._column["last_used"][heads], kind="stable")]

    def belongs(self, rows: Rows, owner: OwnerTag) -> npt.NDArray[np.bool_]:
        """For each of these rows, whether its record is this owner's."""
        mine: npt.NDArray[np.bool_] = (self._column["owner"][rows] == np.frombuffer(owner, "<u8")).all(axis=1)
        return mine

    def num_rows(self, heads: Rows, granule_bytes: int) -> Rows:
        """How many rows each of these records has."""
        return np.maximum(1, -(-self._column["num_bytes"][heads].astype(np.int64) // granule_bytes))

    def purge(self, owner: OwnerTag) -> int:
        """Remove an owner's records; returns how many. Those being written lose their owner, and are not published."""
        heads = self.heads()
        heads = heads[self.belongs(heads, owner)]
        for head in heads:
            self.remove(int(head))
        writing = np.flatnonzero(self._column["state"] == WRITING)
        self._column["owner"][writing[self.belongs(writing, owner)]] = _NOBODY
        return int(heads.size)

    def claim(self, rows: Rows, id: RecordId, writer: Writer, owner: OwnerTag, now: float) -> int:
        """Make `rows`, which are free, one record that is being written; its generation."""
        column, generation, head = self._column, self.tick(), rows[0]
        column["state"][rows] = FREE
        column["generation"][rows] = generation
        column["head"][rows] = head
        column["order"][rows] = np.arange(rows.size)
        column["writer"][head], column["writer_start"][head], column["written_at"][head] = writer.pid, writer.start, now
        name = id.to_bytes()
        column["id"][head], column["prefix"][head] = np.void(name), _prefix(name)
        column["owner"][head], column["expires_at"][head] = np.frombuffer(owner, "<u8"), NO_EXPIRY
        column["state"][head] = WRITING
        column["state"][rows[1:]] = MEMBER
        return generation

    def holds(self, head: int, generation: int, state: int) -> bool:
        """Whether row `head` still is the record of `generation`, in `state`."""
        return bool(self._column["generation"][head] == generation and self._column["state"][head] == state)

    def publish(self, head: int) -> None:
        """Let a written record be found."""
        self._column["last_used"][head] = self.tick()
        self._column["state"][head] = HEAD

    def remove(self, head: int) -> None:
        """Free a record's rows: the head first, so that no instant shows half of it."""
        rows = self.chain(head)
        self._column["state"][head] = FREE
        self._column["state"][rows] = FREE


def _prefix(name: bytes) -> int:
    """The part of an id that is compared by column; the rest decides among the few that share it."""
    return int.from_bytes(name[:8], "little")
