"""Auditor: recompute a sample of the blocks that hits were made of, and compare.

    finished request ──> seldom, one of its hit blocks ──> computed again on the cached prefix: the same, but for
    rounding? no ──> computed again from the first token: which block is wrong first? It, and all built on it, goes

A checksum proves that a tier gave back what it was given; this proves that it was the right KV. Deviation is the length
of the difference relative to that of the whole, for the keys and for the values of each layer. Twice what chunking
alone causes, measured at the first audit, is rounding; more is not.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagoda.engine.params import SamplingParams
from pagoda.engine.request import Request, Sample, TokenBuffer
from pagoda.engine.runner import Runner
from pagoda.engine.step_plan import Rows
from pagoda.errors import OutOfBlocks
from pagoda.kv.cache import KVCache
from pagoda.kv.formats.base import Floats
from pagoda.kv.formats.blocks import decode_block
from pagoda.kv.keys import Scope
from pagoda.kv.lease import Lease
from pagoda.kv.radix_node import TokenArray
from pagoda.model.lora import Adapter

logger = logging.getLogger(__name__)

_CALIBRATION_BLOCKS = 16
_MOST_JOBS = 8

Deviations = npt.NDArray[np.float64]


class BlockReader(Protocol):
    """Where the bytes of blocks are read."""

    def export_block(self, block_id: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Copy a block's bytes, uint8 `[block_bytes]`, into a buffer."""


@dataclass(frozen=True, slots=True)
class _Job:
    tokens: TokenArray
    scope: Scope
    adapter: Adapter | None
    block: int


@dataclass(frozen=True, slots=True)
class AuditCounts:
    """Blocks compared, and those of them that were wrong."""

    num_audited: int = 0
    num_mismatches: int = 0


