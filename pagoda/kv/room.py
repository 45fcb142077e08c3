"""Room: how the bytes of a pool are split between its blocks and full copies of those that are being filled.

| block | block | block | ...          | copy | copy | copy |
  num_blocks, of the pool's layout       num_open, of `layout.staged`: only where whole blocks are quantized
"""

from __future__ import annotations

from pagoda.kv.layout import KVLayout


def most_open(layout: KVLayout, num_running: int, step_tokens: int) -> int:
    """The most blocks that are filled at once: a running sample's one, and those that a step's tokens fill in passing.

    Of each layer group as many; 0 if the layout stages none.
    """
    if layout.staged is None:
        return 0
    return len(layout.groups) * (num_running + -(-step_tokens // layout.block_size))


def split_room(layout: KVLayout, num_bytes: int, num_open: int) -> tuple[int, int]:
    """How many blocks, and how many copies of them, so many bytes are: copies for `num_open`, or for all blocks."""
    staged = layout.staged
    if staged is None:
        return num_bytes // layout.pool_block_bytes, 0
    all_open = num_bytes // (layout.pool_block_bytes + staged.pool_block_bytes)
    num_blocks = max(all_open, (num_bytes - num_open * staged.pool_block_bytes) // layout.pool_block_bytes)
    return num_blocks, min(num_blocks, num_open)
