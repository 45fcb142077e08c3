"""What one tenant sees is the same whether another sent its prefix or not: bodies, headers, errors; and their judge."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.isolation import auc, judge

from .conftest import Live
from .test_cache_control import EXPLAIN, SYSTEM, folder, serve

__all__ = ["folder"]

CHAT = {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "How many?"}], "max_tokens": 2}
PROBES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", CHAT | {"temperature": 0}),
    ("/v1/chat/completions", CHAT | {"temperature": 0, "stream": True, "prompt_cache_options": {}}),
    ("/v1/completions", {"prompt": SYSTEM, "max_tokens": 2, "temperature": 0}),
    ("/v1/responses", {"input": SYSTEM, "max_output_tokens": 2, "temperature": 0}),
    (
        "/v1/messages",
        {
            "model": "tiny",
            "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
            "messages": [{"role": "user", "content": "How many?"}],
            "max_tokens": 2,
            "temperature": 0,
        },
    ),
    ("/v1/caches", {"system": SYSTEM, "ttl_s": 60}),
)
VARIES = re.compile(r'(chatcmpl|cmpl|resp|msg|cache|lease)[-_][0-9A-Za-z_-]{20,}|1[0-9]{9}(\.[0-9]+)?|_s":[0-9.]+')
FRESH = ("date", "content-length")  # the length is that of times, too


def told(answer: Any) -> tuple[int, str, dict[str, str]]:
    """All that an answer tells, but for fresh ids and times."""
    headers = {name: VARIES.sub("", value) for name, value in answer.headers.items() if name not in FRESH}
    return answer.status_code, VARIES.sub("", answer.text), headers


async def probe(live: Live, key: str) -> list[Any]:
    headers = {"x-api-key": key, **EXPLAIN}
    answers = [told(await live.http.post(path, json=body, headers=headers)) for path, body in PROBES]
    for path in ("/v1/kv/leases", "/v1/kv/tree", "/v1/caches", "/v1/usage", "/v1/models"):
        answers.append(told(await live.http.get(path, headers=headers)))
    return answers


async def test_answers_do_not_tell_what_another_tenant_sent(folder: Path) -> None:
    seen = []
    for sent in (True, False):
        async with serve(folder, kv_memory="4MiB") as live:
            if sent:
                await probe(live, "sk-a")
            seen.append(await probe(live, "sk-b"))
    for one, other in zip(*seen, strict=True):
        assert one[0] == 200
        assert one == other


async def test_names_of_others_are_as_good_as_made_up(folder: Path) -> None:
    async with serve(folder) as live:
        a, b = {"x-api-key": "sk-a"}, {"x-api-key": "sk-b"}
        cache = (await live.http.post("/v1/caches", json={"system": SYSTEM}, headers=a)).json()["id"]
        ask = {"input": "x", "max_output_tokens": 1}
        response = (await live.http.post("/v1/responses", json=ask, headers=a)).json()
        lease = (await live.http.get("/v1/kv/leases", headers=a)).json()["data"][0]["id"]
        for real, fake, path in (
            (cache, "cache-" + "0" * 32, "/v1/caches/{}"),
            (response["id"], "resp_" + "0" * 32, "/v1/kv/explain/{}"),
        ):
            theirs, nobodys = [await live.http.get(path.format(name), headers=b) for name in (real, fake)]
            assert theirs.status_code == nobodys.status_code == 404
            assert theirs.text == nobodys.text.replace(fake, real)
        ended = await live.http.delete(f"/v1/kv/leases/{lease}", headers=b)
        assert ended.status_code == 404
        body = {"input": "y", "max_output_tokens": 1, "previous_response_id": response["id"]}
        assert (await live.http.post("/v1/responses", json=body, headers=b)).status_code == 404


def test_the_judge_sees_a_leak_and_no_ghost() -> None:
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat([True, False], 500))
    ttft = np.exp(rng.normal(0, 0.3, 1000)) * 0.05
    nothing = judge("b", np.column_stack([ttft, rng.integers(0, 2, 1000)]), labels, rng)
    assert abs(nothing.auc - 0.5) < 0.06
    assert nothing.auc_low < 0.5 < nothing.auc_high
    faster = judge("b", np.column_stack([ttft * np.where(labels, 0.5, 1.0), np.zeros(1000)]), labels, rng)
    assert faster.auc > 0.9
    counted = judge("b", np.column_stack([ttft, np.where(labels, 64, 0)]), labels, rng)
    assert counted.auc > 0.99


def test_auc_counts_ties_half() -> None:
    labels = np.array([True, True, False, False])
    assert auc(np.array([2.0, 2.0, 1.0, 1.0]), labels) == 1
    assert auc(np.array([1.0, 1.0, 1.0, 1.0]), labels) == 0.5
    assert auc(np.array([1.0, 3.0, 2.0, 3.0]), labels) == pytest.approx((0 + 0 + 1 + 0.5) / 4)
