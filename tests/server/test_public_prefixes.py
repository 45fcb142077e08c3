"""What is public stays public over a restart, and its KV is found again in tiers."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagoda.errors import ConfigError
from pagoda.server.public_prefixes import PublicPrefixes
from tests.waiting import PATIENCE_S

from .conftest import Live
from .test_cache_control import folder, serve

__all__ = ["folder"]

ADMIN = {"x-admin-key": "root"}
HANDBOOK = "The harbour master counts the boats at dawn, when the tide turns. " * 3


async def cached(live: Live, key: str) -> int:
    """The tokens of the handbook that a tenant's request hits; what follows is new."""
    body = {"prompt": f"{HANDBOOK} asked by {key}", "max_tokens": 1}
    answer = await live.http.post("/v1/completions", json=body, headers={"x-api-key": key})
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def post(live: Live, what: str, **fields: Any) -> dict[str, Any]:
    answer = await live.http.post(f"/v1/kv/{what}", json={"prompt": HANDBOOK, **fields}, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def listed(live: Live) -> list[dict[str, Any]]:
    answer = await live.http.get("/v1/kv/published", headers=ADMIN)
    assert answer.status_code == 200
    return list(answer.json()["data"])


async def test_what_is_public_is_so_again_before_the_first_request(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "public.json"
    async with serve(folder, "root", public=PublicPrefixes(path)) as live:
        assert await listed(live) == []
        await cached(live, "sk-a")
        whole = (await post(live, "publish", tenant="acme"))["cached_tokens"]
        assert whole > 16
        assert await cached(live, "sk-b") == whole
        [public] = await listed(live)
        assert (public["num_tokens"], public["cached_tokens"]) == (whole, whole)
        assert HANDBOOK.startswith(public["preview"][:20])
        assert (await live.http.get("/v1/kv/published")).status_code in (401, 403)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    async with serve(folder, "root", public=PublicPrefixes(path)) as live:
        [public] = await listed(live)
        assert (public["num_tokens"], public["cached_tokens"]) == (whole, 0)
        assert await cached(live, "sk-a") == 0  # there is no tier: computed once, for all
        assert await cached(live, "sk-b") == whole
        assert await post(live, "unpublish") == {"unpublished": 1}
    assert json.loads(path.read_text())["prefixes"] == []


async def test_its_kv_comes_back_from_a_tier_for_everybody(folder: Path, tmp_path: Path) -> None:
    path, slow = tmp_path / "public.json", {"tiers": [f"disk:{tmp_path / 'kv'}:16MiB"]}
    async with serve(folder, "root", public=PublicPrefixes(path), **slow) as live:
        await cached(live, "sk-a")
        whole = (await post(live, "publish", tenant="acme"))["cached_tokens"]
    async with serve(folder, "root", public=PublicPrefixes(path), **slow) as live:
        body = {"prompt": HANDBOOK + "?", "max_tokens": 1, "tiers": {"wait_s": PATIENCE_S}}
        answer = await live.http.post("/v1/completions", json=body, headers={"x-api-key": "sk-b"})
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == whole


def not_saved(answer: httpx.Response, outcome: str) -> bool:
    error = answer.json()["error"]
    said = error["message"].startswith(f"{outcome}: ") and "(No such file or directory)" in error["message"]
    return said and (answer.status_code, error["code"], error["type"]) == (503, "not_saved", "server_error")


async def test_what_cannot_be_written_down_is_not_public(folder: Path, tmp_path: Path) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    text = {"prompt": HANDBOOK, "tenant": "acme"}
    async with serve(folder, "root", public=PublicPrefixes(home / "public.json")) as live:
        await cached(live, "sk-a")
        home.rename(away)
        assert not_saved(await live.http.post("/v1/kv/publish", json=text, headers=ADMIN), "Not published")
        assert await listed(live) == []
        assert await cached(live, "sk-b") == 0
        away.rename(home)
        await post(live, "publish", tenant="acme")
        assert len(await listed(live)) == 1
    async with serve(folder, "root", public=PublicPrefixes(home / "public.json")) as live:
        home.rename(away)
        assert not_saved(await live.http.post("/v1/kv/publish", json=text, headers=ADMIN), "Not published")
        assert len(await listed(live)) == 1  # as it was
        gone = await live.http.post("/v1/kv/unpublish", json=text, headers=ADMIN)
        assert not_saved(gone, "Unpublished, but only until the next start")
        assert await listed(live) == []


async def test_of_another_model_nothing_is_public(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "public.json"
    path.write_text(json.dumps({"model": "another", "prefixes": [[1, 2, 3] * 20]}))
    async with serve(folder, "root", public=PublicPrefixes(path)) as live:
        assert await listed(live) == []
    assert "another" in caplog.text


@pytest.mark.parametrize("text", ["{", "[5]", '{"model": "x", "prefixes": [["a"]]}', '{"model": 5, "prefixes": []}'])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "public.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="move it away"):
        PublicPrefixes(path)
    assert path.read_text() == text
