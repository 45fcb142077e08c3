"""/v1/kv: what the cache holds for whom, and what it retains.

    GET    /kv/leases        a tenant's own leases; everybody's with the admin key; ids are not told to who has neither
    DELETE /kv/leases/{id}   end one, of one's own or with the admin key any
    GET    /kv/tree          the cached prefixes, with previews of their text: one's own, or with the admin key all;
                             without API keys and without the admin key no texts and no salts
    GET    /kv               usage by tenant                               ─┐
    POST   /kv/pin           keep a cached prefix                           │ with the admin key only
    POST   /kv/purge         forget a tenant, a prefix, or a request's      │
    POST   /kv/publish       let every tenant hit a prefix; /kv/unpublish   │
    GET    /kv/published     what every tenant may hit                      │
    POST   /kv/clear         evict what nobody holds                       ─┘

The admin key comes in the header `X-Admin-Key`; a server without one has no such routes.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse, Response

from pagoda.engine.admin import CacheAdmin, PrefixView, Purge
from pagoda.errors import InvalidRequest, LeaseRefused
from pagoda.server.auth import is_admin, require_admin
from pagoda.server.backend import Backend, BackendStats, Scope, Tokenizer
from pagoda.server.body import parse_object, read_body
from pagoda.server.errors import HttpError
from pagoda.server.faults import typed
from pagoda.server.openai.respond import Served
from pagoda.server.prefix import PrefixFields, read_prefix
from pagoda.server.public_prefixes import PublicPrefixes

MAX_PREFIXES = 10_000
_PURGE_WAIT_S = 10.0
_PURGE_GLANCE_S = 0.02
PREVIEW_TOKENS = 32


class PinFields(PrefixFields):
    """The body of POST /v1/kv/pin, publish and unpublish: whose prefix, and which."""

    tenant: str = ""


class PurgeFields(PrefixFields):
    """The body of POST /v1/kv/purge: a request's id, or a tenant, and perhaps a prefix of its."""

    tenant: str | None = None
    request_id: str | None = None


def lease_router(engine: Backend, admin_key: str | None) -> APIRouter:
    """The routes for tenants, without their prefix. They expect the tenant in `request.state.namespace`."""
    router = APIRouter()

    def tenant_of(request: Request) -> str | None:
        return None if is_admin(request, admin_key) else request.state.namespace

    @router.get("/kv/leases")
    async def leases(request: Request) -> Response:
        tenant = tenant_of(request)
        data = [asdict(lease) for lease in await engine.manage(lambda cache: cache.leases(tenant))]
        if tenant == "":  # everybody's: who knows a lease's id, or a cache's, which is its name, may end it
            for each in data:
                del each["id"], each["name"]
        return JSONResponse({"object": "list", "data": data})

    @router.get("/kv/tree")
    async def tree(
        request: Request, tenant: str | None = None, limit: Annotated[int, Query(ge=1, le=MAX_PREFIXES)] = 200
    ) -> Response:
        own = tenant_of(request)
        if own is not None and tenant not in (None, own):
            raise HttpError(403, "admin_key_required", "Others' prefixes are only shown with the admin key.")
        whose = tenant if own is None else own
        found = await engine.manage(lambda cache: cache.prefixes(whose, limit + 1))
        if own == "":
            data = [anonymous_report(each) for each in found[:limit]]
        else:
            data = await asyncio.to_thread(
                lambda: [prefix_report(each, _preview(each, engine.tokenizer)) for each in found[:limit]]
            )
        return JSONResponse({"object": "list", "data": data, "has_more": len(found) > limit})

    @router.delete("/kv/leases/{lease_id}")
    async def end_lease(request: Request, lease_id: str) -> Response:
        tenant = tenant_of(request)
        if not await engine.manage(lambda cache: cache.end_lease(lease_id, tenant)):
            raise HttpError(404, "not_found", f"There is no lease {lease_id} of yours.")
        return JSONResponse({"id": lease_id, "deleted": True})

    return router


