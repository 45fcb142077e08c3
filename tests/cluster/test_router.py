"""The router over fake servers: nothing is lost that could be saved, and what is lost is said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from pagoda.cluster.router import Router, RouterConfig
from pagoda.errors import ConfigError
from pagoda.kv.events import BlocksCleared, BlockStored
from tests.waiting import PATIENCE_S, eventually

from .fake_fleet import FakeFleet

CHAT = "/v1/chat/completions"
LONG = "You are a careful helper. " * 60


class Bench:
    def __init__(self, fleet: FakeFleet, router: Router, client: httpx.AsyncClient) -> None:
        self.fleet = fleet
        self.router = router
        self.client = client

    async def chat(
        self, text: str = "hello", path: str = CHAT, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "system", "content": LONG}, {"role": "user", "content": text}]}
        return await self.client.post(path, json={**body, **fields}, headers=headers or {})

    def counts(self) -> list[int]:
        return [len(server.requests) for server in self.fleet.servers]

    async def until_up(self, *numbers: int) -> None:
        placement = self.router.placement
        await eventually(lambda: [n for n in range(len(self.fleet.servers)) if placement.is_up(n)] == list(numbers))

    def metric(self, name: str) -> float:
        lines = self.router.metrics.render().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"pagoda_router_{name}"))


@asynccontextmanager
async def bench(count: int = 2, **settings: Any) -> AsyncIterator[Bench]:
    fleet = FakeFleet(count)
    router = Router(fleet.urls, RouterConfig(**{"health_interval_s": 0.01, **settings}), transport=fleet)
    async with (
        router.app.router.lifespan_context(router.app),
        httpx.AsyncClient(transport=httpx.ASGITransport(router.app), base_url="http://router") as client,
    ):
        made = Bench(fleet, router, client)
        await made.until_up(*range(count))
        yield made
        assert router._num_in_flight == 0
        assert [router.placement.load(number) for number in range(count)] == [0] * count


async def test_an_answer_comes_back_whole_with_who_gave_it() -> None:
    async with bench() as made:
        answer = await made.chat()
        number = int(answer.headers["x-pagoda-replica"])
        name = f"server{number}"
        assert answer.text == "".join(f"data: {name} {i}\n\n" for i in range(3))
        sent = made.fleet.servers[number].requests[0]
        assert json.loads(made.fleet.servers[number].bodies[0])["messages"][1]["content"] == "hello"
        assert sent.headers["host"] == f"host{number}"
        assert sent.headers["accept-encoding"] == made.client.headers["accept-encoding"]
        assert answer.headers["x-request-id"] == f"{name}-1"


async def test_a_conversation_stays_and_others_spread() -> None:
    async with bench() as made:
        first = (await made.chat("a" * 900)).headers["x-pagoda-replica"]
        assert {(await made.chat("a" * 900 + str(i))).headers["x-pagoda-replica"] for i in range(5)} == {first}
        other = await made.chat(model="another")
        assert other.headers["x-pagoda-replica"] != first


@pytest.mark.parametrize("fault", [{"refuses": True}, {"breaks_after": 0}, {"status": 503}, {"status": 429}])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_got_nothing_is_answered_by_another(fault: dict[str, Any], stream: bool) -> None:
    async with bench(health_interval_s=PATIENCE_S) as made:  # no look at health finds the fault first
        first = int((await made.chat()).headers["x-pagoda-replica"])
        for name, value in fault.items():
            setattr(made.fleet.servers[first], name, value)
        answer = await made.chat(stream=stream)
        assert answer.status_code == 200
        assert answer.headers["x-pagoda-replica"] == str(1 - first)
        assert made.metric("retries_total") == 1


async def test_an_answer_in_one_piece_is_saved_even_from_its_middle() -> None:
    async with bench() as made:
        first = int((await made.chat()).headers["x-pagoda-replica"])
        made.fleet.servers[first].breaks_after = 2
        answer = await made.chat()
        assert answer.text.count(f"server{1 - first}") == 3
        assert f"server{first}" not in answer.text


@pytest.mark.parametrize(("path", "said"), [(CHAT, "server_error"), ("/v1/messages", "event: error\n")])
async def test_a_stream_that_breaks_ends_with_an_error_of_its_api(path: str, said: str) -> None:
    async with bench() as made:
        for server in made.fleet.servers:
            server.breaks_after = 2
        answer = await made.chat(path=path, stream=True)
        assert answer.status_code == 200
        pieces = answer.text.strip().split("\n\n")
        assert len([piece for piece in pieces if "server" in piece and "error" not in piece]) == 2
        assert said in answer.text
        assert "incomplete" in json.loads(answer.text.strip().rpartition("data: ")[2])["error"]["message"]
        assert made.metric("broken_streams_total") == 1


async def test_a_dead_replica_gets_nothing_until_it_is_back() -> None:
    async with bench() as made:
        first = int((await made.chat()).headers["x-pagoda-replica"])
        made.fleet.servers[first].refuses = True
        await made.until_up(1 - first)
        assert {(await made.chat(str(i))).headers["x-pagoda-replica"] for i in range(4)} == {str(1 - first)}
        health = (await made.client.get("/health")).json()
        assert [replica["up"] for replica in health["replicas"]] == [first == 1, first == 0]
        made.fleet.servers[first].refuses = False
        await made.until_up(0, 1)
        spread = {(await made.chat(model=f"m{i}")).headers["x-pagoda-replica"] for i in range(4)}
        assert spread == {"0", "1"}


async def test_sick_is_as_good_as_dead() -> None:
    async with bench() as made:
        for status in 500, 401:  # the latter: it is another cluster's
            made.fleet.servers[0].health_status = status
            await made.until_up(1)
            made.fleet.servers[0].health_status = 200
            await made.until_up(0, 1)
        made.fleet.servers[0].health_status = 500
        await made.until_up(1)
        made.fleet.servers[1].health_status = 404  # some servers have no /health
        await asyncio.sleep(0.05)
        assert made.router.placement.is_up(1)


async def test_without_replicas_the_client_is_told_to_come_back() -> None:
    async with bench() as made:
        for server in made.fleet.servers:
            server.refuses = True
        await made.until_up()
        answer = await made.chat()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == "no_replica"
        assert (await made.client.get("/health")).status_code == 503
        assert answer.headers["x-request-id"]
        refused = await made.chat(path="/v1/messages")
        assert refused.json()["type"] == "error"
        assert refused.json()["request_id"] == refused.headers["request-id"]


async def test_a_busy_replicas_refusal_comes_through_if_all_are_busy() -> None:
    async with bench() as made:
        for server in made.fleet.servers:
            server.status = 503
        answer = await made.chat()
        assert (answer.status_code, answer.json()["error"]["message"][-7:]) == (503, "says no")
        assert made.counts() == [1, 1]


async def test_a_clients_own_mistake_is_not_tried_twice() -> None:
    async with bench() as made:
        for server in made.fleet.servers:
            server.status = 400
        assert (await made.chat()).status_code == 400
        assert sum(made.counts()) == 1


async def test_a_client_that_leaves_frees_its_replica() -> None:
    async with bench() as made:
        for server in made.fleet.servers:
            server.waits = asyncio.Event()
        await _ask_and_leave(made)
        assert made.router._num_in_flight == 0
        assert sum(server.num_closed for server in made.fleet.servers) == 1


async def _ask_and_leave(made: Bench) -> None:
    """Call the application as a server does, and leave once the replica has the request."""
    body = json.dumps({"messages": [], "stream": True}).encode()
    given = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if given:
            return given.pop()
        while not sum(made.counts()):
            await asyncio.sleep(0.002)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 499

    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("router", 80),
        "client": ("client", 1),
        "root_path": "",
    }
    async with asyncio.timeout(PATIENCE_S):
        await made.router.app(scope, receive, send)  # type: ignore[arg-type]


async def test_blocks_are_asked_for_where_events_are_told() -> None:
    async with bench() as made:
        index = made.router.placement.index
        for number, server in enumerate(made.fleet.servers):
            server.block_names = [1, 2, 3]
            index.apply(number, BlocksCleared())
        index.apply(1, BlockStored((1, 2, 3), None, (), 16))
        assert {(await made.chat(str(i))).headers["x-pagoda-replica"] for i in range(4)} == {"1"}
        assert made.metric("known_tokens_total") == 4 * 48


@pytest.mark.parametrize("told", [None, [-1], ["x"], [1 << 64]])
async def test_a_replica_that_tells_nonsense_costs_nothing_but_accuracy(told: Any) -> None:
    async with bench() as made:
        made.router.placement.index.apply(0, BlocksCleared())
        for server in made.fleet.servers:
            server.block_names = told
        assert (await made.chat()).status_code == 200
        assert made.metric("unnamed_prompts_total") == 1


async def test_a_replica_can_be_asked_for_by_number() -> None:
    async with bench() as made:
        for number in "1", "0", "1":
            answer = await made.chat(headers={"x-pagoda-replica": number})
            assert answer.headers["x-pagoda-replica"] == number
        for wrong in "2", "-1", "x":
            assert (await made.chat(headers={"x-pagoda-replica": wrong})).status_code == 400
        made.fleet.servers[1].refuses = True
        assert (await made.chat(headers={"x-pagoda-replica": "1"})).status_code == 503


async def test_a_stored_response_is_gone_on_with_where_it_is() -> None:
    async with bench() as made:
        first = await made.chat(path="/v1/responses", input="hello")
        for text in "a", "b", "c":
            again = await made.chat(text, path="/v1/responses", previous_response_id=first.headers["x-request-id"])
            assert again.headers["x-pagoda-replica"] == first.headers["x-pagoda-replica"]


async def test_a_named_cache_is_used_and_changed_where_it_is() -> None:
    async with bench() as made:
        for text in "a", "b", "c":  # made on either of them
            first = await made.client.post("/v1/caches", json={"prompt": text})
            owner, name = first.headers["x-pagoda-replica"], first.headers["x-request-id"]
            for again in "d", "e", "f":
                answer = await made.chat(again, cached_content=name)
                assert answer.headers["x-pagoda-replica"] == owner
            for method in "GET", "PATCH", "DELETE":
                answer = await made.client.request(method, f"/v1/caches/{name}", json={})
                assert answer.headers["x-pagoda-replica"] == owner


async def test_a_session_stays_whatever_it_says() -> None:
    async with bench() as made:
        answers = [await made.chat(model=f"m{i}", headers={"x-session-id": "s"}) for i in range(4)]
        assert len({answer.headers["x-pagoda-replica"] for answer in answers}) == 1


async def test_other_paths_are_passed_on() -> None:
    async with bench() as made:
        answer = await made.client.get("/v1/models?limit=2")
        assert answer.status_code == 200
        [request] = [request for server in made.fleet.servers for request in server.requests]
        assert (request.method, str(request.url)[-18:]) == ("GET", "/v1/models?limit=2")


async def test_keys_and_tokens() -> None:
    async with bench(api_key="mine", backend_key="theirs", token="cluster") as made:
        assert (await made.chat()).status_code == 401
        assert (await made.chat(headers={"authorization": "Bearer wrong"})).status_code == 401
        for headers in {"authorization": "Bearer mine"}, {"x-api-key": "mine", "x-pagoda-token": "forged"}:
            assert (await made.chat(headers=headers)).status_code == 200
        for request in (request for server in made.fleet.servers for request in server.requests):
            assert request.headers["authorization"] == "Bearer theirs"
            assert "x-api-key" not in request.headers
            assert request.headers["x-pagoda-token"] == "cluster"


async def test_a_client_cannot_send_a_token_or_ask_for_names() -> None:
    async with bench() as made:
        answer = await made.chat(headers={"x-pagoda-token": "forged", "x-pagoda-block-names": "1"})
        assert answer.status_code == 200
        [request] = [request for server in made.fleet.servers for request in server.requests]
        assert not {"x-pagoda-token", "x-pagoda-block-names"} & request.headers.keys()


async def test_bodies_are_bounded_and_read_strictly() -> None:
    async with bench(max_body_bytes=5000) as made:
        assert (await made.chat("x" * 5000)).status_code == 413
        assert (await made.client.put("/v1/files", content=b"x" * 6000)).status_code == 413
        for content in b"{", b"[]", b"\xff", b"[" * 4000:
            answer = await made.client.post(CHAT, content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 400
        assert made.counts() == [0, 0]


@pytest.mark.parametrize("depth", [300, 600, 900])
async def test_what_is_nested_deeply_is_answered_or_refused(depth: int) -> None:
    async with bench() as made:
        content = '{"messages": [], "tools": ' + '{"a": ' * depth + "1" + "}" * depth + "}"
        answer = await made.client.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400)


@pytest.mark.parametrize("number", ["2", "-1", "x", "9" * 5000])
async def test_who_is_no_replica_is_refused(number: str) -> None:
    async with bench() as made:
        assert (await made.chat(headers={"x-pagoda-replica": number})).status_code == 400


async def test_figures_are_told() -> None:
    async with bench() as made:
        await made.chat()
        text = (await made.client.get("/metrics")).text
        for name in "requests_total", "replica_up", "load_tokens", "first_byte_seconds_count", "decision_seconds_count":
            assert f"pagoda_router_{name}" in text


@pytest.mark.parametrize("urls", ["", "http://a http://a", "ftp://a", "http://a/v1", "nonsense", "http://a:x"])
def test_wrong_backends_are_named(urls: str) -> None:
    with pytest.raises(ConfigError):
        Router(urls.split())


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="max_body_bytes"):
        RouterConfig(max_body_bytes=0)
    with pytest.raises(ConfigError, match="prefix-aware"):
        Router(["http://a"], RouterConfig(policy="random"))
