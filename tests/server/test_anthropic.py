"""/v1/messages with the official client: answers, events, counting, errors in Anthropic's shape, and cache_control."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from pagoda.errors import MemoryPressure
from pagoda.server.auth import ApiKeys

from .conftest import Live, run_server
from .fake_backend import FakeBackend

HELLO: dict[str, Any] = {"model": "fake", "max_tokens": 24, "messages": [{"role": "user", "content": "hello"}]}
FIVE: dict[str, Any] = {"type": "ephemeral"}
HOUR: dict[str, Any] = {"type": "ephemeral", "ttl": "1h"}


def text(words: str, control: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "text", "text": words} | ({"cache_control": control} if control else {})


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


@pytest.fixture
async def client(live: Live) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=live.url, api_key="unused", max_retries=0) as client:
        yield client


async def test_a_message(live: Live, client: anthropic.AsyncAnthropic) -> None:
    message = await client.messages.create(**HELLO)
    assert message.id.startswith("msg-")
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake")
    assert message.content[0].text == "once upon a time a pagod"
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    prompt = len(live.backend.seen[0]["prompt"])
    usage = message.usage
    assert (usage.input_tokens, usage.output_tokens) == (prompt, 24)
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (0, 0)
    again = await client.messages.create(**HELLO)
    assert (again.usage.input_tokens, again.usage.cache_read_input_tokens) == (1, prompt - 1)


async def test_no_tokens_only_warm_up(live: Live, client: anthropic.AsyncAnthropic) -> None:
    message = await client.messages.create(**HELLO | {"max_tokens": 0, "cache_control": HOUR, "system": "Be brief."})
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
    assert message.usage.cache_creation_input_tokens > 0
    assert live.backend.seen[0]["params"].max_tokens == 0


async def test_a_stream_adds_up_to_the_message(client: anthropic.AsyncAnthropic) -> None:
    events: list[str] = []
    async with client.messages.stream(**HELLO) as stream:
        async for event in stream:
            events.append(event.type)
        message = await stream.get_final_message()
    assert events[:2] == ["message_start", "content_block_start"]
    assert events[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events.count("content_block_delta") == 24
    assert message.content[0].text == "once upon a time a pagod"
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 24


async def test_stop_sequences(client: anthropic.AsyncAnthropic) -> None:
    message = await client.messages.create(**HELLO, stop_sequences=["a time"])
    assert message.content[0].text == "once upon "
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "a time")
    async with client.messages.stream(**HELLO, stop_sequences=["a time"]) as stream:
        streamed = await stream.get_final_message()
    assert streamed.content[0].text == "once upon "
    assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", "a time")


async def test_the_whole_conversation_reaches_the_template(live: Live, client: anthropic.AsyncAnthropic) -> None:
    await client.messages.create(
        model="fake",
        max_tokens=1,
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7},
        system=[text("be brief"), text("be kind")],
        messages=[
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                "content": [text("let me see"), {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "x"}}],
            },
            user({"type": "tool_result", "tool_use_id": "t1", "content": [text("rain")]}, text("so?")),
            {"role": "user", "content": "well?"},
        ],
        tools=[{"name": "look", "description": "looks", "input_schema": {"type": "object"}}],
    )
    seen = live.backend.seen[0]
    rendered = live.backend.tokenizer.decode(seen["prompt"])
    for part in ('"name": "look"', "system\nbe brief\nbe kind", "assistant\nlet me see", "tool\nrain", "so?\nwell?"):
        assert part in rendered
    assert (seen["params"].temperature, seen["params"].top_p, seen["params"].top_k) == (0.5, 0.9, 7)


async def test_what_is_null_is_told_what_it_should_be(live: Live) -> None:
    answer = await live.http.post("/v1/messages", json=HELLO | {"max_tokens": None})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "max_tokens should be an integer, not null"


async def test_counting(live: Live, client: anthropic.AsyncAnthropic) -> None:
    fields = {name: value for name, value in HELLO.items() if name != "max_tokens"}
    counted = await client.messages.count_tokens(**fields, system="be brief")
    message = await client.messages.create(**HELLO, system="be brief")
    assert counted.input_tokens == message.usage.input_tokens


# -- cache_control ---------------------------------------------------------------------------------------------------


async def test_breakpoints_become_leases_on_the_prefixes_before_them(
    live: Live, client: anthropic.AsyncAnthropic
) -> None:
    message = await client.messages.create(
        model="fake",
        max_tokens=1,
        system=[text("s" * 40, HOUR), text("t" * 40)],
        messages=[user(text("u" * 40, FIVE), text("the question"))],
    )
    seen = live.backend.seen[0]
    rendered = "".join(live.backend.tokenizer.token_text(token) for token in seen["prompt"])
    ends = [rendered.index("s" * 40) + 40, rendered.index("u" * 40) + 40]
    offset = len("<|im_start|>") - 1  # a marker is one token
    before = [rendered[:end].count("<|im_start|>") * offset + rendered[:end].count("<|im_end|>") * 9 for end in ends]
    lengths = [end - extra for end, extra in zip(ends, before, strict=True)]
    # The newline that joins blocks is where the renderings part.
    assert [(spec.num_tokens, spec.ttl_s) for spec in seen["leases"]] == list(
        zip(lengths, (3600.0, 300.0), strict=True)
    )
    usage = message.usage
    kept = [length // 16 * 16 for length in lengths]
    assert usage.cache_creation.ephemeral_1h_input_tokens == kept[0]
    assert usage.cache_creation.ephemeral_5m_input_tokens == kept[1] - kept[0]
    assert usage.cache_creation_input_tokens == kept[1]
    assert usage.input_tokens + usage.cache_creation_input_tokens == len(seen["prompt"])
    leases = message.model_extra["pagoda"]["leases"]
    assert [(lease["requested_tokens"], lease["leased_tokens"]) for lease in leases] == list(
        zip(lengths, kept, strict=True)
    )


async def test_what_was_read_is_not_counted_as_created(live: Live, client: anthropic.AsyncAnthropic) -> None:
    request = {"model": "fake", "max_tokens": 1, "system": [text("s" * 100, FIVE)]}
    await client.messages.create(**request, messages=[user(text("first"))])
    usage = (await client.messages.create(**request, messages=[user(text("second"))])).usage
    assert usage.cache_creation_input_tokens == 0
    assert usage.cache_read_input_tokens > 100
    assert usage.input_tokens + usage.cache_read_input_tokens == len(live.backend.seen[1]["prompt"])


async def test_the_automatic_form_and_tools(live: Live, client: anthropic.AsyncAnthropic) -> None:
    tool = {"name": "look", "input_schema": {"type": "object"}, "cache_control": HOUR}
    await client.messages.create(**HELLO, tools=[tool], extra_body={"cache_control": FIVE})
    (of_tool, of_all), prompt = live.backend.seen[0]["leases"], live.backend.seen[0]["prompt"]
    tokenizer = live.backend.tokenizer
    assert '"name": "look"' in tokenizer.decode(prompt[: of_tool.num_tokens])
    assert tokenizer.decode(prompt[: of_all.num_tokens]).endswith("hello\n")
    assert (of_tool.ttl_s, of_all.ttl_s) == (3600, 300)


async def test_a_refused_lease_is_said_and_creates_nothing(live: Live, client: anthropic.AsyncAnthropic) -> None:
    live.backend.refusal = "no room"
    request = {**HELLO, "system": [text("s" * 100, FIVE)]}
    message = await client.messages.create(**request)
    assert message.usage.cache_creation_input_tokens == 0
    assert message.model_extra["pagoda"]["leases"][0]["refused"] == "no room"
    stream = await client.messages.create(**request, stream=True)
    start = await anext(stream)
    assert start.message.model_extra["pagoda"]["leases"][0]["refused"] == "no room"


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "first message"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0: 'image' blocks"),
        ({"messages": [{"role": "user", "content": ""}]}, "non-empty"),
        ({"messages": [*HELLO["messages"], {"role": "assistant", "content": "x"}]}, "continuing"),
        ({"temperature": 1.5}, "temperature"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        ({"system": [text("x", {"type": "forever"})]}, "system.0.cache_control.type"),
        ({"system": [text("x", {"type": "ephemeral", "ttl": "2h"})]}, "cache_control.ttl"),
        ({"system": [text("x", FIVE)] * 5}, "at most 4"),
        ({"system": [text("x", FIVE)] * 4, "cache_control": FIVE}, "5 do"),
        ({"system": [text("x", FIVE), text("y", HOUR)]}, "system.1.cache_control.ttl: a 1h block must not come"),
    ],
)
async def test_bad_requests(live: Live, change: dict[str, Any], words: str) -> None:
    answer = await live.http.post("/v1/messages", json={**HELLO, **change})
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert words in answer.json()["error"]["message"]
    assert answer.json()["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_every_answer_has_an_id_and_no_two_the_same(live: Live, client: anthropic.AsyncAnthropic) -> None:
    counted = await client.messages.with_raw_response.count_tokens(model=HELLO["model"], messages=HELLO["messages"])
    answered = await client.messages.create(**HELLO)
    assert answered._request_id == answered.id
    with pytest.raises(anthropic.NotFoundError) as refused:
        await client.messages.create(**{**HELLO, "model": "other"})
    names = {counted.headers["request-id"], answered._request_id, refused.value.request_id}
    assert len(names - {None}) == 3


@pytest.mark.parametrize(
    ("method", "path"), [("GET", ""), ("POST", "/batches"), ("GET", "/batches/x"), ("DELETE", "/count_tokens")]
)
async def test_what_is_not_there_is_told_in_anthropics_shape_too(live: Live, method: str, path: str) -> None:
    answer = await live.http.request(method, f"/v1/messages{path}")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"
    assert answer.json()["request_id"] == answer.headers["request-id"]


async def test_a_failure_is_told_and_logged_by_the_id_of_what_failed(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    live.backend.failure = ValueError("secret")
    answer = await live.http.post("/v1/messages", json=HELLO)
    name = answer.json()["request_id"]
    assert name.startswith("msg-")
    assert name in caplog.text
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    other = (await live.http.post("/v1/chat/completions", json=chat)).headers["x-request-id"]
    assert other.startswith("chatcmpl-")
    assert other in caplog.text


async def test_the_client_raises_its_own_errors(live: Live, client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        await client.messages.create(**{**HELLO, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens asks for 10000 more: they exceed"):
        await client.messages.create(**{**HELLO, "max_tokens": 10_000})
    live.backend.failure = MemoryPressure("full")
    with pytest.raises(anthropic.APIStatusError, match="overloaded_error") as caught:
        await client.messages.create(**HELLO)
    assert caught.value.status_code == 529
    live.backend.failure = ValueError("secret")
    with pytest.raises(anthropic.InternalServerError) as hidden:
        await client.messages.create(**HELLO)
    assert "secret" not in str(hidden.value)


async def test_a_failing_stream_ends_in_an_error_event(live: Live, client: anthropic.AsyncAnthropic) -> None:
    live.backend.step_s = 0.01
    stream = await client.messages.create(**HELLO, stream=True)
    live.backend.failure = MemoryPressure("full")
    with pytest.raises(anthropic.APIStatusError, match="Out of KV memory") as caught:
        [event async for event in stream]
    assert caught.value.body["request_id"] == stream.response.headers["request-id"]  # type: ignore[index]


async def test_keys_in_either_header() -> None:
    keys = ApiKeys({"sk-a": "acme"})
    async with run_server(FakeBackend(), api_keys=keys) as live:
        for headers in ({"x-api-key": "sk-a"}, {"Authorization": "Bearer sk-a"}):
            assert (await live.http.post("/v1/messages", json=HELLO, headers=headers)).status_code == 200
        wrong = await live.http.post("/v1/messages", json=HELLO, headers={"x-api-key": "sk-b"})
        assert (wrong.status_code, json.loads(wrong.content)["error"]["type"]) == (401, "authentication_error")
        assert [seen["scope"].namespace for seen in live.backend.seen] == ["acme", "acme"]
