"""The tree with its texts, and purges: by tenant, prefix and request; over HTTP and by `pagoda kv`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer

from pagoda import cli
from pagoda.cli.tables import counted
from pagoda.engine.prefill_speed import PrefillSpeed
from pagoda.errors import TierUnavailable
from pagoda.kv.tiers.disk import DiskTier
from tests.waiting import PATIENCE_S

from .conftest import Live
from .test_cache_control import SYSTEM, ask, flood, folder, serve
from .test_caches import chat, create

__all__ = ["folder"]

A, B, ADMIN = {"x-api-key": "sk-a"}, {"x-api-key": "sk-b"}, {"x-admin-key": "root"}


async def tree(live: Live, headers: dict[str, str], **params: Any) -> list[dict[str, Any]]:
    answer = await live.http.get("/v1/kv/tree", headers=headers, params=params)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["data"])


async def purge(live: Live, **body: Any) -> int:
    answer = await live.http.post("/v1/kv/purge", json=body, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["purged_blocks"])


async def hit(live: Live, question: str, key: str = "sk-a") -> int:
    return int((await ask(live, question, key=key)).usage.cache_read_input_tokens)


async def test_the_tree_shows_ones_own_texts_and_the_operator_all(folder: Path) -> None:
    async with serve(folder, admin_key="root") as live:
        await ask(live, "At dawn?")
        await ask(live, "At dusk?")
        await ask(live, "At noon?", key="sk-b")
        mine = await tree(live, A)
        assert {each["tenant"] for each in mine} == {"acme"}
        assert [each["level"] for each in mine] == [0, 1, 1]
        assert "count the boats" in mine[0]["preview"]
        assert "dusk" in mine[1]["preview"]  # the last used first
        assert mine[0]["num_hits"] == 1
        assert sum(each["num_blocks"] for each in mine) == sum(-(-each["num_tokens"] // 16) for each in mine)
        assert {each["tenant"] for each in await tree(live, ADMIN)} == {"acme", "bolt"}
        assert {each["tenant"] for each in await tree(live, ADMIN, tenant="bolt")} == {"bolt"}
        cut = (await live.http.get("/v1/kv/tree?limit=1", headers=A)).json()
        assert (len(cut["data"]), cut["has_more"]) == (1, True)
        assert (await live.http.get("/v1/kv/tree?tenant=acme", headers=B)).status_code == 403
        assert (await live.http.get("/v1/kv/tree", headers={"x-admin-key": "wrong"})).status_code == 401
        assert (await live.http.get("/v1/kv/tree?limit=0", headers=A)).status_code in (400, 422)


@pytest.mark.parametrize("admin_key", [None, "root"])
async def test_without_api_keys_the_tree_shows_nobodys_texts_or_salts(folder: Path, admin_key: str | None) -> None:
    async with serve(folder, keys=False, admin_key=admin_key) as live:
        body = {"prompt": "The tide turns at the harbour. " * 3, "max_tokens": 1, "cache_salt": "mine"}
        assert (await live.http.post("/v1/completions", json=body)).status_code == 200
        answer = await live.http.get("/v1/kv/tree")
        assert len(answer.json()["data"]) == 1
        assert answer.json()["data"][0].keys().isdisjoint({"preview", "cache_salt"})
        assert "mine" not in answer.text
        shown = (await live.http.get("/v1/kv/tree", headers=ADMIN)).json()["data"]
        assert ("preview" in shown[0]) == (admin_key is not None)


async def test_a_tenant_is_purged_leases_caches_and_all(folder: Path) -> None:
    async with serve(folder, admin_key="root") as live:
        await ask(live, "At dawn?", control={"type": "ephemeral"})
        await ask(live, "At dawn?", key="sk-b")
        made = await create(live, system=SYSTEM)
        blocks = {each["tenant"]: each["num_blocks"] for each in (await usage(live))["tenants"]}
        assert await purge(live, tenant="acme") == blocks["acme"]
        left = await usage(live)
        assert [each["tenant"] for each in left["tenants"] if each["num_blocks"]] == ["bolt"]
        assert left["blocks"]["leased"] == 0
        assert await hit(live, "At dawn?") == 0
        assert await hit(live, "At dawn?", key="sk-b") > 0
        with pytest.raises(Exception, match="expired"):
            await chat(live, "How many?", made["id"], model="tiny")


@pytest.fixture
def slow_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model as tiny as this one computes faster than a busy machine restores: let engines believe that it is slow."""
    monkeypatch.setattr(PrefillSpeed, "seconds_per_token", lambda self, start, stop: 100.0)
    monkeypatch.setattr("pagoda.kv.tier_leases._DECIDE_S", PATIENCE_S)


