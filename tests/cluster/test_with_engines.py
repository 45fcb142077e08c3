"""The router before two real engines with tiny random models: real events, real hits, a death in the middle."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from pagoda.cli.top import Reading, screen
from pagoda.cluster.publisher import Publisher
from pagoda.cluster.router import Router, RouterConfig
from pagoda.engine.aio import AsyncEngine
from pagoda.engine.engine import Engine
from pagoda.engine.prefill_speed import PrefillSpeed
from pagoda.kv import tier_events
from tests.model import models, tokenizers_made_here
from tests.server.conftest import Live, run_server
from tests.waiting import PATIENCE_S, eventually

ANY = "tcp://127.0.0.1:*"
TOKEN = "the cluster's own"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no reason to take a replica for dead, or to place a prompt without its blocks' names."""
    monkeypatch.setattr("pagoda.cluster.fleet.NAMES_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr("pagoda.cluster.watch.TIMEOUT_S", PATIENCE_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tokenizers_made_here.byte_level()
    model = models.build("llama", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=512)
    return tokenizers_made_here.save(tokenizer, models.save(model, tmp_path_factory.mktemp("tiny")))


@dataclass
class Cluster:
    router: Router
    http: httpx.AsyncClient
    replicas: list[Live]
    engines: list[Engine]

    async def ask(self, text: str, **more: Any) -> tuple[int, int, str]:
        """The replica that answered, the prompt's tokens that were cached there, and the answer."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, **more}
        answer = await self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        told = answer.json()
        cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
        return int(answer.headers["x-pagoda-replica"]), cached, told["choices"][0]["message"]["content"]


@asynccontextmanager
async def replica(engine: Engine) -> AsyncIterator[Live]:
    publisher = Publisher(ANY, ANY, token=TOKEN)
    engine.tell_blocks(publisher.emit, TOKEN)
    serving = AsyncEngine(engine)
    publisher.tell_all = serving.tell_all_blocks
    try:
        async with run_server(serving, cluster_token=TOKEN, kv_events=publisher.ports, drain_s=1) as live:
            yield live
    finally:
        publisher.close()


@asynccontextmanager
async def cluster(folder: Path, **settings: Any) -> AsyncIterator[Cluster]:
    sizes: dict[str, Any] = {"kv_memory": "1MiB", "max_num_seqs": 16, "token_budget": 64}
    made = [Engine(str(folder), dtype="float32", progress=False, **sizes, **settings) for _ in range(2)]
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(replica(engine)) for engine in made]
        router = Router([live.url for live in replicas], RouterConfig(token=TOKEN, health_interval_s=0.05))
        await stack.enter_async_context(router.app.router.lifespan_context(router.app))
        http = await stack.enter_async_context(
            httpx.AsyncClient(transport=httpx.ASGITransport(router.app), base_url="http://router", timeout=PATIENCE_S)
        )
        fleet = Cluster(router, http, replicas, made)
        await eventually(lambda: router.placement.index.tells == [0, 1])
        yield fleet


def blocks_of(router: Router, replica: int) -> int:
    """How many blocks a router believes a replica to have."""
    media = router.placement.index._events.values()
    return sum(each >> replica & 1 for index in media for each in index._holders.values())


def text(seed: str, length: int = 400) -> str:
    return (seed + " keeps the tide and the boats of the harbour. ") * (length // 40)


async def test_a_conversation_goes_where_its_blocks_are_told_to_be(folder: Path) -> None:
    async with cluster(folder) as fleet:
        first, cached, said = await fleet.ask(text("alice"))
        assert cached == 0
        index = fleet.router.placement.index
        await eventually(lambda: index.num_blocks > 5)
        again, cached, repeated = await fleet.ask(text("alice"))
        assert (again, repeated) == (first, said)
        assert cached > 100
        other, _, _ = await fleet.ask(text("bob"))
        assert other != first
        # What a replica lost is not expected of it any more.
        await fleet.replicas[first].backend.manage(lambda cache: cache.purge_tenant(""))
        await eventually(lambda: not blocks_of(fleet.router, first))


async def test_a_router_that_starts_late_learns_what_there_is(folder: Path) -> None:
    async with cluster(folder) as fleet:
        first, _, _ = await fleet.ask(text("alice"))
        second = Router([live.url for live in fleet.replicas], RouterConfig(token=TOKEN, health_interval_s=0.05))
        async with second.app.router.lifespan_context(second.app):
            await eventually(lambda: second.placement.index.num_blocks > 5)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(second.app), base_url="http://r") as http:
                body = {"messages": [{"role": "user", "content": text("alice")}], "max_tokens": 2}
                for _ in range(2):
                    answer = await http.post("/v1/chat/completions", json=body)
                    assert answer.headers["x-pagoda-replica"] == str(first)


async def test_a_death_in_the_middle_loses_no_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(folder) as fleet:
        first, _, _ = await fleet.ask(text("alice"))
        core = fleet.engines[first].core
        monkeypatch.setattr(core, "step", lambda: time.sleep(0.01) or [])  # what it has, it does not finish
        asking = [asyncio.create_task(fleet.ask(text("alice") + str(i), max_tokens=30)) for i in range(6)]
        await eventually(lambda: core.num_waiting)
        dying = fleet.replicas[first].server
        dying.force_exit = dying.should_exit = True
        for server in dying.servers:
            server.close()
        for each in list(dying.server_state.connections):
            each.transport.abort()
        answers = await asyncio.gather(*asking)
        assert {number for number, _, _ in answers} == {1 - first}
        await eventually(lambda: not fleet.router.placement.is_up(first) and not blocks_of(fleet.router, first))


@pytest.mark.parametrize("tier", ["shm:{folder}/shared:8MiB", "file://{folder}/objects"])
async def test_what_one_computed_another_restores_from_their_shared_tier(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    if tier.startswith("file"):
        pytest.importorskip("obstore")
    # A model as tiny as this one computes faster than it restores: let the engines believe that it is slow.
    monkeypatch.setattr(PrefillSpeed, "seconds_per_token", lambda self, start, stop: 100.0)
    async with cluster(folder, tiers=[tier.format(folder=tmp_path)], secret="shared") as fleet:
        for engine in fleet.engines:
            [lane] = engine.core.cache.hierarchy.lanes  # type: ignore[attr-defined]
            lane.tier._refresh_s = 0.0  # an object store is listed every few seconds
        answers = []
        for number in "0", "1":
            body = {"messages": [{"role": "user", "content": text("alice")}], "max_tokens": 8, "temperature": 0}
            answer = await fleet.http.post("/v1/chat/completions", json=body, headers={"x-pagoda-replica": number})
            answers.append(answer.json())
            cache = fleet.engines[0].core.cache
            await asyncio.to_thread(cache.hierarchy.flush, PATIENCE_S)  # type: ignore[attr-defined]
        cold, warm = answers
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
        assert warm["choices"][0]["message"]["content"] == cold["choices"][0]["message"]["content"]
        assert fleet.engines[1].core.cache.stats.num_restored_tokens > 100


async def test_what_left_the_pool_for_a_tier_is_still_known_to_be_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_events, "LOOK_EVERY_S", 0.05)
    async with cluster(folder, tiers=["dram:8MiB"]) as fleet:
        first, _, _ = await fleet.ask(text("alice"))
        index = fleet.router.placement.index
        await eventually(lambda: blocks_of(fleet.router, first) > 5)
        await fleet.replicas[first].backend.manage(lambda cache: cache.clear())
        await eventually(lambda: not len(index._events["GPU"]) and len(index._events["CPU"]) > 5)
        again, _, _ = await fleet.ask(text("alice"))
        assert again == first


async def test_what_is_asked_of_all_is_the_sum_of_all(folder: Path) -> None:
    async with cluster(folder) as fleet:
        for number in range(2):
            body = {"messages": [{"role": "user", "content": text(f"user {number}")}], "max_tokens": 4}
            answer = await fleet.http.post("/v1/chat/completions", json=body, headers={"x-pagoda-replica": str(number)})
            assert answer.status_code == 200
        alone = [(await fleet.http.get("/v1/usage", headers={"x-pagoda-replica": n})).json() for n in ("0", "1")]
        both = (await fleet.http.get("/v1/usage")).json()
        assert both["total"]["requests"] == 2
        assert both["total"]["prompt_tokens"] == sum(each["total"]["prompt_tokens"] for each in alone)
        look = (await fleet.http.get("/v1/kv/overview")).json()
        assert look["pool"]["total"] == sum(engine.core.cache.num_blocks for engine in fleet.engines)
        assert look["requests"]["finished"] == 2
        assert {run["replica"] for run in look["tree"]} == {0, 1}
        console = Console(file=io.StringIO(), width=140)
        console.print(screen(Reading(0.0, look), Reading(1.0, look)))  # what `pagoda top` makes of it
        tree = (await fleet.http.get("/v1/kv/tree")).json()
        assert {run["replica"] for run in tree["data"]} == {0, 1}
        leases = (await fleet.http.get("/v1/kv/leases")).json()
        assert leases["data"] == []
