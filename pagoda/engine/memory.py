"""How much memory the KV pool may take unless told otherwise, and what it holds then."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from pagoda.engine.config import EngineConfig
from pagoda.engine.process_memory import available_memory
from pagoda.errors import ConfigError
from pagoda.kv.layout import KVLayout
from pagoda.kv.pool import BlockPool
from pagoda.kv.room import bytes_of_sample, most_running, split_room, staged_room
from pagoda.kv.sizes import format_size
from pagoda.kv.staging import StagedPool

logger = logging.getLogger(__name__)
_SAFE_FRACTION = 0.5
_LEAST_BLOCKS = 2  # of each layer group


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """The size of the KV pool; `kv_format` is as it was asked for."""

    kv_format: str
    num_blocks: int
    block_size: int
    bytes_total: int
    bytes_per_token: float
    tokens_total: int
    users_at_full_context: float


def useful_kv_memory(layout: KVLayout, config: EngineConfig, max_context: int) -> int:
    """Bytes that all samples at full context fill at once, the copies of blocks that are being filled included."""
    num_blocks = max(layout.blocks_for(max_context) * config.max_num_seqs, _LEAST_BLOCKS * len(layout.groups))
    copies = staged_room(layout, config.max_num_seqs, config.token_budget)
    return num_blocks * layout.pool_block_bytes + copies.num_bytes(layout)


def safe_kv_memory(useful: int, num_engines: int = 1) -> int:
    """Half of the available memory, but no more than `useful` bytes: what all samples at full context would fill.

    Of that half, the part of one engine of `num_engines` that start together.
    """
    return min(useful, int(available_memory() * _SAFE_FRACTION / num_engines))


def fitted(config: EngineConfig, layout: KVLayout, num_bytes: int) -> EngineConfig:
    """The config, with no more samples running than copies of what they fill take a fair part of the KV memory."""
    running = most_running(layout, num_bytes, config.max_num_seqs)
    if running < config.max_num_seqs:
        logger.warning(
            "each running sequence takes %s of KV memory for what it has in full: at most %d run, not %d; "
            "raise `--kv-memory` (in Python `kv_memory`) for more",
            format_size(bytes_of_sample(layout)),
            running,
            config.max_num_seqs,
        )
    return replace(config, max_num_seqs=running)


def make_pool(
    layout: KVLayout,
    num_bytes: int,
    config: EngineConfig,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> BlockPool:
    """A pool of so many bytes, the copies of the blocks that are being filled included if the layout stages them.

    Raises:
        ConfigError: it would hold no sequence, or there is no such memory.
    """
    wanted = staged_room(layout, config.max_num_seqs, config.token_budget)
    num_blocks, staged = split_room(layout, num_bytes, wanted)
    if num_blocks < _LEAST_BLOCKS * len(layout.groups):
        raise ConfigError(
            f"{format_size(num_bytes)} of KV memory is too little: a block of {layout.block_size} tokens "
            f"takes {format_size(layout.pool_block_bytes)}"
        )
    if layout.staged is None:
        return BlockPool(layout, num_blocks, device=device, progress=progress)
    return StagedPool(layout, num_blocks, staged, device=device, progress=progress)
