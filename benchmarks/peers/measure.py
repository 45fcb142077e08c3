"""Results -> figures: of one round, over rounds, and between engines."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.peers.messages import Result

HIGHER_IS_BETTER = frozenset({"stream_tok_s", "output_tok_s", "load_rps"})


@dataclass(frozen=True, slots=True)
class Figures:
    """One engine's figures of one round."""

    total_s: float
    output_tok_s: float
    stream_tok_s: float
    ttft_ms: float
    ttft_p99_ms: float
    itl_ms: float
    itl_p99_ms: float


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over rounds."""

    median: float
    low: float
    high: float
    rounds: int


def figures(results: Sequence[Result]) -> Figures:
    """`ttft_ms` and `itl_ms` are medians over requests and over gaps between tokens; no gap counts as 0 ms.

    `stream_tok_s` is the median request's speed after its first token.
    """
    ttfts = [1e3 * r.ttft for r in results]
    gaps = [1e3 * (b - a) for r in results for a, b in pairwise(r.times)] or [0.0]
    streams = [(len(r.times) - 1) / (r.end - r.times[0]) for r in results if r.end > r.times[0]] or [0.0]
    total_s = max(r.end for r in results)
    return Figures(
        total_s=total_s,
        output_tok_s=sum(len(r.tokens) for r in results) / total_s,
        stream_tok_s=statistics.median(streams),
        ttft_ms=statistics.median(ttfts),
        ttft_p99_ms=percentile(ttfts, 0.99),
        itl_ms=statistics.median(gaps),
        itl_p99_ms=percentile(gaps, 0.99),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def spread(values: Sequence[float]) -> Spread:
    """Median and range."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


def load_at(limit_ms: float, p99_by_rate: Mapping[float, float]) -> float | None:
    """The highest rate with a p99 TTFT of at most `limit_ms`, between measured rates by log-log interpolation.

    None if even the lowest rate exceeds it. If no rate does, the highest one measured: then the true load is higher.
    """
    points = sorted(p99_by_rate.items())
    if not points or points[0][1] > limit_ms:
        return None
    for (low, before), (high, after) in pairwise(points):
        if after > limit_ms:
            share = math.log(limit_ms / before) / math.log(after / before)
            return low * math.pow(high / low, share)
    return points[-1][0]


def ratio(figure: str, ours: float, theirs: float) -> float:
    """How many times better ours is."""
    return ours / theirs if figure in HIGHER_IS_BETTER else theirs / ours


def common_share(a: Sequence[Sequence[int]], b: Sequence[Sequence[int]]) -> float:
    """Which share of the output tokens of all requests comes before the first difference between two engines."""
    same = 0
    for left, right in zip(a, b, strict=True):
        differing = (i for i, (x, y) in enumerate(zip(left, right, strict=True)) if x != y)
        same += next(differing, len(left))
    return same / sum(len(left) for left in a)
