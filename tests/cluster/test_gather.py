"""What all replicas answer together: sums, lists with their replicas' numbers, and what happens when some do not."""

from __future__ import annotations

from typing import Any

import pytest

from pagoda.cluster.merge import added, merge_for
from tests.cluster.test_router import Bench, bench

USAGE = "/v1/usage"


def usage(tenant: str, requests: int, since: float) -> dict[str, Any]:
    row = {"tenant": tenant, "key": "k", "requests": requests, "cost": 0.5}
    return {"object": "list", "since": since, "prices": {"currency": "EUR"}, "data": [row], "total": {**row}}


def merged(method: str, path: str, answers: dict[int, Any]) -> dict[str, Any]:
    merge = merge_for(method, path)
    assert merge is not None
    return merge(answers)


def test_numbers_are_added_and_all_else_is_the_firsts() -> None:
    one = {"a": 1, "b": {"c": 0.5, "d": None}, "name": "x", "yes": True}
    other = {"a": 2, "b": {"c": 1.0, "d": 3}, "name": "y", "yes": True, "new": 4}
    assert added(one, other) == {"a": 3, "b": {"c": 1.5, "d": 3}, "name": "x", "yes": True, "new": 4}


def test_usage_is_added_up_by_tenant_and_key() -> None:
    told = merged("GET", USAGE, {0: usage("a", 3, 20.0), 1: usage("b", 1, 10.0), 2: usage("a", 4, 30.0)})
    assert told["since"] == 10.0
    assert [(row["tenant"], row["requests"], row["cost"]) for row in told["data"]] == [("a", 7, 1.0), ("b", 1, 0.5)]
    assert told["total"]["requests"] == 8
    assert told["prices"] == {"currency": "EUR"}


def test_lists_say_whose_each_entry_is() -> None:
    tree = {"object": "list", "data": [{"num_hits": 1}], "has_more": False}
    told = merged("GET", "/v1/kv/tree", {0: tree, 3: {**tree, "has_more": True}})
    assert told["data"] == [{"num_hits": 1, "replica": 0}, {"num_hits": 1, "replica": 3}]
    assert told["has_more"] is True
    caches = {"object": "list", "data": [{"id": "c"}]}
    assert merged("GET", "/v1/caches", {1: caches}) == {"object": "list", "data": [{"id": "c", "replica": 1}]}


def overview(**parts: Any) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "object": "kv.overview",
        "server": {"model": "m", "started": 1.0},
        "pool": {"total": 4, "free": 2},
        "pressure": {
            "level": 0,
            "name": "calm",
            "memory_level": 0,
            "signals": {"pool": 0.2, "queue": 0.5},
            "refused": {},
            "compressed": 1,
            "resident_bytes": 10,
            "memory_limit_bytes": 100,
        },
        "map": {
            "blocks_per_cell": 1,
            "counts": {"free": 2, "cached": 2},
            "uses": "..cc",
            "filled": None,
            "owners": "..01",
            "tenants": ["a", "b", None],
        },
        "tenants": [{"tenant": "a", "num_blocks": 1}],
        "tree": [{"num_hits": 2}],
        "tiers": [{"name": "dram", "state": "ok", "used_bytes": 5}],
        "requests": {"finished": 2},
        "ttft": {"cold": {"count": 1, "p50_s": 1.0, "p95_s": 2.0}, "warm": {"count": 0, "p50_s": None, "p95_s": None}},
        "misses": [{"reason": "cold", "requests": 1, "tokens": 9}],
    }
    return {**whole, **parts}


def test_a_look_at_all_of_them() -> None:
    one = overview()
    other = overview(
        server={"model": "m", "started": 7.0},
        pressure={
            **one["pressure"],
            "level": 4,
            "name": "hold",
            "memory_level": 1,
            "signals": {"pool": 0.9, "queue": 0.1},
        },
        map={**one["map"], "owners": "0.2.", "tenants": ["c", "b", None]},
        tiers=[{"name": "dram", "state": "out", "used_bytes": None}],
        ttft={**one["ttft"], "cold": {"count": 3, "p50_s": 2.0, "p95_s": 2.0}},
    )
    told = merged("GET", "/v1/kv/overview", {0: one, 1: other})
    assert told["server"]["started"] == 7.0  # a replica that starts anew starts rates anew
    assert told["pool"] == {"total": 8, "free": 4}
    pressure = told["pressure"]
    assert (pressure["level"], pressure["name"], pressure["signals"]) == (4, "hold", {"pool": 0.9, "queue": 0.5})
    assert pressure["memory_level"] == 1
    assert (pressure["compressed"], pressure["memory_limit_bytes"]) == (2, 200)
    assert told["map"]["counts"] == {"free": 4, "cached": 4}
    assert told["map"]["uses"] == "..cc..cc"
    assert told["map"]["tenants"] == ["a", "b", "c", None]
    assert told["map"]["owners"] == "..012.3."
    assert told["tenants"] == [{"tenant": "a", "num_blocks": 2}]
    assert [row["replica"] for row in told["tree"]] == [0, 1]
    assert told["tiers"] == [{"name": "dram", "state": "out", "used_bytes": 5}]
    assert told["requests"] == {"finished": 4}
    assert told["ttft"]["cold"] == {"count": 4, "p50_s": 1.75, "p95_s": 2.0}
    assert told["ttft"]["warm"]["p50_s"] is None
    assert told["misses"] == [{"reason": "cold", "requests": 2, "tokens": 18}]


