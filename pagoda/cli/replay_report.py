"""What `pagoda replay` found: as tables in the terminal, as JSON, and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pagoda.cli.tables import print_tables
from pagoda.kv.sizes import format_size
from pagoda.plan.fleet import FleetReport
from pagoda.plan.hardware import TierPlan, parse_tier_plan
from pagoda.plan.replay_page import Chart, Sheet, write_page, write_png
from pagoda.plan.study import MAX_BOUND_BLOCKS, Answer, Bound, Latency, Point, Setup, Summary

_BOUND = "belady, device alone"
_BOUND_BELOW = "belady, with tiers"


@dataclass(slots=True)
class Result:
    """All figures of one run."""

    name: str
    format: str
    summary: Summary
    setup: Setup
    points: list[Point] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)
    fleets: list[tuple[str, int, FleetReport]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    target: float = 0.0

    def size(self, num_blocks: float) -> str:
        """Blocks of the trace, as bytes for people."""
        return format_size(num_blocks * self.setup.block_bytes(self.summary.block_tokens))

    def to_json(self) -> dict[str, Any]:
        """Everything as plain dictionaries, lists, numbers and strings."""
        summary = {key: value for key, value in _fields(self.summary).items() if key != "requests"}
        return {
            "trace": self.name,
            "format": self.format,
            "summary": summary,
            "model": self.setup.machine.shape.name,
            "hardware": asdict(self.setup.machine.hardware),
            "block_bytes": self.setup.block_bytes(self.summary.block_tokens),
            "points": [asdict(point) for point in self.points],
            "bounds": [asdict(bound) for bound in self.bounds],
            "fleets": [
                {
                    "routing": name,
                    "num_blocks": size,
                    **{key: value for key, value in _fields(report).items() if key != "ttft"},
                    "ttft": asdict(Latency.of(report.ttft)),
                }
                for name, size, report in self.fleets
            ],
            "target_hit_rate": self.target or None,
            "answers": [asdict(answer) for answer in self.answers],
        }


def tiers_to_try(setup: Setup) -> list[TierPlan]:
    """DRAM and disk, as fast as the setup's or as usual."""
    link = setup.machine.hardware.host_link * setup.machine.hardware.count / setup.footprint.copies
    given = {tier.name: tier for tier in setup.tiers}
    return [given.get(name) or parse_tier_plan(f"{name}:1TB", link) for name in ("dram", "disk")]


def print_result(result: Result) -> None:
    """Tables."""
    console = Console(highlight=False)
    for note in notes(result):
        console.print(note)
    for sheet in sheets(result):
        table = Table(title=f"\n{sheet.title}", title_justify="left", title_style="bold", box=None)
        for number, column in enumerate(sheet.columns):
            table.add_column(column, justify="right" if number else "left", header_style="dim")
        for row in sheet.rows:
            table.add_row(*row)
        print_tables(console, table)


def write_html(result: Result, path: Path) -> None:
    """The page."""
    write_page(path, f"Replay of {result.name}", notes(result), charts(result), sheets(result))


def write_curves(result: Result, path: Path) -> None:
    """The page's curves as PNG."""
    write_png(path, charts(result))


def notes(result: Result) -> list[str]:
    """What was replayed on what."""
    summary, machine = result.summary, result.setup.machine
    mean = summary.num_tokens / summary.num_requests
    found = [
        f"{result.name} ({result.format}): {summary.num_requests:,} requests in {summary.duration_s / 60:,.1f} min,"
        f" {mean:,.0f} prompt tokens on average, {summary.num_different:,} different blocks of"
        f" {summary.block_tokens} tokens = {result.size(summary.num_different)}."
        f" A cache that forgets nothing would hit {summary.best_hit_rate:.1%}.",
        f"KV of {machine.shape.name} in {result.setup.footprint.kv_format}, computed on"
        f" {machine.hardware.count} x {machine.hardware.name}. TTFT is "
        + ("a wait for those before, and the work." if result.fleets else "that of an otherwise idle machine."),
    ]
    if result.format == "access-log":
        found.append(
            "The log does not say in which format its server kept KV: it is counted in "
            f"{result.setup.footprint.kv_format}, as --kv-format says."
        )
    if result.points and summary.num_blocks > MAX_BOUND_BLOCKS:
        found.append("The trace is too large to keep, so there is no bound.")
    return found


