"""The picture of KV formats is drawn from what other benchmarks write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.formats import draw, speeds


def test_it_has_every_variant_and_text(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    change = {"perplexity_change": {"value": 0.001, "low": -0.001, "high": 0.003, "n": 5}}
    names = ["int8", "int4 skip 0,1"]
    report = {
        "model": "smollm2",
        "variants": {name: {} for name in names},
        "bytes_per_token": {"full": 23040, "int8": 11880, "int4 skip 0,1": 8000.5},
        "text": {corpus: dict.fromkeys(names, change) for corpus in ("prose", "source")},
    }
    kept = tmp_path / "speeds.json"
    kept.write_text(json.dumps({"3 x 3 of 64": {"int8": 1.5, "int4": 1.9}}))
    path = tmp_path / "formats.svg"
    draw(report, speeds(kept, rounds=1), path)
    drawn = path.read_text()
    for label in (
        "int8",
        "int4 skip 0,1",
        "change of perplexity: prose, source",
        "BF16",
        "KiB a token, smollm2",
        "3 x 3 of 64",
        "1.90",
    ):
        assert f"<!-- {label} -->" in drawn
