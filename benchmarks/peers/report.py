"""Outcomes -> what is reported: a JSON value, and tables of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

from rich.table import Table

from benchmarks.peers.measure import HIGHER_IS_BETTER, common_share, load_at, ratio, spread
from benchmarks.peers.rounds import Outcome
from benchmarks.peers.workloads import Workload

Outcomes = Mapping[tuple[str, str], Outcome]
UNITS = {"ttft_ms": "ms", "ttft_p99_ms": "ms", "stream_tok_s": "tok/s", "output_tok_s": "tok/s", "total_s": "s"}
TTFT_LIMITS_MS = (300.0, 500.0, 1000.0, 2000.0)


def summary(workloads: Sequence[Workload], engines: Sequence[str], outcomes: Outcomes, ours: str) -> dict[str, Any]:
    """All figures with medians and ranges over rounds, `ours` against the best of the others, and output agreement."""
    return {
        "workloads": [_workload(workload, engines, outcomes, ours) for workload in workloads],
        "load": [_load(limit, workloads, engines, outcomes, ours) for limit in TTFT_LIMITS_MS],
        "agreement": agreement(engines, outcomes),
    }


def _workload(workload: Workload, engines: Sequence[str], outcomes: Outcomes, ours: str) -> dict[str, Any]:
    by_engine = {name: outcomes[workload.key, name] for name in engines if (workload.key, name) in outcomes}
    values = {
        name: {index: float(getattr(one, workload.figure)) for index, one in outcome.figures.items()}
        for name, outcome in by_engine.items()
        if outcome.figures
    }
    best = _best(workload.figure, {name: statistics.median(rounds.values()) for name, rounds in values.items()}, ours)
    return {
        "key": workload.key,
        "name": workload.name,
        "title": workload.title,
        "rate": workload.rate,
        "figure": workload.figure,
        "engines": {
            name: {
                "spread": asdict(spread(list(values[name].values()))) if name in values else None,
                "skipped": outcome.skipped,
                "rounds": {index: asdict(one) for index, one in outcome.figures.items()},
            }
            for name, outcome in by_engine.items()
        },
        "best_peer": best,
        "ratio": _paired(workload.figure, values[ours], values[best]) if best and ours in values else None,
    }


def _best(figure: str, medians: Mapping[str, float], ours: str) -> str | None:
    """The best engine that is not one of ours (`pagoda`, `pagoda-...`)."""
    others = [name for name in medians if name != ours and not name.startswith(f"{ours}-")]
    choose = max if figure in HIGHER_IS_BETTER else min
    return choose(others, key=lambda name: medians[name], default=None)


def _paired(figure: str, ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[str, Any]:
    """The ratio round by round, so that a noisy minute, which both had, cancels out as far as it can."""
    common = sorted(ours.keys() & theirs.keys())
    return asdict(spread([ratio(figure, ours[index], theirs[index]) for index in common]))


def _load(
    limit: float, workloads: Sequence[Workload], engines: Sequence[str], outcomes: Outcomes, ours: str
) -> dict[str, Any]:
    """The load each engine carries with a median p99 TTFT up to `limit` ms.

    Who stays below it at every rate is `unsaturated`: its load is a lower bound, and no ratio is over it.
    """
    loads: dict[str, float | None] = {}
    unsaturated = []
    for name in engines:
        p99 = {
            workload.rate: statistics.median(one.ttft_p99_ms for one in outcome.figures.values())
            for workload in workloads
            if workload.rate and (outcome := outcomes.get((workload.key, name))) and outcome.figures
        }
        loads[name] = load_at(limit, p99)
        if p99 and max(p99.values()) <= limit:
            unsaturated.append(name)
    known = {name: load for name, load in loads.items() if load}
    best = _best("load_rps", known, ours)
    return {
        "limit_ms": limit,
        "load_rps": loads,
        "unsaturated": unsaturated,
        "best_peer": best,
        "ratio": known[ours] / known[best] if best and best not in unsaturated and ours in known else None,
    }


def agreement(engines: Sequence[str], outcomes: Outcomes) -> dict[str, float]:
    """For each pair of engines, the share of greedy output before their first difference: the mean over all rounds."""
    shares = {}
    for a, b in combinations(engines, 2):
        pairs = [
            common_share(outputs, theirs.outputs[index])
            for (key, name), outcome in outcomes.items()
            if name == a and (theirs := outcomes.get((key, b), Outcome()))
            for index, outputs in outcome.outputs.items()
            if index in theirs.outputs
        ]
        if pairs:
            shares[f"{a} / {b}"] = statistics.mean(pairs)
    return shares


def tables(report: Mapping[str, Any], engines: Sequence[str], ours: str) -> list[Table]:
    """The summary as tables for a terminal."""
    found = [_figures_table(report, engines, ours)]
    if any(workload["rate"] for workload in report["workloads"]):
        found.append(_load_table(report, engines, ours))
    if report["agreement"]:
        found.append(_agreement_table(report))
    return found


def _figures_table(report: Mapping[str, Any], engines: Sequence[str], ours: str) -> Table:
    table = Table(title="median (range) over rounds", title_justify="left")
    for column in ("", "workload", "", *engines, f"{ours} / best peer"):
        table.add_column(column, justify="left" if column == "workload" else "right")
    for workload in report["workloads"]:
        cells = [_cell(workload["engines"].get(name)) for name in engines]
        against = workload["ratio"]
        verdict = f"{_ranged(against)}x {workload['best_peer']}" if against else ""
        table.add_row(workload["key"], workload["title"], UNITS[workload["figure"]], *cells, verdict)
    return table


def _cell(engine: Mapping[str, Any] | None) -> str:
    if engine is None:
        return ""
    if engine["spread"] is None:
        return "failed" if engine["skipped"] else ""
    return _ranged(engine["spread"])


def _ranged(value: Mapping[str, Any]) -> str:
    if value["rounds"] == 1:
        return f"{value['median']:.3g} (once)"
    return f"{value['median']:.3g} ({value['low']:.3g}-{value['high']:.3g})"


def _load_table(report: Mapping[str, Any], engines: Sequence[str], ours: str) -> Table:
    table = Table(title="(g) requests a second at equal p99 TTFT", title_justify="left")
    for column in ("p99 TTFT", *engines, f"{ours} / best peer"):
        table.add_column(column, justify="right")
    for row in report["load"]:
        at_least = {name: ">= " if name in row["unsaturated"] else "" for name in engines}
        loads = [f"{at_least[name]}{load:.3g}" if (load := row["load_rps"][name]) else "" for name in engines]
        verdict = f"{at_least[ours]}{row['ratio']:.3g}x {row['best_peer']}" if row["ratio"] else ""
        table.add_row(f"{row['limit_ms']:g} ms", *loads, verdict)
    return table


def _agreement_table(report: Mapping[str, Any]) -> Table:
    table = Table(title="greedy output before the first difference", title_justify="left", show_header=False)
    for pair, share in report["agreement"].items():
        table.add_row(pair, f"{100 * share:.1f}%")
    return table
