"""`prompt_cache_options` and `prompt_cache_breakpoint` of OpenAI's clients become leases where they stand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from .conftest import Live
from .test_cache_control import SYSTEM, flood, folder, serve

__all__ = ["folder"]


def marked(text: str, **mark: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, "prompt_cache_breakpoint": {"mode": "explicit", **mark}}


def messages(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": list(parts)}, {"role": "user", "content": "How many?"}]


async def chat(live: Live, **fields: Any) -> Any:
    fields = {"model": "fake", "max_tokens": 2, "messages": messages(marked("Count.")), **fields}
    return await live.client.chat.completions.create(**fields)


def asked(live: Live) -> list[tuple[str, float]]:
    """The prefixes that the last request wished to lease, and for how long."""
    last = live.backend.seen[-1]
    return [(live.backend.tokenizer.decode(last["prompt"][: s.num_tokens]).strip(), s.ttl_s) for s in last["leases"]]


async def test_a_mark_stands_at_the_end_of_its_part(live: Live) -> None:
    await chat(live, messages=messages(marked("Count the boats."), {"type": "text", "text": "Be brief."}))
    part, whole = asked(live)
    assert part[0].endswith("Count the boats.")
    assert live.backend.seen[-1]["leases"][1].num_tokens == len(live.backend.seen[-1]["prompt"])
    assert part[1] == whole[1] == 1800


async def test_explicit_mode_has_no_implicit_breakpoint(live: Live) -> None:
    options = {"mode": "explicit", "ttl": "12h"}
    await chat(live, prompt_cache_options=options, messages=messages(marked("One."), marked("Two.", ttl="30m")))
    assert [(text[-4:], ttl_s) for text, ttl_s in asked(live)] == [("One.", 43200), ("Two.", 1800)]
    await chat(live, prompt_cache_options=options, messages=messages({"type": "text", "text": "One."}))
    assert asked(live) == []


@pytest.mark.parametrize(("mode", "kept"), [("explicit", ["2", "3", "4", "5"]), ("implicit", ["3", "4", "5", "t"])])
async def test_the_latest_marks_count(live: Live, mode: str, kept: list[str]) -> None:
    await chat(live, prompt_cache_options={"mode": mode}, messages=messages(*(marked(str(i)) for i in range(6))))
    assert [text[-1] for text, _ in asked(live)] == kept


async def test_options_alone_keep_the_prompt(live: Live) -> None:
    await chat(live, prompt_cache_options={}, messages=[{"role": "user", "content": "x"}])
    assert [ttl_s for _, ttl_s in asked(live)] == [1800]
    await live.client.completions.create(
        model="fake", prompt="x" * 20, max_tokens=1, extra_body={"prompt_cache_options": {"ttl": "12h"}}
    )
    assert asked(live) == [("x" * 20, 43200)]


async def test_responses_take_both(live: Live) -> None:
    part = {"type": "input_text", "text": "Count.", "prompt_cache_breakpoint": {"mode": "explicit"}}
    answer = await live.client.responses.create(
        model="fake",
        input=[{"role": "user", "content": [part, {"type": "input_text", "text": "Now."}]}],
        prompt_cache_options={"mode": "explicit"},
        max_output_tokens=2,
    )
    [(text, ttl_s)] = asked(live)
    assert (text[-6:], ttl_s) == ("Count.", 1800)
    assert (
        answer.usage.input_tokens_details.cache_write_tokens == live.backend.seen[-1]["leases"][0].num_tokens // 16 * 16
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_prewarm_generates_nothing(live: Live, stream: bool) -> None:
    fields: dict[str, Any] = {"model": "fake", "input": "Count.", "prompt_cache_options": {"prewarm": True}}
    answer = await live.client.responses.create(**fields, stream=stream)
    if stream:
        events = [event async for event in answer]
        assert [event.type for event in events] == ["response.created", "response.in_progress", "response.completed"]
        answer = events[-1].response
    assert (answer.status, answer.output, answer.usage.output_tokens) == ("completed", [], 0)
    assert live.backend.seen[-1]["params"].max_tokens == 0
    with pytest.raises(openai.NotFoundError):
        await live.client.responses.create(model="fake", input="x", previous_response_id=answer.id)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_options": {"mode": "always"}},
        {"prompt_cache_options": {"ttl": "5m"}},
        {"prompt_cache_options": "explicit"},
        {"messages": messages(marked("x", ttl="5m"))},
        {"messages": messages({**marked("x"), "prompt_cache_breakpoint": {}})},
        {"messages": messages({**marked("x"), "prompt_cache_breakpoint": "explicit"})},
        {"prompt_cache_retention": "1h"},
    ],
)
async def test_what_is_not_documented_is_refused(live: Live, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        await chat(live, **fields)


@pytest.mark.parametrize(("value", "leases"), [("in_memory", 0), ("in-memory", 0), ("24h", 1), (None, 0)])
async def test_retention(live: Live, value: Any, leases: int) -> None:
    await chat(live, messages=[{"role": "user", "content": "x"}], extra_body={"prompt_cache_retention": value})
    assert len(asked(live)) == leases


async def test_a_marked_prefix_holds_under_pressure(folder: Path) -> None:
    async with serve(folder) as live:
        fields: dict[str, Any] = {"model": "tiny", "messages": messages(marked(SYSTEM)), "max_tokens": 1}
        options = {"prompt_cache_options": {"mode": "explicit"}, "extra_headers": {"x-api-key": "sk-a"}}
        first = await live.client.chat.completions.create(**fields, **options)
        written = first.usage.prompt_tokens_details.cache_write_tokens
        assert written > 64
        assert first.model_extra["pagoda"]["leases"][0]["leased_tokens"] == written
        await flood(live)
        second = await live.client.chat.completions.create(**fields, **options)
        assert second.usage.prompt_tokens_details.cached_tokens >= written
        assert second.usage.prompt_tokens_details.cache_write_tokens == 0
