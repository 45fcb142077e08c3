"""Fleet: a trace on several replicas, each with a cache and tiers of its own, behind a router.

    request ──RoutingPolicy──> replica: a queue for its compute ──> TieredReplay: hits, loads, TTFT

A replica prefills one request after the other; decoding runs beside it and is not counted. TTFT is the wait in that
queue, the load and the computation. What a replica evicts, its router learns at once, as from block events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pagoda.cluster.routing import RoutingPolicy
from pagoda.plan.tiered_replay import Quantiles, TieredReplay
from pagoda.plan.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class FleetReport:
    """What a fleet did. `imbalance` is the busiest replica's time over the mean; utilization is the mean's share."""

    num_requests: int
    token_hit_rate: float
    ttft: Quantiles
    imbalance: float
    utilization: float


class Fleet:
    """Replicas behind a routing policy.

    Args:
        replicas: fresh, and without a time that requests hold blocks.
        routing: chooses among as many.
        tokens_per_s: what a replica computes, to tell its backlog in tokens.
    """

    def __init__(self, replicas: Sequence[TieredReplay], routing: RoutingPolicy, tokens_per_s: float) -> None:
        self._replicas = replicas
        self._routing = routing
        self._tokens_per_s = tokens_per_s
        self._free_at = np.zeros(len(replicas))
        self._ttft = Quantiles()
        self._now = 0.0
        for number, replica in enumerate(replicas):
            replica.evicted_listener = partial(routing.on_evicted, number)

    def serve(self, request: TraceRequest) -> int:
        """Route a request and serve it; which replica did."""
        self._now = request.time
        load = np.maximum(self._free_at - self._now, 0.0) * self._tokens_per_s
        blocks = request.blocks.tolist()
        number = self._routing.choose(blocks, request.block_tokens, request.num_prompt_tokens, load)
        replica = self._replicas[number]
        replica.serve(request)
        kept = blocks[: replica.num_blocks]
        self._routing.on_computed(number, kept)
        start = max(self._now, float(self._free_at[number]))
        self._free_at[number] = start + replica.last_ttft
        self._ttft.add(start - self._now + replica.last_ttft)
        return number

    def report(self) -> FleetReport:
        """What happened so far."""
        num_tokens = sum(replica.report.num_tokens for replica in self._replicas)
        busy = np.array([replica.busy_s for replica in self._replicas])
        span = max(self._now, float(self._free_at.max()))
        return FleetReport(
            num_requests=sum(replica.report.num_requests for replica in self._replicas),
            token_hit_rate=sum(replica.num_hit_tokens for replica in self._replicas) / max(1, num_tokens),
            ttft=self._ttft,
            imbalance=float(busy.max() / busy.mean()) if busy.any() else 1.0,
            utilization=float(busy.mean() / span) if span else 0.0,
        )
