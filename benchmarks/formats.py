"""What KV formats cost and gain in one picture: perplexity against bytes per token, and attention's speed at 8k.

    python -m benchmarks.quality --only text --variant 'int8={"kv_format": "int8"}' ...     writes quality.json
    python -m benchmarks.formats results/quality/quality.json --png docs/formats.png        measures speeds, draws both

Variants of `quality.json` that differ in more than the format, such as in skipped layers, are drawn too. Speeds are
measured once and kept in the file that --speeds names.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.kernels import bench_formats

CONTEXT = 8192
SHAPES = {"3 KV heads x 3, of 64": (3, 3, 64), "8 x 4, of 128": (8, 4, 128), "16 x 1, of 64": (16, 1, 64)}
_MARKS = "os^"  # of corpora


def speeds(path: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Of each shape, each format's speed where BF16's is 1: from the file, or measured and written to it."""
    if not path.exists():
        measured = {name: bench_formats(*shape, CONTEXT, rounds) for name, shape in SHAPES.items()}
        path.write_text(json.dumps(measured, indent=2))
    found: dict[str, dict[str, float]] = json.loads(path.read_text())
    return found


def draw(report: Mapping[str, Any], fast: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Perplexity's change with its intervals against bytes per token, left; speeds, right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    cost, gain = figure.subplots(1, 2)
    size = report["bytes_per_token"]
    names = sorted(report["variants"], key=lambda name: size[name])
    for of_text, variants in enumerate(report["text"].values()):
        for place, name in enumerate(names):
            change = variants[name]["perplexity_change"]
            cost.errorbar(
                size[name] / 1024 + of_text * 0.2,  # beside each other
                change["value"],
                yerr=[[change["value"] - change["low"]], [change["high"] - change["value"]]],
                fmt=_MARKS[of_text % len(_MARKS)],
                color=f"C{place % 10}",
                markersize=4,
                capsize=2,
                label=None if of_text else name,
            )
    cost.axhline(0, color="grey", linewidth=0.8)
    cost.axvline(size["full"] / 1024, color="grey", linestyle="--", linewidth=0.8, label="BF16")
    cost.yaxis.set_major_formatter(lambda value, _: f"{value:+.1%}")
    cost.set_xlabel(f"KiB a token, {report['model']}")
    cost.set_ylabel(f"change of perplexity: {', '.join(report['text'])}")
    cost.legend(fontsize="small", loc="upper right")
    width = 0.8 / len(fast)
    for place, (shape, by_format) in enumerate(fast.items()):
        at = [index + place * width for index in range(len(by_format))]
        gain.bar_label(gain.bar(at, list(by_format.values()), width, label=shape), fmt="%.2f", fontsize=6)
        gain.set_xticks([index + 0.4 - width / 2 for index in range(len(by_format))], list(by_format), rotation=20)
    gain.axhline(1, color="grey", linestyle="--", linewidth=0.8)
    gain.set_ylabel(f"decode attention over {CONTEXT:,} entries, BF16 = 1")
    gain.margins(y=0.3)  # room for the legend
    gain.legend(fontsize="x-small", loc="upper left")
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quality", type=Path, help="quality.json with texts")
    parser.add_argument("--speeds", type=Path, default=Path("results/formats.json"), help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="timed calls of each candidate (%(default)s)")
    parser.add_argument("--png", type=Path, default=Path("results/formats.png"), help="what is drawn (%(default)s)")
    args = parser.parse_args()
    report = json.loads(args.quality.read_text())
    if not report.get("text"):
        parser.error(f"{args.quality} has no texts: run benchmarks.quality with --only text")
    for path in (args.speeds, args.png):
        path.parent.mkdir(parents=True, exist_ok=True)
    draw(report, speeds(args.speeds, args.rounds), args.png)


if __name__ == "__main__":
    main()
