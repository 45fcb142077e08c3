"""Tenants over HTTP with the real engine: shares from the key file, priorities from the body, and refusals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pagoda.engine.aio import AsyncEngine
from pagoda.engine.engine import Engine
from pagoda.engine.tenants import Share, TenantSpec
from pagoda.errors import ConfigError
from pagoda.server.auth import ApiKeys
from tests.model import models, tokenizers_made_here

from .conftest import Live, run_server

KEYS = '[keys]\nacme = "sk-a"\nbolt = "sk-b"\n'
PROMPT = [5 + (3 * i) % 200 for i in range(64)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tokenizers_made_here.byte_level()
    model = models.build("llama", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=256)
    folder = models.save(model, tmp_path_factory.mktemp("tiny"))
    return tokenizers_made_here.save(tokenizer, folder)


@asynccontextmanager
async def serve(folder: Path, tmp_path: Path, specs: str = "") -> AsyncIterator[Live]:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS + specs)
    keys = ApiKeys.load(path)
    engine = Engine(
        str(folder),
        dtype="float32",
        kv_memory="600KiB",
        max_num_seqs=8,
        token_budget=64,
        progress=False,
        tenants=keys.specs,
    )
    async with run_server(AsyncEngine(engine), api_keys=keys, served_model_names=["tiny"], drain_s=1) as live:
        yield live


async def post(live: Live, body: dict[str, Any], key: str = "sk-a") -> Any:
    return await live.http.post("/v1/completions", json={"max_tokens": 1} | body, headers={"x-api-key": key})


async def cached(live: Live, body: dict[str, Any], key: str = "sk-a") -> int:
    answer = await post(live, body, key)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def flood(live: Live, key: str = "sk-b") -> None:
    for index in range(12):
        await post(live, {"prompt": [5 + (index + i * i) % 200 for i in range(200)]}, key)


async def test_a_share_from_the_key_file_is_kept(folder: Path, tmp_path: Path) -> None:
    async with serve(folder, tmp_path, "[tenants.acme]\nguaranteed = 0.2\n") as live:
        await cached(live, {"prompt": PROMPT})
        await flood(live)
        assert await cached(live, {"prompt": PROMPT}) == 63


async def test_without_one_it_is_not(folder: Path, tmp_path: Path) -> None:
    async with serve(folder, tmp_path) as live:
        await cached(live, {"prompt": PROMPT})
        await flood(live)
        assert await cached(live, {"prompt": PROMPT}) < 16


def test_more_than_there_is_cannot_be_guaranteed(folder: Path) -> None:
    with pytest.raises(ConfigError, match="guaranteed"):
        Engine(str(folder), kv_memory="600KiB", progress=False, tenants={"acme": TenantSpec(Share(guaranteed=0.9))})


async def test_marked_tokens_outlive_a_flood(folder: Path, tmp_path: Path) -> None:
    retention = {"ranges": [{"token_start": 0, "token_end": 32, "priority": 90}], "decode_priority": 0}
    async with serve(folder, tmp_path) as live:
        await cached(live, {"prompt": PROMPT, "kv_retention": retention})
        await flood(live)
        assert await cached(live, {"prompt": PROMPT}) == 32


BAD = [
    ({"ranges": [{"token_start": 0, "priority": 101}]}, "between 0 and 100"),
    ({"ranges": [{"token_start": 4, "token_end": 4, "priority": 1}]}, "range of tokens"),
    ({"ranges": [{"token_start": 0, "priority": 1, "duration_s": 0}]}, "duration"),
    ({"decode_duration_s": 3.0}, "needs a decode priority"),
    ({"range": []}, "kv_retention"),
    ({"ranges": [{"token_start": 0, "priority": 1}] * 65}, "kv_retention"),
]


async def test_directives_that_make_no_sense_are_400(folder: Path, tmp_path: Path) -> None:
    async with serve(folder, tmp_path) as live:
        for retention, words in BAD:
            answer = await post(live, {"prompt": PROMPT, "kv_retention": retention})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert words in error["message"]
            assert error["param"].startswith("kv_retention")


async def test_a_lease_over_the_tenants_budget_is_refused_with_its_own_figures(folder: Path, tmp_path: Path) -> None:
    async with serve(folder, tmp_path, '[tenants.acme]\nlease_budget = "1B"\n') as live:
        answer = await post(live, {"prompt": PROMPT, "prompt_cache_retention": "24h"})
        assert "0 of the tenant's 0 are leased" in answer.json()["pagoda"]["leases"][0]["refused"]
        other = await post(live, {"prompt": PROMPT, "prompt_cache_retention": "24h"}, "sk-b")
        assert other.json()["pagoda"]["leases"][0]["refused"] is None
