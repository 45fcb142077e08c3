"""Measure what variants of the engine cost in quality: `python -m benchmarks.quality`.

    python -m benchmarks.quality --quick                                        the suite itself: BF16 again is 0
    python -m benchmarks.quality --variant 'int8={"kv_format": "int8"}'         a variant is a name and Engine keywords
    python -m benchmarks.quality --model gemma3-270m --only text,tasks --gsm8k PATH

The full run is BF16. "bf16 again" must measure exactly zero, and "fp32" shows what rounding to BF16 costs by itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import cpu_name
from benchmarks.quality import gsm8k
from benchmarks.quality.cases import FULL as FULL_SIZE
from benchmarks.quality.cases import QUICK, Size, corpora
from benchmarks.quality.forced import Forced
from benchmarks.quality.report import show, write
from benchmarks.quality.suite import Suite
from benchmarks.quality.variants import ALWAYS, FULL, Variant, open_engine

PARTS = ("text", "tasks", "divergence", "accumulation")
console = Console(stderr=True)


def measure(args: argparse.Namespace, size: Size, variants: list[Variant]) -> dict[str, Any]:
    """Open all engines, run the parts that were asked for."""

    def opened(variant: Variant) -> Forced:
        console.log(f"opening {variant.name}")
        return Forced(open_engine(args.model, variant, token_budget=args.chunk, max_model_len=args.max_model_len))

    full = opened(FULL)
    suite = Suite(full, {each.name: opened(each) for each in variants}, size, tell=console.log, share=not args.cold)
    report: dict[str, Any] = {
        "model": args.model,
        "mode": "quick" if args.quick else "full",
        "size": dataclasses.asdict(size),
        "chunk": args.chunk,
        "cpu": cpu_name(),
        "full": dict(FULL.engine_kwargs),
        "variants": {each.name: dict(each.engine_kwargs) for each in variants},
    }
    only = args.only.split(",")
    if "text" in only:
        report["text"] = suite.text(corpora(args.text))
    if "tasks" in only:
        report["tasks"] = suite.recall()
    if "divergence" in only:
        report["divergence"] = suite.divergence()
    if "accumulation" in only:
        report["accumulation"] = suite.accumulation()
    if args.gsm8k is not None:
        console.log(f"GSM8K: {size.gsm8k} questions")
        report["gsm8k"] = gsm8k.agreement(full, suite.variants, gsm8k.questions(args.gsm8k, size.gsm8k))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as for Engine; gemma3-270m if its packages are installed")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="NAME=JSON", help="Engine keywords; repeatable"
    )
    parser.add_argument("--quick", action="store_true", help="minutes, with wide intervals")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas: %(default)s")
    parser.add_argument("--gsm8k", type=Path, metavar="PATH", help="GSM8K's test.jsonl: also compare free answers")
    parser.add_argument("--text", type=Path, metavar="PATH", help="one more text file to read")
    parser.add_argument("--cold", action="store_true", help="no prefix hits: every question computes its context anew")
    parser.add_argument("--chunk", type=int, default=256, help="tokens computed in one step (%(default)s)")
    parser.add_argument("--max-model-len", type=int, default=8192, help="longest context (%(default)s)")
    parser.add_argument("--without-references", action="store_true", help="leave out 'bf16 again' and 'fp32'")
    parser.add_argument(
        "--output", type=Path, default=Path("results/quality"), help="folder of the reports (%(default)s)"
    )
    args = parser.parse_args()
    if unknown := set(args.only.split(",")) - {*PARTS, ""}:
        parser.error(f"--only knows {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    try:
        variants = [*([] if args.without_references else ALWAYS), *map(Variant.parse, args.variant)]
    except ValueError as error:
        parser.error(str(error))
    if not variants:
        parser.error("nothing to measure: --without-references needs a --variant")
    started = time.perf_counter()
    report = measure(args, QUICK if args.quick else FULL_SIZE, variants)
    report["seconds"] = round(time.perf_counter() - started, 1)
    show(report, Console())
    for path in write(report, args.output):
        console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
