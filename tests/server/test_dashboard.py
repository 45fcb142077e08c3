"""What the dashboard shows to whom, with the real engine, and how its page is served."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from pagoda.engine.outputs import FinishReason, MissReason, RequestStats, Usage
from pagoda.kv.keys import Scope
from pagoda.server.dashboard.recent import Recent

from .conftest import Live
from .test_cache_control import ask, folder, serve

__all__ = ["folder"]

A, ADMIN = {"x-api-key": "sk-a"}, {"x-admin-key": "root"}


async def overview(live: Live, headers: dict[str, str]) -> dict[str, Any]:
    answer = await live.http.get("/v1/kv/overview", headers=headers)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_the_operator_sees_all(folder: Path) -> None:
    async with serve(folder, admin_key="root") as live:
        empty = await overview(live, ADMIN)
        assert set(empty["map"]["uses"]) == {"."}
        assert (empty["tree"], empty["misses"], empty["tiers"]) == ([], [], [])
        assert empty["ttft"]["cold"] == {"count": 0, "p50_s": None, "p95_s": None}
        await ask(live, "At dawn?", control={"type": "ephemeral"})
        await ask(live, "At dusk?")
        await ask(live, "At noon?", key="sk-b")
        seen = await overview(live, ADMIN)
        pool, blocks = seen["pool"], seen["map"]
        assert len(blocks["uses"]) == len(blocks["owners"]) == pool["total"]
        assert blocks["uses"].count(".") == blocks["owners"].count(".") == pool["free"]
        assert blocks["uses"].count("l") == pool["leased"] > 0
        assert sorted(blocks["tenants"][:-1]) == ["acme", "bolt"]
        mine = str(blocks["tenants"].index("acme"))
        usage = {tenant["tenant"]: tenant for tenant in seen["tenants"]}
        assert blocks["owners"].count(mine) == usage["acme"]["num_blocks"]
        assert {run["tenant"] for run in seen["tree"]} == {"acme", "bolt"}
        assert any("count the boats" in run["preview"] for run in seen["tree"])
        assert (seen["requests"]["finished"], seen["ttft"]["cold"]["count"], seen["ttft"]["warm"]["count"]) == (3, 2, 1)
        assert {miss["reason"] for miss in seen["misses"]} == {"never_seen", "diverged"}
        assert seen["requests"]["hit_tokens"] > 0


async def test_what_was_purged_is_shown_no_more(folder: Path) -> None:
    async with serve(folder, admin_key="root") as live:
        await ask(live, "At dawn?")
        await ask(live, "At noon?", key="sk-b")
        assert "acme" in str((await overview(live, ADMIN))["tree"])
        await live.http.post("/v1/kv/purge", json={"tenant": "acme"}, headers=ADMIN)
        shown = (await overview(live, ADMIN))["tree"]
        assert {run["tenant"] for run in shown} == {"bolt"}
        assert "dawn" not in str(shown)
        assert any("count the boats" in run["preview"] for run in shown)


async def test_a_tenant_sees_its_own_and_no_texts(folder: Path) -> None:
    async with serve(folder, admin_key="root") as live:
        await ask(live, "At dawn?")
        await ask(live, "At noon?", key="sk-b")
        seen = await overview(live, A)
        assert "bolt" not in str(seen)
        assert "preview" not in str(seen)
        assert seen["viewer"] == "tenant"
        assert [tenant["tenant"] for tenant in seen["tenants"]] == ["acme"]
        assert {run["tenant"] for run in seen["tree"]} == {"acme"}
        own = next(tenant for tenant in seen["tenants"])["num_blocks"]
        assert seen["map"]["owners"].count("0") == own
        others = [use for use, owner in zip(seen["map"]["uses"], seen["map"]["owners"], strict=True) if owner == "1"]
        assert set(others) == {"o"}
        assert (await live.http.get("/v1/kv/overview")).status_code == 401
        assert (await live.http.get("/v1/kv/overview", headers={"x-admin-key": "wrong"})).status_code == 401


async def test_tenants_are_in_metrics_for_the_operator_only(folder: Path) -> None:
    async with serve(folder, admin_key="root") as live:
        await ask(live, "At dawn?")
        named = (await live.http.get("/metrics", headers=ADMIN)).text
        assert re.search(r'pagoda_tenant_kv_blocks\{state="cached",tenant="acme"\} [1-9]', named)
        assert re.search(r'pagoda_tenant_computed_tokens_total\{tenant="acme"\} [1-9]', named)
        assert "acme" not in (await live.http.get("/metrics")).text


async def test_the_page_is_self_contained(live: Live) -> None:
    page = await live.http.get("/dashboard")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
    assert "unsafe" not in policy
    for path in re.findall(r'(?:src|href)="([^"#]+)"', page.text):
        assert not path.startswith(("http", "//", "/"))
        if not path.startswith("data:"):
            assert (await live.http.get(f"/{path}")).status_code == 200
    assert "style=" not in page.text
    assert not re.search(r"\son\w+=", page.text)


def test_quantiles_and_misses_of_requests() -> None:
    recent = Recent()

    def finish(hit: int, ttft_s: float | None, reason: MissReason | None) -> None:
        tokens = np.zeros(100, dtype=np.int32)
        if reason is not None:
            recent.on_admitted(100, hit)
        recent.on_finished(
            RequestStats(
                "r", tokens, Scope(), FinishReason.STOP, Usage(100, hit, 1), 0, ttft_s, (), 1, reason, hit // 2
            )
        )

    for index in range(20):
        finish(0, 0.1 * (index + 1), MissReason.NEVER_SEEN)
    finish(80, 0.01, MissReason.EVICTED)
    finish(99, 0.02, MissReason.NONE)
    finish(0, None, None)  # aborted in the queue
    report = recent.report()
    assert report["ttft"]["cold"] == {"count": 20, "p50_s": 1.0, "p95_s": 1.9000000000000001}
    assert report["ttft"]["warm"]["count"] == 2
    assert report["misses"] == [
        {"reason": "never_seen", "requests": 20, "tokens": 2000},
        {"reason": "evicted", "requests": 1, "tokens": 20},
    ]
    assert report["requests"] == {
        "finished": 23,
        "query_tokens": 2200,
        "hit_tokens": 179,
        "restored_tokens": 89,
        "preemptions": 0,
    }


async def test_without_api_keys_nobody_sees_salts(folder: Path) -> None:
    async with serve(folder, keys=False, admin_key="root") as live:
        body = {"prompt": "The tide turns at the harbour. " * 3, "max_tokens": 1, "cache_salt": "kestrel"}
        assert (await live.http.post("/v1/completions", json=body)).status_code == 200
        seen = await overview(live, {})
        assert len(seen["tree"]) == 1
        assert "kestrel" not in str(seen)
        assert "kestrel" in str(await overview(live, ADMIN))


async def test_there_is_one_hit_rate(folder: Path) -> None:
    """Passages computed alone, doubted prompts and what comes from tiers: the page and the tenant count them alike."""
    passage = {"type": "text", "text": "Forty boats lie at the quay. " * 4, "cache": {"reuse": "anywhere"}}
    question = {"type": "text", "text": "When?"}
    async with serve(folder, keys=False, admin_key="root", tiers=("dram:4MiB",)) as live:
        for doubt, lead in ((0.0, "Notes: "), (1.0, "Notes of May: "), (0.0, "Notes: ")):
            prompt = [{"type": "text", "text": lead}, passage, question]
            body = {"prompt": prompt, "max_tokens": 2, "blend": {"min_confidence": doubt, "max_deviation": 100.0}}
            assert (await live.http.post("/v1/completions", json=body)).status_code == 200
            assert (await live.http.post("/v1/kv/clear", headers=ADMIN)).status_code == 200
        seen = await overview(live, ADMIN)
        [tenant], requests = seen["tenants"], seen["requests"]
        assert (tenant["num_query_tokens"], tenant["num_hit_tokens"]) == (
            requests["query_tokens"],
            requests["hit_tokens"],
        )
        metrics = (await live.http.get("/metrics")).text
        assert f"pagoda_prefix_query_tokens_total {float(requests['query_tokens'])}" in metrics
        assert f"pagoda_prefix_hit_tokens_total {float(requests['hit_tokens'])}" in metrics
