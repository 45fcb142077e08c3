"""BlockTable: the ordered block ids of one request in one layer group, as a page table maps an address space.

position      0 .. 15   16 .. 31   32 .. 47
table index       0         1          2          position // block_size
block id          7         3          9
slot of position 35 = 9 * block_size + 35 % block_size

Of a compacted request the entries before some position are fewer than the tokens: `num_dropped` is subtracted first.
"""

from __future__ import annotations

import numpy as np

from pagoda.kv.allocator import BlockIds

NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int32)


class BlockTable:
    """A growable array of block ids. It counts no references: the cache that hands it out does."""

    __slots__ = ("_ids", "_len", "_packed", "block_size", "first", "num_dropped")

    def __init__(self, block_size: int, ids: BlockIds = NO_BLOCKS) -> None:
        self.block_size = block_size
        self._ids = ids.copy()
        self._len = ids.size
        self._packed: bytes | None = None
        self.first = 0
        """Entries before this index slid out of the window: their block is no longer the request's."""
        self.num_dropped = 0
        """Tokens without an entry; those that are appended come after the entries of the others."""

    def __len__(self) -> int:
        return self._len

    @property
    def ids(self) -> BlockIds:
        """All entries, as a view. Entries before `first` hold a block id of no meaning."""
        return self._ids[: self._len]

    @property
    def leading(self) -> int:
        """The first entry of a table that has one: asked for at each step, for a fifth of what `ids` would take."""
        return self._ids.item(0)

    @property
    def held(self) -> BlockIds:
        """The blocks that the request holds, as a view."""
        return self._ids[self.first : self._len]

    @property
    def packed(self) -> bytes:
        """All entries, four bytes each: kept, since each step asks for what seldom changes."""
        if self._packed is None:
            self._packed = self.ids.tobytes()
        return self._packed

    def append(self, ids: BlockIds) -> None:
        """Add blocks at the end."""
        end = self._len + ids.size
        if end > self._ids.size:
            grown = np.empty(max(end, 2 * self._ids.size, 8), dtype=np.int32)
            grown[: self._len] = self.ids
            self._ids = grown
        self._ids[self._len : end] = ids
        self._len = end
        self._packed = None

    def replace(self, index: int, block_id: int) -> None:
        """Point entry `index` at another block."""
        self._ids[index] = block_id
        self._packed = None

    def truncate(self, length: int) -> BlockIds:
        """Drop the entries from `length` on, and return them."""
        dropped = self._ids[length : self._len].copy()
        self._len = length
        self._packed = None
        return dropped

    def slide(self, first: int) -> BlockIds:
        """Let go of the entries before `first`, and return their blocks. Indices of the others stay."""
        gone = self._ids[self.first : first].copy()
        self._ids[self.first : first] = 0
        self._packed = None
        self.first = max(self.first, first)
        return gone

    def repack(self, ids: BlockIds, num_dropped: int) -> BlockIds:
        """Hold these blocks instead, from entry `first` on; return those held before. See Compactor."""
        gone = self.held.copy()
        self._ids = np.concatenate([self._ids[: self.first], ids])
        self._len = self._ids.size
        self._packed = None
        self.num_dropped = num_dropped
        return gone

    def fork(self) -> BlockTable:
        """A copy that can grow on its own."""
        copy = BlockTable(self.block_size, self.ids)
        copy.first, copy.num_dropped = self.first, self.num_dropped
        return copy

    @property
    def capacity(self) -> int:
        """The first position that there is no block for."""
        return self._len * self.block_size + self.num_dropped

    def index(self, position: int) -> int:
        """Where the block of a position is, or will be."""
        return (position - self.num_dropped) // self.block_size

    def slots(self, start: int, stop: int) -> list[int]:
        """Pool slots of positions `start` to `stop`, exclusive."""
        at, end, size = start - self.num_dropped, stop - self.num_dropped, self.block_size
        slots: list[int] = []
        while at < end:  # a range for each block: by arrays, the one slot of a decode would take ten times as long
            index = at // size
            until = min(end, (index + 1) * size)
            shift = (int(self._ids[index]) - index) * size
            slots += range(at + shift, until + shift)
            at = until
        return slots
