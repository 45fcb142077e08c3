"""The router: one address in front of replicas, each an OpenAI- or Anthropic-compatible server.

    client ── request ──> read its prompt ──> ask a replica which blocks that is, if any tells block events
                               │
                           Placement: the replica that answers first ──> Relay ──> its answer, piece by piece
                               ^                                          │ it failed, and nothing was sent yet:
    Watch: /health, events ────┘                                          └ another replica

What only all of them can tell is asked of all (merge.py). The router holds no state that is not rebuilt: replicas
own caches, leases and stored responses. Headers that clients may send: `X-Session-Id` names a conversation, which then
stays where it is; `X-Pagoda-Replica: N` asks for a replica by number, for what only one has. Every answer says in
`X-Pagoda-Replica` who gave it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pagoda.cluster.fleet import Fleet
from pagoda.cluster.gather import Gatherer
from pagoda.cluster.index import FleetIndex
from pagoda.cluster.merge import merge_for
from pagoda.cluster.metrics import RouterMetrics
from pagoda.cluster.placement import Placed, Placement
from pagoda.cluster.prompts import Prompt, read_prompt
from pagoda.cluster.relay import REPLICA_HEADER, Relayed, begin, error_response
from pagoda.cluster.routing import make_routing
from pagoda.cluster.watch import INTERVAL_S, Watch
from pagoda.errors import ConfigError, NoReplica, RequestAborted
from pagoda.server.body import parse_object, read_body
from pagoda.server.disconnect import until_disconnect
from pagoda.server.errors import CLIENT_GONE, HttpError
from pagoda.server.ids import ANTHROPIC_HEADER, OPENAI_HEADER

logger = logging.getLogger(__name__)

GENERATION = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"))
CACHES = "/v1/caches"
REFUSALS = frozenset((429, 503, 529))  # not now: another replica may have room
_REFUSAL_HEADERS = ("content-type", "retry-after", OPENAI_HEADER, ANTHROPIC_HEADER)
SESSION_HEADER = "x-session-id"
MAX_BODY_BYTES = 8 << 20
MAX_IN_FLIGHT = 4096
READ_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Settings of a router.

    Attributes:
        policy: one of ROUTING_POLICIES.
        api_key: what clients must send; their own key is passed on to replicas, which check it, when None.
        backend_key: the key that replicas get instead of the client's.
        token: the cluster's, which replicas ask for; clients never see it.
        max_body_bytes: longer bodies are refused with 413.
        read_timeout_s: the longest silence of a replica that is answering.
        health_interval_s: between two looks at a replica.

    Raises:
        ConfigError: a value is out of range.
    """

    policy: str = "prefix-aware"
    api_key: str | None = None
    backend_key: str | None = None
    token: str | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    read_timeout_s: float = READ_TIMEOUT_S
    health_interval_s: float = INTERVAL_S

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "read_timeout_s", "health_interval_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")


