"""Options of commands that listen: where, for whom, and how they choose among replicas."""

from __future__ import annotations

import ipaddress
from enum import StrEnum
from functools import partial
from typing import Annotated

import typer

access_option = partial(typer.Option, rich_help_panel="Access")
key_option = partial(access_option, show_envvar=True)


class LogLevel(StrEnum):
    """What a server logs."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Routing(StrEnum):
    """How a replica is chosen."""

    PREFIX_AWARE = "prefix-aware"
    LEAST_LOAD = "least-load"
    ROUND_ROBIN = "round-robin"


Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")]
Logging = Annotated[LogLevel, typer.Option("--log-level", help="What to log.")]
RoutingOption = Annotated[Routing, typer.Option(help="How a replica is chosen.")]
ApiKey = Annotated[str | None, key_option(envvar="PAGODA_API_KEY", help="Key that clients must send.")]
ClusterToken = Annotated[
    str | None,
    key_option(
        envvar="PAGODA_CLUSTER_TOKEN",
        help="What a router and its replicas prove to each other that they belong together with.",
    ),
]

LOOPBACK = "127.0.0.1"
PORT = 8000


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address(host: str, port: int) -> str:
    """The URL of a server that listens there."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
