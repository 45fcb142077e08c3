"""What each key used, what it costs and what the cache saved: counted once, by the right account, over restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagoda.errors import ConfigError
from pagoda.server.auth import ApiKeys
from pagoda.server.ledger import Account, Counts, Ledger
from pagoda.server.prices import Prices

from .conftest import Live, run_server
from .fake_backend import FakeBackend
from .test_cache_control import ask, folder, serve

__all__ = ["folder"]

KEYS = ApiKeys({"sk-a1": "acme", "sk-a2": "acme", "sk-b": "bolt"})
LONG = "The boats of the harbour are counted at every tide. " * 4


async def usage(live: Live, **headers: str) -> dict[str, Any]:
    answer = await live.http.get("/v1/usage", headers=headers)
    assert answer.status_code == 200
    return dict(answer.json())


async def complete(live: Live, key: str, prompt: Any = LONG, **fields: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 4, **fields}
    answer = await live.http.post("/v1/completions", json=body, headers={"x-api-key": key})
    assert answer.status_code == 200


async def test_each_key_has_its_counts_and_each_tenant_sees_its_own() -> None:
    async with run_server(FakeBackend(), api_keys=KEYS, admin_key="root") as live:
        await complete(live, "sk-a1")
        await complete(live, "sk-a1", stream=True)
        await complete(live, "sk-a2", prompt="x" * 40, prompt_cache_retention="24h")
        await complete(live, "sk-b", prompt="y" * 10)
        mine = await usage(live, **{"x-api-key": "sk-a2"})
        assert {each["tenant"] for each in mine["data"]} == {"acme"}
        assert len({each["key"] for each in mine["data"]}) == 2
        assert "sk-a" not in str(mine)
        first = next(each for each in mine["data"] if each["requests"] == 2)
        assert (first["prompt_tokens"], first["read_tokens"]) == (2 * len(LONG), len(LONG) - 1)
        assert (first["computed_tokens"], first["written_tokens"], first["generated_tokens"]) == (len(LONG) + 1, 0, 8)
        second = next(each for each in mine["data"] if each["requests"] == 1)
        assert (second["written_1h_tokens"], second["written_5m_tokens"]) == (32, 0)
        assert mine["total"]["requests"] == 3
        everyone = await usage(live, **{"x-api-key": "sk-b", "x-admin-key": "root"})
        assert [each["tenant"] for each in everyone["data"]] == ["acme", "acme", "bolt"]
        guess = await usage(live, **{"x-api-key": "sk-b", "x-admin-key": "wrong"})
        assert [each["tenant"] for each in guess["data"]] == ["bolt"]


async def test_every_endpoint_counts(tmp_path: Path) -> None:
    path = tmp_path / "usage.json"
    async with run_server(FakeBackend(), ledger=Ledger(path)) as live:
        messages = [{"role": "user", "content": "Hello"}]
        for route, body in (
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/completions", {"prompt": ["a", "b"]}),
            ("/v1/responses", {"input": "Hello"}),
            ("/v1/messages", {"model": "fake", "max_tokens": 3, "messages": messages}),
            ("/v1/caches", {"prompt": "Hello"}),
        ):
            before = (await usage(live))["total"]["requests"]
            assert (await live.http.post(route, json=body)).status_code == 200
            assert (await usage(live))["total"]["requests"] == before + (2 if route == "/v1/completions" else 1)
        total = (await usage(live))["total"]
    async with run_server(FakeBackend(), ledger=Ledger(path)) as live:
        assert (await usage(live))["total"] == total
        await complete(live, "")
        assert (await usage(live))["total"]["requests"] == total["requests"] + 1


async def test_the_engines_own_counts(folder: Path) -> None:
    async with serve(folder, admin_key="root") as live:
        first = (await ask(live, "first?", control={"type": "ephemeral"})).usage
        second = (await ask(live, "second?", control={"type": "ephemeral", "ttl": "1h"})).usage
        [mine] = (await usage(live, **{"x-api-key": "sk-a"}))["data"]
        assert mine["written_5m_tokens"] == first.cache_creation_input_tokens > 0
        assert mine["written_1h_tokens"] == second.cache_creation_input_tokens
        assert mine["read_tokens"] == second.cache_read_input_tokens > 0
        assert mine["generated_tokens"] == first.output_tokens + second.output_tokens


def test_prices() -> None:
    counts = Counts(requests=2, prompt=4000, read=1000, written_5m=800, written_1h=200, generated=500)
    prices = Prices(input=2.0, output=8.0)
    plain, output = 2000, 500 * 8.0
    expected = 2.0 * (plain + 0.1 * 1000 + 1.25 * 800 + 2 * 200) + output
    assert prices.cost(counts) == pytest.approx(expected / 1e6)
    assert prices.cost_without_cache(counts) == pytest.approx((2.0 * 4000 + output) / 1e6)
    assert Prices().cost(Counts(prompt=10)) == 10
    passages = Counts(prompt=10, blended=4, extra=6)
    assert Prices().cost(passages) == pytest.approx(6 + 6 + 0.1 * 4)
    assert Prices().cost_without_cache(passages) == 10


def test_a_price_table(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('[prices]\ninput = 3\nread = 0.5\ncurrency = "EUR"\n')
    assert Prices.load(path) == Prices(input=3, read=0.5, currency="EUR")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("input = 3", "no \\[prices\\]"),
        ("[prices]\ninputs = 3", "inputs"),
        ("[prices]\nread = -1", "read must be"),
        ("[prices]\nread = nan", "read must be"),
        ("[prices]\nread = true", "read must be"),
        ("[prices]\ncurrency = 3", "currency"),
        ("[prices", "cannot read"),
    ],
)
def test_bad_price_tables(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=word):
        Prices.load(path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"since": 0, "accounts": [{"tenant": "a"}]}', '{"since": "x"}'])
def test_what_is_no_usage_file_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "usage.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="move it away"):
        Ledger(path)
    assert path.read_text() == text


def test_a_ledger_is_kept(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "usage.json")
    ledger._counts[Account("acme", "k")] = Counts(1, 2, 3, 4, 5, 6)
    ledger.save(ledger.snapshot())
    again = Ledger(tmp_path / "usage.json")
    assert again.accounts() == [(("acme", "k"), Counts(1, 2, 3, 4, 5, 6))]
    assert again.since == ledger.since
    assert again.accounts("bolt") == []


async def test_a_passage_saves_nothing_to_whoever_has_it_computed(folder: Path) -> None:
    async with serve(folder, keys=False) as live:
        passage = {"type": "text", "text": LONG, "cache": {"reuse": "anywhere"}}

        async def asked(lead: str) -> dict[str, Any]:
            prompt = [{"type": "text", "text": lead}, passage, {"type": "text", "text": "When?"}]
            await complete(live, "", prompt=prompt, blend={"min_confidence": 0.0, "max_deviation": 100.0})
            total: dict[str, Any] = (await usage(live))["total"]
            parts = total["read_tokens"] + total["blended_tokens"] + total["computed_tokens"]
            assert parts == total["prompt_tokens"] + total["extra_computed_tokens"]
            return total

        first = await asked("Notes: ")
        assert first["extra_computed_tokens"] >= first["blended_tokens"] > 0
        assert first["saved"] < 0
        second = await asked("Notes of May: ")
        assert second["extra_computed_tokens"] == first["extra_computed_tokens"]
        assert second["blended_tokens"] > first["blended_tokens"]
        assert second["saved"] > first["saved"]
