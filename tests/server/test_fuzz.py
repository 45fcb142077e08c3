"""Whatever JSON a field holds, the answer is a 200 or a 4xx in the right shape, and nothing stays behind."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from pagoda.server.app import create_app
from pagoda.server.openai.schema import UNSUPPORTED, ChatRequest, CompletionRequest

from .fake_backend import FakeBackend

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**31, 2**63, 10**30, 10**400, 1e308, -1e308, 5e-324])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["text", "user", "auto", "fake", "\ud800", "\x00", "<|im_end|>", "1", "٣", "\uff11"])
)
keys = st.text(max_size=4) | st.sampled_from(["type", "text", "role", "content", "include_usage", "1", "258", "٣"])
values = st.recursive(scalars, lambda v: st.lists(v, max_size=4) | st.dictionaries(keys, v, max_size=4), max_leaves=8)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system"]) | values, "content": values},
        optional={"tool_calls": values, "name": values, "tool_call_id": values},
    ),
    max_size=3,
)
names = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *UNSUPPORTED})
bodies = st.fixed_dictionaries(
    {"messages": st.just([{"role": "user", "content": "Hi"}]) | messages, "prompt": st.just("Hi") | values},
    optional={name: values for name in names if name not in ("messages", "prompt")},
)


def test_random_fields_never_break_the_server() -> None:
    backend = FakeBackend(max_model_len=64)
    statuses: list[int] = []
    with TestClient(create_app(backend), raise_server_exceptions=False) as client:

        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
        @given(body=bodies, chat=st.booleans())
        def attack(body: dict[str, Any], chat: bool) -> None:
            path = "/v1/chat/completions" if chat else "/v1/completions"
            response = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            statuses.append(response.status_code)
            assert response.status_code in (200, 400, 404), response.text
            if response.status_code != 200:
                assert response.json()["error"]["message"]
            elif body.get("stream") is True:
                assert "error" not in response.text
                assert response.text.endswith("data: [DONE]\n\n")
            assert backend.live == {}

        attack()
    assert 200 in statuses
    assert 400 in statuses


def test_random_bytes_never_break_the_parser() -> None:
    with TestClient(create_app(FakeBackend()), raise_server_exceptions=False) as client:

        @settings(max_examples=100, deadline=None)
        @given(st.binary(max_size=60))
        def attack(body: bytes) -> None:
            response = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            assert response.status_code == 400
            assert response.json()["error"]["code"] in ("invalid_json", "invalid_value")

        attack()
