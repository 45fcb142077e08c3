"""Two PNG files: every workload relative to the best peer, and the open loop's latency against its rate."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.measure import ratio


def draw(report: Mapping[str, Any], engines: Sequence[str], ours: str, folder: Path) -> list[Path]:
    """Write the plots that there are figures for; returns their paths."""
    drawn = [_relative(report, engines, ours, folder / "relative.png"), _open_loop(report, engines, folder)]
    return [path for path in drawn if path]


def relative_speeds(report: Mapping[str, Any], engines: Sequence[str], ours: str) -> dict[str, dict[str, float]]:
    """By workload without a rate and engine: its speed, where `ours` is 1."""
    speeds = {}
    for workload in report["workloads"]:
        medians = {name: one["spread"]["median"] for name, one in workload["engines"].items() if one["spread"]}
        if workload["rate"] is None and ours in medians:
            speeds[workload["key"]] = {
                name: ratio(workload["figure"], medians[name], medians[ours]) for name in engines if name in medians
            }
    return speeds


def curves(report: Mapping[str, Any], figure: str) -> dict[str, list[tuple[float, float]]]:
    """By engine: (rate, median of `figure` over rounds), rates rising."""
    found: dict[str, list[tuple[float, float]]] = {}
    for workload in report["workloads"]:
        for name, one in workload["engines"].items() if workload["rate"] else ():
            if one["rounds"]:
                value = statistics.median(each[figure] for each in one["rounds"].values())
                found.setdefault(name, []).append((workload["rate"], value))
    return {name: sorted(points) for name, points in found.items()}


def _relative(report: Mapping[str, Any], engines: Sequence[str], ours: str, path: Path) -> Path | None:
    from matplotlib.figure import Figure

    speeds = relative_speeds(report, engines, ours)
    if not speeds:
        return None
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(engines)
    for place, name in enumerate(engines):
        at = [i + place * width for i, by_engine in enumerate(speeds.values()) if name in by_engine]
        bars = axes.bar(at, [by_engine[name] for by_engine in speeds.values() if name in by_engine], width, label=name)
        axes.bar_label(
            bars, fmt="%.2f", fontsize="x-small"
        )  # from zero, so that lengths are to scale; small ones are read
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(speeds))], list(speeds))
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel(f"speed, {ours} = 1")
    axes.set_xlabel("workload")
    figure.legend(loc="outside upper center", ncols=len(engines), fontsize="small")
    figure.savefig(path, dpi=150)
    return path


def _open_loop(report: Mapping[str, Any], engines: Sequence[str], folder: Path) -> Path | None:
    from matplotlib.figure import Figure

    panels = {
        "median TTFT, ms": curves(report, "ttft_ms"),
        "p99 TTFT, ms": curves(report, "ttft_p99_ms"),
        "median ITL, ms": curves(report, "itl_ms"),
        "p99 ITL, ms": curves(report, "itl_p99_ms"),
    }
    throughput = curves(report, "output_tok_s")
    if not throughput:
        return None
    figure = Figure(figsize=(10, 7), layout="constrained")
    for axes, (label, by_engine) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        for name in [name for name in engines if name in by_engine]:
            speeds = [speed for _, speed in throughput[name]]
            axes.plot(speeds, [value for _, value in by_engine[name]], marker="o", label=name)
        axes.set_yscale("log")
        axes.set_xlabel("output tokens a second")
        axes.set_ylabel(label)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(engines), fontsize="small")
    path = folder / "open_loop.png"
    figure.savefig(path, dpi=150)
    return path
