"""Tables and a plot of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.blend.tasks import KINDS, RATIOS


def show(report: dict[str, Any]) -> None:
    """Print what there is of speed and quality."""
    if report["speed"]:
        table = Table("variant", "TTFT, s", "faster", "requests/s", "n", title=f"speed, {report['tokens']} tokens")
        for row in report["speed"]:
            figures = (("ttft_s", "{:.3f}"), ("speedup", "{:.2f}"), ("requests_per_s", "{:.2f}"))
            table.add_row(row["variant"], *(_cell(row[key], form) for key, form in figures), str(row["ttft_s"]["n"]))
        Console().print(table)
    if report["quality"]:
        titles = ("KL, nats", "same answer", "right", "right: full", "change, points", "answers", "counts")
        table = Table("task", "variant", *titles)
        for row in report["quality"]:
            figures = (("kl", "{:.1e}"), ("same", "{:.1%}"), ("right", "{:.1%}"))
            cells = [_cell(row[key], form) for key, form in figures]
            cells += [f"{row['right_full']['value']:.1%}", _cell(row["change"], "{:+.1f}"), str(row["num_answers"])]
            table.add_row(row["kind"], row["variant"], *cells, "yes" if row["counts"] else "no")
        Console().print(table)


def _cell(figure: dict[str, float], form: str) -> str:
    return f"{form.format(figure['value'])} [{form.format(figure['low'])}, {form.format(figure['high'])}]"


def draw(report: dict[str, Any], path: Path) -> None:
    """TTFT, KL and answers as the ratio grows."""
    from matplotlib.figure import Figure as Plot

    plot = Plot(figsize=(12, 3.6), layout="constrained")
    on_ttft, on_kl, on_same = plot.subplots(1, 3)
    places = [100 * ratio for ratio in RATIOS.values()]

    def line(axes: Any, figures: Sequence[dict[str, float]], label: str) -> None:
        values = [one["value"] for one in figures]
        around = [[one["value"] - one["low"] for one in figures], [one["high"] - one["value"] for one in figures]]
        axes.errorbar(places, values, yerr=around, marker=".", capsize=2, label=label)

    by_name = {row["variant"]: row for row in report["speed"]}
    if by_name:
        line(on_ttft, [by_name[name]["ttft_s"] for name in RATIOS], "blended")
        for name, style in (("full", "-"), ("prefix", "--")):
            on_ttft.axhline(by_name[name]["ttft_s"]["value"], color="grey", linestyle=style, label=name)
        on_ttft.axhline(by_name["full"]["ttft_s"]["value"] / 2.5, color="green", linestyle=":", label="full / 2.5")
    on_ttft.set_ylim(bottom=0)
    on_ttft.set_ylabel("TTFT, seconds")
    for kind in KINDS:
        rows = {row["variant"]: row for row in report["quality"] if row["kind"] == kind}
        if rows:
            line(on_kl, [rows[name]["kl"] for name in RATIOS], kind)
            line(on_same, [rows[name]["same"] for name in RATIOS], kind)
    on_kl.set_yscale("symlog", linthresh=1e-4)
    on_kl.set_ylabel("KL(full || blended), nats a token")
    on_same.set_ylabel("answers that are full prefill's")
    for axes in (on_ttft, on_kl, on_same):
        axes.set_xlabel("computed anew, % of the passages' tokens")
        if axes.lines:
            axes.legend(fontsize="small")
    plot.savefig(path, dpi=90)
