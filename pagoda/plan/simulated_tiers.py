"""The tiers of a replay: which records each holds, what moved, and when loading was worth it.

    device ──evicts──> dram (write-back)       device ──computes──> disk, object (write-through)
       <──loads the longest run of consecutive blocks that they have, if that beats computing it──

As in kv/hierarchy.py: each tier is least-recently-used over records, a block is loaded from the fastest tier that has
it, a load ends where most time is saved, and none starts whose first piece would outlast the patience of a request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from pagoda.errors import ConfigError

# As the hierarchy has them: of the time to compute what is asked for, a request waits this share for a first piece,
# which is this share of it.
PATIENCE = 0.05
FIRST_PIECE = 0.05


@dataclass(slots=True)
class TierCounts:
    """What a tier did, in blocks of the trace. `num_wasted` of those evicted had served no hit."""

    num_hit_tokens: int = 0
    num_read: int = 0
    num_written: int = 0
    num_evicted: int = 0
    num_wasted: int = 0


class SimulatedTier:
    """Records of blocks, the least recently used going first.

    Args:
        capacity: in blocks; None without a limit.
        seconds_per_block: of a load, after `latency_s`.
        write_through: gets blocks when they are computed, not when the device evicts them.
    """

    def __init__(
        self, name: str, capacity: int | None, seconds_per_block: float, latency_s: float, write_through: bool
    ) -> None:
        if capacity is not None and capacity < 1:
            raise ConfigError(f"the tier {name} is too small for one block of the trace")
        self.name = name
        self.capacity = capacity
        self.seconds_per_block = seconds_per_block
        self.latency_s = latency_s
        self.write_through = write_through
        self.counts = TierCounts()
        self._records: OrderedDict[int, bool] = OrderedDict()  # block -> whether it has served a hit

    def __contains__(self, block: int) -> bool:
        return block in self._records

    def __len__(self) -> int:
        return len(self._records)

    def put(self, blocks: Sequence[int]) -> None:
        """Write those that are not here; all of them count as used now."""
        records = self._records
        before = len(records)
        for block in blocks:
            if block in records:
                records.move_to_end(block)
            else:
                records[block] = False
        self.counts.num_written += len(records) - before
        while self.capacity is not None and len(records) > self.capacity:
            _, used = records.popitem(last=False)
            self.counts.num_evicted += 1
            self.counts.num_wasted += not used

    def get(self, blocks: Sequence[int], num_tokens: int) -> None:
        """Read blocks that are here, which hold so many tokens."""
        for block in blocks:
            self._records[block] = True
            self._records.move_to_end(block)
        self.counts.num_read += len(blocks)
        self.counts.num_hit_tokens += num_tokens


class SimulatedTiers:
    """Tiers below a device, the fastest first."""

    def __init__(self, tiers: Sequence[SimulatedTier]) -> None:
        self.tiers = tuple(tiers)

    def on_computed(self, blocks: Sequence[int]) -> None:
        """The device has new blocks."""
        for tier in self.tiers:
            if tier.write_through:
                tier.put(blocks)

    def on_evicted(self, blocks: Sequence[int]) -> None:
        """The device gave blocks up."""
        for tier in self.tiers:
            if not tier.write_through:
                tier.put(blocks)

    def load(self, blocks: Sequence[int], recompute_s: float, num_tokens: int) -> tuple[int, float]:
        """Load as many of the blocks that the device lacks, from the first on, as saves most time.

        Args:
            recompute_s: seconds that computing all of them takes.
            num_tokens: in all of them; only the last may be partly filled.

        Returns:
            How many were loaded, and the seconds it took.
        """
        runs = self._runs(blocks)
        if not runs:
            return 0, 0.0
        each_s = recompute_s / len(blocks)
        first, length = runs[0]
        piece_s = first.latency_s + FIRST_PIECE * length * first.seconds_per_block  # a block here is many of ours
        if piece_s > PATIENCE * recompute_s:
            return 0, 0.0
        count = best = 0
        gain = best_gain = seconds = best_s = 0.0
        for tier, length in runs:
            took_s = tier.latency_s + length * tier.seconds_per_block
            count, seconds, gain = count + length, seconds + took_s, gain + length * each_s - took_s
            if gain > best_gain:
                best, best_gain, best_s = count, gain, seconds
        self._read(blocks[:best], runs, num_tokens, len(blocks))
        return best, best_s

    def _runs(self, blocks: Sequence[int]) -> list[tuple[SimulatedTier, int]]:
        """The fastest tier of each block up to the first that none has, neighbours of one tier together."""
        found = []
        for block in blocks:
            tier = next((tier for tier in self.tiers if block in tier), None)
            if tier is None:
                break
            found.append(tier)
        return [(tier, len(list(group))) for tier, group in groupby(found)]

    def _read(
        self, blocks: Sequence[int], runs: Sequence[tuple[SimulatedTier, int]], num_tokens: int, num_asked: int
    ) -> None:
        per_block = -(-num_tokens // num_asked)
        start = 0
        for tier, length in runs:
            taken = blocks[start : start + length]
            tokens = min(num_tokens, (start + len(taken)) * per_block) - min(num_tokens, start * per_block)
            tier.get(taken, tokens)
            start += length
            if start >= len(blocks):
                break
