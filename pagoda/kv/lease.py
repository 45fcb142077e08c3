"""Lease: one request's hold on KV memory, from acquire to release."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda.kinds import is_integer, is_number, require
from pagoda.kv.block_table import BlockTable
from pagoda.kv.directives import Directives
from pagoda.kv.keys import Scope
from pagoda.kv.lineage import Segment
from pagoda.kv.radix_node import TokenArray

_PATIENCE = 0.03  # of the time that computing would take: what a restore that fails may cost


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What tiers were asked for a lease, and what came of it, in blocks.

    `num_late_blocks` came after they were computed; `num_slower_blocks` were there, and computing them was predicted to
    be faster; `num_failed_blocks` were there and could not be read. `skipped_tiers` were out, or too slow to be asked.
    Of the restored blocks, `num_prefetched_blocks` had come while the request waited in the queue.
    """

    num_asked_blocks: int
    num_found_blocks: int
    num_restored_blocks: int
    num_late_blocks: int
    num_slower_blocks: int
    num_failed_blocks: int
    skipped_tiers: tuple[str, ...]
    num_prefetched_blocks: int


@dataclass(frozen=True, slots=True)
class TierUse:
    """What a request allows of the tiers below the device.

    Attributes:
        max_restored_tokens: most tokens to restore from them; 0 asks none, None sets no limit.
        wait_s: None waits only as long as that is sure to pay; a number waits so many seconds for the first blocks;
            infinity until the tiers gave what they have.
        store: whether what the request computes may be written to them.
        lossy: whether blocks may come from tiers that store them with loss; None: as the engine is set up. What such
            blocks take part in is the request's alone: it enters neither the tree nor a tier.

    Raises:
        InvalidRequest: a number is negative, or a value of another type.
    """

    max_restored_tokens: int | None = None
    wait_s: float | None = None
    store: bool = True
    lossy: bool | None = None

    def __post_init__(self) -> None:
        most, wait_s, store, lossy = self.max_restored_tokens, self.wait_s, self.store, self.lossy
        is_limit = most is None or (is_integer(most) and most >= 0)
        require(is_limit, f"max_restored_tokens must be 0 or more, got {most!r}", param="tiers.max_restored_tokens")
        is_time = wait_s is None or (is_number(wait_s) and wait_s >= 0)
        require(is_time, f"wait_s must be 0 or more, got {wait_s!r}", param="tiers.wait_s")
        require(isinstance(store, bool), f"store must be true or false, got {store!r}", param="tiers.store")
        is_flag = lossy is None or isinstance(lossy, bool)
        require(is_flag, f"lossy must be true or false, got {lossy!r}", param="tiers.lossy")

    def patience_s(self, recompute_s: float) -> float:
        """How long to wait for the first blocks, where computing all that is asked for takes `recompute_s`."""
        return _PATIENCE * recompute_s if self.wait_s is None else self.wait_s


class Lease:
    """Blocks that hold a request's KV, one table per layer group. Only KVCache changes it.

    Attributes:
        scope: whose prefixes it shares; `lineage` says it for each part of the sequence.
        tables: block tables, one per layer group, equally long unless it was compacted.
        prompt: the tokens it was acquired for; what it is expected to compute and share.
        num_hit_tokens: tokens whose KV was there when it was acquired, or came from a tier.
        num_leading_tokens: of those, the ones before the first that missed.
        num_computed_tokens: tokens whose KV is there now; the next one is written at this position.
        num_reserved_tokens: as far as it may write: there is room, and nobody else has those blocks. 0 if not known.
        num_committed_blocks: leading blocks that are in the tree.
        directives: the priorities of what it commits.
        is_detached: its blocks were purged from the tree, or would have been, or it was compacted; it computes for
            itself alone.
        tier_use: what it allows of lower tiers.
        restore_report: what they were asked and gave, once that is over; None if they were not asked.
        owns_tail: it appends in place to a partial block of the tree, and nobody else may.
    """

    __slots__ = (
        "directives",
        "is_detached",
        "lineage",
        "num_committed_blocks",
        "num_computed_tokens",
        "num_hit_tokens",
        "num_leading_tokens",
        "num_reserved_tokens",
        "owns_tail",
        "prompt",
        "released",
        "restore_report",
        "scope",
        "tables",
        "tier_use",
    )

    def __init__(
        self, scope: Scope, lineage: tuple[Segment, ...], tables: list[BlockTable], prompt: TokenArray
    ) -> None:
        self.scope = scope
        self.lineage = lineage
        self.tables = tables
        self.prompt = prompt
        self.num_hit_tokens = 0
        self.num_leading_tokens = 0
        self.num_computed_tokens = 0
        self.num_reserved_tokens = 0
        self.num_committed_blocks = 0
        self.owns_tail = False
        self.is_detached = False
        self.directives = Directives()
        self.released = False
        self.tier_use = TierUse()
        self.restore_report: RestoreReport | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks held now, over all groups."""
        return sum(table.held.size for table in self.tables)

    @property
    def capacity(self) -> int:
        """Tokens that the tables have room for."""
        return min([table.capacity for table in self.tables])
