"""Results -> figures -> report: the arithmetic, the loop that serves requests, and the plots' data."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.adapters.fake import FakeEngine
from benchmarks.peers.adapters.serve import Event, serve
from benchmarks.peers.measure import common_share, figures, load_at, percentile, ratio
from benchmarks.peers.messages import Request, Result, Round
from benchmarks.peers.plots import curves, draw, relative_speeds
from benchmarks.peers.process import PeerError, PeerGoneError
from benchmarks.peers.report import summary, tables
from benchmarks.peers.rounds import Contest
from benchmarks.peers.workloads import Workload


def test_serve_waits_for_predecessors_and_for_due_times() -> None:
    engine = FakeEngine({})
    requests = [Request([9], 2, after=1), Request([9], 3), Request([9], 1, at=0.05)]
    results = serve(engine, requests)
    assert engine.added == [1, 0, 2]
    assert [result.tokens for result in results] == [[0, 0], [1, 1, 1], [2]]
    assert results[0].due == results[1].end
    assert results[2].due == 0.05 <= results[2].times[0]


def test_lateness_of_a_busy_engine_counts_from_when_the_request_was_due() -> None:
    class Busy(FakeEngine):
        def step(self) -> Iterable[Event]:
            time.sleep(0.05)
            return super().step()

    results = serve(Busy({}), [Request([9], 1), Request([9], 1, at=0.01)])
    assert results[1].ttft >= 0.08


def test_an_engine_that_gives_too_much_is_an_error() -> None:
    class Greedy(FakeEngine):
        def step(self) -> Iterable[Event]:
            return [Event(0, [7, 7, 7])]

    with pytest.raises(RuntimeError, match="gave 3 tokens, 2 were asked for"):
        serve(Greedy({}), [Request([9], 2)])


def test_figures() -> None:
    found = figures([Result(0.0, [1.0, 1.1, 1.3], [5, 6, 7]), Result(1.0, [1.5], [8])])
    assert found.total_s == 1.5
    assert found.output_tok_s == pytest.approx(4 / 1.5)
    assert found.stream_tok_s == pytest.approx(2 / 0.3)
    assert (found.ttft_ms, found.ttft_p99_ms) == (750.0, 1000.0)
    assert [found.itl_ms, found.itl_p99_ms] == pytest.approx([150.0, 200.0])


def test_percentile_is_the_nearest_rank() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert percentile([float(i) for i in range(1, 101)], 0.99) == 99.0
    assert percentile([1.0, 2.0], 0.5) == 1.0


def test_load_at_interpolates_between_rates() -> None:
    curve = {1.0: 100.0, 4.0: 400.0}
    assert load_at(200.0, curve) == pytest.approx(2.0)
    assert load_at(50.0, curve) is None
    assert load_at(1000.0, curve) == 4.0
    assert load_at(100.0, {}) is None


def test_ratio_is_above_one_where_ours_is_better() -> None:
    assert ratio("output_tok_s", 300.0, 200.0) == 1.5
    assert ratio("ttft_ms", 20.0, 30.0) == 1.5


def test_common_share_ends_at_the_first_difference() -> None:
    assert common_share([[1, 2, 3, 4], [9, 9]], [[1, 2, 9, 4], [9, 9]]) == pytest.approx(4 / 6)


class FakePeer:
    """A loaded engine of a fixed speed that can fail; running while paused is an error of the harness."""

    def __init__(self, seconds: float, error: PeerError | None = None) -> None:
        self.seconds, self.error = seconds, error
        self.runs = 0
        self.paused = True

    def run(self, work: Round) -> list[Result]:
        assert not self.paused
        self.runs += 1
        if self.error:
            raise self.error
        late = work.requests[0].at * self.seconds
        return [Result(0.0, [self.seconds + late, 2 * self.seconds + late], [1, 2])]

    def resume(self) -> None:
        self.paused = False

    def pause(self) -> None:
        self.paused = True


def plain(name: str) -> Workload:
    return Workload(name, f"workload {name}", "total_s", lambda i: Round([Request([1], 2)], []))


def rated(rate: float) -> Workload:
    """A workload whose TTFT grows with its rate."""
    return Workload("g", "open loop", "ttft_p99_ms", lambda i: Round([Request([1], 2, at=rate)], []), rate)


def contest(peers: dict[str, FakePeer], workloads: list[Workload], rounds: int) -> Contest:
    found = Contest(peers, workloads, "pagoda", slow_factor=4.0, overload_ms=1000.0)  # type: ignore[arg-type]
    found.run(rounds, lambda text: None)
    assert all(peer.paused for peer in peers.values())
    return found


def test_all_take_part_in_all_rounds_but_slow_peers_only_in_the_first() -> None:
    peers = {"pagoda": FakePeer(0.9), "fast": FakePeer(0.1), "slow": FakePeer(0.5)}
    outcomes = contest(peers, [plain("a")], 3).outcomes
    assert {name: peer.runs for name, peer in peers.items()} == {"pagoda": 3, "fast": 3, "slow": 1}
    assert outcomes["a", "slow"].skipped == "slow: one round only"


def test_errors_end_a_workload_and_a_lost_process_ends_all() -> None:
    peers = {"broken": FakePeer(1, PeerError("no")), "lost": FakePeer(1, PeerGoneError("gone")), "well": FakePeer(1)}
    outcomes = contest(peers, [plain("a"), plain("b")], 2).outcomes
    assert {name: peer.runs for name, peer in peers.items()} == {"broken": 2, "lost": 1, "well": 4}
    assert outcomes["b", "lost"].skipped == "gone"


def test_overloaded_engines_are_spared_higher_rates() -> None:
    peers = {"pagoda": FakePeer(0.1), "slow": FakePeer(0.4)}
    outcomes = contest(peers, [rated(1.0), rated(2.0), rated(4.0)], 2).outcomes
    assert {name: peer.runs for name, peer in peers.items()} == {"pagoda": 6, "slow": 4}
    assert ("g@4", "slow") not in outcomes


def report_of(found: Contest) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(
        json.dumps(summary(found.workloads, list(found.peers), found.outcomes, "pagoda"))
    )
    return report


def test_report_pairs_ours_with_the_best_peer() -> None:
    peers = {"pagoda": FakePeer(0.2), "pagoda-int8": FakePeer(0.1), "vllm": FakePeer(0.3), "llama": FakePeer(0.4)}
    report = report_of(contest(peers, [plain("a"), rated(1.0), rated(4.0)], 2))
    first = report["workloads"][0]
    assert first["best_peer"] == "vllm"
    assert first["ratio"] == {
        "median": pytest.approx(1.5),
        "low": pytest.approx(1.5),
        "high": pytest.approx(1.5),
        "rounds": 2,
    }
    assert first["engines"]["llama"]["spread"]["median"] == pytest.approx(0.8)
    load = report["load"][2]
    assert load["limit_ms"] == 1000.0
    assert load["load_rps"]["pagoda"] == pytest.approx(4.0)
    assert 1 < load["load_rps"]["vllm"] < 4
    assert load["best_peer"] == "vllm"
    assert load["unsaturated"] == ["pagoda", "pagoda-int8"]
    assert load["ratio"] == pytest.approx(4.0 / load["load_rps"]["vllm"])
    assert report["agreement"]["pagoda / vllm"] == 1.0


def test_no_ratio_over_a_peer_that_no_rate_saturates() -> None:
    peers = {"pagoda": FakePeer(0.2), "vllm": FakePeer(0.3)}
    report = report_of(contest(peers, [rated(0.5), rated(2.0)], 1))
    assert [row["ratio"] is None for row in report["load"]] == [True, False, True, True]
    load_table = tables(report, list(peers), "pagoda")[1]
    assert [list(column.cells)[2] for column in load_table.columns] == ["1000 ms", ">= 2", ">= 2", ""]


def test_failed_engines_are_in_the_table_as_such(tmp_path: Path) -> None:
    peers = {"pagoda": FakePeer(0.2), "broken": FakePeer(1, PeerError("no"))}
    report = report_of(contest(peers, [plain("a")], 1))
    [figures_table, *_] = tables(report, list(peers), "pagoda")
    assert [list(column.cells) for column in figures_table.columns][3:] == [["0.4 (once)"], ["failed"], [""]]


def test_plots_are_written_for_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    peers = {"pagoda": FakePeer(0.2), "vllm": FakePeer(0.4)}
    report = report_of(contest(peers, [plain("a"), rated(1.0), rated(2.0)], 1))
    assert relative_speeds(report, list(peers), "pagoda") == {"a": {"pagoda": 1.0, "vllm": 0.5}}
    assert dict(curves(report, "ttft_ms")["pagoda"]) == pytest.approx({1.0: 400.0, 2.0: 600.0})
    paths = draw(report, list(peers), "pagoda", tmp_path)
    assert [path.name for path in paths] == ["relative.png", "open_loop.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
