"""Pressure over HTTP: refusals in both APIs' forms, the header, bodies in memory, metrics, the overview, options."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from pagoda.cli import options
from pagoda.engine.core import EngineCore
from pagoda.engine.outputs import RequestOutput
from pagoda.engine.pressure.admission import Refusal
from pagoda.engine.pressure.config import PressureConfig
from pagoda.engine.pressure.control import LOOK_EVERY_S
from pagoda.engine.pressure.ladder import LadderConfig, Level, Signals, Thresholds
from pagoda.engine.pressure.report import PressureReport
from pagoda.errors import ConfigError, Overloaded
from pagoda.server import app as server_app
from pagoda.server.pressure import BodyBudget
from tests.waiting import PATIENCE_S, eventually

from .conftest import Live, run_server
from .fake_backend import FakeBackend
from .test_cache_control import folder, serve

__all__ = ["folder"]

ASK: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
FULL = Overloaded("The server is overloaded: 8 requests wait already.", reason="queue_full", retry_after_s=2.4)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_429_for_openais_clients(live: Live, stream: bool) -> None:
    live.backend.overloaded = FULL
    with pytest.raises(openai.RateLimitError) as refused:
        await live.client.chat.completions.create(stream=stream, **ASK)
    assert refused.value.response.headers["retry-after"] == "3"
    assert refused.value.body == {
        "message": "The server is overloaded: 8 requests wait already.",
        "type": "rate_limit_error",
        "param": None,
        "code": "queue_full",
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_429_for_anthropics_clients(live: Live, stream: bool) -> None:
    live.backend.overloaded = FULL
    async with anthropic.AsyncAnthropic(base_url=live.url, api_key="unused", max_retries=0) as client:
        with pytest.raises(anthropic.RateLimitError) as refused:
            await client.messages.create(stream=stream, **ASK)
    assert refused.value.response.headers["retry-after"] == "3"
    assert refused.value.body == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "The server is overloaded: 8 requests wait already."},
        "request_id": refused.value.response.headers["request-id"],
    }


async def test_both_clients_come_back_when_told(live: Live) -> None:
    live.backend.overloaded = Overloaded("Not now.", reason="queue_full", retry_after_s=1.0)
    asyncio.get_running_loop().call_later(0.5, lambda: setattr(live.backend, "overloaded", None))
    client = live.client.with_options(max_retries=2)
    answer = await client.chat.completions.create(**ASK)
    assert answer.choices[0].message.content


async def test_overloaded_anthropic_answers_say_when_to_retry(live: Live) -> None:
    """529 as 503 does: without the header clients would come back at once."""
    live.server._lifecycle.begin_stop()
    answer = await live.http.post("/v1/messages", json=ASK)
    assert (answer.status_code, answer.headers["retry-after"]) == (529, "1")


async def test_the_level_is_in_a_header_while_there_is_pressure(live: Live) -> None:
    assert "x-pagoda-pressure" not in (await live.http.post("/v1/chat/completions", json=ASK)).headers
    live.backend.pressure = PressureReport(Level.HOLD)
    for path, body in (("/v1/chat/completions", ASK), ("/v1/messages", ASK | {"stream": True}), ("/v1/nowhere", {})):
        assert (await live.http.post(path, json=body)).headers["x-pagoda-pressure"] == "4"
    live.backend.overloaded = FULL
    refused = await live.http.post("/v1/chat/completions", json=ASK)
    assert (refused.status_code, refused.headers["x-pagoda-pressure"]) == (429, "4")


async def test_bodies_take_no_more_memory_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_app, "MAX_BODIES_BYTES", 0)
    async with run_server(FakeBackend(), max_body_bytes=10_000) as live:

        def post(size: int) -> Any:
            return live.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 4, "user": "x" * size})

        live.backend.held_back.clear()
        first = [asyncio.create_task(post(9_000)) for _ in range(2)]
        await eventually(lambda: len(live.backend.live) >= 2)
        refused = await post(4_000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "bodies_full")
        assert refused.headers["retry-after"] == "1"
        small = asyncio.create_task(post(500))
        await eventually(lambda: len(live.backend.live) >= 3)
        live.backend.held_back.set()
        assert [(await task).status_code for task in (*first, small)] == [200, 200, 200]
        assert (await post(9_000)).status_code == 200
        metrics = (await live.http.get("/metrics")).text
        assert 'pagoda_refused_requests_total{reason="bodies_full"} 1.0' in metrics


async def test_bodies_of_clients_that_left_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_app, "MAX_BODIES_BYTES", 0)
    async with run_server(FakeBackend(), max_body_bytes=10_000) as live:
        body = {"prompt": "x", "max_tokens": 1, "user": "x" * 9_000}
        live.backend.held_back.clear()
        for _ in range(5):
            leaving = asyncio.create_task(live.http.post("/v1/completions", json=body))
            await eventually(lambda: live.backend.live)
            leaving.cancel()
            await live.until_idle()
        live.backend.held_back.set()
        assert (await live.http.post("/v1/completions", json=body)).status_code == 200


def test_a_body_that_is_refused_takes_nothing() -> None:
    bodies = BodyBudget(10)
    bodies.take(6)
    for _ in range(3):
        with pytest.raises(Overloaded):
            bodies.take(5)
    bodies.take(4)
    bodies.give_back(10)
    bodies.take(10)
    assert bodies.num_refused == 3


REPORT = PressureReport(
    Level.PREEMPT,
    Signals(pool=0.9, queue=2.0),
    {Level.SHRINK: 3, Level.PREEMPT: 1},
    {Level.CALM: 10.0, Level.PREEMPT: 2.5},
    {Refusal.QUEUE_FULL: 7},
    1 << 30,
    2 << 30,
    memory_level=Level.EVICT,
)


async def test_metrics_tell_the_level_and_what_it_cost(live: Live) -> None:
    calm = (await live.http.get("/metrics")).text
    assert "pagoda_pressure_level 0.0" in calm
    assert 'pagoda_refused_requests_total{reason="too_long"} 0.0' in calm
    live.backend.pressure = REPORT
    text = (await live.http.get("/metrics")).text
    for line in (
        "pagoda_pressure_level 5.0",
        "pagoda_pressure_memory_level 2.0",
        "pagoda_scale_out_wanted 1.0",
        'pagoda_pressure_transitions_total{level="1"} 3.0',
        'pagoda_pressure_transitions_total{level="2"} 0.0',
        'pagoda_pressure_seconds_total{level="5"} 2.5',
        'pagoda_pressure_signal{signal="queue"} 2.0',
        'pagoda_refused_requests_total{reason="queue_full"} 7.0',
        "pagoda_resident_memory_bytes 1.073741824e+09",
        "pagoda_memory_limit_bytes 2.147483648e+09",
    ):
        assert line in text, line


async def test_a_real_engine_climbs_refuses_and_comes_down(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of 25 blocks, most of which one request takes; it does not end before all was seen that it causes."""
    step, num_steps, seen = EngineCore.step, 0, threading.Event()

    def slow_step(core: EngineCore) -> list[RequestOutput]:
        nonlocal num_steps
        num_steps += 1
        seen.wait(LOOK_EVERY_S / 5)
        waits = num_steps > 100 and core.num_running + core.num_waiting == 1 and not seen.is_set()
        return [] if waits else step(core)

    monkeypatch.setattr(EngineCore, "step", slow_step)
    ladder = LadderConfig(thresholds=Thresholds(pool=(0.05, 0.1, 0.15, 0.2, 0.9)), rise_s=0.0, fall_s=0.1)
    settings = {"pressure": PressureConfig(ladder, longest_share=0.2), "keys": False, "admin_key": "root"}
    async with serve(folder, **settings) as live:
        body = {"prompt": [5 + i for i in range(100)], "max_tokens": 200, "ignore_eos": True, "temperature": 0}
        running = asyncio.create_task(live.http.post("/v1/completions", json=body))
        async with asyncio.timeout(PATIENCE_S):
            while live.backend.stats().pressure.level < Level.HOLD:
                await asyncio.sleep(0.01)
            refused = await live.http.post("/v1/completions", json=body | {"prompt": [7] * 100})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_long")
        small = await live.http.post("/v1/completions", json={"prompt": [7] * 20, "max_tokens": 4})
        assert (small.status_code, small.headers["x-pagoda-pressure"]) == (200, "4")
        state = (await live.http.get("/v1/kv/overview", headers={"x-admin-key": "root"})).json()["pressure"]
        assert (state["level"], state["name"], state["refused"]) == (4, "hold", {"too_long": 1})
        assert state["resident_bytes"] > 1 << 20
        seen.set()
        assert (await running).status_code == 200
        await eventually(lambda: not live.backend.stats().pressure.level)  # though nothing runs any more
        assert (await live.http.post("/v1/completions", json=body)).status_code == 200


def test_options_make_a_ladder(tmp_path: Path) -> None:
    assert options.pressure_config("on", None) == PressureConfig()
    assert options.pressure_config("off", None).ladder.levels == frozenset()
    assert options.pressure_config("on", "2GiB").memory_limit == 2 << 30
    path = tmp_path / "ladder.toml"
    path.write_text("levels = [4]")
    assert options.pressure_config(str(path), None).ladder.levels == {4}
    with pytest.raises(ConfigError, match="nowhere"):
        options.pressure_config(str(tmp_path / "nowhere"), None)
