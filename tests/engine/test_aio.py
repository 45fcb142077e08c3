"""The asyncio facade: streams, cancellation, refusal, shutdown, and an engine that dies."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda.engine.aio import AsyncEngine
from pagoda.engine.engine import Engine
from pagoda.engine.outputs import FinishReason, RequestOutput
from pagoda.engine.params import LeaseSpec, SamplingParams
from pagoda.errors import InvalidRequest, RequestAborted
from tests.engine.fakes import FakeRunner, FakeTokenizer, expected_output, make_core
from tests.waiting import PATIENCE_S, eventually

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
ENDLESS = SamplingParams(max_tokens=400, temperature=0.0)
SLOWLY_S = 0.01  # seconds a token


def make(**options: Any) -> tuple[AsyncEngine, FakeRunner]:
    core, runner = make_core(num_blocks=200, **options)
    whole = SimpleNamespace(
        core=core, model_name="fake", max_model_len=512, tokenizer=FakeTokenizer(), close=core.cache.close
    )
    return AsyncEngine(cast(Engine, whole)), runner


async def collect(engine: AsyncEngine, prompt: list[int], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    return [output async for output in engine.stream(prompt, params)]


async def until_idle(engine: AsyncEngine) -> None:
    await eventually(lambda: not (engine.stats().num_held_blocks or engine.stats().num_running))


async def test_streams_run_side_by_side() -> None:
    engine, _ = make()
    await engine.start()
    streams = await asyncio.gather(*(collect(engine, [i + 1] * (3 + i)) for i in range(10)))
    for i, outputs in enumerate(streams):
        tokens = [token for output in outputs for delta in output.deltas for token in delta.token_ids]
        assert tokens == expected_output([i + 1] * (3 + i), 6)
        assert [output.finished for output in outputs] == [False] * 5 + [True]
    await until_idle(engine)
    await engine.stop()
    assert not engine.is_healthy


async def test_a_closed_stream_frees_its_blocks() -> None:
    engine, runner = make()
    runner.seconds_per_token = SLOWLY_S
    await engine.start()
    stream = engine.stream([1, 2, 3], ENDLESS)
    await anext(stream)
    await stream.aclose()
    await until_idle(engine)
    task = asyncio.create_task(collect(engine, [1, 2, 3], ENDLESS))
    await eventually(lambda: engine.stats().num_running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_idle(engine)
    await engine.stop()


async def test_a_refusal_is_raised_in_the_stream_and_others_go_on() -> None:
    engine, _ = make()
    await engine.start()
    with pytest.raises(InvalidRequest, match="empty"):
        await collect(engine, [])
    assert (await collect(engine, [1, 2]))[-1].finished
    await engine.stop()


async def test_stop_lets_short_streams_finish_and_aborts_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = make(max_model_len=100_000)
    runner.seconds_per_token = SLOWLY_S
    await engine.start()
    short = asyncio.create_task(collect(engine, [1, 2, 3]))
    long = asyncio.create_task(collect(engine, [4, 5], SamplingParams(max_tokens=700, temperature=0.0)))
    await eventually(lambda: engine.stats().num_running == 2)
    stopping = asyncio.create_task(engine.stop(drain_s=PATIENCE_S))
    assert (await short)[-1].deltas[0].finish_reason is FinishReason.LENGTH
    loop = asyncio.get_running_loop()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + PATIENCE_S)
    await stopping
    assert (await long)[-1].deltas[0].finish_reason is FinishReason.ABORT
    with pytest.raises(RequestAborted, match="not running"):
        await collect(engine, [1])


async def test_when_the_engine_dies_streams_end_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    engine, runner = make()
    runner.seconds_per_token = SLOWLY_S
    await engine.start()
    stream = engine.stream([1, 2, 3], ENDLESS)
    await anext(stream)
    runner.fail_next = True
    with pytest.raises(RequestAborted, match="stopped"):
        async for _ in stream:
            pass
    await eventually(lambda: not engine.is_healthy)
    with pytest.raises(RequestAborted, match="not running"):
        await collect(engine, [1])


async def test_a_live_stream_is_forked() -> None:
    engine, runner = make()
    runner.seconds_per_token = SLOWLY_S
    await engine.start()
    live = engine.stream([1, 2, 3], ENDLESS, request_id="live")
    so_far = [(await anext(live)).deltas[0].token_ids[0] for _ in range(3)]
    fork = [output async for output in engine.fork("live", GREEDY)]
    [prompt_tokens] = {output.usage.num_prompt_tokens for output in fork}
    assert prompt_tokens >= 3 + len(so_far)  # the live one may have run ahead of its reader
    context = [1, 2, 3, *expected_output([1, 2, 3], prompt_tokens - 3)]
    assert [output.deltas[0].token_ids[0] for output in fork] == expected_output(context, 6)
    assert fork[-1].usage.num_hit_tokens == prompt_tokens - 1
    with pytest.raises(InvalidRequest, match="nobody"):
        await anext(engine.fork("nobody", GREEDY))
    await live.aclose()
    await until_idle(engine)
    await engine.stop()


async def test_leases_end_while_nothing_runs() -> None:
    engine, _ = make()
    await engine.start()
    outputs = [output async for output in engine.stream([1] * 12, GREEDY, leases=[LeaseSpec(12, ttl_s=0.2)])]
    assert outputs[-1].leases[0].num_tokens == 12
    await eventually(lambda: not engine.stats().num_leases)  # a snapshot: nobody asks the engine for anything
    assert engine.stats().num_held_blocks == 0
    await engine.stop()


async def test_who_asks_as_the_engine_ends_is_told() -> None:
    engine, _ = make()
    await engine.start()
    goes_on = threading.Event()
    engine._inbox.put(goes_on.wait)
    stopping = asyncio.create_task(engine.stop(drain_s=0))
    await asyncio.sleep(0.01)
    asked = asyncio.create_task(engine.manage(lambda cache: cache.clear()))
    await asyncio.sleep(0.01)
    goes_on.set()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(RequestAborted):
            await asked
        await stopping