class Auditor:
    """Audits an engine's cache. Runs on the engine's thread.

    Args:
        cache, runner: the engine's.
        pool: where the cache's blocks are.
        new_sample: makes a sample of a request, to be run.
        share: the chance of a hit block to be audited.
        chunk: most tokens to compute at once.
    """

    def __init__(
        self,
        cache: KVCache,
        runner: Runner,
        pool: BlockReader,
        new_sample: Callable[[Request, int, TokenBuffer], Sample],
        share: float,
        chunk: int,
    ) -> None:
        self._cache = cache
        self._runner = runner
        self._pool = pool
        self._new_sample = new_sample
        self._share = share
        self._chunk = chunk
        self._size = cache.block_size
        self._random = random.Random()
        self._jobs: deque[_Job] = deque(maxlen=_MOST_JOBS)
        self._limit: Deviations | None = None

    def consider(self, request: Request) -> None:
        """Perhaps audit one of the blocks that a finished request hit, at the next `run`."""
        num_blocks = request.num_hit_tokens // self._size
        if num_blocks and self._random.random() < 1 - (1 - self._share) ** num_blocks:
            self._jobs.append(_Job(request.prompt, request.scope, request.adapter, self._random.randrange(num_blocks)))

    def run(self) -> AuditCounts:
        """Do one audit, if one is due and there is room for it."""
        if not self._jobs:
            return AuditCounts()
        job = self._jobs.popleft()
        tokens = job.tokens[: (job.block + 1) * self._size]
        held = self._hold(tokens, job.scope)
        try:
            if held.num_computed_tokens < tokens.size:
                return AuditCounts()
            wrong = self._first_wrong(tokens, job, held)
        except OutOfBlocks:
            return AuditCounts()
        finally:
            self._cache.release(held, tokens)
        if wrong is None:
            return AuditCounts(1)
        verdict = self._cache.quarantine(tokens[: (wrong + 1) * self._size], job.scope)
        logger.error("audit: block %d of a prompt is not what computing gives: %s", wrong, verdict)
        return AuditCounts(1, 1)

    def _first_wrong(self, tokens: TokenArray, job: _Job, held: Lease) -> int | None:
        """The first block that deviates. Only if the audited one does, those before it are looked at."""
        limit = self._calibrated(tokens, job)
        with self._computed(job, tokens, job.block, self._chunk) as lease:
            if self._agree(held, lease, job.block, limit):
                return None
        with self._computed(job, tokens, 0, self._chunk) as lease:
            return next((i for i in range(job.block + 1) if not self._agree(held, lease, i, limit)), None)

    def _calibrated(self, tokens: TokenArray, job: _Job) -> Deviations:
        """What rounding may do: twice the deviation between chunkings of a text like this, and the format's step."""
        if self._limit is None:
            text = np.resize(tokens, _CALIBRATION_BLOCKS * self._size)
            spread: list[Deviations] = []
            with self._computed(job, text, 0, text.size) as whole:
                with self._computed(job, text, 0, self._size) as blocks:
                    spread += [self._deviations(whole, blocks, i) for i in range(_CALIBRATION_BLOCKS)]
                with self._computed(job, text[: self._size], 0, 1) as singles:
                    spread.append(self._deviations(whole, singles, 0))
            layout = self._cache.layout
            empty = np.zeros(layout.block_bytes, dtype=np.uint8)
            parts = [part for group in range(len(layout.groups)) for part in decode_block(layout, group, empty)]
            steps = [part.format.step for part in parts for _ in part.layers]
            self._limit = 2 * np.max(spread, axis=0) + steps
        return self._limit

    # -- computing and comparing -------------------------------------------------------------------------------------

    def _hold(self, tokens: TokenArray, scope: Scope) -> Lease:
        return self._cache.hold(np.append(tokens, tokens.dtype.type(0)), scope)  # all of them: the last never counts

    @contextlib.contextmanager
    def _computed(self, job: _Job, tokens: TokenArray, first: int, chunk: int) -> Iterator[Lease]:
        """A lease whose blocks from `first` on are computed anew; they enter no tree.

        Raises:
            OutOfBlocks: there is no room to compute them.
        """
        start = first * self._size
        lease = self._hold(tokens[:start], job.scope)
        try:
            self._cache.reserve(lease, tokens.size - start)
            request = Request("audit", tokens, SamplingParams(), job.scope, 0, 1, adapter=job.adapter)
            sample = self._new_sample(request, 0, TokenBuffer(np.append(tokens, tokens.dtype.type(0))))
            sample.lease = lease
            for at in range(start, tokens.size, chunk):
                self._runner.execute([Rows.of(sample, at, min(at + chunk, tokens.size))])
            yield lease
        finally:
            self._cache.release(lease, tokens)

    def _agree(self, one: Lease, other: Lease, block: int, limit: Deviations) -> bool:
        return bool((self._deviations(one, other, block) <= limit).all())  # what is not a number does not agree

    def _deviations(self, one: Lease, other: Lease, block: int) -> Deviations:
        """Of the keys and values of every layer, group by group; 0 where a lease has let go of the block."""
        layout, found = self._cache.layout, list[float]()
        for group, tables in enumerate(zip(one.tables, other.tables, strict=True)):
            gone = any(table.first > block for table in tables)
            sides = [self._read(int(table.ids[block])) for table in tables]
            for a, b in zip(*(decode_block(layout, group, side) for side in sides), strict=True):
                found += [0.0] * len(a.layers) if gone else _relative(a.values, b.values).tolist()
        return np.array(found)

    def _read(self, block_id: int) -> npt.NDArray[np.uint8]:
        buffer = np.empty(self._cache.layout.block_bytes, dtype=np.uint8)
        self._pool.export_block(block_id, buffer)
        return buffer


def _relative(values: Floats, expected: Floats) -> Deviations:
    """For each layer the length of the difference over that of what is expected."""
    wide = expected.reshape(len(expected), -1).astype(np.float64)
    off = values.reshape(wide.shape) - wide
    lengths: Deviations = np.linalg.norm(off, axis=1) / np.maximum(np.linalg.norm(wide, axis=1), 1e-30)
    return lengths
