"""Serving while a tier goes bad in mid-run: `python -m benchmarks.faults`.

Some requests at a time ask prompts that need several times the pool, all of them in the tier; after a third of them a
fault strikes. The model is real, in float32, where greedy outputs do not depend on hits. Counted are outputs that
differ from those without a tier, requests that never ended, and how long they took beside those of a run without a
tier. Tiers are real; faults are injected before them, or done to their files. Exit status 1 if an output was wrong or a
request stuck.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.table import Table

from benchmarks import consoles
from benchmarks.texts import source_text
from pagoda import Engine, SamplingParams
from pagoda.engine.core import EngineCore
from pagoda.engine.params import TierUse
from pagoda.kv.hierarchy import Hierarchy, WritePolicy
from pagoda.kv.tiered import TieredCache
from pagoda.kv.tiers.base import Tier
from pagoda.kv.tiers.fake import Faults, FaultyTier
from pagoda.kv.tiers.spec import open_tier, parse_tier

PLACES = {
    "dram": "dram:{size}",
    "shared": "shm:{folder}/pool:{size}",
    "disk": "disk:{folder}/disk:{size}",
    "object": "file://{folder}/object",
}
"""The SPEC of each tier. What has no size cannot be full."""

_STUCK_S, _STUCK_TIMES = 30.0, 5.0  # what has not ended after that, and so many times a run without a tier, is stuck

Strike = Callable[[Faults, Path], None]


def _slow(faults: Faults, folder: Path) -> None:
    faults.delay_s, faults.bytes_per_s = 0.3, 20e6


def _failing(faults: Faults, folder: Path) -> None:
    faults.failing = 0.5


def _corrupt(faults: Faults, folder: Path) -> None:
    faults.corrupting = 0.5


def _hung(faults: Faults, folder: Path) -> None:
    faults.hang()


def _gone(faults: Faults, folder: Path) -> None:
    faults.unavailable = True


def _damaged(faults: Faults, folder: Path) -> None:
    """One byte of every 4 KiB of its files is another."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("r+b") as file:
                for offset in range(100, path.stat().st_size, 4096):
                    file.seek(offset)
                    byte = file.read(1)
                    file.seek(offset)
                    file.write(bytes([byte[0] ^ 0x55]))


def _removed(faults: Faults, folder: Path) -> None:
    """Its files are deleted under it; what is open or mapped stays readable."""
    shutil.rmtree(folder)


def _nothing(faults: Faults, folder: Path) -> None:
    pass


FAULTS: dict[str, Strike] = {
    "none": _nothing,
    "slow": _slow,
    "failing": _failing,
    "corrupt": _corrupt,
    "hung": _hung,
    "gone": _gone,
    "damaged": _damaged,
    "removed": _removed,
    "full": _nothing,
}