@pytest.mark.usefixtures("slow_model")
async def test_a_tenant_is_purged_from_tiers_also_after_a_restart(folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"admin_key": "root", "tiers": [f"disk:{tmp_path / 'kv'}:64MiB?ttl=1h"], "secret": "s"}
    async with serve(folder, **settings) as live:
        for key in "sk-a", "sk-b":
            await ask(live, "At dawn?", key=key)
    async with serve(folder, **settings) as live:
        body = {"tenant": "acme"}
        answer = (await live.http.post("/v1/kv/purge", json=body, headers=ADMIN)).json()
        assert answer["purged_blocks"] == 0  # they were in the tier alone
        assert answer["purged_records"]["disk"] > 0
        assert answer["waiting_tiers"] == {}
        for tenant in "acme", "stranger":  # there is nothing of either
            gone = await live.http.post("/v1/kv/purge", json={"tenant": tenant}, headers=ADMIN)
            assert gone.status_code == 404
    async with serve(folder, **settings) as live:
        assert await hit(live, "At dawn?") == 0
        assert await hit(live, "At dawn?", key="sk-b") > 0
        tenants: dict[str, dict[str, int]] = {}
        async with asyncio.timeout(PATIENCE_S):
            while not tenants.get("bolt"):  # each look asks for what the next one tells
                tenants = {each["tenant"]: each["tier_bytes"] for each in (await usage(live))["tenants"]}
        assert tenants["bolt"]["disk"] > 0
        metrics = (await live.http.get("/metrics", headers=ADMIN)).text
        assert 'pagoda_tenant_tier_bytes{tenant="bolt",tier="disk"}' in metrics


async def test_a_tier_that_does_not_answer_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pagoda.server.admin._PURGE_WAIT_S", 0.1)

    def gone(*_: object) -> int:
        raise TierUnavailable("not now")

    async with serve(folder, admin_key="root", tiers=[f"disk:{tmp_path / 'kv'}:64MiB"]) as live:
        await ask(live, "At dawn?")
        monkeypatch.setattr(DiskTier, "_purge", gone)
        answer = (await live.http.post("/v1/kv/purge", json={"tenant": "acme"}, headers=ADMIN)).json()
        assert (answer["purged_records"], answer["waiting_tiers"]) == ({}, {"disk": 1})
        stranger = await live.http.post("/v1/kv/purge", json={"tenant": "x"}, headers=ADMIN)
        assert stranger.status_code == 200  # who knows
        command = ["pagoda", "kv", "purge", "--tenant", "acme", "--yes", "--url", live.url, "--admin-key", "root"]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit):
            await asyncio.to_thread(cli.main)
        assert "not yet purged from: disk" in capsys.readouterr().err


@pytest.mark.usefixtures("slow_model")
async def test_a_lease_that_the_pool_has_no_room_for_is_held_by_a_tier(folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"admin_key": "root", "tiers": [f"disk:{tmp_path / 'kv'}:64MiB"], "lease_share": 0.0}
    async with serve(folder, **settings) as live:
        answer = await ask(live, "At dawn?", control={"type": "ephemeral"})
        (lease,) = answer.model_extra["pagoda"]["leases"]
        assert (lease["held_in"], lease["refused"]) == ("disk", None)
        assert answer.usage.cache_creation_input_tokens == lease["leased_tokens"] > 0
        (listed,) = (await live.http.get("/v1/kv/leases", headers=A)).json()["data"]
        assert (listed["held_in"], listed["num_tokens"]) == ("disk", lease["leased_tokens"])
        assert (await usage(live))["blocks"]["leased"] == 0
    async with serve(folder, **settings) as live:
        assert await hit(live, "At dawn?") > 0


async def usage(live: Live) -> dict[str, Any]:
    return dict((await live.http.get("/v1/kv", headers=ADMIN)).json())


