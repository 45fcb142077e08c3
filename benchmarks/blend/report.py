"""Tables and a plot of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import consoles
from benchmarks.blend.tasks import KINDS, RATIOS


def show(report: dict[str, Any]) -> None:
    """Print what there is of speed and quality."""
    if report["speed"]:
        table = Table("variant", "TTFT, s", "faster", "requests/s", "n", title=f"speed, {report['tokens']} tokens")
        for row in report["speed"]:
            figures = (("ttft_s", "{:.3f}"), ("speedup", "{:.2f}"), ("requests_per_s", "{:.2f}"))
            table.add_row(row["variant"], *(_cell(row[key], form) for key, form in figures), str(row["ttft_s"]["n"]))
        consoles.results().print(table)
    if report["quality"]:
        titles = ("KL, nats", "same answer", "right", "right: full", "change, points", "doubted", "answers", "counts")
        table = Table("task", "variant", *titles)
        for row in report["quality"]:
            figures = (("kl", "{:.1e}"), ("same", "{:.1%}"), ("right", "{:.1%}"))
            cells = [_cell(row[key], form) for key, form in figures]
            cells += [f"{row['right_full']['value']:.1%}", _cell(row["change"], "{:+.1f}")]
            cells += [f"{row['doubted']['value']:.1%}", str(row["num_answers"])]
            table.add_row(row["kind"], row["variant"], *cells, "yes" if row["counts"] else "no")
        consoles.results().print(table)


def _cell(figure: dict[str, float], form: str) -> str:
    return f"{form.format(figure['value'])} [{form.format(figure['low'])}, {form.format(figure['high'])}]"


def draw(report: dict[str, Any], path: Path) -> None:
    """TTFT, KL and answers as the ratio grows: what there is of them."""
    from matplotlib.figure import Figure as Plot

    panels = bool(report["speed"]) + 2 * bool(report["quality"])
    plot = Plot(figsize=(4 * panels, 3.4), layout="constrained")
    left = iter(plot.subplots(1, panels, squeeze=False)[0])
    places = [100 * ratio for ratio in RATIOS.values()]

    def panel(title: str) -> Any:
        axes = next(left)
        axes.set_ylabel(title)
        axes.set_xlabel("computed anew, % of the passages' tokens")
        return axes

    def line(axes: Any, figures: Sequence[dict[str, float]], label: str) -> None:
        values = [one["value"] for one in figures]
        around = [[one["value"] - one["low"] for one in figures], [one["high"] - one["value"] for one in figures]]
        axes.errorbar(places, values, yerr=around, marker=".", capsize=2, label=label)

    if report["speed"]:
        axes, by_name = panel("TTFT, seconds"), {row["variant"]: row for row in report["speed"]}
        line(axes, [by_name[name]["ttft_s"] for name in RATIOS], "blended")
        for name, style in (("full", "-"), ("prefix", "--")):
            axes.axhline(by_name[name]["ttft_s"]["value"], color="grey", linestyle=style, label=name)
        axes.axhline(by_name["full"]["ttft_s"]["value"] / 2.5, color="green", linestyle=":", label="full / 2.5")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")
    if report["quality"]:
        on_kl, on_answers = (
            panel("KL(full || blended), nats a token"),
            panel("answers: right (line: with full prefill)"),
        )
        for kind in sorted({row["kind"] for row in report["quality"]}, key=KINDS.index):
            rows = {row["variant"]: row for row in report["quality"] if row["kind"] == kind}
            line(on_kl, [rows[name]["kl"] for name in RATIOS], kind)
            line(on_answers, [rows[name]["right"] for name in RATIOS], kind)
            on_answers.axhline(rows["naive"]["right_full"]["value"], color="grey", linewidth=0.8)
        on_kl.set_yscale("symlog", linthresh=1e-3)
        on_answers.set_ylim(0, 1)
        on_kl.legend(fontsize="small")
        on_answers.legend(fontsize="small")
    plot.savefig(path, dpi=90)
