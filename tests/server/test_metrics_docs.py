"""docs/metrics.md has every metric of the code and no other, and so has each query of the Grafana dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from pagoda.engine.pressure.report import PressureReport
from pagoda.kv.breaker import BreakerState
from pagoda.kv.tiers.records import Usage

from .conftest import run_server
from .fake_backend import FakeBackend
from .test_cache_control import ask, folder, serve
from .test_tier_metrics import report

__all__ = ["folder"]

ROOT = Path(__file__).resolve().parents[2]
SUFFIX = {"counter": "_total"}


def documented() -> dict[str, tuple[str, set[str]]]:
    """The type and labels of each metric in the tables."""
    found = {}
    for line in (ROOT / "docs/metrics.md").read_text().splitlines():
        if line.startswith("| `pagoda_"):
            names, kind = line.split(" | ")[:2]
            for name, labels in re.findall(r"`(\w+)(?:\{([\w,]+)\})?`", names):
                assert name not in found
                found[name] = kind, set(labels.split(",")) if labels else set()
    return found


async def exposed(folder: Path) -> dict[str, tuple[str, set[str]]]:
    """The same of what servers say. Of a metric without samples here, the labels are taken from the tables."""
    backend = FakeBackend()
    backend.tier_reports = [report("dram", BreakerState.CLOSED, Usage(1000, 500, 400, 10, {}))]
    backend.pressure = PressureReport(memory_limit=1 << 30)
    async with run_server(backend) as live:
        text = (await live.http.get("/metrics")).text
    async with serve(folder, admin_key="root") as live:
        await ask(live, "At dawn?")
        text += (await live.http.get("/metrics", headers={"x-admin-key": "root"})).text
    found = {}
    for family in text_string_to_metric_families(text):
        if family.name.endswith("_created"):  # the client library's own
            continue
        assert family.documentation
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        name = family.name + SUFFIX.get(family.type, "")
        found[name] = family.type, labels if family.samples else documented().get(name, ("", set()))[1]
    return found


async def test_every_metric_is_documented_and_exists(folder: Path) -> None:
    assert documented() == await exposed(folder)


def test_the_grafana_dashboard_asks_for_what_there_is() -> None:
    known = documented()
    panels = json.loads((ROOT / "grafana/pagoda.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(asked) > 30
    for expression in asked:
        assert expression.count("(") == expression.count(")")
        for name in re.findall(r"pagoda_\w+", expression):
            kind, labels = known[name.removesuffix("_bucket")]
            assert name.endswith("_bucket") == (kind == "histogram")
            for group in re.findall(r"by \(([^)]*)\)", expression):
                assert set(group.split(", ")) <= labels | {"le"}
