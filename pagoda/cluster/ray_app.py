"""Pagoda on Ray Serve: an ingress that reads prompts, and replicas that are whole servers.

    HTTP ── Ingress: body ──> Call with its Prompt ── handle, PrefixRouter ──> Replica: the server's ASGI app in process
              ^                                                                  │
              └────────────────── status and headers, then pieces of the body ───┘

Ray's own RPC carries pickled objects and trusts whoever reaches it: keep it to loopback or a private network.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from pagoda.cluster.prompts import Prompt, read_prompt
from pagoda.cluster.ray_router import MAX_REPLICAS, PRESSURE, Call
from pagoda.cluster.relay import error_response
from pagoda.cluster.router import GENERATION, SESSION_HEADER
from pagoda.engine.pressure.ladder import Level
from pagoda.errors import RequestError
from pagoda.server.body import parse_object, read_body
from pagoda.server.errors import HttpError

if TYPE_CHECKING:
    from fastapi import FastAPI

ROUTER = "pagoda.cluster.ray_router:PrefixRouter"
SCALING = "pagoda.cluster.ray_router:scale_on_pressure"
MAX_BODY_BYTES = 8 << 20
MAX_ONGOING = 256  # requests of a replica; its engine queues what it has no room for

Served = tuple["FastAPI", Any]


def engine_app(settings: Mapping[str, Any]) -> Served:
    """A server of an engine with these settings of `Engine`, and the engine."""
    from pagoda.engine.aio import AsyncEngine
    from pagoda.engine.engine import Engine
    from pagoda.server.app import create_app

    engine = AsyncEngine(Engine(progress=False, **settings))
    return create_app(engine), engine


class Replica:
    """A server that is called instead of connected to.

    Args:
        make: where the function is that makes it, as `module:name`; called with `settings`.
    """

    def __init__(self, make: str, settings: Mapping[str, Any]) -> None:
        module, _, name = make.partition(":")
        self._app, self._engine = getattr(importlib.import_module(module), name)(settings)
        self._life = AsyncExitStack()
        self._starting = asyncio.Lock()
        self._is_up = False

    async def _up(self) -> None:
        async with self._starting:
            if not self._is_up:
                await self._life.enter_async_context(self._app.router.lifespan_context(self._app))
                self._is_up = True

    async def check_health(self) -> None:
        """Raise if the engine is gone. Ray starts another replica then."""
        await self._up()
        if not self._engine.is_healthy:
            raise RuntimeError("the engine stopped")

    def record_routing_stats(self) -> dict[str, Any]:
        """What the router sees of this replica."""
        stats = self._engine.stats()
        return {
            "takes_requests": stats.pressure.level < Level.HOLD and (self._engine.is_healthy or not self._is_up),
            "requests_running": stats.num_running,
            "requests_waiting": stats.num_waiting,
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaler sees: the share of blocks that are held, or 1 where requests are held back."""
        stats = self._engine.stats()
        is_full = stats.pressure.level >= Level.HOLD
        return {PRESSURE: 1.0 if is_full else stats.num_held_blocks / stats.num_blocks}

    async def serve(self, call: Call) -> AsyncIterator[tuple[int, list[tuple[bytes, bytes]]] | bytes]:
        """The answer: its status and headers, then its body in pieces. Closing it is the client leaving."""
        await self._up()
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        left = asyncio.Event()
        given = [{"type": "http.request", "body": call.body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if given:
                return given.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            messages.put_nowait(message)

        task = asyncio.create_task(self._app(_scope(call), receive, send))
        task.add_done_callback(lambda _: messages.put_nowait({"type": "end"}))
        try:
            while (message := await messages.get())["type"] != "end":
                if message["type"] == "http.response.start":
                    yield message["status"], list(message["headers"])
                elif message["body"]:
                    yield message["body"]
            await task
        finally:
            left.set()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def __del__(self) -> None:
        """Let the engine finish what it does."""
        await self._life.aclose()


def _scope(call: Call) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": list(call.headers),
        "client": None,
        "server": None,
    }


class Ingress:
    """Takes HTTP requests and passes them on with what their prompts share."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        """The replica's answer."""
        path = request.url.path
        try:
            prompt = Prompt(0)
            if request.method == "POST" and path in GENERATION:
                body = await read_body(request, MAX_BODY_BYTES)
                who = request.headers.get("x-api-key") or request.headers.get("authorization", "")
                prompt = read_prompt(parse_object(body), who.encode(), request.headers.get(SESSION_HEADER))
            else:
                body = await request.body()
        except (RequestError, RecursionError) as error:
            status, code = (error.status, error.code) if isinstance(error, HttpError) else (400, "invalid_value")
            is_anthropic = path.startswith("/v1/messages")
            said = "The body is nested too deeply." if isinstance(error, RecursionError) else str(error)
            return error_response(status, code, said, is_anthropic=is_anthropic)
        call = Call(request.method, path, request.url.query.encode(), tuple(request.headers.raw), body, prompt)
        pieces = self._replicas.serve.remote(call)
        status, headers = await anext(aiter(pieces))
        answer = StreamingResponse(pieces, status)
        answer.raw_headers = [(name, value) for name, value in headers if name.lower() != b"content-length"]
        return answer


def application(
    settings: Mapping[str, Any],
    *,
    policy: str = "prefix-aware",
    min_replicas: int = 1,
    max_replicas: int = 1,
    num_cpus: float = 1,
    make: str = "pagoda.cluster.ray_app:engine_app",
) -> Any:
    """A Ray Serve application: `serve.run(application({"model": "smollm2"}, max_replicas=4))`.

    Args:
        settings: of `Engine`, for every replica.
        policy: one of ROUTING_POLICIES.
        max_replicas: if more than `min_replicas`, Ray runs as many as the pressure asks for.
        num_cpus: that Ray reserves for a replica.
        make: see Replica.
    """
    router = RequestRouterConfig(
        request_router_class=ROUTER,
        request_router_kwargs={"policy": policy, "max_replicas": max(max_replicas, MAX_REPLICAS)},
        request_routing_stats_period_s=1.0,
    )
    options: dict[str, Any] = {"num_replicas": min_replicas}
    if max_replicas > min_replicas:
        scaling = AutoscalingPolicy(policy_function=SCALING)
        options = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=min_replicas, initial_replicas=min_replicas, max_replicas=max_replicas, policy=scaling
            )
        }
    replicas = serve.deployment(
        Replica,
        name="replicas",
        request_router_config=router,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options={"num_cpus": num_cpus},
        **options,
    ).bind(make, dict(settings))
    ingress = serve.deployment(Ingress, name="ingress", max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0})
    return ingress.bind(replicas)
