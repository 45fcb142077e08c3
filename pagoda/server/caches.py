"""/v1/caches: prefixes that are computed once, kept for a stated time, and used by name from any conversation.

    POST   /caches        compute a prefix without generating anything, and lease it; 409 with the reason if that fails
    GET    /caches        the tenant's caches; without API keys all callers are one, and are not told ids and names
    GET    /caches/{id}
    PATCH  /caches/{id}   another end
    DELETE /caches/{id}

A cache is a lease with a name, and its content: requests with `cached_content` are rendered as if that stood first in
them, so they hit what is leased and get the answer that they would get had they sent it all. Gemini's API has such
caches; the difference is that here the lease is refused, not missed, when there is no room.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from pagoda.engine.outputs import RequestOutput
from pagoda.engine.params import LeaseSpec, SamplingParams
from pagoda.errors import InvalidRequest, LeaseRefused, Overloaded, PagodaError, RequestAborted
from pagoda.server.auth import is_admin
from pagoda.server.backend import CacheAdmin, Scope
from pagoda.server.body import parse_object, read_body
from pagoda.server.disconnect import until_disconnect
from pagoda.server.errors import HttpError, in_words_of
from pagoda.server.faults import typed
from pagoda.server.ids import id_headers, name_answer
from pagoda.server.named_caches import NamedCache, new_cache_id
from pagoda.server.openai.respond import Served
from pagoda.server.prefix import Fields, PrefixFields, read_prefix, tokens_of

DEFAULT_TTL_S = 3600.0
MAX_TTL_S = 30 * 24 * 3600.0
WARM_UP = SamplingParams(max_tokens=0)
logger = logging.getLogger(__name__)

Seconds = Annotated[float, Field(gt=0, le=MAX_TTL_S, strict=False)]
UnixTime = Annotated[float, Field(strict=False)]


class TimeFields(Fields):
    """When a cache ends."""

    ttl_s: Seconds | None = None
    expires_at: UnixTime | None = None

    def seconds(self) -> float | None:
        """From now; None if nothing is said.

        Raises:
            InvalidRequest: both are given, or the time is past or too far.
        """
        if self.ttl_s is not None and self.expires_at is not None:
            raise InvalidRequest("give ttl_s or expires_at, and not both", param="ttl_s")
        if self.expires_at is None:
            return self.ttl_s
        seconds = self.expires_at - time.time()
        if not 0 < seconds <= MAX_TTL_S:
            raise InvalidRequest(f"expires_at must be within {MAX_TTL_S:.0f} seconds from now", param="expires_at")
        return seconds


class CreateFields(PrefixFields, TimeFields):
    """The body of POST /v1/caches."""

    model: str | None = None
    display_name: Annotated[str, Field(max_length=512)] | None = None


def cache_router(served: Served, admin_key: str | None, max_body_bytes: int) -> APIRouter:
    """The routes, without their prefix. They expect the tenant in `request.state.namespace`."""
    router = APIRouter()
    engine, caches = served.engine, served.caches

    async def refresh() -> None:
        """Forget caches whose lease somebody ended."""
        caches.keep_only(await engine.manage(lambda cache: cache.lease_names()))

    @router.post("/caches")
    async def create(request: Request) -> Response:
        body = await read_body(request, max_body_bytes)
        cache, tokens = await asyncio.to_thread(_prepare, served, body, request.state.namespace)
        await refresh()
        caches.check_room(cache)
        with in_words_of(prompt="messages" if cache.prompt is None else "prompt"):
            output = await _warm_up(request, served, cache, tokens)
        cache.held_tokens = output.leases[0].num_tokens
        try:
            caches.add(cache)
            await caches.save_for_client("Not cached")
        except Exception:
            caches.drop(cache.namespace, cache.id)
            await engine.manage(partial(_end, cache))
            raise
        usage = {"prompt_tokens": len(tokens), "cached_tokens": output.usage.num_hit_tokens}
        return JSONResponse({**_report(cache), "usage": usage}, headers=id_headers(cache.id))

    @router.get("/caches")
    async def all_of(request: Request) -> Response:
        await refresh()
        data = [_report(cache) for cache in caches.all_of(request.state.namespace)]
        if not request.state.namespace and not is_admin(request, admin_key):
            for each in data:  # who knows a cache's id may use and delete it: that is who made it
                del each["id"], each["display_name"]
        return JSONResponse({"object": "list", "data": data})

    @router.get("/caches/{cache_id}")
    async def one(request: Request, cache_id: str) -> Response:
        await refresh()
        return JSONResponse(_report(caches.get(request.state.namespace, cache_id)))

    @router.patch("/caches/{cache_id}")
    async def change(request: Request, cache_id: str) -> Response:
        seconds = typed(TimeFields, parse_object(await read_body(request, max_body_bytes))).seconds()
        if seconds is None:
            raise InvalidRequest("give ttl_s or expires_at", param="ttl_s")
        namespace = request.state.namespace
        await refresh()
        cache = caches.get(namespace, cache_id)
        before, cache.expires_at = cache.expires_at, time.time() + seconds
        try:
            await caches.save_for_client("Not changed")
        except HttpError:
            cache.expires_at = before
            raise
        await engine.manage(lambda admin: admin.postpone(namespace, cache_id, seconds))
        return JSONResponse(_report(cache))

    @router.delete("/caches/{cache_id}")
    async def delete(request: Request, cache_id: str) -> Response:
        namespace = request.state.namespace
        cache = caches.get(namespace, cache_id)
        caches.drop(namespace, cache_id)
        try:
            await caches.save_for_client("Not deleted")
        except HttpError:
            caches.add(cache)
            raise
        await engine.manage(lambda admin: admin.end_named(namespace, cache_id))
        return JSONResponse({"id": cache_id, "object": "cache", "deleted": True})

    return router


def _prepare(served: Served, body: bytes, namespace: str) -> tuple[NamedCache, list[int]]:
    """The cache that a body asks for, nothing of it held yet, and its tokens."""
    fields = typed(CreateFields, parse_object(body))
    model = served.resolve(fields.model)
    seconds = fields.seconds()
    prefix = read_prefix(fields, served.engine.tokenizer)
    cache = NamedCache(
        id=new_cache_id(),
        namespace=namespace,
        model=model,
        display_name=fields.display_name,
        cache_salt=fields.cache_salt,
        prompt=prefix.prompt,
        messages=prefix.messages,
        tools=prefix.tools,
        num_tokens=len(prefix.tokens),
        expires_at=time.time() + (DEFAULT_TTL_S if seconds is None else seconds),
    )
    return cache, prefix.tokens


async def _warm_up(request: Request, served: Served, cache: NamedCache, tokens: list[int]) -> RequestOutput:
    """Compute a cache's prefix and lease it; nothing stays leased if that fails or the client leaves.

    Raises:
        HttpError: 409, the lease is refused; told before anything is computed, where that can be known.
    """
    engine = served.engine
    scope = Scope(cache.namespace, cache.cache_salt)
    wish = LeaseSpec(len(tokens), _seconds_left(cache), cache.id)
    name_answer(request, cache.id)
    adapter = served.adapter(cache.model)
    stream = served.stream(request, tokens, WARM_UP, request_id=cache.id, scope=scope, leases=[wish], adapter=adapter)
    try:
        await engine.manage(lambda admin: admin.check_room(tokens, scope))
        return await until_disconnect(request.receive, _leased(stream))
    except LeaseRefused as error:
        raise HttpError(409, "lease_refused", f"Not cached: {error}.") from None
    except RequestAborted:
        await engine.manage(partial(_end, cache))
        raise


async def _leased(stream: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    """The end of a stream that generates nothing and asks for one lease.

    Raises:
        LeaseRefused: it was not granted.
        RequestAborted: the server stops.
    """
    output = [output async for output in stream][-1]
    if not output.leases:
        raise RequestAborted("The request was aborted: the server is shutting down.")
    if output.leases[0].refused is not None:
        raise LeaseRefused(output.leases[0].refused)
    return output


def _seconds_left(cache: NamedCache) -> float:
    """How long to lease it: a moment, if its time ended while it was being prepared."""
    return max(0.001, cache.expires_at - time.time())


async def revive(served: Served) -> None:
    """Lease the caches of an earlier run again, one after the other: from tiers, or computed anew.

    What can no longer be held, or is for an adapter that is gone, is forgotten and logged.
    """
    for cache in served.caches.unheld():
        try:
            while cache in served.caches.unheld() and (wait_s := await _revive(served, cache)):
                await asyncio.sleep(wait_s)
        except RequestAborted:
            return  # the file still has it for the next start
        except PagodaError as error:
            logger.warning("the cache %s of tenant %r is forgotten: %s", cache.id, cache.namespace, error)
            served.caches.drop(cache.namespace, cache.id)
    try:
        await asyncio.to_thread(served.caches.save)
    except OSError as error:
        logger.warning("the file of named caches could not be written: %s", error)


async def _revive(served: Served, cache: NamedCache) -> float:
    """Lease a cache again; for how many seconds to wait if that is not to be asked now, else 0.

    Raises:
        PagodaError: it cannot be leased.
    """
    scope = Scope(cache.namespace, cache.cache_salt)
    adapter = served.adapter(served.resolve(cache.model))
    tokens = await asyncio.to_thread(tokens_of, cache.prompt, cache.messages, cache.tools, served.engine.tokenizer)
    wish = LeaseSpec(len(tokens), _seconds_left(cache), cache.id)
    stream = served.engine.stream(tokens, WARM_UP, request_id=cache.id, scope=scope, leases=[wish], adapter=adapter)
    try:
        output = await _leased(stream)
    except Overloaded as error:
        return max(1.0, error.retry_after_s)
    if cache in served.caches.unheld():
        cache.held_tokens, cache.is_held = output.leases[0].num_tokens, True
    else:  # deleted meanwhile, or purged
        await served.engine.manage(partial(_end, cache))
    return 0.0


def _end(cache: NamedCache, admin: CacheAdmin) -> None:
    admin.end_named(cache.namespace, cache.id)


def _report(cache: NamedCache) -> dict[str, Any]:
    return {
        "id": cache.id,
        "object": "cache",
        "model": cache.model,
        "display_name": cache.display_name,
        "created_at": round(cache.created_at, 3),
        "expires_at": round(cache.expires_at, 3),
        "num_tokens": cache.num_tokens,
        "held_tokens": cache.held_tokens,
    }
