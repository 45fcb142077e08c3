"""Named caches: the routes over a fake engine, and what they promise over the real one."""

from __future__ import annotations

import asyncio
import json
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pagoda.errors import ConfigError, Overloaded
from pagoda.server.auth import ApiKeys
from pagoda.server.caches import revive
from pagoda.server.named_caches import NamedCache, NamedCaches
from pagoda.server.openai import Served
from tests.waiting import PATIENCE_S, eventually

from .conftest import Live, run_server
from .fake_backend import FakeBackend
from .test_cache_control import SYSTEM, flood, folder, serve

__all__ = ["folder"]

A, B = {"x-api-key": "sk-a"}, {"x-api-key": "sk-b"}
CONTENT: dict[str, Any] = {"system": SYSTEM, "messages": [{"role": "user", "content": "Begin."}]}


@pytest.fixture
async def fake() -> AsyncIterator[Live]:
    async with run_server(FakeBackend(), api_keys=ApiKeys({"sk-a": "acme", "sk-b": "bolt"})) as live:
        yield live


async def create(live: Live, status: int = 200, key: dict[str, str] = A, **fields: Any) -> dict[str, Any]:
    answer = await live.http.post("/v1/caches", json=fields, headers=key)
    assert answer.status_code == status, answer.text
    return dict(answer.json())


async def chat(live: Live, question: str, cache: str | None, key: str = "sk-a", **more: Any) -> Any:
    client = live.client.with_options(api_key=key)
    return await client.chat.completions.create(
        model=more.pop("model", "fake"),
        messages=[{"role": "user", "content": question}],
        max_tokens=2,
        extra_body={"cached_content": cache, **more},
    )


# -- the routes --------------------------------------------------------------------------------------------------------


async def test_a_cache_lives_from_create_to_delete(fake: Live) -> None:
    before = time.time()
    made = await create(fake, **CONTENT, display_name="harbour", ttl_s=60)
    assert made["display_name"] == "harbour"
    assert made["held_tokens"] == made["num_tokens"] // 16 * 16 > 0
    assert before + 60 <= made["expires_at"] <= time.time() + 60
    assert made["usage"] == {"prompt_tokens": made["num_tokens"], "cached_tokens": 0}
    assert fake.backend.seen[-1]["params"].max_tokens == 0
    path = f"/v1/caches/{made['id']}"
    got = (await fake.http.get(path, headers=A)).json()
    assert got == {name: value for name, value in made.items() if name != "usage"}
    assert (await fake.http.get("/v1/caches", headers=A)).json()["data"] == [got]
    later = (await fake.http.patch(path, json={"ttl_s": 600}, headers=A)).json()
    assert later["expires_at"] > made["expires_at"] + 500
    assert fake.backend.leases == {("acme", made["id"]): 600}
    sooner = (await fake.http.patch(path, json={"expires_at": time.time() + 30}, headers=A)).json()
    assert sooner["expires_at"] < made["expires_at"]
    assert (await fake.http.delete(path, headers=A)).json() == {"id": made["id"], "object": "cache", "deleted": True}
    assert fake.backend.leases == {}
    assert (await fake.http.get(path, headers=A)).status_code == 404


async def test_a_request_is_rendered_after_the_content(fake: Live) -> None:
    made = await create(fake, **CONTENT)
    await chat(fake, "How many?", made["id"])
    used = fake.backend.seen[-1]["prompt"]
    client = fake.client.with_options(api_key="sk-a")
    messages = [{"role": "system", "content": SYSTEM}, *CONTENT["messages"], {"role": "user", "content": "How many?"}]
    await client.chat.completions.create(model="fake", messages=messages, max_tokens=2)
    assert used == fake.backend.seen[-1]["prompt"]
    await client.responses.create(
        model="fake", input="How many?", max_output_tokens=2, extra_body={"cached_content": made["id"]}
    )
    assert used == fake.backend.seen[-1]["prompt"]


