"""Time to first token over tiers of many speeds against computing everything: `benchmarks.restore --only never-slower`.

Each round asks the same prompt twice with an empty device cache: once asking no tier (cold), once with the tier; who
goes first alternates. All records are in the tier. A point is one speed, or speeds that change from round to round, or
within a request. Reported is the 95th percentile of tiered over that of cold, with a bootstrap interval over rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import consoles
from benchmarks.show import asks, greedy, timed
from pagoda import Engine
from pagoda.kv.hierarchy import Hierarchy, WritePolicy
from pagoda.kv.lease import TierUse
from pagoda.kv.tiered import TieredCache
from pagoda.kv.tiers.fake import Faults, FaultyTier, MemoryTier

console = consoles.progress()

RATES = (0.1e9, 1e9, 10e9)
DELAYS = (0.1e-3, 1e-3, 10e-3, 100e-3)
COLD = TierUse(max_restored_tokens=0)
Change = Callable[[Faults, float], None]


@dataclass(frozen=True)
class Point:
    """A tier: `change` is called before each round with the share of rounds done."""

    label: str
    change: Change
    rate: float | None = None
    delay: float | None = None


def points() -> Iterator[Point]:
    for rate in RATES:
        for delay in DELAYS:
            yield Point(f"{rate / 1e9:g} GB/s, {delay * 1e3:g} ms", _steady(rate, delay), rate, delay)
    yield Point("10 GB/s, 0.1 ms, then 0.02 GB/s, 100 ms", _falls)
    yield Point("another speed each round", _wanders)
    yield Point("falls within the request", _falls_within)


def _steady(rate: float, delay: float) -> Change:
    def change(faults: Faults, share: float) -> None:
        faults.bytes_per_s, faults.delay_s = rate, delay

    return change


def _falls(faults: Faults, share: float) -> None:
    faults.bytes_per_s, faults.delay_s = (10e9, 0.1e-3) if share < 0.5 else (0.02e9, 100e-3)


def _wanders(faults: Faults, share: float) -> None:
    faults.bytes_per_s, faults.delay_s = random.choice(RATES), random.choice(DELAYS)


def _falls_within(faults: Faults, share: float) -> None:
    """Fast when the request starts; a moment later, which differs from round to round, slow for half a second."""
    faults.bytes_per_s, faults.delay_s = 1e9, 0.1e-3
    threading.Timer(random.uniform(0.0, 0.05), _steady(0.02e9, 100e-3), (faults, share)).start()


def p95(values: np.ndarray) -> float:
    return float(np.quantile(values, 0.95, axis=-1))


def ratio_interval(warm: list[float], cold: list[float], draws: int = 2000) -> tuple[float, float]:
    """The 95% bootstrap interval of p95(warm) / p95(cold); rounds are drawn, so that pairs stay together."""
    rows = np.random.default_rng(1).integers(0, len(warm), (draws, len(warm)))
    tiered, alone = np.quantile(np.array([warm, cold])[:, rows], 0.95, axis=-1)
    low, high = np.quantile(tiered / alone, [0.025, 0.975])
    return float(low), float(high)


def never_slower(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of every point; writes JSON and a plot into `args.out` if given."""
    engine = Engine(args.model, kv_memory=args.kv_memory, tiers=["dram:16MiB"], progress=False)
    cache = engine.core.cache
    assert isinstance(cache, TieredCache)
    layout, own = cache.layout, cache.hierarchy
    memory = MemoryTier(4 << 30)

    def use(tier: FaultyTier | MemoryTier, policy: WritePolicy) -> Hierarchy:
        cache.hierarchy = Hierarchy([(tier, policy)], block_bytes=layout.block_bytes, num_groups=len(layout.groups))
        return cache.hierarchy

    prompts = asks(engine, 8, num_tokens=args.prompt_tokens)
    filling = use(memory, WritePolicy.THROUGH)
    for prompt in prompts:
        engine.generate([prompt], greedy(1))
    if not filling.flush(60):
        raise RuntimeError("the tier was not filled")
    results: dict[str, Any] = {}
    chosen = list(points())
    for point in chosen[:: max(1, len(chosen) // args.points)] if args.points else chosen:
        results[point.label] = _measure(engine, cache, use, FaultyTier(memory, Faults()), point, prompts, args.rounds)
        console.print(f"{point.label}: {results[point.label]}")
    cache.hierarchy = own
    engine.close()
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "never_slower.json").write_text(json.dumps(results, indent=2))
        draw(results, args.out / "never_slower.png")
    return results


def _measure(
    engine: Engine,
    cache: TieredCache,
    use: Callable[[FaultyTier, WritePolicy], Hierarchy],
    tier: FaultyTier,
    point: Point,
    prompts: list[list[int]],
    rounds: int,
) -> dict[str, Any]:
    tiers = use(tier, WritePolicy.BACK)  # nothing is known of the tier's speed
    times: dict[bool, list[float]] = {True: [], False: []}
    hits = []
    for number in range(rounds):
        prompt = prompts[number % len(prompts)]
        for is_cold in (True, False) if number % 2 else (False, True):
            tier.faults.bytes_per_s, tier.faults.delay_s = float("inf"), 0.0
            cache.clear()
            tiers.flush(30)  # what was evicted is looked up and not written again: not in the time of either
            point.change(tier.faults, number / rounds)
            seconds, [out] = timed(
                lambda prompt=prompt, is_cold=is_cold: engine.generate(
                    [prompt], greedy(1, tier_use=COLD if is_cold else TierUse())
                )
            )
            if is_cold and out.usage.num_hit_tokens:
                raise RuntimeError(f"a cold request had {out.usage.num_hit_tokens} hits")
            times[is_cold].append(seconds)
            if not is_cold:
                hits.append(out.usage.num_hit_tokens)
    cold, warm = times[True], times[False]
    return {
        "p95_ratio": p95(np.array(warm)) / p95(np.array(cold)),
        "p95_ratio_interval": ratio_interval(warm, cold),
        "median_ratio": statistics.median(w / c for w, c in zip(warm, cold, strict=True)),
        "cold_median_s": statistics.median(cold),
        "tiered_median_s": statistics.median(warm),
        "hit_tokens": statistics.median(hits),
        "prompt_tokens": len(prompts[0]),
        "rounds": rounds,
    }


def draw(results: dict[str, Any], path: Path) -> None:
    """One row a point: the interval of the p95 ratio, and the median."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.4 * len(results) + 1.5), layout="constrained")
    axes = figure.subplots()
    places = range(len(results))
    rows = list(results.values())
    low, high = np.array([row["p95_ratio_interval"] for row in rows]).T
    axes.hlines(places, low, high, color="tab:blue", linewidth=2)
    axes.plot([row["p95_ratio"] for row in rows], places, "o", color="tab:blue", label="95th percentile, interval")
    axes.plot([row["median_ratio"] for row in rows], places, "|", color="tab:orange", markersize=12, label="median")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.axvline(1.05, color="tab:red", linewidth=0.8, linestyle="--")
    axes.set_yticks(places, list(results))
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("time to first token, tiered / cold")
    figure.legend(loc="outside upper center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=150)
