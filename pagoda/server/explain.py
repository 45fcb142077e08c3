"""`pagoda.explain` in responses, and /v1/kv/explain/{request id}: how much of a prompt hit, and why not more.

What is cached where a prompt diverged is another prompt's text. It is told to the tenant that owns both, and to the
operator. Without API keys all callers are one namespace and strangers to each other: then to the operator alone.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from pagoda.engine.outputs import Explanation, RequestOutput
from pagoda.server.auth import is_admin
from pagoda.server.backend import Backend, CacheAdmin, Tokenizer
from pagoda.server.errors import HttpError
from pagoda.server.leases import lease_report

HEADER = "x-pagoda-explain"


def wants_explanation(request: Request) -> bool:
    """Whether a request asks why it missed."""
    return request.headers.get(HEADER, "0") not in ("", "0", "false")


def explain_report(explanation: Explanation, tokenizer: Tokenizer, *, for_admin: bool = False) -> dict[str, Any]:
    """An explanation for its own tenant, with the texts around the first token that missed.

    What the whole pool held then, others' blocks with it, is for the operator.
    """

    def text(tokens: tuple[int, ...]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=False)

    report: dict[str, Any] = {
        "prompt_tokens": explanation.num_tokens,
        "hit_tokens": explanation.num_hit_tokens,
        "missed_at": explanation.missed_at,
        "reason": explanation.reason,
        "text_before": text(explanation.before),
        "text_asked": text(explanation.asked),
    }
    if explanation.num_blended_tokens:
        report["blended_tokens"] = explanation.num_blended_tokens
    if explanation.cached:
        report["text_cached"] = text(explanation.cached)
    if explanation.differs:
        report["differs"] = explanation.differs
    if explanation.restore is not None:
        report["tiers"] = asdict(explanation.restore)
    if (eviction := explanation.eviction) is not None:
        report["eviction"] = {
            "policy": eviction.policy,
            "seconds_ago": _age(eviction.at),
        }
        if for_admin:
            report["eviction"] |= {
                "evicted_blocks": eviction.num_evicted,
                "held_blocks": eviction.num_held,
                "leased_blocks": eviction.num_leased,
            }
        if eviction.lease_expired_at is not None:
            report["eviction"]["lease_expired_seconds_ago"] = _age(eviction.lease_expired_at)
    return report


def about_cache(output: RequestOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    """The `pagoda` object of an answer to one prompt: its leases, what kv_policy did, and why it missed if asked."""
    about: dict[str, Any] = {"leases": lease_report(output.leases)} if output.leases else {}
    if output.explanation is not None:
        about["explain"] = explain_report(output.explanation, tokenizer)
    if output.sparse is not None:
        about["kv_policy"] = asdict(output.sparse)
    return about


async def explained(
    stream: AsyncGenerator[RequestOutput, None], engine: Backend, request_id: str, namespace: str
) -> AsyncGenerator[RequestOutput, None]:
    """A request's stream, whose outputs carry why its prompt did not hit further."""
    explanation: Explanation | None = None
    async with aclosing(stream):
        async for output in stream:
            if explanation is None:
                explanation = await _explanation(engine, request_id, namespace)
            yield replace(output, explanation=explanation)


async def _explanation(
    engine: Backend, request_id: str, namespace: str, *, for_admin: bool = False
) -> Explanation | None:
    """A request's, without what others had cached if whoever asks may not see that."""

    def look(cache: CacheAdmin) -> Explanation | None:
        return cache.explanation(request_id, namespace)

    explanation = await engine.manage(look)
    if explanation is None or namespace or for_admin:
        return explanation
    return replace(explanation, cached=())


def _age(at: float) -> float:
    return round(time.monotonic() - at, 3)


def explain_router(engine: Backend, admin_key: str | None) -> APIRouter:
    """The route, without its prefix. It expects the tenant in `request.state.namespace`."""
    router = APIRouter()

    @router.get("/kv/explain/{request_id}")
    async def explain(request: Request, request_id: str, prompt: int = 0) -> Response:
        for_admin = is_admin(request, admin_key)

        async def find(*names: str) -> Explanation | None:
            for name in names:
                found = await _explanation(engine, name, request.state.namespace, for_admin=for_admin)
                if found is not None:
                    return found
            return None

        # Ids in answers name all of a request's prompts; the engine's name one.
        first = request_id, f"{request_id}-0"
        explanation = await (find(*first) if prompt == 0 else find(f"{request_id}-{prompt}"))
        if explanation is None:
            shown = repr(request_id[:200])
            if prompt != 0 and await find(*first) is not None:
                message = f"Request {shown} has no prompt {prompt}; they are counted from 0."
                raise HttpError(400, "invalid_value", message, param="prompt")
            raise HttpError(404, "not_found", f"Request {shown} is not among your last ones on this server.")
        report = explain_report(explanation, engine.tokenizer, for_admin=for_admin)
        return JSONResponse({"id": request_id, **report})

    return router
