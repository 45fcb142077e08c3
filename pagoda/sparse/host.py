"""HostPool: the KV of recallable requests in host memory, read token by token.

    pool    [num_layers, num_kv_heads, num_slots, 2, head_dim]      a token's key and value lie side by side:
             slot = block * block_size + offset                     fetching it reads one run of memory

Lower tiers hold whole blocks, all layers and heads together, and know them by key. Here a layer asks for other tokens
for each of its KV heads, at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from pagoda.kv.allocator import Allocator
from pagoda.kv.layout import DTYPE_BYTES
from pagoda.sparse.skew import Asked

BLOCK = 64  # tokens; nothing is shared here, so blocks are only the unit of giving and taking back


class HostPool:
    """A bounded number of token slots. Its memory is taken from the system as it is first written.

    Attributes:
        num_kv_heads: of each layer.
        bytes_per_entry: of a token's key and value in one layer and KV head.
        num_fetched_bytes: what was brought to the device so far, counted by those who bring it.

    Args:
        num_bytes: at most so much is held; at least one block.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str, num_bytes: int) -> None:
        self.num_kv_heads = num_kv_heads
        self.bytes_per_entry = 2 * head_dim * DTYPE_BYTES[dtype]
        self.bytes_per_token = num_layers * num_kv_heads * self.bytes_per_entry
        num_blocks = max(1, num_bytes // (BLOCK * self.bytes_per_token))
        self._allocator = Allocator(num_blocks)
        shape = (num_layers, num_kv_heads, num_blocks * BLOCK, 2, head_dim)
        self.num_fetched_bytes = 0
        self._entries = torch.empty(shape, dtype=getattr(torch, dtype))

    @property
    def num_bytes(self) -> int:
        """Bytes in all."""
        return self._allocator.num_blocks * BLOCK * self.bytes_per_token

    @property
    def num_tokens(self) -> int:
        """Tokens that it has room for in all."""
        return self._allocator.num_blocks * BLOCK

    @property
    def num_held_bytes(self) -> int:
        """Bytes of blocks that requests hold."""
        return self._allocator.num_held * BLOCK * self.bytes_per_token

    def allocate(self, num_tokens: int) -> torch.Tensor:
        """Slots for at least `num_tokens` tokens, int64: whole blocks.

        Raises:
            OutOfBlocks: there are not so many; nothing changed.
        """
        blocks = torch.from_numpy(self._allocator.allocate(-(-num_tokens // BLOCK)).astype(np.int64))
        return (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()

    def free(self, slots: torch.Tensor) -> None:
        """Take back slots that `allocate` gave, in one piece or several."""
        self._allocator.release((slots[::BLOCK] // BLOCK).numpy().astype(np.int32))

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store a layer's keys and values, `[num_kv_heads, n, head_dim]` each, at `n` slots."""
        self._entries[layer, :, slots, 0] = keys.to(self._entries)
        self._entries[layer, :, slots, 1] = values.to(self._entries)

    def keys(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """A layer's keys at `n` slots, `[num_kv_heads, n, head_dim]`."""
        return self._entries[layer, :, slots, 0]

    def entries(self, layer: int) -> torch.Tensor:
        """A layer's memory, `[num_kv_heads, num_slots, 2, head_dim]`: read from it."""
        return self._entries[layer]


@dataclass(frozen=True, slots=True)
class RecallMemory:
    """What recalling takes besides the pool.

    Attributes:
        host: where KV goes.
        queries: layer, residual stream and positions -> the rotated queries that the layer would make of them.
        rotated: layer, queries and positions -> the queries, rotated.
        asked: what the model's queries are like, learnt when it is first asked for.
        scale: what the model multiplies scores by.
    """

    host: HostPool
    queries: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
    rotated: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
    asked: Callable[[], Asked]
    scale: float