async def test_messages_of_anthropics_api_go_on_from_it_too(fake: Live) -> None:
    made = await create(fake, **CONTENT)
    await chat(fake, "How many?", made["id"])
    used = fake.backend.seen[-1]["prompt"]
    asked = {"model": "fake", "max_tokens": 2, "messages": [{"role": "user", "content": "How many?"}]}
    body = {**asked, "cached_content": made["id"]}
    answer = await fake.http.post("/v1/messages", json=body, headers=A)
    assert answer.status_code == 200, answer.text
    assert fake.backend.seen[-1]["prompt"] == used
    counted = await fake.http.post("/v1/messages/count_tokens", json=body, headers=A)
    assert counted.json() == {"input_tokens": len(used)}
    point = {"role": "user", "content": [{"type": "text", "text": "How many?", "cache_control": {"type": "ephemeral"}}]}
    await fake.http.post("/v1/messages", json={**body, "messages": [point]}, headers=A)
    (lease,) = fake.backend.seen[-1]["leases"]
    assert made["num_tokens"] < lease.num_tokens <= len(used)  # the cut is rendered after the content as well
    for extra, word in (
        ({"system": "Be brief."}, "system is part"),
        ({"cache_salt": "x"}, "leave it out"),
        ({"tools": [{"name": "count", "input_schema": {"type": "object"}}]}, "leave them out"),
    ):
        refused = await fake.http.post("/v1/messages", json={**body, **extra}, headers=A)
        assert (refused.status_code, word in refused.json()["error"]["message"]) == (400, True), refused.text
    assert (await fake.http.post("/v1/messages", json=body, headers=B)).status_code == 404


async def test_tools_are_part_of_the_content(fake: Live) -> None:
    tool = {"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}
    made = await create(fake, **CONTENT, tools=[tool])
    await chat(fake, "How many?", made["id"])
    assert '"count"' in fake.backend.tokenizer.decode(fake.backend.seen[-1]["prompt"])
    with pytest.raises(openai.BadRequestError, match="leave them out"):
        await chat(fake, "How many?", made["id"], tools=[tool])


async def test_a_raw_prompt_is_for_completions(fake: Live) -> None:
    made = await create(fake, prompt="The tide of ")
    client = fake.client.with_options(api_key="sk-a")
    await client.completions.create(
        model="fake", prompt="Monday", max_tokens=1, extra_body={"cached_content": made["id"]}
    )
    assert bytes(fake.backend.seen[-1]["prompt"]) == b"The tide of Monday"
    with pytest.raises(openai.BadRequestError, match="/v1/completions"):
        await chat(fake, "How many?", made["id"])


async def test_nobody_else_sees_or_uses_a_cache(fake: Live) -> None:
    made = await create(fake, **CONTENT)
    path = f"/v1/caches/{made['id']}"
    nothing = (await fake.http.get("/v1/caches/cache-0", headers=B)).json()
    for method, body in (("GET", None), ("PATCH", {"ttl_s": 5}), ("DELETE", None)):
        answer = await fake.http.request(method, path, json=body, headers=B)
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == nothing["error"]["message"].replace("cache-0", made["id"])
    assert (await fake.http.get("/v1/caches", headers=B)).json()["data"] == []
    with pytest.raises(openai.NotFoundError):
        await chat(fake, "How many?", made["id"], key="sk-b")
    assert (await fake.http.get("/v1/caches")).status_code == 401
    assert fake.backend.leases == {("acme", made["id"]): pytest.approx(3600, abs=PATIENCE_S)}


async def test_one_that_expired_or_was_ended_is_gone(fake: Live) -> None:
    made = await create(fake, **CONTENT, ttl_s=0.05)
    await asyncio.sleep(0.06)
    with pytest.raises(openai.NotFoundError, match="expired"):
        await chat(fake, "How many?", made["id"])
    ended = await create(fake, **CONTENT)
    fake.backend.leases.clear()
    assert (await fake.http.get(f"/v1/caches/{ended['id']}", headers=A)).status_code == 404


@pytest.mark.parametrize("when", ["before", "after"])
async def test_refused_with_the_reason(fake: Live, when: str) -> None:
    setattr(fake.backend, "no_room" if when == "before" else "refusal", "the budget is used up")
    error = (await create(fake, 409, **CONTENT))["error"]
    assert (error["code"], error["message"]) == ("lease_refused", "Not cached: the budget is used up.")
    assert len(fake.backend.seen) == (when == "after")  # nothing is computed for what cannot be held
    assert (await fake.http.get("/v1/caches", headers=A)).json()["data"] == []


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "give a prompt"),
        ({"prompt": "x", "system": "y"}, "give a prompt"),
        ({"prompt": "x", "ttl_s": 0}, "ttl_s"),
        ({"prompt": "x", "ttl_s": 5, "expires_at": time.time() + 5}, "not both"),
        ({"prompt": "x", "expires_at": 5}, "expires_at"),
        ({"prompt": "x", "wishes": 5}, "wishes"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": "x"}], "display_name": 5}, "display_name"),
    ],
)
async def test_bad_bodies(fake: Live, fields: dict[str, Any], word: str) -> None:
    assert word in (await create(fake, 400, **fields))["error"]["message"]
    assert not fake.backend.leases


async def test_an_unknown_cache_is_a_clear_error(fake: Live) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        await chat(fake, "How many?", "cache-1")
    assert error.value.code == "cached_content_not_found"


