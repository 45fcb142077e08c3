"""GET /v1/usage: what each key used, what that costs by the operator's table, and what the cache saved."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from pagoda.server.auth import is_admin
from pagoda.server.ledger import Counts, Ledger
from pagoda.server.prices import Prices


def usage_router(ledger: Ledger, prices: Prices, admin_key: str | None) -> APIRouter:
    """The route, without its prefix. It expects the tenant in `request.state.account`; the admin key shows all."""
    router = APIRouter()

    @router.get("/usage")
    async def usage(request: Request) -> Response:
        tenant = None if is_admin(request, admin_key) else request.state.account.tenant
        total, data = Counts(), []
        for account, counts in ledger.accounts(tenant):
            total.add(counts)
            data.append({**account._asdict(), **_report(counts, prices)})
        return JSONResponse(
            {
                "object": "list",
                "since": round(ledger.since, 3),
                "prices": asdict(prices),
                "data": data,
                "total": _report(total, prices),
            }
        )

    return router


def _report(counts: Counts, prices: Prices) -> dict[str, Any]:
    cost, without = prices.cost(counts), prices.cost_without_cache(counts)
    return {
        "requests": counts.requests,
        "prompt_tokens": counts.prompt,
        "read_tokens": counts.read,
        "written_tokens": counts.written_5m + counts.written_1h,
        "written_5m_tokens": counts.written_5m,
        "written_1h_tokens": counts.written_1h,
        "blended_tokens": counts.blended,
        "computed_tokens": counts.prompt - counts.read - counts.blended + counts.extra,
        "extra_computed_tokens": counts.extra,
        "generated_tokens": counts.generated,
        "cost": cost,
        "cost_without_cache": without,
        "saved": without - cost,
    }
