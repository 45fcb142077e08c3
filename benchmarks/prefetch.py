"""Time to first token of requests that wait in the queue, with their blocks brought up meanwhile, and without.

One request runs; three prompts, all of whose blocks are in a tier, wait for its place and then for one another's.
Rounds with and without prefetching alternate. A point is one speed of the tier. Reported are the times to first token
of those that waited, and the time between the tokens of the one that ran, with over without.

    python -m benchmarks.prefetch [--rounds 8] [--prompt-tokens 900] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from dataclasses import dataclass, field

from rich.table import Table

from benchmarks import consoles
from benchmarks.never_slower import ratio_interval
from benchmarks.show import asks, greedy
from pagoda import Engine
from pagoda.engine.core import EngineCore
from pagoda.engine.outputs import RequestStats, StepStats
from pagoda.kv.hierarchy import Hierarchy, WritePolicy
from pagoda.kv.lease import TierUse
from pagoda.kv.tiered import TieredCache
from pagoda.kv.tiers.fake import Faults, FaultyTier, MemoryTier

POINTS = ((10e9, 0.1e-3), (1e9, 10e-3), (0.1e9, 10e-3), (0.1e9, 100e-3), (0.02e9, 100e-3))
"""Bytes per second, and seconds of delay, of a tier's calls."""

NUM_WAITING = 3
BUSY_TOKENS = 48
NO_TIER = TierUse(max_restored_tokens=0)


@dataclass
class Watch:
    """What an engine tells of its requests, by id."""

    finished: dict[str, RequestStats] = field(default_factory=dict)

    def on_step(self, stats: StepStats) -> None: ...

    def on_admitted(self, num_query_tokens: int, num_hit_tokens: int) -> None: ...

    def on_finished(self, stats: RequestStats) -> None:
        self.finished[stats.request_id] = stats


@dataclass
class Side:
    """The rounds with prefetching, or those without: TTFTs of a round's waiting requests, and ITLs of its busy one."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    num_hit_tokens: int = 0


def serve(core: EngineCore, watch: Watch, busy: list[int], waiting: list[list[int]], use: TierUse) -> None:
    """One request that runs, and others that come when it has begun to answer."""
    core.add("busy", busy, greedy(BUSY_TOKENS, ignore_eos=True, tier_use=NO_TIER))
    while not core._requests["busy"].token_times:
        core.step()
    for index, prompt in enumerate(waiting):
        core.add(f"waits-{index}", prompt, greedy(1, tier_use=use))
    while core.has_work:
        core.step()


def measure(
    core: EngineCore,
    cache: TieredCache,
    memory: MemoryTier,
    speed: tuple[float, float],
    prompts: list[list[int]],
    rounds: int,
) -> dict[str, float | list[float]]:
    """The figures of a tier of this speed that has all of the prompts but the first."""
    tier = FaultyTier(memory, Faults())
    cache.hierarchy = Hierarchy(
        [(tier, WritePolicy.BACK)], block_bytes=cache.layout.block_bytes, num_groups=len(cache.layout.groups)
    )
    busy, waiting = prompts[0], prompts[1:]
    cold, sides = Side(), {True: Side(), False: Side()}
    look_ahead = core._scheduler._look_ahead
    before = cache.stats.num_prefetched_tokens
    for number in range(rounds):
        kinds = [(cold, False, NO_TIER), (sides[True], True, TierUse()), (sides[False], False, TierUse())]
        for side, prefetches, use in kinds[number % 3 :] + kinds[: number % 3]:
            tier.faults.bytes_per_s, tier.faults.delay_s = math.inf, 0.0
            cache.clear()
            cache.hierarchy.flush(60)  # what was evicted is looked up and not written again
            tier.faults.bytes_per_s, tier.faults.delay_s = speed
            watch = Watch()
            core.observers[:] = [watch]
            core._scheduler._look_ahead = look_ahead if prefetches else lambda: None  # type: ignore[method-assign]
            serve(core, watch, busy, waiting, use)
            waited = [stats for name, stats in watch.finished.items() if name != "busy"]
            side.ttft_s += [stats.ttft_s for stats in waited if stats.ttft_s is not None]
            side.itl_s += watch.finished["busy"].itl_s
            side.num_hit_tokens += sum(stats.usage.num_hit_tokens for stats in waited)
    core._scheduler._look_ahead = look_ahead  # type: ignore[method-assign]
    with_, without = sides[True], sides[False]
    low, high = ratio_interval(with_.ttft_s, without.ttft_s)
    return {
        "TTFT cold, s": round(statistics.median(cold.ttft_s), 3),
        "without, s": round(statistics.median(without.ttft_s), 3),
        "with, s": round(statistics.median(with_.ttft_s), 3),
        "p95 with / without": [round(low, 2), round(high, 2)],
        "median with / without": round(statistics.median(with_.ttft_s) / statistics.median(without.ttft_s), 2),
        "ITL with / without": round(statistics.mean(with_.itl_s) / statistics.mean(without.itl_s), 3),
        "hit tokens without": without.num_hit_tokens,
        "with": with_.num_hit_tokens,
        "of those prefetched": cache.stats.num_prefetched_tokens - before,
        "blocks in vain": cache.hierarchy.reports()[0].num_unused,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=900)
    parser.add_argument("--kv-memory", default="512MiB")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    engine = Engine(args.model, kv_memory=args.kv_memory, max_num_seqs=1, tiers=["dram:16MiB"], progress=False)
    cache = engine.core.cache
    assert isinstance(cache, TieredCache)
    own = cache.hierarchy
    memory = MemoryTier(4 << 30)
    # They share no block: each is looked for by itself.
    prompts = [prompt[::-1] for prompt in asks(engine, NUM_WAITING + 1, num_tokens=args.prompt_tokens)]
    prompts[0] = prompts[0][:64]
    cache.hierarchy = Hierarchy(
        [(memory, WritePolicy.THROUGH)], block_bytes=cache.layout.block_bytes, num_groups=len(cache.layout.groups)
    )
    for prompt in prompts[1:]:
        engine.generate([prompt], greedy(1))
    if not cache.hierarchy.flush(60):
        raise RuntimeError("the tier was not filled")
    rows = {}
    for rate, delay in POINTS:
        name = f"{rate / 1e9:g} GB/s, {delay * 1e3:g} ms"
        rows[name] = measure(engine.core, cache, memory, (rate, delay), prompts, args.rounds)
        consoles.progress().print(f"{name}: {rows[name]}")
    cache.hierarchy = own
    engine.close()
    if args.json:
        json.dump(rows, sys.stdout, indent=2)
        return
    table = Table("tier", *next(iter(rows.values())))
    for name, row in rows.items():
        table.add_row(name, *map(str, row.values()))
    consoles.results().print(table)


if __name__ == "__main__":
    main()
