"""Passages marked in requests, found in long texts, and reused by the real engine wherever they stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from pagoda.engine.aio import AsyncEngine
from pagoda.engine.engine import Engine
from pagoda.engine.params import DEFAULT_RATIO, Span, cut_passages
from pagoda.errors import InvalidRequest
from pagoda.model.chat import ChatTemplate
from pagoda.server.passages import BlendDefaults, BlendOptions, Passages
from tests.model import models, tokenizers_made_here

from .conftest import Live, run_server
from .fake_backend import FakeBackend, FakeTokenizer
from .test_cache_control import folder, serve

__all__ = ["folder"]

ANYWHERE = {"reuse": "anywhere"}
TIDES = "The tide turns at six, and the harbour master writes it down in the book."
BOATS = "Forty boats lie at the quay, and each of them has a number on its bow."


def part(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def passage(text: str) -> dict[str, Any]:
    return part(text, cache=ANYWHERE)


async def chat(live: Live, *messages: Any, **extra: Any) -> Any:
    return await live.client.chat.completions.create(
        model="fake", max_tokens=2, messages=list(messages), extra_body=extra
    )


def found(live: Live) -> list[str]:
    """The passages of the last request, as text."""
    last = live.backend.seen[-1]
    blend = last["blend"]
    spans = blend.spans if blend else ()
    return [live.backend.tokenizer.decode(last["prompt"][span.start : span.stop]) for span in spans]


def rendered(*messages: dict[str, str]) -> list[int]:
    tokenizer = FakeTokenizer()
    return tokenizer.encode(tokenizer.render_chat(messages))


async def test_marked_parts_are_passages_and_the_prompt_is_the_same(live: Live) -> None:
    answer = await chat(
        live,
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": [passage(TIDES), part("and"), passage(BOATS), part("How many?")]},
    )
    assert found(live) == [TIDES, BOATS]
    text = "\n".join([TIDES, "and", BOATS, "How many?"])
    assert live.backend.seen[-1]["prompt"] == rendered(
        {"role": "system", "content": "Answer."}, {"role": "user", "content": text}
    )
    assert live.backend.seen[-1]["blend"].ratio == DEFAULT_RATIO
    details = answer.usage.model_dump()["prompt_tokens_details"]
    total = len(TIDES) + len(BOATS)
    assert (details["blended_tokens"], details["recomputed_tokens"]) == (total - total // 4, total // 4)
    assert details["cached_tokens"] == 0


async def test_a_message_may_be_marked_whole(live: Live) -> None:
    await chat(
        live,
        {"role": "system", "content": TIDES, "cache": ANYWHERE},
        {"role": "user", "content": [part("One."), part("Two.")], "cache": ANYWHERE},
    )
    assert found(live) == [TIDES, "One.", "Two."]


async def test_without_marks_nothing_is_blended_and_usage_says_nothing_of_it(live: Live) -> None:
    answer = await chat(live, {"role": "user", "content": [part(TIDES)]}, blend={"ratio": 0.5})
    assert live.backend.seen[-1]["blend"] is None
    assert "blended_tokens" not in answer.usage.model_dump()["prompt_tokens_details"]


async def test_options_reach_the_engine(live: Live) -> None:
    await chat(
        live,
        {"role": "user", "content": [passage(TIDES)]},
        blend={"ratio": 0.3, "max_deviation": 0.1, "min_confidence": 0},
    )
    blend = live.backend.seen[-1]["blend"]
    assert (blend.ratio, blend.max_deviation, blend.min_confidence) == (0.3, 0.1, 0.0)


@pytest.mark.parametrize(
    ("content", "extra", "param"),
    [
        ([part(TIDES, cache={"reuse": "never"})], {}, "messages[0].content[0].cache"),
        ([part(TIDES, cache="anywhere")], {}, "messages[0].content[0].cache"),
        ([part(TIDES, cache={"reuse": "anywhere", "ttl": 3})], {}, "messages[0].content[0].cache"),
        ([passage(TIDES)], {"blend": {"ratio": 1.5}}, "blend.ratio"),
        (TIDES, {"blend": {"ratio": -1.0}}, "blend.ratio"),
        ([passage(TIDES)], {"blend": {"max_deviation": -1.0}}, "blend.max_deviation"),
        ([passage(TIDES)], {"blend": {"min_confidence": 1.5}}, "blend.min_confidence"),
        ([passage(TIDES)], {"blend": {"ration": 0.5}}, "blend.ration"),
        ([passage(TIDES)], {"blend": {"ratio": "much"}}, "blend.ratio"),
        ([passage(TIDES)], {"blend": 0.5}, "blend"),
        ([passage(TIDES)], {"blends": {"ratio": 0.5}}, "blends"),
    ],
)
async def test_what_is_malformed_is_refused_by_name(live: Live, content: Any, extra: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(live, {"role": "user", "content": content}, **extra)
    assert refused.value.param == param
    assert not live.backend.seen


async def test_a_mark_on_a_message_is_checked_too(live: Live) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await chat(live, {"role": "user", "content": "x", "cache": {"reuse": 1}})
    assert refused.value.param == "messages[0].cache"


async def test_raw_prompts_may_be_given_in_parts(live: Live) -> None:
    parts: Any = [part("Notes: "), passage(TIDES), passage(BOATS), part(" How many?")]
    whole = f"Notes: {TIDES}{BOATS} How many?"
    answer = await live.client.completions.create(model="fake", max_tokens=2, prompt=parts, echo=True)
    assert found(live) == [TIDES, BOATS]
    assert live.backend.seen[-1]["prompt"] == FakeTokenizer().encode(whole)
    assert answer.choices[0].text.startswith(whole)
    assert answer.usage.model_dump()["prompt_tokens_details"]["blended_tokens"] > 0
    several: Any = ["plain", parts, [104, 105]]
    await live.client.completions.create(
        model="fake", max_tokens=2, prompt=several, extra_body={"blend": {"ratio": 0.3}}
    )
    blends = {bytes(each["prompt"]): each["blend"] for each in live.backend.seen[-3:]}
    assert blends[b"plain"] is blends[b"hi"] is None
    assert blends[whole.encode()].ratio == 0.3


@pytest.mark.parametrize(
    ("prompt", "extra", "param"),
    [
        ("x", {"blend": {"auto": True}}, "blend"),
        ([part("x"), "y"], {}, "prompt"),
        ([part("x"), {"type": "image", "text": "y"}], {}, "prompt[1]"),
        ([{"type": "text"}], {}, "prompt[0]"),
        ([part("x"), part("y", cache={"reuse": "here"})], {}, "prompt[1].cache"),
        ([part("")], {}, "prompt"),
        ([passage("x")], {"blend": {"ratio": 2.0}}, "blend.ratio"),
    ],
)
async def test_malformed_parts_of_raw_prompts_are_refused(live: Live, prompt: Any, extra: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await live.client.completions.create(model="fake", prompt=prompt, extra_body=extra)
    assert refused.value.param == param
    assert not live.backend.seen


def tool(name: str, **fields: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"hour": {"type": "integer", "description": "0 à 23"}}}
    return {"type": "function", "function": {"name": name, "description": TIDES, "parameters": parameters}, **fields}


async def test_tools_may_be_marked(live: Live) -> None:
    tools: Any = [tool("tide", cache=ANYWHERE), tool("boats")]
    await live.client.chat.completions.create(
        model="fake", max_tokens=2, messages=[{"role": "user", "content": "When?"}], tools=tools
    )
    assert found(live) == [json.dumps(tool("tide"), ensure_ascii=False)]
    text = live.backend.tokenizer.render_chat([{"role": "user", "content": "When?"}], [tool("tide"), tool("boats")])
    assert live.backend.seen[-1]["prompt"] == live.backend.tokenizer.encode(text)
    counted = await live.http.post(
        "/tokenize", json={"messages": [{"role": "user", "content": "When?"}], "tools": tools}
    )
    assert counted.json()["tokens"] == live.backend.seen[-1]["prompt"]

    flat: Any = [{"type": "function", **tool("tide")["function"], "cache": ANYWHERE}]
    await live.client.responses.create(model="fake", input="When?", tools=flat)
    assert found(live) == [json.dumps(tool("tide"), ensure_ascii=False)]
    async with anthropic.AsyncAnthropic(base_url=live.url, api_key="k", max_retries=0) as client:
        function = tool("tide")["function"]
        theirs: Any = {"name": "tide", "description": TIDES, "input_schema": function["parameters"], "cache": ANYWHERE}
        asked: Any = [{"role": "user", "content": "When?"}]
        await client.messages.create(model="fake", max_tokens=2, tools=[theirs], messages=asked)
        assert found(live) == [json.dumps(tool("tide"), ensure_ascii=False)]
        with pytest.raises(anthropic.BadRequestError, match=r"tools\.0\.cache"):
            await client.messages.create(
                model="fake", max_tokens=2, tools=[{**theirs, "cache": "anywhere"}], messages=asked
            )


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (tool("tide", cache="anywhere"), "tools[0].cache"),
        (tool("tide", cache=ANYWHERE, strict=True), "tools[0]"),
        ({"type": "retrieval", "cache": ANYWHERE}, "tools[0]"),
    ],
)
async def test_tools_that_cannot_be_passages_are_refused(live: Live, given: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await live.client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "x"}], tools=[given]
        )
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("template", "passages"),
    [
        ("{% for t in tools %}{{ t | tojson }}\n{% endfor %}", 1),
        ("{% for t in tools %}{{ t | tojson(indent=4) }}\n{% endfor %}", 1),
        ("{% for t in tools %}{{ t.function | tojson(indent=2) }}\n{% endfor %}", 1),
        ("{{ tools | tojson }}", 1),
        ("no tools here", 0),
        ("{% for t in tools %}{{ t.function.name }}: {{ t.function.description }}\n{% endfor %}", None),
        ("{{ tools | tojson(indent=4) }}", None),
    ],
)
def test_templates_write_tools_in_one_piece_or_marks_are_refused(template: str, passages: int | None) -> None:
    chat_template, hiding, tokenizer = ChatTemplate(template, {}), Passages(), FakeTokenizer()
    rendered = chat_template.render([], hiding.hide_tools([tool("tide", cache=ANYWHERE), tool("boats")], "tools"))
    if passages is None:
        with pytest.raises(InvalidRequest, match="one piece"):
            hiding.encode(rendered, tokenizer)
        return
    tokens, spans = hiding.encode(rendered, tokenizer)
    assert tokenizer.decode(tokens) == chat_template.render([], [tool("tide"), tool("boats")])
    assert len(spans) == passages


async def test_a_named_cache_is_exact_whatever_is_marked_in_it(live: Live) -> None:
    marked = {"messages": [{"role": "system", "content": BOATS}], "tools": [tool("tide", cache=ANYWHERE)]}
    made = await live.http.post("/v1/caches", json={"model": "fake", **marked})
    assert made.status_code == 200, made.text
    assert live.backend.seen[-1]["blend"] is None
    await chat(live, {"role": "user", "content": "When?"}, cached_content=made.json()["id"])
    assert live.backend.seen[-1]["blend"] is None
    text = live.backend.tokenizer.render_chat(
        [{"role": "system", "content": BOATS}, {"role": "user", "content": "When?"}], [tool("tide")]
    )
    assert live.backend.seen[-1]["prompt"] == live.backend.tokenizer.encode(text)


async def test_the_operator_may_turn_cutting_on() -> None:
    long = "".join(f"Paragraph {i} of the harbour book, with some words in it.\n\n" for i in range(100))
    backend = FakeBackend(max_model_len=20000)
    async with run_server(backend, blend=BlendDefaults(0.2, auto=True)) as live:
        await chat(live, {"role": "system", "content": long}, {"role": "user", "content": long + "Now?"})
        assert len(found(live)) > 1
        assert "".join(found(live)) == long + "Now?"
        assert backend.seen[-1]["blend"].ratio == 0.2
        assert backend.seen[-1]["blend"].is_default
        await chat(live, {"role": "user", "content": [part(long), passage(TIDES)]})
        assert not backend.seen[-1]["blend"].is_default
        await chat(live, {"role": "user", "content": long}, blend={"ratio": 0.1})
        assert not backend.seen[-1]["blend"].is_default
        await chat(live, {"role": "user", "content": long}, blend={"auto": False})
        assert backend.seen[-1]["blend"] is None
    async with run_server(FakeBackend(max_model_len=20000)) as live:
        await chat(live, {"role": "user", "content": long})
        assert found(live) == []
        await chat(live, {"role": "user", "content": long}, blend={"auto": True})
        assert "".join(found(live)) == long


async def test_responses_take_marks(live: Live) -> None:
    content = [{"type": "input_text", "text": TIDES, "cache": ANYWHERE}, {"type": "input_text", "text": "When?"}]
    given: Any = [{"role": "user", "content": content}, {"role": "user", "content": BOATS, "cache": ANYWHERE}]
    answer = await live.client.responses.create(model="fake", input=given, extra_body={"blend": {"ratio": 0.1}})
    assert found(live) == [TIDES, BOATS]
    assert live.backend.seen[-1]["blend"].ratio == 0.1
    assert answer.usage is not None
    assert answer.usage.model_dump()["input_tokens_details"]["blended_tokens"] > 0


async def test_messages_take_marks_on_blocks_messages_and_documents(live: Live) -> None:
    document = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": BOATS},
        "title": "The quay",
        "cache": ANYWHERE,
    }
    messages: Any = [
        {"role": "user", "content": [document, part("How many?")]},
        {"role": "assistant", "content": "Forty."},
        {"role": "user", "content": "And the tide?", "cache": ANYWHERE},
    ]
    async with anthropic.AsyncAnthropic(base_url=live.url, api_key="k", max_retries=0) as client:
        system: Any = [passage(TIDES)]
        answer = await client.messages.create(model="fake", max_tokens=2, system=system, messages=messages)
        counted = await client.messages.count_tokens(model="fake", system=system, messages=messages)
    assert found(live) == [TIDES, f"The quay\n{BOATS}", "And the tide?"]
    assert counted.input_tokens == len(live.backend.seen[-1]["prompt"])
    usage = answer.usage.model_dump()
    total = sum(len(text) for text in found(live))
    assert (usage["cache_blended_tokens"], usage["cache_recomputed_tokens"]) == (total - total // 4, total // 4)


@pytest.mark.parametrize(
    "block",
    [
        part(TIDES, cache={"reuse": "sometimes"}),
        {"type": "document", "source": {"type": "url", "url": "https://example.org/x.pdf"}},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": ""}},
        {"type": "document", "source": {"type": "text", "data": "x"}, "title": 3},
        {"type": "document"},
    ],
)
async def test_malformed_blocks_are_refused(live: Live, block: Any) -> None:
    async with anthropic.AsyncAnthropic(base_url=live.url, api_key="k", max_retries=0) as client:
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.create(model="fake", max_tokens=2, messages=[{"role": "user", "content": [block]}])


def test_joints_are_tokenized_apart() -> None:
    class Pairs(FakeTokenizer):
        """Two letters are one token, from the left."""

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [hash(text[i : i + 2]) for i in range(0, len(text), 2)]

    tokenizer = Pairs()
    passages = Passages()
    text = "a" + passages.hide("bcd", marked=True, role="user") + "e"
    tokens, spans = passages.encode(text, tokenizer)
    assert tokens == [*tokenizer.encode("a"), *tokenizer.encode("bcd"), *tokenizer.encode("e")]
    assert spans == (Span(1, 3),)
    assert tokens != tokenizer.encode("abcde")


def test_passages_may_be_empty_repeated_dropped_or_look_like_names() -> None:
    passages, tokenizer = Passages(), FakeTokenizer()
    one, empty, _lost, name = (
        passages.hide(text, marked=True, role="user") for text in (TIDES, "", "never shown", "\ue000abc.0\ue001")
    )
    tokens, spans = passages.encode(one + empty + "\ue000 x" + one + name, tokenizer)
    assert tokenizer.decode(tokens) == TIDES + "\ue000 x" + TIDES + "\ue000abc.0\ue001"
    assert [tokenizer.decode(tokens[s.start : s.stop]) for s in spans] == [TIDES, "", TIDES, "\ue000abc.0\ue001"]
    assert BlendDefaults(0.1).spec(None, passages, spans[1:2]) is None


def test_a_template_that_changes_names_is_refused() -> None:
    passages = Passages()
    shown = passages.hide(TIDES, marked=True, role="user")
    for changed in (shown.upper().replace("\ue000", ""), shown[:-1]):
        with pytest.raises(InvalidRequest, match="template"):
            passages.encode(changed, FakeTokenizer())


def test_options_beat_defaults() -> None:
    spec = BlendDefaults(0.2).spec(BlendOptions(ratio=0.0), Passages(), (Span(0, 4),))
    assert spec is not None
    assert spec.ratio == 0.0


@pytest.mark.parametrize("order", [(TIDES, BOATS), (BOATS, TIDES)])
async def test_the_real_engine_reuses_passages_in_any_order(folder: Any, order: tuple[str, str]) -> None:
    async with serve(folder, keys=False, kv_memory="1200KiB") as live:
        usages = []
        for texts in (order, order[::-1], order):
            answer = await live.client.chat.completions.create(
                model="tiny",
                max_tokens=3,
                messages=[
                    {"role": "system", "content": "Answer in few words."},
                    {"role": "user", "content": [*map(passage, texts), part("How many boats?")]},  # type: ignore[list-item]
                ],
                extra_body={"blend": {"ratio": 0.15, "max_deviation": 100.0, "min_confidence": 0.0}},
                extra_headers={"X-Pagoda-Explain": "1"},
            )
            usages.append(answer.usage.model_dump()["prompt_tokens_details"])
            explained = answer.model_extra["pagoda"]["explain"]
            assert explained["blended_tokens"] == usages[-1]["blended_tokens"]
        assert all(usage["blended_tokens"] > 2 * usage["recomputed_tokens"] > 0 for usage in usages)
        metrics = (await live.http.get("/metrics")).text
        blended = sum(usage["blended_tokens"] for usage in usages)
        assert f'pagoda_prompt_tokens_by_source_total{{source="blended"}} {float(blended)}' in metrics
        recomputed = sum(usage["recomputed_tokens"] for usage in usages)
        assert f"pagoda_blend_recomputed_tokens_total {float(recomputed)}" in metrics
        assert 'pagoda_blend_guarded_total{all="no"} 0.0' in metrics
        total = (await live.http.get("/v1/usage")).json()["total"]
        assert total["blended_tokens"] == blended
        extra = sum(usage["extra_computed_tokens"] for usage in usages)
        assert total["extra_computed_tokens"] == extra
        assert total["computed_tokens"] == total["prompt_tokens"] - total["read_tokens"] - blended + extra
        assert total["saved"] > 0
        assert f"pagoda_blend_extra_tokens_total {float(extra)}" in metrics


@pytest.fixture
def roomy(tmp_path: Path) -> Path:
    """A model whose context holds a text that is cut."""
    tokenizer = tokenizers_made_here.byte_level()
    model = models.build("llama", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=4096)
    return tokenizers_made_here.save(tokenizer, models.save(model, tmp_path))


async def test_what_the_operator_turned_on_refuses_nobody(roomy: Path) -> None:
    """Cut passages cannot be reused with quantized keys or a kv_policy of the request's: it is answered without."""
    long = "".join(f"Paragraph {i} of the harbour book.\n\n" for i in range(60))
    assert len(cut_passages(long)) > 1
    body = {"messages": [{"role": "user", "content": long}], "max_tokens": 2}
    for kv_format, fields, status in (
        ("int4", {}, 200),
        ("int4", {"blend": {"auto": True}}, 400),
        ("auto", {"kv_policy": "h2o:64"}, 200),
        ("auto", {"kv_policy": "h2o:64", "blend": {"ratio": 0.1}}, 400),
    ):
        engine = Engine(str(roomy), dtype="float32", kv_memory="32MiB", kv_format=kv_format, progress=False)
        async with run_server(AsyncEngine(engine), blend=BlendDefaults(0.15, auto=True)) as live:
            answer = await live.http.post("/v1/chat/completions", json=body | fields)
            assert answer.status_code == status, (kv_format, fields, answer.text)
            if status == 200:
                assert "blended_tokens" not in answer.json()["usage"]["prompt_tokens_details"]