async def test_no_tokens_only_warm_up(fake: Live) -> None:
    client = fake.client.with_options(api_key="sk-a")
    answer = await client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "x"}], max_tokens=0
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    text = await client.completions.create(model="fake", prompt="x", max_tokens=0)
    assert text.choices[0].text == ""


async def test_completions_go_on_from_a_text_and_chats_do_not(fake: Live) -> None:
    client = fake.client.with_options(api_key="sk-a")
    await client.completions.create(model="fake", prompt="x", max_tokens=1)
    assert fake.backend.seen[-1]["params"].continues_text
    await chat(fake, "x", None)
    assert not fake.backend.seen[-1]["params"].continues_text


# -- the promise -------------------------------------------------------------------------------------------------------


async def test_it_holds_under_pressure_until_it_is_deleted(folder: Path) -> None:
    async with serve(folder, eviction="lru") as live:
        made = await create(live, system=SYSTEM)
        assert live.backend.stats().num_leased_blocks * 16 == made["held_tokens"] > 64
        await flood(live)

        async def cached() -> int:
            answer = await chat(live, "How many boats?", made["id"], model="tiny")
            return int(answer.usage.prompt_tokens_details.cached_tokens)

        assert made["held_tokens"] <= await cached() <= made["num_tokens"]
        await live.http.delete(f"/v1/caches/{made['id']}", headers=A)
        await flood(live)
        again = await live.client.with_options(api_key="sk-a").chat.completions.create(
            model="tiny",
            messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": "How many?"}],
            max_tokens=1,
        )
        assert again.usage.prompt_tokens_details.cached_tokens == 0


async def test_over_budget_is_refused_and_leaves_nothing(folder: Path) -> None:
    async with serve(folder, lease_share=0.05) as live:
        error = (await create(live, 409, system=SYSTEM))["error"]
        assert "more KV blocks are needed" in error["message"]
        await flood(live)
        stats = live.backend.stats()
        assert (stats.num_leases, stats.num_leased_blocks) == (0, 0)


# -- over a restart ----------------------------------------------------------------------------------------------------


