"""The worker's side: has the tiers of one shard, and the only hands on vLLM's cache tensors.

begin        what the scheduler wants with this step     before the model runs: loads from tiers run beside it
start_loads  blocks to put what was loaded into
save         copy completed blocks out                   after the model ran
finish       answer, place what arrived
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from pagoda.integrations.vllm.block_io import VllmBlocks
from pagoda.integrations.vllm.messages import Orders, Replies
from pagoda.integrations.vllm.recall import Recalls
from pagoda.integrations.vllm.settings import Settings, open_hierarchy
from pagoda.integrations.vllm.stats import Figures, TierFigures
from pagoda.kv.hierarchy import Hierarchy, WritePolicy
from pagoda.kv.tiers.records import RecordId, aligned_empty

logger = logging.getLogger("vllm.pagoda")

_IDLE_S = 0.002  # how long a step that computes nothing waits for tiers, instead of asking vLLM for the next at once
_FLUSH_S = 2.0  # vLLM kills a worker that takes longer than five seconds to end


class WorkerSide:
    """One worker's tiers and what goes between them and vLLM's cache.

    Args:
        settings: which tiers.
        block_size: tokens in a block.
        num_blocks: blocks in vLLM's cache.
        rank, num_workers: which shard this is, of how many.
    """

    def __init__(self, settings: Settings, block_size: int, num_blocks: int, rank: int, num_workers: int) -> None:
        self._settings = settings
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._rank = rank
        self._num_workers = num_workers
        self._orders = Orders()
        self._ready: _Ready | None = None

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Take vLLM's cache and open the tiers.

        Raises:
            ConfigError, TierUnavailable: see VllmBlocks and open_hierarchy.
        """
        self.close()  # the former ones, if vLLM makes its cache anew
        blocks = VllmBlocks(caches, self._num_blocks)
        hierarchy = open_hierarchy(self._settings, blocks.block_bytes, self._rank, self._num_workers)
        recalls = Recalls(hierarchy, blocks, self._block_size, self._rank, self._settings.owner)
        self._ready = _Ready(blocks, hierarchy, recalls, TierFigures(hierarchy, self._rank))
        logger.info(
            "Pagoda keeps blocks of %d tokens, %d bytes each, in %s",
            self._block_size, blocks.block_bytes, ", ".join(lane.name for lane in hierarchy.lanes),
        )  # fmt: skip

    @property
    def _parts(self) -> _Ready:
        assert self._ready is not None, "vLLM did not register its cache"
        return self._ready

    def begin(self, orders: Orders) -> None:
        """Take the orders of a step."""
        self._orders = orders
        if self._ready is None:  # vLLM warms up before there is a cache
            return
        recalls, hierarchy = self._parts.recalls, self._parts.hierarchy
        for name in orders.ended:
            recalls.end(name)
        for keep in orders.keeps:
            hierarchy.lease([RecordId(key, shard=self._rank) for key in keep.keys], keep.until)
        for ask in orders.asks:
            recalls.start(ask)

    def start_loads(self) -> None:
        """Take the blocks that what was asked for goes into."""
        for load in self._orders.loads:
            self._parts.recalls.load(load)
        self._orders.loads = []

    def save(self) -> None:
        """Copy out what this step completed, as much as the tiers' queues have room for. Changes nothing of vLLM."""
        saves, self._orders.saves = self._orders.saves, []
        if not saves:
            return
        blocks, hierarchy = self._parts.blocks, self._parts.hierarchy
        saves.sort(key=lambda save: -save.priority)  # those of equal priority stay in order
        saves = saves[: hierarchy.room(WritePolicy.THROUGH, len(saves))]
        if saves:
            rows = aligned_empty(len(saves) * blocks.block_bytes).reshape(len(saves), -1)
            blocks.export_blocks([save.block_id for save in saves], rows)
            ids = [RecordId(save.key, shard=self._rank) for save in saves]
            hierarchy.write(WritePolicy.THROUGH, ids, rows, [self._settings.owner] * len(ids))

    def finish(self) -> set[str]:
        """End a step; returns the requests whose loads are finished, well or not."""
        if self._ready is None:
            return set()
        recalls = self._parts.recalls
        recalls.poll()
        if self._orders.num_tokens:
            recalls.replies.step = self._orders.started, self._orders.num_tokens
        elif not recalls.replies:
            recalls.wait(_IDLE_S)
            recalls.poll()
        finished, recalls.finished = recalls.finished, set()
        return finished

    def take_failed_blocks(self) -> set[int]:
        """The blocks that were not loaded since the last call."""
        if self._ready is None:
            return set()
        failed, self._parts.recalls.failed_blocks = self._parts.recalls.failed_blocks, set()
        return failed

    def take_replies(self) -> Replies | None:
        """What to tell the scheduler since the last call."""
        if self._ready is None or not self._parts.recalls.replies:
            return None
        replies, self._parts.recalls.replies = self._parts.recalls.replies, Replies()
        return replies

    def take_figures(self) -> Figures:
        """What changed in the figures since the last call."""
        return self._parts.figures.changes() if self._ready is not None else Figures()

    def close(self) -> None:
        """Write what is queued, for a moment, and close the tiers."""
        if self._ready is not None:
            self._parts.recalls.close()
            self._parts.hierarchy.close(_FLUSH_S)
            self._ready = None
            logger.info("Pagoda closed its tiers")


class _Ready:
    """What there is once vLLM has a cache."""

    def __init__(self, blocks: VllmBlocks, hierarchy: Hierarchy, recalls: Recalls, figures: TierFigures) -> None:
        self.blocks = blocks
        self.hierarchy = hierarchy
        self.recalls = recalls
        self.figures = figures
