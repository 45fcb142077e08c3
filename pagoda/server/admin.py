"""/v1/kv: what the cache holds for whom, and what it retains.

    GET    /kv/leases        a tenant's own leases; everybody's with the admin key
    DELETE /kv/leases/{id}   end one, of one's own or with the admin key any
    GET    /kv               usage by tenant        ─┐
    POST   /kv/pin           keep a cached prefix    ├─ with the admin key only
    POST   /kv/clear         evict what nobody holds ┘

The admin key comes in the header `X-Admin-Key`; a server without one has no such routes.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pagoda.errors import InvalidRequest, LeaseRefused
from pagoda.server.backend import Backend, Scope
from pagoda.server.body import parse_object, read_body
from pagoda.server.errors import HttpError
from pagoda.server.openai.chat import normalize_messages
from pagoda.server.openai.schema import MAX_SALT_CHARS

ADMIN_HEADER = "x-admin-key"


class PinRequest(BaseModel):
    """What to pin: a raw prompt, or messages as the chat template renders them."""

    model_config = ConfigDict(strict=True, extra="forbid")

    prompt: str | None = None
    messages: list[Any] | None = None
    tenant: str = ""
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] = ""


def lease_router(engine: Backend, admin_key: str | None) -> APIRouter:
    """The routes for tenants, without their prefix. They expect the tenant in `request.state.namespace`."""
    router = APIRouter()

    def tenant_of(request: Request) -> str | None:
        return None if is_admin(request, admin_key) else request.state.namespace

    @router.get("/kv/leases")
    async def leases(request: Request) -> Response:
        tenant = tenant_of(request)
        found = await engine.manage(lambda cache: cache.leases(tenant))
        return JSONResponse({"object": "list", "data": [asdict(lease) for lease in found]})

    @router.delete("/kv/leases/{lease_id}")
    async def end_lease(request: Request, lease_id: str) -> Response:
        tenant = tenant_of(request)
        if not await engine.manage(lambda cache: cache.end_lease(lease_id, tenant)):
            raise HttpError(404, "not_found", f"There is no lease {lease_id} of yours.")
        return JSONResponse({"id": lease_id, "deleted": True})

    return router


def admin_router(engine: Backend, admin_key: str, max_body_bytes: int) -> APIRouter:
    """The routes for the operator, without their prefix."""

    router = APIRouter(dependencies=[Depends(require_admin(admin_key))])

    @router.get("/kv")
    async def usage() -> Response:
        tenants = await engine.manage(lambda cache: cache.usage())
        stats = engine.stats()
        blocks = {
            "total": stats.num_blocks,
            "free": stats.num_free_blocks,
            "held": stats.num_held_blocks,
            "cached": stats.num_cached_blocks,
            "leased": stats.num_leased_blocks,
            "lease_limit": stats.lease_limit_blocks,
        }
        return JSONResponse({"blocks": blocks, "tenants": [asdict(tenant) for tenant in tenants]})

    @router.post("/kv/pin")
    async def pin(request: Request) -> Response:
        body = await read_body(request, max_body_bytes)
        tokens, scope = await asyncio.to_thread(_prefix, engine, body)
        try:
            lease = await engine.manage(lambda cache: cache.pin(tokens, scope))
        except LeaseRefused as error:
            raise HttpError(409, "lease_refused", f"Not pinned: {error}.") from None
        return JSONResponse(asdict(lease))

    @router.post("/kv/clear")
    async def clear() -> Response:
        return JSONResponse({"freed_blocks": await engine.manage(lambda cache: cache.clear())})

    return router


def require_admin(admin_key: str) -> Callable[[Request], Awaitable[None]]:
    """A dependency that refuses whoever has not the admin key."""

    async def check(request: Request) -> None:
        if not is_admin(request, admin_key):
            raise HttpError(403, "admin_key_required", "Send the server's admin key in the header X-Admin-Key.")

    return check


def is_admin(request: Request, admin_key: str | None) -> bool:
    """Whether a request has the admin key."""
    given = request.headers.get(ADMIN_HEADER, "")
    return admin_key is not None and hmac.compare_digest(given.encode(), admin_key.encode())


def _prefix(engine: Backend, body: bytes) -> tuple[list[int], Scope]:
    try:
        request = PinRequest.model_validate(parse_object(body))
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise InvalidRequest(f"{fault['loc'][0]}: {fault['msg']}", param=str(fault["loc"][0])) from None
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("give prompt or messages, and not both", param="prompt")
    scope = Scope(request.tenant, request.cache_salt)
    if request.prompt is not None:
        return engine.tokenizer.encode(request.prompt), scope
    text = engine.tokenizer.render_chat(normalize_messages(request.messages or []), None, False)
    return engine.tokenizer.encode(text, add_special_tokens=False), scope
