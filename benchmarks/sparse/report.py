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
    for task in report["quality"]:
        _show_task(task, console)
    if report["streaming"]:
        bounds = report["streaming"][0]["bounds"]
        table = Table("run", *[f"to {bound:,}" for bound in bounds[1:]], title="perplexity, and most blocks held")
        for run in report["streaming"]:
            shown = [f"{one:.2f}, {held}" for one, held in zip(run["perplexity"], run["most_blocks"], strict=True)]
            table.add_row(f"{run['sinks']} sinks, {run['window']} tokens", *shown)
        console.print(table)
    if report["throughput"]:
        measured = report["throughput"]
        table = Table("policy", "decode, ms a token", "first step, s", "blocks held", "sketches, MiB", "host, MiB")
        table.title = f"{measured['batch']} prompts of {measured['length']} tokens"
        for name, one in measured["policies"].items():
            outside = [f"{one[part] / 2**20:.0f}" for part in ("sketch_bytes", "host_bytes")]
            rate, first = f"{1000 / one['decode_tokens_per_s']:.1f}", f"{one['first_step_s']:.2f}"
            table.add_row(name, rate, first, str(one["held_blocks"]), *outside)
        console.print(table)


def _show_task(task: Mapping[str, Any], console: Console) -> None:
    counts = "" if task["counts"] else ": does not count, full KV has under 70% right"
    table = Table("policy", "kept", "contexts", title=f"{task['kind']}, {task['length']} tokens{counts}")
    for column in ("known: right", "asked again: right", "all: right less full's", "perplexity", "KL", "same choice"):
        table.add_column(column)
    table.add_column("fetched a step")
    table.add_column("sketches")
    for point in task["points"]:
        known, again, every = point["known"], point["asked_again"], point["all"]
        table.add_row(
            point["policy"],
            f"{point['fraction']:.0%}",
            str(every["right"]["n"]),
            interval(known["right"], "{:.0%}"),
            interval(again["right"], "{:.0%}"),
            interval(every["right_change"], "{:+.1%}"),
            interval(every["perplexity_change"], "{:+.1%}"),
            f"{every['kl']['value']:.3f}",
            f"{every['top1_agreement']['value']:.1%}",
            f"{point['fetched_per_step']:.1%}" if point.get("fetched_per_step") else "",
            f"{point['sketch_share']:.0%}" if point.get("sketch_share") else "",
        )
    console.print(table)


def draw(report: Mapping[str, Any], path: Path) -> Path:
    """Right answers against kept fraction for both kinds of question, of the task measured most, and perplexity."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.4), layout="constrained")
    known, again, along = figure.subplots(1, 3)
    task = max((task for task in report["quality"] if task["counts"]), key=lambda one: len(one["points"]), default=None)
    for axes, asked, title in ((known, "known", "the known question"), (again, "asked_again", "asked again")):
        if task is not None:
            _lines(axes, task, asked)
            axes.set_title(f"{task['kind']}, {task['length']} tokens, right answers: {title}", fontsize="medium")
        axes.set_xscale("log")
        axes.set_xticks([1, 0.5, 0.2, 0.1], ["100%", "50%", "20%", "10%"], minor=False)
        axes.minorticks_off()
        axes.invert_xaxis()
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("share of KV kept on the device")
    for run in report["streaming"]:
        along.plot(run["bounds"][1:], run["perplexity"], marker=".", label=f"{run['sinks']} sinks")
    if along.has_data():
        along.set_yscale("log")
        along.legend()
    along.set_xlabel("tokens of text")
    along.set_title("perplexity in constant memory", fontsize="medium")
    handles, labels = known.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize="small")
    figure.savefig(path, dpi=90)
    return path


def _lines(axes: Any, task: Mapping[str, Any], asked: str) -> None:
    """A line for each policy, from full KV at 100%."""
    found: dict[str, dict[float, float]] = {}
    for point in task["points"]:
        found.setdefault(point["policy"], {})[point["fraction"]] = point[asked]["right"]["value"]
    for name, values in found.items():
        if name.endswith("full"):
            continue
        theirs = name.startswith("kvpress ")
        start = found.get("kvpress full" if theirs else "full", {})
        fractions, right = zip(*sorted((values | start).items()), strict=True)
        axes.plot(fractions, right, "--" if theirs else "-", marker=".", label=name)
