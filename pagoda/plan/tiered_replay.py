"""TieredReplay: a replay with tiers below the device, and with the time to first token that each request would see.

    prompt ── device hit ── loaded from tiers ── computed ──>  TTFT = wait + load + compute

Times are those of an otherwise idle machine (plan/work.py); what a request waits for is memory, and in plan/fleet.py
other requests.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pagoda.kv.allocator import BlockIds
from pagoda.kv.eviction import EvictionPolicy
from pagoda.kv.radix_node import TokenArray
from pagoda.plan.replay import Replay
from pagoda.plan.simulated_tiers import SimulatedTier, SimulatedTiers
from pagoda.plan.traces import TraceRequest
from pagoda.plan.work import Machine

_RESOLUTION = math.log(1.01)


class Quantiles:
    """A distribution of positive numbers, to 1%, in memory that does not grow with how many there are."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._total = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[round(math.log(max(value, 1e-9)) / _RESOLUTION)] += 1
        self._total += value
        self._count += 1

    @property
    def mean(self) -> float:
        """Of all values; 0 without any."""
        return self._total / max(1, self._count)

    def at(self, share: float) -> float:
        """The value that `share` of all do not exceed; 0 without any."""
        left = share * self._count
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 0:
                return math.exp(bucket * _RESOLUTION)
        return 0.0


class TieredReplay(Replay):
    """A Replay of a device of `capacity` blocks with tiers below it.

    Args:
        machine: what computing takes.
        tiers: the fastest first; each serves this replay alone.
        seconds_per_output_token: how long requests hold their blocks while they generate. With None they hold them no
            longer than it takes to serve them, which is at once.
    """

    def __init__(
        self,
        capacity: int,
        policy: EvictionPolicy,
        machine: Machine,
        tiers: Sequence[SimulatedTier] = (),
        seconds_per_output_token: float | None = None,
    ) -> None:
        super().__init__(capacity, policy)
        self.tiers = SimulatedTiers(tiers)
        self.ttft = Quantiles()
        self.cold_ttft = Quantiles()
        self.busy_s = 0.0  # computing and loading
        self._machine = machine
        self._output_s = seconds_per_output_token
        self._trace_ids = np.zeros(capacity, dtype=np.int64)  # of each device block
        self.last_ttft = 0.0  # of the latest request, without waiting
        self.evicted_listener: Callable[[list[int]], None] | None = None  # told the trace's blocks

    @property
    def num_hit_tokens(self) -> int:
        """Hits of the device and of all tiers."""
        return self.report.num_hit_tokens + sum(tier.counts.num_hit_tokens for tier in self.tiers.tiers)

    @property
    def token_hit_rate(self) -> float:
        """Share of prompt tokens that were hits anywhere."""
        return self.num_hit_tokens / max(1, self.report.num_tokens)

    def _serve(self, request: TraceRequest, num_hits: int) -> float:
        """Load and compute what the device lacks; seconds that the request holds its blocks."""
        num_tokens, size = request.num_prompt_tokens, request.block_tokens
        known = min(num_hits * size, num_tokens)
        missing = request.blocks[num_hits : self.num_blocks].tolist()
        loaded, load_s = 0, 0.0
        asked = min(num_tokens, (num_hits + len(missing)) * size) - known
        if missing and self.tiers.tiers:
            recompute_s = self._machine.prefill_s(known + asked, known)
            loaded, load_s = self.tiers.load(missing, recompute_s, asked)
        start = min(known + loaded * size, num_tokens - 1)  # the last token is always computed
        service_s = load_s + self._machine.prefill_s(num_tokens, max(0, start))
        self.busy_s += service_s
        self.last_ttft = service_s
        self.cold_ttft.add(self._machine.prefill_s(num_tokens))
        return 0.0 if self._output_s is None else service_s + request.num_output_tokens * self._output_s

    def _on_served(self, waited_s: float) -> None:
        self.ttft.add(waited_s + self.last_ttft)

    def _on_computed(self, ids: BlockIds, blocks: TokenArray) -> None:
        self._trace_ids[ids] = blocks
        if self.tiers.tiers:
            self.tiers.on_computed(blocks.tolist())

    def _on_evicted(self, ids: BlockIds) -> None:
        if self.tiers.tiers or self.evicted_listener:
            blocks = self._trace_ids[ids].tolist()
            self.tiers.on_evicted(blocks)
            if self.evicted_listener:
                self.evicted_listener(blocks)


def replay_all(requests: Iterable[TraceRequest], replays: Sequence[Replay]) -> int:
    """Serve each request of a stream to every replay; how many there were. The stream is read once."""
    count = 0
    for request in requests:
        count += 1
        for replay in replays:
            replay.serve(request)
    for replay in replays:
        replay.finish()
    return count