async def test_a_prefix_is_purged_and_what_it_shares_with_others_stays(folder: Path) -> None:
    async with serve(folder, admin_key="root") as live:
        await ask(live, "At dawn?")
        await ask(live, "At dusk?")
        system = {"role": "system", "content": SYSTEM}
        messages = [system, {"role": "user", "content": "At dawn?"}]
        assert await purge(live, tenant="acme", messages=messages) > 0
        texts = " ".join(each["preview"] for each in await tree(live, A))
        assert "dawn" not in texts
        assert "dusk" in texts
        assert await purge(live, tenant="acme", messages=[system]) > 0
        assert await tree(live, A) == []


async def test_a_request_is_purged_by_its_id(folder: Path) -> None:
    async with serve(folder, admin_key="root") as live:
        body = {"prompt": ["The tide turns at the harbour. " * 3, "Something else entirely. " * 3], "max_tokens": 1}
        answer = (await live.http.post("/v1/completions", json=body, headers=A)).json()
        await ask(live, "At dawn?")
        assert await purge(live, request_id=answer["id"]) > 0
        assert ["count the boats" in each["preview"] for each in await tree(live, A)] == [True]
        later = await live.http.get(f"/v1/kv/explain/{answer['id']}", headers=A)
        assert later.status_code == 404  # what the server remembers of it is gone too
        gone = await live.http.post("/v1/kv/purge", json={"request_id": answer["id"]}, headers=ADMIN)
        assert gone.status_code == 404


async def test_a_purge_of_a_response_or_its_tenant_ends_the_conversation(folder: Path) -> None:
    async with serve(folder, admin_key="root") as live:

        async def go_on(previous: str | None) -> httpx.Response:
            body = {"input": "The tide turns at the harbour.", "max_output_tokens": 1}
            return await live.http.post("/v1/responses", json=body | {"previous_response_id": previous}, headers=A)

        ids: list[str] = []
        for _ in range(3):
            ids.append((await go_on(ids[-1] if ids else None)).json()["id"])
        assert await purge(live, request_id=ids[1]) > 0
        assert [(await go_on(name)).status_code for name in ids] == [200, 404, 404]
        assert await purge(live, tenant="acme") > 0
        assert (await go_on(ids[0])).status_code == 404


@pytest.mark.parametrize("evicted", [False, True])
async def test_what_was_purged_is_not_told_of_those_that_went_on_differently(folder: Path, evicted: bool) -> None:
    async with serve(folder, admin_key="root") as live:
        system = {"role": "system", "content": SYSTEM}
        ids = [(await ask(live, question)).id for question in ("At dawn?", "At dusk?", "At noon?")]

        async def told(index: int) -> dict[str, Any]:
            return dict((await live.http.get(f"/v1/kv/explain/{ids[index]}", headers=A)).json())

        assert (await told(1))["text_cached"].startswith("da")
        kept = (await told(2))["text_cached"]
        assert kept.startswith("du")
        if evicted:
            await flood(live)
        messages = [system, {"role": "user", "content": "At dawn?"}]
        answer = await live.http.post("/v1/kv/purge", json={"tenant": "acme", "messages": messages}, headers=ADMIN)
        assert answer.status_code == 200
        after = await told(1)
        assert after["reason"] == "diverged"
        assert "text_cached" not in after
        assert evicted or (await told(2))["text_cached"] == kept


async def test_bad_purges(folder: Path) -> None:
    async with serve(folder, admin_key="root") as live:
        for body in (
            {},
            {"tenant": "a", "request_id": "b"},
            {"tenant": "a", "prompt": "x", "system": "y"},
            {"prompt": "x"},
            {"tenant": "acme", "cache_salt": "s"},
            {"tenant": "acme", "prompt": ""},
            {"request_id": "b", "prompt": "x"},
        ):
            assert (await live.http.post("/v1/kv/purge", json=body, headers=ADMIN)).status_code == 400, body
            assert (await live.http.post("/v1/kv/purge", json=body, headers=A)).status_code == 403, body