def sheets(result: Result) -> list[Sheet]:
    """The tables."""
    made = [
        Sheet("Token hit rate, TTFT and waste", _columns(result), _rows(result)),
        Sheet("Bytes moved", ("policy", "device", "tier", "capacity", "read", "written", "waste"), _moved(result)),
        Sheet(
            "Replicas",
            ("routing", "device of each", "hit rate", "TTFT mean", "p50", "p95", "busiest / mean", "busy"),
            [
                (
                    *(name, result.size(size), f"{fleet.token_hit_rate:.1%}", *_latency(Latency.of(fleet.ttft))[:3]),
                    *(f"{fleet.imbalance:.2f}", f"{fleet.utilization:.0%}"),
                )
                for name, size, fleet in result.fleets
            ],
        ),
        Sheet(
            f"What it takes to hit {result.target:.0%}, below the first device",
            ("tier", "capacity", "hit rate", "TTFT mean", "p95"),
            [_answer(result, answer) for answer in result.answers],
        ),
    ]
    return [sheet for sheet in made if sheet.rows]


def charts(result: Result) -> list[Chart]:
    """Hit rate and TTFT over the device's size."""
    gib = result.setup.block_bytes(result.summary.block_tokens) / 2**30

    def curve(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
        return sorted((size * gib, value) for size, value in points)

    if result.fleets:
        names = list(dict.fromkeys(name for name, _, _ in result.fleets))
        hits = {n: curve([(size, f.token_hit_rate) for name, size, f in result.fleets if name == n]) for n in names}
        times = {n: curve([(size, f.ttft.mean) for name, size, f in result.fleets if name == n]) for n in names}
    else:
        names = list(dict.fromkeys(point.policy for point in result.points))
        hits = {n: curve([(p.num_blocks, p.hit_rate) for p in result.points if p.policy == n]) for n in names}
        times = {n: curve([(p.num_blocks, p.ttft.mean) for p in result.points if p.policy == n]) for n in names}
        times["nothing cached"] = curve(
            [(p.num_blocks, p.cold_ttft.mean) for p in result.points if p.policy == names[0]]
        )
        if result.bounds:
            hits[_BOUND] = curve([(bound.num_blocks, bound.hit_rate) for bound in result.bounds])
        below = [(b.num_blocks, b.hit_rate_with_tiers) for b in result.bounds if b.hit_rate_with_tiers is not None]
        if below:
            hits[_BOUND_BELOW] = curve(below)
    dashed = (_BOUND, _BOUND_BELOW)
    label = "KV memory of the device, GiB"
    return [
        Chart("Token hit rate", label, "%", hits, dashed, percent=True),
        Chart("Mean time to first token, s", label, "s", times, ("nothing cached",)),
    ]


def _columns(result: Result) -> list[str]:
    places = [place.name for place in result.points[0].places] if result.points else []
    return [
        "policy",
        "device",
        "hit rate",
        *(f"{place} hits" for place in places),
        "waste",
        "TTFT mean",
        "p50",
        "p95",
        "p99",
        "cold mean",
    ]


def _rows(result: Result) -> list[list[str]]:
    rows = []
    for point in result.points:
        rates = [f"{place.hit_rate:.1%}" for place in point.places]
        start = [point.policy, result.size(point.num_blocks), f"{point.hit_rate:.1%}", *rates]
        rows.append([*start, f"{point.places[0].waste:.0%}", *_latency(point.ttft), _seconds(point.cold_ttft.mean)])
    for bound in result.bounds:
        total = bound.hit_rate if bound.hit_rate_with_tiers is None else bound.hit_rate_with_tiers
        empty = [""] * (len(_columns(result)) - 4)
        rows.append(["belady", result.size(bound.num_blocks), f"{total:.1%}", f"{bound.hit_rate:.1%}", *empty])
    return rows


def _moved(result: Result) -> list[list[str]]:
    return [
        [
            *(point.policy, result.size(point.num_blocks), place.name),
            "-" if place.num_blocks is None else result.size(place.num_blocks),
            *(format_size(place.read_bytes), format_size(place.written_bytes), f"{place.waste:.0%}"),
        ]
        for point in result.points
        for place in point.places[1:]
    ]


def _answer(result: Result, answer: Answer) -> list[str]:
    rate, point = f"{answer.point.hit_rate:.1%}", answer.point
    if answer.num_blocks is None:
        return [answer.tier.name, "none is enough", f"at most {rate}", "", ""]
    times = _seconds(point.ttft.mean), _seconds(point.ttft.p95)
    return [answer.tier.name, result.size(answer.num_blocks), rate, *times]


def _latency(latency: Latency) -> list[str]:
    return [_seconds(value) for value in (latency.mean, latency.p50, latency.p95, latency.p99)]


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _fields(of: Any) -> dict[str, Any]:
    return {name: getattr(of, name) for name in of.__slots__}
