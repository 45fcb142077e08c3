"""OpenAI's API: the routes under /v1."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from pagoda.server.body import read_body
from pagoda.server.errors import HttpError, in_words_of
from pagoda.server.openai.chat import prepare_chat
from pagoda.server.openai.completions import prepare_completion
from pagoda.server.openai.respond import Served, respond
from pagoda.server.openai.responses import prepare_response, respond_response

__all__ = ["Served", "openai_router"]


def openai_router(served: Served, max_body_bytes: int) -> APIRouter:
    """The routes, without their prefix. They expect the tenant in `request.state.namespace`."""
    router = APIRouter()

    @router.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, max_body_bytes)
        job, wording = await asyncio.to_thread(prepare_chat, served, body, request.state.namespace)
        with in_words_of(max_tokens=job.limit_field, prompt="messages"):
            return await respond(request, served, job, wording)

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        body = await read_body(request, max_body_bytes)
        job, wording = await asyncio.to_thread(prepare_completion, served, body, request.state.namespace)
        return await respond(request, served, job, wording)

    @router.post("/responses")
    async def responses(request: Request) -> Response:
        body = await read_body(request, max_body_bytes)
        shelf = served.responses.shelf(request.state.namespace)
        job = await asyncio.to_thread(prepare_response, served, shelf, body, request.state.namespace)
        with in_words_of(max_tokens="max_output_tokens", prompt="input"):
            return await respond_response(request, served, shelf, job)

    @router.delete("/responses/{response_id}")
    async def delete_response(request: Request, response_id: str) -> Response:
        if not served.responses.shelf(request.state.namespace).drop(response_id):
            raise HttpError(404, "not_found", f"Response {response_id[:200]!r} is not kept here.")
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @router.get("/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(served, name) for name in served.names]})

    @router.get("/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONResponse(_model(served, served.resolve(name)))

    return router


def _model(served: Served, name: str) -> dict[str, Any]:
    parent = {} if served.adapter(name) is None else {"parent": served.model_names[0]}
    return {
        "id": name,
        "object": "model",
        "created": served.created,
        "owned_by": "pagoda",
        "max_model_len": served.engine.max_model_len,
        **parent,
    }
