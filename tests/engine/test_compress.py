"""Level 3 on running contexts: who is compressed, in what order, what comes back, and that everybody else is not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pagoda import Engine, SamplingParams
from pagoda.engine.outputs import SparseReport
from pagoda.engine.params import BeamSearch
from pagoda.engine.pressure.config import PressureConfig
from pagoda.engine.pressure.ladder import LadderConfig, Signals
from pagoda.engine.tenants import TenantSpec
from pagoda.errors import ConfigError, InvalidRequest
from pagoda.kv.keys import Scope
from pagoda.sparse.spec import UnderPressure, parse_kv_policy
from pagoda.sparse.streaming import Streaming
from tests.sparse.conftest import llama, make_engine, text

__all__ = ["llama"]

LATE = "streaming:budget=40,interval=8,under_pressure=true"


class Bench:
    """An engine whose pressure a test sets, and what it gave out."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        ladder = LadderConfig(rise_s=0.0, fall_s=0.0)
        self.engine: Engine = make_engine(folder, pressure=PressureConfig(ladder), **options)
        self.core = self.engine.core
        self.signals = Signals()
        self.tokens: dict[str, list[int]] = {}
        self.reports: dict[str, SparseReport | None] = {}
        monkeypatch.setattr("pagoda.engine.pressure.control.LOOK_EVERY_S", 0.0)
        monkeypatch.setattr(self.core.pressure, "_measure", lambda rss: self.signals)

    def add(self, name: str, length: int, policy: str | None = LATE, tenant: str = "", **more: Any) -> None:
        wish = None if policy is None else parse_kv_policy(policy)
        settings: dict[str, Any] = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True} | more
        params = SamplingParams(kv_policy=wish, **settings)
        self.core.add(name, text(length, seed=len(name) + length), params, scope=Scope(tenant))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for output in self.core.step():
                self.tokens.setdefault(output.request_id, []).extend(output.deltas[0].token_ids)
                self.reports[output.request_id] = output.sparse
            self.core.cache.check()

    def until_generating(self) -> None:
        running = self.core._scheduler.running
        while self.core.num_waiting or any(each.num_uncomputed != 1 for each in running):
            self.step()

    def press(self, level: int) -> None:
        self.signals = Signals(failures=(0.0, 0.5, 1.0, 2.0)[level])
        for _ in range(4):
            self.core.pressure.look()
        assert self.core.pressure.report.level == level

    @property
    def compressed(self) -> set[str]:
        return {name for name, report in self.reports.items() if report is not None and report.under_pressure}

    def finish(self) -> None:
        while self.core.has_work:
            self.step()
        assert self.core.cache.num_held_blocks == 0


