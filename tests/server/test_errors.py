"""Everything that can be wrong with a request, each refused in OpenAI's shape with a message that helps."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pagoda.errors import ModelError, OutOfBlocks
from pagoda.server.app import create_app
from pagoda.server.run import DrainingServer
from pagoda.server.sockets import bind
from tests.waiting import PATIENCE_S

from .conftest import Live, run_server
from .fake_backend import FakeBackend

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def api() -> Iterator[httpx.Client]:
    """A client of one server for all the tests that leave no trace in it."""
    sock = bind("127.0.0.1", 0)
    backend = FakeBackend()
    server = DrainingServer(create_app(backend), log_level="warning")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        with httpx.Client(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=PATIENCE_S) as client:
            yield client
            assert backend.live == {}
    finally:
        server.should_exit = True
        thread.join()


def check(
    response: httpx.Response, status: int, *words: str, param: str | None = None, code: str | None = None
) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert all(word in error["message"] for word in words), error
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert error["param"] == param
    assert error["code"] == code


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "Expecting value"),
        (b'{"messages": [', "Expecting value"),
        (b'{"messages": [}', "Expecting value"),
        (b"[1]", "must be a JSON object, not an array"),
        (b'"hi"', "must be a JSON object, not a string"),
        (b"null", "not null"),
        (b"7", "not a number"),
        (b'{"prompt": "\xff\xfe"}', "not UTF-8 (byte 12)"),
        ('{"prompt": "hé"}'.encode("latin-1"), "not UTF-8"),
        (b'{"prompt": "\\ud83d"}', "surrogate"),
        (b'{"prompt": "hi", "temperature": NaN}', "NaN"),
        (b'{"prompt": "hi", "temperature": -Infinity}', "-Infinity"),
        (b'{"prompt": "hi", "temperature": 1e999}', "1e999 is too large"),
        (b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested"),
        (b'{"seed": ' + b"9" * 10_000 + b"}", "digits"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_not_json(api: httpx.Client, path: str, body: bytes, words: str) -> None:
    check(api.post(path, content=body, headers=JSON), 400, words, code="invalid_json")


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1", ";;="]
)
def test_wrong_content_type(api: httpx.Client, kind: str | None) -> None:
    headers = {"content-type": kind} if kind is not None else {}
    response = api.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    check(response, 415, "application/json", code="unsupported_media_type")


def test_content_type_with_charset_is_taken(api: httpx.Client) -> None:
    headers = {"content-type": "Application/JSON; charset=UTF-8"}
    assert (api.post("/v1/chat/completions", content=json.dumps(HELLO), headers=headers)).is_success


async def test_body_too_large() -> None:
    async with run_server(FakeBackend(), max_body_bytes=100_000) as live:

        async def chunks() -> Any:
            for _ in range(40):
                yield b" " * 10_000

        for content in (b" " * 4_000_000, b" " * 100_001, chunks()):
            response = await live.http.post("/v1/completions", content=content, headers=JSON)
            check(response, 413, "100000", code="request_too_large")
        just_fits = json.dumps(HELLO).encode().ljust(100_000)
        assert (await live.http.post("/v1/chat/completions", content=just_fits, headers=JSON)).is_success


CHAT_FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "empty"),
    ({"messages": None}, "messages", "list"),
    ({"messages": "Hello"}, "messages", "list"),
    ({"messages": [5]}, "messages[0]", "object"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "user"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "assistant"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "string"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "string"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "non-empty"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content", "object"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content", "text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        "messages[0].content",
        "'image_url' parts are not supported",
    ),
    ({"messages": [{"role": "user", "content": "x", "name": 3}]}, "messages[0].name", "string"),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"function": 1}]}]},
        "messages[0].tool_calls",
        "function",
    ),
    ({"messages": [{"role": "user", "content": "unrenderable"}]}, "messages", "template"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs=true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ({"logprobs": 3}, "logprobs", "boolean"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens must be at least 0"),
    ({"max_tokens": 0, "n": 2}, "n", "must be 1"),
    ({"tools": "find"}, "tools", "list"),
]
SHARED_FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -0.1}, "temperature", "between 0 and"),
    ({"temperature": "0.5"}, "temperature", "number"),
    ({"temperature": True}, "temperature", "number"),
    ({"temperature": 10**400}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"top_k": -2}, "top_k", "0 (off) or more"),
    ({"min_p": 2}, "min_p", "[0, 1]"),
    ({"n": 0}, "n", "between 1 and 128"),
    ({"n": 10**9}, "n", "between 1 and 128"),
    ({"n": 10**30}, "n", "less than"),
    ({"n": 1.5}, "n", "integer"),
    ({"max_tokens": -5}, "max_tokens", "at least 0"),
    ({"max_tokens": 10**12}, "max_tokens", "less than"),
    ({"seed": 2**64}, "seed", "less than"),
    ({"seed": "lucky"}, "seed", "integer"),
    ({"stop": ""}, "stop", "none of them empty"),
    ({"stop": ["a", ""]}, "stop", "none of them empty"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stop": ["x" * 2000]}, "stop", "at most 1024 char"),
    ({"stop": 5}, "stop", "stop should be a string or a list"),
    ({"presence_penalty": 3}, "presence_penalty", "-2 and 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-2 and 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "(0, 100]"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "-100 and 100"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias", "0..257"),
    ({"logit_bias": {"cat": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"258": 1}}, "logit_bias", "0..257"),
    ({"logit_bias": [1]}, "logit_bias", "logit_bias should be an object"),
    ({"stop_token_ids": [258]}, "stop_token_ids", "0..257"),
    ({"stop_token_ids": [1] * 1000}, "stop_token_ids", "at most 256"),
    ({"cache_salt": 5}, "cache_salt", "string"),
    ({"cache_salt": "x" * 5000}, "cache_salt", "1024"),
    ({"priority": "high"}, "priority", "priority should be an integer"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"stream": True, "stream_options": []}, "stream_options", "stream_options should be an object"),
    ({"model": 3}, "model", "string"),
    ({"kv_retention": {"ranges": [{"token_start": 0}]}}, "kv_retention.ranges[0].priority", "is required"),
    ({"kv_retention": {"ranges": [{"start": 0}]}}, "kv_retention.ranges[0].token_start", "is required"),
    ({"kv_retention": {"ranges": [{"token_start": 0, "priority": "x"}]}}, "kv_retention.ranges[0].priority", "integer"),
    ({"kv_retention": 5}, "kv_retention", "kv_retention should be an object"),
    ({"kv_policy": 7}, "kv_policy", "kv_policy should be a string or an object"),
    (
        {"kv_retention": {"decode": 1}},
        "kv_retention.decode",
        "no field that is known here: there are ranges, decode_priority, decode_duration_s",
    ),
    (
        {"kv_retention": {"ranges": [{"token_start": 0, "priority": 9, "end": 3}]}},
        "kv_retention.ranges[0].end",
        "there are token_start, token_end, priority, duration_s",
    ),
    ({"tiers": {"wait": 1}}, "tiers.wait", "there are max_restored_tokens, wait_s, store, lossy"),
    ({"tiers": {"store": 1}}, "tiers.store", "boolean"),
    ({"stop": ["a", 5]}, "stop", "string"),
    ({"cache_sallt": "x"}, "cache_sallt", "is cache_salt meant?"),
    ({"kv_retentions": {}}, "kv_retentions", "is kv_retention meant?"),
]
COMPLETION_FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": []}, "prompt", "prompt is an empty list: give a string"),
    ({"prompt": ""}, "prompt", "no tokens"),
    ({"prompt": ["a", ""]}, "prompt", "no tokens"),
    ({"prompt": None}, "prompt", "must be a string"),
    ({"prompt": {"text": "x"}}, "prompt", "must be a string"),
    ({"prompt": [1, "a"]}, "prompt", "must be a string"),
    ({"prompt": [True, 1]}, "prompt", "must be a string"),
    ({"prompt": [[[1]]]}, "prompt", "must be a string"),
    ({"prompt": [258]}, "prompt", "0..257"),
    ({"prompt": [-1]}, "prompt", "0..257"),
    ({"prompt": [10**30]}, "prompt", "0..257"),
    ({"prompt": ["a"] * 1025}, "prompt", "1025 prompts, times 1 "),
    ({"prompt": ["a"] * 9, "n": 128}, "prompt", "9 prompts, times 128 (n or best_of)"),
    ({"logprobs": 21}, "logprobs", "20"),
    ({"logprobs": True}, "logprobs", "integer"),
    ({"echo": True, "logprobs": 1}, "echo", "not supported"),
]


@pytest.mark.parametrize(("fields", "param", "words"), CHAT_FAULTS + SHARED_FAULTS)
def test_chat_fields(api: httpx.Client, fields: dict[str, Any], param: str, words: str) -> None:
    response = api.post("/v1/chat/completions", json=HELLO | fields)
    check(response, 400, words, param=param, code="invalid_value")


@pytest.mark.parametrize(("fields", "param", "words"), COMPLETION_FAULTS + SHARED_FAULTS)
def test_completion_fields(api: httpx.Client, fields: dict[str, Any], param: str, words: str) -> None:
    response = api.post("/v1/completions", json={"prompt": "Hello"} | fields)
    check(response, 400, words, param=param, code="invalid_value")


def test_missing_fields(api: httpx.Client) -> None:
    check(api.post("/v1/completions", json={}), 400, "required", param="prompt", code="invalid_value")
    response = api.post("/v1/chat/completions", json={})
    check(response, 400, "required", param="messages", code="invalid_value")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"guided_regex": "[a-z]+"}, "guided_regex"),
        ({"min_tokens": 5}, "min_tokens"),
    ],
)
def test_what_would_change_the_answer_is_refused(api: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = api.post("/v1/chat/completions", json=HELLO | fields)
    check(response, 400, param, param=param, code="unsupported_parameter")


def test_completion_fields_not_supported(api: httpx.Client) -> None:
    response = api.post("/v1/completions", json={"prompt": "x", "suffix": "x"})
    check(response, 400, "suffix", param="suffix", code="unsupported_parameter")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": "2"}, "best_of"),
        ({"best_of": 2, "stream": True}, "stream"),
        ({"use_beam_search": True, "n": 2, "stream": True}, "stream"),
        ({"use_beam_search": True, "n": 3, "best_of": 2}, "n"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
        ({"use_beam_search": True, "top_k": 4}, "top_k"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "early_stopping": "often"}, "early_stopping"),
        ({"use_beam_search": True, "best_of": 2000}, "n"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"prompt": ["x"] * 200, "best_of": 8}, "prompt"),
    ],
)
def test_ranking_that_cannot_be_is_refused(api: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = api.post("/v1/completions", json={"prompt": "x"} | fields)
    check(response, 400, param, param=param, code="invalid_value")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"tools": [], "tool_choice": "auto"},
        {"audio": None, "functions": [], "min_tokens": 0, "guided_json": None},
        {"store": True, "service_tier": "auto", "reasoning_effort": "low", "made_up": [1, {"a": 2}]},
        {"n": None, "temperature": None, "stop": None, "seed": None, "stream": None, "logit_bias": None},
        {"stop": []},
        {"top_k": -1},
        {"cache_salt": ""},
    ],
)
def test_harmless_fields_are_taken(api: httpx.Client, fields: dict[str, Any]) -> None:
    response = api.post("/v1/chat/completions", json=HELLO | fields)
    assert response.status_code == 200, response.text


def test_best_of_equal_to_n_is_taken(api: httpx.Client) -> None:
    for fields in ({"best_of": 1}, {"best_of": 2, "n": 2}, {"best_of": None}):
        assert (api.post("/v1/completions", json={"prompt": "x"} | fields)).is_success


@pytest.mark.parametrize("stream", [False, True])
def test_context_too_long(api: httpx.Client, stream: bool) -> None:
    long = {"prompt": "x" * 3000, "stream": stream}
    code = "context_length_exceeded"
    check(api.post("/v1/completions", json=long), 400, "3000", "2048", param="prompt", code=code)
    chat = {"messages": [{"role": "user", "content": "x" * 3000}], "stream": stream}
    check(api.post("/v1/chat/completions", json=chat), 400, "2048", param="messages", code=code)
    check(api.post("/v1/responses", json={"input": "x" * 3000}), 400, "2048", param="input", code=code)
    much = {"prompt": "x", "max_tokens": 2048, "stream": stream}
    check(api.post("/v1/completions", json=much), 400, "2048", param="max_tokens", code=code)
    for field in ("max_tokens", "max_completion_tokens"):
        asked = {"messages": HELLO["messages"], field: 2048, "stream": stream}
        check(api.post("/v1/chat/completions", json=asked), 400, f" {field} asks", param=field, code=code)
    asked = {"input": "x", "max_output_tokens": 2048, "stream": stream}
    words = " max_output_tokens asks"
    check(api.post("/v1/responses", json=asked), 400, words, param="max_output_tokens", code=code)
    batch = {"prompt": ["x" * 3000, "x" * 3000], "stream": stream}
    check(api.post("/v1/completions", json=batch), 400, "3000", param="prompt", code=code)


async def test_unknown_model_names_those_served() -> None:
    async with run_server(FakeBackend(), served_model_names=["small", "org/small"]) as live:
        response = await live.http.post("/v1/chat/completions", json=HELLO | {"model": "gpt-9"})
        check(response, 404, "gpt-9", "small, org/small", param="model", code="model_not_found")
        for name in ("small", "org/small"):
            response = await live.http.post("/v1/chat/completions", json=HELLO | {"model": name})
            assert response.json()["model"] == name
            assert (await live.http.get(f"/v1/models/{name}")).json()["id"] == name
        assert (await live.http.post("/v1/chat/completions", json=HELLO)).json()["model"] == "small"
        check(await live.http.get("/v1/models/x"), 404, "small", param="model", code="model_not_found")


def test_unknown_routes_and_methods(api: httpx.Client) -> None:
    check(api.get("/v1/nowhere"), 404, "GET /v1/nowhere")
    check(api.get("/v1/chat/completions"), 405, "Method Not Allowed")
    check(api.post("/%FF%00"), 404, "Not Found")


def test_a_wrong_query_is_refused_in_the_one_shape(api: httpx.Client) -> None:
    least = "limit should be greater than or equal to 1"
    check(api.get("/v1/kv/tree?limit=0"), 400, least, param="limit", code="invalid_value")
    check(api.get("/v1/kv/tree?limit=x"), 400, "limit should be an integer", param="limit", code="invalid_value")
    check(api.get("/v1/kv/explain/x?prompt=y"), 400, "prompt", param="prompt", code="invalid_value")


@pytest.mark.parametrize("ttl", [["30m"], {"30m": 1}, 30, "5h"])
def test_a_time_of_another_type_is_refused(api: httpx.Client, ttl: Any) -> None:
    mark = {"mode": "explicit", "ttl": ttl}
    part = {"type": "text", "text": "x", "prompt_cache_breakpoint": mark}
    answer = api.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [part]}]})
    where = "messages[0].content[0].prompt_cache_breakpoint"
    check(answer, 400, "ttl must be one of", param=where, code="invalid_value")
    message = {"role": "user", "content": "x"}
    control = {"type": "ephemeral", "ttl": ttl}
    body = {"model": "fake", "max_tokens": 1, "messages": [message], "cache_control": control}
    answer = api.post("/v1/messages", json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("depth", range(600, 1000, 25))
def test_what_is_nested_too_deeply_is_no_fault_of_the_server(api: httpx.Client, depth: int) -> None:
    deep = '{"a": ' * depth + "1" + "}" * depth
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}'
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "tools": [{tool}], "max_tokens": 1}}'
    for path, text in (
        ("/v1/chat/completions", body),
        ("/v1/responses", body.replace('"messages"', '"input"').replace('"max_tokens": 1', '"max_output_tokens": 1')),
        ("/v1/caches", body.replace(', "max_tokens": 1', "")),
    ):
        answer = api.post(path, content=text, headers=JSON)
        assert answer.status_code in (200, 400), (path, answer.text)
    assert api.get("/v1/caches").status_code == 200


async def test_no_memory_is_503_and_a_bug_is_500_without_details(live: Live) -> None:
    live.backend.failure = OutOfBlocks(9, 3)
    response = await live.http.post("/v1/chat/completions", json=HELLO)
    check(response, 503, "9 KV blocks needed", code="overloaded")
    assert response.headers["retry-after"] == "1"
    live.backend.failure = RuntimeError("secret path /etc/x")
    response = await live.http.post("/v1/chat/completions", json=HELLO)
    check(response, 500, "log")
    assert "secret" not in response.text


async def test_an_error_after_the_stream_began_is_an_event(live: Live) -> None:
    live.backend.step_s = 0.02
    async with live.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        lines = response.aiter_lines()
        assert "choices" in await anext(lines)
        live.backend.failure = OutOfBlocks(1, 0)
        events = [json.loads(line[6:]) async for line in lines if line.startswith("data: ")]
    assert events[-1]["error"]["code"] == "overloaded"


async def test_a_fault_of_our_own_in_a_stream_is_in_the_log_by_its_id(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    live.backend.step_s = 0.02
    async with live.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        lines = response.aiter_lines()
        assert "choices" in await anext(lines)
        live.backend.failure = RuntimeError("a bug")
        events = [json.loads(line[6:]) async for line in lines if line.startswith("data: ")]
    assert "a bug" not in str(events[-1]["error"])
    [record] = [record for record in caplog.records if record.exc_info]
    assert response.headers["x-request-id"] in record.getMessage()
    assert "a bug" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_that_fails_is_told_of(live: Live, stream: bool) -> None:
    live.backend.failure = ModelError("the model produced logits that are not finite")
    for path, body in (
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/messages", {"model": "fake", "max_tokens": 3, "messages": [{"role": "user", "content": "Hello"}]}),
    ):
        answer = await live.http.post(path, json={**body, "stream": stream})
        assert answer.status_code == 500
        assert "The model failed: the model produced logits that are not finite." in answer.text
