"""Measure sparse KV policies: `python -m benchmarks.sparse`.

    python -m benchmarks.sparse --quick                             does it all work? Figures mean nothing
    python -m benchmarks.sparse --only quality --contexts 125       500 questions of each kind
    python -m benchmarks.sparse --only quality --policies infinigen:alpha=5 --fractions 0.1
    python -m benchmarks.sparse --only kvpress                      kvpress, in an environment of its own
    python -m benchmarks.sparse --only ''                           the report of what is in the folder

Everything is kept in the output folder as it is measured: a run goes on where the last one ended, and reports all that
is there. A kind of task counts only if full KV answers at least 70% of its questions.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from benchmarks import consoles
from benchmarks.machine import cpu_name
from benchmarks.quality.forced import Forced
from benchmarks.quality.variants import Variant, open_engine
from benchmarks.sparse import presses, quality, streaming, throughput
from benchmarks.sparse.conversations import KINDS
from benchmarks.sparse.quality import POLICIES
from benchmarks.sparse.records import Records
from benchmarks.sparse.report import show, write
from benchmarks.sparse.summary import summary
from pagoda import Engine

PARTS = ("quality", "kvpress", "streaming", "throughput")
console = consoles.progress()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as for Engine")
    parser.add_argument("--only", default="quality,streaming,throughput", help=f"of {','.join(PARTS)} (%(default)s)")
    parser.add_argument("--policies", nargs="+", default=POLICIES, help="as lines of text without a budget")
    parser.add_argument("--kinds", default="needle,multi_key", help=f"of {','.join(KINDS)} (%(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of their contexts (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first context (%(default)s)")
    parser.add_argument("--contexts", type=int, default=8, help="of each kind, with 4 questions (%(default)s)")
    parser.add_argument("--fractions", default="0.5,0.2,0.1", help="of the prompt that stay (%(default)s)")
    parser.add_argument("--stream-tokens", type=int, default=100_000, help="length of the long text (%(default)s)")
    parser.add_argument("--window", type=int, default=2048, help="tokens kept along it (%(default)s)")
    parser.add_argument("--sinks", default="4,0", help="first tokens kept along it, a run for each (%(default)s)")
    parser.add_argument("--venvs", type=Path, default=Path.home() / ".cache" / "pagoda" / "peers")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--output", type=Path, default=Path("results/sparse"), help="folder (%(default)s)")
    args = parser.parse_args()
    if unknown := set(args.only.split(",")) - {*PARTS, ""}:
        parser.error(f"--only knows {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    if unknown := set(args.kinds.split(",")) - set(KINDS):
        parser.error(f"--kinds knows {', '.join(KINDS)}, not {', '.join(sorted(unknown))}")
    if args.quick:
        args.kinds, args.contexts, args.fractions, args.length = "needle", 1, "0.5", 512
        args.stream_tokens, args.window = 3000, 512
    return args


def run(args: argparse.Namespace, engine: Engine, records: Records) -> None:
    """Measure the parts that were asked for into the output folder."""
    only, fractions = args.only.split(","), [float(each) for each in args.fractions.split(",")]
    indices = range(args.first, args.first + args.contexts)
    for kind in args.kinds.split(","):
        if "quality" in only:
            quality.measure(engine, kind, args.length, indices, args.policies, fractions, records, console.log)
        if "kvpress" in only:
            presses.measure(
                args.model, engine.tokenizer, kind, args.length, indices, fractions, args.venvs, records, console.log
            )
    if "throughput" in only:
        length, steps, rounds = (512, 8, 1) if args.quick else (7936, 48, 2)
        shares = (0.5,) if args.quick else (0.2, 0.1)
        decoded = throughput.measure(engine, args.policies, length, 1, steps, rounds, shares, console.log)
        (args.output / "throughput.json").write_text(json.dumps(decoded))
    if "streaming" in only:
        forced = Forced(engine)
        for sinks in map(int, args.sinks.split(",")):
            measured = streaming.measure(forced, args.stream_tokens, args.window, 10, sinks, console.log)
            (args.output / f"streaming-{sinks}.json").write_text(json.dumps(measured))


def collected(args: argparse.Namespace, records: Records) -> dict[str, Any]:
    """The report of all that is in the output folder."""
    speed = args.output / "throughput.json"
    return {
        "model": args.model,
        "cpu": cpu_name(),
        "load": os.getloadavg()[0],
        "quality": summary(records),
        "streaming": [json.loads(path.read_text()) for path in sorted(args.output.glob("streaming-*.json"))],
        "throughput": json.loads(speed.read_text()) if speed.exists() else None,
    }


def main() -> None:
    args = arguments()
    records = Records(args.output)
    if args.only:
        wide = Variant("full", {"max_num_seqs": quality.MOST_AT_ONCE})
        run(args, open_engine(args.model, wide, token_budget=256, max_model_len=None), records)
    report = collected(args, records)
    show(report, consoles.results())
    for path in write(report, args.output):
        console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
