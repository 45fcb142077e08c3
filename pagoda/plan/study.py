"""Study: a trace through caches of several sizes under several policies, in one pass over the trace.

summarize   how many requests, tokens and different blocks; the hit rate of a cache that forgets nothing
study       a point for each policy and device size: hits by tier, bytes moved, TTFT, waste; Belady's bounds
find_tier   the least of a tier with which a hit rate is reached
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pagoda.errors import ConfigError
from pagoda.kv.eviction import make_policy
from pagoda.plan.belady import belady_hits
from pagoda.plan.footprint import Footprint
from pagoda.plan.hardware import TierPlan
from pagoda.plan.replay import Report
from pagoda.plan.simulated_tiers import SimulatedTier
from pagoda.plan.tiered_replay import Quantiles, TieredReplay, replay_all
from pagoda.plan.traces import TraceRequest
from pagoda.plan.work import Machine

Stream = Callable[[], Iterable[TraceRequest]]

MAX_BOUND_BLOCKS = 1 << 24  # a bound keeps the whole trace in memory: 8 bytes for each block of each prompt
_MAX_SAMPLE = 1 << 20
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a trace holds. `num_different` and `best_hit_rate` are estimates in a trace of very many different blocks.

    `best_hit_rate` is that of a cache that forgets nothing; `requests` the trace itself, if small enough for bounds.
    """

    num_requests: int
    num_tokens: int
    num_output_tokens: int
    num_blocks: int
    num_different: int
    block_tokens: int
    best_hit_rate: float
    duration_s: float
    requests: tuple[TraceRequest, ...] | None


