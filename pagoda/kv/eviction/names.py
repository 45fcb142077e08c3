"""BlockNames: 64 bits for each block, by which a policy knows one again that left the tree.

    root        names [scope]
      └─ node   names [a, b, c]      a = scope + h(block 0)    b = a + h(block 1)    c = b + h(block 2)
           └─ node    [d]            d = c + h(block 3)

A name stands for a block's tokens, their place, all before them and the scope. It is made of one block and the name
before it, and stays with its node: whatever slides out of a window or is purged above, the others keep theirs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pagoda.errors import InvariantError
from pagoda.kv.eviction.base import Evictable

Names = npt.NDArray[np.int64]
_PLACE, _MIX_A, _MIX_B = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


class BlockNames:
    """Names the blocks of one tree. Enough to tell statistics apart, not for identity."""

    def __init__(self, block_size: int) -> None:
        self._weights = _mix(np.arange(1, block_size + 1, dtype=np.uint64)) | np.uint64(1)

    def extend(self, node: Evictable, start: int) -> Names:
        """Name the blocks from `node.tokens[start:]` on, all before them having their names; returns the new ones.

        `start` is a block boundary. Mutates `node.names`.

        Raises:
            InvariantError: the node is the top of a scope, which holds no blocks.
        """
        if node.parent is None:
            raise InvariantError("the top of a scope holds no blocks to name")
        first = start // self._weights.size
        known = node.names[:first] if first else node.parent.names[-1:]
        names = np.concatenate([known, self._hash(node.tokens[start:], node.depth + start)])
        chain = names[known.size - 1 :]
        np.add.accumulate(chain, out=chain)
        node.names = names if first else chain[1:]
        return chain[1:]

    def _hash(self, tokens: npt.NDArray[np.integer], depth: int) -> Names:
        """What each block adds to the name of the block before it."""
        size = self._weights.size
        first, num_blocks = depth // size, -(-tokens.size // size)
        padded = tokens.astype(np.uint64)
        if tokens.size < num_blocks * size:
            padded = np.concatenate([padded, np.zeros(num_blocks * size - tokens.size, dtype=np.uint64)])
        places = np.arange(first, first + num_blocks, dtype=np.uint64) * _PLACE
        return _mix(padded.reshape(num_blocks, size) @ self._weights + places).view(np.int64)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection that spreads every bit over the upper and the lower half."""
    values = (values ^ (values >> _30)) * _MIX_A
    values = (values ^ (values >> _27)) * _MIX_B
    return values ^ (values >> _31)