def tell(made: Bench, path: str, *answers: Any) -> None:
    for server, answer in zip(made.fleet.servers, answers, strict=True):
        server.answers = {path: answer}


async def test_a_router_asks_all_and_says_whom() -> None:
    async with bench(token="cluster") as made:
        tell(made, USAGE, usage("a", 3, 20.0), usage("a", 4, 30.0))
        answer = await made.client.get(USAGE)
        assert answer.json()["total"]["requests"] == 7
        assert answer.headers["x-pagoda-replica"] == "0,1"
        assert made.counts() == [1, 1]
        one = await made.client.get(USAGE, headers={"x-pagoda-replica": "1"})
        assert (one.json()["total"]["requests"], one.headers["x-pagoda-replica"]) == (4, "1")


async def test_what_is_forgotten_is_forgotten_by_all() -> None:
    async with bench(3) as made:
        late: list[dict[str, int]] = [{"disk": 1}, {}, {}]
        told = [{"purged_blocks": n, "purged_records": {"dram": n}, "waiting_tiers": late.pop(0)} for n in (1, 2, 4)]
        tell(made, "/v1/kv/purge", *told)
        made.fleet.servers[1].status = 404  # it has not seen that tenant
        answer = await made.client.post("/v1/kv/purge", json={"tenant": "a"})
        done = {"purged_blocks": 5, "purged_records": {"dram": 5}, "waiting_tiers": {"disk": 1}}
        assert answer.json() == {**done, "waiting_replicas": {}}
        assert answer.headers["x-pagoda-replica"] == "0,2"
        assert {body for server in made.fleet.servers for body in server.bodies} == {b'{"tenant":"a"}'}


@pytest.mark.parametrize("how", ["fails", "is away"])
async def test_who_did_not_do_what_all_were_to_do_is_named(how: str) -> None:
    async with bench(2) as made:
        tell(made, "/v1/kv/purge", {"purged_blocks": 1}, {"purged_blocks": 2})
        if how == "fails":
            made.fleet.servers[1].status = 500
        else:
            made.fleet.servers[1].refuses = True
        for _ in range(2):  # the second time it may be known to be down
            answer = await made.client.post("/v1/kv/purge", json={"tenant": "a"})
            assert answer.json() == {"purged_blocks": 1, "waiting_replicas": {"1": 1}}


async def test_what_only_one_has_comes_from_that_one_though_the_router_has_forgotten_which() -> None:
    async with bench() as made:
        made.fleet.servers[0].status = 404
        ids = "/v1/caches/c", "/v1/kv/leases/l", "/v1/responses/r"
        made.fleet.servers[1].answers = {path: {"id": path} for path in ids}
        for method, path in ("GET", ids[0]), ("PATCH", ids[0]), ("DELETE", ids[1]), ("DELETE", ids[2]):
            answer = await made.client.request(method, path, json={})
            assert (answer.status_code, answer.headers["x-pagoda-replica"]) == (200, "1")
        made.fleet.servers[1].status = 404
        assert (await made.client.get("/v1/caches/other")).status_code == 404


async def test_one_that_fails_is_missing_and_looked_at() -> None:
    async with bench() as made:
        tell(made, USAGE, usage("a", 3, 20.0), usage("a", 4, 30.0))
        made.fleet.servers[0].refuses = True
        answer = await made.client.get(USAGE)
        assert (answer.json()["total"]["requests"], answer.headers["x-pagoda-replica"]) == (4, "1")
        await made.until_up(1)
        made.fleet.servers[1].refuses = True
        assert (await made.client.get(USAGE)).status_code == 503


async def test_if_all_refuse_the_first_refusal_is_the_answer() -> None:
    async with bench() as made:
        for server in made.fleet.servers:
            server.status = 403
        answer = await made.client.get(USAGE)
        assert (answer.status_code, answer.json()["error"]["message"]) == (403, "server0 says no")


@pytest.mark.parametrize("nonsense", [[], {"data": 7}, "text", {"data": [{}]}])
async def test_answers_that_are_none_are_an_error_and_no_crash(nonsense: Any) -> None:
    async with bench() as made:
        tell(made, USAGE, usage("a", 3, 20.0), nonsense)
        answer = await made.client.get(USAGE)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "no_merge")
