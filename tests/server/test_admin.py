"""/v1/kv: tenants see and end their own leases, the operator sees all, pins and clears."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from .conftest import Live
from .test_cache_control import ask, flood, folder, serve

ADMIN = {"x-admin-key": "root", "x-api-key": "sk-a"}
SHORT: dict[str, Any] = {"type": "ephemeral"}
__all__ = ["folder"]


async def leases(live: Live, **headers: str) -> list[dict[str, Any]]:
    answer = await live.http.get("/v1/kv/leases", headers=headers)
    assert answer.status_code == 200
    return list(answer.json()["data"])


async def test_tenants_see_and_end_their_own_leases_only(folder: Path) -> None:
    async with serve(folder, admin_key="root") as live:
        await ask(live, "first?", control=SHORT)
        [mine] = await leases(live, **{"x-api-key": "sk-a"})
        assert (mine["tenant"], mine["ttl_s"]) == ("acme", 300)
        assert 290 < mine["remaining_s"] <= 300
        assert mine["num_blocks"] * 16 == mine["num_tokens"]
        assert await leases(live, **{"x-api-key": "sk-b"}) == []
        assert await leases(live, **{"x-api-key": "sk-b", "x-admin-key": "wrong"}) == []
        assert len(await leases(live, **{"x-api-key": "sk-b", "x-admin-key": "root"})) == 1
        path = f"/v1/kv/leases/{mine['id']}"
        assert (await live.http.delete(path, headers={"x-api-key": "sk-b"})).status_code == 404
        assert (await live.http.delete(path, headers={"x-api-key": "sk-a"})).status_code == 200
        assert await leases(live, **{"x-api-key": "sk-a"}) == []


async def test_a_pin_holds_until_it_is_ended(folder: Path) -> None:
    async with serve(folder, admin_key="root") as live:
        body = {"prompt": "The boats of the harbour are counted at every tide, " * 4, "tenant": "acme"}
        early = await live.http.post("/v1/kv/pin", json=body, headers=ADMIN)
        assert early.status_code == 409
        assert "none in the cache" in early.json()["error"]["message"]
        request = {"prompt": body["prompt"], "max_tokens": 1}
        await live.http.post("/v1/completions", json=request, headers={"x-api-key": "sk-a"})
        pin = (await live.http.post("/v1/kv/pin", json=body, headers=ADMIN)).json()
        assert (pin["tenant"], pin["ttl_s"], pin["remaining_s"]) == ("acme", None, None)

        async def cached() -> int:
            answer = await live.http.post("/v1/completions", json=request, headers={"x-api-key": "sk-a"})
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        await flood(live)
        assert await cached() >= pin["num_tokens"] > 16
        await live.http.delete(f"/v1/kv/leases/{pin['id']}", headers=ADMIN)
        await flood(live)
        assert await cached() == 0


async def test_usage_by_tenant_and_clear(folder: Path) -> None:
    async with serve(folder, admin_key="root") as live:
        await ask(live, "first?", control=SHORT)
        await ask(live, "first?", key="sk-b")
        usage = (await live.http.get("/v1/kv", headers=ADMIN)).json()
        acme, bolt = usage["tenants"]
        assert (acme["tenant"], bolt["tenant"]) == ("acme", "bolt")
        assert acme["num_blocks"] == bolt["num_blocks"] > acme["num_leased_blocks"] > 0
        assert bolt["num_leased_blocks"] == 0
        freed = (await live.http.post("/v1/kv/clear", headers=ADMIN)).json()["freed_blocks"]
        assert freed == acme["num_blocks"] + bolt["num_blocks"] - acme["num_leased_blocks"]
        left, gone = (await live.http.get("/v1/kv", headers=ADMIN)).json()["tenants"]
        assert gone["num_blocks"] == gone["num_cached_blocks"] == 0
        assert gone["num_evicted_blocks"] == bolt["num_blocks"]
        assert gone["num_computed_tokens"] >= bolt["num_query_tokens"] - bolt["num_hit_tokens"] > 0
        assert left["num_blocks"] == left["num_leased_blocks"] == acme["num_leased_blocks"]


async def test_the_operators_routes_need_the_admin_key(folder: Path) -> None:
    routes = ("GET", "/v1/kv"), ("POST", "/v1/kv/pin"), ("POST", "/v1/kv/clear")
    wrong = {"x-api-key": "sk-a"}, {"x-admin-key": "wrong"}, {"x-admin-key": "ro\u00f6t".encode("latin-1")}
    async with serve(folder, admin_key="root") as live:
        for (method, path), headers in itertools.product(routes, wrong):
            answer = await live.http.request(method, path, json={"prompt": "x"}, headers=headers)  # type: ignore[arg-type]
            assert answer.status_code == 403
            said = "is not the server's" if "x-admin-key" in headers else "Send the server's"
            assert said in answer.json()["error"]["message"]
    async with serve(folder) as live:
        for method, path in routes:
            assert (await live.http.request(method, path, json={}, headers={"x-admin-key": ""})).status_code == 404


async def test_bad_pins(folder: Path) -> None:
    async with serve(folder, admin_key="root") as live:
        for body in ({}, {"prompt": "x", "messages": []}, {"prompt": 3}, {"prompt": "x", "ttl": 3}):
            assert (await live.http.post("/v1/kv/pin", json=body, headers=ADMIN)).status_code == 400, body