class _Distinct:
    """Counts different blocks, and tokens in blocks seen before, over a sample by hash that thins out as it grows."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._bits = np.uint64(0)
        self._again = 0.0

    def add(self, request: TraceRequest) -> None:
        size = request.block_tokens
        tokens = np.full(request.blocks.size, size)
        if tokens.size:
            tokens[-1] = request.num_prompt_tokens - size * (tokens.size - 1)
        sampled = _mix(request.blocks) & self._bits == 0
        scale = float(self._bits) + 1
        for block, count in zip(request.blocks[sampled].tolist(), tokens[sampled].tolist(), strict=True):
            if block in self._seen:
                self._again += scale * count
            else:
                self._seen.add(block)
        if len(self._seen) > _MAX_SAMPLE:
            self._bits = np.uint64(2 * int(self._bits) + 1)
            blocks = np.fromiter(self._seen, dtype=np.int64, count=len(self._seen))
            self._seen = set(blocks[_mix(blocks) & self._bits == 0].tolist())

    @property
    def num_different(self) -> int:
        return len(self._seen) * (int(self._bits) + 1)

    @property
    def num_again(self) -> float:
        return self._again


def summarize(requests: Iterable[TraceRequest], keep: int = MAX_BOUND_BLOCKS) -> Summary:
    """Look at a trace once. Memory is bounded, by `keep` blocks among others.

    Raises:
        ConfigError: it is empty, or its blocks have different sizes.
    """
    distinct = _Distinct()
    kept: list[TraceRequest] | None = []
    num_requests = num_tokens = num_output = num_blocks = block_tokens = 0
    duration_s = 0.0
    for request in requests:
        if block_tokens not in (0, request.block_tokens):
            raise ConfigError(f"the trace has blocks of {block_tokens} and of {request.block_tokens} tokens")
        block_tokens = request.block_tokens
        num_requests += 1
        num_tokens += request.num_prompt_tokens
        num_output += request.num_output_tokens
        num_blocks += request.blocks.size
        duration_s = request.time
        distinct.add(request)
        if kept is not None:
            kept.append(request)
            if num_blocks > keep:
                kept = None
    if not num_blocks:
        raise ConfigError("the trace has no request with a prompt")
    return Summary(
        *(num_requests, num_tokens, num_output, num_blocks, max(1, distinct.num_different), block_tokens),
        best_hit_rate=min(1.0, distinct.num_again / num_tokens),
        duration_s=duration_s,
        requests=None if kept is None else tuple(kept),
    )


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated: a machine, its KV, and the tiers below its device.

    `seconds_per_output_token`: see TieredReplay.
    """

    machine: Machine
    footprint: Footprint
    tiers: tuple[TierPlan, ...] = ()
    seconds_per_output_token: float | None = None

    def block_bytes(self, block_tokens: int) -> float:
        """Bytes of a block of the trace, on all devices together."""
        return self.footprint.cached_bytes(block_tokens)

    def replay(self, num_blocks: int, policy: str, block_tokens: int) -> TieredReplay:
        """A fresh replay of a device with so many blocks of the trace."""
        stored = self.block_bytes(block_tokens) / self.footprint.copies
        tiers = [
            SimulatedTier(
                tier.name,
                None if tier.capacity is None else int(tier.capacity // stored),
                stored / tier.bandwidth,
                tier.latency_s,
                write_through=tier.name != "dram",
            )
            for tier in self.tiers
        ]
        return TieredReplay(num_blocks, make_policy(policy), self.machine, tiers, self.seconds_per_output_token)


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds to first token."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Quantiles) -> Latency:
        """The figures of a distribution."""
        return cls(values.mean, values.at(0.5), values.at(0.95), values.at(0.99))


@dataclass(frozen=True, slots=True)
class Place:
    """What one tier, or the device, did. `waste` is the share of what it evicted that had served no hit."""

    name: str
    num_blocks: int | None
    hit_rate: float
    read_bytes: float
    written_bytes: float
    waste: float


@dataclass(frozen=True, slots=True)
class Point:
    """One policy at one device size. `places` has the device first; `hit_rate` is theirs together."""

    policy: str
    num_blocks: int
    hit_rate: float
    places: tuple[Place, ...]
    ttft: Latency
    cold_ttft: Latency


@dataclass(frozen=True, slots=True)
class Bound:
    """Belady's hit rate of a device of `num_blocks` alone, and of one as large as it and its tiers together."""

    num_blocks: int
    hit_rate: float
    hit_rate_with_tiers: float | None


def study(
    stream: Stream, setup: Setup, sizes: Sequence[int], policies: Sequence[str], block_tokens: int
) -> list[Point]:
    """Replay a trace once through a cache for each policy and device size, in blocks of the trace."""
    replays = {(policy, size): setup.replay(size, policy, block_tokens) for policy in policies for size in sizes}
    replay_all(stream(), list(replays.values()))
    return [point_of(policy, replay, setup.block_bytes(block_tokens)) for (policy, _), replay in replays.items()]


def point_of(policy: str, replay: TieredReplay, block_bytes: float) -> Point:
    """The figures of a replay that ended."""
    report, num_tokens = replay.report, max(1, replay.report.num_tokens)
    places = [Place("device", replay.num_blocks, report.token_hit_rate, 0.0, 0.0, report.waste)]
    for tier in replay.tiers.tiers:
        counts = tier.counts
        rate = counts.num_hit_tokens / num_tokens
        read, written = counts.num_read * block_bytes, counts.num_written * block_bytes
        places.append(
            Place(tier.name, tier.capacity, rate, read, written, counts.num_wasted / max(1, counts.num_evicted))
        )
    return Point(
        policy=policy,
        num_blocks=replay.num_blocks,
        hit_rate=replay.token_hit_rate,
        places=tuple(places),
        ttft=Latency.of(replay.ttft),
        cold_ttft=Latency.of(replay.cold_ttft),
    )


def bounds(summary: Summary, setup: Setup, sizes: Sequence[int]) -> list[Bound]:
    """Belady's bounds; none if the trace is too large to keep."""
    if summary.requests is None:
        return []
    below = sum(
        summary.num_different
        if tier.capacity is None
        else int(tier.capacity // setup.block_bytes(summary.block_tokens))
        for tier in setup.tiers
    )
    return [
        Bound(size, _bound(summary.requests, size), _bound(summary.requests, size + below) if below else None)
        for size in sizes
    ]


def _bound(requests: Sequence[TraceRequest], capacity: int) -> float:
    report = Report()
    for request, num_hits in zip(requests, belady_hits(requests, capacity), strict=True):
        report.count(request, num_hits)
    return report.token_hit_rate


@dataclass(frozen=True, slots=True)
class Answer:
    """The least capacity of a tier with which a hit rate is reached, to a fiftieth of it; None if none does."""

    tier: TierPlan
    num_blocks: int | None
    point: Point


def find_tier(
    stream: Stream, setup: Setup, size: int, policy: str, summary: Summary, tier: TierPlan, target: float
) -> Answer:
    """How much of `tier`, below a device of `size` blocks and with no other tier, it takes to hit `target`.

    Bisects, as a larger tier of least-recently-used records does not hit less; each try is a pass over the trace.
    """
    block_bytes = setup.block_bytes(summary.block_tokens)
    stored = block_bytes / setup.footprint.copies

    def attempt(count: int) -> Point:
        with_tier = replace(setup, tiers=(replace(tier, capacity=int(count * stored) + 1),))
        replay = with_tier.replay(size, policy, summary.block_tokens)
        replay_all(stream() if summary.requests is None else summary.requests, [replay])
        return point_of(policy, replay, block_bytes)

    low, high = 0, summary.num_different
    best = attempt(high)
    if best.hit_rate < target:
        return Answer(tier, None, best)
    while high - low > max(1, high // 50):
        middle = (low + high) // 2
        point = attempt(middle)
        if point.hit_rate >= target:
            high, best = middle, point
        else:
            low = middle
    return Answer(tier, high, best)


def _mix(blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Bits of a block that are as good as random, for sampling."""
    mixed: npt.NDArray[np.uint64] = (blocks.view(np.uint64) ^ (blocks.view(np.uint64) >> np.uint64(29))) * _MULTIPLIER
    return mixed >> np.uint64(20)
