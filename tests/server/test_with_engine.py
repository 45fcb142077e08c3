"""The server over the real engine and a tiny random model: the two halves fit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from pagoda import cli
from pagoda.engine.aio import AsyncEngine
from pagoda.engine.engine import Engine
from pagoda.server.app import create_app
from tests.model import adapters, models, tokenizers_made_here
from tests.waiting import eventually

from .conftest import Live, run_server
from .test_fuzz import bodies

QUESTION = [{"role": "user", "content": "When does the harbour master count the boats, and what of the tide?"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "seed": 1, "max_tokens": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tokenizers_made_here.byte_level()
    model = models.build("llama", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=512)
    folder = models.save(model, tmp_path_factory.mktemp("tiny"))
    return tokenizers_made_here.save(tokenizer, folder)


@pytest.fixture
async def live(folder: Path) -> AsyncIterator[Live]:
    engine = Engine(str(folder), dtype="float32", kv_memory="2MiB", max_num_seqs=16, token_budget=64, progress=False)
    async with run_server(AsyncEngine(engine), served_model_names=["tiny"], admin_key="root", drain_s=1) as running:
        yield running
        await until_nothing_is_held(running)


async def until_nothing_is_held(live: Live) -> None:
    await eventually(lambda: not live.backend.stats().num_held_blocks)


async def until_something_is_held(live: Live) -> None:
    await eventually(lambda: live.backend.stats().num_held_blocks)


async def test_whole_and_streamed_answers_agree_and_the_second_hits(live: Live) -> None:
    whole = await live.client.chat.completions.create(messages=QUESTION, **GREEDY)
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert 1 <= whole.usage.completion_tokens <= 24
    stream = await live.client.chat.completions.create(
        messages=QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


async def test_salts_do_not_share(live: Live) -> None:
    async def cached(salt: str) -> int:
        answer = await live.client.chat.completions.create(messages=QUESTION, extra_body={"cache_salt": salt}, **GREEDY)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert await cached("a") == 0
    assert await cached("b") == 0
    assert await cached("a") > 0


async def test_samples_and_logprobs(live: Live) -> None:
    answer = await live.client.completions.create(
        model="tiny", prompt=["The harbour", "The tide"], n=3, max_tokens=8, logprobs=2, extra_body={"ignore_eos": True}
    )
    assert len(answer.choices) == 6
    for choice in answer.choices:
        assert len(choice.logprobs.tokens) == 8
        assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs)
        assert all(len(top) in (2, 3) for top in choice.logprobs.top_logprobs)
        assert choice.finish_reason == "length"


async def test_ranked_answers(live: Live) -> None:
    drawn = await live.client.completions.create(
        model="tiny", prompt="The tide", n=6, seed=3, max_tokens=6, logprobs=0, extra_body={"ignore_eos": True}
    )
    best = max(drawn.choices, key=lambda choice: sum(choice.logprobs.token_logprobs))
    ranked = await live.client.completions.create(
        model="tiny", prompt="The tide", n=1, best_of=6, seed=3, max_tokens=6, extra_body={"ignore_eos": True}
    )
    assert [choice.text for choice in ranked.choices] == [best.text]
    assert ranked.usage.completion_tokens == 36
    search = {"use_beam_search": True, "best_of": 4, "length_penalty": 0.5, "ignore_eos": True}
    answer = await live.client.chat.completions.create(
        model="tiny", messages=QUESTION, n=2, max_tokens=5, logprobs=True, extra_body=search
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    sums = [sum(token.logprob for token in choice.logprobs.content) for choice in answer.choices]
    assert sums[0] > sums[1]
    assert answer.usage.completion_tokens == 10


async def test_adapters_are_models_that_come_and_go(live: Live, tmp_path: Path) -> None:
    vocab_size = tokenizers_made_here.byte_level().get_vocab_size()
    adapters.save_adapter(models.build("llama", vocab_size=vocab_size), tmp_path / "pirate")
    admin = {"X-Admin-Key": "root"}
    body = {"lora_name": "pirate", "lora_path": str(tmp_path / "pirate")}
    assert (await live.http.post("/v1/load_lora_adapter", json=body)).status_code == 403
    assert (await live.http.post("/v1/load_lora_adapter", json=body, headers=admin)).status_code == 200
    listed = (await live.http.get("/v1/models")).json()["data"]
    assert [(model["id"], model.get("parent")) for model in listed] == [("tiny", None), ("pirate", "tiny")]

    async def ask(model: str) -> Any:
        return await live.client.chat.completions.create(messages=QUESTION, **GREEDY | {"model": model})

    plain, pirate = await asyncio.gather(ask("tiny"), ask("pirate"))
    assert pirate.model == "pirate"
    assert pirate.choices[0].message.content != plain.choices[0].message.content
    assert pirate.usage.prompt_tokens_details.cached_tokens == 0
    for name, path, named in (("tiny", "x", "tiny"), ("bad", str(tmp_path), "adapter_config")):
        refused = await live.http.post(
            "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path}, headers=admin
        )
        assert refused.status_code == 400
        assert named in refused.json()["error"]["message"]
    gone = await live.http.post("/v1/unload_lora_adapter", json={"lora_name": "pirate"}, headers=admin)
    assert gone.status_code == 200
    with pytest.raises(openai.NotFoundError, match="pirate"):
        await ask("pirate")


async def test_a_published_prefix_is_hit_by_all(live: Live) -> None:
    admin = {"X-Admin-Key": "root"}
    handbook = "The harbour master counts the boats at dawn, when the tide turns. " * 3

    async def cached(salt: str, text: str) -> int:
        answer = await live.client.completions.create(prompt=handbook + text, extra_body={"cache_salt": salt}, **GREEDY)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert await cached("a", "And then?") == 0
    body = {"prompt": handbook, "cache_salt": "a"}
    assert (await live.http.post("/v1/kv/publish", json=body)).status_code == 403
    published = (await live.http.post("/v1/kv/publish", json=body, headers=admin)).json()
    assert 0 < published["cached_tokens"] <= published["prompt_tokens"]
    assert await cached("b", "And then?") == published["cached_tokens"]
    assert await cached("c", "And then?") == published["cached_tokens"]
    assert await cached("c", "And then?") > published["cached_tokens"]
    short = await live.http.post("/v1/kv/publish", json={"prompt": "x"}, headers=admin)
    assert (short.status_code, short.json()["error"]["code"]) == (409, "publish_refused")
    assert (await live.http.post("/v1/kv/unpublish", json=body, headers=admin)).json() == {"unpublished": 1}
    assert await cached("d", "And then?") == 0


async def test_weights_are_reloaded_by_the_operator(live: Live, folder: Path) -> None:
    admin = {"X-Admin-Key": "root"}
    first = await live.client.chat.completions.create(messages=QUESTION, **GREEDY)
    refused = await live.http.post("/v1/reload_weights", json={"path": str(folder / "nothing")}, headers=admin)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "weights_refused")
    assert (await live.http.post("/v1/reload_weights", json={"path": str(folder)})).status_code == 403
    done = await live.http.post("/v1/reload_weights", json={"path": str(folder)}, headers=admin)
    assert len(done.json()["weights"]) == 64
    again = await live.client.chat.completions.create(messages=QUESTION, **GREEDY)
    assert again.choices[0].message.content == first.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens == 0


async def test_many_users_get_what_one_would(live: Live) -> None:
    async def ask(index: int) -> str:
        answer = await live.client.completions.create(prompt=f"The boats at dawn {index}", **GREEDY)
        return answer.choices[0].text

    together = await asyncio.gather(*map(ask, range(12)))
    assert together == [await ask(index) for index in range(12)]


async def test_leaving_frees_the_blocks(live: Live) -> None:
    body = {"prompt": "The harbour", "max_tokens": 400, "ignore_eos": True, "stream": True}
    async with live.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        await anext(lines)
        await until_something_is_held(live)
    await until_nothing_is_held(live)
    task = asyncio.create_task(live.http.post("/v1/completions", json=body | {"stream": False}))
    await until_something_is_held(live)
    task.cancel()
    await until_nothing_is_held(live)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_can_never_fit_is_refused_with_the_numbers(live: Live, stream: bool) -> None:
    body = {"prompt": [5] * 600, "max_tokens": 1, "stream": stream}
    response = await live.http.post("/v1/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"] == "this model's context is 512 tokens for prompt and answer; the prompt alone has 600"
    much = await live.http.post("/v1/completions", json={**body, "prompt": [5] * 500, "max_tokens": 13})
    assert "the prompt has 500 and max_tokens asks for 13 more: 513" in much.json()["error"]["message"]


async def test_metrics_tell_of_hits(live: Live) -> None:
    for _ in range(2):
        await live.client.chat.completions.create(messages=QUESTION, **GREEDY)
    text = (await live.http.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    query = float(values["pagoda_prefix_query_tokens_total"])
    assert float(values["pagoda_prefix_hit_tokens_total"]) == query / 2 - 1
    ttft = [float(values[f'pagoda_time_to_first_token_seconds_count{{prefix="{each}"}}']) for each in ("cold", "warm")]
    assert ttft == [1, 1]
    assert float(values['pagoda_prefix_misses_total{reason="never_seen"}']) == 1
    assert float(values['pagoda_prompt_tokens_by_source_total{source="device"}']) == query / 2 - 1
    assert float(values["pagoda_step_time_seconds_count"]) > 2
    states = [float(values[f'pagoda_kv_blocks{{state="{state}"}}']) for state in ("free", "held", "cached")]
    assert sum(states) == live.backend.stats().num_blocks
    health = (await live.http.get("/health")).json()
    assert (health["status"], health["kv_blocks_free"], health["kv_blocks_available"]) == ("ok", states[0], sum(states))
    assert states[2] > 0


async def test_stopping_ends_streams(folder: Path) -> None:
    engine = Engine(str(folder), dtype="float32", kv_memory="2MiB", progress=False)
    async with run_server(AsyncEngine(engine), drain_s=0) as live:
        body = {"prompt": "The harbour", "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with live.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            live.server.should_exit = True
            events = [line async for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert '"finish_reason":"abort"' in events[-2] or '"finish_reason":"length"' in events[-2]
        await live.serving
        assert not live.backend.is_healthy
        assert engine.core.cache.num_held_blocks == 0


def test_random_fields_never_break_the_engine(folder: Path) -> None:
    engine = Engine(str(folder), dtype="float32", kv_memory="2MiB", max_model_len=128, progress=False)
    with TestClient(create_app(AsyncEngine(engine)), raise_server_exceptions=False) as client:

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(body=bodies, chat=st.booleans())
        def attack(body: dict[str, Any], chat: bool) -> None:
            body = {name: value for name, value in body.items() if name not in ("model", "max_completion_tokens")}
            path = "/v1/chat/completions" if chat else "/v1/completions"
            content = json.dumps(body | {"max_tokens": 3})
            response = client.post(path, content=content, headers={"content-type": "application/json"})
            assert response.status_code in (200, 400), response.text
            assert ('{"error":' in response.text) == (response.status_code == 400)

        attack()
        assert client.get("/health").json()["status"] == "ok"
    assert engine.core.cache.num_held_blocks == 0


def test_generate_prints_lines_of_json(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(folder), "--max-tokens", "5", "--n", "2", "--kv-memory", "1MiB", "--dtype", "float32"]
    monkeypatch.setattr("sys.argv", ["pagoda", "generate", "The harbour", "The tide turns", "--json", *options])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert not exit_.value.code
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["prompt"] for record in records] == ["The harbour", "The tide turns"]
    for record in records:
        first, second = record["texts"]
        assert first == second  # greedy by default
        assert record["num_output_tokens"] <= 10
        assert set(record["finish_reasons"]) <= {"stop", "length"}