@dataclass
class Outcome:
    """What a run of requests came to. `latencies` are seconds from arrival to the end, of those that ended."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)
    num_stuck: int = 0
    num_restored_tokens: int = 0

    def row(self, right: Mapping[str, Sequence[int]], alone: Outcome) -> dict[str, float]:
        """Its figures, beside those of the run without a tier."""
        p50, p95 = np.quantile(self.latencies, [0.5, 0.95]) / np.quantile(alone.latencies, [0.5, 0.95])
        return {
            "wrong": sum(list(right[name]) != tokens for name, tokens in self.outputs.items()),
            "stuck": self.num_stuck,
            "restored tokens": self.num_restored_tokens,
            "p50 / no tier": round(float(p50), 2),
            "p95 / no tier": round(float(p95), 2),
            "longest / no tier": round(max(self.latencies) / max(alone.latencies), 2),
        }


@dataclass(frozen=True)
class Load:
    """Requests by name, some at a time."""

    requests: Mapping[str, Sequence[int]]
    params: SamplingParams
    at_once: int = 4
    deadline_s: float = 120.0

    @property
    def first_half(self) -> Load:
        """The first of the requests; the others ask the same prompts again."""
        return replace(self, requests=dict(itertools.islice(self.requests.items(), len(self.requests) // 2)))

    def serve(self, core: EngineCore, strike: Callable[[], None] = lambda: None) -> Outcome:
        """Run all of them; `strike` is called when a third has ended. What has not ended at the deadline is stuck."""
        outcome = Outcome()
        waiting = iter(self.requests.items())
        arrived: dict[str, float] = {}
        restored = core.cache.stats.num_restored_tokens
        end = time.perf_counter() + self.deadline_s
        has_struck = False
        while True:
            for name, tokens in itertools.islice(waiting, self.at_once - len(arrived)):
                arrived[name], outcome.outputs[name] = time.perf_counter(), []
                core.add(name, list(tokens), self.params)
            if not arrived or time.perf_counter() > end:
                break
            for output in core.step():
                outcome.outputs[output.request_id] += [token for d in output.deltas for token in d.token_ids]
                if output.finished:
                    outcome.latencies.append(time.perf_counter() - arrived.pop(output.request_id))
            if not has_struck and 3 * len(outcome.latencies) >= len(self.requests):
                has_struck = True
                strike()
        for name in arrived:
            core.abort(name)
            del outcome.outputs[name]
        outcome.num_stuck = len(self.requests) - len(outcome.outputs)
        outcome.num_restored_tokens = core.cache.stats.num_restored_tokens - restored
        return outcome


def cases(places: Mapping[str, str] = PLACES) -> Iterator[tuple[str, str]]:
    """Every tier with every fault that it can have."""
    for place, fault in itertools.product(places, FAULTS):
        has_files = "{folder}" in places[place]
        has_size = "{size}" in places[place]
        if (fault not in ("damaged", "removed") or has_files) and (fault != "full" or has_size):
            yield place, fault


def run(core: EngineCore, load: Load, place: str, fault: str, *, size: int, small: int) -> Outcome:
    """Fill a new tier of `size` bytes (`small` if it is to be full), then serve `load` with the fault.

    Args:
        place: its SPEC, as in PLACES.
    """
    cache = core.cache
    assert isinstance(cache, TieredCache)
    own = cache.hierarchy
    faults = Faults()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        spec = place.format(folder=name, size=f"{small if fault == 'full' else size}B")
        inner: Tier = open_tier(parse_tier(spec))
        cache.hierarchy = Hierarchy(
            [(FaultyTier(inner, faults), WritePolicy.THROUGH)],
            block_bytes=cache.layout.block_bytes,
            num_groups=len(cache.layout.groups),
        )
        cache.clear()
        load.first_half.serve(core)
        if not cache.hierarchy.flush(60):
            raise RuntimeError(f"the {place} tier was not filled")
        cache.clear()
        outcome = load.serve(core, lambda: FAULTS[fault](faults, Path(name)))
        faults.running.set()
        cache.hierarchy.close(flush_s=0.5)
        cache.hierarchy = own
    return outcome


def prompts(engine: Engine, count: int, num_tokens: int) -> dict[str, list[int]]:
    """Each twice, one round after the other, so that the first is evicted before it comes back."""
    text = engine.tokenizer.encode(source_text(count * num_tokens * 6), add_special_tokens=False)
    each = [text[i * num_tokens : (i + 1) * num_tokens] for i in range(count)]
    return {f"{turn}-{i}": tokens for turn in range(2) for i, tokens in enumerate(each)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=400)
    parser.add_argument("--tiers", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--redis", metavar="URL", help="a Redis server to test as a tier too; it gets records")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    # Half of the prompts and what they generate fit the pool. In float32, tokens are the same with and without hits.
    engine = Engine(args.model, dtype="float32", kv_memory="16MiB", tiers=["dram:16MiB"], progress=False)
    block_bytes = engine.core.cache.layout.pool_block_bytes
    blocks = args.prompts * (args.prompt_tokens // 16 + 2)
    engine.close()
    pool = f"{blocks // 2 * block_bytes}B"
    engine = Engine(args.model, dtype="float32", kv_memory=pool, tiers=["dram:16MiB"], progress=False)
    load = Load(prompts(engine, args.prompts, args.prompt_tokens), SamplingParams(max_tokens=8, temperature=0.0))
    no_tier = replace(load.params, tier_use=TierUse(max_restored_tokens=0))
    started = time.perf_counter()
    alone = replace(load, params=no_tier, deadline_s=math.inf).serve(engine.core)
    load = replace(load, deadline_s=_STUCK_S + _STUCK_TIMES * (time.perf_counter() - started))
    rows: dict[str, dict[str, float]] = {}
    places = {name: PLACES[name] for name in args.tiers} | ({"redis": args.redis} if args.redis else {})
    for place, fault in cases(places):
        if fault in args.faults:
            size = 2 * blocks * block_bytes + (64 << 20)
            outcome = run(
                engine.core, load, places[place], fault, size=size, small=blocks * block_bytes // 3 + (2 << 20)
            )
            rows[f"{place}, {fault}"] = outcome.row(alone.outputs, alone)
            consoles.progress().print(f"{place}, {fault}: {rows[f'{place}, {fault}']}")
    engine.close()
    if args.json:
        json.dump(rows, sys.stdout, indent=2)
    else:
        table = Table("tier, fault", *next(iter(rows.values())))
        for name, row in rows.items():
            table.add_row(name, *map(str, row.values()))
        consoles.results().print(table)
    sys.exit(any(row["wrong"] or row["stuck"] for row in rows.values()))


if __name__ == "__main__":
    main()
