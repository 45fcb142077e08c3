"""How much memory the KV pool may take unless told otherwise, and what it holds then."""

from __future__ import annotations

import torch

from pagoda.engine.config import EngineConfig
from pagoda.engine.process_memory import available_memory
from pagoda.errors import ConfigError
from pagoda.kv.layout import KVLayout
from pagoda.kv.pool import BlockPool
from pagoda.kv.sizes import format_size
from pagoda.kv.staging import StagedPool

_SAFE_FRACTION = 0.5


def safe_kv_memory(useful: int, num_engines: int = 1) -> int:
    """Half of the available memory, but no more than `useful` bytes: what all users at full context would fill.

    Of that half, the part of one engine of `num_engines` that start together.
    """
    return min(useful, int(available_memory() * _SAFE_FRACTION / num_engines))


def make_pool(layout: KVLayout, num_bytes: int, config: EngineConfig, device: torch.device) -> BlockPool:
    """A pool of so many bytes, the copies of the blocks that are being filled included if the layout stages them.

    Each running sample fills a block, and the chunks of prompts of a step fill those they reach into.

    Raises:
        ConfigError: it would hold no sequence, or there is no such memory.
    """
    staged, groups = layout.staged, len(layout.groups)
    num_blocks, num_staged = num_bytes // layout.pool_block_bytes, 0
    if staged is not None:
        most = groups * (config.max_num_seqs + -(-config.token_budget // config.block_size))
        each_staged = num_bytes // (layout.pool_block_bytes + staged.pool_block_bytes)
        num_blocks = max(each_staged, (num_bytes - most * staged.pool_block_bytes) // layout.pool_block_bytes)
        num_staged = min(num_blocks, most)
    if num_blocks < 2 * groups:
        raise ConfigError(
            f"{format_size(num_bytes)} of KV memory is too little: a block of {layout.block_size} tokens "
            f"takes {format_size(layout.pool_block_bytes)}"
        )
    if staged is None:
        return BlockPool(layout, num_blocks, device=device)
    return StagedPool(layout, staged, num_blocks, num_staged, device=device)
