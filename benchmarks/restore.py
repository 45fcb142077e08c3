"""Measure what tiers below the pool bring, and that they never cost: `python -m benchmarks.restore`.

restart       first request after a restart, from disk, against cold
never-slower  time to first token over tiers of many speeds, some changing in mid-run, against cold
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import consoles
from benchmarks.never_slower import never_slower
from benchmarks.show import asks, greedy, spread, timed
from pagoda import Engine

console = consoles.progress()


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


SECTIONS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "restart": restart,
    "never-slower": never_slower,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--prompt-tokens", type=int, default=900, help="prompts of `never-slower`")
    parser.add_argument("--points", type=int, help="`never-slower` with about so many of its speeds only")
    parser.add_argument("--out", type=Path, help="a folder for the JSON and PNG of `never-slower`")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=["restart", "never-slower"])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = {name: SECTIONS[name](args) for name in args.only}
    if args.json:
        json.dump(results, sys.stdout, indent=2)
        return
    for name, result in results.items():
        consoles.results().print(as_table(name, result))


def as_table(name: str, result: dict[str, Any]) -> Table:
    """A row for each figure; of figures that have the same parts, a column for each part."""
    rows = {key: value for key, value in result.items() if isinstance(value, dict)}
    columns = list(next(iter(rows.values()), {}))
    if len(rows) == len(result) and all(list(row) == columns for row in rows.values()):
        table = Table("", *(column.replace("_", " ") for column in columns), title=name, title_justify="left")
        for key, row in rows.items():
            table.add_row(key, *map(shown, row.values()))
        return table
    table = Table(title=name, title_justify="left", show_header=False)
    for key, value in result.items():
        table.add_row(key.replace("_", " "), shown(value))
    return table


def shown(value: Any) -> str:
    match value:
        case float():
            return f"{value:.3g}"
        case {"median": median, "min": low, "max": high}:
            return f"{shown(median)} ({shown(low)} to {shown(high)})"
        case [float(low), float(high)] | (float(low), float(high)):
            return f"{shown(low)} to {shown(high)}"
        case list() if len(set(value)) == 1:
            return f"{shown(value[0])} each time"
        case _:
            return str(value)


if __name__ == "__main__":
    main()