def admin_router(served: Served, public: PublicPrefixes, admin_key: str, max_body_bytes: int) -> APIRouter:
    """The routes for the operator, without their prefix."""
    engine = served.engine

    router = APIRouter(dependencies=[Depends(require_admin(admin_key))])

    @router.get("/kv")
    async def usage() -> Response:
        tenants = await engine.manage(lambda cache: cache.usage())
        return JSONResponse({"blocks": pool_report(engine.stats()), "tenants": [asdict(tenant) for tenant in tenants]})

    async def tokens_of(fields: PrefixFields) -> list[int]:
        return (await asyncio.to_thread(read_prefix, fields, engine.tokenizer)).tokens

    async def prefix_in(request: Request) -> tuple[list[int], Scope]:
        fields = typed(PinFields, parse_object(await read_body(request, max_body_bytes)))
        return await tokens_of(fields), Scope(fields.tenant, fields.cache_salt)

    @router.post("/kv/pin")
    async def pin(request: Request) -> Response:
        tokens, scope = await prefix_in(request)
        try:
            lease = await engine.manage(lambda cache: cache.pin(tokens, scope))
        except LeaseRefused as error:
            raise HttpError(409, "lease_refused", f"Not pinned: {error}.") from None
        return JSONResponse(asdict(lease))

    @router.post("/kv/purge")
    async def purge(request: Request) -> Response:
        fields = typed(PurgeFields, parse_object(await read_body(request, max_body_bytes)))
        if (fields.request_id is None) == (fields.tenant is None):
            raise InvalidRequest("say what to purge: a tenant or a request_id, and not both", param="tenant")
        if fields.request_id is not None and not fields.names_all:
            raise InvalidRequest("a request_id names what is purged: give no prefix with it", param="request_id")
        if fields.names_all and fields.cache_salt:
            raise InvalidRequest("say which prefix to purge under this cache_salt", param="cache_salt")
        count: int | None
        tiers: dict[str, dict[str, int]] = {}
        if fields.request_id is not None:
            count = await engine.manage(partial(_purge_request, fields.request_id))
            if served.responses.drop_response(fields.request_id):
                count = count or 0
        elif fields.names_all:
            tenant = fields.tenant or ""
            is_known = tenant in ("", *await engine.manage(lambda cache: cache.tenants()))
            count, purge_of_tiers = await engine.manage(lambda cache: cache.purge_tenant(tenant))
            tiers = {} if purge_of_tiers is None else await _purged(purge_of_tiers)
            if not is_known and not any(any(counts.values()) for counts in tiers.values()):
                raise HttpError(404, "tenant_not_found", f"This server has not seen a tenant {tenant[:100]!r}.")
            served.responses.drop(tenant)
            for named in served.caches.all_of(tenant):
                served.caches.drop(named.namespace, named.id)
        else:
            tokens, scope = await tokens_of(fields), Scope(fields.tenant or "", fields.cache_salt)
            if not tokens:
                raise InvalidRequest(
                    "the prefix has no tokens: without one, all of the tenant is meant", param="prompt"
                )
            count = await engine.manage(lambda cache: cache.purge_prefix(tokens, scope))
        if count is None:
            raise HttpError(404, "not_found", "This request is not among the last ones on this server.")
        served.caches.keep_only(await engine.manage(lambda cache: cache.lease_names()))
        await served.caches.save_for_client("Purged, but a named cache may come back with the next start")
        return JSONResponse({"purged_blocks": count, **tiers})

    @router.post("/kv/publish")
    async def publish(request: Request) -> Response:
        tokens, scope = await prefix_in(request)
        try:
            num_cached = await public.publish(engine, tokens, scope)
        except LeaseRefused as error:
            raise HttpError(409, "publish_refused", f"Not published: {error}.") from None
        return JSONResponse({"prompt_tokens": len(tokens), "cached_tokens": num_cached})

    @router.post("/kv/unpublish")
    async def unpublish(request: Request) -> Response:
        tokens, _ = await prefix_in(request)
        return JSONResponse({"unpublished": await public.unpublish(engine, tokens)})

    @router.get("/kv/published")
    async def published() -> Response:
        found = await engine.manage(lambda cache: cache.published())
        heads = [each.tokens[:PREVIEW_TOKENS] for each in found]
        texts = await asyncio.to_thread(lambda: [engine.tokenizer.decode(head) for head in heads])
        data = [
            {"num_tokens": len(each.tokens), "cached_tokens": each.num_cached_tokens, "preview": text}
            for each, text in zip(found, texts, strict=True)
        ]
        return JSONResponse({"object": "list", "data": data})

    @router.post("/kv/clear")
    async def clear() -> Response:
        return JSONResponse({"freed_blocks": await engine.manage(lambda cache: cache.clear())})

    return router


async def _purged(purge: Purge) -> dict[str, dict[str, int]]:
    """What each tier had, and which have not done it in some seconds: counts, so that servers' answers can be added.

    The server goes on to try, and asks such a tier nothing for the tenant; once it ends, the purge has to be repeated.
    """
    deadline = time.monotonic() + _PURGE_WAIT_S
    while purge.waiting and time.monotonic() < deadline:
        await asyncio.sleep(_PURGE_GLANCE_S)
    late = {lane.name: 1 for lane in list(purge.waiting)}
    return {"purged_records": dict(purge.counts), "waiting_tiers": late}


def _purge_request(request_id: str, cache: CacheAdmin) -> int | None:
    """Purge a request of the engine, or all of an answer's: its id names all of its prompts."""
    names = [request_id, *cache.request_ids(f"{request_id}-")]
    counts = [count for name in names if (count := cache.purge_request(name)) is not None]
    return sum(counts) if counts else None


def pool_report(stats: BackendStats) -> dict[str, int]:
    """The blocks of the pool by state, for JSON."""
    return {
        "total": stats.num_blocks,
        "free": stats.num_free_blocks,
        "held": stats.num_held_blocks,
        "cached": stats.num_cached_blocks,
        "leased": stats.num_leased_blocks,
        "lease_limit": stats.lease_limit_blocks,
    }


def prefix_report(prefix: PrefixView, text: str | None) -> dict[str, Any]:
    """A run of the tree for JSON; `text` is its head's, if whoever asks may see it."""
    report: dict[str, Any] = {
        "tenant": prefix.scope.namespace,
        "cache_salt": prefix.scope.salt,
        "adapter": prefix.scope.adapter,
        "level": prefix.level,
        "start": prefix.start,
        "num_tokens": prefix.num_tokens,
        "num_blocks": prefix.num_blocks,
        "num_held": prefix.num_held,
        "num_hits": prefix.num_hits,
    }
    if text is not None:
        report["preview"] = text if prefix.num_tokens <= len(prefix.head) else text + "..."
    return report


def anonymous_report(prefix: PrefixView) -> dict[str, Any]:
    """A run of the tree without text and salt: its tenant is everybody, who keep apart by their salts."""
    report = prefix_report(prefix, None)
    del report["cache_salt"]
    return report


def _preview(prefix: PrefixView, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(prefix.head, skip_special_tokens=False)
