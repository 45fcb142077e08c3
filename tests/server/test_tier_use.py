"""The `tiers` object of a request: what it allows of the tiers below the device."""

from __future__ import annotations

from typing import Any

import pytest

from pagoda.engine.params import TierUse

from .conftest import Live

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("field", "use"),
    [
        (None, TierUse()),
        ({"max_restored_tokens": 0}, TierUse(max_restored_tokens=0)),
        ({"wait_s": 2.5, "store": False}, TierUse(wait_s=2.5, store=False)),
    ],
)
async def test_it_reaches_the_engine(live: Live, field: dict[str, Any] | None, use: TierUse) -> None:
    completion = {"model": "fake", "prompt": "Hi", "max_tokens": 1}
    for path, body in ("chat/completions", CHAT), ("messages", CHAT), ("completions", completion):
        assert (await live.http.post(f"/v1/{path}", json={**body, "tiers": field})).status_code == 200
        assert live.backend.seen[-1]["params"].tier_use == use


@pytest.mark.parametrize("field", [{"wait_s": -1.0}, {"max_restored_tokens": -1}, {"max_restored": 5}, "none"])
async def test_what_is_wrong_is_said(live: Live, field: Any) -> None:
    answer = await live.http.post("/v1/chat/completions", json={**CHAT, "tiers": field})
    assert answer.status_code == 400
    assert "tiers" in answer.json()["error"]["param"]
