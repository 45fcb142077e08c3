"""The figures of the never-slower benchmark: its interval holds the truth, and its points change what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.never_slower import draw, points, ratio_interval
from pagoda.kv.tiers.fake import Faults


def test_the_interval_holds_the_ratio_and_narrows_with_rounds() -> None:
    rng = np.random.default_rng(2)

    def interval(rounds: int) -> tuple[float, float]:
        cold = rng.normal(1.0, 0.02, rounds)
        return ratio_interval((1.2 * cold).tolist(), cold.tolist())

    few, many = interval(20), interval(2000)
    assert few[0] <= 1.2001
    assert few[1] >= 1.1999
    assert many[1] - many[0] <= few[1] - few[0] + 1e-9
    assert abs(many[0] - 1.2) < 0.01


def test_points_cover_the_grid_and_change_in_mid_run() -> None:
    grid = list(points())
    steady = {(point.rate, point.delay) for point in grid if point.rate is not None}
    assert min(steady) == (0.1e9, 0.1e-3)
    assert max(steady) == (10e9, 100e-3)
    falls = next(point for point in grid if "then" in point.label)
    faults = Faults()
    falls.change(faults, 0.0)
    before = faults.bytes_per_s
    falls.change(faults, 0.9)
    assert faults.bytes_per_s < before / 100


def test_the_plot_has_every_point(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    row = {"p95_ratio": 1.0, "p95_ratio_interval": (0.9, 1.04), "median_ratio": 0.5}
    draw({"one": row, "two": row}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
