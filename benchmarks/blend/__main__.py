"""See the package. A run over quality goes on from the records that an earlier one left in its folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import benchmarks.blend
from benchmarks import consoles
from benchmarks.blend import quality, speed
from benchmarks.blend.report import draw, show
from benchmarks.blend.tasks import KINDS, MOST_PASSAGES
from benchmarks.machine import cpu_name
from pagoda import Engine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=benchmarks.blend.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tasks", nargs="+", choices=KINDS, default=KINDS, help="for quality (%(default)s)")
    parser.add_argument("--contexts", type=int, default=8, help="of each task (%(default)s)")
    parser.add_argument("--passages", type=int, default=6, help="in each context (%(default)s)")
    parser.add_argument("--size", type=int, default=200, help="tokens of a passage, for quality (%(default)s)")
    parser.add_argument("--speed-size", type=int, default=600, help="tokens of a passage, for speed (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of speed, after one to warm up (%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="requests at once, for throughput (%(default)s)")
    parser.add_argument("--token-budget", type=int, default=512, help="rows of a step (%(default)s)")
    parser.add_argument("--kv-memory", default="1GiB")
    parser.add_argument("--only", choices=("speed", "quality"), help="leave the other out")
    parser.add_argument("--output", type=Path, default=Path("results/blend"), help="folder (%(default)s)")
    args = parser.parse_args()
    if not 2 <= args.passages <= MOST_PASSAGES:
        parser.error(f"--passages must be between 2 and {MOST_PASSAGES}")
    args.output.mkdir(parents=True, exist_ok=True)
    engine = Engine(args.model, kv_memory=args.kv_memory, token_budget=args.token_budget, progress=False)
    log = consoles.progress().log
    report: dict[str, Any] = {
        "model": args.model,
        "cpu": cpu_name(),
        "tokens": args.passages * args.speed_size,
        "settings": {key: str(value) for key, value in vars(args).items()},
        "speed": [],
        "quality": [],
    }
    if args.only != "quality":
        report["speed"] = speed.measure(engine, args.rounds, args.passages, args.speed_size, args.batch, log)
    if args.only != "speed":
        path = args.output / "quality.jsonl"
        sizes = args.contexts, args.passages, args.size
        report["quality"] = quality.figures(quality.measure(engine, path, args.tasks, *sizes, log))
    (args.output / "blend.json").write_text(json.dumps(report, indent=2))
    show(report)
    draw(report, args.output / "blend.png")


if __name__ == "__main__":
    main()
