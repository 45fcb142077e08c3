"""The FastAPI application: the engine's life, who may call, and the routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from pagoda import __version__
from pagoda.engine.params import DEFAULT_RATIO
from pagoda.server.access_log import AccessLog
from pagoda.server.admin import admin_router, lease_router
from pagoda.server.anthropic import anthropic_router
from pagoda.server.auth import ApiKeys, is_admin, key_name, require_admin
from pagoda.server.backend import Backend
from pagoda.server.caches import cache_router, revive
from pagoda.server.dashboard import Recent, overview_router, page_router
from pagoda.server.errors import HttpError, install_handlers
from pagoda.server.explain import explain_router
from pagoda.server.ledger import Account, Ledger
from pagoda.server.metrics import Metrics
from pagoda.server.named_caches import NamedCaches
from pagoda.server.next_turn import Prefiller
from pagoda.server.openai import Served, openai_router
from pagoda.server.passages import BlendDefaults
from pagoda.server.pressure import BodyBudget, PressureMiddleware
from pagoda.server.prices import Prices
from pagoda.server.public_prefixes import PublicPrefixes
from pagoda.server.tier_metrics import health_of
from pagoda.server.token import TokenGuard
from pagoda.server.tokenize import tokenize_router
from pagoda.server.usage import usage_router
from pagoda.server.weights import weights_router

if TYPE_CHECKING:
    from pagoda.server.tracing import Tracing  # needs an optional package

MAX_BODY_BYTES = 8 << 20
MAX_BODIES_BYTES = 128 << 20  # of all requests together that are not answered yet
SAVE_EVERY_S = 60.0
logger = logging.getLogger(__name__)


class Lifecycle:
    """Starts the engine, and stops it once, whoever asks first.

    Stopping must begin when the signal comes, not at the end of the application's lifespan: that waits for the very
    streams that stopping drains.
    """

    def __init__(self, engine: Backend, drain_s: float) -> None:
        self._engine = engine
        self._drain_s = drain_s
        self._stopping: asyncio.Task[None] | None = None

    @property
    def is_stopping(self) -> bool:
        """Whether requests are no longer admitted."""
        return self._stopping is not None

    async def start(self) -> None:
        """Start the engine."""
        await self._engine.start()

    def begin_stop(self) -> asyncio.Task[None]:
        """Admit nothing more and start draining; the task ends when the engine has stopped."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._engine.stop(self._drain_s))
        return self._stopping


