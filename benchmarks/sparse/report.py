"""The report as tables for people, as JSON, and as one PNG."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.quality.report import interval


def write(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """`sparse.json`, and `sparse.png` if matplotlib is there."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "sparse.json"]
    written[0].write_text(json.dumps(report, indent=2))
    with contextlib.suppress(ImportError):  # the plot is an extra: pip install pagoda-kv[bench]
        written.append(draw(report, folder / "sparse.png"))
    return written


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print everything that was measured."""
    for task in report.get("quality", []):
        full = task["full"]["exact_match"]
        title = f"{task['kind']}, {task['length']} tokens: full KV answers {full['value']:.0%} of {full['n']} x 4"
        if not task["counts"]:
            console.print(f"{title}: does not count")
            continue
        _show_points(task, title, console)
    for press in report.get("kvpress", []):
        _show_points(press, f"kvpress: {press['kind']}, {press['length']} tokens", console)
    if "streaming" in report:
        streaming = report["streaming"]
        table = Table("run", *[f"to {bound:,}" for bound in streaming["bounds"][1:]], "most blocks")
        table.title = f"perplexity, {streaming['window']} tokens kept"
        for name, run in streaming["runs"].items():
            table.add_row(name, *[f"{one:.2f}" for one in run["perplexity"]], str(run["most_blocks"]))
        console.print(table)
    if "throughput" in report:
        measured = report["throughput"]
        table = Table("policy", "decode, tokens/s", "prefill, s", "blocks held", "host, MiB")
        table.title = f"{measured['batch']} prompts of {measured['length']} tokens, {measured['fraction']:.0%} kept"
        for name, one in measured["policies"].items():
            rate, prefill = f"{one['decode_tokens_per_s']:.1f}", f"{one['prefill_s']:.1f}"
            table.add_row(name, rate, prefill, str(one["held_blocks"]), f"{one['host_bytes'] / 2**20:.0f}")
        console.print(table)


def _show_points(task: Mapping[str, Any], title: str, console: Console) -> None:
    table = Table("policy", "kept", title=title)
    for asked in ("known question", "asked again"):
        for name in ("right", "NLL change", "KL", "same choice"):
            table.add_column(f"{asked}: {name}")
    for point in task["points"]:
        row = [point["policy"], f"{point['fraction']:.0%}"]
        for asked in ("known", "asked_again"):
            one = point[asked]
            row += [interval(one["exact_match"], "{:.0%}"), f"{one['answer_nll_change']['value']:+.3f}"]
            row += [f"{one['kl']['value']:.3f}", f"{one['top1_agreement']['value']:.0%}"]
        table.add_row(*row)
    console.print(table)


def draw(report: Mapping[str, Any], path: Path) -> Path:
    """Right answers against kept fraction for both kinds of question, all tasks that count, and perplexity."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.2), layout="constrained")
    known, again, along = figure.subplots(1, 3)
    counted = [task for task in report.get("quality", []) if task["counts"]]
    for axes, asked, title in ((known, "known", "the known question"), (again, "asked_again", "asked again")):
        for name, line in (("", counted), ("kvpress ", report.get("kvpress", []))):
            _lines(axes, line, asked, name)
        axes.set_xscale("log")
        axes.invert_xaxis()
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("share of KV kept on the device")
        axes.set_title(f"right answers, {title}")
        if axes.has_data():
            axes.legend(fontsize="small")
    if "streaming" in report:
        streaming = report["streaming"]
        for name, run in streaming["runs"].items():
            along.plot(streaming["bounds"][1:], run["perplexity"], marker=".", label=name)
        along.set_yscale("log")
        along.legend()
    along.set_xlabel("tokens of text")
    along.set_title("perplexity in constant memory")
    figure.savefig(path, dpi=150)
    return path


def _lines(axes: Any, measured: list[Mapping[str, Any]], asked: str, prefix: str) -> None:
    """A line for each policy: the mean over tasks at each fraction."""
    found: dict[str, dict[float, list[float]]] = {}
    for task in measured:
        for point in task["points"]:
            of = found.setdefault(point["policy"], {}).setdefault(point["fraction"], [])
            of.append(point[asked]["exact_match"]["value"])
    for name, values in found.items():
        fractions = sorted(values)
        means = [sum(values[fraction]) / len(values[fraction]) for fraction in fractions]
        style = "--" if prefix else "-"
        axes.plot(fractions, means, style, marker=".", label=f"{prefix}{name}")
