from __future__ import annotations

from pathlib import Path

import openai
import pytest

from pagoda.engine.tenants import ServiceClass, Share, TenantSpec
from pagoda.errors import ConfigError
from pagoda.server.auth import ApiKeys
from pagoda.server.errors import HttpError

from .conftest import run_server
from .fake_backend import FakeBackend

HELLO = [{"role": "user", "content": "Hello there"}]


async def test_keys_open_the_api_and_name_the_tenant() -> None:
    keys = ApiKeys({"sk-a": "acme", "sk-a2": "acme", "sk-b": "bolt"})
    async with run_server(FakeBackend(), api_keys=keys) as live:

        async def cached(key: str) -> int:
            async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0) as client:
                answer = await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1)
                return answer.usage.prompt_tokens_details.cached_tokens

        assert await cached("sk-a") == 0
        assert await cached("sk-a2") > 0  # the same tenant
        assert await cached("sk-b") == 0  # another: no sharing
        assert [r["scope"].namespace for r in live.backend.seen] == ["acme", "acme", "bolt"]
        with pytest.raises(openai.AuthenticationError, match="not known"):
            await cached("sk-c")


@pytest.mark.parametrize("header", [None, "", "Bearer", "Basic c2stYTo=", "sk-a", "Bearer sk-A", "bearer x y"])
async def test_no_or_wrong_key_is_401(header: str | None) -> None:
    async with run_server(FakeBackend(), api_keys=ApiKeys.single("sk-a")) as live:
        headers = {} if header is None else {"authorization": header}
        for response in (
            await live.http.get("/v1/models", headers=headers),
            await live.http.post("/v1/chat/completions", json={"messages": HELLO}, headers=headers),
            await live.http.post("/v1/completions", content=b"not even json", headers=headers),
        ):
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        assert (await live.http.get("/health")).is_success
        good = await live.http.get("/v1/models", headers={"authorization": "bearer sk-a"})
        assert good.is_success


async def test_without_keys_the_namespace_is_the_public_one() -> None:
    async with run_server(FakeBackend()) as live:
        await live.client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1)
        assert live.backend.seen[0]["scope"].namespace == ""


def test_line_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# keys\nsk-one\n\nsk-two acme\n  sk-three   acme  \n")
    keys = ApiKeys.load(path)
    assert keys.namespace("Bearer sk-two") == keys.namespace("Bearer sk-three") == "acme"
    own = keys.namespace("Bearer sk-one")
    assert own.startswith("key-")
    assert "sk-one" not in own
    assert own == ApiKeys.single("sk-one").namespace("Bearer sk-one")


def test_toml_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[keys]\nacme = ["k1", "k2"]\nbolt = "k3"\n')
    keys = ApiKeys.load(path)
    assert [keys.namespace(f"Bearer k{i}") for i in (1, 2, 3)] == ["acme", "acme", "bolt"]


def test_toml_file_with_what_tenants_get(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(
        '[keys]\nacme = "k1"\nbolt = "k2"\n[tenants.acme]\nguaranteed = 0.25\nweight = 2\nclass = "interactive"\n'
        'lease_budget = "2MiB"\n[tenants.bolt]\nclass = "batch"\n'
    )
    specs = ApiKeys.load(path).specs
    assert specs["acme"] == TenantSpec(Share(0.25, 2.0), ServiceClass.INTERACTIVE, 2 << 20)
    assert specs["bolt"] == TenantSpec(service_class=ServiceClass.BATCH)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("keys", "", "no API key"),
        ("keys", "a b c\n", "line 1"),
        ("keys", "a\na\n", "twice"),
        ("keys", "schlüssel\n", "ASCII"),
        ("keys.toml", "[keys", "keys.toml"),
        ("keys.toml", "x = 1", r"no \[keys\] table"),
        ("keys.toml", "[keys]\nacme = 3", "acme must be a string"),
        ("keys.toml", '[keys]\nacme = ""', "ASCII"),
        ("keys.toml", '[keys]\na = "k"\nb = "k"', "twice"),
        ("keys.toml", '[keys]\n"(public)" = "k"', "no tenant may be called"),
        ("keys.toml", '[keys]\n"" = "k"', "no tenant may be called"),
        ("keys.txt", "k (public)", "no tenant may be called"),
        ("keys.toml", '[keys]\na = "k"\n[tenants.b]\nweight = 2', "'b' has no key"),
        ("keys.toml", '[keys]\na = "k"\n[tenants.a]\nwieght = 2', "'a': wieght is not known"),
        ("keys.toml", '[keys]\na = "k"\n[tenants.a]\nguaranteed = 2', "between 0 and 1"),
        ("keys.toml", '[keys]\na = "k"\n[tenants.a]\nweight = "2"', "must be a number"),
        ("keys.toml", '[keys]\na = "k"\n[tenants.a]\nclass = "gold"', "interactive, standard, batch"),
        ("keys.toml", '[keys]\na = "k"\n[tenants.a]\nlease_budget = true', "must be bytes"),
        ("keys.toml", '[keys]\na = "k"\n[tenants.a]\nlease_budget = "many"', "many"),
        ("keys.toml", 'tenants = 3\n[keys]\na = "k"', "must be tables"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        ApiKeys.load(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        ApiKeys.load(tmp_path / "none")


def test_odd_header_characters_are_just_wrong() -> None:
    with pytest.raises(HttpError):
        ApiKeys.single("k").namespace("Bearer \udcff\u00e9")
