"""TieredCache: a KVCache with tiers below the device.

    advance   ── full blocks ──> Hierarchy.write(THROUGH)   so that they survive eviction and restarts
    evict     ── last look ────> Hierarchy.write(BACK)
    prefetch  <── pieces ─────── Hierarchy.fetch            a restore is a lease that loads tokens, and computes none

A restore holds its blocks as a computing request does, and what it loaded enters the tree through the same door.
Whoever waits for the prefix waits for the restore's lease (`PendingPrefix`), and goes on when it ends, however it ends.

Never slower than cold: a restore is given up as soon as the time spent waiting exceeds the time that the tokens loaded
so far would have taken to compute, plus 5% of what all of them would have. Whatever the tier does, the request then
has lost at most those 5%.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pagoda.errors import OutOfBlocks
from pagoda.kv.allocator import BlockIds
from pagoda.kv.cache import BlockCopier, KVCache
from pagoda.kv.computing import PendingPrefix
from pagoda.kv.eviction import EvictionPolicy
from pagoda.kv.hierarchy import Fetch, Hierarchy, WritePolicy
from pagoda.kv.keys import KeyChain, Scope
from pagoda.kv.layout import KVLayout
from pagoda.kv.lease import Lease
from pagoda.kv.radix_node import TokenArray
from pagoda.kv.tiers.records import RecordId
from pagoda.kv.transfer import ByteRows

_LOSS = 0.05


class BlockIO(BlockCopier, Protocol):
    """What moves blocks between a pool and buffers; a foreign engine's cache can be one."""

    def export_block(self, block_id: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Copy a block's bytes, uint8 `[block_bytes]`, into a buffer."""

    def import_block(self, block_id: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill a block from a buffer."""


@dataclass(slots=True)
class _Restore:
    lease: Lease
    tokens: TokenArray
    fetch: Fetch
    started: float
    first_token: int
    seconds_per_token: float

    @property
    def is_whole(self) -> bool:
        """Whether all that was asked for has come. Its lease must end now: after the last request nobody polls."""
        return self.lease.num_computed_tokens >= self.lease.prompt.size - 1

    @property
    def patience_s(self) -> float:
        """How much longer to wait for the next piece; negative when it is over."""
        saved_s = (self.lease.num_computed_tokens - self.first_token) * self.seconds_per_token
        return saved_s + self.fetch.patience_s - (time.perf_counter() - self.started)


class TieredCache(KVCache):
    """A KVCache whose full blocks also live in a Hierarchy.

    Args:
        layout, pool, policy: see KVCache.
        hierarchy: the tiers; closed with this cache.
        keys: names of blocks outside the device, for this model and secret.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: BlockIO,
        hierarchy: Hierarchy,
        keys: KeyChain,
        policy: EvictionPolicy | None = None,
    ) -> None:
        super().__init__(layout, pool, policy)
        self.hierarchy = hierarchy
        self._io = pool
        self._keys = keys
        self._record_of: dict[int, RecordId] = {}  # blocks of the tree that have a name
        self._restores: list[_Restore] = []

    def prefetch(self, tokens: TokenArray, scope: Scope, seconds_per_token: float) -> PendingPrefix | None:
        """Start to restore what the tiers have of a prompt beyond the device's hit; None if there is nothing to ask.

        Args:
            seconds_per_token: what computing a token costs now.
        """
        match = self._tree.match(tokens[:-1], scope)
        size = self.block_size
        first, last = match.num_tokens // size, (tokens.size - 1) // size
        if first >= last or not self.hierarchy.is_available:
            return None
        parent = self._keys.root(scope)
        if first:
            record = self._record_of.get(int(match.blocks[0, first - 1]))
            if record is None:
                return None
            parent = record.key
        keys = self._keys.chain(parent, tokens[first * size : last * size], size)
        ids = [[RecordId(key, group) for group in range(len(self._windows))] for key in keys]
        lease = self._hold(tokens[: first * size + 1], scope)
        lease.prompt = tokens[: last * size + 1]
        self._computing.add(lease)
        num_tokens = (last - first) * size
        recompute_s = num_tokens * seconds_per_token
        started = time.perf_counter()
        fetch = self.hierarchy.fetch(ids, recompute_s, _LOSS * recompute_s)
        self._restores.append(_Restore(lease, tokens, fetch, started, first * size, seconds_per_token))
        return PendingPrefix(lease, last * size)

    def poll(self) -> None:
        """Take in what arrived, and end the restores that are complete, failed or too slow. Call once a step."""
        self.hierarchy.arrived.clear()
        for restore in list(self._restores):
            complete = restore.fetch.done.is_set()  # asked first: a piece may arrive between the two
            fits = self._take_pieces(restore)
            if complete or restore.is_whole or not fits or restore.patience_s < 0:
                restore.fetch.cancelled.set()
                self._restores.remove(restore)
                self.release(restore.lease, restore.tokens)

    def _take_pieces(self, restore: _Restore) -> bool:
        """Import what was loaded; false if there is no room for it."""
        lease = restore.lease
        while not restore.fetch.pieces.empty():
            piece = restore.fetch.pieces.get()
            num_tokens = len(piece.payloads) * self.block_size
            try:
                self.reserve(lease, num_tokens)
            except OutOfBlocks:
                return False
            first = lease.num_computed_tokens // self.block_size
            for index, groups in enumerate(piece.payloads):
                for table, payload in zip(lease.tables, groups, strict=True):
                    self._io.import_block(int(table.ids[first + index]), payload)
            self.stats.num_restored_tokens += num_tokens
            piece.lane.tally.add("restored_tokens", num_tokens)
            self.advance(lease, restore.tokens, lease.num_computed_tokens + num_tokens)
        return True

    @property
    def is_restoring(self) -> bool:
        """Whether any restore is under way."""
        return bool(self._restores)

    def wait(self, timeout_s: float) -> None:
        """Sleep until something arrives from the tiers or a restore is to be given up, at most so long."""
        patience_s = min((restore.patience_s for restore in self._restores), default=timeout_s)
        self.hierarchy.arrived.wait(max(0.0, min(timeout_s, patience_s)))

    def _on_commit(
        self, lease: Lease, after: int | None, tokens: TokenArray, blocks: BlockIds, entered: npt.NDArray[np.bool_]
    ) -> None:
        whole = tokens.size // self.block_size
        parent = self._keys.root(lease.scope) if after is None else self._record_of[after].key
        keys = self._keys.chain(parent, tokens[: whole * self.block_size], self.block_size)
        new: list[tuple[int, RecordId]] = []
        for index, key in enumerate(keys):
            for group in np.flatnonzero(entered[:, index]):
                new.append((int(blocks[group, index]), RecordId(key, int(group))))
        self._record_of.update(new)
        if not any(restore.lease is lease for restore in self._restores):
            self._write(WritePolicy.THROUGH, new)

    def _on_evict(self, ids: BlockIds) -> None:
        named = [(block, record) for block in ids.tolist() if (record := self._record_of.pop(block, None)) is not None]
        self._write(WritePolicy.BACK, named)

    def _write(self, policy: WritePolicy, named: Sequence[tuple[int, RecordId]]) -> None:
        """Copy blocks out of the pool, as many as there is room for, and queue them for the tiers of a policy."""
        named = named[: self.hierarchy.room(policy, len(named))]
        if not named:
            return
        payloads: ByteRows = np.empty((len(named), self.layout.block_bytes), dtype=np.uint8)
        for payload, (block, _) in zip(payloads, named, strict=True):
            self._io.export_block(block, payload)
        self.hierarchy.write(policy, [record for _, record in named], payloads)

    def close(self) -> None:
        """Write what is queued and close the tiers."""
        self.hierarchy.close()
