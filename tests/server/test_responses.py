"""/v1/responses with the official client, conversations that go on, and the cache fields of all OpenAI endpoints."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from pagoda.server.auth import ApiKeys
from pagoda.server.openai import response_store
from pagoda.server.openai.response_store import Conversation, ResponseStore, Shelf

from .conftest import Live, run_server
from .fake_backend import FakeBackend


async def test_a_response(live: Live) -> None:
    answer = await live.client.responses.create(
        model="fake", input="hello", instructions="be brief", max_output_tokens=9
    )
    assert answer.output_text == "once upon"
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    prompt = live.backend.seen[0]["prompt"]
    assert "system\nbe brief" in live.backend.tokenizer.decode(prompt)
    assert (answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens) == (len(prompt), 0)
    assert (answer.usage.output_tokens, answer.usage.total_tokens) == (9, len(prompt) + 9)


async def test_a_stream_adds_up(live: Live) -> None:
    stream = await live.client.responses.create(
        model="fake", input="hello", stream=True, extra_body={"stop": ["a time"]}
    )
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == "once upon "


async def test_a_conversation_goes_on_and_its_prefix_hits(live: Live) -> None:
    first = await live.client.responses.create(model="fake", input="hello", max_output_tokens=9)
    second = await live.client.responses.create(
        model="fake", input="and then?", previous_response_id=first.id, max_output_tokens=9
    )
    rendered = live.backend.tokenizer.decode(live.backend.seen[1]["prompt"])
    assert [word in rendered for word in ("hello", "assistant\nonce upon\n", "and then?")] == [True] * 3
    assert second.usage.input_tokens_details.cached_tokens == len(live.backend.seen[0]["prompt"])
    assert second.previous_response_id == first.id


async def test_unstored_and_unknown_responses_cannot_go_on(live: Live) -> None:
    first = await live.client.responses.create(model="fake", input="hello", max_output_tokens=2, store=False)
    for response_id in (first.id, "resp-none"):
        with pytest.raises(openai.NotFoundError, match="is not kept here"):
            await live.client.responses.create(model="fake", input="x", previous_response_id=response_id)


async def test_a_conversation_is_its_tenants_alone() -> None:
    async with run_server(FakeBackend(), api_keys=ApiKeys({"sk-a": "acme", "sk-b": "bolt"})) as live:
        mine, other = (live.client.with_options(api_key=key) for key in ("sk-a", "sk-b"))
        first = await mine.responses.create(model="fake", input="hello", max_output_tokens=2)
        with pytest.raises(openai.NotFoundError):
            await other.responses.create(model="fake", input="x", previous_response_id=first.id)
        with pytest.raises(openai.NotFoundError, match="is not kept here"):
            await other.responses.delete(first.id)
        await mine.responses.create(model="fake", input="x", previous_response_id=first.id, max_output_tokens=2)


async def test_what_is_deleted_cannot_go_on(live: Live) -> None:
    first = await live.client.responses.create(model="fake", input="hello", max_output_tokens=2)
    path = f"/v1/responses/{first.id}"
    assert (await live.http.delete(path)).json() == {"id": first.id, "object": "response", "deleted": True}
    with pytest.raises(openai.NotFoundError):
        await live.client.responses.create(model="fake", input="x", previous_response_id=first.id)
    again = await live.http.delete(path)
    assert (again.status_code, again.json()["error"]["code"]) == (404, "not_found")


async def test_tool_items_reach_the_template(live: Live) -> None:
    await live.client.responses.create(
        model="fake",
        max_output_tokens=1,
        tools=[{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}],
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        ],
    )
    rendered = live.backend.tokenizer.decode(live.backend.seen[0]["prompt"])
    assert [part in rendered for part in ('"name": "look"', "user\nweather?", "tool\nrain")] == [True] * 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": []}, "input is empty"),
        ({"input": [3]}, "input[0] must be an object"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"background": True}, "background"),
        ({"n": 2}, "n must be 1"),
        ({"tools": [{"type": "web_search"}]}, "functions"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"prompt_cache_retention": "48h"}, "prompt_cache_retention"),
    ],
)
async def test_bad_requests(live: Live, change: dict[str, Any], words: str) -> None:
    answer = await live.http.post("/v1/responses", json={"model": "fake", "input": "x", **change})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_the_store_is_bounded_and_forgets_the_longest_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_RESPONSES", 3)
    shelf = Shelf()
    for name in "abc":
        shelf.put(conversation(name), 1)
    assert shelf.get("a") is not None
    shelf.put(conversation("d"), 1)
    assert kept(shelf, "abcd") == "acd"
    monkeypatch.setattr(response_store, "MAX_CHARS", 100)
    shelf.put(conversation("e", num_chars=60), 1)
    assert kept(shelf, "acde") == "e"


def test_what_is_dropped_takes_along_what_goes_on_from_it() -> None:
    store = ResponseStore()
    for name in "a", "ab", "abc", "ad", "e":
        store.shelf("t").put(conversation(name), 1)
    store.shelf("u").put(conversation("x"), 1)
    assert store.drop_response("b")
    assert kept(store.shelf("t"), "abcde") == "ade"
    assert not store.drop_response("b")
    for late in "ab", "b", "abf":  # were computed meanwhile
        store.shelf("t").put(conversation(late), 1)
    assert kept(store.shelf("t"), "abf") == "a"
    store.drop("t")
    assert kept(store.shelf("t"), "ade") == ""
    assert kept(store.shelf("u"), "x") == "x"


def test_a_conversation_whose_tenant_is_dropped_while_it_is_made_is_not_kept() -> None:
    store = ResponseStore()
    shelf = store.shelf("t")
    store.drop("t")
    shelf.put(conversation("a"), 1)
    assert kept(store.shelf("t"), "a") == ""


def conversation(ids: str, num_chars: int = 1) -> Conversation:
    return Conversation(tuple({"role": "user", "content": name * num_chars} for name in ids), tuple(ids))


def kept(shelf: Shelf, ids: str) -> str:
    return "".join(name for name in ids if shelf.get(name) is not None)


# -- prompt_cache_key and prompt_cache_retention, everywhere -----------------------------------------------------------


@pytest.mark.parametrize("retention", ["in_memory", "in-memory", "24h"])
async def test_retention_is_a_lease_on_the_prompt(live: Live, retention: str) -> None:
    fields: dict[str, Any] = {"model": "fake", "extra_body": {"prompt_cache_retention": retention}}
    chat = await live.client.chat.completions.create(
        messages=[{"role": "user", "content": "hello"}], max_tokens=2, prompt_cache_key="k", **fields
    )
    plain = await live.client.completions.create(prompt=["one", "two"], max_tokens=2, **fields)
    response = await live.client.responses.create(input="x", max_output_tokens=2, prompt_cache_key="k", **fields)
    for seen in live.backend.seen:
        wanted = [(len(seen["prompt"]), 86400.0)] if retention == "24h" else []
        assert [(spec.num_tokens, spec.ttl_s) for spec in seen["leases"]] == wanted
    counts = [len(answer.model_extra.get("pagoda", {"leases": []})["leases"]) for answer in (chat, plain, response)]
    assert counts == ([1, 2, 1] if retention == "24h" else [0, 0, 0])


@pytest.mark.parametrize("include_usage", [True, False])
async def test_a_refusal_is_in_the_last_chunk(live: Live, include_usage: bool) -> None:
    live.backend.refusal = "no room"
    stream = await live.client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=3,
        n=2,
        stream=True,
        stream_options={"include_usage": include_usage},
        extra_body={"prompt_cache_retention": "24h"},
    )
    chunks = [chunk async for chunk in stream]
    told = [chunk.model_extra.get("pagoda") for chunk in chunks]
    assert told[:-1] == [None] * (len(chunks) - 1)
    assert told[-1]["leases"][0]["refused"] == "no room"
