"""The official client against the server: what it expects, it gets."""

from __future__ import annotations

import asyncio
import threading

import openai
import pytest

from pagoda.engine.outputs import Delta, TokenLogprob
from pagoda.server.openai.completions import CompletionWording

from .conftest import Live
from .fake_backend import STORY, FakeTokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def story(num_tokens: int) -> str:
    return (STORY * 50)[:num_tokens]


async def test_chat(live: Live) -> None:
    answer = await live.client.chat.completions.create(model="fake", messages=HELLO, max_tokens=9)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "fake"
    assert answer.system_fingerprint
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", story(9))
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 9
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 9
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer._request_id == answer.id


async def test_chat_prompt_is_rendered_and_tokenized_off_the_event_loop(live: Live) -> None:
    await live.client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1)
    tokenizer = live.backend.tokenizer
    expected = tokenizer.encode("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert live.backend.seen[0]["prompt"] == expected
    tokenizer.threads.clear()
    await live.client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1)
    assert threading.current_thread().name not in tokenizer.threads


async def test_cached_tokens_are_told_within_a_salt_only(live: Live) -> None:
    async def cached(salt: str | None) -> int:
        extra = {"cache_salt": salt} if salt is not None else {}
        answer = await live.client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1, extra_body=extra)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert await cached(None) == 0
    assert await cached(None) > 0
    assert await cached("a") == 0
    assert await cached("a") > 0
    assert await cached("b") == 0
    assert {r["scope"].salt for r in live.backend.seen} == {"", "a", "b"}


async def test_chat_stream(live: Live) -> None:
    stream = await live.client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == story(12)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 0
    assert all(c.usage is None for c in chunks[:-1])
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert len({c.id for c in chunks}) == 1


async def test_stream_without_usage_has_none(live: Live) -> None:
    stream = await live.client.chat.completions.create(model="fake", messages=HELLO, max_tokens=2, stream=True)
    chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


async def test_n_samples(live: Live) -> None:
    answer = await live.client.chat.completions.create(model="fake", messages=HELLO, max_tokens=5, n=3)
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert texts == ["once ", "upon ", "a tim"]
    assert answer.usage.completion_tokens == 15

    streamed = ["", "", ""]
    async for chunk in await live.client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=5, n=3, stream=True
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


async def test_stop_string(live: Live) -> None:
    answer = await live.client.chat.completions.create(model="fake", messages=HELLO, stop=" pagoda")
    assert answer.choices[0].message.content == "once upon a time a"
    assert answer.choices[0].finish_reason == "stop"
    stream = await live.client.chat.completions.create(model="fake", messages=HELLO, stop=["zzz", "time"], stream=True)
    assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "once upon a "


async def test_chat_without_max_tokens_runs_to_the_context(live: Live) -> None:
    answer = await live.client.chat.completions.create(model="fake", messages=HELLO)
    assert answer.usage.total_tokens == live.backend.max_model_len


async def test_sampling_fields_arrive(live: Live) -> None:
    await live.client.chat.completions.create(
        model="fake",
        messages=HELLO,
        max_tokens=50,
        max_completion_tokens=3,
        temperature=0.5,
        top_p=0.9,
        seed=-7,
        presence_penalty=1,
        frequency_penalty=-1.5,
        logit_bias={"65": -100, "66": 2.5},
        stop=["x", "y"],
        user="someone",
        metadata={"ignored": "yes"},
        extra_body={
            "top_k": 40,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "stop_token_ids": [257],
            "priority": -3,
        },
    )
    seen = live.backend.seen[0]
    params = seen["params"]
    assert seen["priority"] == -3
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (3, 0.5, 0.9, -7)
    assert (params.presence_penalty, params.frequency_penalty) == (1.0, -1.5)
    assert params.logit_bias == {65: -100, 66: 2.5}
    assert params.stop == ("x", "y")
    assert (params.top_k, params.min_p, params.repetition_penalty) == (40, 0.1, 1.2)
    assert params.ignore_eos
    assert not params.skip_special_tokens
    assert params.stop_token_ids == {257}
    assert params.logprobs is None


async def test_defaults_are_openais(live: Live) -> None:
    await live.client.completions.create(model="fake", prompt="Hello")
    params = live.backend.seen[0]["params"]
    assert (params.temperature, params.top_p, params.n, params.max_tokens) == (1.0, 1.0, 1, 16)
    assert live.backend.seen[0]["priority"] == 0