async def test_the_command_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*args: str) -> str:
        monkeypatch.setattr(sys, "argv", ["pagoda", *args])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        assert not exit_.value.code, err
        return out

    async with serve(folder, admin_key="root") as live:
        monkeypatch.setenv("COLUMNS", "140")
        monkeypatch.setenv("PAGODA_URL", live.url)
        monkeypatch.setenv("PAGODA_ADMIN_KEY", "root")

        async def command(*args: str) -> str:
            return await asyncio.to_thread(run, *args)

        await ask(live, "At dawn?", control={"type": "ephemeral"})
        listed = await command("kv", "ls")
        assert listed.startswith("57 blocks: ")
        assert "acme" in listed
        assert "lease-" in listed
        whole = json.loads(await command("kv", "ls", "--json"))
        assert whole["leases"][0]["tenant"] == "acme"
        shown = await command("kv", "tree")
        assert "count the boats" in shown
        assert "blocks held" in shown
        prefix = tmp_path / "messages.json"
        prefix.write_text(json.dumps([{"role": "system", "content": SYSTEM}]))
        pinned = await command("kv", "pin", "--tenant", "acme", "--messages", str(prefix))
        assert pinned.startswith("pinned ")
        lease = pinned.split()[-1]
        assert lease in await command("kv", "unpin", lease)
        used = await command("usage")
        assert "acme" in used
        assert "Since 20" in used
        assert json.loads(await command("usage", "--json"))["total"]["requests"] == 1
        asked: list[str] = []
        monkeypatch.setattr(typer, "confirm", lambda question: asked.append(question))
        for args, question in (
            (("purge", "--prompt", "At"), "Purge what begins with that prefix, of requests without a tenant, from"),
            (("purge", "--tenant", "acme", "--prompt", "At"), "what begins with that prefix, of tenant acme, from"),
            (("purge", "--tenant", "acme"), "Purge all of tenant acme, from"),
            (("purge", "--request", "r"), "Purge what request r left, from"),
            (("clear",), "Clear the cache of"),
        ):
            monkeypatch.setattr(sys, "argv", ["pagoda", "kv", *args])
            with pytest.raises(SystemExit) as declined:
                await asyncio.to_thread(cli.main)
            assert declined.value.code == 1
            assert question in asked.pop()
        monkeypatch.setenv("COLUMNS", "50")
        narrow = await command("usage")
        assert "…" not in narrow
        assert all(figure in narrow for figure in used.split() if figure[:1].isdigit())
        for args, message in (
            (("kv", "pin", "--prompt", "Never asked."), "--tenant says whose"),
            (("kv", "purge", "--tenant", "nobody", "--yes"), "has not seen a tenant 'nobody'"),
            (("kv", "purge", "--tenant", "acme", "--cache-salt", "s", "--yes"), "--cache-salt needs"),
            (("kv", "purge", "--request", "r", "--tenant", "acme", "--yes"), "--request says all"),
        ):
            monkeypatch.setattr(sys, "argv", ["pagoda", *args])
            with pytest.raises(SystemExit) as exit_:
                await asyncio.to_thread(cli.main)
            assert exit_.value.code == 2
            assert message in capsys.readouterr().err
        assert "blocks purged" in await command("kv", "purge", "--tenant", "acme", "--yes")
        assert "0 blocks freed" in await command("kv", "clear", "--yes")


def test_a_refusal_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["pagoda", "kv", "ls", "--url", "http://127.0.0.1:9"])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    assert "no server answers at http://127.0.0.1:9 (--url or PAGODA_URL" in capsys.readouterr().err


async def test_a_server_without_an_admin_key_is_said_to_have_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serve(folder) as live:
        monkeypatch.setattr(sys, "argv", ["pagoda", "kv", "purge", "--tenant", "a", "--yes", "--url", live.url])
        monkeypatch.setenv("PAGODA_API_KEY", "sk-a")
        with pytest.raises(SystemExit):
            await asyncio.to_thread(cli.main)
        assert "started with --admin-key" in capsys.readouterr().err
        monkeypatch.setattr(typer, "confirm", lambda question: pytest.fail("asked for what no route would do"))
        for command in ("clear",), ("purge", "--tenant", "a"):
            monkeypatch.setattr(sys, "argv", ["pagoda", "kv", *command, "--url", live.url])
            with pytest.raises(SystemExit) as refused:
                await asyncio.to_thread(cli.main)
            assert refused.value.code == 2
            assert "started with --admin-key" in capsys.readouterr().err


def test_one_of_a_thing_is_one() -> None:
    assert [counted(number, "hit") for number in (0, 1, 2, 1024)] == ["0 hits", "1 hit", "2 hits", "1,024 hits"]
