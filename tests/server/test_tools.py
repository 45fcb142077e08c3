"""Tools that the model's chat template does not write: said in the log, and refused where they are marked."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest

from .conftest import Live, run_server
from .fake_backend import FakeBackend, FakeTokenizer

MESSAGES = [{"role": "user", "content": "When does the tide turn?"}]
FUNCTION = {"name": "tide", "description": "When it turns.", "parameters": {"type": "object", "properties": {}}}
MARK = {"cache": {"reuse": "anywhere"}}
SCHEMA = {"name": "tide", "description": "When it turns.", "input_schema": FUNCTION["parameters"]}
BODIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what is sent, and its tool
    "chat/completions": ({"messages": MESSAGES, "max_tokens": 2}, {"type": "function", "function": FUNCTION}),
    "responses": ({"input": MESSAGES[0]["content"], "max_output_tokens": 2}, {"type": "function", **FUNCTION}),
    "messages": ({"model": "fake", "messages": MESSAGES, "max_tokens": 2}, SCHEMA),
}


class Toolless(FakeTokenizer):
    """Its template takes tools and writes none."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        return super().render_chat(messages, None, add_generation_prompt)


@pytest.fixture
async def toolless() -> AsyncIterator[Live]:
    backend = FakeBackend()
    backend.tokenizer = Toolless()
    async with run_server(backend) as live:
        yield live


async def send(live: Live, path: str, **mark: Any) -> Any:
    body, tool = BODIES[path]
    return await live.http.post(f"/v1/{path}", json={**body, "tools": [{**tool, **mark}]})


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "pagoda.server.tools"]


@pytest.mark.parametrize("path", BODIES)
async def test_it_is_said_once_and_refuses_nobody(toolless: Live, caplog: pytest.LogCaptureFixture, path: str) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert (await send(toolless, path)).status_code == 200
    [warning] = warnings(caplog)
    assert "writes no tools" in warning


@pytest.mark.parametrize("path", BODIES)
async def test_a_marked_tool_is_refused(toolless: Live, caplog: pytest.LogCaptureFixture, path: str) -> None:
    answer = await send(toolless, path, **MARK)
    assert answer.status_code == 400
    assert "writes no tools" in answer.text
    assert not toolless.backend.seen
    assert not warnings(caplog)


@pytest.mark.parametrize("path", BODIES)
async def test_a_template_that_writes_them_is_left_alone(
    live: Live, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    for mark in ({}, MARK):
        assert (await send(live, path, **mark)).status_code == 200
    assert not warnings(caplog)
