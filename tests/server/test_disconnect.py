"""A client that leaves frees what it held, at once; a server told to stop lets streams finish, or aborts them."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from pagoda.server.stream import merge
from tests.waiting import PATIENCE_S, eventually

from .conftest import Live, run_server
from .fake_backend import FakeBackend

LONG = {"prompt": "Hello", "max_tokens": 2000}


async def until_running(live: Live, count: int = 1) -> None:
    await eventually(lambda: len(live.backend.live) >= count)


async def test_leaving_a_stream_aborts_it(live: Live) -> None:
    live.backend.step_s = 0.01
    async with live.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        lines = response.aiter_lines()
        await anext(lines)
        assert len(live.backend.live) == 1
        assert live.backend.stats().num_held_blocks > 0
    await live.until_idle()
    assert len(live.backend.aborted) == 1
    assert live.backend.stats().num_held_blocks == 0


async def test_leaving_with_the_openai_client_aborts_it(live: Live) -> None:
    live.backend.step_s = 0.01
    stream = await live.client.completions.create(model="fake", stream=True, **LONG)
    async for _ in stream:
        break
    await stream.close()
    await live.until_idle()
    assert len(live.backend.aborted) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_the_queue_aborts(live: Live, stream: bool) -> None:
    """No output has come yet, so nothing is being sent that could fail: the server must be watching."""
    live.backend.held_back.clear()
    task = asyncio.create_task(live.http.post("/v1/completions", json=LONG | {"stream": stream}))
    await until_running(live)
    task.cancel()
    await live.until_idle()
    assert len(live.backend.aborted) == 1


async def test_leaving_while_a_whole_answer_is_computed_aborts(live: Live) -> None:
    live.backend.step_s = 0.01
    task = asyncio.create_task(live.http.post("/v1/completions", json=LONG | {"prompt": ["a", "b", "c"], "n": 2}))
    await until_running(live, 3)
    task.cancel()
    await live.until_idle()
    assert len(live.backend.aborted) == 3


async def test_one_prompts_error_frees_the_others(live: Live) -> None:
    live.backend.step_s = 0.01
    response = await live.http.post("/v1/completions", json=LONG | {"prompt": ["a", "b" * 3000, "c"]})
    assert response.status_code == 400
    await live.until_idle()


async def test_the_server_still_answers_after_many_have_left(live: Live) -> None:
    live.backend.step_s = 0.01
    tasks = [asyncio.create_task(live.http.post("/v1/completions", json=LONG)) for _ in range(20)]
    await until_running(live, 20)
    for task in tasks:
        task.cancel()
    await live.until_idle()
    live.backend.step_s = 0
    assert (await live.http.post("/v1/completions", json={"prompt": "x"})).is_success


async def test_shutdown_lets_a_short_stream_finish_and_refuses_new_ones() -> None:
    async with run_server(FakeBackend(step_s=0.01), drain_s=PATIENCE_S) as live:
        await live.http.get("/health")  # a connection that is idle when the signal comes
        async with live.http.stream(
            "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 40, "stream": True}
        ) as response:
            lines = response.aiter_lines()
            await anext(lines)
            live.server.should_exit = True
            text = "".join([line async for line in lines])
        assert '"finish_reason":"length"' in text
        assert text.endswith("data: [DONE]")
        await live.serving
        with pytest.raises(httpx.TransportError):
            await live.http.get("/health")
        assert live.backend.num_stops == 1


async def test_shutdown_aborts_what_does_not_finish() -> None:
    async with run_server(FakeBackend(step_s=0.01), drain_s=0.3) as live:
        whole = asyncio.create_task(live.http.post("/v1/completions", json=LONG))
        async with live.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
            lines = response.aiter_lines()
            await anext(lines)
            live.server.should_exit = True
            events = [line[6:] async for line in lines if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert len(events) < 500  # of 2000 steps, it was given the time of 30
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "abort"
        answer = await whole
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "request_aborted"
        await live.serving
        assert live.backend.live == {}
        assert not live.backend.is_healthy


async def test_a_request_that_arrives_while_draining_is_refused() -> None:
    async with run_server(FakeBackend(step_s=0.01), drain_s=PATIENCE_S) as live:
        busy = asyncio.create_task(live.http.post("/v1/completions", json=LONG | {"max_tokens": 30}))
        await until_running(live)
        live.server._lifecycle.begin_stop()
        response = await live.http.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "shutting_down"
        assert (await busy).is_success


async def test_merge_closes_every_stream_when_closed() -> None:
    backend = FakeBackend(step_s=0.001)
    await backend.start()
    from pagoda.engine.params import SamplingParams

    merged = merge([backend.stream([1, 2, i], SamplingParams(max_tokens=500)) for i in range(4)])
    seen = {index for index, _ in [await anext(merged) for _ in range(12)]}
    assert seen == {0, 1, 2, 3}
    assert len(backend.live) == 4
    await merged.aclose()
    assert backend.live == {}


async def test_leaving_in_the_middle_of_the_body_is_nothing_special(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    port = int(live.url.rsplit(":", 1)[1])
    for _ in range(5):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n"
        )
        writer.write(head.encode() + b'{"prompt": "x')
        await writer.drain()
        await asyncio.sleep(0.02)
        writer.close()
    await asyncio.sleep(0.05)
    assert (await live.http.post("/v1/completions", json={"prompt": "x"})).is_success
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.exc_info]
