"""Staging: blocks that are being filled, in full, beside a pool whose layout quantizes whole blocks.

pool      block 7: full | block 3: filling | block 9: filling
slot_of              -1 |                2 |                0
copies    [9's copy] [free] [3's copy]                         more are made room for if more are filled at once
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from pagoda.kv.layout import KVLayout
from pagoda.kv.pool import BlockPool


class StagedPool(BlockPool):
    """A BlockPool with a staging area.

    Args:
        staged: the layout of what is staged; `layout.staged`.
        num_staged: how many blocks there is room for at first.
        layout, num_blocks, device, progress: see BlockPool.
    """

    def __init__(
        self,
        layout: KVLayout,
        staged: KVLayout,
        num_blocks: int,
        num_staged: int,
        *,
        device: torch.device | str = "cpu",
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(layout, num_blocks, device=device, progress=progress)
        self.staging = Staging(staged, num_blocks, num_staged, device)
        self.num_bytes += self.staging.copies.num_bytes

    def copy_block(self, source: int, target: int) -> None:
        """Copy a whole block, and what is staged of it. Mutates block `target`."""
        super().copy_block(source, target)
        self.staging.copy(source, target)


class Staging:
    """The copies of the blocks that are being filled.

    A copy is dropped when its block is full. Those of requests that ended before are dropped when room is short:
    `open_blocks` tells then what is still being filled, and until that is set, everything staged is.

    Args:
        layout: of the copies.
        num_blocks: of the pool.
        num_slots: how many copies there is room for at first.
        device: the pool's.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, num_slots: int, device: torch.device | str) -> None:
        self.copies = BlockPool(layout, num_slots, device=device)
        self.slot_of = torch.full((num_blocks,), -1, dtype=torch.int32, device=device)
        self._slots: dict[int, int] = {}  # the same, for lookups here
        self._free = list(reversed(range(num_slots)))
        self.open_blocks: Callable[[], Iterable[int]] = self._slots.keys

    @property
    def num_staged(self) -> int:
        """Blocks that have a copy."""
        return len(self._slots)

    def open(self, blocks: Iterable[int]) -> None:
        """See that each of these blocks has a copy; what is in one that it has already stays."""
        wanted = set(blocks)
        missing = wanted - self._slots.keys()
        self._make_room(len(missing), wanted)
        for block in missing:
            self._put(block)

    def close(self, blocks: Iterable[int]) -> None:
        """Drop the copies of blocks."""
        for block in blocks:
            slot = self._slots.pop(block, None)
            if slot is not None:
                self._free.append(slot)
                self.slot_of[block] = -1

    def copy(self, source: int, target: int) -> None:
        """Copy the copy of a block to another block, if it has one."""
        if source not in self._slots:
            return
        if target not in self._slots:
            self._make_room(1, {source})
            self._put(target)
        self.copies.copy_block(self._slots[source], self._slots[target])

    def _put(self, block: int) -> None:
        self._slots[block] = slot = self._free.pop()
        self.slot_of[block] = slot

    def _make_room(self, count: int, keep: set[int]) -> None:
        if count > len(self._free):
            self.close(self._slots.keys() - keep - set(self.open_blocks()))
        if count > len(self._free):
            old = self.copies
            more = max(count, old.num_blocks)
            self.copies = BlockPool(old.layout, old.num_blocks + more, device=self.slot_of.device)
            self.copies.fill_from(old)
            self._free += range(old.num_blocks, self.copies.num_blocks)
