"""Measure what tiers below the pool bring, and that they never cost: `python -m benchmarks.restore`.

restart       first request after a restart, from disk, against cold
working-set   agent sessions that need several times the pool, with and without tiers (--traces)
never-slower  time to first token over tiers of many speeds, some changing in mid-run, against cold
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.show import asks, greedy, spread, timed
from pagoda import Engine
from pagoda.kv.hierarchy import Hierarchy, WritePolicy
from pagoda.kv.tiered import TieredCache
from pagoda.kv.tiers.fake import Faults, FaultyTier, MemoryTier

console = Console(stderr=True)


def tiered(engine: Engine) -> TieredCache:
    cache = engine.core.cache
    if not isinstance(cache, TieredCache):
        raise TypeError("this engine has no tiers")
    return cache


def ttft(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    seconds, [out] = timed(lambda: engine.generate([prompt], greedy(1)))
    return seconds, out.usage.num_hit_tokens


def restart(args: argparse.Namespace) -> dict[str, Any]:
    cold: list[float] = []
    warm: list[float] = []
    hits: list[int] = []
    for number in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for times in (cold, warm):
                engine = Engine(args.model, kv_memory=args.kv_memory, tiers=[f"disk:{folder}:2GiB"], progress=False)
                prompts = asks(engine, number + 2)
                engine.generate(["warm up the threads, not the cache"], greedy(1))
                seconds, hit = ttft(engine, prompts[number])
                times.append(seconds)
                hits.append(hit)
                engine.close()
    return {
        "cold_s": spread(cold),
        "restarted_s": spread(warm),
        "ratio": statistics.median(c / w for c, w in zip(cold, warm, strict=True)),
        "num_hit_tokens": hits[1::2],
    }


def sessions(engine: Engine, traces: Path, limit: int) -> list[list[int]]:
    """Prompts of agent sessions in order of time, as many as asked for, without those longer than the context."""
    rows = [json.loads(line) for path in sorted(traces.glob("*.jsonl")) for line in path.open(encoding="utf-8")]
    prompts: list[list[int]] = []
    for row in sorted(rows, key=lambda row: row["timestamp"]):
        tokens = engine.tokenizer.encode(row["input"], add_special_tokens=False)
        if len(tokens) < engine.max_model_len:
            prompts.append(tokens)
        if len(prompts) == limit:
            break
    return prompts


def working_set(args: argparse.Namespace) -> dict[str, Any]:
    if args.traces is None:
        raise SystemExit("working-set needs --traces")
    results: dict[str, Any] = {}
    for name, tiers in {"none": [], "dram": ["dram:2GiB"], "disk": ["disk:{folder}:4GiB"]}.items():
        with tempfile.TemporaryDirectory() as folder:
            specs = [tier.format(folder=folder) for tier in tiers]
            engine = Engine(args.model, kv_memory="400MiB", tiers=specs, progress=False)
            prompts = sessions(engine, args.traces, args.requests)
            started, times, hits = time.perf_counter(), [], 0
            for prompt in prompts:
                seconds, hit = ttft(engine, prompt)
                times.append(seconds)
                hits += hit
            results[name] = {
                "seconds": time.perf_counter() - started,
                "ttft_s": spread(times),
                "hit_share": hits / sum(map(len, prompts)),
            }
            engine.close()
    return results


def never_slower(args: argparse.Namespace) -> dict[str, Any]:
    """Cold and tiered in turn on one engine; the same prompts, device cache cleared before each."""
    engine = Engine(args.model, kv_memory=args.kv_memory, tiers=["dram:1GiB"], progress=False)
    cache = tiered(engine)
    prompts = asks(engine, args.rounds, num_tokens=700)
    with_tiers, layout = cache.hierarchy, cache.layout
    memory = MemoryTier(4 << 30)
    filling = Hierarchy([(memory, WritePolicy.THROUGH)], block_bytes=layout.block_bytes, num_groups=len(layout.groups))
    cache.hierarchy = filling
    for prompt in prompts:
        engine.generate([prompt], greedy(1))
    filling.flush(60)
    results: dict[str, Any] = {}
    for label, faults, change in _points():
        faulty = FaultyTier(memory, faults)
        tiers = Hierarchy([(faulty, WritePolicy.BACK)], block_bytes=layout.block_bytes, num_groups=len(layout.groups))
        cache.hierarchy = tiers
        times: dict[bool, list[float]] = {True: [], False: []}
        hits = []
        for number, prompt in enumerate(prompts):
            change(faults, number / len(prompts))
            for is_cold in (True, False) if number % 2 else (False, True):
                engine.core.cache.clear()
                tiers.flush(30)  # what was evicted is written on the side: not in the time of either
                lanes = tiers.lanes
                tiers.lanes = [] if is_cold else lanes  # nothing to ask: cold, and otherwise the same
                seconds, hit = ttft(engine, prompt)
                tiers.lanes = lanes
                if is_cold and hit:
                    raise RuntimeError(f"a cold request had {hit} hits")
                times[is_cold].append(seconds)
                if not is_cold:
                    hits.append(hit)
        cold, warm = times[True], times[False]
        p95 = statistics.quantiles(warm, n=20)[-1] / statistics.quantiles(cold, n=20)[-1]
        results[label] = {
            "median_ratio": statistics.median(w / c for w, c in zip(warm, cold, strict=True)),
            "p95_ratio": p95,
            "hit_tokens": statistics.median(hits),
        }
        console.print(f"{label}: {results[label]}")
    cache.hierarchy = with_tiers
    engine.close()
    return results


def _points() -> Iterator[tuple[str, Faults, Callable[[Faults, float], None]]]:
    def steady(faults: Faults, share: float) -> None:
        pass

    for rate in (0.1e9, 1e9, 10e9):
        for delay in (0.1e-3, 10e-3, 100e-3):
            yield f"{rate / 1e9:g} GB/s, {delay * 1e3:g} ms", Faults(delay_s=delay, bytes_per_s=rate), steady

    def slows(faults: Faults, share: float) -> None:
        faults.bytes_per_s = 10e9 if share < 0.5 else 0.02e9

    yield "10 GB/s, then 0.02", Faults(delay_s=1e-3), slows


SECTIONS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "restart": restart,
    "working-set": working_set,
    "never-slower": never_slower,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=60, help="requests of `working-set`")
    parser.add_argument("--traces", type=Path, help="a folder of agent sessions, one JSONL file each")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=["restart", "never-slower"])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = {name: SECTIONS[name](args) for name in args.only}
    if args.json:
        json.dump(results, sys.stdout, indent=2)
        return
    for name, result in results.items():
        table = Table(title=name, title_justify="left", show_header=False)
        for key, value in result.items():
            table.add_row(key, json.dumps(value))
        Console().print(table)


if __name__ == "__main__":
    main()
