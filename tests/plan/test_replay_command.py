from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from pagoda.cli import app
from pagoda.errors import ConfigError
from pagoda.plan.replay_page import _ticks
from tests.plan.test_tiered_replay import random_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    with path.open("w") as file:
        for one in random_trace(0, 60):
            row = {
                "timestamp": 1000 * one.time,
                "input_length": one.num_prompt_tokens,
                "output_length": 2,
                "hash_ids": one.blocks.tolist(),
            }
            file.write(json.dumps(row) + "\n")
    return path


def run(*args: object) -> str:
    result = CliRunner().invoke(app, ["replay", *map(str, args)], env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_tables_of_policies_tiers_and_the_bound(trace: Path) -> None:
    out = run(trace, "--device", "640MiB", "--device", "1.5GiB", "--policy", "lru", "--tier", "dram:2GiB")
    assert "mine (mooncake): 60 requests in 1.0 min" in out
    assert out.count("belady") == 2
    assert "Bytes moved" in out


def test_json_and_what_if(trace: Path) -> None:
    found = json.loads(run(trace, "--device", "5%", "--target-hit-rate", "20%", "--json"))
    assert [point["policy"] for point in found["points"]] == ["reuse", "lru"]
    assert found["summary"]["num_requests"] == 60
    assert "requests" not in found["summary"]
    assert [answer["tier"]["name"] for answer in found["answers"]] == ["dram", "disk"]
    assert found["answers"][0]["point"]["hit_rate"] >= 0.2
    assert found["bounds"][0]["hit_rate"] >= max(point["hit_rate"] for point in found["points"])


def test_an_access_log_does_not_know_its_kv_format(tmp_path: Path) -> None:
    blocks = base64.b64encode(np.array([7, 8], dtype="<i8").tobytes()).decode()
    rows = [
        {"pagoda_access_log": 1, "model": "smollm2", "block_tokens": 16},
        *({"time": float(time), "prompt": 32, "output": 1, "hit": 0, "blocks": blocks} for time in range(3)),
    ]
    log = tmp_path / "access.log"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "kept KV: it is counted in bf16, as --kv-format says." in run(log)
    assert "kept KV: it is counted in int8, as" in run(log, "--kv-format", "int8")


def test_a_fleet(trace: Path) -> None:
    found = json.loads(run(trace, "--device", "640MiB", "--replicas", "3", "--json"))
    assert [fleet["routing"] for fleet in found["fleets"]] == ["round-robin", "least-load", "prefix-aware"]
    assert not found["points"]
    out = run(trace, "--device", "640MiB", "--replicas", "3", "--routing", "prefix-aware")
    assert "busiest / mean" in out


def test_the_page_stands_alone(trace: Path, tmp_path: Path) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "curves.png"
    run(trace, "--device", "10%", "--device", "50%", "--html", page, "--no-bound")
    text = page.read_text()
    assert text.count("<svg") == 2
    assert not any(word in text for word in ("http://", "https://", "<script", "src=", "url("))
    pytest.importorskip("matplotlib")
    run(trace, "--device", "10%", "--png", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--device", "1KiB"), "not one of the trace's blocks"),
        (("--device", "0%"), "not a share"),
        (("--target-hit-rate", "much"), "not a share"),
        (("--policy", "random"), "no eviction policy"),
        (("--tier", "dram:1KiB"), "too small"),
        (("--format", "parquet"), "no trace format"),
        (("--html", "/nowhere/page.html"), "cannot write"),
        (("--replicas", "2", "--routing", "chance"), "no routing policy"),
    ],
)
def test_a_wrong_setting_is_named(trace: Path, args: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(trace, *args)


@pytest.mark.parametrize(
    ("most", "step", "end"),
    [(1.0, 0.2, 1.0), (0.37, 0.1, 0.4), (2856.0, 1000.0, 3000.0), (0.004, 0.001, 0.004), (7.0, 2.0, 8.0)],
)
def test_axes_end_at_round_numbers(most: float, step: float, end: float) -> None:
    assert _ticks(most) == (pytest.approx(step), pytest.approx(end))