async def test_chat_logprobs(live: Live) -> None:
    answer = await live.client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=2, logprobs=True, top_logprobs=3
    )
    first, second = answer.choices[0].logprobs.content
    assert (first.token, first.bytes, first.logprob) == ("o", [111], -0.5)
    assert [(t.token, t.logprob) for t in second.top_logprobs] == [("A", -1.0), ("B", -2.0), ("C", -9999.0)]
    plain = await live.client.chat.completions.create(model="fake", messages=HELLO, max_tokens=2, logprobs=True)
    assert [entry.top_logprobs for entry in plain.choices[0].logprobs.content] == [[], []]


async def test_completion_logprobs_whole_and_streamed(live: Live) -> None:
    answer = await live.client.completions.create(model="fake", prompt="Hi", max_tokens=3, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["o", "n", "c"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs[0] == {"A": -1.0, "o": -0.5}
    stream = await live.client.completions.create(model="fake", prompt="Hi", max_tokens=3, logprobs=1, stream=True)
    offsets = [offset async for chunk in stream for offset in chunk.choices[0].logprobs.text_offset]
    assert offsets == [0, 1, 2]


@pytest.mark.parametrize("prompt", ["Hi", [72, 105]])
async def test_completion_prompts_as_text_or_ids(live: Live, prompt: str | list[int]) -> None:
    answer = await live.client.completions.create(model="fake", prompt=prompt, max_tokens=4, echo=True)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "Hionce"
    assert answer.usage.prompt_tokens == 2
    assert live.backend.seen[0]["prompt"] == [72, 105]


@pytest.mark.parametrize("prompts", [["ab", "cde"], [[97, 98], [99, 100, 101]]])
async def test_completion_batches(live: Live, prompts: list[str] | list[list[int]]) -> None:
    answer = await live.client.completions.create(model="fake", prompt=prompts, max_tokens=4, n=2, echo=True)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "abonce"), (1, "abupon"), (2, "cdeonce"), (3, "cdeupon")]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 16)

    streamed = [""] * 4
    async for chunk in await live.client.completions.create(
        model="fake", prompt=prompts, max_tokens=4, n=2, echo=True, stream=True
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [c.text for c in answer.choices]


async def test_text_parts_and_developer_role(live: Live) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    await live.client.chat.completions.create(model="fake", messages=messages, max_tokens=1)
    text = live.backend.tokenizer.decode(live.backend.seen[0]["prompt"])
    assert text == "system\nBe brief.\nuser\na\nb\nassistant\n"


async def test_tools_reach_the_template_unless_switched_off(live: Live) -> None:
    tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    for choice in ("auto", "none"):
        await live.client.chat.completions.create(
            model="fake", messages=HELLO, max_tokens=1, tools=tools, tool_choice=choice
        )
    texts = [live.backend.tokenizer.decode(r["prompt"]) for r in live.backend.seen]
    assert ["find" in text for text in texts] == [True, False]


async def test_models(live: Live) -> None:
    assert [model.id async for model in await live.client.models.list()] == ["fake"]
    assert (await live.client.models.retrieve("fake")).owned_by == "pagoda"
    with pytest.raises(openai.NotFoundError):
        await live.client.models.retrieve("other/model")


async def test_errors_become_the_clients_exceptions(live: Live) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await live.client.chat.completions.create(model="fake", messages=HELLO, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="fake"):
        await live.client.chat.completions.create(model="gpt-9", messages=HELLO)


async def test_sync_client(live: Live) -> None:
    def talk() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as client:
            whole = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=6)
            stream = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=6, stream=True)
            return whole.choices[0].message.content or "", "".join(c.choices[0].delta.content or "" for c in stream)

    assert await asyncio.to_thread(talk) == ("once u", "once u")


async def test_many_at_once(live: Live) -> None:
    async def ask(index: int) -> str:
        answer = await live.client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": f"question {index}"}], max_tokens=20 + index
        )
        return answer.choices[0].message.content or ""

    assert await asyncio.gather(*map(ask, range(30))) == [story(20 + index) for index in range(30)]


def test_tokens_that_are_parts_of_a_character_stay_apart() -> None:
    wording = CompletionWording(FakeTokenizer())
    euro = [TokenLogprob(byte, -0.1, ((0xE2, -0.1), (0x82, -0.2))) for byte in "a€b".encode()]
    logprobs = wording.chunk(0, Delta(0, "a€b", (), tuple(euro)))["logprobs"]
    assert logprobs["tokens"] == ["a", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac", "b"]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 2]
    assert [len(top) for top in logprobs["top_logprobs"]] == [3, 2, 2, 3, 3]
