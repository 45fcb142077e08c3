"""/tokenize, names of blocks, and the cluster token: what a router needs of a replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from pagoda.kv.keys import Scope
from pagoda.server.auth import ApiKeys

from .conftest import Live, run_server
from .fake_backend import FakeBackend

MESSAGES = [{"role": "user", "content": "hello"}]


class NamingBackend(FakeBackend):
    """Names a block by its number, and the scope by the first block."""

    def block_names(self, prompt: Sequence[int], scope: Scope, adapter: str | None = None) -> list[int] | None:
        return [len(scope.namespace), *range(1, len(prompt) // 16)]


async def names(http: httpx.AsyncClient, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return await http.post(path, json=body, headers={"x-pagoda-block-names": "1", **headers})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5, "model": "fake"}),
        ("/v1/responses", {"input": MESSAGES}),
        ("/v1/completions", {"prompt": "x" * 40}),
    ],
)
async def test_every_api_names_its_prompts_blocks_and_runs_nothing(path: str, body: dict[str, Any]) -> None:
    backend = NamingBackend()
    async with run_server(backend) as live:
        answer = (await names(live.http, path, body)).json()
        assert answer["block_size"] == 16
        [prompt] = answer["prompts"]
        assert prompt["block_names"] == [0, *range(1, prompt["num_tokens"] // 16)]
        assert not backend.seen
        await live.http.post(path, json=body)
        assert len(backend.seen[0]["prompt"]) == prompt["num_tokens"]


async def test_names_are_the_tenants_own() -> None:
    async with run_server(NamingBackend(), api_keys=ApiKeys({"k": "acme"})) as live:
        body = {"prompt": "x" * 40}
        assert (await names(live.http, "/v1/completions", body)).status_code == 401
        answer = await names(live.http, "/v1/completions", body, authorization="Bearer k")
        assert answer.json()["prompts"][0]["block_names"][0] == len("acme")


async def test_without_events_there_are_no_names(live: Live) -> None:
    answer = await names(live.http, "/v1/chat/completions", {"messages": MESSAGES})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_block_events")


async def test_tokenize_answers_as_vllm_does(live: Live) -> None:
    asked = {"model": "fake", "prompt": "hey", "return_token_strs": True}
    answer = (await live.http.post("/tokenize", json=asked)).json()
    assert answer == {"count": 3, "max_model_len": 2048, "tokens": [104, 101, 121], "token_strs": ["h", "e", "y"]}
    chat = (await live.http.post("/tokenize", json={"messages": MESSAGES})).json()
    assert chat["token_strs"] is None
    await live.http.post("/v1/chat/completions", json={"messages": MESSAGES})
    assert chat["tokens"] == live.backend.seen[-1]["prompt"]


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": MESSAGES}, {"prompt": 7}, {"messages": [{}]}])
async def test_tokenize_names_what_is_wrong(live: Live, body: dict[str, Any]) -> None:
    answer = await live.http.post("/tokenize", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"]


async def test_a_replica_answers_holders_of_the_token_only() -> None:
    async with run_server(FakeBackend(), cluster_token="secret", kv_events={"port": 1, "replay_port": 2}) as live:
        for path in "/health", "/metrics", "/v1/models", "/dashboard":
            assert (await live.http.get(path)).status_code == 401
            assert (await live.http.get(path, headers={"x-pagoda-token": "guess"})).status_code == 401
        answer = await live.http.get("/health", headers={"x-pagoda-token": "secret"})
        assert answer.json()["kv_events"] == {"port": 1, "replay_port": 2}
