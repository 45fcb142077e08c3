"""Leases asked for over HTTP, with the real engine: kept under a flood, refused beyond the budget, and private."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest

from pagoda.engine.aio import AsyncEngine
from pagoda.engine.engine import Engine
from pagoda.server.auth import ApiKeys
from pagoda.server.named_caches import NamedCaches
from pagoda.server.public_prefixes import PublicPrefixes
from tests.model import models, tokenizers_made_here

from .conftest import Live, run_server

SYSTEM = "You count the boats of the harbour at every tide, and you write down the hour of each of them. " * 3
KEYS = {"sk-a": "acme", "sk-b": "bolt"}
_numbers = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tokenizers_made_here.byte_level()
    model = models.build("llama", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=512)
    folder = models.save(model, tmp_path_factory.mktemp("tiny"))
    return tokenizers_made_here.save(tokenizer, folder)


@asynccontextmanager
async def serve(
    folder: Path,
    admin_key: str | None = None,
    port: int = 0,
    *,
    keys: bool = True,
    caches: NamedCaches | None = None,
    public: PublicPrefixes | None = None,
    **settings: Any,
) -> AsyncIterator[Live]:
    engine = Engine(
        str(folder),
        **{"dtype": "float32", "kv_memory": "600KiB", "max_num_seqs": 8, "token_budget": 64, "progress": False}
        | settings,
    )
    options = {
        "api_keys": ApiKeys(KEYS) if keys else None,
        "admin_key": admin_key,
        "served_model_names": ["tiny"],
        "drain_s": 1,
        "caches": caches,
        "public": public,
    }
    async with run_server(AsyncEngine(engine), port, **options) as live:
        yield live


async def ask(
    live: Live, question: str, key: str = "sk-a", control: dict[str, Any] | None = None, **fields: Any
) -> Any:
    block = {"type": "text", "text": SYSTEM} | ({"cache_control": control} if control else {})
    async with anthropic.AsyncAnthropic(base_url=live.url, api_key=key, max_retries=0) as client:
        return await client.messages.create(
            model="tiny",
            max_tokens=2,
            system=[block],
            messages=[{"role": "user", "content": question}],
            extra_body=fields,
        )


async def flood(live: Live, key: str = "sk-b") -> None:
    """New prompts of 2,400 tokens, over twice what the pool holds."""
    for index in itertools.islice(_numbers, 12):
        body = {"prompt": [5 + (index + i * i) % 200 for i in range(200)], "max_tokens": 1}
        answer = await live.http.post("/v1/completions", json=body, headers={"x-api-key": key})
        assert answer.status_code == 200


async def test_a_lease_holds_where_an_unleased_prefix_is_evicted(folder: Path) -> None:
    async with serve(folder) as live:
        await ask(live, "first?")
        await flood(live)
        assert (await ask(live, "second?")).usage.cache_read_input_tokens == 0
        created = (await ask(live, "third?", control={"type": "ephemeral", "ttl": "1h"})).usage
        assert created.cache_read_input_tokens > 0
        leased = live.backend.stats().num_leased_blocks * 16
        assert leased > 64
        await flood(live)
        usage = (await ask(live, "fourth?")).usage
        assert usage.cache_read_input_tokens >= leased
        assert usage.cache_creation_input_tokens == 0


async def test_created_tokens_are_read_by_the_next_request(folder: Path) -> None:
    async with serve(folder) as live:
        first = (await ask(live, "first?", control={"type": "ephemeral"})).usage
        created = first.cache_creation.ephemeral_5m_input_tokens
        assert created == first.cache_creation_input_tokens == live.backend.stats().num_leased_blocks * 16
        await flood(live)
        second = (await ask(live, "first?", control={"type": "ephemeral"})).usage
        assert second.cache_read_input_tokens >= created
        assert second.cache_creation_input_tokens == 0
        assert (
            second.input_tokens + second.cache_read_input_tokens
            == first.input_tokens + first.cache_creation_input_tokens
        )


async def test_over_budget_is_answered_without_a_lease_and_says_so(folder: Path) -> None:
    async with serve(folder, lease_share=0.05) as live:
        message = await ask(live, "first?", control={"type": "ephemeral"})
        [lease] = message.model_extra["pagoda"]["leases"]
        assert lease["leased_tokens"] == 0
        assert "blocks are needed" in lease["refused"]
        assert message.usage.cache_creation_input_tokens == 0
        assert message.usage.input_tokens > 64
        assert live.backend.stats().num_leases_refused == 1


async def test_another_tenant_reads_nothing_of_it(folder: Path) -> None:
    async with serve(folder) as live:
        await ask(live, "first?", control={"type": "ephemeral"})
        other = (await ask(live, "first?", key="sk-b", control={"type": "ephemeral"})).usage
        assert other.cache_read_input_tokens == 0
        assert other.cache_creation_input_tokens > 0


# -- why did it miss ---------------------------------------------------------------------------------------------------

EXPLAIN = {"X-Pagoda-Explain": "1"}


def chat(content: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
    return {"model": "tiny", "max_tokens": 2, "messages": messages}


async def post(live: Live, path: str, body: dict[str, Any], key: str = "sk-a", **headers: str) -> dict[str, Any]:
    answer = await live.http.post(path, json=body, headers={"x-api-key": key, **EXPLAIN, **headers})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_each_cause_is_told_in_the_answer_and_later(folder: Path) -> None:
    async with serve(folder, admin_key="root") as live:
        new = await post(live, "/v1/chat/completions", chat("At dawn?"))
        assert new["pagoda"]["explain"]["reason"] == "never_seen"
        other = await post(live, "/v1/chat/completions", chat("At dusk?"))
        told = other["pagoda"]["explain"]
        assert told["reason"] == "diverged"
        assert told["hit_tokens"] == other["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
        assert told["missed_at"] == told["hit_tokens"]
        assert told["text_before"].endswith("At ")
        assert (told["text_asked"][:2], told["text_cached"][:2]) == ("du", "da")
        assert "pagoda" not in await post(live, "/v1/chat/completions", chat("At noon?"), **{"X-Pagoda-Explain": "0"})
        await flood(live)
        gone = await post(live, "/v1/chat/completions", chat("At dawn?"))
        assert gone["pagoda"]["explain"]["reason"] == "evicted"
        assert set(gone["pagoda"]["explain"]["eviction"]) == {"policy", "seconds_ago"}  # not what others have
        path, keys = f"/v1/kv/explain/{gone['id']}", {"x-api-key": "sk-a"}
        assert "held_blocks" not in (await live.http.get(path, headers=keys)).json()["eviction"]
        pressure = (await live.http.get(path, headers=keys | {"x-admin-key": "root"})).json()["eviction"]
        assert pressure["evicted_blocks"] >= 1
        assert {"held_blocks", "leased_blocks"} <= pressure.keys()

        later = await live.http.get(f"/v1/kv/explain/{other['id']}", headers={"x-api-key": "sk-a"})
        assert later.json() == {"id": other["id"], **told}
        stranger = await live.http.get(f"/v1/kv/explain/{other['id']}", headers={"x-api-key": "sk-b"})
        assert stranger.status_code == 404


async def test_every_endpoint_explains(folder: Path) -> None:
    async with serve(folder) as live:
        message = await post(live, "/v1/messages", chat("At dawn?") | {"messages": chat("x")["messages"][1:]})
        response = await post(live, "/v1/responses", {"input": "At dawn?", "max_output_tokens": 2})
        pair = await post(live, "/v1/completions", {"prompt": ["At dawn", "The tide"], "max_tokens": 2})
        assert message["pagoda"]["explain"]["prompt_tokens"] == message["usage"]["input_tokens"]
        assert response["pagoda"]["explain"]["prompt_tokens"] == response["usage"]["input_tokens"]
        assert [each["hit_tokens"] for each in pair["pagoda"]["explain"]] == [0, 0]
        later = await live.http.get(f"/v1/kv/explain/{pair['id']}?prompt=1", headers={"x-api-key": "sk-a"})
        assert later.json()["text_asked"].startswith("The tide")
        for asked, number in ((pair, 2), (message, 1), (message, -1)):
            path = f"/v1/kv/explain/{asked['id']}?prompt={number}"
            beyond = await live.http.get(path, headers={"x-api-key": "sk-a"})
            error = beyond.json()["error"]
            assert (beyond.status_code, error["param"], error["code"]) == (400, "prompt", "invalid_value")
            assert f"has no prompt {number}" in error["message"]
            assert (await live.http.get(path, headers={"x-api-key": "sk-b"})).status_code == 404


async def test_the_last_chunk_of_a_stream_explains(folder: Path) -> None:
    async with serve(folder) as live:
        stream = await live.client.chat.completions.create(
            **chat("At dawn?"), stream=True, extra_headers={**EXPLAIN, "x-api-key": "sk-a"}
        )
        chunks = [chunk async for chunk in stream]
        assert "pagoda" not in chunks[0].model_extra
        assert chunks[-1].model_extra["pagoda"]["explain"]["reason"] == "never_seen"


async def test_a_tenant_learns_nothing_of_anothers_prefix(folder: Path) -> None:
    async with serve(folder) as live:
        await post(live, "/v1/chat/completions", chat("At dawn?"), key="sk-a")
        probe = await post(live, "/v1/chat/completions", chat("At dawn?"), key="sk-b")
        assert probe["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        told = probe["pagoda"]["explain"]
        assert (told["reason"], told["hit_tokens"]) == ("never_seen", 0)
        assert not {"text_cached", "differs", "eviction"} & told.keys()


@pytest.mark.parametrize("admin_key", [None, "root"])
async def test_without_api_keys_nobody_is_told_what_another_sent(folder: Path, admin_key: str | None) -> None:
    async with serve(folder, keys=False, admin_key=admin_key) as live:
        known = "The tide turns at six in the morning. "
        await post(live, "/v1/completions", {"prompt": known + "kestrel", "max_tokens": 1})
        answer = await post(live, "/v1/completions", {"prompt": known + "When?", "max_tokens": 1})
        told = answer["pagoda"]["explain"]
        assert (told["reason"], told["text_asked"]) == ("diverged", "When?")
        assert told["missed_at"] == told["hit_tokens"] > 0
        assert "text_cached" not in told
        path = f"/v1/kv/explain/{answer['id']}"
        assert (await live.http.get(path)).json() == {"id": answer["id"], **told}
        assert "text_cached" not in (await live.http.get(path, headers={"x-admin-key": "wrong"})).json()
        operators = (await live.http.get(path, headers={"x-admin-key": "root"})).json()
        assert operators.get("text_cached", "").startswith("kestrel") == (admin_key is not None)
