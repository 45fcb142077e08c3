"""`pagoda route`: one address in front of several servers."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pagoda.cli import listening
from pagoda.cli.banner import log_to_stderr
from pagoda.cli.config import Config
from pagoda.cli.listening import LogLevel, Routing

if TYPE_CHECKING:
    import socket

    from pagoda.cluster.local import LocalReplicas
    from pagoda.cluster.router import Router

_DRAIN_S = 10


def route(
    backend: Annotated[list[str], typer.Option(metavar="URL", help="A server, http://HOST:PORT; repeatable.")],
    host: listening.Host = listening.LOOPBACK,
    port: listening.Port = listening.PORT,
    routing: listening.RoutingOption = Routing.PREFIX_AWARE,
    api_key: Annotated[
        str | None,
        listening.key_option(
            envvar="PAGODA_API_KEY", help="Key that clients must send. \\[default: backends check their keys]"
        ),
    ] = None,
    backend_key: Annotated[
        str | None,
        listening.key_option(envvar="PAGODA_BACKEND_KEY", help="Key that backends get instead of the client's."),
    ] = None,
    cluster_token: listening.ClusterToken = None,
    max_body_mib: Annotated[float, typer.Option(help="Longer requests are refused.")] = 8.0,
    timeout: Annotated[float, typer.Option(help="Longest silence of a backend that is answering, in seconds.")] = 600.0,
    health_interval: Annotated[float, typer.Option(help="Seconds between two looks at a backend.")] = 1.0,
    log_level: listening.Logging = LogLevel.INFO,
    config: Config = None,
) -> None:
    """Route requests to the backend that can answer first: it has the prompt's prefix, or little to do."""
    from pagoda.cluster.router import Router, RouterConfig
    from pagoda.server.sockets import bind

    log_to_stderr(str(log_level))
    router = Router(
        backend,
        RouterConfig(
            policy=str(routing),
            api_key=api_key,
            backend_key=backend_key,
            token=cluster_token,
            max_body_bytes=int(max_body_mib * (1 << 20)),
            read_timeout_s=timeout,
            health_interval_s=health_interval,
        ),
    )
    with bind(host, port) as sock:
        url = listening.address(host, sock.getsockname()[1])
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"Routing {url} to {len(backend)} backends, {routing}; figures at {url}/metrics")
        if not listening.is_loopback(host) and backend_key is not None and api_key is None:
            console.print(f"[yellow]Anyone who can reach {host} may use the backends: set --api-key.[/]")
        run_router(router, sock, log_level=str(log_level))


def run_router(router: Router, sock: socket.socket, *, log_level: str, replicas: LocalReplicas | None = None) -> None:
    """Serve a router on a bound socket until a signal; with replicas, start them first and end them last."""
    import asyncio

    import uvicorn

    # Uvicorn handles these signals and then raises them again for whoever was there before: nobody.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    server = uvicorn.Server(
        uvicorn.Config(
            router.app,
            log_level=log_level,
            log_config=None,
            http="h11",
            lifespan="on",
            access_log=False,
            timeout_graceful_shutdown=_DRAIN_S,
        )
    )

    def stop(_: object) -> None:
        server.should_exit = True

    async def serve() -> None:
        if replicas is None:
            return await server.serve(sockets=[sock])
        running = asyncio.create_task(replicas.run())
        running.add_done_callback(stop)
        try:
            await server.serve(sockets=[sock])
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    asyncio.run(serve())