async def test_a_file_carries_them_over_a_restart(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "caches.json"
    async with serve(folder, caches=NamedCaches(path)) as live:
        made = await create(live, system=SYSTEM, display_name="harbour")
        ended = await create(live, prompt="The tide comes in. " * 9)
        await live.http.delete(f"/v1/caches/{ended['id']}", headers=A)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    async with serve(folder, caches=NamedCaches(path)) as live:
        await eventually(lambda: live.backend.stats().num_leases)
        (found,) = (await live.http.get("/v1/caches", headers=A)).json()["data"]
        assert found == {name: value for name, value in made.items() if name != "usage"}
        await flood(live)
        answer = await chat(live, "How many boats?", made["id"], model="tiny")
        assert answer.usage.prompt_tokens_details.cached_tokens >= made["held_tokens"]
        await live.http.delete(f"/v1/caches/{made['id']}", headers=A)
    assert json.loads(path.read_text()) == []


async def test_what_cannot_be_held_after_a_restart_is_forgotten(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "caches.json"
    async with serve(folder, caches=NamedCaches(path)) as live:
        await create(live, system=SYSTEM)
        await create(live, prompt="soon over " * 9, ttl_s=0.01)
    async with serve(folder, caches=NamedCaches(path), lease_share=0.05) as live:
        async with asyncio.timeout(PATIENCE_S):
            while (await live.http.get("/v1/caches", headers=A)).json()["data"]:
                await asyncio.sleep(0.01)
        assert live.backend.stats().num_leases == 0


@pytest.mark.parametrize("text", ["{", "[5]", '[{"id": 5}]', '{"id": "x"}'])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "caches.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="move it away"):
        NamedCaches(path)
    assert path.read_text() == text


# -- without API keys --------------------------------------------------------------------------------------------------


async def test_where_all_callers_are_one_tenant_a_cache_is_its_makers_by_its_id(folder: Path) -> None:
    async with serve(folder, "root", keys=False) as live:
        made = await create(live, key={}, system=SYSTEM, display_name="harbour")
        [seen] = (await live.http.get("/v1/caches")).json()["data"]
        assert seen["held_tokens"] == made["held_tokens"]
        [lease] = (await live.http.get("/v1/kv/leases")).json()["data"]
        assert not {made["id"], "harbour"} & {*seen.values(), *lease.values()}
        assert "id" not in lease
        admin = {"x-admin-key": "root"}
        assert (await live.http.get("/v1/caches", headers=admin)).json()["data"][0]["id"] == made["id"]
        [known] = (await live.http.get("/v1/kv/leases", headers=admin)).json()["data"]
        assert known["name"] == made["id"]
        assert (await live.http.delete(f"/v1/caches/{made['id']}")).status_code == 200


# -- what goes on at the same time -------------------------------------------------------------------------------------


async def test_of_those_that_are_made_at_once_no_more_are_kept_than_may_be(
    fake: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda.server.named_caches.MAX_CACHES", 2)
    fake.backend.held_back.clear()
    requests = [
        asyncio.create_task(fake.http.post("/v1/caches", json={"prompt": "x" * 40}, headers=A)) for _ in range(5)
    ]
    await eventually(lambda: len(fake.backend.seen) == 5)
    fake.backend.held_back.set()
    answers = await asyncio.gather(*requests)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 409, 409, 409]
    assert len((await fake.http.get("/v1/caches", headers=A)).json()["data"]) == len(fake.backend.leases) == 2


async def test_one_that_is_longer_than_the_context_is_refused_by_its_field(fake: Live) -> None:
    long = "x" * 3000
    for fields, param in (
        ({"prompt": long}, "prompt"),
        ({"messages": [{"role": "user", "content": long}]}, "messages"),
    ):
        error = (await create(fake, 400, **fields))["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)


async def test_a_change_that_cannot_be_written_down_is_not_made(tmp_path: Path) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    async with run_server(FakeBackend(), caches=NamedCaches(home / "caches.json")) as live:
        made = await create(live, key={}, **CONTENT)
        before, leases = (await live.http.get("/v1/caches")).json(), dict(live.backend.leases)
        path = f"/v1/caches/{made['id']}"
        home.rename(away)
        refused = {
            "Not cached": await live.http.post("/v1/caches", json=CONTENT),
            "Not changed": await live.http.patch(path, json={"ttl_s": 9}),
            "Not deleted": await live.http.delete(path),
        }
        for outcome, answer in refused.items():
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["type"]) == (503, "not_saved", "server_error")
            assert error["message"].startswith(f"{outcome}: ")
            assert "(No such file or directory)" in error["message"]
        assert (await live.http.get("/v1/caches")).json() == before
        assert live.backend.leases == leases
        away.rename(home)
        assert (await live.http.delete(path)).status_code == 200


async def test_a_purge_that_cannot_be_written_down_says_so(folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    async with serve(folder, "root", caches=NamedCaches(home / "caches.json")) as live:
        await create(live, **CONTENT)
        home.rename(tmp_path / "away")
        answer = await live.http.post("/v1/kv/purge", json={"tenant": "acme"}, headers={"x-admin-key": "root"})
        assert answer.status_code == 503
        assert answer.json()["error"]["message"].startswith("Purged, but a named cache may come back")
        assert (await live.http.get("/v1/caches", headers=A)).json()["data"] == []


def saved(path: Path) -> NamedCaches:
    """The caches of an earlier run: one of the tenant acme."""
    caches = NamedCaches(path)
    cache = NamedCache("cache-1", "acme", "fake", None, "", "x" * 40, (), (), 40, time.time() + 60)
    caches.add(cache)
    caches.save()
    return NamedCaches(path)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_one_that_is_deleted_before_it_is_leased_again_is_not_leased(tmp_path: Path, when: str) -> None:
    backend = FakeBackend()
    backend.held_back.clear()
    caches, keys = saved(tmp_path / "caches.json"), ApiKeys({"sk-a": "acme"})
    first = NamedCache("cache-0", "acme", "fake", None, "", "y" * 40, (), (), 40, time.time() + 60, is_held=False)
    if when == "before":
        caches._shelves["acme"] = {first.id: first, **caches._shelves["acme"]}
    async with run_server(backend, caches=caches, api_keys=keys) as live:
        await eventually(lambda: backend.seen)
        assert (await live.http.delete("/v1/caches/cache-1", headers=A)).status_code == 200
        backend.held_back.set()
        await live.until_idle()
        await eventually(lambda: not caches.unheld())
        await eventually(lambda: ("acme", "cache-1") not in backend.leases)
        assert len(backend.seen) == 1


async def test_one_is_not_forgotten_because_the_server_was_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FakeBackend()
    backend.overloaded = Overloaded("full", reason="queue_full", retry_after_s=0.0)
    waited: list[float] = []
    sleep = asyncio.sleep

    async def wait(seconds: float) -> None:
        if seconds:
            waited.append(seconds)
            backend.overloaded = None
        await sleep(0)

    monkeypatch.setattr("pagoda.server.caches.asyncio.sleep", wait)
    caches = saved(tmp_path / "caches.json")
    await revive(Served(backend, ("fake",), caches=caches))
    assert waited == [1.0]
    assert [cache.is_held for cache in caches.all_of("acme")] == [True]
