"""Anthropic's API: /v1/messages, with prompt caching that keeps its promises.

    errors.py         failures in Anthropic's shape
    schema.py         JSON -> typed fields
    conversation.py   tools, system and turns -> the chat template's text; the same cut at any block
    breakpoints.py    cache_control -> leases on token prefixes; what became of them -> usage
    messages.py       a job through the engine, out as a message or as events

The key may come as `x-api-key` or as `Authorization: Bearer`.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from pagoda.server.anthropic.errors import AnthropicRoute
from pagoda.server.anthropic.messages import count_tokens, prepare_message, respond_message
from pagoda.server.body import read_body
from pagoda.server.errors import HttpError
from pagoda.server.openai import Served

__all__ = ["anthropic_router"]

_OTHER_METHODS = ["GET", "PUT", "PATCH", "DELETE"]


def anthropic_router(served: Served, max_body_bytes: int) -> APIRouter:
    """The routes, without their prefix. They expect the tenant in `request.state.namespace`."""
    router = APIRouter(route_class=AnthropicRoute)

    @router.post("/messages")
    async def messages(request: Request) -> Response:
        body = await read_body(request, max_body_bytes)
        job = await asyncio.to_thread(prepare_message, served, body, request.state.namespace)
        return await respond_message(request, served, job)

    @router.post("/messages/count_tokens")
    async def count(request: Request) -> Response:
        body = await read_body(request, max_body_bytes)
        counted = await asyncio.to_thread(count_tokens, served, body, request.state.namespace)
        return JSONResponse({"input_tokens": counted})

    @router.api_route("/messages/{rest:path}", methods=["POST", *_OTHER_METHODS])
    @router.api_route("/messages", methods=_OTHER_METHODS)
    async def unknown(request: Request) -> Response:
        raise HttpError(404, "not_found", f"Not Found: {request.method} {request.url.path}")

    return router