def create_app(
    engine: Backend,
    *,
    api_keys: ApiKeys | None = None,
    admin_key: str | None = None,
    served_model_names: Sequence[str] = (),
    access_log: AccessLog | None = None,
    tracing: Tracing | None = None,
    prices: Prices = Prices(),
    ledger: Ledger | None = None,
    caches: NamedCaches | None = None,
    public: PublicPrefixes | None = None,
    prefill_next_turn: bool = False,
    kv_events: Mapping[str, int] | None = None,
    cluster_token: str | None = None,
    blend: BlendDefaults = BlendDefaults(DEFAULT_RATIO),
    max_body_bytes: int = MAX_BODY_BYTES,
    drain_s: float = 10.0,
) -> FastAPI:
    """The server of `engine`, which starts and stops with the application.

    Args:
        api_keys: who may call /v1, and as which tenant; without, everyone may and all share one namespace.
        admin_key: opens the operator's routes under /v1/kv; without, there are none.
        served_model_names: what clients may call the model, the first being shown; by default the engine's own name.
        prices: what tokens cost, for /v1/usage.
        ledger: where the tokens behind it are counted.
        caches: the named caches, and those of an earlier run, which are leased again in the background.
        public: which texts were public in an earlier run; they are again before the first request.
        prefill_next_turn: compute what a chat's next prompt will begin with as soon as the answer is there.
        kv_events: the ports where block events are, for /health to tell routers.
        cluster_token: if there is one, every request must have it: the server is a replica behind a router.
        blend: how passages are reused where a request does not say.
        access_log, tracing: are told of every request, and closed when the engine has stopped.
        max_body_bytes: longer bodies are refused with 413.
        drain_s: how long streams may go on after the server was told to stop.
    """
    lifecycle = Lifecycle(engine, drain_s)
    accounts, published = ledger or Ledger(), public or PublicPrefixes()
    bodies = BodyBudget(max(MAX_BODIES_BYTES, 2 * max_body_bytes))
    metrics = Metrics(engine, bodies)
    recent = Recent()
    listeners = [listener for listener in (access_log, tracing) if listener is not None]
    for observer in (metrics, recent, *listeners):
        engine.add_observer(observer)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await lifecycle.start()
        await published.restore(engine)
        saving = asyncio.create_task(_save_regularly(accounts))
        reviving = asyncio.create_task(revive(served))
        yield
        await lifecycle.begin_stop()
        saving.cancel()
        reviving.cancel()
        await _save(accounts)
        for listener in listeners:
            await asyncio.to_thread(listener.close)

    async def admit(request: Request) -> None:
        if lifecycle.is_stopping:
            raise HttpError(503, "shutting_down", "The server is shutting down.")
        key = request.headers.get("x-api-key")  # how Anthropic's clients send it
        authorization = f"Bearer {key}" if key else request.headers.get("authorization")
        tenant = request.state.namespace = "" if api_keys is None else api_keys.namespace(authorization)
        request.state.account = Account(tenant, "" if api_keys is None else key_name(authorization))

    async def admit_operator(request: Request) -> None:
        """The admin key alone will do."""
        if not is_admin(request, admin_key):
            return await admit(request)
        request.state.namespace, request.state.account = "", Account()

    # No OpenAPI page: bodies are read by hand, so it would list no fields. docs/api.md does.
    app = FastAPI(title="Pagoda", version=__version__, lifespan=lifespan, openapi_url=None)
    app.state.lifecycle = lifecycle
    install_handlers(app)
    app.add_middleware(PressureMiddleware, engine=engine, bodies=bodies)
    served = Served(
        engine,
        tuple(served_model_names) or (engine.model_name,),
        caches=caches or NamedCaches(),
        ledger=accounts,
        prefiller=Prefiller(engine) if prefill_next_turn else None,
        tracing=tracing,
        blend=blend,
    )
    for router in (
        openai_router(served, max_body_bytes),
        anthropic_router(served, max_body_bytes),
        cache_router(served, admin_key, max_body_bytes),
        explain_router(engine, admin_key),
    ):
        app.include_router(router, prefix="/v1", dependencies=[Depends(admit)])
    for router in (
        lease_router(engine, admin_key),
        usage_router(accounts, prices, admin_key),
        overview_router(served, recent, admin_key),
    ):
        app.include_router(router, prefix="/v1", dependencies=[Depends(admit_operator)])
    if admin_key is not None:
        app.include_router(admin_router(served, published, admin_key, max_body_bytes), prefix="/v1")
        only_admins = [Depends(require_admin(admin_key))]
        app.include_router(weights_router(served, max_body_bytes), prefix="/v1", dependencies=only_admins)
    app.include_router(tokenize_router(served, max_body_bytes), dependencies=[Depends(admit)])
    app.include_router(page_router())
    app.include_router(_operations_router(engine, metrics, admin_key, kv_events))
    if cluster_token is not None:
        app.add_middleware(TokenGuard, token=cluster_token)
    return app


async def _save_regularly(ledger: Ledger) -> None:
    while True:
        await asyncio.sleep(SAVE_EVERY_S)
        await _save(ledger)


async def _save(ledger: Ledger) -> None:
    try:
        await asyncio.to_thread(ledger.save, ledger.snapshot())
    except OSError as error:
        logger.warning("the usage file could not be written: %s", error)


def _operations_router(
    engine: Backend, metrics: Metrics, admin_key: str | None, kv_events: Mapping[str, int] | None
) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        stats = engine.stats()
        body = {
            "status": "ok" if engine.is_healthy else "engine stopped",
            "model": engine.model_name,
            "requests_running": stats.num_running,
            "requests_waiting": stats.num_waiting,
            "kv_blocks_free": stats.num_free_blocks,
            "kv_blocks_available": stats.num_free_blocks + stats.num_cached_blocks,
            "tiers": health_of(engine.tiers()),
            "kv_events": kv_events,
        }
        return JSONResponse(body, 200 if engine.is_healthy else 503)

    @router.get("/metrics")
    async def read_metrics(request: Request) -> Response:
        named = is_admin(request, admin_key) and engine.is_healthy
        tenants = await engine.manage(lambda cache: cache.usage()) if named else ()
        return Response(metrics.render(tenants), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    return router
