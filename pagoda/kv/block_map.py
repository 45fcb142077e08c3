"""A look at the pool: what its blocks are used for, summed up in a bounded number of cells. For people.

block ids  0 1 2 3 | 4 5 6 7 | 8 9 ...      consecutive ids are a cell
cell       its commonest use, how full it is, and whose its first used block is
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from pagoda.kv.allocator import Allocator
from pagoda.kv.retention import Retention

MAX_LOOKED_AT = 1 << 18
NO_LABEL = -1


class BlockUse(IntEnum):
    """What a block is for. Of a leased block nothing else is told."""

    FREE = 0
    CACHED = 1  # only the tree has it
    PRIVATE = 2  # one request holds it
    SHARED = 3  # several requests hold it
    LEASED = 4


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The pool in cells.

    Attributes:
        blocks_per_cell: of consecutive ids; the last cell may have fewer.
        counts: of the blocks of each use, int64 `[uses]`; scaled up if not all were looked at.
        uses: of each cell, the commonest among its blocks that are not free, uint8 `[cells]`.
        filled: of each cell, how many per cent are not free, uint8 `[cells]`.
        labels: of each cell, the allocator's label of its first block that is not free, or NO_LABEL; int64 `[cells]`.
    """

    blocks_per_cell: int
    counts: npt.NDArray[np.int64]
    uses: npt.NDArray[np.uint8]
    filled: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]


def block_map(allocator: Allocator, retention: Retention, max_cells: int) -> BlockMap:
    """The pool in at most `max_cells` cells. Of a very large pool only every n-th block is looked at. It only reads."""
    step = -(-allocator.num_blocks // MAX_LOOKED_AT)
    refs, in_tree, labels = allocator.every(step)
    leases = retention.leases_of_every(step)
    uses = np.where(refs > 1, BlockUse.SHARED, np.where(refs == 1, BlockUse.PRIVATE, BlockUse.CACHED)).astype(np.uint8)
    uses[(refs == 0) & ~in_tree] = BlockUse.FREE
    uses[leases > 0] = BlockUse.LEASED

    per_cell = -(-uses.size // max_cells)
    num_cells = -(-uses.size // per_cell)
    cell = np.arange(uses.size) // per_cell
    each = np.bincount(cell * len(BlockUse) + uses, minlength=num_cells * len(BlockUse))
    each = each.reshape(num_cells, len(BlockUse))
    sizes = each.sum(axis=1)
    num_used = sizes - each[:, BlockUse.FREE]
    commonest = np.where(num_used > 0, 1 + each[:, 1:].argmax(axis=1), BlockUse.FREE)

    first = np.full(num_cells, NO_LABEL, dtype=np.int64)
    used = np.flatnonzero(uses)[::-1]
    first[cell[used]] = labels[used]  # of several assignments to a cell the last one stands
    return BlockMap(
        blocks_per_cell=per_cell * step,
        counts=each.sum(axis=0) * step,
        uses=commonest.astype(np.uint8),
        filled=(num_used * 100 // sizes).astype(np.uint8),
        labels=first,
    )