class Router:
    """Routes requests to replicas. `app` is the ASGI application; it watches replicas while it runs.

    Args:
        urls: the replicas' addresses, such as `http://127.0.0.1:8001`.
        transport: in place of the network, for tests.

    Raises:
        ConfigError: a URL is not one of HTTP, or comes twice.
    """

    def __init__(
        self,
        urls: Sequence[str],
        config: RouterConfig = RouterConfig(),
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._config = config
        self._fleet = Fleet(
            urls,
            token=config.token,
            backend_key=config.backend_key,
            read_timeout_s=config.read_timeout_s,
            transport=transport,
        )
        count, urls = len(self._fleet), self._fleet.urls
        self.placement = Placement(count, make_routing(config.policy, count), FleetIndex(count))
        self.metrics = RouterMetrics(self.placement, urls)
        self._watch = Watch(
            urls, self._fleet.client, self.placement, token=config.token, interval_s=config.health_interval_s
        )
        self._gatherer = Gatherer(self._fleet, self.placement, self._failed)
        self._num_in_flight = 0
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/{path:path}", self._serve, methods=methods),
            ],
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._watch.run())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self._fleet.close()

    async def _health(self, request: Request) -> Response:
        placement = self.placement
        tells = set(placement.index.tells)
        replicas = [
            {
                "url": url,
                "up": placement.is_up(number),
                "load_tokens": int(placement.load(number)),
                "kv_events": number in tells,
            }
            for number, url in enumerate(self._fleet.urls)
        ]
        is_up = any(replica["up"] for replica in replicas)
        status = "ok" if is_up else "no replica is up"
        return JSONResponse({"status": status, "replicas": replicas}, 200 if is_up else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def _serve(self, request: Request) -> Response:
        is_anthropic = request.url.path.startswith("/v1/messages")
        try:
            if self._num_in_flight >= MAX_IN_FLIGHT:
                raise HttpError(503, "overloaded", f"{MAX_IN_FLIGHT} requests are under way; try again shortly.")
            self._check_key(request)
            return await self._route(request, is_anthropic)
        except HttpError as error:
            status, code, message = error.status, error.code, str(error)
        except RecursionError:  # a body that was read may still be too deep to be looked through
            status, code, message = 400, "invalid_json", "The body is nested too deeply."
        except NoReplica:
            status, code, message = 503, "no_replica", "No replica can answer now; try again shortly."
        except RequestAborted:
            return Response(status_code=CLIENT_GONE)
        return error_response(status, code, message, is_anthropic=is_anthropic)

    def _check_key(self, request: Request) -> None:
        if self._config.api_key is not None:
            given = _key(request)
            if not hmac.compare_digest(given.encode(), self._config.api_key.encode()):
                raise HttpError(401, "invalid_api_key", "The API key is not known to this router.")

    async def _route(self, request: Request, is_anthropic: bool) -> Response:
        if request.method == "POST" and request.url.path in GENERATION:
            body = await read_body(request, self._config.max_body_bytes)
            fields = parse_object(body)
            who = _key(request).encode()
            prompt = read_prompt(fields, who, request.headers.get(SESSION_HEADER))
        else:  # nothing to compute
            body, fields, prompt = await _any_body(request, self._config.max_body_bytes), {}, Prompt(0)
        pinned, merge = self._pinned(request, fields), merge_for(request.method, request.url.path)
        if pinned is None and merge is not None:
            work = self._gatherer.answer(request, body, merge)
        else:
            work = self._answer(request, body, prompt, pinned, is_anthropic)
        return await until_disconnect(request.receive, work)

    def _pinned(self, request: Request, fields: dict[str, Any]) -> int | None:
        """The one replica that may answer, if only one may.

        Raises:
            HttpError: 400, it is no replica's number.
            NoReplica: it is down.
        """
        number: int | None = None
        if (asked := request.headers.get(REPLICA_HEADER)) is not None:
            if not (asked.isdecimal() and len(asked) < 10 and int(asked) < len(self._fleet)):
                message = f"{REPLICA_HEADER} must be below {len(self._fleet)}, the number of replicas."
                raise HttpError(400, "invalid_value", message, param=REPLICA_HEADER)
            number = int(asked)
        else:
            known = (self.placement.session(name) for name in _kept(request.url.path, fields))
            number = next((each for each in known if each is not None), None)
        if number is not None and not self.placement.is_up(number):
            raise NoReplica
        return number

    async def _answer(
        self, request: Request, body: bytes, prompt: Prompt, pinned: int | None, is_anthropic: bool
    ) -> Response:
        """Ask one replica after the other until one answers.

        Raises:
            NoReplica: none did.
        """
        started = time.perf_counter()
        self._num_in_flight += 1
        tried: set[int] = set()
        refusal: Response | None = None
        begun = False
        try:
            prompt = await self._with_blocks(request, body, prompt) if pinned is None else prompt
            while True:
                try:
                    placed = self._choose(prompt, pinned, tried)
                except NoReplica:
                    if refusal is not None:
                        return refusal
                    raise
                tried.add(placed.replica)
                answer = await self._ask(request, body, placed, is_anthropic)
                if isinstance(answer, Relayed):
                    begun = True
                    self.metrics.first_byte.observe(time.perf_counter() - started)
                    return answer
                self.metrics.retries.labels(placed.replica).inc()
                refusal = answer or refusal
        finally:
            if not begun:
                self._num_in_flight -= 1

    def _choose(self, prompt: Prompt, pinned: int | None, tried: set[int]) -> Placed:
        if pinned is not None:
            if tried:
                raise NoReplica
            return self.placement.put(pinned, prompt)
        with self.metrics.decision.time():
            placed = self.placement.choose(prompt, tried)
        if not tried:
            self.metrics.prompt_tokens.inc(prompt.num_tokens)
            self.metrics.known_tokens.inc(placed.num_known)
        return placed

    async def _ask(self, request: Request, body: bytes, placed: Placed, is_anthropic: bool) -> Response | None:
        """The answer of a replica that has begun; a plain one if it takes no requests now, None if it failed."""
        number = placed.replica
        answer: httpx.Response | None = None
        begun = False
        try:
            answer = await self._fleet.begin(number, request, body)
            pieces, first = await begin(answer)
            if answer.status_code in REFUSALS:
                kept = {name: answer.headers[name] for name in _REFUSAL_HEADERS if name in answer.headers}
                return Response(first, answer.status_code, kept)
            begun = True
        except httpx.HTTPError as error:
            self._failed(number, error)
            return None
        finally:
            if not begun:
                self.placement.end(placed)
                if answer is not None:
                    await answer.aclose()
        self.placement.answers(placed)
        self.metrics.requests.labels(number, answer.status_code).inc()
        makes = request.url.path in ("/v1/responses", CACHES) and answer.is_success
        if makes and (name := answer.headers.get(OPENAI_HEADER)):
            self.placement.remember(_owned(name), number)

        def ended(is_broken: bool) -> None:
            self._num_in_flight -= 1
            self.placement.end(placed)
            if is_broken:
                self.metrics.broken.labels(number).inc()
                self._watch.suspect(number)

        return Relayed(answer, pieces, first, replica=number, is_anthropic=is_anthropic, ended=ended)

    def _failed(self, number: int, error: httpx.HTTPError) -> None:
        logger.warning("replica %d failed: %s", number, str(error) or type(error).__name__)
        self._watch.suspect(number, refused=isinstance(error, httpx.ConnectError))

    async def _with_blocks(self, request: Request, body: bytes, prompt: Prompt) -> Prompt:
        """The prompt with the names of its blocks, which a replica that tells events is asked for."""
        index, placement = self.placement.index, self.placement
        telling = [number for number in index.tells if placement.is_up(number)]
        if not telling or not prompt.chunks or self._config.policy != "prefix-aware":
            return prompt
        number = min(telling, key=placement.load)
        with suppress(httpx.HTTPError, ValueError, KeyError, TypeError, IndexError):
            return prompt.with_blocks(*await self._fleet.blocks(number, request, body))
        self.metrics.unnamed.inc()
        return prompt


def _key(request: Request) -> str:
    """The key that a client sent, as OpenAI's or Anthropic's clients send it; empty if there is none."""
    bearer = request.headers.get("authorization", "").partition(" ")[2].strip()
    return request.headers.get("x-api-key") or bearer


def _kept(path: str, fields: dict[str, Any]) -> Iterator[str]:
    """What a request needs that only the replica has which made it: a stored response, or a named cache."""
    names = fields.get("previous_response_id"), fields.get("cached_content"), path.removeprefix(f"{CACHES}/")
    return (_owned(name) for name in names if isinstance(name, str))


def _owned(name: str) -> str:
    """What a stored response or a named cache is called among sessions."""
    return f"kept {name}"


async def _any_body(request: Request, limit: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise HttpError(413, "request_too_large", f"The request body is longer than {limit} bytes.")
    return bytes(body)
