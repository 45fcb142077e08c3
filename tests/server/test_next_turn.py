"""With --prefill-next-turn the answer hits as the next prompt has it; without, only as far as its tokens come back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pagoda.engine.aio import AsyncEngine
from pagoda.engine.engine import Engine
from pagoda.engine.outputs import RequestStats, StepStats
from tests.waiting import eventually

from .conftest import Live, run_server
from .fake_backend import FakeBackend
from .test_cache_control import folder

__all__ = ["folder"]

FIRST = [{"role": "user", "content": "When do the boats leave the harbour?"}]


async def ask(live: Live, messages: list[dict[str, Any]], **fields: Any) -> tuple[str, Any]:
    answer = await live.client.chat.completions.create(
        model="any", messages=messages, temperature=0, max_tokens=20, **fields
    )
    return str(answer.choices[0].message.content), answer.usage


def second(answer: str) -> list[dict[str, Any]]:
    return [*FIRST, {"role": "assistant", "content": answer}, {"role": "user", "content": "Why?"}]


class Finished:
    """Counts requests that ended."""

    count = 0

    def on_step(self, stats: StepStats) -> None: ...

    def on_admitted(self, num_query_tokens: int, num_hit_tokens: int) -> None: ...

    def on_finished(self, stats: RequestStats) -> None:
        self.count += 1


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_next_prompt_begins_with_is_computed(stream: bool) -> None:
    backend = FakeBackend()
    async with run_server(backend, prefill_next_turn=True, served_model_names=["any"]) as live:
        body = {"messages": FIRST, "max_tokens": 5, "stream": stream}
        assert (await live.http.post("/v1/chat/completions", json=body)).status_code == 200
        await eventually(lambda: len(backend.seen) >= 2)
        await live.until_idle()
        prefill = backend.seen[1]
        assert prefill["params"].max_tokens == 0
        await ask(live, second("once "))
        prompt = backend.seen[2]["prompt"]
        assert prompt[: len(prefill["prompt"])] == prefill["prompt"]
        assert backend.tokenizer.decode(prefill["prompt"]).endswith("once \n")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_same_after_a_message_of_anthropics_api(stream: bool) -> None:
    backend = FakeBackend()
    async with run_server(backend, prefill_next_turn=True, served_model_names=["any"]) as live:
        body = {"model": "any", "messages": FIRST, "max_tokens": 5, "stream": stream}
        assert (await live.http.post("/v1/messages", json=body)).status_code == 200
        await eventually(lambda: len(backend.seen) >= 2)
        await live.until_idle()
        assert backend.seen[1]["params"].max_tokens == 0
        prefilled = backend.seen[1]["prompt"]
        await live.http.post("/v1/messages", json={**body, "messages": second("once "), "stream": False})
        assert backend.seen[2]["prompt"][: len(prefilled)] == prefilled
        assert backend.tokenizer.decode(prefilled).endswith("once \n")


@pytest.mark.parametrize("fields", [{"n": 2}, {"max_tokens": 0}])
async def test_only_a_single_answer_has_a_next_turn(fields: dict[str, Any]) -> None:
    backend = FakeBackend()
    async with run_server(backend, prefill_next_turn=True) as live:
        body = {"messages": FIRST, "max_tokens": 3, **fields}
        assert (await live.http.post("/v1/chat/completions", json=body)).status_code == 200
        await asyncio.sleep(0.05)
        assert len(backend.seen) == 1


async def test_more_of_the_next_turn_hits(folder: Path) -> None:
    hits = {}
    for prefills in (False, True):
        engine = Engine(str(folder), dtype="float32", kv_memory="2MiB", progress=False)
        options = {"served_model_names": ["any"], "drain_s": 1, "prefill_next_turn": prefills}
        async with run_server(AsyncEngine(engine), **options) as live:
            finished = Finished()
            live.backend.add_observer(finished)
            answer, _ = await ask(live, FIRST)
            await eventually(lambda finished=finished, count=1 + prefills: finished.count == count)
            _, usage = await ask(live, second(answer))
            hits[prefills] = usage.prompt_tokens_details.cached_tokens
    assert hits[True] > hits[False]


async def test_what_may_not_be_stored_is_not_stored_for_the_next_turn_either() -> None:
    backend = FakeBackend()
    async with run_server(backend, prefill_next_turn=True) as live:
        for store in (True, False):
            backend.seen.clear()
            body = {"messages": FIRST, "max_tokens": 5, "tiers": {"store": store}}
            assert (await live.http.post("/v1/chat/completions", json=body)).status_code == 200
            await eventually(lambda: len(backend.seen) >= 2)
            assert [each["params"].tier_use.store for each in backend.seen] == [store, store]
            await live.until_idle()
