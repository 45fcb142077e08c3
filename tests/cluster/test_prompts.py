from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pagoda.cluster.prompts import CHUNK_CHARS, read_prompt

SYSTEM = {"role": "system", "content": "You are a careful helper. " * 40}


def turn(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text * 30}


def common(one: dict[str, Any], other: dict[str, Any], who: tuple[bytes, bytes] = (b"", b"")) -> int:
    a, b = read_prompt(one, who[0]).chunks, read_prompt(other, who[1]).chunks
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


FIRST = {"model": "m", "messages": [SYSTEM, turn("user", "what is a radix tree? ")]}


def test_a_conversation_goes_on_from_its_text() -> None:
    messages = [*FIRST["messages"], turn("assistant", "a tree of prefixes. "), turn("user", "and a B-tree? ")]
    assert common(FIRST, {"model": "m", "messages": messages}) == len(read_prompt(FIRST, b"").chunks) > 5


def test_who_asks_and_salt_and_model_and_tools_come_first() -> None:
    assert common(FIRST, FIRST, (b"key one", b"key two")) == 0
    for field in ({"cache_salt": "s"}, {"model": "n"}, {"tools": [{"type": "function"}]}):
        assert common(FIRST, {**FIRST, **field}) == 0


def test_what_is_no_prompt_does_not_count() -> None:
    assert common(FIRST, {**FIRST, "temperature": 0.5, "stream": True}) == len(read_prompt(FIRST, b"").chunks)


def test_cache_breakpoints_move_and_the_text_stays() -> None:
    def message(marked: bool) -> dict[str, Any]:
        part = {"type": "text", "text": "long " * 200}
        return {"role": "user", "content": [{**part, "cache_control": {"type": "ephemeral"}} if marked else part]}

    one, other = ({"messages": [message(marked), message(not marked)]} for marked in (True, False))
    assert common(one, other) == len(read_prompt(one, b"").chunks)


def test_prompts_of_completions_and_responses() -> None:
    text = "once upon a time " * 100
    for field in "prompt", "input":
        assert common({field: text}, {field: text + "and more " * 100}) == len(text) // CHUNK_CHARS
    ids = list(range(1000))
    assert common({"prompt": ids}, {"prompt": [*ids, 7]}) > 10


def test_a_session_is_what_the_header_or_the_cache_key_says() -> None:
    assert read_prompt({"prompt_cache_key": "k"}, b"").session == "k"
    assert read_prompt({"prompt_cache_key": "k"}, b"", "header").session == "header"
    assert read_prompt({"prompt_cache_key": 7}, b"").session is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["messages", "prompt", "system", "tools", "model", "input"]), VALUES))
def test_any_object_has_a_prompt(fields: dict[str, Any]) -> None:
    prompt = read_prompt(fields, b"\xff")
    assert prompt.num_tokens >= 1
    assert all(0 <= chunk < 1 << 64 for chunk in prompt.chunks)
