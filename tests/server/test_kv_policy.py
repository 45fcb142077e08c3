"""The `kv_policy` field: it reaches the engine from every endpoint, and what it did comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from pagoda.sparse.h2o import H2O
from pagoda.sparse.spec import Full

from .conftest import Live
from .test_cache_control import folder, serve

__all__ = ["folder"]

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
BODIES = {
    "chat/completions": CHAT,
    "messages": CHAT,
    "completions": {"model": "fake", "prompt": "Hi", "max_tokens": 1},
    "responses": {"model": "fake", "input": "Hi", "max_output_tokens": 1},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("field", "policy"),
    [
        (None, None),
        ({"name": "h2o", "budget": 512}, H2O(budget=512)),
        ("h2o:512", H2O(budget=512)),
        ({"name": "none"}, Full()),
    ],
)
async def test_it_reaches_the_engine(live: Live, path: str, field: Any, policy: Any) -> None:
    assert (await live.http.post(f"/v1/{path}", json={**BODIES[path], "kv_policy": field})).status_code == 200
    assert live.backend.seen[-1]["params"].kv_policy == policy


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("field", [{"name": "h3o"}, {"name": "h2o", "budget": 1.5}, "h2o:x=1", 7, []])
async def test_what_is_wrong_is_said(live: Live, path: str, field: Any) -> None:
    answer = await live.http.post(f"/v1/{path}", json={**BODIES[path], "kv_policy": field})
    assert answer.status_code == 400
    error = answer.json()["error"]
    # Anthropic's errors name no field: what they say must do.
    assert error.get("param", "kv_policy") == "kv_policy"
    assert "kv_policy" in error["message"] or "h2o" in error["message"]


async def test_a_misspelt_field_is_refused(live: Live) -> None:
    answer = await live.http.post("/v1/chat/completions", json={**CHAT, "kv_polic": {"name": "h2o"}})
    assert answer.status_code == 400
    assert "kv_policy" in answer.text


async def test_what_it_did_comes_back(folder: Path) -> None:
    policy = {"name": "streaming", "window": 44, "interval": 8}
    said = "You count the boats of the harbour at every tide. " * 6
    chat = {"model": "tiny", "messages": [{"role": "user", "content": said}], "ignore_eos": True}
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {**chat, "max_tokens": 20},
        "messages": {**chat, "max_tokens": 20},
        "completions": {"model": "tiny", "prompt": said, "max_tokens": 20, "ignore_eos": True},
        "responses": {"model": "tiny", "input": said, "max_output_tokens": 20, "ignore_eos": True},
    }
    async with serve(folder, keys=False) as live:
        for path, body in bodies.items():
            answer = (await live.http.post(f"/v1/{path}", json={**body, "kv_policy": policy})).json()
            report = answer["pagoda"]["kv_policy"]
            assert (report["policy"], report["num_kept_tokens"]) == ("streaming", 48)
            assert report["num_returned_blocks"] > 0
            assert report["returned_bytes"] % report["num_returned_blocks"] == 0
            full = (await live.http.post(f"/v1/{path}", json=body)).json()
            assert "kv_policy" not in full.get("pagoda", {})
        metrics = (await live.http.get("/metrics")).text
        assert float(metrics.split("\npagoda_sparse_returned_blocks_total ")[1].split()[0]) > 0
        both = {**bodies["completions"], "prompt": [said, said[1:]], "kv_policy": policy}
        answer = (await live.http.post("/v1/completions", json=both)).json()
        assert [each["policy"] for each in answer["pagoda"]["kv_policy"]] == ["streaming"] * 2
        fork = {**bodies["completions"], "n": 2, "kv_policy": policy}
        answer = (await live.http.post("/v1/completions", json=fork)).json()
        assert len(answer["choices"]) == 2
        assert answer["pagoda"]["kv_policy"]["num_returned_blocks"] > 0


async def test_openais_client_sends_it_in_extra_body_and_the_server_has_a_default(folder: Path) -> None:
    async with (
        serve(folder, keys=False, kv_policy="h2o:budget=48,interval=8") as live,
        openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for body, policy in (({}, "h2o"), ({"kv_policy": "streaming:48"}, "streaming"), ({"kv_policy": "none"}, None)):
            stream = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "You count the boats of the harbour. " * 8}],
                max_tokens=20,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={**body, "ignore_eos": True},
            )
            last: Any = [chunk async for chunk in stream][-1]
            about = (last.model_extra or {}).get("pagoda", {})
            assert about.get("kv_policy", {}).get("policy") == policy