def test_the_longest_goes_first_and_one_a_step(llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(llama[0], monkeypatch)
    for name, length in {"short": 60, "longest": 130, "long": 100, "fits": 20}.items():
        bench.add(name, length, max_tokens=20)
    bench.until_generating()
    assert bench.compressed == set()
    held = bench.core.cache.num_held_blocks
    bench.press(2)
    bench.step()
    assert bench.compressed == set()
    bench.press(3)
    order = []
    for _ in range(4):
        before = bench.compressed
        bench.step()
        order.append(bench.compressed - before)
    assert order == [{"longest"}, {"long"}, {"short"}, set()]
    assert bench.core.cache.num_held_blocks < held
    bench.finish()
    assert bench.core.pressure.report.num_compressed == 3


def test_blocks_come_back_and_the_answer_says_so(llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(llama[0], monkeypatch)
    bench.add("r", 130)
    bench.until_generating()
    cache = bench.core.cache
    assert cache.num_held_blocks >= 130 // 8
    bench.press(3)
    bench.step()
    report = bench.reports["r"]
    assert report is not None
    assert report.under_pressure
    assert report.policy == "streaming"
    assert report.num_kept_tokens == 40
    assert cache.num_held_blocks <= -(-41 // 8)
    assert report.num_returned_blocks >= 130 // 8 - -(-41 // 8)
    bench.press(0)  # what is gone is gone: it stays under its policy
    bench.finish()
    last = bench.reports["r"]
    assert last is not None
    assert last.num_compactions > 1
    assert len(bench.tokens["r"]) == 60


def test_until_then_it_is_as_any_other_request(llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(llama[0], monkeypatch)
    bench.add("late", 100)
    bench.finish()
    bench.add("plai", 100, None)  # as long a name, so that it has the same text
    bench.finish()
    assert bench.tokens["late"] == bench.tokens["plai"]
    assert bench.reports["late"] is None


def test_a_tenant_may_allow_it_for_all_its_requests(llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = {"thrifty": TenantSpec(compress_under_pressure="streaming:budget=40,interval=8")}
    bench = Bench(llama[0], monkeypatch, tenants=tenants)
    bench.add("theirs", 100, None, "thrifty", max_tokens=20)
    bench.add("refuses", 110, "none", "thrifty", max_tokens=20)
    bench.add("others", 120, None, "someone else", max_tokens=20)
    bench.until_generating()
    bench.press(3)
    bench.step(5)
    assert bench.compressed == {"theirs"}
    bench.finish()


def test_fit_becomes_a_smaller_fit(llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(llama[0], monkeypatch, num_blocks=60)
    for name in "h2o", "streaming":
        bench.add(name, 140, f"{name}:fit", max_tokens=40)
        bench.until_generating()
        before = bench.core.cache.num_held_blocks
        bench.press(3)
        bench.step()
        assert bench.compressed >= {name}
        assert bench.core.cache.num_held_blocks < before / 2
        bench.press(0)
        bench.finish()


def test_what_others_count_on_is_left_alone(llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(llama[0], monkeypatch, kv_policy=LATE)
    bench.add("samples", 60, None, n=2, max_tokens=10, temperature=1.0, seed=1)
    bench.add("beams", 70, None, beam=BeamSearch(2), max_tokens=10, ignore_eos=False)
    bench.press(3)
    while bench.core.has_work:
        bench.core.step()
        bench.core.cache.check()
    assert bench.core.pressure.report.num_compressed == 0


def test_shared_blocks_stay_for_others(llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(llama[0], monkeypatch)
    bench.add("late", 100, max_tokens=30)
    bench.until_generating()
    bench.press(3)
    bench.step()
    assert bench.compressed == {"late"}
    bench.press(0)
    bench.add("plai", 100, None, max_tokens=30)
    bench.until_generating()
    [sample] = [each for each in bench.core._scheduler.running if each.request.request_id == "plai"]
    assert sample.request.num_hit_tokens >= 96
    bench.finish()
    alone = Bench(llama[0], monkeypatch)
    alone.add("plai", 100, None, max_tokens=30)
    alone.finish()
    assert bench.tokens["plai"] == alone.tokens["plai"]


def test_one_that_is_preempted_afterwards_comes_back_under_its_policy(
    llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(llama[0], monkeypatch)
    bench.add("r", 100, max_tokens=30)
    bench.until_generating()
    bench.press(3)
    bench.step()
    bench.core._scheduler.preempt_all()
    bench.press(0)
    bench.finish()
    assert len(bench.tokens["r"]) == 30
    assert bench.compressed == {"r"}


def test_without_room_for_the_copy_nothing_changes(llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(llama[0], monkeypatch, num_blocks=20)
    bench.add("r", 100, max_tokens=8)
    bench.until_generating()
    cache = bench.core.cache
    taken = cache.acquire(bench.core._requests["r"].prompt[:0], Scope("other"))
    cache.reserve(taken, (cache.num_blocks - cache.num_held_blocks - 1) * cache.block_size)
    bench.press(3)
    bench.core.pressure.compress()
    assert bench.core._requests["r"].samples[0].sparse is None
    assert bench.core.pressure.report.num_compressed == 0
    cache.discard(taken)
    bench.step()
    assert bench.compressed == {"r"}
    bench.finish()


@pytest.mark.parametrize(
    "given", [{"name": "h2o", "budget": 64, "under_pressure": True}, "quest:64,under_pressure=true"]
)
def test_who_must_have_seen_everything_cannot_begin_late(given: str | Mapping[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="under_pressure goes with streaming"):
        parse_kv_policy(given)


def test_what_is_read_and_what_is_refused(llama: tuple[Path, Any]) -> None:
    wanted = UnderPressure(Streaming(budget=64))
    assert parse_kv_policy("streaming:64,under_pressure=true") == wanted
    assert parse_kv_policy({"name": "streaming", "budget": 64, "under_pressure": True}) == wanted
    assert parse_kv_policy({"name": "streaming", "budget": 64, "under_pressure": False}) == Streaming(budget=64)
    for wrong in "true", 1, None:
        with pytest.raises(InvalidRequest, match="true or false"):
            parse_kv_policy({"name": "streaming", "under_pressure": wrong})
    for policy, said in {"h2o:64": "streaming", "none": "names a policy", "streaming:3": "at least"}.items():
        with pytest.raises(ConfigError, match=said):
            make_engine(llama[0], tenants={"t": TenantSpec(compress_under_pressure=policy)})
    with pytest.raises(ConfigError, match="quantized"):
        make_engine(llama[0], kv_format="int8", tenants={"t": TenantSpec(compress_under_pressure="streaming:64")})


def test_the_tenants_file_has_it() -> None:
    assert TenantSpec.from_table({"compress_under_pressure": "streaming:64"}).compress_under_pressure == "streaming:64"
    with pytest.raises(ConfigError, match="such as"):
        TenantSpec.from_table({"compress_under_pressure": 64})
