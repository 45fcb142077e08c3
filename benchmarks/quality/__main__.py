"""Measure what variants of the engine cost in quality: `python -m benchmarks.quality`.

    python -m benchmarks.quality --quick                                        the suite itself: BF16 again is 0
    python -m benchmarks.quality --variant 'int8={"kv_format": "int8"}'         a variant is a name and Engine keywords
    python -m benchmarks.quality --model gemma3-270m --only text,tasks --gsm8k PATH

The full run is BF16. "again" must measure exactly zero, and "fp32" shows what rounding to BF16 costs by itself. That
is more than INT8 costs: with --dtype float32 all is computed without it, and what is left is the format's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import consoles
from benchmarks.machine import cpu_name
from benchmarks.quality import gsm8k, quantized_cache
from benchmarks.quality.cases import FULL as FULL_SIZE
from benchmarks.quality.cases import QUICK, Size, corpora
from benchmarks.quality.forced import Forced
from benchmarks.quality.report import draw, save, show
from benchmarks.quality.speed import decode_rate
from benchmarks.quality.suite import Suite
from benchmarks.quality.variants import Variant, open_engine, references

PARTS = ("text", "tasks", "divergence", "accumulation")
console = consoles.progress()


def measure(
    args: argparse.Namespace, size: Size, full: Variant, variants: Sequence[Variant]
) -> Iterator[dict[str, Any]]:
    """Open all engines, run the parts that were asked for; yield the same report after each piece of them."""
    started = time.perf_counter()

    def opened(variant: Variant) -> Forced:
        console.log(f"opening {variant.name}")
        return Forced(open_engine(args.model, variant, token_budget=args.chunk, max_model_len=args.max_model_len))

    suite = Suite(
        opened(full),
        {each.name: opened(each) for each in variants},
        size,
        tell=console.log,
        share=not args.cold,
        decode=args.decode,
    )
    report: dict[str, Any] = {
        "model": args.model,
        "size": dataclasses.asdict(size),
        "chunk": args.chunk,
        "cpu": cpu_name(),
        "full": dict(full.engine_kwargs),
        "variants": {each.name: dict(each.engine_kwargs) for each in variants},
        "bytes_per_token": {
            name: each.engine.cache_info().bytes_per_token
            for name, each in {full.name: suite.full, **suite.variants}.items()
        },
    }

    def so_far() -> dict[str, Any]:
        report["seconds"] = round(time.perf_counter() - started, 1)
        return report

    only = args.only.split(",")
    if "text" in only:
        report["text"] = {}
        for corpus, text in corpora(args.text).items():
            for figures in suite.text(corpus, text):
                report["text"][corpus] = figures
                yield so_far()
    if "tasks" in only:
        done: list[dict[str, Any]] = []
        for kind in size.kinds:
            for figures in suite.recall(kind):
                report["tasks"] = done + figures
                yield so_far()
            done = report["tasks"]
    if "divergence" in only:
        report["divergence"] = suite.divergence()
        yield so_far()
    if "accumulation" in only:
        report["accumulation"] = suite.accumulation()
        yield so_far()
    if args.gsm8k is not None:
        console.log(f"GSM8K: {size.gsm8k} questions")
        report["gsm8k"] = gsm8k.agreement(suite.full, suite.variants, gsm8k.questions(args.gsm8k, size.gsm8k))
        yield so_far()
    if args.quantized_cache:
        texts = {corpus: suite.passages(text) for corpus, text in corpora(args.text).items()}
        asked = [each for kind in size.kinds for each in suite.tasks(kind)] if "tasks" in only else []
        context = texts["prose"][0].tokens[: suite.max_len - size.followed - 1]
        report["decoding"] = {
            "num_context_tokens": len(context),
            "tokens_per_s": {
                name: decode_rate(each, context, size.followed)
                for name, each in {"full": suite.full, **suite.variants}.items()
            },
        }
        yield so_far()
        work = quantized_cache.Work(args.model, args.dtype, texts if "text" in only else {}, asked, context, size)
        report["quantized_cache"] = quantized_cache.measure(work, args.venvs, console.log)
        yield so_far()


def resized(size: Size, changes: str) -> Size:
    """A size with other values for some of its fields, from JSON.

    Raises:
        ValueError: it is not an object of fields of Size.
    """
    found = json.loads(changes)
    known = [each.name for each in dataclasses.fields(Size)]
    if not isinstance(found, dict) or not found.keys() <= set(known):
        raise ValueError(f"--size is an object with some of {', '.join(known)}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    return dataclasses.replace(size, **values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="as for Engine; gemma3-270m if its packages are installed")
    parser.add_argument(
        "--variant", action="append", default=[], metavar="NAME=JSON", help="Engine keywords; repeatable"
    )
    parser.add_argument("--quick", action="store_true", help="minutes, with wide intervals")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas: %(default)s")
    parser.add_argument("--gsm8k", type=Path, metavar="PATH", help="GSM8K's test.jsonl: also compare free answers")
    parser.add_argument("--quantized-cache", action="store_true", help="the same through Transformers' QuantizedCache")
    parser.add_argument("--venvs", type=Path, default=Path.home() / ".cache" / "pagoda" / "peers")
    parser.add_argument("--text", type=Path, metavar="PATH", help="one more text file to read")
    parser.add_argument("--size", default="{}", metavar="JSON", help="other values for fields of Size (cases.py)")
    parser.add_argument("--dtype", default="bfloat16", help="what all engines compute in (%(default)s)")
    parser.add_argument("--cold", action="store_true", help="no prefix hits: every question computes its context anew")
    parser.add_argument("--decode", action="store_true", help="read answers and outputs token by token (slower)")
    parser.add_argument("--chunk", type=int, default=256, help="tokens computed in one step (%(default)s)")
    parser.add_argument("--at-once", type=int, default=4, help="outputs generated together (%(default)s)")
    parser.add_argument("--max-model-len", type=int, default=8192, help="longest context (%(default)s)")
    parser.add_argument("--without-references", action="store_true", help="leave out 'again' and 'fp32'")
    parser.add_argument(
        "--output", type=Path, default=Path("results/quality"), help="folder of the reports (%(default)s)"
    )
    args = parser.parse_args()
    if unknown := set(args.only.split(",")) - {*PARTS, ""}:
        parser.error(f"--only knows {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    try:
        size = resized(QUICK if args.quick else FULL_SIZE, args.size)
        variants = [*([] if args.without_references else references(args.dtype)), *map(Variant.parse, args.variant)]
    except ValueError as error:
        parser.error(str(error))
    if not variants:
        parser.error("nothing to measure: --without-references needs a --variant")
    # Pools as large as `at_once` full contexts: engines of all variants are open together.
    common = {"dtype": args.dtype, "kv_memory": None, "max_num_seqs": args.at_once}
    full, *others = (Variant(each.name, {**common, **each.engine_kwargs}) for each in (Variant("full"), *variants))
    report: dict[str, Any] = {}
    for report in measure(args, size, full, others):
        saved = save(report, args.output)  # what there is so far: a run that is ended early is not lost
    if not report:
        parser.error("nothing to measure: --only names no part, and there is no --gsm8k")
    show(report, consoles.results())
    console.print(f"wrote {saved}")
    with contextlib.suppress(ImportError):  # the plot is an extra: pip install pagoda-kv[bench]
        console.print(f"wrote {draw(report, args.output / 'quality.png')}")


if __name__ == "__main__":
    main()
