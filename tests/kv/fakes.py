"""A pool that stores tokens instead of KV, so that a test can read back what a block table says it holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from pagoda.kv.cache import KVCache
from pagoda.kv.eviction import EvictionPolicy
from pagoda.kv.formats import parse_format
from pagoda.kv.layout import KVLayout
from pagoda.kv.lease import Lease
from pagoda.kv.tenants import Share

POISON = -7


class TokenPool:
    """Slots hold the token whose KV a real pool would hold there."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.slots = np.full((num_blocks, block_size), POISON, dtype=np.int64)

    def copy_block(self, source: int, target: int) -> None:
        self.slots[target] = self.slots[source]

    def export_block(self, block_id: int, buffer: np.ndarray) -> None:
        row = self.slots[block_id]
        buffer[: row.nbytes] = row.view(np.uint8)
        buffer[row.nbytes :] = 0

    def import_block(self, block_id: int, buffer: np.ndarray) -> None:
        row = self.slots[block_id]
        row[:] = buffer[: row.nbytes].view(np.int64)

    def fill(self, lease: Lease, tokens: np.ndarray, start: int, stop: int) -> None:
        for table in lease.tables:
            self.slots.reshape(-1)[table.slots(start, stop)] = tokens[start:stop]

    def read(self, lease: Lease, group: int, start: int, stop: int) -> np.ndarray:
        return self.slots.reshape(-1)[lease.tables[group].slots(start, stop)]

    def poison(self, cache: KVCache) -> None:
        """Overwrite every free block: nothing may ever read one."""
        ids = np.arange(self.num_blocks)
        allocator = cache._allocator
        free = [i for i in ids if allocator.ref_count(i) == 0 and not allocator.in_tree(i)]
        self.slots[free] = POISON


def layout(block_size: int, windows: tuple[int | None, ...] = (None,), kv_format: str = "fp32") -> KVLayout:
    kept = parse_format(kv_format)
    return KVLayout([kept.attention(1, 8, block_size, window, "float32") for window in windows], block_size)


def make(
    num_blocks: int,
    block_size: int,
    windows: tuple[int | None, ...] = (None,),
    policy: EvictionPolicy | None = None,
    clock: Callable[[], float] = time.monotonic,
    shares: Mapping[str, Share] = MappingProxyType({}),
    kv_format: str = "fp32",
) -> tuple[KVCache, TokenPool]:
    pool = TokenPool(num_blocks, block_size)
    return KVCache(layout(block_size, windows, kv_format), pool, policy, clock=clock, shares=shares), pool
