"""Measure sparse KV policies: `python -m benchmarks.sparse`.

    python -m benchmarks.sparse --quick                      does it all work? Figures mean nothing
    python -m benchmarks.sparse --only quality --contexts 32 tighter intervals
    python -m benchmarks.sparse --kvpress                    beside kvpress, in an environment of its own

A kind of task counts only if full KV answers at least 70% of its questions.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import cpu_name
from benchmarks.quality.forced import Forced
from benchmarks.quality.variants import FULL, open_engine
from benchmarks.sparse import presses, streaming, throughput
from benchmarks.sparse.conversations import KINDS, conversations
from benchmarks.sparse.quality import Questions
from benchmarks.sparse.report import show, write

PARTS = ("quality", "streaming", "throughput")
console = Console(stderr=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as for Engine")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas: %(default)s")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of task: %(default)s")
    parser.add_argument("--lengths", default="1024", help="tokens of their contexts, separated by commas (%(default)s)")
    parser.add_argument(
        "--contexts", type=int, default=8, help="of each kind and length, with 4 questions (%(default)s)"
    )
    parser.add_argument("--fractions", default="1,0.5,0.2,0.1", help="of the prompt that stay (%(default)s)")
    parser.add_argument("--stream-tokens", type=int, default=100_000, help="length of the long text (%(default)s)")
    parser.add_argument("--window", type=int, default=2048, help="tokens kept along it (%(default)s)")
    parser.add_argument("--kvpress", action="store_true", help="ask the same through kvpress")
    parser.add_argument("--venvs", type=Path, default=Path.home() / ".cache" / "pagoda" / "peers")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--output", type=Path, default=Path("results/sparse"), help="folder (%(default)s)")
    args = parser.parse_args()
    if unknown := set(args.only.split(",")) - {*PARTS, ""}:
        parser.error(f"--only knows {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    if unknown := set(args.kinds.split(",")) - set(KINDS):
        parser.error(f"--kinds knows {', '.join(KINDS)}, not {', '.join(sorted(unknown))}")
    if args.quick:
        args.kinds, args.contexts, args.fractions, args.lengths = "needle", 1, "0.5", "512"
        args.stream_tokens, args.window = 3000, 512
    return args


def main() -> None:
    args = arguments()
    started = time.perf_counter()
    forced = Forced(open_engine(args.model, FULL, token_budget=256, max_model_len=None))
    only, fractions = args.only.split(","), [float(each) for each in args.fractions.split(",")]
    report: dict[str, Any] = {"model": args.model, "cpu": cpu_name(), "load_before": os.getloadavg()[0]}
    if "quality" in only:
        questions = Questions(forced, console.log)
        cells = [(kind, int(length)) for length in args.lengths.split(",") for kind in args.kinds.split(",")]
        report["quality"] = [questions.measure(*cell, args.contexts, fractions) for cell in cells]
        if args.kvpress:
            report["kvpress"] = []
            for task in report["quality"]:
                if task["counts"]:
                    kind, length = task["kind"], task["length"]
                    told = list(conversations(forced.engine.tokenizer, kind, length, args.contexts))
                    pressed = presses.measure(args.model, told, fractions, args.venvs, console.log)
                    report["kvpress"].append({"kind": kind, "length": length, **pressed})
    if "streaming" in only:
        report["streaming"] = streaming.measure(forced, args.stream_tokens, args.window, 10, console.log)
    if "throughput" in only:
        length, batch, steps, rounds = (512, 1, 8, 1) if args.quick else (7936, 1, 64, 2)
        with forced.free() as engine:
            report["throughput"] = throughput.measure(engine, length, batch, steps, rounds, 0.2, console.log)
    report["load_after"], report["seconds"] = os.getloadavg()[0], round(time.perf_counter() - started, 1)
    show(report, Console())
    for path in write(report, args.output):
        console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
