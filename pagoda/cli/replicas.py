"""What `pagoda serve` does beyond one process: replicas behind a router, and block events for routers."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from pagoda.cli.banner import print_banner
from pagoda.cli.listening import LOOPBACK, address
from pagoda.errors import ConfigError

if TYPE_CHECKING:
    from pagoda.cli.listening import Routing
    from pagoda.cluster.publisher import Publisher
    from pagoda.engine.engine import Engine

EXTRA = "block events need the extra `cluster`: pip install 'pagoda-kv[cluster]'"


def has_events() -> bool:
    """Whether what block events are sent with is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("zmq", "msgspec"))


def publish_events(
    engine: Engine, endpoint: str, replay_endpoint: str, secret: str | None, token: str | None, *, with_tokens: bool
) -> Publisher:
    """Publish an engine's block events, from its first block on.

    Args:
        secret: names blocks; the cluster token does where there is none.

    Raises:
        ConfigError: the extra is not installed, or an address cannot be bound.
    """
    if not has_events():
        raise ConfigError(EXTRA)
    from pagoda.cluster.publisher import Publisher

    publisher = Publisher(endpoint, replay_endpoint, token=token)
    engine.tell_blocks(publisher.emit, secret or token or "", with_tokens=with_tokens)
    return publisher


def serve_replicas(
    count: int,
    host: str,
    port: int,
    routing: Routing,
    log_level: str,
    token: str | None,
    name: str,
    *,
    has_keys: bool,
) -> None:
    """Run this very command in `count` processes on loopback ports, behind a router on the address asked for."""
    from pagoda.cli.route import run_router
    from pagoda.cluster.local import LocalReplicas
    from pagoda.cluster.router import Router, RouterConfig
    from pagoda.server.sockets import bind

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    # The last of an option that comes twice counts.
    own = ["--host", LOOPBACK, "--replicas", "1"]
    if has_events():
        own += ["--kv-events", "tcp://127.0.0.1:*", "--kv-events-replay", "tcp://127.0.0.1:*"]
    else:
        console.print(f"Requests are routed by what was sent where: {EXTRA}")
    with bind(host, port) as sock:
        replicas = LocalReplicas(count, [sys.executable, "-m", "pagoda.cli", *sys.argv[1:], *own], token=token)
        router = Router(replicas.urls, RouterConfig(policy=str(routing), token=replicas.token))
        port = sock.getsockname()[1]
        about = {"Model": name, "Replicas": f"{count}, starting; {address(host, port)}/health tells when they are up"}
        print_banner(about, name, host, port, has_keys=has_keys)
        run_router(router, sock, log_level=log_level, replicas=replicas)
